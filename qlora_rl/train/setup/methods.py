"""TRL's config class of each method, for those who read configs and know no TRL."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection
from typing import Any

from qlora_rl.errors import ConfigConflictError, QloraRLError, collected
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
# How CSV spells labels of KTO.
_LABELS = {word: True for word in ("true", "True", "TRUE", "1")} | {
    word: False for word in ("false", "False", "FALSE", "0")
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


def kto_row_problems(dataset: Any, labels: Collection[Any] = (True, False)) -> list[str]:
    """What KTO cannot learn from in the columns and labels of a dataset; a stream may not say which columns it has.

    Args:
        dataset: of the trainer.
        labels: what the column label may hold; 0 and 1 are truth values.
    """
    there = getattr(dataset, "column_names", None) or ()
    if {"chosen", "rejected"} <= set(there):
        # TRL copies these over the ones that it makes of a pair.
        if own := [name for name in ("completion", "label") if name in there]:
            are = "is a column" if len(own) == 1 else "are columns"
            return [
                f"{', '.join(own)} {are} besides chosen and rejected, of which KTO makes a completion and a label. "
                "Rename what is not meant (in a run's file: [data] columns), or remove it"
            ]
        return []
    if there and (missing := [name for name in ("prompt", "completion", "label") if name not in there]):
        columns = f"column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        return [f"there is no {columns}, nor chosen and rejected; there are {', '.join(there)}"]
    if not there or not hasattr(dataset, "__len__"):
        return []
    held = dataset.select_columns(["label"]).with_format("arrow")[:]["label"].to_pylist()
    wrong = next((row for row, value in enumerate(held) if value not in labels), None)
    if wrong is None:
        return []
    return [f"the label of row {wrong} is {held[wrong]!r}. Write true for a good completion, false for one to avoid"]


def mixed_completions(dataset: Any, seed: int) -> Any:
    """Rows for KTO, which TRL takes in their order: pairs are taken apart, and all rows are shuffled; `None` stays.

    Labels that are text, as all cells of CSV are, are read: true, false, 1, 0.

    Raises:
        ConfigConflictError: columns that are not KTO's, or a label that is none.
    """
    if dataset is None:
        return None
    from datasets import Value
    from trl.data_utils import maybe_extract_prompt, unpair_preference_dataset

    is_text = dataset.features.get("label") == Value("string")
    if found := kto_row_problems(dataset, _LABELS if is_text else (True, False)):
        raise collected("loading the data", found, ConfigConflictError)
    if "label" not in dataset.column_names:
        dataset = unpair_preference_dataset(dataset.map(maybe_extract_prompt))
    elif is_text:
        labels = [_LABELS[each] for each in dataset["label"]]
        dataset = dataset.remove_columns("label").add_column("label", labels)
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
    model: str,
    args: Any,
    quantization: dict[str, Any],
    peft_config: Any,
    ours: dict[str, Any],
    *,
    rests: bool = True,
    of_method: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Plan the memory of a run as its trainer will, by the name of its model: before a base is made of it.

    Args:
        model: hub name or directory.
        args: TRL's config.
        quantization: transformers' `quantization_config` of the base.
        peft_config: the adapter to make.
        ours: arguments of the trainer in addition to TRL's.
        rests: the engine generates nothing while the policy is trained.
        of_method: as `MemoryBudget` takes it.

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
        padded=not ours.get("remove_padding", True),
        of_method=of_method,
    )
