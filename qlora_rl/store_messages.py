"""Messages of any length in a key-value store of torch: under a key its pieces, of which the first one comes last.

torch's store lets in whoever reaches its port, and messages are unpickled: each is signed with a secret of the run.
"""

from __future__ import annotations

import hmac
from typing import Any

from qlora_rl.errors import AccessDeniedError

# Of one value of the store; it takes no more than 8 MiB.
_PIECE = 4 * 2**20
_SIGNED = 32  # bytes of a signature
_secret = b""  # of this process's run


def sign_with(secret: bytes) -> None:
    """The processes of a run sign with what rank 0 has made, and read nothing that was signed otherwise."""
    global _secret
    _secret = secret


def put(store: Any, key: str, value: bytes) -> None:
    """Write it; who sees it sees all of it."""
    value = _signature(key, value) + value
    pieces = [value[i : i + _PIECE] for i in range(0, len(value), _PIECE)] or [b""]
    for number, piece in enumerate(pieces[1:], 1):
        store.set(f"{key}/{number}", piece)
    store.set(f"{key}/0", len(pieces).to_bytes(4, "big") + pieces[0])  # last: with it all are there


def is_there(store: Any, key: str) -> bool:
    """Something was put under it, and not dropped."""
    return store.check([f"{key}/0"])


def read(store: Any, key: str) -> bytes:
    """What was put there; waits until something is.

    Raises:
        AccessDeniedError: no process of this run has written it.
    """
    head = store.get(f"{key}/0")
    count = int.from_bytes(head[:4], "big")
    found = b"".join([head[4:], *(store.get(f"{key}/{number}") for number in range(1, count))])
    if not hmac.compare_digest(found[:_SIGNED], _signature(key, found[_SIGNED:])):
        raise AccessDeniedError(
            f"reading {key}: no process of this run has written it. Keep its ports to machines that you trust."
        )
    return found[_SIGNED:]


def drop(store: Any, key: str) -> None:
    """Forget it; harmless where there is nothing."""
    if is_there(store, key):
        count = int.from_bytes(store.get(f"{key}/0")[:4], "big")
        for number in range(count):
            store.delete_key(f"{key}/{number}")


def _signature(key: str, value: bytes) -> bytes:
    return hmac.digest(_secret, key.encode() + b"\0" + value, "sha256")
