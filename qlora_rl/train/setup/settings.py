"""What a config of TRL means for our engine: how completions are sampled, and where."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from qlora_rl.contracts import SamplingSpec
from qlora_rl.methods import METHODS

if TYPE_CHECKING:
    from trl import GRPOConfig


Args = TypeVar("Args")  # a config of TRL's

# Completions of a prompt that online DPO compares.
PAIR = 2


def config_class(method: str) -> type:
    """TRL's config of a method; importing it loads transformers and torch, no model."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    return getattr(importlib.import_module(METHODS[method].module), METHODS[method].config)


def default_args(config: type[Args], directory: str, **fields: Any) -> Args:
    """The config of a trainer that was given none, which must run without a GPU too. One that was given stays as it
    is."""
    return config(directory, use_cpu=not torch.cuda.is_available(), **fields)


def own_copy(args: GRPOConfig) -> GRPOConfig:
    """A copy whose parts are its own: TRL and transformers write into the config that they are given."""
    mine = copy.copy(args)
    for name, value in vars(mine).items():
        if isinstance(value, dict | list) or name == "accelerator_config":
            setattr(mine, name, copy.deepcopy(value))
    return mine


@contextmanager
def told_no_vllm(args: GRPOConfig, reward_funcs: list[Any]) -> Iterator[None]:
    """While TRL's `__init__` runs: it would build its own VLLMGeneration and feed vLLM's sampling arguments to
    transformers."""
    wishes = {name: getattr(args, name) for name in ("use_vllm", "generation_kwargs", "model_init_kwargs")}
    args.use_vllm, args.generation_kwargs = False, None
    if not any(isinstance(reward, str) for reward in reward_funcs):  # TRL loads reward models with these
        args.model_init_kwargs = None
    try:
        yield
    finally:
        for name, value in wishes.items():
            setattr(args, name, value)


def engine_options(args: GRPOConfig) -> dict[str, Any]:
    """Arguments of LocalEngine out of the `vllm_*` fields, with TRL's meaning of each."""
    of_a_row = getattr(args, "steps_per_generation", None) or PAIR  # completions in one rollout
    return {
        "max_model_length": getattr(args, "vllm_max_model_length", None),
        "max_num_seqs": args.per_device_train_batch_size * args.vllm_tensor_parallel_size * of_a_row,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "enable_sleep": args.vllm_enable_sleep_mode,
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
        "seed": args.seed,
    }


def sampling_spec(args: GRPOConfig, ends: Sequence[int] = ()) -> SamplingSpec:
    """How TRL's config wants completions sampled; without a seed, which the bridge gives to each call.

    Args:
        args: of the trainer.
        ends: tokens that end a completion for TRL; the engine knows those of the base alone.
    """
    extra: Mapping[str, Any] = args.generation_kwargs or {}
    return SamplingSpec(
        max_tokens=args.max_new_tokens if hasattr(args, "max_new_tokens") else args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=0.0 if args.min_p is None else args.min_p,
        repetition_penalty=args.repetition_penalty,
        regex=args.vllm_structured_outputs_regex,
        extra=dict(extra),
        stop_token_ids=tuple(ends),
    )


def autocast_dtype(args: Any) -> torch.dtype | None:
    """In which dtype the trainer's products are made under autocast; `None` without it, as for fp16 on a CPU."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 and args.device.type != "cpu" else None
