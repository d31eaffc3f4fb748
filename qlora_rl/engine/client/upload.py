"""`WeightsPush`: full weights to an engine, part by part: in requests, or through a directory that both sides see."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from qlora_rl.engine.chunks import Part, send_all
from qlora_rl.engine.staging import part_name
from qlora_rl.errors import QloraRLError, SyncError

# The name of a directory of `Stage`, which nobody can guess: who sees it sees the engine's own.
_DIRECTORY = re.compile("qlora-rl-weights-[0-9a-f]{1,64}")

Ask = Callable[..., dict[str, Any]]


class WeightsPush:
    """Opens a push; numbers the parts, which are safetensors files, and brings them over.

    Args:
        ask: method, path, body -> the engine's answer; a request may be repeated.
        version: that the weights get.
        commit: asks the engine to serve what has come under the push's name.
        piece_bytes: of one request, at most.
        root: where the engine makes its directories, by its own account; `None` sends the bytes.

    Attributes:
        name: the engine's name of this push, which stands for a digest of the weights.
        nbytes: of all weights that the engine wants.

    Raises:
        SyncError: the engine has no room, or is none of ours.
    """

    def __init__(
        self, ask: Ask, version: int, commit: Callable[[str], None], *, piece_bytes: int, root: Path | None = None
    ):
        self._ask, self._commit, self._piece_bytes, self._index = ask, commit, piece_bytes, 0
        self.version = version
        begun = ask("POST", f"/weights?version={version}")
        self.name, self.nbytes = str(begun["push"]), int(begun.get("nbytes", 0))
        if not _DIRECTORY.fullmatch(name := begun["directory"]):
            self.abandon()
            raise SyncError(
                f"pushing weights: the engine names directory={name[:60]!r}, which none of ours does. Ask the right "
                "one."
            )
        # Root may write into another user's directory, who could not read what is written.
        is_ours = root is not None and os.access(root / name, os.W_OK) and (root / name).stat().st_uid == os.geteuid()
        self._directory = root / name if root is not None and is_ours else None

    def upload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Send all weights, and have them served; their bytes.

        Raises:
            SyncError: they could not be made, or did not arrive; says what serves.
        """
        nbytes = send_all(weights, self.version, self.send, self.abandon)
        self.commit()
        return nbytes

    def send(self, part: Part) -> None:
        """One part, which the engine checks by its digest."""
        if self._directory is not None:
            self._write(self._directory, part)
        else:
            offset = 0
            for piece in self._pieces_of(part):
                self._ask("PUT", f"/weights?push={self.name}&part={self._index}&offset={offset}", piece)
                offset += len(piece)
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

    def _pieces_of(self, part: Part) -> Iterator[bytes]:
        """No longer than one request may be; a part that fits is one object for all engines, which a connection may
        send to all at once."""
        if part.nbytes <= self._piece_bytes:
            yield part.blob
            return
        piece = bytearray()
        for rest in part.pieces:
            while rest:
                room = self._piece_bytes - len(piece)
                piece += rest[:room]
                rest = rest[room:]
                if len(piece) == self._piece_bytes:
                    yield bytes(piece)
                    piece.clear()
        if piece:
            yield bytes(piece)
