"""`Gate`: stands in front of a whole ASGI app. Without the key nothing behind it is reached, known path or not.

Pure ASGI, no framework: it decides on the path, one header and the number of bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

OPEN_PATH = "/health"
# Below it are our own routes, whose bodies may be large and no text; they check strings themselves.
OWN_PATH = "/qlora/"
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_LINGER_SECONDS = 5.0


class Gate:
    """401 without the key on every path but `/health`; websockets are closed; bodies are bounded (413), and what vLLM
    is given are whole characters (400).

    Args:
        app: what is guarded.
        key: that a request must carry as `Authorization: Bearer KEY`.
        max_body_bytes: of one request.
        visits: is told when a request enters (its body is whole) and leaves.
    """

    way = "Send the header 'Authorization: Bearer KEY'; the server has written the key into its key file."

    def __init__(self, app: Any, key: str, max_body_bytes: int, visits: Visits | None = None):
        if not key:
            raise ValueError("making a gate: the key is empty. Give one.")
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.visits = visits or Visits()
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, or answer."""
        kind = scope["type"]
        if kind == "lifespan":
            await self.app(scope, receive, send)
        elif kind == "http":
            await self._http(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "no websockets here"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != OPEN_PATH and not self._knows(scope):
            challenge = [(b"www-authenticate", b"Bearer")]
            await _reject(
                send, 401, "AccessDeniedError", f"asking the server: the key is missing or wrong. {self.way}", challenge
            )
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        limit = self._limit(scope)
        if not length.isdigit() or len(length) > 18 or int(length) > limit:
            await self._reject_body(receive, send, limit)
            return
        with contextlib.ExitStack() as stack:
            kind = dict(scope["headers"]).get(b"content-type", b"application/json")
            is_vllms = not scope["path"].startswith(OWN_PATH) and b"json" in kind.lower()
            begin = lambda: stack.enter_context(self.visits.visit())  # noqa: E731
            body = _Body(receive, send, limit, begin, is_text=is_vllms)
            try:
                await self.app(scope, body.receive, body.send)
            except (TooLargeError, HalfCharacterError):
                pass
            except asyncio.CancelledError:  # the server ends; without an error's kind a client waits for the next one
                if body.has_answered:
                    raise
                await _reject(send, 503, "", "asking the server: it is ending. Ask again when it was restarted.")
            finally:
                if body.is_too_large and not body.has_answered:
                    await self._reject_body(receive, send, limit, is_whole=body.is_whole)
                elif body.is_no_text and not body.has_answered:
                    message = "asking the server: the body is no whole UTF-8 text: it holds half a character, such as "
                    await _reject(send, 400, "BadRequestError", message + "\\ud83d, or a byte 0. Send text.")

    def _limit(self, scope: Scope) -> int:
        """Bytes of a body at most."""
        return self.max_body_bytes

    async def _reject_body(self, receive: Receive, send: Send, limit: int, *, is_whole: bool = False) -> None:
        message = f"asking the server: the body is larger than max_body_bytes={limit}. Send less at a time."
        await _reject(send, 413, "SyncError", message, is_last=False)
        # To hang up on a client that still writes resets the connection, and may take the answer with it.
        if not is_whole:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_discard(receive, 2 * limit), _LINGER_SECONDS)
        await send({"type": "http.response.body", "body": b""})

    def _knows(self, scope: Scope) -> bool:
        found = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(found) != 1:
            return False
        scheme, _, given = found[0].partition(b" ")
        # Digests are compared, so that the time says nothing of the key, not even its length.
        same = hmac.compare_digest(hashlib.sha256(given.strip()).digest(), self._digest)
        return same and scheme.lower() == b"bearer"


class Visits:
    """Which requests are inside, by the number of the adapter that served when they came in.

    Attributes:
        current: number of the adapter that serves now.
    """

    def __init__(self) -> None:
        self.current = 0
        self._inside: Counter[int] = Counter()

    @contextlib.contextmanager
    def visit(self, number: int | None = None) -> Iterator[None]:
        """A request, from its first byte to its last; or while it uses an adapter before the one that serves, by its
        number."""
        number = self.current if number is None else number
        self._inside[number] += 1
        try:
            yield
        finally:
            self._inside[number] -= 1
            self._inside += Counter()  # forgets zeros

    def oldest(self) -> int:
        """The oldest adapter that a request inside may name."""
        return min(self._inside, default=self.current)


class HalfCharacterError(Exception):
    """A string of the body cannot be encoded: vLLM would find that out where it is an error of the server's."""


def has_half_character(body: bytes | bytearray) -> bool:
    """The body is no UTF-8 text, or JSON in it has an escape for half of a surrogate pair, without the other half next
    to it."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return True
    if b"\0" in body:  # as UTF-16 and UTF-32 have, which Python's parser would take
        return True
    if not _HALF.search(body):
        return False
    high_until = -1  # where the half before has ended, if it waits for another
    for found in _ESCAPE.finditer(body):
        unit = int(found[1], 16) if found[1] else 0
        if high_until >= 0 and not (0xDC00 <= unit < 0xE000 and found.start() == high_until):
            return True
        if high_until < 0 and 0xDC00 <= unit < 0xE000:
            return True
        high_until = found.end() if 0xD800 <= unit < 0xDC00 else -1
    return high_until >= 0


class TooLargeError(Exception):
    """The body is larger than the gate lets through; whatever is answered to it, the gate says so."""


class _Body:
    """Counts what comes in; when it is too much, what the app would answer is swallowed.

    `begin` is called when the body is whole: before, no request can name an adapter.
    """

    def __init__(self, receive: Receive, send: Send, limit: int, begin: Callable[[], Any], *, is_text: bool):
        self._begin = begin
        self._text: bytearray | None = bytearray() if is_text else None
        self.is_too_large = self.is_no_text = self.has_answered = self.is_whole = False
        self._receive, self._send, self._left = receive, send, limit

    async def receive(self) -> Any:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            was_whole, self.is_whole = self.is_whole, not message.get("more_body")
            if self._left < 0:
                self.is_too_large = True
                raise TooLargeError
            if self._text is not None:
                self._text += message.get("body", b"")
            if self.is_whole and not was_whole:
                if self._text is not None and has_half_character(self._text):
                    self.is_no_text = True
                    raise HalfCharacterError
                self._text = None
                self._begin()
        return message

    async def send(self, message: Any) -> None:
        if (self.is_too_large or self.is_no_text) and not self.has_answered:
            return
        self.has_answered = True
        await self._send(message)


async def _discard(receive: Receive, limit: int) -> None:
    """Read what still comes, to its end, but not much more than `limit` bytes."""
    while limit > 0:
        message = await receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            return
        limit -= len(message.get("body", b""))


async def _reject(
    send: Send,
    status: int,
    kind: str,
    message: str,
    headers: list[tuple[bytes, bytes]] | None = None,
    is_last: bool = True,
) -> None:
    body = json.dumps({"error": {"kind": kind, "type": kind, "message": message, "code": status}}).encode()
    head = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": head + (headers or [])})
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
