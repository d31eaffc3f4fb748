"""The transfer layer: how the bytes of a version reach the other side.

The order differs: a directory is filled before the receiver is notified, a broadcast begins after that.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from qlora_rl.adapter.store import default_root
from qlora_rl.documents import read_object
from qlora_rl.engine.chunks import grouped
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
                self._write(place / f"{index:05d}-{secrets.token_hex(4)}", shard)
                for index, shard in enumerate(grouped(parts, self.shard_bytes))
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

    def _write(self, path: Path, shard: list[Part]) -> tuple[str, str]:
        from safetensors.torch import save

        blob = save({name: tensor.contiguous() for name, tensor in shard})
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


BUCKET_BYTES = 64 * 2**20
# Every weight begins at a multiple of so many bytes.
_ALIGNED = 16

Places = list[tuple[str, str, list[int]]]


class BroadcastTransfer:
    """Rank 0 sends, rank 1 receives. Each join creates a new group, in addition to those that the processes have.

    Tensors are sent in buckets: two numbers, a header (names, dtypes, shapes), the bytes. An empty bucket ends a
    version.

    Args:
        address: of the sender's host, as the receiver sees it.
        port: for the rendezvous; by default a free one.
        backend: "gloo", or "nccl" (one GPU on each side, `device`).
        device: holds the bytes while they are sent; by default the CPU, or the current GPU under NCCL.
        timeout_s: for a peer to take part.
        bucket_bytes: sent at once.
    """

    name = "broadcast"
    is_collective = True  # both sides must be at it at the same time

    def __init__(
        self,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        backend: str = "gloo",
        device: str | None = None,
        timeout_s: float = 60.0,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"making a broadcast: backend={backend!r} is neither 'gloo' nor 'nccl'. Use one of them.")
        self.address, self.port, self.backend = address, port, backend
        self.device = device or ("cuda" if backend == "nccl" else "cpu")
        self.timeout_s, self.bucket_bytes = timeout_s, bucket_bytes
        self._store: Any = None
        self._group: Any = None
        self._rank = 0

    def offer(self) -> dict[str, Any]:
        """Open the rendezvous; the group itself is made with the first version, when the receiver is known to come."""
        self.close()
        self._rank = 0
        self._store = self._open_store(self.port, is_master=True)
        return {"port": self._store.port}

    def accept(self, offer: Mapping[str, Any]) -> None:
        """Come to the rendezvous.

        Raises:
            SyncError: the sender's port cannot be reached.
        """
        self.close()
        self._rank = 1
        try:
            self._store = self._open_store(offer["port"], is_master=False)
        except RuntimeError as error:
            raise SyncError(
                f"opening a broadcast: {self.address}:{offer['port']} cannot be reached: {error}. Give both sides the "
                "address of the sender's host, and a port= that is open."
            ) from error

    def send(self, version: int, parts: Iterable[Part], announce: Announce) -> Callable[[], Any]:
        """Announce, then broadcast bucket by bucket."""
        answer = announce({})
        try:
            for bucket in grouped(parts, self.bucket_bytes):
                bytes_N, places = pack(bucket, torch.device(self.device))
                head_N = torch.frombuffer(bytearray(json.dumps(places).encode()), dtype=torch.uint8)
                self._broadcast(torch.tensor([head_N.numel(), bytes_N.numel()]))
                self._broadcast(head_N)
                self._broadcast(bytes_N)
            self._broadcast(torch.zeros(2, dtype=torch.int64))
        except RuntimeError as error:
            raise ConnectionError(f"the broadcast failed: {_first_line(error)}") from error
        return answer

    def receive(self, ticket: Mapping[str, Any], body: bytes) -> Iterator[Part]:
        """The tensors, as each bucket arrives (CPU)."""
        try:
            while True:
                sizes = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
                if sizes == [0, 0]:
                    return
                head_N, bytes_N = (self._broadcast(torch.empty(size, dtype=torch.uint8)).cpu() for size in sizes)
                yield from unpack(bytes_N, json.loads(bytes(head_N.tolist())))
        except RuntimeError as error:
            raise ConnectionError(f"the broadcast failed: {_first_line(error)}") from error

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and hasattr(self._group, "abort"):
            self._group.abort()
        self._group = self._store = None

    def _open_store(self, port: int, *, is_master: bool) -> Any:
        options: dict[str, Any] = {"timeout": timedelta(seconds=self.timeout_s), "wait_for_workers": False}
        if is_master:
            # By itself it would listen on all interfaces, and whoever comes may take the receiver's place.
            # It still does where the address is a name, which may mean another one here, or none of this machine.
            with contextlib.suppress(OSError, ValueError):
                listener = socket.create_server((str(ipaddress.IPv4Address(self.address)), port))
                port = listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()
        return dist.TCPStore(self.address, port, 2, is_master, **options)

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            address = own_address(self.address) if self._rank else self.address
            limit = timedelta(seconds=self.timeout_s)
            self._group = group_of_two(self.backend, self._store, self._rank, address, limit)
        placed = tensor.to(self.device)
        self._group.broadcast(placed, root=0).wait()
        return placed


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def pack(weights: Sequence[tuple[str, torch.Tensor]], device: torch.device) -> tuple[torch.Tensor, Places]:
    """Weights one after the other in a buffer of bytes on `device`; and name, dtype, shape of each."""
    sizes = [_padded(weight.numel() * weight.element_size()) for _, weight in weights]
    buffer, start, places = torch.zeros(sum(sizes), dtype=torch.uint8, device=device), 0, []
    for (name, weight), size in zip(weights, sizes, strict=True):
        flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
        buffer[start : start + flat.numel()].copy_(flat)
        places.append((name, str(weight.dtype).removeprefix("torch."), list(weight.shape)))
        start += size
    return buffer, places


def unpack(buffer: torch.Tensor, places: Places) -> list[tuple[str, torch.Tensor]]:
    """Inverse of `pack`: views of the buffer.

    Raises:
        SyncError: they do not fill it.
    """
    start, found = 0, []
    for name, kind, shape in places:
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype) or any(side < 0 for side in shape):
            raise SyncError(f"taking weights: {name} has dtype={kind}, shape={shape}, which none can have. Push again.")
        size = dtype.itemsize * torch.Size(shape).numel()
        if start + size > buffer.numel():
            raise SyncError(f"taking weights: {name} ends behind the {buffer.numel()} bytes of its part. Push again.")
        found.append((name, buffer[start : start + size].view(dtype).reshape(shape)))
        start += _padded(size)
    return found


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def group_of_two(backend: str, store: Any, rank: int, address: str, timeout: timedelta) -> Any:
    """A group of two that the process knows nothing else of: its own, of other sizes, stay as they are.

    Args:
        backend: "gloo" or "nccl".
        store: where they meet.
        rank: 0 or 1.
        address: of this machine, as the other end sees it: gloo would take what the host's name means, often the
            machine itself alone.
        timeout: for the other end to take part.
    """
    if backend == "gloo":
        gloo = dist.ProcessGroupGloo
        ours = gloo._Options()
        ours._devices, ours._timeout = [gloo.create_device(hostname=address)], timeout
        return gloo(store, rank, 2, ours)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def own_address(towards: str) -> str:
    """Of this machine, as `towards` sees it; nothing is sent."""
    known = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    family, _, _, _, address = min(known, key=lambda found: found[0] != socket.AF_INET)
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
