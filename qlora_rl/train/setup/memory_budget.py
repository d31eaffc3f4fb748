"""The memory of a run: planned before anything is allocated, rejected where a limit was given that it cannot keep."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.adapter.shape import trained_shapes
from qlora_rl.adapter.verdict import judge_adapter, judge_config
from qlora_rl.base.checkpoint import MANIFEST, empty_model
from qlora_rl.base.experts import is_mixture
from qlora_rl.base.quant import QuantSpec, spec_of
from qlora_rl.base.unsupported_configs import engine_positions
from qlora_rl.distributed import ranks
from qlora_rl.engine.compat import may_sleep
from qlora_rl.engine.started import as_one, is_here
from qlora_rl.errors import ConfigConflictError
from qlora_rl.memory.cards import RESERVE_GIB, card_size, memory_gib, usable_gib
from qlora_rl.memory.plan import WAYS, MemoryEstimate, plan_memory
from qlora_rl.memory.shape import read_config, stored_spec
from qlora_rl.train.setup.engine_order import expects_one_copy
from qlora_rl.train.setup.model_source import spec_from_config
from qlora_rl.train.setup.processes import shards_base
from qlora_rl.train.setup.settings import engine_options as trl_engine_options

if TYPE_CHECKING:
    from trl import GRPOConfig

logger = logging.getLogger(__name__)

GIB = 2**30
# Tokens of a prompt, where nothing bounds it: vllm_max_model_length says it exactly.
ASSUMED_PROMPT = 512
# Options of the engine that say how large the KV cache is, whatever the memory estimate finds.
_CACHE_OPTIONS = ("kv_cache_gib", "kv_cache_memory_bytes", "gpu_memory_utilization")


class MemoryBudget:
    """What `gpu_memory=` asks for, and what comes of it.

    Attributes:
        `estimate`: `None` where the run could not be planned.
        reason: why not.
        is_limit: the memory estimate had a limit.

    Args:
        gpu_memory: "auto" (what is free on the card; no limit on the CPU) or GiB; on a GPU the size of a card, such as
            24 or "24GB", is what these cards have, less a reserve.
        model: as the trainer takes it.
        args: TRL's config.
        peft_config: the adapter to make; `None` with a PeftModel.
        quantization_config: as the trainer takes it.
        engine_options: as the trainer takes it.
        optimizer: the one that was passed in, if any.
        adapter_dtype: of the trained weights.
        shared: trainer and engine hold one base.
        baked: the engine serves the baked base.
        has_engine: the trainer makes the engine.
        rests: the engine generates nothing while the trainer works, so that it may sleep; before vLLM 0.31 only where
            it lends no base.
        padded: micro-batches keep their padding.
        of_method: gives further arguments of `plan_memory`, where the method is not GRPO's.

    Raises:
        ConfigConflictError: `gpu_memory` is no number above 0, or more than the card has.
        MemoryBudgetError: the run cannot fit into the GiB that were given; with the numbers and what to lower.
    """

    def __init__(
        self,
        gpu_memory: str | float,
        model: Any,
        args: GRPOConfig,
        *,
        peft_config: Any,
        quantization_config: Any,
        engine_options: dict[str, Any] | None,
        optimizer: Any,
        adapter_dtype: str,
        shared: bool,
        has_engine: bool,
        rests: bool = True,
        baked: bool = False,
        padded: bool = False,
        of_method: Callable[[], dict[str, Any]] = dict,
    ):
        on_gpu = torch.cuda.is_available() and not args.use_cpu
        limit = _limit(gpu_memory, on_gpu)
        options = {**trl_engine_options(args), **(engine_options or {})}
        if options["tensor_parallel_size"] > 1:  # its ranks are other processes, and hold the decoded base
            shared, baked = False, True
        lends = shared and not baked and not shards_base(args)
        can_sleep = rests and may_sleep(lends=lends)
        self.estimate: MemoryEstimate | None = None
        self.reason = ""
        self.is_limit = limit is not None
        is_set = any(name in (engine_options or {}) for name in _CACHE_OPTIONS)
        is_set |= args.vllm_gpu_memory_utilization != type(args).vllm_gpu_memory_utilization
        self._sizes_cache = has_engine and self.is_limit and not is_set
        try:
            self.estimate = _plan(
                model,
                args,
                peft_config,
                quantization_config,
                optimizer,
                options,
                adapter_dtype=adapter_dtype,
                shared=lends,
                baked=baked,
                has_engine=has_engine,
                sleeps=_sleeps(args, engine_options or {}) if on_gpu and can_sleep else False,
                can_sleep=can_sleep,
                padded=padded or _attention(model, args) == "eager",
                gpu_memory_gib=limit,
                host_memory_gib=_host_gib() if on_gpu else None,
                device="cuda" if on_gpu else "cpu",
                # On the CPU all parts share one memory.
                trainer_parts=args.world_size if on_gpu and shards_base(args) else 1,
                engine_parts=options["tensor_parallel_size"] if on_gpu and has_engine else 1,
                **of_method(),
            )
        except Exception as error:
            # Whatever is wrong with the model is said better where it is loaded.
            if gpu_memory != "auto":
                raise
            self.reason = f"{type(error).__name__}: {error}"
            logger.info("the memory of this run was not planned: %s", self.reason)
            return
        logger.info("memory of this run:\n%s", self.estimate)
        if gpu_memory != "auto":
            self.estimate.raise_if_too_big()
        elif not self.estimate.fits_host:
            logger.warning("the run may not fit: %s", self.estimate.too_much_for_host())
        elif not self.estimate.fits:
            ways = "; ".join(f"{s.advice} saves {s.nbytes / GIB:.2f} GiB" for s in self.estimate.savings()[:4])
            logger.warning(
                "the run may not fit: its peak is estimated at %.2f GiB, and %.2f GiB are free. Lower one of these: %s",
                self.estimate.least_bytes / GIB,
                limit,
                ways,
            )

    def engine_options(self) -> dict[str, Any]:
        """The size of the KV cache, where a limit is known and nothing else says it: what the optimizer step leaves."""
        return {"kv_cache_gib": self.estimate.cache_gib} if self.estimate is not None and self._sizes_cache else {}

    def set_chosen(self, args: GRPOConfig) -> None:
        """Turn on in the config what the plan has turned on; on all ranks, where one of them needs it."""
        mine = set() if self.estimate is None else {way.field for way in self.estimate.chosen}
        chosen = set().union(*ranks().gather(mine, "planning the memory"))
        for way in WAYS:
            if way.field in chosen:
                name, value = way.config
                setattr(args, name, {**(getattr(args, name) or {}), **value} if isinstance(value, dict) else value)

    def as_dict(self) -> dict[str, Any]:
        """For the run directory."""
        return {"reason": self.reason} if self.estimate is None else self.estimate.as_dict()


def expects_full_weights(model: Any, peft_config: Any, sync: str, *, trust_remote_code: bool = False) -> bool:
    """Full weights will be sent, as far as the arguments tell: then the engine holds the baked base next to the
    trainer's.

    Args:
        model: as the trainer takes it.
        peft_config: the adapter to make; `None` with a PeftModel.
        sync: "auto" asks what kind of adapter it is, on a model without values.
        trust_remote_code: let the model's own code run.
    """
    if sync != "auto":
        return sync == "weights"
    try:
        if peft_config is None:
            return judge_adapter(model).kind == "full_weights"
        is_path = isinstance(model, str | os.PathLike)
        config = read_config(model, trust_remote_code=trust_remote_code) if is_path else model.config
        if is_mixture(config):
            return (
                False  # no engine takes those of a mixture, and whether its experts take adapters is not in its config
            )
        return (
            judge_config(empty_model(config, trust_remote_code=trust_remote_code), peft_config).kind == "full_weights"
        )
    except Exception as error:  # what is wrong with the adapter is said better where it is made
        logger.debug("the kind of the adapter is not known yet: %s", error)
        return False


def _limit(gpu_memory: str | float, on_gpu: bool) -> float | None:
    """`gpu_memory_gib` of the memory estimate; `None` for no limit."""
    if gpu_memory == "auto":
        return torch.cuda.mem_get_info()[0] / GIB if on_gpu else None
    try:
        gpu_memory = card_size(gpu_memory)
    except ValueError as error:
        raise ConfigConflictError(f"reading the arguments: gpu_memory={error}, nor 'auto'.") from None
    if on_gpu:
        total, usable = torch.cuda.mem_get_info()[1] / GIB, usable_gib(gpu_memory)
        if usable > total:
            said = f" of a card of {gpu_memory:g} GB" if usable != gpu_memory else ""
            raise ConfigConflictError(
                f"reading the arguments: gpu_memory={gpu_memory} ({usable:.1f} GiB{said}) > {total:.1f} GiB, which the "
                "card has. Lower it, or use 'auto'."
            )
        if usable != gpu_memory and usable > total - RESERVE_GIB:
            logger.info(
                "gpu_memory=%g: this card reports %.2f GiB, of which %.1f stay free", gpu_memory, total, RESERVE_GIB
            )
            return total - RESERVE_GIB
    return float(gpu_memory)


def _host_gib() -> float | None:
    """This process's part of the host memory that is available; `None` where nothing says it."""
    try:
        return max(memory_gib()[1], 0.001) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    except (OSError, KeyError):
        return None


