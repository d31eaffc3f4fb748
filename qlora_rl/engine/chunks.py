"""`send_all`: full weights on their way out of the trainer, in parts; while one is sent the next one is made. No vLLM
here."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from qlora_rl.engine.staging import encode_part
from qlora_rl.errors import AdapterRejectedError, EngineBrokenError, ServerTakenError, SyncError

# Small weights are sent together until they are so large; a larger one is a part of its own. In bytes.
PART_BYTES = 4 * 2**20
# Errors that say by their type what is wrong.
_UNCHANGED = (AdapterRejectedError, EngineBrokenError, ServerTakenError)


class Part:
    """Some weights, which are sent together as a safetensors file. From any thread.

    Args:
        weights: by transformers' name; on the CPU and contiguous.
    """

    def __init__(self, weights: Sequence[tuple[str, torch.Tensor]] = ()):
        self.weights = weights
        self._copying = threading.Lock()
        self._blob: bytes | None = None

    @classmethod
    def of(cls, blob: bytes) -> Part:
        """One whose file was kept."""
        part = cls()
        part.pieces = [memoryview(blob)]
        return part

    @functools.cached_property
    def pieces(self) -> list[memoryview]:
        """Of the file's bytes, in their order."""
        return encode_part(self.weights)

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return sum(piece.nbytes for piece in self.pieces)

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the file."""
        found = hashlib.sha256()
        for piece in self.pieces:
            found.update(piece)
        return found.hexdigest()

    @property
    def blob(self) -> bytes:
        """The file's bytes, as a copy: one object for all threads that ask."""
        with self._copying:  # a cached property has no lock from Python 3.12 on
            if self._blob is None:
                self._blob = b"".join(self.pieces)
            return self._blob


def grouped(weights: Iterable[tuple[str, torch.Tensor]], nbytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Neighbours together until they have so many bytes; a larger one closes its group."""
    group: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, weight in weights:
        group.append((name, weight))
        size += _nbytes(weight)
        del weight
        if size >= nbytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def send_all(
    weights: Iterable[tuple[str, torch.Tensor]],
    version: int,
    send: Callable[[Part], None],
    abandon: Callable[[], None],
) -> int:
    """Make all weights, and `send` them from a thread of its own; two parts exist at once, no more.

    Args:
        weights: by transformers' name; read once.
        version: of them, for messages.
        send: one part, in their order.
        abandon: called after an error; raises nothing.

    Returns:
        Bytes.

    Raises:
        SyncError: they could not be made, or did not arrive.
    """
    count = nbytes = 0

    def made() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal count, nbytes
        for name, weight in weights:
            count, nbytes = count + 1, nbytes + _nbytes(weight)
            yield name, weight.detach().cpu().contiguous()
            del weight  # or two would be held while the next one is made

    try:
        with ThreadPoolExecutor(1, "qlora-rl-upload") as sender:
            sent: Future[None] | None = None
            for part in grouped(made(), PART_BYTES):
                if sent is not None:
                    sent.result()
                sent = sender.submit(send, Part(part))
                del part
            if sent is not None:
                sent.result()
    except BaseException as error:
        abandon()
        if not isinstance(error, Exception) or isinstance(error, _UNCHANGED):
            raise
        raise SyncError(
            f"pushing weights version={version}: {error} (after {count} tensors). What served goes on serving. Push "
            "again.",
            reasons=getattr(error, "reasons", ()),
        ) from error
    return nbytes


def _nbytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()
