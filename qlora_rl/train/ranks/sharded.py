"""What is trained, and its optimizer, of several processes, on disk as one process writes them: another number of them
can go on from there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qlora_rl.adapter.directory import place_of, saved_names
from qlora_rl.adapter.inspected import is_bare, own_name
from qlora_rl.adapter.store import read_tensors
from qlora_rl.base.reader import StoredTensors
from qlora_rl.distributed import ranks
from qlora_rl.sharded_tensors import is_sharded, put, shape_of, whole

OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    """What is trained, in full, by name; gathered by all ranks, where it is sharded. The base stays where it is.

    A model that is trained itself is gathered weight by weight, into the memory of rank 0's host.
    """
    trained = _trained(model)
    tensors = list(trained.values())
    gather = of_deepspeed().masters if has_masters(tensors) else whole
    if not (is_bare(model) and is_gathered(model)):
        return dict(zip(trained, gather(tensors), strict=True))
    found = {}
    for name, parameter in trained.items():
        (full,) = gather([parameter])
        if ranks().is_first:
            found[name] = full.cpu()
    return found


def _trained(model: Any) -> dict[str, torch.nn.Parameter]:
    """By the model's own names."""
    return {own_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def is_gathered(model: Any) -> bool:
    """Its trained weights must be gathered by all ranks, to be written as they are."""
    return is_sharded(model) or has_masters([p for p in model.parameters() if p.requires_grad])


def has_masters(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """DeepSpeed trains copies of these."""
    return bool(parameters) and any(hasattr(parameters[0], name) for name in ("_z3_optimizer", "_hp_mapping"))


def of_deepspeed() -> Any:
    """What only DeepSpeed's ZeRO needs, and imports."""
    from qlora_rl.train.ranks import zero

    return zero


def load_weights(model: Any, directory: Path) -> None:
    """Give sharded weights the values that `save_pretrained` has written; every rank reads them, and keeps its part."""
    trained, is_whole = _trained(model), is_bare(model)
    saved = StoredTensors(directory) if is_whole else read_tensors(place_of(model, directory) or directory)
    names = {name: name for name in trained} if is_whole else saved_names(model)
    for name, of_file in names.items():
        if has_masters([trained[name]]):
            of_deepspeed().put_master(saved[of_file], trained[name])
        else:
            put(saved[of_file], trained[name])


def save_optimizer(optimizer: Any, scheduler: Any, directory: Path) -> None:
    """The state of the optimizer in full, by rank 0."""
    state = optimizer.state_dict()
    held = {}
    for key, values in sorted(state["state"].items()):
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        full = dict(zip(tensors, whole(list(tensors.values())), strict=True))
        held[key] = {**values, **{name: value.cpu() for name, value in full.items()}}
    if ranks().is_first:
        torch.save({**state, "state": held}, directory / OPTIMIZER)
        torch.save(scheduler.state_dict(), directory / SCHEDULER)


def load_optimizer(optimizer: Any, scheduler: Any, directory: Path) -> None:
    """Inverse of `save_optimizer`, on every rank."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    state = torch.load(directory / OPTIMIZER, map_location="cpu", weights_only=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, values in state["state"].items():
        parameter = parameters[key]
        for name, value in values.items():
            # A step counter is no part of the weights.
            if not isinstance(value, torch.Tensor) or value.shape != shape_of(parameter):
                continue
            if isinstance(parameter, DTensor):
                mesh, places = parameter.device_mesh, parameter.placements
                values[name] = distribute_tensor(value.to(parameter.device), mesh, places, src_data_rank=None)
    optimizer.load_state_dict(state)
    scheduler.load_state_dict(torch.load(directory / SCHEDULER, map_location="cpu", weights_only=True))
