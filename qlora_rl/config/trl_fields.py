"""`[train]`: the fields of TRL's own config, checked one by one by its type hints before TRL sees them."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from functools import cache, reduce
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter

from qlora_rl.config.findings import Finding, elsewhere, kin, misfit
from qlora_rl.config.schema import ALIASES, ELSEWHERE, IDLE, TRAIN
from qlora_rl.contracts import LEAST_TEMPERATURE

PLACE = f"[{TRAIN}]"
_COUNT: dict[str, Any] = {"ge": 1}
_SHARE: dict[str, Any] = {"ge": 0, "le": 1}
_NOT_NEGATIVE: dict[str, Any] = {"ge": 0}
_POSITIVE: dict[str, Any] = {"gt": 0}
# TRL and torch find these after the model is loaded, or never.
LIMITS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "learning_rate": _NOT_NEGATIVE,
        "weight_decay": _NOT_NEGATIVE,
        "adam_beta1": {"ge": 0, "lt": 1},
        "adam_beta2": {"ge": 0, "lt": 1},
        "adam_epsilon": _NOT_NEGATIVE,
        "max_grad_norm": _NOT_NEGATIVE,
        "num_train_epochs": _POSITIVE,
        "max_steps": {"ge": -1},
        "warmup_steps": _NOT_NEGATIVE,
        "per_device_train_batch_size": _COUNT,
        "per_device_eval_batch_size": _COUNT,
        "gradient_accumulation_steps": _COUNT,
        "save_total_limit": _COUNT,
        "dataloader_num_workers": _NOT_NEGATIVE,
        "label_smoothing": {"ge": 0, "lt": 0.5},
        "max_length": _COUNT,
        "num_generations": {"ge": 2},
        "num_iterations": _COUNT,
        "steps_per_generation": _COUNT,
        "generation_batch_size": _COUNT,
        "max_completion_length": _COUNT,
        "max_new_tokens": _COUNT,
        "temperature": {"ge": LEAST_TEMPERATURE},
        "top_p": {"gt": 0, "le": 1},
        "top_k": _NOT_NEGATIVE,
        "min_p": _SHARE,
        "repetition_penalty": _POSITIVE,
        "epsilon": _NOT_NEGATIVE,
        "epsilon_high": _NOT_NEGATIVE,
        "vllm_max_model_length": _COUNT,
        "vllm_tensor_parallel_size": _COUNT,
        "vllm_gpu_memory_utilization": {"gt": 0, "le": 1},
    }
)
# Texts that TRL takes for anything until the first loss is computed. A test looks for each in TRL's source.
_LEVELS = ("token", "sequence")
CHOICES: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        ("GRPOConfig", "loss_type"): ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"),
        ("GRPOConfig", "importance_sampling_level"): _LEVELS,
        ("GRPOConfig", "multi_objective_aggregation"): ("sum_then_normalize", "normalize_then_sum"),
    }
)
# TRL writes `str`, and takes truth values too.
_HINTS: Mapping[str, Any] = MappingProxyType({"scale_rewards": Literal["group", "batch", "none", True, False]})
OBJECTS = ("parallelism_config",)  # TOML cannot hold them


@cache
def train_fields(config: type) -> Mapping[str, TypeAdapter[Any]]:
    """What checks each field of a TRL config that belongs into `[train]`, by name."""
    hints, found = get_type_hints(config), {}
    for each in fields(config):
        if not each.init or each.name.startswith("_") or each.name in (*ELSEWHERE, *IDLE, *OBJECTS):
            continue
        known = each.metadata.get("choices") or CHOICES.get((config.__name__, each.name))
        hint = Literal.__getitem__(tuple(known)) if known else _HINTS.get(each.name, _of_toml(hints[each.name]))
        bounded: Any = Annotated[hint, Field(**LIMITS.get(each.name, {}))]
        found[each.name] = TypeAdapter(bounded, config=ConfigDict(strict=True))
    return MappingProxyType(found)


def check_train(method: str, table: Mapping[str, Any], config: type) -> list[Finding]:
    """What is wrong with the fields of `[train]`, each by itself.

    Args:
        method: whose config it is.
        table: as the file gives it.
        config: TRL's config class of the method.
    """
    known = train_fields(config)
    found = []
    for name, value in table.items():
        if name not in known:
            found.append(Finding(f"{PLACE} {name}", _unknown(method, name, known, config)))
        elif not fits(as_trl(value, known[name]), known[name]):
            found.append(Finding(f"{PLACE} {name}", misfit(value, known[name].json_schema())))
    return found


def make_args(config: type, table: Mapping[str, Any], **own: Any) -> Any:
    """TRL's config object.

    Args:
        table: `[train]`, checked.
        own: fields that have their place elsewhere in the file.

    Raises:
        ValueError: TRL's own objection.
    """
    import torch

    given = {name: as_trl(value, train_fields(config)[name]) for name, value in table.items()}
    if not torch.cuda.is_available():  # transformers wants to be told
        given = {"use_cpu": True, **given}
    return config(**given, **own)


def as_trl(value: Any, field: TypeAdapter[Any]) -> Any:
    """The value; `None` for the text "none" where that, and no such text, fits: TOML has no null."""
    return None if value == "none" and not fits(value, field) and fits(None, field) else value


def fits(value: Any, field: TypeAdapter[Any]) -> bool:
    """The field takes the value; as JSON, which has lists for tuples and texts for enumerations, as TOML has."""
    try:
        field.validate_json(json.dumps(value))
    except (ValueError, TypeError):  # pydantic's; a date, which JSON has not
        return False
    return True


def _of_toml(hint: Any) -> Any:
    """`SomeEnum | str` is the enumeration: transformers takes its values as text, and no other text."""
    parts = get_args(hint)
    if str not in parts or not any(isinstance(part, type) and issubclass(part, Enum) for part in parts):
        return hint
    return reduce(operator.or_, (part for part in parts if part is not str))


def _unknown(method: str, name: str, known: Mapping[str, Any], config: type) -> str:
    if name in ELSEWHERE:
        return f"its place is {ELSEWHERE[name]}"
    if name in IDLE:
        return "only example scripts of transformers read it. Leave it out"
    if any(each.name == name for each in fields(config)):
        return "cannot be written in TOML; use the Python API"
    close = "" if name in ALIASES else kin(name, known, 0.7)
    if not close and (there := elsewhere(name, PLACE)):
        return f"unknown; did you mean {there}?"
    hint = f"did you mean {close}?" if close else f"see TRL's {config.__name__} for what there is"
    return f"unknown to TRL's {config.__name__} (method = '{method}'); {hint}"
