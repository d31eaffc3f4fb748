"""Which of an engine's ranks has ended first: vLLM itself says only that its executor has failed."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# vLLM has noticed the end of a process; the thread here may not have had its turn yet.
_SOON_S = 1.0


class RankWatch:
    """Waits for the first of these processes that ends; the others are ended by vLLM then.

    Args:
        processes: of the ranks, in their order.
    """

    def __init__(self, processes: Sequence[Any]):
        self._ids = [process.pid for process in processes]
        self._first: int | None = None
        sentinels = [process.sentinel for process in processes]

        def wait() -> None:
            self._first = sentinels.index(multiprocessing.connection.wait(sentinels)[0])

        self._thread = threading.Thread(target=wait, name="qlora-rl-rank-watch", daemon=True)
        self._thread.start()

    def lost(self) -> str:
        """Names the rank that has ended first; empty where all are there."""
        self._thread.join(_SOON_S)
        if self._first is None:
            return ""
        return (
            f"rank {self._first} of {len(self._ids)} (process {self._ids[self._first]}) has ended: killed, or out "
            "of memory"
        )


@contextlib.contextmanager
def watched(ranks: int, tell: Callable[[Callable[[], str]], None]) -> Iterator[None]:
    """Watch the processes that start meanwhile, if they are so many ranks.

    Args:
        ranks: of the engine that is started; 1 starts no process.
        tell: gets what names the rank that is lost.
    """
    before = set(multiprocessing.active_children())
    tell(lambda: "")
    yield
    started = sorted(set(multiprocessing.active_children()) - before, key=lambda process: process.pid or 0)
    if ranks > 1 and len(started) == ranks:
        tell(RankWatch(started).lost)
