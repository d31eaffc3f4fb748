"""Starts of twice the rank (`adapter.start`) under a trainer: asked for early, begun when TRL has made the adapter,
kept up at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from qlora_rl.distributed import ranks
from qlora_rl.errors import NotYetSupportedError

if TYPE_CHECKING:
    from qlora_rl.adapter.initialization import Twice


def settle(model: Any, peft_config: Any) -> tuple[Any, Any]:
    """The config that TRL makes the adapter with, and what `keep_start` is given.

    Raises:
        AdapterRejectedError: the start needs what a trainer does not have.
        NotYetSupportedError: in several processes.
    """
    plain, wanted = peft_config, None
    if isinstance(getattr(peft_config, "init_lora_weights", True), str):
        from qlora_rl.adapter.initialization import apply_start

        plain, wanted = apply_start(peft_config)
    held = getattr(model, "qlora_start", None)
    if ranks().size > 1 and (wanted is not None or held is not None):
        word = held.kind if wanted is None else wanted.init_lora_weights
        raise NotYetSupportedError(
            f"reading the adapter: its start {word!r} keeps halves of it fixed, which is not done across "
            f"{ranks().size} processes. Train in one, or use init_lora_weights=True."
        )
    return plain, wanted


def keep_start(trainer: Any, wanted: Any = None) -> None:
    """Start the adapter that TRL has made, if it is not started yet, and keep its fixed half what it is.

    Args:
        trainer: of transformers; its model is not wrapped yet.
        wanted: of `settle`.
    """
    if wanted is not None:
        from qlora_rl.adapter.initialization import begin_twice

        begin_twice(trainer.model, wanted)
    if (twice := getattr(trainer.model, "qlora_start", None)) is not None:
        trainer.add_callback(_Keep(twice))


class _Keep(TrainerCallback):
    def __init__(self, twice: Twice):
        self._twice = twice

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._twice.take_over()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._twice.restore()
