"""`Outgoing`: full weights on their way out of the trainer, in parts; while one is sent the next one is made. No vLLM
here."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from qlora_rl.engine.staging import encode_part
from qlora_rl.errors import AdapterRejectedError, EngineBrokenError, ServerTakenError, SyncError

# Small weights are sent together until they are so large; a larger one is a part of its own. In bytes.
PART_BYTES = 4 * 2**20
# Errors that say by their type what is wrong.
_UNCHANGED = (AdapterRejectedError, EngineBrokenError, ServerTakenError)


class Part:
    """Some weights as a safetensors file.

    Args:
        pieces: of its bytes, in their order.
    """

    def __init__(self, pieces: Sequence[memoryview]):
        self.pieces = pieces

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of its bytes."""
        found = hashlib.sha256()
        for piece in self.pieces:
            found.update(piece)
        return found.hexdigest()

    @functools.cached_property
    def blob(self) -> bytes:
        """Its bytes, as a copy."""
        return b"".join(self.pieces)


class DensePush(Protocol):
    """Full weights on their way to one engine; every part is checked there, and nothing is loaded before `commit`.

    Attributes:
        nbytes: of all weights that the engine wants.
    """

    nbytes: int

    def send(self, part: Part) -> None:
        """The next part."""
        ...

    def commit(self) -> None:
        """All parts were sent: serve them."""
        ...

    def abandon(self) -> None:
        """Throw away what was sent."""
        ...


class Outgoing:
    """Weights of one version.

    Args:
        version: for messages.

    Attributes:
        count, nbytes: of the weights that were made.
    """

    def __init__(self, version: int):
        self.version = version
        self.count = self.nbytes = 0

    def send(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        send: Callable[[Part], None],
        abandon: Callable[[], None],
        part_bytes: int | None = None,
    ) -> None:
        """Make all weights, and `send` them as files from a thread of its own; two parts exist at once, no more.

        Args:
            weights: by transformers' name; read once.
            send: one part, in their order.
            abandon: called after an error; raises nothing.
            part_bytes: `PART_BYTES` by default.

        Raises:
            SyncError: they could not be made, or did not arrive.
        """
        on_cpu = ((name, weight.detach().cpu().contiguous()) for name, weight in weights)
        self.stream(on_cpu, lambda part: send(Part(encode_part(part))), abandon, part_bytes)

    def stream(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        send: Callable[[Sequence[tuple[str, torch.Tensor]]], None],
        abandon: Callable[[], None],
        part_bytes: int | None = None,
    ) -> None:
        """`send`, whose parts are the weights themselves, on the device where they were made."""
        part_bytes = part_bytes or PART_BYTES
        try:
            with ThreadPoolExecutor(1, "qlora-rl-upload") as sender:
                sent: Future[None] | None = None
                waiting: list[tuple[str, torch.Tensor]] = []
                size = 0
                for name, weight in weights:
                    waiting.append((name, weight.detach()))
                    del weight
                    self.count, size = self.count + 1, size + _nbytes(waiting[-1][1])
                    if size >= part_bytes:
                        if sent is not None:
                            sent.result()
                        sent = sender.submit(send, waiting)
                        waiting, self.nbytes, size = [], self.nbytes + size, 0
                if sent is not None:
                    sent.result()
                if waiting:
                    send(waiting)
                self.nbytes += size
        except BaseException as error:
            abandon()
            if not isinstance(error, Exception) or isinstance(error, _UNCHANGED):
                raise
            raise SyncError(
                f"pushing weights version={self.version}: {error} (after {self.count} tensors). What served goes on "
                "serving. Push again.",
                reasons=getattr(error, "reasons", ()),
            ) from error


def _nbytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()
