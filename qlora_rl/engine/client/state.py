"""`ServerState`: what a client knows of its server, and what it has asked the server to serve. Nothing is sent from
here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from qlora_rl.errors import EngineBrokenError, EngineClosedError, QloraRLError, RolloutCancelledError
from qlora_rl.versions import Versions

UNVERIFIED = "unverified"  # no server's start


class ServerState:
    """Which start of a server its client knows, and what the client has asked for; each change is a method. From any
    thread.

    Args:
        url: of the server, for messages.

    Attributes:
        is_recovering: it was started again or is in doubt: its base is being verified and the policy pushed again.
        is_closed: nothing more is asked.
        start: name of the server's start, sent with each request; `UNVERIFIED` in doubt, empty before the first answer.
        asked: version and digest that the server was asked to serve; empty while the client follows the server.
        pushed: the bytes of the adapter that a restarted server gets, and its version.
        withdrawn: why nothing may be generated until the next push; empty where it may.
        pushing: versions whose pushes are under way: the server may serve them already.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.is_recovering, self.is_closed, self.start = False, False, ""
        self.asked: Versions[tuple[int, str]] = Versions()
        self.pushed: tuple[bytes, int] | None = None
        self.withdrawn = ""
        self.pushing: list[int] = []
        self._lock = threading.Lock()  # held where the start changes, or who is asked

    # --- whom it knows ----------------------------------------------------------------------------------------------

    @property
    def is_in_doubt(self) -> bool:
        """Nobody knows what the server serves: the answer to a push is missing, or a recovery has failed. The next
        request begins a recovery."""
        return self.start == UNVERIFIED

    def answer(self, start: str) -> None:
        """The server has answered and named its start; a start that is known already stays."""
        with self._lock:
            self.start = self.start or start

    def doubt(self) -> None:
        """Nobody knows any more what the server serves."""
        with self._lock:
            self.start = UNVERIFIED

    def begin_recovery(self, start: str) -> None:
        """The server has another start than the one that was asked; the next requests are for this one.

        Raises:
            EngineBrokenError: a recovery is under way. EngineClosedError: the client was closed.
        """
        with self._lock:
            self.reject_closed()
            if self.is_recovering:
                raise EngineBrokenError(f"asking {self._url}: it was restarted twice in a row. Look into its log.")
            self.is_recovering, self.start = True, start

    def end_recovery(self) -> None:
        """The base is verified and the policy was pushed again; or not, then there is doubt."""
        self.is_recovering = False

    def close(self) -> None:
        """Nothing more is asked."""
        with self._lock:
            self.is_closed = True

    def reject_closed(self) -> None:
        """Raise where the client was closed."""
        if self.is_closed:
            raise EngineClosedError("using the engine: it was closed. Make a new one.")

    # --- what was asked for -----------------------------------------------------------------------------------------

    @property
    def wants_base(self) -> bool:
        """The bare base was asked for, or a first push undone; also where the answer to that is missing."""
        return bool(self.asked) and self.pushed is None and not self.withdrawn

    def may_serve(self, version: int) -> bool:
        """This client has pushed it last, or is pushing it."""
        newest = self.asked.newest
        return version in self.pushing or (newest is not None and version == newest[0])

    def has_pushed_since(self, asked: Versions[tuple[int, str]]) -> bool:
        """What was `asked` for then is no longer, or a push is under way."""
        return bool(self.pushing) or self.asked is not asked

    @contextlib.contextmanager
    def pushes(self, version: int) -> Iterator[None]:
        """Around a push, from its request until `serve`; other threads go on asking meanwhile. Where it ends without an
        answer that was taken note of, nobody knows which version serves."""
        self.pushing.append(version)
        is_first = not self.asked
        if is_first:
            self.asked = self.asked.with_newest((0, ""))  # what an undone first push leaves
        try:
            yield
        except BaseException as error:
            if not isinstance(error, QloraRLError) or isinstance(error, EngineBrokenError | RolloutCancelledError):
                self.doubt()
            elif is_first:
                self.asked = Versions()
            raise
        finally:
            self.pushing.remove(version)

    def serve(self, version: int, digest: str, pushed: tuple[bytes, int] | None = None) -> None:
        """The server serves what it was asked for; with `pushed`, a restarted one gets this."""
        self.pushed = pushed
        self.asked, self.withdrawn = self.asked.with_newest((version, digest)), ""

    def forget(self) -> None:
        """A restarted server gets nothing."""
        self.pushed = None

    def withdraw(self, reason: str) -> None:
        """Nothing is generated until the next push, and a restarted server gets nothing."""
        self.pushed, self.withdrawn = None, reason

    def reject_withdrawn(self) -> None:
        """Raise where nothing may be generated."""
        if self.withdrawn:
            raise EngineBrokenError(
                f"generating: {self.withdrawn}. Push again, or call drop_adapter() to go on with the bare base."
            )
