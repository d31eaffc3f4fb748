"""`BroadcastTransfer`: tensors by a collective of torch.distributed, in a process group of its own."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from qlora_rl.errors import SyncError
from qlora_rl.torchrl.transfer import Announce, Part

BUCKET_BYTES = 64 * 2**20


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
            for header, bytes_N in self._buckets(parts):
                head_N = torch.frombuffer(bytearray(header), dtype=torch.uint8)
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
                yield from _cut(json.loads(bytes(head_N.tolist())), bytes_N)
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
            self._group = self._make_group()
        placed = tensor.to(self.device)
        self._group.broadcast(placed, root=0).wait()
        return placed

    def _make_group(self) -> Any:
        timeout = timedelta(seconds=self.timeout_s)
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(self._store, self._rank, 2, options)
        options = dist.ProcessGroupGloo._Options()
        # The name of the host need not resolve; what the rendezvous listens on does.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_address())]
        options._timeout = timeout
        return dist.ProcessGroupGloo(self._store, self._rank, 2, options)

    def _own_address(self) -> str:
        """By which the other side can reach this one: that of the interface which leads to the sender's host."""
        if self._rank == 0:
            return self.address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.address, 9))
            return probe.getsockname()[0]

    def _buckets(self, parts: Iterable[Part]) -> Iterator[tuple[bytes, torch.Tensor]]:
        entries: list[tuple[str, str, list[int]]] = []
        held: list[torch.Tensor] = []
        size = 0
        for name, tensor in parts:
            entries.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            held.append(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            size += held[-1].numel()
            if size >= self.bucket_bytes:
                yield json.dumps(entries).encode(), torch.cat(held)
                entries, held, size = [], [], 0
        if entries:
            yield json.dumps(entries).encode(), torch.cat(held)


def _cut(entries: list[tuple[str, str, list[int]]], bytes_N: torch.Tensor) -> Iterator[Part]:
    start = 0
    for name, dtype_name, shape in entries:
        dtype = getattr(torch, dtype_name)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        # A copy begins at an address of its own: a view would have to begin at a multiple of its element's size.
        yield name, bytes_N[start:end].clone().view(dtype).reshape(shape)
        start = end


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
