"""An adapter that has arrived, as a transport of the receiver's own process sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from qlora_rl.contracts import AdapterBundle
from qlora_rl.errors import SyncError
from qlora_rl.torchrl import metadata as md


class Received:
    """An `AdapterSource` that was made elsewhere: all of its numbers are there already."""

    def __init__(self, bundle: AdapterBundle):
        self._bundle = bundle

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """Name and R of every module."""
        return tuple((name, self._bundle.rank) for name in self._bundle.modules)

    def bundle(self) -> AdapterBundle:
        """As it arrived."""
        return self._bundle

    @torch.no_grad()
    def write_into(self, places: Mapping[str, torch.Tensor]) -> int:
        """Copy it into `places`, whose ranks may be larger: the rest stays zero; returns bytes."""
        for name, tensor in self._bundle.tensors.items():
            rows, columns = tensor.shape
            places[name][:rows, :columns].copy_(tensor)
        return self._bundle.nbytes


def checked(parts: Iterator[tuple[str, torch.Tensor]], agreed: md.Metadata) -> Iterator[tuple[str, torch.Tensor]]:
    """`parts`, each compared with what was agreed on.

    Raises:
        SyncError: one is something else, comes twice, or is missing at the end.
    """
    missing = dict(agreed)
    for name, tensor in parts:
        if missing.pop(name, None) != (tensor.dtype, tensor.shape):
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise SyncError(
                f"receiving weights: {name} ({found}) is not what both sides agreed on, or comes twice. Call "
                "init_all_workers_group() again after changing the adapter.",
                module=name.rpartition(".")[0],
            )
        yield name, tensor
    if missing:
        raise SyncError(f"receiving weights: {len(missing)} are missing, first {next(iter(missing))}. Push again.")
