"""Messages of any length in a key-value store of torch: under a key its pieces, of which the first one comes last."""

from __future__ import annotations

from typing import Any

# Of one value of the store; it takes no more than 8 MiB.
_PIECE = 4 * 2**20


def put(store: Any, key: str, value: bytes) -> None:
    """Write it; who sees it sees all of it."""
    pieces = [value[i : i + _PIECE] for i in range(0, len(value), _PIECE)] or [b""]
    for number, piece in enumerate(pieces[1:], 1):
        store.set(f"{key}/{number}", piece)
    store.set(f"{key}/0", len(pieces).to_bytes(4, "big") + pieces[0])  # last: with it all are there


def is_there(store: Any, key: str) -> bool:
    """Something was put under it, and not dropped."""
    return store.check([f"{key}/0"])


def read(store: Any, key: str) -> bytes:
    """What was put there; waits until something is."""
    head = store.get(f"{key}/0")
    count = int.from_bytes(head[:4], "big")
    return b"".join([head[4:], *(store.get(f"{key}/{number}") for number in range(1, count))])


def drop(store: Any, key: str) -> None:
    """Forget it; harmless where there is nothing."""
    if is_there(store, key):
        count = int.from_bytes(store.get(f"{key}/0")[:4], "big")
        for number in range(count):
            store.delete_key(f"{key}/{number}")
