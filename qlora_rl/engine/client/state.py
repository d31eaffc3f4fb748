"""`ServerState`: what a client knows of its server, and what it has asked the server to serve. Nothing is sent from
here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from enum import Enum

from qlora_rl.errors import EngineBrokenError, EngineClosedError, QloraRLError, RolloutCancelledError
from qlora_rl.versions import Versions

UNVERIFIED = "unverified"  # no server's start


class Phase(Enum):
    """What is known of the server."""

    NEW = "it has not answered yet"
    KNOWN = "it is the one that has answered before"
    IN_DOUBT = "the answer to a push is missing, or a recovery has failed: the next request begins a recovery"
    RECOVERING = "it was started again or is in doubt: its base is being verified and the policy pushed again"
    CLOSED = "nothing more is asked"


class ServerState:
    """The phase that a server is in for its client, and what the client has asked for; each change is a method. From
    any thread.

    ::

        answer            NEW -> KNOWN
        doubt             NEW, KNOWN -> IN_DOUBT; RECOVERING will end IN_DOUBT
        begin_recovery    NEW, KNOWN, IN_DOUBT -> RECOVERING
        end_recovery      RECOVERING -> KNOWN, or IN_DOUBT after doubt
        close             any -> CLOSED, which is final

    Args:
        url: of the server, for messages.

    Attributes:
        phase: of the server.
        start: name of the server's start, sent with each request; `UNVERIFIED` in doubt, empty before the first answer.
        asked: version and digest that the server was asked to serve; empty while the client follows the server.
        pushed: the bytes of the adapter that a restarted server gets, and its version.
        withdrawn: why nothing may be generated until the next push; empty where it may.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.phase, self.start = Phase.NEW, ""
        self.asked: Versions[tuple[int, str]] = Versions()
        self.pushed: tuple[bytes, int] | None = None
        self.withdrawn = ""
        self._lock = threading.Lock()  # held where phase and start change

    # --- the phase --------------------------------------------------------------------------------------------------

    @property
    def is_in_doubt(self) -> bool:
        """Nobody knows what the server serves."""
        return self.start == UNVERIFIED

    def answer(self, start: str) -> None:
        """The server has answered and named its start; a start that is known already stays."""
        with self._lock:
            self.start = self.start or start
            if self.phase is Phase.NEW:
                self.phase = Phase.KNOWN

    def doubt(self) -> None:
        """Nobody knows any more what the server serves."""
        with self._lock:
            self.start = UNVERIFIED
            if self.phase in (Phase.NEW, Phase.KNOWN):
                self.phase = Phase.IN_DOUBT

    def begin_recovery(self, start: str) -> None:
        """The server has another start than the one that was asked; the next requests are for this one.

        Raises:
            EngineBrokenError: a recovery is under way. EngineClosedError: the client was closed.
        """
        with self._lock:
            self.reject_closed()
            if self.phase is Phase.RECOVERING:
                raise EngineBrokenError(
                    f"asking the server at {self._url}: it was restarted twice in a row. Look into its log."
                )
            self.phase, self.start = Phase.RECOVERING, start

    def end_recovery(self) -> None:
        """The base is verified and the policy was pushed again; or not, then there is doubt."""
        with self._lock:
            if self.phase is Phase.RECOVERING:
                self.phase = Phase.IN_DOUBT if self.is_in_doubt else Phase.KNOWN

    def close(self) -> None:
        """Nothing more is asked."""
        with self._lock:
            self.phase = Phase.CLOSED

    def reject_closed(self) -> None:
        """Raise where the client was closed."""
        if self.phase is Phase.CLOSED:
            raise EngineClosedError("using the engine: it was closed. Make a new ServerEngine.")

    # --- what was asked for -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Around a request for another version. Without an answer nobody knows which version serves."""
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