def _plan(
    model: Any,
    args: GRPOConfig,
    peft_config: Any,
    quantization_config: Any,
    optimizer: Any,
    options: dict[str, Any],
    **request: Any,
) -> MemoryEstimate:
    is_path = isinstance(model, str | os.PathLike)
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    trust = args.trust_remote_code
    config = read_config(model, trust_remote_code=trust) if is_path else bare.config
    positions = engine_positions(config)
    admitted = options.get("max_model_length") or options.get("max_model_len") or positions
    length = args.max_completion_length + ASSUMED_PROMPT
    if args.vllm_max_model_length:
        length = admitted
    return plan_memory(
        config,
        lora=peft_config,
        adapter=trained_shapes(model) if peft_config is None else None,
        spec=_spec(model, args, quantization_config) if is_path else spec_of(bare),
        max_length=min(length, admitted) if admitted else length,
        engine_length=admitted or None,
        image_tokens=max(1, min(length, admitted or length) - args.max_completion_length),
        batch_size=args.per_device_train_batch_size,
        sequences=options["max_num_seqs"],
        optimizer=_optimizer_name(args, optimizer),
        gradient_checkpointing=args.gradient_checkpointing,
        tiles=not (shards_base(args) or _is_special(peft_config)),
        offload=(args.gradient_checkpointing_kwargs or {}).get("offload") if request["device"] == "cuda" else False,
        cache_dtype=str(options.get("kv_cache_dtype", "auto")),
        kv_cache_gib=_cache_gib(options),
        **request,
    )


