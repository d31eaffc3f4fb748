"""What a command is doing, for people: `begin` says which stage begins, `shown` has a command show it, with a sign of
life while it lasts.

On a terminal a stage has a line that counts its seconds; elsewhere it is a plain line, and another one now and then.

In Python a stage is a record of the logger `qlora_rl.stages`, at level INFO. What a trainer does is shown there too,
in plain lines (`shown_to_scripts`); a level of that logger (`logging.getLogger("qlora_rl.stages").setLevel(...)`)
leaves that to whoever has set it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

logger = logging.getLogger(__name__)

# Seconds between two signs of life: on a line that can be written again, and in a file or a pipe.
LIVE_S, PLAIN_S = 1.0, 10.0
_REMARK = logging.INFO + 1
_counts: list[str] = []  # at most one


def begin(stage: str) -> None:
    """The stage before has ended; an empty one: nothing that takes long comes now, or it is shown elsewhere."""
    _counts.clear()
    logger.info("%s", stage)


def count(what: str = "", done: int = 0, whole: int = 0) -> None:
    """How far it has come, for the next sign of life, of a stage or of a training; forgotten where a stage begins, and
    without arguments."""
    _counts[:] = [f"{what} {done} of {whole}"] if what else []


def counted() -> str:
    """What was counted last, in words; empty where nothing was."""
    return next(iter(_counts), "")


def is_live(stream: TextIO | None) -> bool:
    """A line on it can be written again: it is a terminal that has a width."""
    if stream is None or stream.closed or not stream.isatty():
        return False
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except (OSError, ValueError):  # it is no file of the system's
        return True


def remark(text: str, *, warns: bool = False) -> None:
    """A line that is no stage: what the stage before has found. It ends that stage."""
    logger.log(logging.WARNING if warns else _REMARK, "%s", text)


@contextlib.contextmanager
def ended() -> Iterator[None]:
    """What has begun within it, or in a function that it decorates, ends with it."""
    try:
        yield
    finally:
        begin("")


@contextlib.contextmanager
def shown(stream: TextIO | None = None, *, beats: bool = True) -> Iterator[None]:
    """Within it stages are shown.

    Args:
        stream: where to; by default stderr.
        beats: with signs of life, from a thread.
    """
    handler, level = _Shown(stream, beats), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        begin("")
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


@contextlib.contextmanager
def shown_to_scripts(stream: TextIO | None = None) -> Iterator[bool]:
    """Within it stages are shown, a plain line each, unless a command or somebody's own logging shows them.

    Yields whether they are shown by it.
    """
    if logger.level != logging.NOTSET or logger.isEnabledFor(logging.INFO):
        yield False
        return
    with shown(stream, beats=False):
        yield True


class Beat:
    """Calls something again and again, from a thread of its own, until it is stopped.

    Args:
        every_s: seconds between two calls.
        call: is given the seconds since the start.
    """

    def __init__(self, every_s: float, call: Callable[[float], None]):
        self._every_s, self._call, self._is_over = every_s, call, threading.Event()
        self._calling = threading.RLock()  # what is called may stop it
        self._began = time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> float:
        """No call comes after this; the seconds since the start."""
        with self._calling:
            self._is_over.set()
        return time.monotonic() - self._began

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            with self._calling:
                if not self._is_over.is_set():
                    self._call(time.monotonic() - self._began)


class _Shown(logging.Handler):
    def __init__(self, stream: TextIO | None, beats: bool):
        super().__init__()
        self._stream, self._beats, self._stage = stream, beats, ""
        self._beat: Beat | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self._end()
        if record.levelno > logging.INFO:
            self._stage = ""
            warned = "WARNING: " if record.levelno >= logging.WARNING else ""
            self._write(f"     {warned}{record.getMessage()}", ends=True)
            return
        self._stage = record.getMessage()
        if not self._stage:
            return
        self._write(f"     {self._stage}", ends=not (self._is_live and self._beats))
        if self._beats:
            self._beat = Beat(LIVE_S if self._is_live else PLAIN_S, self._tick)

    @property
    def _out(self) -> TextIO | None:
        return self._stream or sys.stderr  # which is None where it was closed before Python began

    @property
    def _is_live(self) -> bool:
        return is_live(self._out)

    def _end(self) -> None:
        beat, self._beat = self._beat, None
        if beat is None:
            return
        took = beat.stop()
        if self._is_live:
            self._write(f"     {self._stage}: {took:.0f} s", ends=True)

    def _tick(self, seconds: float) -> None:
        # Not under the handler's lock: `emit` waits in `stop` for a beat that is at work.
        told = f" {found}:" if (found := counted()) else ""
        if self._is_live:
            self._write(f"     {self._stage}:", f"{told} {seconds:.0f} s", ends=False)
        else:
            self._write(f"     ...{told} {seconds:.0f} s", ends=True)

    def _write(self, text: str, end: str = "", *, ends: bool) -> None:
        if (out := self._out) is None:
            return
        if not ends:  # a line that wraps could not be written again
            text = text[: max(1, shutil.get_terminal_size().columns - 1 - len(end))]
        text += end
        with contextlib.suppress(OSError, ValueError):  # a closed pipe
            out.write(text + ("\n" if ends else "\r"))  # what is written next begins at the left
            out.flush()
