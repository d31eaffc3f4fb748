"""The supervisor's process: starts the program and what judges it, apart from each other, and ends both before it says
what came of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from .confine import confine, end_with, enter_namespace, has_landlock, hide_memory
from .inside import UNASKED, judge_inside
from .judge import FAILED, IDLE, PASSED, judge
from .program import NAME, answer
from .wire import read_frame, write_frame

_PATIENCE_S = 10.0  # to wait for a process, beyond the time of a program
_SLACK = 2**16  # bytes that a program may write beyond twice what is expected


class _TimeUp(BaseException):
    pass


class _Unconfined(Exception):
    """A process could not give up what it must."""


class _InScript(BaseException):
    """Raised in the process of a script, which has left all of the supervisor's work behind."""


def main() -> str | None:
    """Read what is asked from stdin, in frames: options as JSON, the program, then the tests or the cases.

    Returns:
        "run" in a process where the script is to be run; in the supervisor's it does not return.
    """
    # Its own, whatever the trainer's process does with them.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGCHLD})
    options = json.loads(read_frame(0))
    end_with(options["trainer"])
    supervisor = _Supervisor(options, read_frame(0))
    try:
        said = {"verdict": supervisor.verdict(options["cases"]).decode(), "isolation": supervisor.isolation}
    except _InScript:
        return "run"
    except _Unconfined as error:
        said = {"error": str(error)}
    write_frame(1, json.dumps(said).encode())
    os._exit(0)


class _Supervisor:
    def __init__(self, options: dict[str, Any], source: bytes):
        self._options = options
        self._null = os.open(os.devnull, os.O_RDWR)
        self._running: list[int] = []
        self._may_raise = True
        # What hides files and processes: active, or why it is not.
        self.isolation = {"namespace": "not asked for", "landlock": "not asked for"}
        if "namespace" in options["means"]:
            try:
                enter_namespace(os.getcwd())
                self.isolation["namespace"] = "active"
            except OSError as error:
                self.isolation["namespace"] = str(error)
        if "landlock" in options["means"]:
            self.isolation["landlock"] = "active" if has_landlock() else "this kernel has none"
        hide_memory()
        with open(NAME, "wb") as file:
            file.write(source)

    def verdict(self, cases: int | None) -> bytes:
        """Of the program, within its time; nothing of it is left behind."""
        signal.signal(signal.SIGALRM, self._time_is_up)
        signal.setitimer(signal.ITIMER_REAL, self._options["seconds"])
        try:
            if cases is not None:
                return self._of_cases(cases)
            return self._of_tests_inside() if self._options["inside"] else self._of_tests()
        except _TimeUp:
            return FAILED
        finally:
            self._may_raise = False
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _of_tests(self) -> bytes:
        reads, asks = os.pipe()
        hears, answers = os.pipe()
        verdict, says = os.pipe()
        self._start((self._null,) * 3, (reads, answers), lambda: answer(reads, answers))
        # Not before now are the tests read, and not here.
        self._start(
            (0, self._null, self._null), (asks, hears, says, self._null), lambda: self._judge(hears, asks, says)
        )
        for each in (reads, asks, hears, answers, says):
            os.close(each)
        return os.read(verdict, 16) or FAILED

    def _judge(self, hears: int, asks: int, says: int) -> None:
        tests = read_frame(0).decode("utf-8", "surrogatepass")
        os.dup2(self._null, 0)
        os.write(says, judge(tests, hears, asks))

    def _of_tests_inside(self) -> bytes:
        reads, asks = os.pipe()
        hears, says = os.pipe()
        self._start((self._null,) * 3, (reads, says), lambda: judge_inside(reads, says))
        os.close(reads)
        os.close(says)
        word = os.urandom(16)
        if os.read(hears, 1) != b"\1":  # the program has run; not before now are the tests read
            return FAILED
        try:
            write_frame(asks, word)
            write_frame(asks, read_frame(0))
        except BrokenPipeError:
            return FAILED
        said = _read_at_most(hears, _SLACK)
        return PASSED if said == word else IDLE if said == word + UNASKED else FAILED

    def _of_cases(self, cases: int) -> bytes:
        for _ in range(cases):
            if not self._is_right(read_frame(0)):
                return FAILED
        return PASSED if cases else IDLE

    def _is_right(self, text: bytes) -> bool:
        stdin = os.memfd_create("stdin")
        with open(stdin, "wb", closefd=False) as file:
            file.write(text)
        os.lseek(stdin, 0, os.SEEK_SET)
        out, stdout = os.pipe()
        pid = self._start((stdin, stdout, self._null), (), self._leave)
        os.close(stdin)
        os.close(stdout)
        wanted = read_frame(0)  # not before now
        written = _read_at_most(out, 2 * len(wanted) + _SLACK)
        os.close(out)
        if written is None:
            return False
        _, status = os.waitpid(pid, 0)
        self._running.remove(pid)
        return status == 0 and _lines(written) == _lines(wanted)

    def _leave(self) -> None:
        self._running = []
        raise _InScript

    def _start(self, standard: Sequence[int], kept: Sequence[int], do: Callable[[], None]) -> int:
        """A process that does one thing, and has nothing open but this."""
        supervisor = os.getpid()
        hears, says = os.pipe()
        pid = self._fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                _keep_only(standard, (*kept, says))
                try:
                    confine(
                        supervisor=supervisor,
                        seconds=self._options["seconds"],
                        nbytes=self._options["bytes"],
                        landlock=self.isolation["landlock"] == "active",
                    )
                except (OSError, ValueError) as error:
                    os.write(says, str(error).encode())
                    os._exit(1)
                os.close(says)
                do()
                os._exit(1)
            except _InScript:
                raise
            except BaseException:
                os._exit(1)
        self._running.append(pid)
        os.close(says)
        reason = os.read(hears, 4096).decode()  # nothing unknown has run yet
        os.close(hears)
        if reason:
            raise _Unconfined(reason)
        return pid

    def _fork(self) -> int:
        """Fork; where other programs' threads are all that the machine allows for, wait for their end."""
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        tried_until = time.monotonic() + self._options["seconds"] + _PATIENCE_S
        while True:
            try:
                pid = os.fork()
            except BlockingIOError:
                if time.monotonic() > tried_until:
                    raise _TimeUp from None
                time.sleep(0.05)
            else:
                if pid:
                    signal.setitimer(signal.ITIMER_REAL, left)
                return pid

    def _time_is_up(self, *_: object) -> None:
        if self._may_raise:
            self._may_raise = False
            raise _TimeUp


def _keep_only(standard: Sequence[int], kept: Sequence[int]) -> None:
    above = [os.dup(each) for each in standard]  # one of them may be a place of another
    for place, each in enumerate(above):
        os.dup2(each, place)
    left = 3
    for each in sorted(kept):
        os.closerange(left, each)
        left = each + 1
    os.closerange(left, os.sysconf("SC_OPEN_MAX") if left > 256 else 256)


def _read_at_most(descriptor: int, longest: int) -> bytes | None:
    """All that is written there; `None` where that is more."""
    parts, length = [], 0
    while part := os.read(descriptor, 2**16):
        length += len(part)
        if length > longest:
            return None
        parts.append(part)
    return b"".join(parts)


def _lines(text: bytes) -> list[bytes]:
    """White space at the ends of lines, and behind the last one, is no difference."""
    return [each.rstrip() for each in text.rstrip().split(b"\n")]
