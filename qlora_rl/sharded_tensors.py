"""Tensors that are sharded over the ranks (FSDP1, FSDP2, ZeRO-3): whole where they are read, each rank's piece where
they are written."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from qlora_rl.distributed import ranks

# Of a parameter under FSDP1, its `FlatPiece`; of a model, the way to the FSDP1 module around it.
_PIECE, _ROOT = "fsdp1_piece", "_fsdp1_root"
_WRAPPED = "_fsdp_wrapped_module"


@dataclass(frozen=True, eq=False)
class FlatPiece:
    """Where FSDP1 keeps a parameter: in a flat tensor, cut into equal shares wherever these end.

    Attributes:
        handle: FSDP1's, of the flat tensor.
        shape: of the parameter.
        first: its place in the flat tensor.
    """

    handle: Any
    shape: torch.Size
    first: int

    def span(self, rank: int | None = None) -> slice:
        """Which of its numbers a rank holds; by default this one."""
        rank, share = self.handle.rank if rank is None else rank, self.handle.flat_param._sharded_size.numel()
        cuts = (rank * share - self.first, (rank + 1) * share - self.first)
        return slice(*(min(max(0, cut), self.shape.numel()) for cut in cuts))

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of it, flat; often nothing."""
        flat, mine = self.handle.flat_param, self.span()
        share = getattr(flat, "_local_shard", flat.data)  # before the first pass it is the tensor itself
        offset = self.first - self.handle.rank * share.numel()
        return share[offset + mine.start : offset + mine.stop] if mine.start < mine.stop else share[:0]

    def joined(self, held: torch.Tensor) -> torch.Tensor:
        """All of it, or of something that is sharded as it is; called by all ranks, each with its own piece."""
        spans = [self.span(rank) for rank in range(self.handle.world_size)]
        width = max(span.stop - span.start for span in spans)
        mine = torch.nn.functional.pad(held.flatten(), (0, width - held.numel()))
        flat = mine.new_empty(len(spans) * width)
        torch.distributed.all_gather_into_tensor(flat, mine, group=self.handle.process_group)
        parts = [flat[i * width : i * width + span.stop - span.start] for i, span in enumerate(spans)]
        return torch.cat(parts).view(self.shape)

    def write(self, values: torch.Tensor) -> None:
        """Copy this rank's piece of `values`."""
        self.local.copy_(values.flatten()[self.span()])
        if hasattr(self.handle.flat_param, "_local_shard") and not self.handle.needs_unshard():
            self.handle.reshard(True)  # it was left whole behind a pass, with its old numbers


def mark_pieces(root: Any, model: Any) -> None:
    """Note on each parameter that FSDP1 has made flat where it is, and on the model what stands around it.

    Args:
        root: FSDP1's outermost module.
        model: the one inside.
    """
    for unit in root.fsdp_modules(root):
        if unit._handle is None:
            continue
        flat, first = unit._handle.flat_param, 0
        own = iter(zip(flat._params, flat._shapes, strict=True))
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            if not is_padding:
                parameter, shape = next(own)
                setattr(parameter, _PIECE, FlatPiece(unit._handle, torch.Size(shape), first))
            first += numel
    model.__dict__[_ROOT] = weakref.ref(root)


def piece_of(tensor: torch.Tensor) -> FlatPiece | None:
    """Where FSDP1 keeps it."""
    return getattr(tensor, _PIECE, None)


def outermost(model: Any) -> Any:
    """What is called to have the model's layers gathered: the model itself, under FSDP1 what stands around it."""
    root = getattr(model, _ROOT, None)
    return model if root is None else root()


@contextlib.contextmanager
def without_wrappers(model: Any) -> Iterator[Any]:
    """The model without the modules that FSDP1 has put between its own, for whoever goes by their names."""
    while hasattr(model, _WRAPPED):
        model = getattr(model, _WRAPPED)
    taken = [
        (module, name, child)
        for module in model.modules()
        for name, child in module._modules.items()
        if child is not None and _WRAPPED in child._modules
    ]
    try:
        for module, name, child in taken:
            module._modules[name] = child._modules[_WRAPPED]
        yield model
    finally:
        for module, name, child in taken:
            module._modules[name] = child


def is_sharded(model: Any) -> bool:
    """Parameters of it are sharded over the ranks (FSDP1, FSDP2, ZeRO-3)."""
    return any(_is_in_pieces(parameter) or hasattr(parameter, "ds_id") for parameter in model.parameters())


def has_sharded_training(model: Any) -> bool:
    """What is trained is sharded; FSDP1 leaves an adapter whole on each rank."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return any(_is_in_pieces(parameter) or hasattr(parameter, "ds_id") for parameter in trained)


def _is_in_pieces(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_tensor") or hasattr(tensor, _PIECE)


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
    if (piece := piece_of(tensor)) is not None:
        return piece.joined(piece.local)
    if not hasattr(tensor, "ds_tensor"):
        return tensor
    # Of the parts, not of the parameter: what DeepSpeed holds of it, gathered or not, stays as it is.
    part, group = tensor.ds_tensor, tensor.ds_process_group
    flat = part.new_empty(torch.distributed.get_world_size(group) * part.numel())
    torch.distributed.all_gather_into_tensor(flat, part, group=group)
    return flat[: tensor.ds_numel].view(tensor.ds_shape)


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Of the whole: a tensor of ZeRO-3 is empty where it is not being multiplied with, one of FSDP1 a part of a flat
    one."""
    piece = piece_of(tensor)
    return getattr(tensor, "ds_shape", tensor.shape) if piece is None else piece.shape


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
    if (piece := piece_of(tensor)) is not None:
        return piece.local
    if hasattr(tensor, "ds_tensor"):  # behind the last number there may be anything
        part = tensor.ds_tensor
        before = torch.distributed.get_rank(tensor.ds_process_group) * part.numel()
        return part[: max(0, min(part.numel(), tensor.ds_numel - before))]
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put(values: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `values`, which every rank holds in full, into this rank's shard of `target`."""
    values = values.to(target.device, target.dtype)
    if (piece := piece_of(target)) is not None:
        piece.write(values)
        return
    if hasattr(target, "ds_tensor"):
        target.ds_tensor.copy_(part_of(values, target))
        if target.shape != target.ds_shape:  # gathered when it is needed
            return
    if isinstance(target, DTensor):
        values = distribute_tensor(values, target.device_mesh, target.placements, src_data_rank=None).to_local()
        target = target.to_local()
    target.copy_(values)
