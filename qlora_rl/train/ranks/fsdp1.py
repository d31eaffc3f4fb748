"""FSDP1 under a trainer: what its config must say, what of a model it shards, and the mean of the gradients of the
rest.

FSDP1 makes one flat tensor, of one dtype, of the weights of a layer. Of a model with an adapter the base's weights are
put into it; what is trained stays whole on each rank, as under DDP, and its gradients are averaged before each step.
PEFT's own policy puts a module of FSDP1 around each matrix of the adapter; where a layer reads a matrix without calling
it, as DoRA does, it would find a flat piece. A model that is trained itself is sharded with its gradients and
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from qlora_rl.adapter.inspected import InspectedAdapter, active_adapter, is_bare
from qlora_rl.distributed import ranks
from qlora_rl.errors import NotYetSupportedError
from qlora_rl.sharded_tensors import mark_pieces, piece_of

# Optimizers that treat each number by itself: with a piece of a matrix they do what they do with all of it.
_ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")
# Numbers of gradients that are sent at once.
_BUCKET = 2**24


def settle(args: Any, doing: str, *, is_whole: bool) -> None:
    """Reject what FSDP1's settings ask for and is not verified.

    Args:
        is_whole: a model is trained itself.

    Raises:
        NotYetSupportedError: names every setting.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    plugin = FullyShardedDataParallelPlugin(**(getattr(args, "fsdp_plugin_args", None) or {}))
    unverified = [
        f"{name}: {wish.name} (FULL_SHARD does)"
        for name in ("sharding_strategy", "reshard_after_forward")
        if (wish := getattr(plugin, name)) not in (None, ShardingStrategy.FULL_SHARD)
    ]
    if plugin.auto_wrap_policy != transformer_auto_wrap_policy:
        unverified.append("another fsdp_auto_wrap_policy than TRANSFORMER_BASED_WRAP")
    if getattr(plugin.cpu_offload, "offload_params", False):
        unverified.append("fsdp_offload_params")
    if plugin.activation_checkpointing:
        unverified.append("fsdp_activation_checkpointing (TRL's gradient_checkpointing=True does)")
    if plugin.cpu_ram_efficient_loading:
        unverified.append("fsdp_cpu_ram_efficient_loading")
    if plugin.ignored_modules:
        unverified.append("fsdp_ignored_modules")
    if args.fp16:
        unverified.append("fp16 (bf16 does)")
    optim = str(getattr(args.optim, "value", args.optim))
    if is_whole and optim not in _ELEMENTWISE:
        unverified.append(f"optim={optim!r} on pieces of matrices (one of {', '.join(_ELEMENTWISE)} does)")
    if unverified:
        raise NotYetSupportedError(
            f"{doing}: FSDP1 with {'; '.join(unverified)}, which is not verified. Leave it out "
            "(examples/accelerate/fsdp1.yaml), or use FSDP2."
        )


def is_wrapped(model: Any) -> bool:
    """FSDP1's module is around it."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, FullyShardedDataParallel)


def wrap(model: Any, accelerator: Any) -> Any:
    """FSDP1 around the model and each of its layers; accelerate leaves one that is wrapped as it is."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    plugin = accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(model)
    layers = tuple(plugin.auto_wrap_policy.keywords["transformer_layer_cls"])
    root = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=plugin.auto_wrap_policy,
        backward_prefetch=plugin.backward_prefetch,
        forward_prefetch=plugin.forward_prefetch,
        limit_all_gathers=plugin.limit_all_gathers,
        ignored_states=left_whole(model, layers),
        use_orig_params=True,
        device_id=accelerator.device,
    )
    mark_pieces(root, model)
    return root


def left_whole(model: Any, layers: tuple[type, ...]) -> list[torch.nn.Parameter]:
    """What FSDP1 is not given: what an adapter has added, what is trained alongside it, and in each layer the weights
    of another dtype than most of its bytes."""
    is_whole = is_bare(model)
    added = set() if is_whole else InspectedAdapter(model, active_adapter(model)).added
    units = [module for module in model.modules() if isinstance(module, layers)]
    seen: set[int] = set()
    left = []
    for unit in (*reversed(units), model):  # a layer within another one has its own weights
        own = [parameter for parameter in unit.parameters() if id(parameter) not in seen]
        seen |= {id(parameter) for parameter in own}
        fit = [
            p for p in own if p.requires_grad is is_whole and id(p) not in added and p.dim() and p.is_floating_point()
        ]
        sizes: dict[torch.dtype, int] = {}
        for parameter in fit:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel() * parameter.element_size()
        most = max(sizes, key=sizes.__getitem__, default=None)
        chosen = {id(parameter) for parameter in fit if parameter.dtype == most}
        left += [parameter for parameter in own if id(parameter) not in chosen]
    return left


@torch.no_grad()
def average(model: Any) -> None:
    """Give the gradients of what is trained, and not sharded, their mean over the ranks; called by all, after a
    backward pass."""
    trained = [p for p in model.parameters() if p.requires_grad and piece_of(p) is None]
    if not trained:
        return
    # A rank whose batch did not come by a weight takes part with zeros; one that nobody came by stays without a
    # gradient.
    reached = torch.tensor([p.grad is not None for p in trained], dtype=torch.uint8, device=trained[0].device)
    torch.distributed.all_reduce(reached, op=torch.distributed.ReduceOp.MAX)
    gradients = []
    for parameter, is_reached in zip(trained, reached.tolist(), strict=True):
        if is_reached:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.flatten() for gradient in bucket]) / ranks().size
        torch.distributed.all_reduce(flat)
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """In their order, each of one dtype and, but for a tensor that is larger by itself, of limited size."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or sum(map(torch.numel, bucket)) + tensor.numel() > _BUCKET):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
