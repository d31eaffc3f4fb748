"""`Replicas`: engines that stand for one another. Who is lost or stands still is dropped, looked for, verified, and
taken back."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from qlora_rl.engine.client import EngineClient
from qlora_rl.errors import (
    AccessDeniedError,
    BaseMismatchError,
    ConfigConflictError,
    EngineBrokenError,
    EngineClosedError,
    EngineUnsupportedError,
    QloraRLError,
)

logger = logging.getLogger(__name__)

# A replica that was dropped is looked for again after so many seconds, then less and less often.
_LOOK_AGAIN_S, _LOOK_SELDOM_S = 5.0, 60.0
_PROBE_S = 10.0
# One that is not done when the others have been for long: after so many times their time, and so many seconds.
_STRAGGLES_AFTER, _STRAGGLES_AFTER_S = 3.0, 30.0

# Another key, or somebody else at its URL: in one replica the others do without it.
_ESTRANGED = (AccessDeniedError, EngineUnsupportedError)
_GONE = (EngineBrokenError, BaseMismatchError, *_ESTRANGED)


@dataclass
class _Lost:
    """A replica that does not take part.

    Attributes:
        reason: why.
        next_look: when it is looked for again, by the monotonic clock.
        pause_s: between the looks.
    """

    reason: str
    next_look: float
    pause_s: float


class Replicas:
    """Who takes part, and questions to all of them at once. From any thread.

    Args:
        each: of them.
        wait_s: how long to wait for one when none is left, in seconds.
        `prove`: raises where one that is there again is not on the base, or does not hold what the others hold.

    Attributes:
        returns: how many were taken back.
        changing: held while one is taken back, and by who changes what all of them serve.
    """

    def __init__(self, each: Sequence[EngineClient], *, wait_s: float, prove: Callable[[EngineClient], None]):
        self.all, self.wait_s, self._prove = list(each), wait_s, prove
        self.returns = 0
        self.changing = threading.RLock()
        self.is_closed = False
        self._lost: dict[EngineClient, _Lost] = {}
        self._losing = threading.Lock()  # held where `_lost` changes
        self._left_alone: list[Future[Any]] = []  # of calls that were interrupted
        self._overdue: dict[
            EngineClient, list[Future[Any]]
        ] = {}  # asked of a replica that was dropped before it answered

    @property
    def live(self) -> list[EngineClient]:
        """Those that take part."""
        return [each for each in self.all if each not in self._lost]

    def takes_part(self, each: EngineClient) -> bool:
        """It was not dropped."""
        return each not in self._lost

    def ask_all(self, ask: Callable[[EngineClient], Any]) -> dict[EngineClient, Any]:
        """The answer of every one that takes part, in their order; there is one at least."""
        end = time.monotonic() + self.wait_s
        while True:
            if answers := self.ask(self.present(end), ask):
                return answers

    def ask(
        self,
        replicas: Sequence[EngineClient],
        ask: Callable[[EngineClient], Any],
        *,
        forgives: tuple[type[Exception], ...] = (),
        watches: bool = False,
    ) -> dict[EngineClient, Any]:
        """Ask at the same time. Who does not answer is dropped; a rejection is raised when all have answered.

        Args:
            replicas: whom.
            ask: what; in a thread for each.
            forgives: rejections that are returned as answers.
            watches: one that is still not done long after the others is dropped, too.
        """
        answers, faults = self._in_parallel(replicas, ask, watches=watches)
        answers |= {e: f for e, f in faults.items() if isinstance(f, forgives)}
        faults = {e: f for e, f in faults.items() if e not in answers}
        refusals = {e: f for e, f in faults.items() if not isinstance(f, _GONE)}
        if faults and all(isinstance(faults.get(e), _ESTRANGED) for e in replicas):  # then it is not the replica
            refusals = faults
        for each, fault in faults.items():
            if each not in refusals:
                self.drop(each, fault)
        for each, fault in refusals.items():
            if isinstance(fault, QloraRLError) and len(self.all) > 1:
                reasons = () if fault.reasons == (str(fault),) else fault.reasons
                raise type(fault)(f"{fault} (Said by {each.url}.)", reasons=reasons, module=fault.module) from fault
            raise fault
        return answers

    def _in_parallel(
        self, replicas: Sequence[EngineClient], ask: Callable[[EngineClient], Any], *, watches: bool
    ) -> tuple[dict[EngineClient, Any], dict[EngineClient, BaseException]]:
        """One thread for each; daemons, so that Ctrl-C need not wait for a long rollout."""
        self.wait_for_left_alone()
        if len(replicas) == 1:
            try:
                return {replicas[0]: ask(replicas[0])}, {}
            except Exception as error:
                return {}, {replicas[0]: error}
        asked = {each: _begun(ask, each) for each in replicas}
        try:
            late = self._watch(list(asked.values())) if watches else set()
            wait([future for future in asked.values() if future not in late])
        except BaseException:
            self._left_alone += [future for future in asked.values() if not future.done()]
            raise
        answers: dict[EngineClient, Any] = {}
        faults: dict[EngineClient, BaseException] = {}
        for each, future in asked.items():
            if future in late:
                self._overdue.setdefault(each, []).append(future)
                faults[each] = EngineBrokenError(
                    f"asking {each.url}: it was not done long after the others, which go on without it."
                )
            elif fault := future.exception():
                faults[each] = fault
            else:
                answers[each] = future.result()
        return answers, faults

    def _watch(self, futures: list[Future[Any]]) -> set[Future[Any]]:
        """Wait for all, but for those that take much longer than the slowest of the others; these."""
        started, pending, limit = time.monotonic(), set(futures), None
        while pending:
            left = None if limit is None else started + limit - time.monotonic()
            if left is not None and left <= 0:
                return pending
            done, pending = wait(pending, timeout=left, return_when=FIRST_COMPLETED)
            # A fault comes quickly, and says nothing of how long a rollout takes.
            if any(future.exception() is None for future in done):
                limit = max(_STRAGGLES_AFTER_S, _STRAGGLES_AFTER * (time.monotonic() - started))
        return set()

    def wait_for_left_alone(self) -> None:
        """What was asked in a call that was interrupted may still arrive."""
        limit = max(each.timeout_s + each.wait_s for each in self.all)
        if self._left_alone and wait(list(self._left_alone), timeout=limit).not_done:
            raise EngineBrokenError(
                f"asking {len(self.all)} replicas: a request that was interrupted has not ended within {limit:.0f} s. "
                "Make a new engine."
            )
        for future in list(self._left_alone):
            with contextlib.suppress(ValueError):  # another thread has
                self._left_alone.remove(future)

    def present(self, end: float) -> list[EngineClient]:
        """Those that take part, those that are back among them; waits until `end` when there is none.

        Raises:
            EngineBrokenError: nobody is back by then; gives the reason of each.
        """
        while True:
            if self.is_closed:
                raise EngineClosedError("using the engine: it was closed. Make a new one.")
            is_over = not self.live and time.monotonic() > end  # also where replicas come back, and fail again
            if not is_over:
                self._look_for_lost()
            if live := self.live:
                return live
            if is_over:
                reasons = [f"{each.url}: {lost.reason}" for each, lost in list(self._lost.items())]
                raise EngineBrokenError(
                    f"asking {len(self.all)} replicas: all stayed away for wait_s={self.wait_s:.0f} s; "
                    f"{'; '.join(reasons)} Start one of them again on the same base, or raise wait_s; the newest "
                    "version is pushed again by itself.",
                    reasons=reasons,
                )
            time.sleep(min(0.5, max(0.0, end - time.monotonic()) + 0.01))

    def drop(self, each: EngineClient, fault: BaseException) -> None:
        """It takes no part from now on."""
        with self._losing:
            self._lost[each] = _Lost(str(fault), time.monotonic() + _LOOK_AGAIN_S, _LOOK_AGAIN_S)
        logger.warning("%s is dropped, %d replicas are left: %s", each.url, len(self.live), fault)

    def _look_for_lost(self) -> None:
        due = [e for e, lost in list(self._lost.items()) if time.monotonic() >= lost.next_look or not self.live]
        # While others can work nobody waits for a thread that takes one back, or pushes.
        if not due or not self.changing.acquire(blocking=not self.live):
            return
        try:
            for each in due:
                if lost := self._lost.get(each):
                    self._take_back(each, lost)
        finally:
            self.changing.release()

    def _take_back(self, each: EngineClient, lost: _Lost) -> None:
        """If it is there, on the same base, and holds what the others hold."""
        started, reason, is_verified = time.monotonic(), lost.reason, False
        # A push to it that nobody waits for any more must not arrive behind the one that takes it back.
        is_busy = any(not future.done() for future in self._overdue.get(each, ()))
        try:
            # One that is generating has no time for a look, and is not silent.
            if not is_busy and each.is_there(_PROBE_S):
                self._prove(each)
                is_verified = True
        except QloraRLError as error:
            reason = str(error)
            if reason != lost.reason:
                logger.warning("%s is not taken back: %s", each.url, error)
        with self._losing:
            if self._lost.get(each) is not lost:  # dropped once more by another thread, after what was verified here
                return
            if not is_verified:
                pause = min(_LOOK_SELDOM_S, 2 * max(lost.pause_s, time.monotonic() - started))
                self._lost[each] = _Lost(reason, time.monotonic() + pause, pause)
                return
            del self._lost[each]
            self._overdue.pop(each, None)
            self.returns += 1
        logger.warning("%s is back: its base is verified and it holds version %d", each.url, each.version)


def _begun(ask: Callable[[EngineClient], Any], each: EngineClient) -> Future[Any]:
    """The answer, from a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            found = ask(each)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(found)

    threading.Thread(target=run, daemon=True, name="qlora-rl-replica").start()
    return future


def check_alike(replicas: Sequence[EngineClient]) -> None:
    """Reject replicas that cannot stand for one another.

    Raises:
        BaseMismatchError: another base than the first one's.
        ConfigConflictError: another dtype, or the same one twice.
    """
    first, *others = replicas
    for each in others:
        if each.base != first.base:
            raise BaseMismatchError(
                f"connecting to {len(replicas)} replicas: {each.url} holds base={each.base[:16]} != "
                f"base={first.base[:16]} of {first.url}. Start all of them on one base directory, or leave that one "
                "out."
            )
        mine, other = each.capabilities().adapter_dtype, first.capabilities().adapter_dtype
        if mine != other:
            raise ConfigConflictError(
                f"connecting to {len(replicas)} replicas: {each.url} serves adapters in {mine}, {first.url} in "
                f"{other}. Start all of them with one dtype."
            )
    starts: dict[str, EngineClient] = {}
    for each in replicas:
        twin = starts.setdefault(each.start, each)
        if twin is not each:
            raise ConfigConflictError(
                f"connecting to {len(replicas)} replicas: {each.url} and {twin.url} are one and the same. Name it once."
            )


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
