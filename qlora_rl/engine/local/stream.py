"""`OwnStream`: the CUDA stream on which an engine was built, for whichever thread asks something of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class OwnStream:
    """On a GPU the current stream is a setting of each thread, and what is enqueued on two streams has no order.

    A new thread is on the default stream. vLLM puts the thread that builds an engine on a new stream (`current_stream`
    of its utils/torch_utils.py), captures its graphs there, and copies sampled tokens to the host behind that stream
    alone (`main_stream` of its GPU model runner). A step of another thread would be read before it is done, and would
    not wait for a push. So all of them take their turns on that stream.

    Args:
        current: gives the stream of this thread; for tests.
        on: a block on a stream; for tests.
    """

    def __init__(
        self,
        current: Callable[[], Any] = torch.cuda.current_stream,
        on: Callable[[Any], contextlib.AbstractContextManager[Any]] = torch.cuda.stream,
    ) -> None:
        self._current, self._on = current, on
        self._own: Any = None

    def keep(self, is_gpu: bool) -> None:
        """An engine was built in this thread."""
        self._own = self._current() if is_gpu else None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A block behind what this thread has enqueued, and before what it will; nothing changes without an engine on a
        GPU."""
        own = self._own
        if own is None or (mine := self._current()) == own:
            yield
            return
        own.wait_stream(mine)
        try:
            with self._on(own):
                yield
        finally:
            mine.wait_stream(own)
