"""`Live`: the bytes of the tensors that are made within it, by kind, now and at the peak of each phase."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """A dispatch mode that counts storages from the operator that makes them until they are freed.

    What existed before is not counted. Memory that one operator uses and frees is not seen, nor is what an allocator
    keeps.

    Args:
        kind: the kind of a new tensor, from its shape and dtype.

    Attributes:
        phase: may be set at any time; peaks are kept for each phase by itself.
        now: bytes that are live, by kind.
        peaks: by phase, the bytes by kind at the moment at which their sum was largest.
        most: the most bytes of each kind by itself.
    """

    def __init__(self, kind: Callable[[torch.Tensor], str] = lambda _: "all"):
        super().__init__()
        self._kind = kind
        self._sizes: dict[int, tuple[str, int]] = {}
        self._total = 0
        self.phase = ""
        self.now: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self.most: Counter[str] = Counter()

    @property
    def peak(self) -> int:
        """The most bytes that were live at once."""
        return max((peak.total() for peak in self.peaks.values()), default=0)

    def _gone(self, key: int) -> None:
        kind, size = self._sizes.pop(key)
        self.now[kind] -= size
        self._total -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is_real(tensor)}
        for tensor in filter(_is_real, tree_leaves(out)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if not size or key in given or key in self._sizes:
                continue
            kind = self._kind(tensor)
            self._sizes[key] = (kind, size)
            self.now[kind] += size
            self._total += size
            self.most[kind] = max(self.most[kind], self.now[kind])
            weakref.finalize(storage, self._gone, key)
            if self.phase not in self.peaks or self._total > self.peaks[self.phase].total():
                self.peaks[self.phase] = Counter(self.now)
        return out


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "meta"
