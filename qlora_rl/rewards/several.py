"""Several rewards as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qlora_rl.errors import ConfigConflictError


class weighted:
    """A reward that is the weighted sum of others.

    ::

        reward_funcs = weighted((numeric_match, 1.0), (partial(format_match, pattern="<think>.+</think>.+"), 0.2))

    TRL sums a list of rewards by `GRPOConfig(reward_weights=...)` too, and logs each of them; this is for what takes
    one: an evaluation, a part of another sum. A part that says `None` of a completion is left out of its sum; where all
    do, so does the sum.

    Args:
        parts: pairs of a reward and its weight.

    Raises:
        ConfigConflictError: no parts, or one that is no such pair.
    """

    def __init__(self, *parts: tuple[Any, float]):
        wrong = [p for p in parts if not (isinstance(p, tuple) and len(p) == 2 and callable(p[0]))]
        if wrong or not parts:
            raise ConfigConflictError(
                f"combining rewards: {wrong[0]!r} is not a pair of a reward and its weight. Write "
                "weighted((numeric_match, 1.0), ...)."
                if wrong
                else "combining rewards: there are none. Write weighted((numeric_match, 1.0), ...)."
            )
        self.parts = tuple((reward, float(weight)) for reward, weight in parts)
        self.__name__ = "weighted"

    def __call__(self, *args: Any, **columns: Any) -> list[float | None]:
        """As TRL calls a reward: keyword lists in, B rewards out."""
        weights = [weight for _, weight in self.parts]
        rows = zip(*(reward(*args, **columns) for reward, _ in self.parts), strict=True)
        return [_sum(values, weights) for values in rows]


def _sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    known = [value * weight for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(known) if known else None