def _attention(model: Any, args: GRPOConfig) -> str | None:
    """transformers' name of the attention that the trainer will use; `None` for its choice."""
    if isinstance(model, str | os.PathLike):
        return (args.model_init_kwargs or {}).get("attn_implementation")
    return model.config._attn_implementation


def _sleeps(args: GRPOConfig, engine_options: dict[str, Any]) -> bool | None:
    """The user has said that the engine sleeps between rollouts, or that it does not; `None` where it is left to the
    plan."""
    if engine_options.get("enable_sleep") is False:
        return False
    return True if args.vllm_enable_sleep_mode else None


def _cache_gib(options: dict[str, Any]) -> float | None:
    if "kv_cache_memory_bytes" in options:
        return options["kv_cache_memory_bytes"] / GIB
    return options.get("kv_cache_gib")


def _spec(model: str | os.PathLike[str], args: GRPOConfig, quantization_config: Any) -> QuantSpec:
    """How the base of a name or path will be held."""
    if os.path.isfile(os.path.join(model, MANIFEST)):
        return stored_spec(model)
    init = args.model_init_kwargs or {}
    return spec_from_config(quantization_config or init.get("quantization_config"), init.get("dtype"))


def _optimizer_name(args: GRPOConfig, optimizer: Any) -> str:
    if optimizer is None:
        return str(getattr(args.optim, "value", args.optim))
    name = type(optimizer).__name__
    return {"AdamW": "adamw_torch", "Adam": "adamw_torch", "SGD": "sgd"}.get(name, name)


def _is_special(peft_config: Any) -> bool:
    """An adapter with which MLPs do not work in tiles, as far as its config says it."""
    return bool(getattr(peft_config, "use_dora", False) or getattr(peft_config, "lora_dropout", 0.0))


def budget_of(
    model: Any,
    args: GRPOConfig,
    ours: Mapping[str, Any],
    *,
    peft_config: Any,
    quantization_config: Any,
    optimizer: Any = None,
    rests: bool = True,
    of_method: Callable[[], dict[str, Any]] = dict,
) -> MemoryBudget:
    """The budget of a trainer that is given these arguments; of one that is not made yet, by the name of its model.

    Args:
        ours: arguments of the trainer in addition to TRL's; the others are as `MemoryBudget` takes them.
    """
    rollout = as_one(ours["rollout"])
    return MemoryBudget(
        ours["gpu_memory"],
        model,
        args,
        peft_config=peft_config,
        quantization_config=quantization_config,
        engine_options=ours["engine_options"],
        optimizer=optimizer,
        adapter_dtype=ours["adapter_dtype"],
        shared=expects_one_copy(model, rollout, ours["share_base"]),
        has_engine=is_here(rollout),
        rests=rests,
        of_method=of_method,
        baked=expects_full_weights(model, peft_config, ours["sync"], trust_remote_code=args.trust_remote_code),
        padded=not ours.get("remove_padding", True),
    )
