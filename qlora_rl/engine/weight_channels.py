"""How full weights go from the trainer's device into that of an engine's worker without a file: by a broadcast in a
group of two. Both ends; torch only.

NCCL has not been run; gloo has the same code around it. vLLM's own weight transfer takes such ways, too, but loads
while it receives, and takes pickled handles over HTTP.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch

from qlora_rl.errors import ConfigConflictError, SyncError

# Backends of a group of two.
WAYS = ("gloo", "nccl")
# Every weight begins at a multiple of so many bytes.
ALIGNED = 16
# Words of 8 bytes that a checksum reads at once.
_WORDS = 2**20
_TIMEOUT = timedelta(seconds=120)

Places = list[tuple[str, str, list[int]]]
Ask = Callable[[dict[str, Any]], None]


# --- one part -------------------------------------------------------------------------------------------------------


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


def checksum(buffer: torch.Tensor) -> int:
    """Of a buffer of `pack`, on its own device: its words of 8 bytes, each times an odd number of its place, added up
    modulo 2**64.

    Every change of one word changes it, whatever it is; so does nearly every other.
    """
    words, found = buffer.view(torch.int64), 0
    for first in range(0, words.numel(), _WORDS):
        piece = words[first : first + _WORDS]
        odd = torch.arange(first, first + piece.numel(), dtype=torch.int64, device=piece.device) * 0x9E3779B97F4A7C2 + 1
        found = (found + int((piece * (odd | 1)).sum())) % 2**64
    return found


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


# --- both ends ------------------------------------------------------------------------------------------------------


def open_carrier(way: str, towards: str) -> Group:
    """The trainer's end of a way.

    Args:
        way: one of `WAYS`.
        towards: host of the engine; says by which address this machine is reached from there.

    Raises:
        ConfigConflictError: there is no such way here; says which there are.
        SyncError: `towards` is no host that can be reached.
    """
    check_way(way)
    try:
        return Group(way, _own_address(towards))
    except OSError as error:
        raise SyncError(f"sending weights: weights_by={way!r}: {error}. Use weights_by='http'.") from error


def check_way(way: str) -> None:
    """Raise `ConfigConflictError` where this machine does not have that way."""
    if way not in WAYS:
        raise ConfigConflictError(f"sending weights: weights_by={way!r} is not one of {('http', *WAYS)}. Use 'http'.")
    if way == "nccl" and not torch.cuda.is_available():
        raise ConfigConflictError(
            f"sending weights: weights_by={way!r} needs an NVIDIA GPU, and torch {torch.__version__} finds none. Use "
            "'http'."
        )


def open_receiver(told: Mapping[str, Any], device: torch.device) -> GroupEnd:
    """The worker's end of what `Group.describe` says.

    Raises:
        ConfigConflictError: there is no such way here.
    """
    check_way(way := str(told.get("way")))
    return GroupEnd(way, str(told["host"]), int(told["port"]), device)


# --- a group of two -------------------------------------------------------------------------------------------------


class Group:
    """The trainer is rank 0 of a group of two and broadcasts; over gloo on the CPU, over NCCL on GPUs (not run yet)."""

    def __init__(self, backend: str, host: str):
        self.backend, self.host = backend, host
        self.device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._asker = ThreadPoolExecutor(1, "qlora-rl-carrier")
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            listening.bind((host, 0))
            listening.listen()
            self.port = listening.getsockname()[1]
            self._store = torch.distributed.TCPStore(
                host, self.port, 2, True, _TIMEOUT, wait_for_workers=False, master_listen_fd=listening.detach()
            )
        self._group: Any = None

    def describe(self) -> dict[str, Any]:
        """Where the group meets."""
        return {"way": self.backend, "host": self.host, "port": self.port}

    def join(self) -> None:
        """Wait for the other end.

        Raises:
            SyncError: it does not come.
        """
        try:
            self._group = _group(self.backend, self._store, 0, self.host)
        except Exception as error:
            first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise SyncError(
                f"sending weights: the engine does not come to {self.host} port {self.port} for "
                f"weights_by={self.backend!r}: {first}. Let it reach that address, or use weights_by='http'."
            ) from error

    def carry(self, buffer: torch.Tensor, ask: Ask) -> None:
        """Bring it over; `ask` gives the other end a ticket, and returns when it has the bytes.

        Asks and broadcasts at the same time, as either waits for the other.
        """
        asked: Future[None] = self._asker.submit(ask, {})
        work = self._group.broadcast(buffer, 0)
        asked.result()  # it has all bytes; or has said why not, and nobody waits for the broadcast
        work.wait()

    def close(self) -> None:
        """Leave nothing behind; harmless when repeated."""
        self._asker.shutdown(wait=False)
        held, self._group, self._store = [self._group, self._store], None, None
        # Its end waits for a broadcast that nobody takes, up to the time limit: not in this thread.
        threading.Thread(target=held.clear, daemon=True, name="qlora-rl-carrier-end").start()


class GroupEnd:
    """Rank 1 of the trainer's group; joins in a thread of its own, so that an engine that cannot says so at once."""

    def __init__(self, backend: str, host: str, port: int, device: torch.device):
        self._device = device
        self._thread = ThreadPoolExecutor(1, "qlora-rl-receiver")

        def join() -> Any:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            store = torch.distributed.TCPStore(host, port, 2, False, _TIMEOUT)
            return _group(backend, store, 1, _own_address(host))

        self._group: Future[Any] = self._thread.submit(join)

    def receive(self, ticket: Mapping[str, Any], nbytes: int) -> torch.Tensor:
        """The bytes, as a copy of its own."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._group.result().broadcast(buffer, 0).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return buffer

    def close(self) -> None:
        """Harmless when repeated."""
        self._thread.shutdown(wait=False)


def _group(backend: str, store: Any, rank: int, address: str) -> Any:
    """A group of two that the process knows nothing else of: its own, of other sizes, stay as they are.

    Args:
        backend: "gloo" or "nccl".
        store: where they meet.
        rank: 0 or 1.
        address: of this machine, as the other end sees it: gloo would take what the host's name means, often the
            machine itself alone.
    """
    from torch import distributed

    if backend == "gloo":
        gloo = distributed.ProcessGroupGloo
        ours = gloo._Options()
        ours._devices, ours._timeout = [gloo.create_device(hostname=address)], _TIMEOUT
        return gloo(store, rank, 2, ours)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return distributed.ProcessGroupNCCL(store, rank, 2, options)


def _own_address(towards: str) -> str:
    """Of this machine, as `towards` sees it; nothing is sent."""
    known = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)
    family, _, _, _, address = min(known, key=lambda found: found[0] != socket.AF_INET)
    with contextlib.closing(socket.socket(family, socket.SOCK_DGRAM)) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
