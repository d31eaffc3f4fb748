"""Reads the tensors of a base directory, one at a time, without building a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.quant import dequantize_exactly


@dataclass(frozen=True)
class Stored4bit:
    """One 4-bit weight as it is stored, with its scales un-nested.

    Attributes:
        kind: "nf4" or "fp4".
        codes: uint8, two weights to a byte.
        absmax: exact scales, float32 [blocks].
        table: the 16 values, float32.
        shape: (O, I).
    """

    kind: str
    codes: torch.Tensor
    absmax: torch.Tensor
    table: torch.Tensor
    blocksize: int
    shape: tuple[int, ...]

    def dequantised(self) -> torch.Tensor:
        """The float32 weights [O, I]."""
        return dequantize_exactly(self.codes, self.absmax, self.table, self.blocksize, self.shape)


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of all safetensors files of a directory, by their stored names; each is read when it is asked for.

    Args:
        directory: a base directory.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        from safetensors import safe_open

        self._home: dict[str, Any] = {}
        for file in sorted(Path(directory).glob("*.safetensors")):
            handle = safe_open(file, "pt")
            self._home |= dict.fromkeys(handle.keys(), handle)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._home[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)

    def is_weight(self, name: str) -> bool:
        """The tensor is a weight of the model, not a part of the quantisation of one."""
        return ".weight." not in name

    def read_4bit(self, name: str) -> Stored4bit | None:
        """`read_4bit` of these tensors."""
        return read_4bit(self, name)


def read_4bit(tensors: Mapping[str, torch.Tensor], name: str) -> Stored4bit | None:
    """A 4-bit weight with all that belongs to it; `None` for a weight that is not quantised.

    Double-quantised scales are un-nested in float32: `code2[absmax] * absmax2 + offset`.
    """
    if f"{name}.absmax" not in tensors:
        return None
    prefix = f"{name}.quant_state.bitsandbytes__"
    packed = next(f"{prefix}{kind}" for kind in ("nf4", "fp4") if f"{prefix}{kind}" in tensors)
    described = json.loads(bytes(tensors[packed].tolist()))
    absmax = tensors[f"{name}.absmax"].flatten()
    if f"{name}.nested_absmax" in tensors:
        values = tensors[f"{name}.nested_quant_map"].float()[absmax.long()]
        scales = tensors[f"{name}.nested_absmax"].float().repeat_interleave(described["nested_blocksize"])
        offset = torch.tensor(described["nested_offset"], dtype=torch.float32)
        absmax = values * scales[: values.numel()] + offset
    return Stored4bit(
        kind=packed.removeprefix(prefix),
        codes=tensors[name],
        absmax=absmax.float(),
        table=tensors[f"{name}.quant_map"].float(),
        blocksize=int(described["blocksize"]),
        shape=tuple(described["shape"]),
    )
