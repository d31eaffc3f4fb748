"""`ServerPush`: full weights to a server, part by part; through a directory that both sides see, or in requests. HTTP
only."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from qlora_rl.engine.chunks import PART_BYTES, Outgoing, Part
from qlora_rl.engine.staging import part_name
from qlora_rl.errors import QloraRLError, SyncError

# Of one request, in bytes, if the server takes so much.
PIECE_BYTES = 8 * 2**20

# The name of a directory of `Stage`.
_DIRECTORY = re.compile("qlora-rl-weights-[0-9a-f]{1,64}")

Ask = Callable[..., dict[str, Any]]


class ServerPush:
    """Opens a push; numbers the parts, and brings them over.

    Args:
        ask: method, path, body -> the server's answer; a request may be repeated.
        version: that the weights get.
        max_body_bytes: of one request.
        directory: of the server, seen from here; `None` sends the bytes.
        commit: asks the server to serve what has come under the push's name.

    Attributes:
        name: the server's name of this push, which stands for a digest of the weights.
        nbytes: of all weights that the server wants.

    Raises:
        SyncError: the server has no room, or is none of ours.
    """

    def __init__(
        self, ask: Ask, version: int, *, max_body_bytes: int, directory: Path | None, commit: Callable[[str], None]
    ):
        begun = ask("POST", f"/weights?version={version}")
        if not _DIRECTORY.fullmatch(begun["directory"]):
            raise SyncError(
                f"pushing weights: the server names directory={begun['directory'][:60]!r}, which no server of ours "
                "does. Ask the right one."
            )
        self.name, self.nbytes = str(begun["push"]), int(begun.get("nbytes", 0))
        self._ask, self._commit, self._index = ask, commit, 0
        self._piece_bytes = min(PIECE_BYTES, max_body_bytes)
        self._directory = directory / begun["directory"] if directory else None

    def upload(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Send all weights, and have them served; their bytes.

        Raises:
            SyncError: they could not be made, or did not arrive; says what serves.
        """
        outgoing = Outgoing(version)
        outgoing.send(weights, self.send, self.abandon, PART_BYTES)
        self.commit()
        return outgoing.nbytes

    def send(self, part: Part) -> None:
        """One part; the server checks it by its digest."""
        if self._directory is not None:
            self._write(self._directory, part)
        else:
            self._put(part)
        self._ask("POST", f"/weights/part?push={self.name}&part={self._index}&digest={part.digest}")
        self._index += 1

    def commit(self) -> None:
        """All parts were sent: have them served."""
        self._commit(self.name)

    def abandon(self) -> None:
        """Throw away what has come."""
        with contextlib.suppress(QloraRLError):
            self._ask("DELETE", f"/weights?push={self.name}")

    def _write(self, directory: Path, part: Part) -> None:
        """Under another name first: a file of a part's name is whole."""
        staged, file = directory / f".{self._index}", directory / part_name(self._index)
        try:
            with os.fdopen(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as out:
                for piece in part.pieces:
                    out.write(piece)
            os.rename(staged, file)
        except OSError as error:
            raise SyncError(f"writing {file}: {error.strerror}") from error

    def _put(self, part: Part) -> None:
        offset, piece = 0, bytearray()
        for rest in part.pieces:
            while rest:
                room = self._piece_bytes - len(piece)
                piece += rest[:room]
                rest = rest[room:]
                if len(piece) == self._piece_bytes:
                    offset, piece = self._put_piece(offset, piece), bytearray()
        if piece:
            self._put_piece(offset, piece)

    def _put_piece(self, offset: int, piece: bytearray) -> int:
        self._ask("PUT", f"/weights?push={self.name}&part={self._index}&offset={offset}", bytes(piece))
        return offset + len(piece)
