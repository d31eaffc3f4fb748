"""How the trainer is spread over processes, by accelerate; what of it is supported, and what the ranks must have in
common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from qlora_rl.distributed import ranks
from qlora_rl.errors import BaseMismatchError, ConfigConflictError, NotYetSupportedError
from qlora_rl.train.setup.model_source import Source

SUPPORTED = ("ddp", "fsdp2", "zero2", "zero3")
_SHARDS_BASE = ("fsdp2", "zero3")


def sharding_of(args: Any) -> str:
    """ "none", "ddp", "fsdp1", "fsdp2", "zero1", "zero2" or "zero3", as accelerate and `args` say."""
    if args.world_size == 1:
        return "none"
    if getattr(args, "deepspeed", None) or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        plugin = getattr(args, "deepspeed_plugin", None)
        stage = getattr(plugin, "zero_stage", None) or os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        return f"zero{stage}"
    if getattr(args, "fsdp", None) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        stated = dict(getattr(args, "fsdp_config", None) or {})
        # transformers takes 2 where `fsdp` is set and says nothing else; accelerate's environment says it, or means 1.
        unsaid = "2" if getattr(args, "fsdp", None) else "1"
        version = stated.get("version", stated.get("fsdp_version", os.environ.get("FSDP_VERSION", unsaid)))
        return f"fsdp{version}"
    return "ddp"


def check_processes(args: Any, doing: str) -> None:
    """Reject what several processes cannot do yet.

    Args:
        args: TRL's config.
        doing: for the message.

    Raises:
        NotYetSupportedError: with what can be done instead.
        ConfigConflictError: they are not one training, or not the one that was asked for.
    """
    _check_launch(args, doing)
    sharding, is_deepspeed = sharding_of(args), getattr(args, "deepspeed_plugin", None) is not None
    if sharding == "none":
        if is_deepspeed:
            raise NotYetSupportedError(
                f"{doing}: one process under DeepSpeed, which has nothing to spread. Start it with plain python, or "
                "with num_processes of 2 or more."
            )
        return
    if sharding not in SUPPORTED:
        raise NotYetSupportedError(
            f"{doing}: {args.world_size} processes under {sharding}: of accelerate's ways to spread a trainer this "
            "version has DDP, FSDP2 (fsdp_version: 2), and DeepSpeed's ZeRO-2 and ZeRO-3. Start it with "
            "examples/accelerate/ddp.yaml, fsdp2.yaml, zero2.yaml or zero3.yaml."
        )
    if is_deepspeed:
        from qlora_rl.train.ranks import zero

        zero.settle(args, doing)


def _check_launch(args: Any, doing: str) -> None:
    """Accelerate joins the processes that torch.distributed knows, and in the way that was asked for; on a CPU it does
    so only by DDP.

    Raises:
        ConfigConflictError: and how to start it.
    """
    is_joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    seen = torch.distributed.get_world_size() if is_joined else 1
    on_cpu = (
        "Without a GPU accelerate joins processes by DDP alone, where the config says use_cpu=True ([train] use_cpu = "
        "true): start it with torchrun or examples/accelerate/ddp.yaml, or with plain python as one process."
    )
    if seen > args.world_size:
        way = "Start it with torchrun or `accelerate launch`." if torch.cuda.is_available() else on_cpu
        raise ConfigConflictError(
            f"{doing}: torch.distributed has {seen} processes, and accelerate trains in {args.world_size} of them by "
            f"itself: they would not be one training. {way}"
        )
    sharding = sharding_of(args)
    joined_as = getattr(getattr(args, "distributed_state", None), "distributed_type", "")
    if sharding not in ("none", "ddp") and str(getattr(joined_as, "value", joined_as)) == "MULTI_CPU":
        raise ConfigConflictError(
            f"{doing}: {args.world_size} processes under {sharding} with use_cpu=True, of which accelerate makes DDP: "
            f"each would hold the whole base. {on_cpu}"
        )


def check_turns(args: Any, of_trl: Mapping[str, Any]) -> None:
    """Reject what asks an engine that all processes share more often on one of them than on another.

    Raises:
        NotYetSupportedError: with what can be done instead.
    """
    asks = [name for name in ("tools", "environment_factory", "rollout_func") if of_trl.get(name)]
    if asks and args.world_size > 1:
        raise NotYetSupportedError(
            f"choosing the engine: {', '.join(asks)} with one engine for {args.world_size} processes: the number of "
            "turns differs from process to process, and that engine is asked by all of them together. Use "
            "rollout='colocate' with vllm_tensor_parallel_size=1, which gives each its own."
        )


def shards_base(args: Any) -> bool:
    """The trainer's base is sharded over the ranks."""
    return sharding_of(args) in _SHARDS_BASE


def fit_for_sharding(source: Source, args: Any) -> Source:
    """The source of a model that can be sharded.

    Raises:
        ConfigConflictError: DeepSpeed would cast its base.
        NotYetSupportedError: its experts are 4-bit.
    """
    sharding = sharding_of(args)
    if sharding in _SHARDS_BASE and source.base.spec.quantize_experts:
        raise NotYetSupportedError(
            f"sharding the base: experts in 4 bits under {sharding}: a rank would gather only the experts that its own "
            "tokens chose, and wait for ranks that gather others. Train under DDP, or prepare the base with its "
            "experts in 16 bits (quantize_experts=False)."
        )
    if sharding.startswith("zero"):
        from qlora_rl.train.ranks import zero

        zero.check_dtype(args, source.base.spec.compute_dtype)
    if not sharding.startswith("fsdp") or not source.base.spec.is_4bit:
        return source
    # FSDP2 casts what it gathers to the dtype of the mixed precision: codes that are of it already stay what they are.
    is_half = args.fp16 or os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp16"
    return replace(source, float_storage=torch.float16 if is_half else torch.bfloat16)


def check_common_base(digest: str) -> None:
    """All ranks train on one base.

    Raises:
        BaseMismatchError: on all of them; names the first that holds another.
    """
    digests = ranks().gather(digest, "comparing the bases of the ranks")
    other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
    if other is not None:
        raise BaseMismatchError(
            f"comparing the bases of the ranks: rank {other} holds {digests[other][:12]}, rank 0 {digests[0][:12]}. "
            "Let all of them load one base made by `qlora-rl prepare`."
        )


@torch.no_grad()
def begin_alike(model: Any) -> None:
    """What is trained begins on all ranks as on rank 0; the frozen base, which each of them has verified, stays where
    it is.

    DDP would send all of it to everybody when it wraps the model, and write over tensors that may be the engine's.
    """
    if ranks().size == 1:
        return
    still = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    still += [name for name, _ in model.named_buffers()]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, still)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.distributed.broadcast(parameter.data, src=0)
