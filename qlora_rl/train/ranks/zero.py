"""DeepSpeed's ZeRO under a trainer: what its config must say, what it keeps in parts as a whole, the moment before it
steps.

DeepSpeed trains a float32 copy of the adapter, in parts on the ranks (the masters), and writes it back into the model
after each step. Where the model is in 16 bits, the copy alone is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from qlora_rl.distributed import ranks
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.sharded_tensors import is_sharded, part_of, put, shape_of

# Groups of torch's optimizer as they were made: what is set for each, and its parameters.
Groups = Sequence[tuple[dict[str, Any], list[torch.nn.Parameter]]]
# Of a scheduler's state: one for each group.
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")
# What changes how weights, gradients or optimizer are held, and was not verified to keep the base and the checkpoints
# what they are.
_UNVERIFIED = ("optimizer", "scheduler", "torch_autocast", "zenflow")
_UNVERIFIED_OF_ZERO = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zenflow",
)


def settle(args: Any, doing: str) -> None:
    """Let DeepSpeed's config say what TRL's says, and reject what is not verified.

    Raises:
        NotYetSupportedError: names every setting.
    """
    config = args.deepspeed_plugin.deepspeed_config
    zero = config.setdefault("zero_optimization", {})
    unverified = [name for name in _UNVERIFIED if _is_on(config.get(name))]
    unverified += [name for name in _UNVERIFIED_OF_ZERO if _is_on(zero.get(name))]
    unverified += [
        name
        for name in ("offload_optimizer", "offload_param")
        if (zero.get(name) or {}).get("device") not in (None, "none")
    ]
    if int(zero.get("zero_hpz_partition_size", 1)) > 1:
        unverified.append("zero_hpz_partition_size")
    if args.fp16:
        unverified.append("fp16")
    if unverified:
        names = ", ".join(unverified)
        raise NotYetSupportedError(
            f"{doing}: DeepSpeed's config asks for {names}, which is not verified with a 4-bit base. Leave it out "
            "(examples/accelerate/zero2.yaml, zero3.yaml); a QLoRA's optimizer is small, and TRL's optim= and "
            "lr_scheduler_type= make it."
        )
    # Left out, it would mean that nothing is clipped.
    config.setdefault("gradient_clipping", args.max_grad_norm)
    # Otherwise torch's own `linear` is replaced in the whole process, for a vLLM that runs in it, too.
    zero.setdefault("memory_efficient_linear", False)


def _is_on(value: Any) -> bool:
    return bool(value.get("enabled", True) if isinstance(value, dict) else value)


def check_dtype(args: Any, compute_dtype: str) -> None:
    """With bf16=True DeepSpeed casts every float of the model; a base that is cast would not be the one that was
    verified.

    Raises:
        ConfigConflictError: the base is not in bfloat16.
    """
    if args.bf16 and compute_dtype != "bfloat16":
        raise ConfigConflictError(
            "reading the config: bf16=True under DeepSpeed, which casts the whole model, and the base's other weights "
            f"are {compute_dtype}: the trainer would no longer hold the engine's base. Set bf16=False, or prepare the "
            "base in bfloat16."
        )


@contextlib.contextmanager
def base_stays(model: Any) -> Iterator[None]:
    """While it lasts DeepSpeed wraps a model without sending its frozen weights to all ranks, which have verified them.

    So under ZeRO-2 tensors that are the engine's, too, are not written to. ZeRO-3 sends each weight once, to part it.
    """
    still = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in still:
        parameter.ds_optim_param = True  # its own mark of weights that no other rank has to be sent
    try:
        yield
    finally:
        for parameter in still:
            del parameter.ds_optim_param


def gather_what_is_read(model: Any) -> None:
    """Let layers read weights of others in every forward pass of `model`, as DoRA reads its base's; after DeepSpeed has
    prepared it.

    Under ZeRO-3 DeepSpeed gathers what a layer is found to read, but only where its engine is called. A canary, a
    reference and TRL's passes without gradients call the model itself.
    """
    if not is_sharded(model):
        return

    def begin_or_end(is_forward: bool) -> None:
        for module in model.modules():
            if hasattr(module._parameters, "_in_forward"):  # of those that DeepSpeed knows
                module._parameters._in_forward = is_forward

    model.register_forward_pre_hook(lambda *_: begin_or_end(True))
    model.register_forward_hook(lambda *_: begin_or_end(False), always_call=True)


def masters(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The float32 copies that DeepSpeed trains, each whole; called by all ranks, in one order."""
    from deepspeed.utils import safe_get_full_fp32_param

    return [safe_get_full_fp32_param(parameter) for parameter in parameters]


@torch.no_grad()
def put_master(values: torch.Tensor, parameter: torch.nn.Parameter) -> None:
    """Write `values`, which every rank holds in full, into the model and into what DeepSpeed trains."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    put(values, parameter)
    values = values.to(parameter.device, torch.float32)
    if hasattr(parameter, "ds_tensor"):
        safe_set_local_fp32_param(parameter, part_of(values, parameter))
    else:
        safe_set_full_fp32_param(parameter, values)


def groups_of(optimizer: torch.optim.Optimizer) -> Groups:
    """Of torch's optimizer, before DeepSpeed puts its own tensors into it."""
    return [
        ({name: value for name, value in group.items() if name != "params"}, list(group["params"]))
        for group in optimizer.param_groups
    ]


