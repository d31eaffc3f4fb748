"""`Ranks`: the processes of one training, and what they must agree on. torch and the standard library only.

Tensors are sent by torch.distributed, as accelerate has set it up. Messages between the ranks (an outcome, or an
exception) are sent through a separate key-value store on rank 0: a rank that waits there learns at once that another
one has failed, and why, and a rank whose torch collective was aborted can look up the cause. Every wait has a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import pickle
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from qlora_rl import store_messages
from qlora_rl.errors import AccessDeniedError, RankLostError

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Seconds between two signs of life; without any for so long a rank counts as gone, and for so long one is looked for
# whose connections were torn.
BEAT_S, SILENT_S, TORN_S = 0.5, 60.0, 5.0
_KNOWN = "is_known_to_all_ranks"
_TORN = ("gloo", "nccl", "connection closed", "connection reset", "timed out", "socket", "broken pipe")


class Terminated(SystemExit):
    """The launcher ends this process (SIGTERM), usually because another rank has failed."""


class Ranks:
    """All processes of one training; with a single process all methods return at once.

    Args:
        rank: of this process.
        size: number of processes.
        store: `torch.distributed.TCPStore` that all of them see; `None` for one process.
        limit_s: longest wait for the others.

    Attributes:
        is_first: it alone writes the run directory, and owns what is there once.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None, limit_s: float = 1800.0):
        self.rank, self.size, self.limit_s = rank, size, limit_s
        self.is_first = rank == 0
        self._store = store
        # Numbers of blocks with one outcome, of words within one, and of reported failures: a training after a failed
        # one counts again.
        self._blocks, self._count, self._told = 0, 0, 0
        self._failed: dict[int, BaseException] = {}
        self._heard: dict[int, int] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._gone: set[int] = set()
        self._ends = threading.Event()
        self._watcher: threading.Thread | None = None
        if size > 1:
            # A client of its own: a beat must not wait for a value that is on its way.
            self._watcher = threading.Thread(
                target=self._watch, args=(store.clone(),), daemon=True, name="qlora-rl-ranks"
            )
            self._watcher.start()
            atexit.register(self.close)  # a thread inside the store must not outlive the interpreter

    # --- saying and hearing -----------------------------------------------------------------------------------------

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Every rank's value, in the order of the ranks; called by all.

        Args:
            value: can be pickled.
            doing: for the message, such as "pushing the adapter".

        Raises:
            RankLostError: a rank is gone, or did not come within the limit. Or what another rank has failed with.
        """
        return [value] if self.size == 1 else self._exchange(value, None, doing)

    def share(self, make: Callable[[], T], doing: str, *, group: int = 0) -> T:
        """What rank 0 makes, on all of them; or the exception that it raised. Only rank 0 calls `make`.

        Args:
            group: of so many neighbouring ranks each, the first one makes it, for these; what it raises is raised on
                all ranks.
        """
        if self.size == 1:
            return make()
        first = self.rank - self.rank % (group or self.size)
        made, error = None, None
        if self.rank == first:
            try:
                made = make()
            except Exception as raised:
                _raise_known(raised)
                error = raised
        return self._exchange(made, error, doing)[first]

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Raise on all ranks what the first of them has failed with; called by all, with `None` where nothing is
        wrong."""
        if self.size > 1:
            self._exchange(None, error, doing)
        elif error is not None:
            raise error

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """A block that all ranks enter: it succeeds on all of them, or raises the same on all."""
        error = None
        try:
            yield
        except Exception as raised:
            if self.size == 1:
                raise
            _raise_known(raised)
            error = raised
        self.agree(error, doing)

    def in_turn(self, make: Callable[[], T], doing: str) -> T:
        """What each rank makes; the first of each machine before the others, which find what it has left on the
        disk."""
        leads = int(os.environ.get("LOCAL_RANK", self.rank)) == 0
        made: Any = None
        for turn in (True, False) if self.size > 1 else (leads,):
            with self.together(doing):
                if leads == turn:
                    made = make()
        return made

    def barrier(self, doing: str) -> None:
        """Return when all ranks have come."""
        self.gather(None, doing)

    def _exchange(self, value: Any, error: BaseException | None, doing: str) -> list[Any]:
        """Every rank's value. An error of any rank, whatever the others have come for, is raised on all; of several the
        first rank's."""
        self._count += 1
        said = (doing, value, None if error is None else portable(error, self.rank))
        store_messages.put(self._store, f"{self._blocks}.{self._count}/{self.rank}", pickle.dumps(said))
        heard = [
            said if rank == self.rank else pickle.loads(self._take(f"{self._blocks}.{self._count}/{rank}", rank, doing))
            for rank in range(self.size)
        ]
        # A rank that has sent this word has received all of the one before it.
        store_messages.drop(self._store, f"{self._blocks}.{self._count - 2}/{self.rank}")
        for rank, (_, _, failure) in enumerate(heard):
            if failure is not None:
                raise mark(error if rank == self.rank else failure)
        others = {each for each, _, _ in heard} - {doing}
        if others:
            raise mark(self._lost(range(self.size), doing, f"not together: others are at {', '.join(sorted(others))}"))
        return [each for _, each, _ in heard]

    def channel(self) -> Any:
        """A connection of its own to the store of all ranks, for what threads say to each other (`store_messages`)."""
        return self._store.clone()

    def close(self) -> None:
        """Leave; the store ends with rank 0, which lets the others read their last messages first. Harmless when
        repeated."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        atexit.unregister(self.close)
        with contextlib.suppress(RuntimeError, OSError):
            self._store.set(f"bye/{self.rank}", "")
            others = [f"bye/{rank}" for rank in range(1, self.size) if rank not in self._gone]
            until = time.monotonic() + TORN_S
            while self.is_first and others and not self._store.check(others) and time.monotonic() < until:
                time.sleep(BEAT_S / 5)
        self._ends.set()
        watcher.join()

    # --- ending together --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def one_outcome(self, doing: str) -> Iterator[None]:
        """A block with torch collectives: what ends one rank ends all of them, with the same exception.

        Raises:
            RankLostError: a rank was killed; names it.
        """
        if self.size == 1:
            yield
            return
        # The ranks may have been torn apart in the block before this one, each after another word.
        self._blocks, self._count = self._blocks + 1, 0
        with _terminated_is_raised() as is_ending:
            try:
                yield
            except BaseException as error:
                is_ending.set()
                found = self._why(error, doing)
                self._failed.clear()
                if found is error:
                    raise
                raise found from error

    def _why(self, error: BaseException, doing: str) -> BaseException:
        """What has really ended this rank: its own error, which is sent to the others; or that of another one."""
        if is_marked(error):
            return error
        text = str(error).lower()
        is_torn = isinstance(error, Terminated) or (
            isinstance(error, RuntimeError | OSError) and any(word in text for word in _TORN)
        )
        if is_torn:
            # The last message before a kill may arrive a beat later.
            since, until = time.monotonic() + 2 * BEAT_S, time.monotonic() + TORN_S
            others = [rank for rank in range(self.size) if rank != self.rank]
            silent = others
            while not self._failed and silent and time.monotonic() < until:
                time.sleep(BEAT_S / 5)
                silent = [rank for rank in others if self._beats.get(rank, (b"", 0.0))[1] <= since]
            if not self._failed and silent:
                return mark(self._lost(silent, doing))
        if self._failed:
            return mark(self._failed[min(self._failed)])
        self._tell(error)
        return error

    def _tell(self, error: BaseException) -> None:
        """Send it to the others, and give them time to read it: the store ends with rank 0."""
        try:
            self._told += 1
            store_messages.put(
                self._store, f"failed/{self.rank}", pickle.dumps((self._told, portable(error, self.rank)))
            )
            until = time.monotonic() + TORN_S
            heard = [f"heard/{self.rank}.{self._told}/{rank}" for rank in range(self.size) if rank != self.rank]
            while time.monotonic() < until and not self._store.check(heard):
                time.sleep(BEAT_S / 5)
        except (RuntimeError, OSError) as torn:
            logger.debug("the other ranks could not be told: %s", torn)

    def _lost(self, ranks: Sequence[int], doing: str, why: str = "gone: killed, or out of memory") -> RankLostError:
        names = ", ".join(map(str, ranks))
        error = RankLostError(
            f"{doing}: rank {names} of {self.size} is {why}. What it has said last stands in the launcher's output; "
            "start the run again with existing_run='resume'."
        )
        error.ranks = tuple(ranks)
        self._gone |= {*ranks}
        return error

    def _watch(self, store: Any) -> None:
        """Give signs of life, and look for those of the others and for what they have failed with."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        count = 0
        try:
            while True:
                count += 1
                store.set(f"alive/{self.rank}", str(count))
                for rank in others:
                    if store.check([f"alive/{rank}"]):
                        beat = store.get(f"alive/{rank}")
                        if self._beats.get(rank, (b"", 0.0))[0] != beat:
                            self._beats[rank] = (beat, time.monotonic())
                    if rank not in self._failed and store_messages.is_there(store, f"failed/{rank}"):
                        try:
                            told, error = pickle.loads(store_messages.read(store, f"failed/{rank}"))
                        except AccessDeniedError as forged:
                            logger.error("%s", forged)
                            store_messages.drop(store, f"failed/{rank}")
                            continue
                        if told > self._heard.get(rank, 0):
                            self._heard[rank], self._failed[rank] = told, error
                            store.set(f"heard/{rank}.{told}/{self.rank}", "")
                if self._ends.wait(BEAT_S):
                    return
        except (RuntimeError, OSError):
            return  # the store went with rank 0, whose last sign of life stands

    # --- the store --------------------------------------------------------------------------------------------------

    def _take(self, key: str, rank: int, doing: str) -> bytes:
        began = time.monotonic()
        pause = 0.0005
        while not self._ask(key, doing):
            if self._failed:
                raise mark(self._failed[min(self._failed)])
            now = time.monotonic()
            if now - max(began, self._beats.get(rank, (b"", 0.0))[1]) > SILENT_S:
                raise mark(self._lost([rank], doing, f"silent for {SILENT_S:.0f} s"))
            if now - began > self.limit_s:
                raise mark(self._lost([rank], doing, f"not there after {self.limit_s:.0f} s (ddp_timeout)"))
            time.sleep(pause)
            pause = min(0.02, 1.5 * pause)
        return store_messages.read(self._store, key)

    def _ask(self, key: str, doing: str) -> bool:
        try:
            return store_messages.is_there(self._store, key)
        except (RuntimeError, OSError) as error:
            raise mark(self._failed.get(0) or self._lost([0], doing)) from error


