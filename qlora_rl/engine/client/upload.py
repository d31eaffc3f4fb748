"""`upload`: full weights to a server, part by part; through a directory that both sides see, or in requests. HTTP only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from qlora_rl.engine.stage import encode_part, part_name
from qlora_rl.errors import AdapterRejectedError, EngineBrokenError, QloraRLError, ServerTakenError, SyncError

# Small weights are sent together until they are so large; a larger one is a part of its own. In bytes.
PART_BYTES = 4 * 2**20
# Of one request, in bytes, if the server takes so much.
PIECE_BYTES = 8 * 2**20

# The name of a directory of `Stage`.
_DIRECTORY = re.compile("qlora-rl-weights-[0-9a-f]{1,64}")
# Errors that say by their type what is wrong.
_UNCHANGED = (AdapterRejectedError, EngineBrokenError, ServerTakenError)

Ask = Callable[..., dict[str, Any]]


def upload(
    ask: Ask,
    weights: Iterable[tuple[str, torch.Tensor]],
    version: int,
    *,
    max_body_bytes: int,
    directory: Path | None,
    commit: Ask,
) -> tuple[int, str]:
    """Send all weights; the server serves them when the last one has come.

    Args:
        ask: method, path, body -> the server's answer; a request may be repeated.
        weights: by transformers' name; read once.
        version: that they get.
        max_body_bytes: of one request.
        directory: of the server, seen from here; `None` sends the bytes.
        commit: asks as `ask` does, for the one request that changes what serves.

    Returns:
        Bytes of the weights, and the server's name of this push, which stands for a digest of them.

    Raises:
        SyncError: they could not be made, or did not arrive; says what serves.
    """
    begun = ask("POST", f"/weights?version={version}")
    push = begun["push"]
    if not _DIRECTORY.fullmatch(begun["directory"]):
        raise SyncError(
            f"pushing weights: the server names directory={begun['directory'][:60]!r}, which no server of ours does. Ask the right one."
        )
    way = _Way(ask, push, min(PIECE_BYTES, max_body_bytes), directory / begun["directory"] if directory else None)
    count = nbytes = 0
    try:
        # While a part is on its way the next one is made: two exist at once, no more.
        with ThreadPoolExecutor(1, "qlora-rl-upload") as sender:
            sent: Future[None] | None = None
            waiting: list[tuple[str, torch.Tensor]] = []
            size = 0
            for name, weight in weights:
                waiting.append((name, weight.detach().cpu().contiguous()))
                del weight
                count, size = count + 1, size + _nbytes(waiting[-1][1])
                if size >= PART_BYTES:
                    if sent is not None:
                        sent.result()
                    sent = sender.submit(way.send, waiting)
                    waiting, nbytes, size = [], nbytes + size, 0
            if sent is not None:
                sent.result()
            if waiting:
                way.send(waiting)
            nbytes += size
    except BaseException as error:
        with contextlib.suppress(QloraRLError):
            ask("DELETE", f"/weights?push={push}")
        if not isinstance(error, Exception) or isinstance(error, _UNCHANGED):
            raise
        raise SyncError(
            f"pushing weights version={version}: {error} (after {count} tensors). What served goes on serving. Push again.",
            reasons=getattr(error, "reasons", ()),
        ) from error
    commit("POST", f"/weights/commit?push={push}")
    return nbytes, push


class _Way:
    """Numbers the parts and brings them over."""

    def __init__(self, ask: Ask, push: str, piece_bytes: int, directory: Path | None):
        self._ask, self._push, self._piece_bytes, self._directory = ask, push, piece_bytes, directory
        self._index = 0

    def send(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """One part."""
        parts, digest = encode_part(weights), hashlib.sha256()
        if self._directory is not None:
            self._write(self._directory, parts, digest)
        else:
            self._put(parts, digest)
        self._ask("POST", f"/weights/part?push={self._push}&part={self._index}&digest={digest.hexdigest()}")
        self._index += 1

    def _write(self, directory: Path, parts: list[memoryview], digest: Any) -> None:
        """Under another name first: a file of a part's name is whole."""
        staged, file = directory / f".{self._index}", directory / part_name(self._index)
        try:
            with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as out:
                for part in parts:
                    digest.update(part)
                    out.write(part)
            os.rename(staged, file)
        except OSError as error:
            raise SyncError(f"writing {file}: {error.strerror}") from error

    def _put(self, parts: list[memoryview], digest: Any) -> None:
        offset, piece = 0, bytearray()
        for part in parts:
            digest.update(part)
            while part:
                room = self._piece_bytes - len(piece)
                piece += part[:room]
                part = part[room:]
                if len(piece) == self._piece_bytes:
                    offset, piece = self._put_piece(offset, piece), bytearray()
        if piece:
            self._put_piece(offset, piece)

    def _put_piece(self, offset: int, piece: bytearray) -> int:
        self._ask("PUT", f"/weights?push={self._push}&part={self._index}&offset={offset}", bytes(piece))
        return offset + len(piece)


def _nbytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()
