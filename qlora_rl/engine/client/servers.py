"""`connect`: servers of `qlora-rl serve` as one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qlora_rl.engine.client.engine import ServerEngine
from qlora_rl.engine.fleet.engine import Fleet
from qlora_rl.errors import ConfigConflictError


def connect(url: str | Sequence[str], *, wait_s: float = 120.0, **options: Any) -> ServerEngine | Fleet:
    """The server at `url` as an engine, or those at several as one.

    ::

        with connect(["http://a:8000", "http://b:8000"], api_key_file="key") as engine:
            rollout = engine.generate([[40, 41, 42]] * 8, max_tokens=16, seed=0)

    Args:
        url: such as "http://127.0.0.1:8000"; several in a list, or in one text, "http://a:8000,http://b:8000".
        wait_s: how long to wait for each server at first, and for one of them when none is left, in seconds.
        options: of `ServerEngine`, the same for all: one key, one `shared_dir`.

    Raises:
        BaseMismatchError: a server holds another base than the first; names it.
        ConfigConflictError: two URLs lead to one server, or the servers cannot be used for one another.
        AccessDeniedError, EngineBrokenError, EngineUnsupportedError: as `ServerEngine`.
    """
    parts = url.split(",") if isinstance(url, str) else url
    urls = [part.strip().rstrip("/") for part in parts if part.strip()]
    if not urls or len(set(urls)) < len(urls):
        raise ConfigConflictError(
            f"connecting to servers: urls={urls}: a URL is missing or named twice. Name each one once."
        )
    if len(urls) == 1:
        return ServerEngine(urls[0], wait_s=wait_s, **options)
    if (way := options.get("weights_by", "http")) != "http":
        raise ConfigConflictError(
            f"connecting to servers: weights_by={way!r} with {len(urls)} URLs: what is kept for a server that comes "
            "back are files. Use 'http'."
        )
    connected: list[ServerEngine] = []
    try:
        for each in urls:
            connected.append(ServerEngine(each, wait_s=wait_s, **options))
    except BaseException:
        for engine in connected:
            engine.close()
        raise
    return Fleet(connected, wait_s=wait_s)
