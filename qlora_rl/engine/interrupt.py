"""Ctrl-C, held back until vLLM is between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class ForcedInterrupt(BaseException):
    """A second Ctrl-C during one engine step."""


@contextlib.contextmanager
def interrupts_between_steps() -> Iterator[Any]:
    """Hold SIGINT back while vLLM is in the middle of a step, where it would leave scheduler and worker at odds.

    Yields a function that raises KeyboardInterrupt if one is due. Outside of the main thread, where Python never
    delivers SIGINT, it does nothing.
    """
    due = 0

    def note(*_: Any) -> None:
        nonlocal due
        due += 1
        if due > 1:
            raise ForcedInterrupt

    def raise_if_due() -> None:
        if due:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield raise_if_due
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_due
    finally:
        signal.signal(signal.SIGINT, before)
