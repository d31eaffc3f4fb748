"""Rollouts ahead of the training. `Prefetch`: its batches, read a few steps early, each once. `StalenessLimit`: when a
rollout may begin, and when a push must wait, so that none is older than it may be."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from qlora_rl.errors import RolloutCancelledError


@dataclass(frozen=True, eq=False)
class Batch:
    """A generation batch.

    Attributes:
        number: from 0, since the run began.
        rows: of the dataset, as the loader gave them.
        policy: number of the policy at which it is trained on, from 1: a new one wherever an optimizer step is between
            two batches.
        step: optimizer steps that are done when it is trained on.
        place: from 0, among the batches that are generated for this step.
        `beside`: most batches that a step has.
    """

    number: int
    rows: Any
    policy: int
    step: int = 0
    place: int = 0
    beside: int = 1

    def call(self, turn: int) -> int:
        """The number of a turn's call within the step: as GRPO without threads counts, where the step has one batch or
        each one turn."""
        return self.place + self.beside * turn


class Prefetch:
    """Reads what transformers' loop would read, in its order, over the ends of epochs.

    A loader gives every generation batch `generate_every` times, once for each time that it is trained on; the first of
    them is the one that is generated. What has been read and not been asked for is forgotten with this object: how far
    training has come is `global_step` alone, and a resumed run reads on from there.

    Args:
        loader: of the whole training; its length decides where epochs end. Without one, no epoch is begun early.
        accumulation: loader batches of an optimizer step.
        generate_every: loader batches of a generation batch.
        first_step: optimizer steps that an earlier run has done.
        last_step: optimizer steps after which training ends; for later ones nothing is begun.
        loaded: loader batches that the earlier run has trained on; the last of them may be in the middle of a
            generation batch.
        is_skipping: what the earlier run has trained on of its last epoch is left out.
    """

    def __init__(
        self,
        loader: Any,
        *,
        accumulation: int,
        generate_every: int,
        first_step: int,
        last_step: int,
        loaded: int = 0,
        is_skipping: bool = True,
    ):
        self._loader = loader
        self._accumulation, self._generate_every, self._last_step = accumulation, generate_every, last_step
        try:
            self._length: int | None = len(loader)
        except TypeError:
            self._length = None
        steps = None if self._length is None else -(-self._length // accumulation)
        self._epoch = 0 if steps is None else first_step // steps
        self._place = first_step * accumulation if steps is None else first_step % steps * accumulation
        if not is_skipping:
            self._place = 0
        self._step = first_step
        self._read: deque[tuple[Any, int]] = deque()  # loader batches that nobody has asked for yet, and their steps
        self._unseen: deque[Batch] = deque()  # generation batches that `begun` has not given out
        self._count = itertools.count(loaded)
        self._numbers = itertools.count(-(-loaded // generate_every))
        self._source: Iterator[Any] | None = None
        self._policy, self._policy_step = 0, -1
        self._sampled_in_step = 0
        self._asked = 0  # the policy of the newest batch that training has asked for
        self._is_over = False

    def take(self, epoch_iterator: Iterator[Any], count: int) -> list[Any]:
        """The next `count` loader batches, or fewer where the data ends.

        Args:
            epoch_iterator: transformers'; used unless its epoch was begun early.
        """
        if self._source is None or self._is_over:
            self._source, self._is_over = epoch_iterator, False
        while len(self._read) < count and self._pull():
            pass
        taken = [self._read.popleft() for _ in range(min(count, len(self._read)))]
        self._asked = max([self._asked, *(policy for _, policy in taken)])
        return [rows for rows, _ in taken]

    def begun(self, staleness: int) -> list[Batch]:
        """The generation batches that may begin now and have not been given out: up to `staleness` policies later than
        asked for."""
        # To the end of the last step that may begin, and no further: to begin an epoch takes a random number of
        # torch's.
        while (self._policy < self._asked + staleness or self._is_within_step()) and self._pull():
            pass
        found = []
        while self._unseen and self._unseen[0].policy <= self._asked + staleness:
            found.append(self._unseen.popleft())
        return found

    def _pull(self) -> bool:
        """Read one loader batch; false where there is none now."""
        if self._is_over or self._step >= self._last_step:
            return False
        try:
            rows = next(self._source)
        except StopIteration:
            if self._length is None:
                self._is_over = True  # the next epoch is transformers' to begin
                return False
            self._begin_epoch()
            try:
                rows = next(self._source)
            except StopIteration:
                self._is_over = True
                return False
        if next(self._count) % self._generate_every == 0:
            if self._step != self._policy_step:
                self._policy, self._policy_step, self._sampled_in_step = self._policy + 1, self._step, 0
            beside = -(-self._accumulation // self._generate_every)
            place, self._sampled_in_step = self._sampled_in_step, self._sampled_in_step + 1
            self._unseen.append(Batch(next(self._numbers), rows, self._policy, self._step, place, beside))
        self._read.append((rows, self._policy))
        self._place += 1
        if not self._is_within_step():
            self._step += 1
        return True

    def _is_within_step(self) -> bool:
        return self._place % self._accumulation != 0 and self._place != self._length

    def _begin_epoch(self) -> None:
        self._epoch, self._place = self._epoch + 1, 0
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(self._epoch)
        self._source = iter(self._loader)


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
