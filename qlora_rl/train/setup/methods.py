"""TRL's config class of each method, for those who read configs and know no TRL."""

from __future__ import annotations

import importlib
import os
from typing import Any

from qlora_rl.errors import QloraRLError
from qlora_rl.memory.methods import OFFLINE

_CONFIGS = {
    "sft": ("trl", "SFTConfig"),
    "dpo": ("trl", "DPOConfig"),
    "kto": ("trl", "KTOConfig"),
    "grpo": ("trl", "GRPOConfig"),
    "rloo": ("trl", "RLOOConfig"),
    "online_dpo": ("trl.experimental.online_dpo", "OnlineDPOConfig"),
    "async_grpo": ("trl", "GRPOConfig"),  # ours is GRPO ahead of itself, not TRL's experimental trainer
    "distill": ("trl", "DistillationConfig"),
}


def config_class(method: str) -> type:
    """TRL's config of a method; importing it loads transformers and torch, no model."""
    module, name = _CONFIGS[method]
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    return getattr(importlib.import_module(module), name)


def contradictions(method: str, args: Any, rollout: Any) -> list[str]:
    """What the trainer of a method would reject in its config, before it is made."""
    found = [f"report_to: {why}" for name in args.report_to or () if (why := _why_no_reporter(name))]
    if method == "kto":
        found += kto_contradictions(args)
    if method in OFFLINE:
        return found
    from qlora_rl.train.setup import settings

    try:
        settings.check(args, settings.as_one(rollout))
    except QloraRLError as error:
        found += error.reasons
    return found


def kto_contradictions(args: Any) -> list[str]:
    """What TRL's KTOTrainer finds in its config when the model is loaded already."""
    if args.loss_type == "apo_zero_unpaired":
        return []
    found, way = [], "or use loss_type='apo_zero_unpaired', which has no KL"
    if args.per_device_train_batch_size < 2:
        found.append(
            f"per_device_train_batch_size={args.per_device_train_batch_size}: KTO pairs each prompt with the "
            f"completion of another row of its micro-batch to measure a KL. Use 2 or more, {way}"
        )
    if args.train_sampling_strategy != "sequential":
        found.append(
            f"train_sampling_strategy={str(args.train_sampling_strategy)!r}: KTO measures its KL over neighbouring "
            f"rows. Leave it out, {way}"
        )
    return found


def mixed_completions(dataset: Any, seed: int) -> Any:
    """Rows for KTO, which TRL takes in their order: pairs are taken apart, and all rows are shuffled; `None` stays."""
    if dataset is None:
        return None
    from trl.data_utils import maybe_extract_prompt, unpair_preference_dataset

    if {"chosen", "rejected"} <= set(dataset.column_names):
        dataset = unpair_preference_dataset(dataset.map(maybe_extract_prompt))
    return dataset.shuffle(seed=seed)


def _why_no_reporter(name: str) -> str:
    """Why transformers cannot report to a service: it is not known, or not installed; empty where it can."""
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    try:
        for reporter in get_reporting_integration_callbacks([name]):
            reporter()
    except (ValueError, RuntimeError, ImportError) as error:
        return f"{' '.join(str(error).split()).removesuffix('.')}, or leave it out"
    return ""


def check_memory(
    model: str, args: Any, quantization: dict[str, Any], peft_config: Any, ours: dict[str, Any], *, rests: bool = True
) -> None:
    """Plan the memory of a run as its trainer will, by the name of its model: before a base is made of it.

    Args:
        model: hub name or directory.
        args: TRL's config.
        quantization: transformers' `quantization_config` of the base.
        peft_config: the adapter to make.
        ours: arguments of the trainer in addition to TRL's.
        rests: the engine generates nothing while the policy is trained.

    Raises:
        MemoryBudgetError: the run cannot fit into `gpu_memory`.
    """
    from qlora_rl.adapter.initialization import apply_start
    from qlora_rl.train.setup import settings
    from qlora_rl.train.setup.engine_order import expects_one_copy
    from qlora_rl.train.setup.memory_budget import MemoryBudget, expects_full_weights

    rollout, peft_config = settings.as_one(ours["rollout"]), apply_start(peft_config)[0]
    MemoryBudget(
        ours["gpu_memory"],
        model,
        args,
        peft_config=peft_config,
        quantization_config=quantization,
        engine_options=ours["engine_options"],
        optimizer=None,
        adapter_dtype=ours["adapter_dtype"],
        shared=expects_one_copy(model, rollout, ours["share_base"]),
        has_engine=rollout == "colocate",
        rests=rests,
        baked=expects_full_weights(model, peft_config, ours["sync"], trust_remote_code=args.trust_remote_code),
        padded=not ours["remove_padding"],
    )
