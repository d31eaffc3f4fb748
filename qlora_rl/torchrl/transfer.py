"""The transfer layer: how the bytes of a version reach the other side.

The order differs: a directory is filled before the receiver is notified, a broadcast begins after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from qlora_rl.adapter.store import default_root
from qlora_rl.documents import read_object
from qlora_rl.errors import SyncError
from qlora_rl.locks import claim, let_go, new_directory

Part = tuple[str, torch.Tensor]
# Tells the receiver: a ticket of JSON values and, where wanted, bytes. Returns what waits until the receiver has taken
# them.
Announce = Callable[..., Callable[[], Any]]

SHARD_BYTES = 256 * 2**20
MARKER = "ready.json"


class Transfer(Protocol):
    """One way to send a version's tensors."""

    name: str

    def offer(self) -> dict[str, Any]:
        """The sender opens its end, at each join; what the receiver must know to open the other."""
        ...

    def accept(self, offer: Mapping[str, Any]) -> None:
        """The receiver opens its end; may return before the sender has taken note."""
        ...

    def send(self, version: int, parts: Iterable[Part], announce: Announce) -> Callable[[], Any]:
        """Send all of them, and announce them; returns what `announce` did."""
        ...

    def receive(self, ticket: Mapping[str, Any], body: bytes) -> Iterator[Part]:
        """What was announced; raises before its end where it is not whole."""
        ...

    def close(self) -> None:
        """Free everything, on either side."""
        ...


