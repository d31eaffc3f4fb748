"""TRL's rollout code in a thread of one rank of several: what it would gather from the others stays here, and is put
together later.

A thread must not take part in a collective: those of the training, in the main thread, would meet it. TRL gathers in
two places: by `accelerator.gather` the lengths, for metrics, and by accelerate's function `gather` the rewards.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from trl import GRPOTrainer
from trl.extras.profiling import profiling_decorator

from qlora_rl.errors import NotYetSupportedError

# What each mean is a mean of, where that is not the same number on every rank.
_WEIGHTS = {
    "completions/mean_terminated_length": lambda part: 1.0 - part.get("completions/clipped_ratio", 0.0),
    "completions/min_terminated_length": lambda part: 1.0 - part.get("completions/clipped_ratio", 0.0),
    "tools/failure_frequency": lambda part: part.get("tools/call_frequency", 0.0),
}


class LocalRollouts:
    """An accelerator that gathers nothing; all else is the trainer's."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator

    def gather(self, tensor: Any) -> Any:
        """This rank's."""
        return tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def rewards_of_one_rank() -> Any:
    """TRL's `_calculate_rewards`, a method, which returns the rewards of this rank's completions.

    It is TRL's code with a `gather` of its own: TRL has no seam there, and a copy would be ninety lines.

    Raises:
        NotYetSupportedError: another TRL, which gathers in another way.
    """
    of_trl = inspect.unwrap(GRPOTrainer._calculate_rewards)
    if "gather" not in of_trl.__code__.co_names:
        raise NotYetSupportedError(
            "rewarding rollouts in threads of several processes: this TRL's GRPOTrainer does not gather rewards as the "
            "supported ones do. Install a TRL that pyproject.toml names, or train in one process."
        )
    names = {**of_trl.__globals__, "gather": lambda rewards: rewards}
    alone = FunctionType(of_trl.__code__, names, of_trl.__name__, of_trl.__defaults__, of_trl.__closure__)
    alone.__kwdefaults__ = of_trl.__kwdefaults__
    return profiling_decorator(alone)


def merged_metrics(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """What TRL would have noted of a batch of which each rank has noted its part; the parts are of one size.

    Args:
        parts: of each rank the values under TRL's names, one for each batch.
    """
    found: dict[str, list[float]] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        told = [part for part in parts if name in part]
        found[name] = []
        for i in range(max(len(part[name]) for part in told)):
            columns = [{each: values[i] for each, values in part.items() if i < len(values)} for part in told]
            found[name].append(_merged(name, [column for column in columns if name in column]))
    return found


def _merged(name: str, columns: Sequence[Mapping[str, float]]) -> float:
    if len(columns) == 1:
        return columns[0][name]
    weight = _WEIGHTS.get(name, lambda part: 1.0)
    weights = [weight(column) for column in columns]
    values = [(column[name], w) for column, w in zip(columns, weights, strict=True) if w > 0]
    if not values:
        return 0.0
    if "/min_" in name:
        return min(value for value, _ in values)
    if "/max_" in name:
        return max(value for value, _ in values)
    return sum(value * w for value, w in values) / sum(w for _, w in values)
