"""Tensors that are sharded over the ranks (FSDP2, ZeRO-3): whole where they are read, each rank's piece where
they are written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from qlora_rl.distributed import ranks


def is_sharded(model: Any) -> bool:
    """Parameters of it are sharded over the ranks (FSDP2, ZeRO-3)."""
    return any(_is_in_pieces(parameter) or hasattr(parameter, "ds_id") for parameter in model.parameters())


def _is_in_pieces(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_tensor")


@torch.no_grad()
def whole(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor in full, on every rank; called by all, with the same tensors in the same order.

    One that is not sharded is returned itself. For what is trained; of the base only full weights have need
    (`gathered`).
    """
    return [_joined_parts(tensor) for tensor in tensors]


def _joined_parts(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if not hasattr(tensor, "ds_tensor"):
        return tensor
    # Of the parts, not of the parameter: what DeepSpeed holds of it, gathered or not, stays as it is.
    part, group = tensor.ds_tensor, tensor.ds_process_group
    flat = part.new_empty(torch.distributed.get_world_size(group) * part.numel())
    torch.distributed.all_gather_into_tensor(flat, part, group=group)
    return flat[: tensor.ds_numel].view(tensor.ds_shape)


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Of the whole: a tensor of ZeRO-3 is empty where it is not being multiplied with."""
    return getattr(tensor, "ds_shape", tensor.shape)


def part_of(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """What this rank holds, flat, of a tensor of ZeRO-3 whose `values` are these; zeros behind the last one."""
    size, rank = target.ds_tensor.numel(), torch.distributed.get_rank(target.ds_process_group)
    part = values.flatten()[rank * size : (rank + 1) * size]
    return torch.nn.functional.pad(part, (0, size - part.numel()))


@contextlib.contextmanager
def gathered(parts: Iterable[tuple[Any, str]], doing: str) -> Iterator[None]:
    """A block in which these parameters are whole, to be read; entered by all ranks, with the same ones in the same
    order.

    The ranks synchronise before anything is gathered: what has ended one of them is raised on all, and no rank waits in
    a collective alone. Without sharded weights nothing is touched, and nothing is synchronised.

    Args:
        parts: module and name of each parameter.
        doing: for the message; no two gatherings of one push have the same.
    """
    sharded = [(module, name, module._parameters[name]) for module, name in parts]
    sharded = [each for each in sharded if each[2] is not None and _is_in_pieces(each[2])]
    if sharded:
        ranks().barrier(doing)
    try:
        for module, name, parameter in sharded:
            full = torch.nn.Parameter(*whole([parameter]), requires_grad=False)
            state = getattr(parameter, "quant_state", None)
            if state is None and name == "weight":  # FSDP2's have no room for what bitsandbytes keeps with codes
                state = getattr(module, "quant_state", None)
            if state is not None:
                full.quant_state = state
            module._parameters[name] = full
            del full
        yield
    finally:
        for module, name, parameter in sharded:
            module._parameters[name] = parameter


def here(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of it."""
    if hasattr(tensor, "ds_tensor"):  # behind the last number there may be anything
        part = tensor.ds_tensor
        before = torch.distributed.get_rank(tensor.ds_process_group) * part.numel()
        return part[: max(0, min(part.numel(), tensor.ds_numel - before))]
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `values`, which every rank holds in full, into this rank's shard of `target`."""
    values = values.to(target.device, target.dtype)
    if hasattr(target, "ds_tensor"):
        target.ds_tensor.copy_(part_of(values, target))
        if target.shape != target.ds_shape:  # gathered when it is needed
            return
    if isinstance(target, DTensor):
        values = distribute_tensor(values, target.device_mesh, target.placements, src_data_rank=None).to_local()
        target = target.to_local()
    target.copy_(values)
