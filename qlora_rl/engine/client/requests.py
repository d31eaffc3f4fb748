"""What a client of a server sends: its key, and which version it wants; and the connections on which it does."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from qlora_rl.engine.client.http_errors import KEY_VARIABLE
from qlora_rl.errors import AccessDeniedError, ConfigConflictError, VersionGoneError

logger = logging.getLogger(__name__)


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


def near_directory(about: Mapping[str, Any]) -> Path | None:
    """The adapter directory of a server that takes full weights, by its own account; `None` where we could not write to
    it."""
    near = Path(about["adapter_dir"])
    return near.resolve() if about.get("takes_dense", False) and os.access(near, os.W_OK) else None


def expected(
    version: int | None, serves: tuple[int, str | None], before: tuple[int, str | None] | None
) -> dict[str, Any]:
    """What a request names: the version that must answer it, and its digest.

    Args:
        version: that is wanted; `None` is that which serves.
        serves, before: version and digest.

    Raises:
        VersionGoneError: it is neither.
    """
    if version is None:
        return {"version": serves[0], "digest": serves[1]}
    if version == serves[0]:  # which a push may make the one before, while this is asked
        return {"version": version, "digest": serves[1], "held": True}
    if before is None or before[0] != version:
        raise VersionGoneError(
            f"generating: version={version} is asked for, and is neither version={serves[0]}, which serves, nor the "
            "one before it. Generate again, with what serves now."
        )
    return {"version": version, "digest": before[1], "held": True}


def shared_with(
    url: str,
    directory: Path,
    ask: Callable[..., dict[str, Any]],
    about: Mapping[str, Any],
    *,
    quietly: bool = False,
) -> Path | None:
    """The directory, if the server at `url` sees there what we write; it is asked with `ask`.

    Raises:
        ConfigConflictError: we cannot write there.
    """
    content = uuid.uuid4().hex.encode()
    probe = directory / f".qlora-rl-probe-{uuid.uuid4().hex}"
    try:
        probe.write_bytes(content)
    except OSError as error:
        raise ConfigConflictError(f"sharing a directory with a server: {directory}: {error.strerror}.") from error
    try:
        seen = ask("POST", "/probe", lambda: {"path": probe.name})["digest"]
    finally:
        probe.unlink(missing_ok=True)
    if seen == hashlib.sha256(content).hexdigest():
        return directory
    logger.log(
        logging.DEBUG if quietly else logging.WARNING,
        "%s is not the adapter directory of the server at %s (%s): adapters are sent in requests",
        directory,
        url,
        about["adapter_dir"],
    )
    return None


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
