"""What a run is: the base, the data, the adapter and every setting that decides its numbers. Another one cannot go on
with it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qlora_rl.adapter.inspected import InspectedAdapter, active_adapter, is_bare
from qlora_rl.distributed import ranks
from qlora_rl.errors import ConfigConflictError, collected

# Fields of TRL's configs that may be others when a run goes on: how long it is, what it writes and where, how fast it
# runs.
FREE = frozenset(
    {
        "output_dir", "max_steps", "num_train_epochs", "resume_from_checkpoint", "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
        "logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_on_each_node",
        "log_level", "log_level_replica", "logging_dir",
        "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
        "trackio_static_space_id",
        "log_completions", "log_multimodal", "num_completions_to_print", "log_unique_prompts",
        "log_completions_hub_repo",
        "eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size",
        "prediction_loss_only", "eval_accumulation_steps",
        "num_generations_eval", "do_train", "do_eval", "do_predict", "load_best_model_at_end", "metric_for_best_model",
        "greater_is_better",
        "save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node",
        "enable_jit_checkpoint",
        "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push",
        "hub_revision",
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context", "skip_memory_metrics", "torch_empty_cache_steps", "debug", "local_rank",
        "ddp_timeout",
        "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_server_timeout", "dataset_num_proc",
    }
)  # fmt: skip
# Of PEFT's configs: where the model was stored, and who wrote the file.
_FREE_OF_ADAPTERS = {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
# So many rows of a dataset are digested, evenly spread.
ROWS = 4096
# Of rows with images, each of which is decoded.
IMAGE_ROWS = 256


def identity_of(trainer: Any) -> dict[str, Any]:
    """What `trainer` trains, with what, on what, as plain JSON."""
    args = {name: value for name, value in trainer.args.to_dict().items() if name not in FREE}
    # Where layer inputs wait changes no bit.
    checkpointing = args.get("gradient_checkpointing_kwargs")
    args["gradient_checkpointing_kwargs"] = {k: v for k, v in (checkpointing or {}).items() if k != "offload"} or None
    trained = trainer.accelerator.unwrap_model(trainer.model)
    found = {
        "trainer": type(trainer).__name__,
        "base": trainer.base.identity,
        "train_dataset": digest_dataset(trainer.train_dataset),
        "reward_funcs": list(getattr(trainer, "reward_func_names", [])),
        "tools": [tool.__name__ for tool in getattr(trainer, "tools", None) or []],
        # DeepSpeed trains a float32 copy, whatever it multiplies with.
        "adapter_dtype": ["float32"] if trainer.is_deepspeed_enabled else _dtypes(trained),
        "args": args,
        "processes": ranks().size,
    }
    if not is_bare(trained):
        config = trained.peft_config[active_adapter(trained)].to_dict()
        # Named in any case: a field that only one side has is not compared, and twice the rank is also that of a plain
        # adapter.
        start = getattr(trained, "qlora_start", None)
        found["start"] = "plain" if start is None else start.kind
        found["peft_config"] = {k: v for k, v in config.items() if k not in _FREE_OF_ADAPTERS}
        if trainer.factors is not None:
            found["factors"] = trainer.factors
    return json.loads(json.dumps(found | trainer.decisive(), default=_plain))


def reject_other(checkpoint: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise instead of going on with a run that is another one.

    Args:
        checkpoint: for the message.
        saved: `identity_of` the run that wrote it.
        now: of the one that is to go on.

    Raises:
        ConfigConflictError: names every field that differs.
    """
    before, after = dict(_leaves(saved)), dict(_leaves(now))
    if before.get("processes", 1) != after["processes"]:
        before, after = _by_step(before), _by_step(after)
    elif after["processes"] > 1:  # as many, which may be spread in another way
        before, after = _without_launch(before), _without_launch(after)
    # A field that only one of them has is one of another version of TRL or PEFT.
    differ = [name for name in before if name in after and before[name] != after[name]]
    reasons = [
        f"{name} was {_short(before[name])} and is {_short(after[name])}{_HINTS.get(name, '')}" for name in differ
    ]
    if reasons:
        reasons[-1] += (
            ". Pass what the run began with; or another output_dir, or existing_run='overwrite', for a new one (in a "
            "run's file [run] dir and [run] existing)."
        )
        raise collected(f"resuming from {checkpoint}", reasons, ConfigConflictError)


_HINTS = {
    "base": " (its weights, tokenizer or config; a copy of the directory that the run began with is the same base; "
    "checkpoints of earlier versions name a base otherwise, and cannot be resumed)",
    "factors": " (what B @ A is multiplied with: call set_scale as at first, before the trainer is given the model)",
}
# How the batch of a step is shared out; in another number of processes it may be shared out otherwise.
_SHARES = ("args.per_device_train_batch_size", "args.gradient_accumulation_steps", "args.steps_per_generation")
# How the processes are started, and what they are told of each other.
_LAUNCH = (
    "args.use_cpu",
    "args.ddp_",
    "args.fsdp",
    "args.deepspeed",
    "args.accelerator_config",
    "args.parallelism_config",
)


def _by_step(fields: dict[str, Any]) -> dict[str, Any]:
    """With what an optimizer step is made of, and without how that is shared out."""
    size = fields[_SHARES[0]] * fields[_SHARES[1]] * fields.get("processes", 1)
    kept = {k: v for k, v in _without_launch(fields).items() if k not in (*_SHARES, "processes")}
    return kept | {"completions of a step": size}


def _without_launch(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not name.startswith(_LAUNCH)}


def digest_dataset(dataset: Any) -> str | None:
    """Of the number of rows, the columns and the rows (of more than 4096, with images 256, as many evenly spread);
    `None` for a stream."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return None
    columns = sorted(getattr(dataset, "column_names", None) or [])
    digest = hashlib.sha256(f"{len(dataset)} {columns}".encode())
    rows = IMAGE_ROWS if {"image", "images"} & set(columns) else ROWS
    for i in range(0, len(dataset), max(1, math.ceil(len(dataset) / rows))):
        digest.update(json.dumps(dataset[i], sort_keys=True, default=_plain).encode())
    return digest.hexdigest()[:32]


def factors_of(model: Any) -> float | list[str] | None:
    """What B @ A is multiplied with, which `set_scale` changes and the config does not say: the one factor of all
    layers, or "name: factor" of each; `None` where the adapter is no LoRA.

    Named in any case, too: checkpoints of earlier versions do not say it, and are not compared.
    """
    adapter = active_adapter(model)
    layers = InspectedAdapter(model, adapter).layers
    # Nine digits: an alpha that was written for a factor gives it back up to rounding.
    found = {name: float(f"{float(layer.scaling[adapter]):.9g}") for name, layer in layers.items()}
    if len(set(found.values())) > 1:
        return [f"{name}: {factor}" for name, factor in found.items()]
    return next(iter(found.values()), None)


def _dtypes(model: Any) -> list[str]:
    return sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad})


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, part in value.items():
        if isinstance(part, dict) and part:
            yield from _leaves(part, f"{prefix}{name}.")
        else:
            yield prefix + name, part


def _plain(value: Any) -> Any:
    """What JSON does not know: pictures, sets, and objects, of which the type alone is the same in the next process."""
    if callable(getattr(value, "tobytes", None)) and hasattr(value, "mode"):
        return f"<{value.mode} {value.size} {hashlib.sha256(value.tobytes()).hexdigest()}>"
    return sorted(value, key=str) if isinstance(value, set | frozenset) else f"<{type(value).__name__}>"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
