"""`RunLog`: what the program and its libraries warn of, in the run directory; of the libraries only errors are on the
screen."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TextIO

from qlora_rl.errors import QloraRLError

LOG = "log.txt"
# Loggers of libraries; "py.warnings" has what Python's warnings say.
_LIBRARIES = ("vllm", "transformers", "bitsandbytes", "trl", "accelerate", "datasets", "torch", "peft", "py.warnings")
_KINDS = (UserWarning, FutureWarning, RuntimeWarning)


class RunLog(logging.Handler):
    """Within it warnings are kept, and written when the directory is known; then libraries have their handlers back.

    What was kept is shown where an unknown error ends the run before it has a directory.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._lines: list[str] = []
        self._file: TextIO | None = None
        self._stack = ExitStack()

    def __enter__(self) -> RunLog:
        self._stack.enter_context(warnings.catch_warnings())
        for kind in _KINDS:
            warnings.simplefilter("default", kind)
        logging.captureWarnings(True)
        self._stack.callback(logging.captureWarnings, False)
        logging.getLogger().addHandler(self)
        self._stack.callback(logging.getLogger().removeHandler, self)
        for name in _LIBRARIES:
            own = logging.getLogger(name)
            self._stack.callback(_set, own, own.handlers, own.level, own.propagate)
        self.take_over()
        return self

    def take_over(self) -> None:
        """Once more after imports: libraries set up their loggers."""
        errors = logging.StreamHandler()
        errors.setLevel(logging.ERROR)
        for name in _LIBRARIES:
            _set(logging.getLogger(name), [self, errors], logging.WARNING, False)

    def write_to(self, directory: Path) -> None:
        """From here on everything is in a file there, also what was kept so far."""
        file = open(directory / LOG, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
        self._file = self._stack.enter_context(file)
        lines, self._lines = self._lines, []
        for line in lines:
            print(line, file=self._file, flush=True)

    def note(self, text: str) -> None:
        """Write a line of the program's own, which is not on the screen."""
        self.handle(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it. A full disk, or a record that cannot be formatted, ends nothing."""
        try:
            line = self.format(record)
            if self._file is None:
                self._lines.append(line)
            else:
                print(line, file=self._file, flush=True)
        except Exception:
            self.handleError(record)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.lock or contextlib.nullcontext():  # a thread may be writing
            self._file = None
        self._stack.close()
        if isinstance(error, Exception) and not isinstance(error, QloraRLError):
            for line in self._lines:
                print(line, file=sys.stderr)


def _set(own: logging.Logger, handlers: list[logging.Handler], level: int, propagates: bool) -> None:
    own.handlers, own.propagate = handlers, propagates
    own.setLevel(level)
