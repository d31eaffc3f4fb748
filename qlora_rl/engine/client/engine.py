"""`ServerEngine`: a server of ours as an engine. HTTP only: this module and what it imports know nothing of vLLM."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import uuid
import weakref
from pathlib import Path
from typing import Any

import httpx

from qlora_rl.engine.client.engine_client import Answer, EngineClient
from qlora_rl.engine.client.http_errors import KEY_VARIABLE, START, AwayError, content_of, says_lost
from qlora_rl.errors import AccessDeniedError, ConfigConflictError, EngineBrokenError

logger = logging.getLogger(__name__)

PREFIX = "/qlora/v1"
SESSION, VERSION = "x-qlora-session", "x-qlora-version"
# Faults of a connection, after which nobody knows whether the server has done what was asked: all requests can be
# repeated.
_FAULTS = (httpx.TransportError,)


class ServerEngine(EngineClient):
    """A server started by `qlora-rl serve`, asked over HTTP.

    ::

        with ServerEngine("http://127.0.0.1:8000", api_key_file="key") as engine:
            rollout = engine.generate([[40, 41, 42]], temperature=0.0, max_tokens=8)

    When the server was restarted, its base is verified again (it must be the one that was there before) and the newest
    adapter is pushed again, before anything else is asked; `incarnation` grows.

    `connect` also takes several URLs.

    Args:
        url: such as "http://127.0.0.1:8000".
        api_key: by default what `api_key_file` holds, or the environment's QLORA_RL_API_KEY.
        api_key_file: a file that holds it.
        session: who this is; what was killed comes back under the name that it had, and is not taken for another
            trainer.
        timeout_s: of one request, in seconds; a batch of long rollouts is one request.
        wait_s: how long to wait for a server that is away, in seconds, before giving up.
        transport: of httpx, for tests.

    Raises:
        AccessDeniedError: no key, or a wrong one.
        EngineBrokenError: nobody answers within `wait_s`.
        EngineUnsupportedError: what answers is no server of ours.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        api_key_file: str | os.PathLike[str] | None = None,
        session: str | None = None,
        timeout_s: float = 1800.0,
        wait_s: float = 120.0,
        transport: httpx.BaseTransport | None = None,
    ):
        url = check_url(url)
        self.session = session or uuid.uuid4().hex
        connection = HttpConnection(url, find_key(api_key, api_key_file), self.session, timeout_s, transport)
        super().__init__(connection, timeout_s=timeout_s, wait_s=wait_s)


class HttpConnection:
    """The routes of `qlora-rl serve`.

    Args:
        url: of the server.
        key: that it asks for.
        session: who asks.
        timeout_s: of one request, in seconds.
        transport: of httpx, for tests.
    """

    way = "http"
    piece_bytes = 8 * 2**20

    def __init__(
        self, url: str, key: str, session: str, timeout_s: float, transport: httpx.BaseTransport | None = None
    ):
        self.url, self._lines = url, Lines()
        self.client = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {key}", SESSION: session},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            transport=transport,
            trust_env=False,  # neither proxies nor passwords of the environment: the key must not wander
            event_hooks={"request": [self._lines.watch]},
        )

    @property
    def cuts(self) -> int:
        """See `Connection`."""
        return self._lines.cuts

    def ask(self, method: str, path: str, body: bytes | dict[str, Any] | None, start: str) -> Answer:
        """See `Connection`."""
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        try:
            answer = self.client.request(
                method, PREFIX + path, content=content, headers={START: start} if start else {}
            )
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:  # its text may hold the key
            text = f"asking the server at {self.url}: {type(error).__name__}: no such request can be sent."
            raise EngineBrokenError(text) from None
        except _FAULTS as error:
            raise AwayError(str(error) or type(error).__name__) from error
        found = content_of(answer, self.url, start)
        return Answer(found, answer.headers[START], int(answer.headers[VERSION]))

    def computes(self, timeout_s: float, *, bare: bool) -> bool:
        """See `Connection`."""
        try:
            body = {"sequences": [[0, 0]], "bare": bare}
            answer = self.client.post(f"{PREFIX}/score", json=body, timeout=timeout_s)
        except _FAULTS:
            return False
        return answer.status_code == 200 or (not bare and says_lost(answer))

    def cancel(self) -> None:
        """See `Connection`; the server lets go of what the calls wanted."""
        self._lines.cut()

    def close(self) -> None:
        """Give the server free for another trainer, and close the connections."""
        try:
            self.client.request("DELETE", f"{PREFIX}/lease", timeout=5.0)
        except httpx.HTTPError as error:
            logger.debug("the server could not be given free: %s", error)
        self.client.close()


