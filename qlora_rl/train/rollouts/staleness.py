"""`StalenessLimit`: when a rollout may begin, and when a push must wait, so that no rollout is older than it may be."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qlora_rl.errors import RolloutCancelledError


@dataclass(frozen=True, eq=False)
class Visit:
    """A rollout that has begun.

    Attributes:
        policy: number of the policy that was trained then.
        version: of the adapter that generates it.
    """

    policy: int
    version: int


class StalenessLimit:
    """Policies are numbered as they are trained on, from 1; a rollout is trained on at a policy that is known when it
    begins.

    Args:
        max_staleness: how many policies later than the one that sampled it a rollout may be trained on.
        version: asks the engine which version serves.
        holds_two: the engine goes on sampling with the version before the one that serves.
    """

    def __init__(self, max_staleness: int, version: Callable[[], int], *, holds_two: bool):
        self.max_staleness = max_staleness
        self.policy = 0
        self._version, self._holds_two = version, holds_two
        self._changed = threading.Condition()
        self._sampling: list[Visit] = []  # that need the engine now
        self._is_pushing = self.is_stopped = False

    def enter(self, trained_at: int) -> Visit:
        """Wait until a rollout that will be trained on at policy `trained_at` may begin; its version stays until it
        leaves.

        Raises:
            RolloutCancelledError: the run ends.
        """
        with self._changed:
            earliest = max(1, trained_at - self.max_staleness)
            self._changed.wait_for(lambda: self.is_stopped or (not self._is_pushing and self.policy >= earliest))
            self.reject_stopped()
            visit = Visit(self.policy, self._version())
            self._sampling.append(visit)
            return visit

    def leave(self, visit: Visit) -> None:
        """The rollout needs the engine no more; harmless when repeated."""
        with self._changed:
            if visit in self._sampling:
                self._sampling.remove(visit)
                self._changed.notify_all()

    @contextlib.contextmanager
    def pushing(self) -> Iterator[None]:
        """Wait until no rollout samples with a version that the push takes out of the engine; inside, none begins."""
        with self._changed:
            self._is_pushing = True
            try:
                self._changed.wait_for(lambda: not any(map(self._is_in_the_way, self._sampling)))
            except BaseException:
                self._end_push()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._end_push()

    def advance(self, policy: int) -> None:
        """Policy number `policy` is trained from now on, and is in the engine."""
        with self._changed:
            self.policy = policy
            self._changed.notify_all()

    def stop(self) -> None:
        """Nothing begins any more."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def reject_stopped(self) -> None:
        """Raise where the run ends."""
        if self.is_stopped:
            raise RolloutCancelledError("beginning a rollout: the run ends.")

    def _is_in_the_way(self, visit: Visit) -> bool:
        return not self._holds_two or visit.version != self._version()

    def _end_push(self) -> None:
        self._is_pushing = False
        self._changed.notify_all()