class BodyTransfer:
    """The bytes are sent in the announcement itself; nothing else is shared. Holds a whole version in memory."""

    name = "body"

    def offer(self) -> dict[str, Any]:
        """Nothing to open."""
        return {}

    def accept(self, offer: Mapping[str, Any]) -> None:
        """Nothing to open."""

    def send(self, version: int, parts: Iterable[Part], announce: Announce) -> Callable[[], Any]:
        """One safetensors blob."""
        from safetensors.torch import save

        return announce({}, save({name: tensor.contiguous() for name, tensor in parts}))

    def receive(self, ticket: Mapping[str, Any], body: bytes) -> Iterator[Part]:
        """Its tensors."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            yield from load(body).items()
        except SafetensorError as error:
            raise SyncError(f"reading a body of {len(body)} bytes: {error}. Push again.") from error

    def close(self) -> None:
        """Nothing was opened."""


@dataclass(frozen=True)
class Published:
    """What is ready in a directory.

    Attributes:
        version: of the policy.
        tensors: all of them.
    """

    version: int
    tensors: dict[str, torch.Tensor]


class DirectoryTransfer:
    """Two buffers in a directory that both sides see, written in turns, and a marker that names the one to read.

    The marker is replaced in one step when a buffer is whole, and holds the digest of each of its files: what a reader
    gets is one version as it was written, or it is read again. Readers need not be known to the writer.

    Args:
        root: the directory; by default a new one on tmpfs, which goes with the sender's `close`.
        shard_bytes: of one file; full weights are written and read in several.
    """

    name = "directory"

    def __init__(self, root: str | os.PathLike[str] | None = None, shard_bytes: int = SHARD_BYTES):
        self._is_ours = root is None
        self.root = new_directory(default_root(), "qlora-rl-torchrl-") if root is None else Path(root)
        self.shard_bytes = shard_bytes
        self._is_writer = False

    def offer(self) -> dict[str, Any]:
        """Makes the directory."""
        self.root.mkdir(mode=0o700 if self._is_ours else 0o777, parents=True, exist_ok=True)
        if self._is_ours:
            claim(self.root)  # in the process that writes; it may have been made in another, or be opened again
        self._is_writer = True
        return {}

    def accept(self, offer: Mapping[str, Any]) -> None:
        """See whether this side sees the directory.

        Raises:
            SyncError: it does not.
        """
        if not self.root.is_dir():
            raise SyncError(
                f"opening {self.root}: it does not exist on this side. Give both sides one directory: root=."
            )

    def send(self, version: int, parts: Iterable[Part], announce: Announce) -> Callable[[], Any]:
        """Write, mark, announce."""
        self.publish(version, parts)
        return announce({"version": version})

    def receive(self, ticket: Mapping[str, Any], body: bytes) -> Iterator[Part]:
        """Shard by shard, each compared with its digest."""
        marker = self._marker()
        if marker is None or marker["version"] != ticket["version"]:
            raise SyncError(f"reading version={ticket['version']} at {self.root}: another one is marked. Push again.")
        for shard in self._shards(marker):
            yield from shard.items()

    def publish(self, version: int, parts: Iterable[Part]) -> None:
        """Write a version into the buffer that is not marked, then mark it.

        Raises:
            SyncError: the disk is full or not writable; the version before it stays marked.
        """
        marker = self._marker()
        buffer = 0 if marker is None else 1 - marker["buffer"]
        place = self.root / f"buffer-{buffer}"
        try:
            shutil.rmtree(place, ignore_errors=True)  # new files: one who still reads an old one reads it to its end
            place.mkdir(parents=True)
            files = [
                self._write(place / f"{index:05d}-{secrets.token_hex(4)}", shard) for index, shard in self._cut(parts)
            ]
            staged = self.root / f".{MARKER}-{secrets.token_hex(4)}"
            staged.write_text(json.dumps({"version": version, "buffer": buffer, "files": files}))
            os.replace(staged, self.root / MARKER)
        except OSError as error:
            raise SyncError(
                f"writing version={version} at {self.root}: {error}. Free space there, or give both sides another "
                "root=."
            ) from error

    def read(self, after: int = 0) -> Published | None:
        """The newest version as a whole, if it is newer than `after`; for readers on their own.

        Raises:
            SyncError: what is marked is damaged.
        """
        while (marker := self._marker()) is not None and marker["version"] > after:
            try:
                tensors = {name: tensor for shard in self._shards(marker) for name, tensor in shard.items()}
            except SyncError:
                if self._marker() == marker:
                    raise
                continue  # it was overwritten meanwhile, by a version after the next
            return Published(marker["version"], tensors)
        return None

    def close(self) -> None:
        """Remove the directory, where it was made here."""
        if self._is_writer and self._is_ours:
            shutil.rmtree(self.root, ignore_errors=True)
            let_go(self.root)

    def _marker(self) -> dict[str, Any] | None:
        try:
            found = read_object(self.root / MARKER)
            if [*map(type, map(found.get, ("version", "buffer", "files")))] != [int, int, list]:
                raise ValueError("it is no marker")
            for file, digest in found["files"]:
                if not isinstance(file, str) or not isinstance(digest, str):
                    raise ValueError("it is no marker")
            return found
        except FileNotFoundError:
            return None
        except (OSError, TypeError, ValueError) as error:
            raise SyncError(
                f"reading {self.root / MARKER}: {error}. Something else writes there; push again."
            ) from error

    def _cut(self, parts: Iterable[Part]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        shard: dict[str, torch.Tensor] = {}
        index = size = 0
        for name, tensor in parts:
            shard[name] = tensor.contiguous()
            size += tensor.numel() * tensor.element_size()
            if size >= self.shard_bytes:
                yield index, shard
                shard, size, index = {}, 0, index + 1
        if shard:
            yield index, shard

    def _write(self, path: Path, shard: dict[str, torch.Tensor]) -> tuple[str, str]:
        from safetensors.torch import save

        blob = save(shard)
        path.write_bytes(blob)
        return str(path.relative_to(self.root)), hashlib.blake2b(blob).hexdigest()

    def _shards(self, marker: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
        from safetensors import SafetensorError
        from safetensors.torch import load

        for file, digest in marker["files"]:
            try:
                blob = (self.root / file).read_bytes()
            except (OSError, ValueError):  # gone, or another's: a directory, a name that is none
                blob = b""
            if hashlib.blake2b(blob).hexdigest() != digest:
                raise SyncError(f"reading version={marker['version']}: {file} is not what was written. Push again.")
            try:
                tensors = load(blob)
            except SafetensorError as error:
                raise SyncError(f"reading version={marker['version']}: {file}: {error}. Push again.") from error
            yield tensors
