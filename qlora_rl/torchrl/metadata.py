"""`get_model_metadata`: names and shapes of what will be sent; both sides agree on them first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from qlora_rl.adapter.export import export_adapter
from qlora_rl.adapter.merged_weights import iter_weights
from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.errors import AdapterRejectedError, collected

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]


def get_model_metadata(
    model: Any, dtype: torch.dtype | None = None, *, is_dense: bool | None = None
) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Name, dtype and shape of everything that a push of this policy carries.

    Plain LoRA: A [R, I] and B [O, R] of each module, in canonical form. What only full weights can carry: every weight
    of the policy, for which each of them is made once.

    Args:
        model: the live PeftModel; only read.
        dtype: in which the engine multiplies; by default that of the model's own weights.
        is_dense: full weights, also of plain LoRA; by default as the verdict is.

    Raises:
        AdapterRejectedError: nothing can carry it; names every reason.
    """
    verdict = judge_adapter(model)
    if verdict.kind == "reject":
        raise collected("reading the model's metadata", verdict.reasons, AdapterRejectedError)
    wanted = dtype or _dtype(model)
    if verdict.kind == "full_weights" or is_dense:
        tensors: Iterable[tuple[str, torch.Tensor]] = iter_weights(model, dtype=wanted)
    else:
        tensors = export_adapter(model, dtype=wanted, verdict=verdict).tensors.items()
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors}


def to_json(metadata: Metadata) -> dict[str, Any]:
    """For a message."""
    return {name: [str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in metadata.items()}


def from_json(content: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Inverse of `to_json`."""
    return {name: (getattr(torch, dtype), torch.Size(shape)) for name, (dtype, shape) in content.items()}


def difference(ours: Metadata, theirs: Metadata) -> str:
    """The first thing in which they differ, as a sentence; empty where they are equal."""
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            return f"{name} is {_said(ours.get(name))} here and {_said(theirs.get(name))} there"
    return ""


def _said(entry: tuple[torch.dtype, torch.Size] | None) -> str:
    return "absent" if entry is None else f"{str(entry[0]).removeprefix('torch.')} {list(entry[1])}"


def _dtype(model: Any) -> torch.dtype:
    """Of the bare model: adapters in float32 are served in what the base computes in."""
    return model.get_base_model().dtype if hasattr(model, "get_base_model") else model.dtype
