"""`RankRPC`: where threads of several ranks ask the engine that one of them owns, each when it needs something; no rank
waits for another."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from qlora_rl import store_messages
from qlora_rl.contracts import CancellableEngine, Rollout, SamplingSpec
from qlora_rl.distributed import Ranks, portable
from qlora_rl.engine.images import Prompt
from qlora_rl.errors import AccessDeniedError, EngineClosedError, RankLostError, RolloutCancelledError

logger = logging.getLogger(__name__)

# Requests that the owner answers at once; an engine that knows nothing of threads is asked one after the other.
_AT_ONCE = 64
_PAUSE_S = (0.0005, 0.02)
_numbers = itertools.count()  # of the desks that this process has opened


class RankRPC:
    """Opened by all ranks. Questions and answers are letters in the store of all ranks; a thread on the owner's rank
    reads the questions.

    Args:
        engine: on the owner's rank; `None` on the others.
        ranks: all processes.
        group: neighbouring ranks that share the engine; the first one owns it.
        holds_two: the engine takes calls of several threads.
    """

    def __init__(self, engine: Any, ranks: Ranks, group: int, *, holds_two: bool):
        self._engine, self._ranks = engine, ranks
        self._first = ranks.rank - ranks.rank % group
        self._name = ranks.share(lambda: f"desk/{next(_numbers)}", "sharing an engine", group=group)
        self._store = ranks.channel()
        self._count, self._cancelled = itertools.count(1), 0
        self._asked = 0
        self._lock = threading.Lock()
        self._alone: Any = contextlib.nullcontext() if holds_two else threading.RLock()
        self._ends = threading.Event()
        self._listener: threading.Thread | None = None
        if engine is not None:
            others = range(self._first + 1, self._first + group)
            self._executor = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="qlora-rl-desk")
            self._listener = threading.Thread(target=self._listen, args=(others,), daemon=True, name="qlora-rl-desk")
            self._listener.start()

    def alone(self) -> Any:
        """A block in which an engine that knows nothing of threads answers nobody else; on the owner's rank."""
        return self._alone

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, version: int | None) -> Rollout:
        """See `RolloutEngine.generate`; from any thread of any rank.

        Raises:
            RolloutCancelledError: another thread has called `cancel`. EngineClosedError: the owner has closed its
                engine. RankLostError: rank 0, which holds the store, is gone. And what the engine raises.
        """
        if self._engine is not None:
            return self._generate(prompts, sampling, version)
        asked = pickle.dumps(
            (list(prompts), sampling, version)
        )  # before it has a number: the owner waits for each of them
        with self._lock:
            number = next(self._count)
            self._asked = number
        key = f"{self._name}/{self._ranks.rank}/{number}"
        with self._reaching():
            store_messages.put(self._store, f"{key}/asked", asked)
        pause = _PAUSE_S[0]
        while not self._is_answered(key):
            if pause == _PAUSE_S[1] and self._is_closed():
                raise EngineClosedError(
                    f"generating: rank {self._first} has closed the engine. Leave its trainer's block on all ranks "
                    "together."
                )
            if number <= self._cancelled:
                raise RolloutCancelledError("generating: the call was cancelled, because the run ends.")
            if self._ends.is_set():
                raise EngineClosedError("generating: the engine was closed. Make a new trainer.")
            time.sleep(pause)
            pause = min(_PAUSE_S[1], 1.5 * pause)
        with self._reaching():
            rollout, error = pickle.loads(store_messages.read(self._store, f"{key}/answer"))
            store_messages.drop(self._store, f"{key}/answer")
        if error is not None:
            raise error
        return rollout

    def cancel(self) -> None:
        """Have the calls of this rank end soon, and on the owner's those of all, with `RolloutCancelledError`."""
        self._cancelled = self._asked
        if isinstance(self._engine, CancellableEngine):
            self._engine.cancel()

    def close(self) -> None:
        """Answer nobody any more; harmless when repeated."""
        self._ends.set()
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.join()
            self._executor.shutdown(wait=False, cancel_futures=True)
            with contextlib.suppress(RuntimeError, OSError):  # the store went with rank 0
                store_messages.put(self._store, f"{self._name}/closed", b"")

    def _generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, version: int | None) -> Rollout:
        with self._alone:
            if version is None:
                return self._engine.generate(prompts, sampling)
            return self._engine.generate(prompts, sampling, version=version)

    def _is_answered(self, key: str) -> bool:
        with self._reaching():
            return store_messages.is_there(self._store, f"{key}/answer")

    def _is_closed(self) -> bool:
        with self._reaching():
            return store_messages.is_there(self._store, f"{self._name}/closed")

    def _listen(self, others: Sequence[int]) -> None:
        expected, pause = dict.fromkeys(others, 1), _PAUSE_S[0]
        with contextlib.suppress(RuntimeError, OSError):  # the store went with rank 0
            while not self._ends.wait(pause):
                pause = min(_PAUSE_S[1], 1.5 * pause)
                for rank, number in expected.items():
                    key = f"{self._name}/{rank}/{number}"
                    if store_messages.is_there(self._store, f"{key}/asked"):
                        try:
                            asked = pickle.loads(store_messages.read(self._store, f"{key}/asked"))
                        except AccessDeniedError as forged:
                            logger.error("%s", forged)
                            store_messages.drop(self._store, f"{key}/asked")
                            continue
                        store_messages.drop(self._store, f"{key}/asked")
                        expected[rank], pause = number + 1, _PAUSE_S[0]
                        self._executor.submit(self._answer, key, asked)

    def _answer(self, key: str, asked: tuple[Any, Any, Any]) -> None:
        rollout, error = None, None
        try:
            rollout = self._generate(*asked)
        except Exception as raised:
            error = portable(raised, self._ranks.rank)
        with contextlib.suppress(RuntimeError, OSError):
            store_messages.put(self._store, f"{key}/answer", pickle.dumps((rollout, error)))

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as torn:
            error = RankLostError(
                f"asking the engine of rank {self._first}: the connection is torn ({torn}). What that rank has said "
                "last stands in the launcher's output; start the run again with existing_run='resume'."
            )
            error.ranks = (self._first,)
            raise error from torn
