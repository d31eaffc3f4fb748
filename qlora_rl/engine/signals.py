"""Ctrl-C: held back until vLLM is between two steps, kept from children, and none of them left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Any

# For the cleaning up of whoever was interrupted, in seconds; then the process is ended.
_GRACE_S = 10.0


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


@contextlib.contextmanager
def interrupts_for_sure(is_starting: Callable[[], bool], clean: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and Ctrl-C raise KeyboardInterrupt while something starts, and end the process if that is swallowed on
    the way.

    Ctrl-C is blocked, and a thread takes it: children inherit that. A terminal sends it to them too, and they would
    answer with tracebacks. Only in the main thread.

    Args:
        is_starting: afterwards signals belong to whoever has set a handler of his own.
        clean: is called before the process is ended by force.
    """
    main, struck = threading.get_ident(), threading.Event()
    is_over = threading.Event()

    def strike(*_: Any) -> None:
        if not struck.is_set():  # a second one must not disturb the cleaning up
            struck.set()
            if is_starting():  # vLLM would ask its processes to end, and wait for seconds
                _kill_children()
            raise KeyboardInterrupt

    def watch() -> None:
        end = None
        while not is_over.wait(0.1):
            # Not sigtimedwait: in a process that was stopped and continued CPython returns a signal that never came.
            has_come = signal.SIGINT in signal.sigpending()
            if has_come:
                signal.sigwait({signal.SIGINT})
            if has_come and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # somebody listens
                signal.pthread_kill(main, signal.SIGTERM)  # wakes the main thread, even in a system call
            if end is None and struck.is_set():
                end = time.monotonic() + _GRACE_S
            if end is not None and time.monotonic() > end and is_starting():
                _end_children(frozenset())
                clean()
                print("qlora-rl: interrupted", file=sys.stderr, flush=True)
                os._exit(130)

    sys.warnoptions.append("ignore:resource_tracker")  # it removes what killed children leave, and need not say so
    resource_tracker.ensure_running()  # unblocks SIGINT when it starts
    sys.warnoptions.pop()
    # Also SIGINT, for threads of libraries that do not block it; asyncio's own would hold it back until vLLM has
    # started.
    before = {number: signal.signal(number, strike) for number in (signal.SIGTERM, signal.SIGINT)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    thread = threading.Thread(target=watch, name="qlora-rl-signals", daemon=True)
    thread.start()
    try:
        yield
    except Exception:
        if struck.is_set() and is_starting():  # what became of it on its way through a library
            raise KeyboardInterrupt from None
        raise
    finally:
        is_over.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def no_child_left() -> Iterator[None]:
    """Every process that was started meanwhile has ended afterwards, and theirs, also those whose parent is gone
    (Linux)."""
    import psutil

    before = frozenset(child.pid for child in psutil.Process().children())
    _adopt_orphans(True)
    try:
        yield
    finally:
        _end_children(before)
        _adopt_orphans(False)


def _adopt_orphans(is_wanted: bool) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, int(is_wanted))  # PR_SET_CHILD_SUBREAPER


def _kill_children() -> None:
    """Without waiting for them: whoever has started them does."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if not _is_tracker(child):
                child.kill()


def _end_children(spared: frozenset[int]) -> None:
    import psutil

    def left() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in spared and not _is_tracker(child)]

    while found := left():
        for child in found:  # whose own children are ours in the next round
            with contextlib.suppress(psutil.Error):
                child.kill()
            with contextlib.suppress(OSError):
                os.waitpid(child.pid, 0)


def _is_tracker(process: Any) -> bool:
    """multiprocessing's own, which removes shared memory that was left, and ends with us."""
    import psutil

    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:
        return False
