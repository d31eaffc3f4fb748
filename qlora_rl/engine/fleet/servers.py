"""`connect_all`: servers of `qlora-rl serve` at several URLs as one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from qlora_rl.engine.fleet.engine import Fleet
from qlora_rl.engine.fleet.replicas import Replica
from qlora_rl.errors import ConfigConflictError


def connect_all(
    urls: Sequence[str], connect: Callable[..., Replica], *, wait_s: float = 120.0, **options: Any
) -> Fleet:
    """A fleet of the servers at `urls`; `ServerEngine([url, url])` is the same.

    Args:
        urls: of the replicas.
        connect: makes the engine of one URL: `ServerEngine`.
        wait_s: how long to wait for each at first, and for one of them when none is left, in seconds.
        options: of `ServerEngine`, the same for all: one key, one `shared_dir`.

    Raises:
        BaseMismatchError: a replica holds another base than the first; names it.
        ConfigConflictError: two URLs lead to one server, or the replicas cannot be used for one another.
    """
    urls = [url.rstrip("/") for url in urls]
    if not urls or len(set(urls)) < len(urls):
        raise ConfigConflictError(
            f"connecting to servers: urls={urls}: a URL is missing or named twice. Name each one once."
        )
    if (way := options.get("weights_by", "http")) != "http":
        raise ConfigConflictError(
            f"connecting to servers: weights_by={way!r} with {len(urls)} URLs: what is kept for a server that comes back are files. Use 'http'."
        )
    connected: list[Replica] = []
    try:
        for url in urls:
            connected.append(connect(url, wait_s=wait_s, **options))
    except BaseException:
        for each in connected:
            each.close()
        raise
    return Fleet(connected, wait_s=wait_s)
