"""`LinkedTrainer`: a mixin for TRL's trainers that generate through a link to an engine, ours or attached."""

from __future__ import annotations

from typing import Any

from qlora_rl.errors import RewardFunctionError
from qlora_rl.train.metrics.rewards import agree_on
from qlora_rl.train.rollouts.engine_link import Link
from qlora_rl.train.run import RunDirectory


class LinkedTrainer:
    """Comes before `MeasuredSteps` and TRL's class.

    Attributes:
        run: the run directory; `None` without one, and on other processes than the first.
    """

    run: RunDirectory | None = None
    _link: Link
    # Of reward functions, where several ranks must agree before one may raise.
    _failures: list[RewardFunctionError] | None = None

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, in which all ranks meet; then what a reward function has raised on one of them is raised on all."""
        rewards = super()._calculate_rewards(*args, **kwargs)
        agree_on(self._failures)
        return rewards

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # it is another policy now, though no step was made

    def _before_rollout(self, mode: str) -> None:
        if self._link.bridge.is_overtaken():
            self._last_loaded_step = -1
        self._link.bridge.begin(self.state.global_step, is_evaluation=mode == "eval")

    def _after_generation(self) -> None:
        self._link.bridge.rest()

    def _rollout_facts(self) -> dict[str, float]:
        return self._link.rollout_facts(self.run)
