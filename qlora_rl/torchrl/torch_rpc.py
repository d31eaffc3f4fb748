"""`TorchDistributedRPC`: messages over `torch.distributed.rpc`, between two workers that have called `init_rpc`."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict

import torch.distributed.rpc as rpc

# What has arrived in this process, by box; filled by the threads of torch's RPC agent.
_BOXES: defaultdict[str, queue.Queue[bytes]] = defaultdict(queue.Queue)
_LOCK = threading.Lock()


class TorchDistributedRPC:
    """Both processes are workers of one RPC world, and stay so: a worker that was killed cannot rejoin it.

    After a loss both sides leave with `rpc.shutdown(graceful=False)`, call `init_rpc` again, and create their ends
    again.

    Args:
        sender: the name with which the trainer's process has called `init_rpc`.
        receiver: the sampler's.
        name: of this way, where there are several between the two.
    """

    def __init__(self, sender: str = "trainer", receiver: str = "sampler", name: str = "policy"):
        self.sender, self.receiver, self.name = sender, receiver, name

    def connect(self, timeout_s: float) -> _Boxed:
        """The sender's end; waits for the receiver's process."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                rpc.rpc_sync(self.receiver, _open, (f"{self.name}/receiver",), timeout=timeout_s)
                return _Boxed(self.receiver, f"{self.name}/receiver", f"{self.name}/sender")
            except RuntimeError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"worker {self.receiver!r}: {error}") from error
            time.sleep(0.05)

    def listen(self) -> _Boxed:
        """The receiver's end."""
        return _Boxed(self.sender, f"{self.name}/sender", f"{self.name}/receiver")


class _Boxed:
    def __init__(self, peer: str, out: str, into: str):
        self._peer, self._out, self._into = peer, out, into
        _open(into)

    def send(self, message: bytes, timeout_s: float) -> None:
        try:
            rpc.rpc_sync(self._peer, _put, (self._out, message), timeout=timeout_s)
        except RuntimeError as error:  # all that torch says of a peer that is gone, or silent
            raise ConnectionError(f"worker {self._peer!r}: {error}") from error

    def receive(self, timeout_s: float) -> bytes | None:
        try:
            return _box(self._into).get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """The world is its owner's."""


def _box(name: str) -> queue.Queue[bytes]:
    with _LOCK:
        return _BOXES[name]


def _open(name: str) -> None:
    _box(name)


def _put(name: str, message: bytes) -> None:
    _box(name).put(message)