ALONE = Ranks()


def ranks() -> Ranks:
    """Those of this process; `ALONE` before `join`, and where there is one."""
    return _joined() if _is_joined else ALONE


def join(limit_s: float) -> Ranks:
    """Join the other processes that torch.distributed knows; all of them must make the first call.

    Args:
        limit_s: longest wait for the others, once; TRL's `ddp_timeout`.
    """
    global _is_joined
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ALONE
    if torch.distributed.get_world_size() == 1:
        return ALONE
    _is_joined = True
    joined = _joined()
    joined.limit_s = float(limit_s)
    return joined


_is_joined = False


@functools.cache
def _joined() -> Ranks:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    told: list[Any] = [0, b""]  # port and secret
    store = None
    if rank == 0:
        store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        told = [store.port, secrets.token_bytes(32)]
    torch.distributed.broadcast_object_list(told, src=0)
    store_messages.sign_with(told[1])
    if store is None:
        store = torch.distributed.TCPStore(host, told[0], is_master=False, timeout=timedelta(seconds=SILENT_S))
    return Ranks(rank, size, store)


def portable(error: BaseException, rank: int) -> BaseException:
    """`error` in a form that can be sent, with a note that says where it was raised."""
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:  # a library's exception may hold anything, and fail in its own __reduce__ with anything
        copied = RuntimeError(f"{type(error).__name__}: {error}")
    copied.add_note(f"raised on rank {rank}")
    return copied


def mark(error: BaseException) -> BaseException:
    """All ranks raise it, or have received it."""
    setattr(error, _KNOWN, True)
    return error


def is_marked(error: BaseException) -> bool:
    """See `mark`."""
    return getattr(error, _KNOWN, False)


def _raise_known(error: BaseException) -> None:
    """Raise what all ranks know already, where `error` was raised from it: an engine says in its own words why weights
    broke off."""
    known: BaseException | None = error
    while known is not None and not is_marked(known):
        known = known.__cause__
    if known is not None:
        raise known


@contextlib.contextmanager
def _terminated_is_raised() -> Iterator[threading.Event]:
    """SIGTERM is an exception, so that what it was sent for can be said; unless the event is set: then it is being
    said."""
    is_ending = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield is_ending
        return

    def end(*_: Any) -> None:
        if not is_ending.is_set():  # once is enough; the launcher kills what does not end
            is_ending.set()
            raise Terminated(143)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield is_ending
    finally:
        signal.signal(signal.SIGTERM, before)