def save_optimizer(groups: Groups, optimizer: Any, scheduler: Any, optimizer_file: Path, scheduler_file: Path) -> None:
    """Optimizer and scheduler as one process without DeepSpeed has them, by rank 0; all ranks gather.

    Args:
        groups: `groups_of` the optimizer that DeepSpeed was given.
        optimizer: accelerate's, around DeepSpeed's.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    zero = optimizer.optimizer
    _link(zero)
    flat, held = next(iter(zero.optimizer.state.items()))
    of_weights = sorted(n for n, value in held.items() if isinstance(value, torch.Tensor) and value.shape == flat.shape)
    counters = {name: value for name, value in held.items() if name not in of_weights}
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(p for _, params in groups for p in params):
        # Each its own: torch would count one that they share once for each of them.
        state[number] = {n: v.cpu().clone() if isinstance(v, torch.Tensor) else v for n, v in counters.items()}
        for name in of_weights:
            full = safe_get_full_optimizer_state(parameter, name)
            if ranks().is_first:
                state[number][name] = full.cpu()
    if not ranks().is_first:
        return
    now = iter(zero.param_groups)
    written, first = [], 0
    for made, params in groups:
        # A group without parameters is one that DeepSpeed has dropped; its rate went with those of the others.
        like = next(now) if params else zero.param_groups[0]
        values = {**like} if params else {**like, **made, "lr": like["lr"]}
        values["params"] = list(range(first, first + len(params)))
        written.append({name: value for name, value in values.items() if not name.startswith("_ds")})
        first += len(params)
    torch.save({"state": state, "param_groups": written}, optimizer_file)
    torch.save(_of_all_groups(scheduler.state_dict(), groups), scheduler_file)


def load_optimizer(groups: Groups, optimizer: Any, scheduler: Any, optimizer_file: Path, scheduler_file: Path) -> None:
    """Inverse of `save_optimizer`, on every rank; the file may be one that a process without DeepSpeed has written."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    saved = torch.load(optimizer_file, map_location="cpu", weights_only=True)
    zero = optimizer.optimizer
    parameters = [parameter for _, params in groups for parameter in params]
    kinds = next(iter(saved["state"].values()))
    shape = shape_of(parameters[next(iter(saved["state"]))])
    of_weights = sorted(n for n, v in kinds.items() if isinstance(v, torch.Tensor) and v.shape == shape)
    # torch makes its state in the first step, and here there was none.
    for flat in _partitions(zero):
        zero.optimizer.state[flat] = {
            name: torch.zeros_like(flat) if name in of_weights else _scalar(value, flat, zero)
            for name, value in kinds.items()
        }
    _link(zero)
    for number, values in saved["state"].items():
        parameter = parameters[number]
        for name in of_weights:
            value = values[name].to(parameter.device, torch.float32)
            if hasattr(parameter, "ds_tensor"):
                safe_set_local_optimizer_state(parameter, part_of(value, parameter), name)
            else:
                safe_set_full_optimizer_state(parameter, value, name)
    kept = [was for was, (_, params) in zip(saved["param_groups"], groups, strict=True) if params]
    for group, was in zip(zero.param_groups, kept, strict=True):
        group.update({name: value for name, value in was.items() if name != "params"})
    state = torch.load(scheduler_file, map_location="cpu", weights_only=True)
    for name in _PER_GROUP:
        if isinstance(state.get(name), list):
            state[name] = [value for value, (_, params) in zip(state[name], groups, strict=True) if params]
    scheduler.load_state_dict(state)


def _of_all_groups(state: dict[str, Any], groups: Groups) -> dict[str, Any]:
    """A scheduler's state with an entry for the groups that DeepSpeed has dropped, too."""
    found = dict(state)
    for name in _PER_GROUP:
        if isinstance(state.get(name), list):
            values = iter(state[name])
            found[name] = [next(values) if params else state[name][0] for _, params in groups]
    return found


def _link(zero: Any) -> None:
    """Let ZeRO-2 find the optimizer's state of each weight: by itself it looks once, when the first of its groups alone
    has stepped."""
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def _partitions(zero: Any) -> list[torch.Tensor]:
    """The flat float32 tensors that torch's optimizer steps on this rank."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return list(zero.fp32_partitioned_groups_flat)
    return list(zero.single_partition_of_fp32_groups)


def _scalar(value: Any, flat: torch.Tensor, zero: Any) -> Any:
    """A counter, such as the step, where torch's optimizer wants it."""
    if not isinstance(value, torch.Tensor):
        return value
    is_fused = any(group.get("fused") or group.get("capturable") for group in zero.param_groups)
    return value.to(flat.device, copy=True) if is_fused else value.clone()
