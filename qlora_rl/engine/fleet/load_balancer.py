"""`LoadBalancer`: prompts shared out among replicas by the speed that was measured of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

Each = TypeVar("Each")  # hashable

# Of a new measurement in the speed that is kept.
_NEWNESS = 0.3
# Of the mean in every weight: where time does not depend on the share, speeds alone would keep any share that chance
# has made.
_EVENNESS = 0.1


class LoadBalancer:
    """Tokens per second of each replica, and what follows from them."""

    def __init__(self) -> None:
        self._speeds: dict[Any, float] = {}

    def note(self, each: Any, tokens: int, seconds: float) -> None:
        """A replica has generated `tokens` within `seconds`."""
        if tokens and seconds > 0:
            speed, before = tokens / seconds, self._speeds.get(each)
            self._speeds[each] = speed if before is None else _NEWNESS * speed + (1 - _NEWNESS) * before

    def forget(self, each: Any) -> None:
        """It was restarted, elsewhere perhaps."""
        self._speeds.pop(each, None)

    def speed(self, each: Any) -> float | None:
        """Tokens per second; `None` before the first measurement."""
        return self._speeds.get(each)

    def out(self, rows: Sequence[int], replicas: Sequence[Each]) -> dict[Each, list[int]]:
        """Neighbours stay together (they share prefixes); a replica that is twice as fast gets about twice the rows.

        Of equal ones nobody gets more than one row more than another. One that was not measured counts as the mean of
        the others.
        """
        known = [self._speeds[each] for each in replicas if each in self._speeds]
        mean = sum(known) / len(known) if known else 1.0
        weights = {e: (1 - _EVENNESS) * self._speeds.get(e, mean) + _EVENNESS * mean for e in replicas}
        chosen = list(replicas)
        if len(rows) < len(chosen):
            fastest = sorted(chosen, key=lambda each: -weights[each])[: len(rows)]
            chosen, weights = [each for each in chosen if each in fastest], dict.fromkeys(fastest, 1.0)
        whole, passed, bounds = sum(weights[each] for each in chosen), 0.0, [0]
        for each in chosen:
            passed += weights[each]
            bounds.append(round(passed * len(rows) / whole))
        shares = {each: list(rows[bounds[k] : bounds[k + 1]]) for k, each in enumerate(chosen)}
        return {each: share for each, share in shares.items() if share}
