"""`TrainerLock`: the one trainer that pushes to a server."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from qlora_rl.errors import ServerTakenError


class TrainerLock:
    """One trainer at a time pushes.

    Args:
        idle_s: after so many seconds without a word from it, another may take its place.
    """

    def __init__(self, idle_s: float):
        self.idle_s = idle_s
        self._holder = ""
        self._heard = 0.0
        self._open: Counter[str] = Counter()
        self._changes = 0  # that were not rejected

    @contextlib.contextmanager
    def hearing(self, session: str) -> Iterator[None]:
        """A request: while one of the holder's is open, it is not silent."""
        self._open[session] += 1
        try:
            yield
        finally:
            self._open[session] -= 1
            self._open += Counter()  # forgets zeros
            if session == self._holder:
                self._heard = time.monotonic()

    @contextlib.contextmanager
    def awaiting(self, session: str) -> Iterator[None]:
        """Within `hearing`, while bytes of the request are waited for: if they do not come, its trainer is silent."""
        self._open[session] -= 1
        try:
            yield
        finally:
            self._open[session] += 1
        if session == self._holder:
            self._heard = time.monotonic()

    def claim(self, session: str, *, force: bool = False) -> None:
        """Become the holder.

        Raises:
            ServerTakenError: another one is.
        """
        if not force:
            self.reject_other(session)
        self._holder, self._heard = session, time.monotonic()

    @contextlib.contextmanager
    def trying(self, session: str) -> Iterator[None]:
        """A change that this trainer asks for: whoever is rejected does not become the holder.

        Raises:
            ServerTakenError: another one is.
        """
        before, changes = (self._holder, self._heard), self._changes
        self.claim(session)
        try:
            yield
        except BaseException:
            if before[0] != session == self._holder and changes == self._changes:
                self._holder, self._heard = before
            raise
        self._changes += 1

    def reject_other(self, session: str) -> None:
        """Raise `ServerTakenError` where another trainer holds the server."""
        silent = 0.0 if self._open[self._holder] else time.monotonic() - self._heard
        if self._holder and self._holder != session and silent < self.idle_s:
            raise ServerTakenError(
                f"taking the server: another trainer holds it and was heard {silent:.0f} s ago. Start a server of your "
                f"own, stop that trainer, wait until it has been silent for {self.idle_s:.0f} s, or take it with "
                "ServerEngine.claim(force=True)."
            )

    def release(self, session: str) -> None:
        """Stop being the holder."""
        if session == self._holder:
            self._holder = ""