def check_url(url: str) -> str:
    """The URL without a slash at its end.

    Raises:
        ConfigConflictError: it is none of a server, or holds what may be a secret: URLs end up in logs and in runs.
    """
    if isinstance(url, str) and any(mark in url for mark in "@?#"):
        raise ConfigConflictError(
            "connecting to a server: the URL, which is not shown here, names a user or has a query or a fragment. Use "
            "http://host:port, and a file for the key (api_key_file, teacher_key_file)."
        )
    if not isinstance(url, str) or "," in url:
        raise ConfigConflictError(
            f"connecting to a server: url={url!r} is not one URL. Pass several to qlora_rl.connect."
        )
    try:
        is_good = httpx.URL(url).scheme in ("http", "https") and bool(httpx.URL(url).host)
    except httpx.InvalidURL:
        is_good = False
    if not is_good:
        raise ConfigConflictError(f"connecting to a server: url={url!r} is no URL. Use http://host:port.")
    return url.rstrip("/")


def find_key(key: str | None, file: str | os.PathLike[str] | None) -> str:
    """The key that was given, or is in the file; in the environment only where there is neither.

    Raises:
        AccessDeniedError: there is none, or it cannot be sent.
    """
    if key is not None and file is not None:
        raise ConfigConflictError("connecting to a server: give either api_key= or api_key_file=, not both.")
    if file is not None:
        try:
            key = Path(file).read_text()
        except OSError as error:
            raise AccessDeniedError(f"connecting to a server: reading the key: {file}: {error.strerror}.") from error
        except UnicodeDecodeError:
            raise AccessDeniedError(
                f"connecting to a server: {file} is no text. Pass the file that the server names."
            ) from None
    key = ((key if file is not None else key or os.environ.get(KEY_VARIABLE)) or "").strip()
    if any(not "!" <= letter <= "~" for letter in key):  # and never say which: messages end up in logs
        raise AccessDeniedError(
            "connecting to a server: the key holds spaces, control characters or letters beyond ASCII. Is it the right "
            "file?"
        )
    if not key:
        raise AccessDeniedError(
            "connecting to a server: no key. Pass api_key_file= (the server says where it is; in a run's file "
            f"[rollout] api_key_file), api_key=, or set {KEY_VARIABLE}."
        )
    return key


# httpcore's names for the moments at which a connection has its socket.
_CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class Lines:
    """Make `watch` an event hook of httpx for every request: a connection serves many of them, whichever has opened it.

    Attributes:
        cuts: how often they were cut.
    """

    def __init__(self) -> None:
        self.cuts = 0
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def watch(self, request: httpx.Request) -> None:
        """Hear of the connection on which this request is sent."""
        request.extensions = {**request.extensions, "trace": self}

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        """Note a connection; httpcore calls it at everything that happens."""
        if event in _CONNECTED:
            self._sockets.add(info["return_value"].get_extra_info("socket"))

    def cut(self) -> None:
        """End all connections; whoever waits for an answer is told that there will be none."""
        self.cuts += 1
        for each in list(self._sockets):
            with contextlib.suppress(OSError):  # it has been closed
                each.shutdown(socket.SHUT_RDWR)
