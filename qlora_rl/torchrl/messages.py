"""Requests and answers over a channel, with a session id; errors keep their class.

A message is a length, a JSON header and bytes. Nothing that arrives is ever run or unpickled.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from qlora_rl import errors
from qlora_rl.errors import PeerLostError, QloraRLError, SyncError
from qlora_rl.torchrl.rpc import Channel, RPCLayer
from qlora_rl.torchrl.transfer import Transfer

WAIT_SLICE_S = 1.0


class Terms(Protocol):
    """The arguments of `AdapterSyncScheme`, the same on both sides."""

    rpc: RPCLayer
    transfer: Transfer
    sync: str
    timeout_s: float
    canary_every: int
    autocast: torch.dtype | None
    allow_base_mismatch: bool


class NotJoinedError(SyncError):
    """The receiver does not know this session: it was restarted, and must be joined again."""


@dataclass(frozen=True)
class Message:
    """A request or an answer.

    Attributes:
        session: of the sender; a new one for each join.
        number: of the question in its session; its answer has the same.
        method: what is asked; empty in an answer.
        content: JSON values.
        body: bytes, if there are any.
    """

    session: str
    number: int
    method: str
    content: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def encode(self) -> bytes:
        """As bytes."""
        header = json.dumps([self.session, self.number, self.method, self.content]).encode()
        return len(header).to_bytes(8, "little") + header + self.body

    @classmethod
    def decode(cls, message: bytes) -> Message:
        """Inverse of `encode`.

        Raises:
            SyncError: it is no such message.
        """
        end = 8 + int.from_bytes(message[:8], "little")
        try:
            found = json.loads(message[8:end])
            if not isinstance(found, list) or [*map(type, found)] != [str, int, str, dict]:
                raise ValueError("its header is another one")
        except (ValueError, RecursionError) as error:
            raise SyncError(
                f"reading a message of {len(message)} bytes: {error}. Something else uses this channel."
            ) from error
        session, number, method, content = found
        return cls(session, number, method, content, bytes(message[end:]))


def lost(stage: str, who: str, why: str) -> PeerLostError:
    """The error raised when the other side does not answer."""
    found = PeerLostError(f"synchronising weights: stage {stage!r}: the {who} {why}. Start it again, and push again.")
    found.stage = stage
    return found


def pack_error(error: BaseException) -> dict[str, Any]:
    """An error as JSON; one that is not ours becomes a SyncError."""
    if isinstance(error, QloraRLError):
        return {"type": type(error).__name__, "text": str(error), "reasons": error.reasons, "module": error.module}
    return {"type": "SyncError", "text": f"{type(error).__name__}: {error}", "reasons": [], "module": None}


def unpack_error(packed: dict[str, Any]) -> QloraRLError:
    """Inverse of `pack_error`, for classes of qlora_rl only."""
    kind = NotJoinedError if packed["type"] == "NotJoinedError" else getattr(errors, str(packed["type"]), None)
    if not (isinstance(kind, type) and issubclass(kind, QloraRLError)):
        kind = SyncError
    return kind(packed["text"], reasons=packed["reasons"], module=packed["module"])


class Asking:
    """The sender's end: one question at a time, each with a time limit.

    Args:
        open_channel: opens a channel to the receiver, within seconds.
        timeout_s: for the receiver to answer one question.

    Attributes:
        stage: what is being done, for errors.
        is_lost: the channel failed; nothing is asked until `open`.
    """

    def __init__(self, open_channel: Callable[[float], Channel], timeout_s: float):
        self._open_channel, self.timeout_s = open_channel, timeout_s
        self._channel: Channel | None = None
        self.session, self._number = "", 0
        self.stage = "join"
        self.is_lost = True

    def open(self) -> None:
        """Begin a new session, over a new channel.

        Raises:
            PeerLostError: there is no receiver.
        """
        self.close()
        self.session, self._number = secrets.token_hex(8), 0
        try:
            self._channel = self._open_channel(self.timeout_s)
        except QloraRLError:
            raise
        except OSError as error:
            raise lost(self.stage, "receiver", f"could not be reached within {self.timeout_s:g} s ({error})") from error
        self.is_lost = False

    def ask(self, method: str, body: bytes = b"", **content: Any) -> Any:
        """The answer's value.

        Raises:
            PeerLostError: there is none in time.
            Whatever the receiver raised.
        """
        return self.begin(method, body, **content)()

    def begin(self, method: str, body: bytes = b"", **content: Any) -> Callable[[], Any]:
        """Ask, and return what waits for the answer."""
        if self.is_lost or self._channel is None:
            raise lost(self.stage, "receiver", "is gone")
        self._number += 1
        number, channel = self._number, self._channel
        try:
            channel.send(Message(self.session, number, method, content, body).encode(), self.timeout_s)
        except OSError as error:
            raise self._give_up(f"is gone ({error})") from error
        return lambda: self._answer(channel, number)

    def _answer(self, channel: Channel, number: int) -> Any:
        deadline = time.monotonic() + self.timeout_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                message = channel.receive(min(left, WAIT_SLICE_S))
            except OSError as error:
                raise self._give_up(f"is gone ({error})") from error
            if message is None:
                continue
            answer = Message.decode(message)
            if (answer.session, answer.number) != (self.session, number):
                continue  # of an earlier question, which was given up
            try:
                if "error" not in answer.content:
                    return answer.content["value"]
                found = unpack_error(answer.content["error"])
            except (LookupError, TypeError) as error:
                raise SyncError(f"reading an answer: {error!r}. Something else uses this channel.") from error
            raise found
        raise self._give_up(f"has not answered for {self.timeout_s:g} s")

    def _give_up(self, why: str) -> PeerLostError:
        self.close()
        return lost(self.stage, "receiver", why)

    def close(self) -> None:
        """Close the channel."""
        self.is_lost = True
        if self._channel is not None:
            self._channel.close()
            self._channel = None
