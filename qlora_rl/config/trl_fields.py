"""`[train]`: the fields of TRL's own config, checked one by one before TRL sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

from qlora_rl.config.findings import Finding, check_value, elsewhere, kin
from qlora_rl.config.schema import ALIASES, ELSEWHERE, IDLE, TRAIN, Rules
from qlora_rl.config.type_hints import takes_nothing, words

PLACE = f"[{TRAIN}]"
_COUNT, _SHARE, _NOT_NEGATIVE = Rules(at_least=1), Rules(at_least=0, at_most=1), Rules(at_least=0)
# TRL and torch find these after the model is loaded, or never.
LIMITS: Mapping[str, Rules] = MappingProxyType(
    {
        "learning_rate": _NOT_NEGATIVE,
        "weight_decay": _NOT_NEGATIVE,
        "adam_beta1": Rules(at_least=0, below=1),
        "adam_beta2": Rules(at_least=0, below=1),
        "adam_epsilon": _NOT_NEGATIVE,
        "max_grad_norm": _NOT_NEGATIVE,
        "num_train_epochs": Rules(above=0),
        "max_steps": Rules(at_least=-1),
        "warmup_steps": _NOT_NEGATIVE,
        "per_device_train_batch_size": _COUNT,
        "per_device_eval_batch_size": _COUNT,
        "gradient_accumulation_steps": _COUNT,
        "save_total_limit": _COUNT,
        "dataloader_num_workers": _NOT_NEGATIVE,
        "label_smoothing": Rules(at_least=0, below=0.5),
        "max_length": _COUNT,
        "num_generations": Rules(at_least=2),
        "num_iterations": _COUNT,
        "steps_per_generation": _COUNT,
        "generation_batch_size": _COUNT,
        "max_completion_length": _COUNT,
        "max_new_tokens": _COUNT,
        "temperature": Rules(above=0),
        "top_p": Rules(above=0, at_most=1),
        "top_k": _NOT_NEGATIVE,
        "min_p": _SHARE,
        "repetition_penalty": Rules(above=0),
        "epsilon": _NOT_NEGATIVE,
        "epsilon_high": _NOT_NEGATIVE,
        "vllm_max_model_length": _COUNT,
        "vllm_tensor_parallel_size": _COUNT,
        "vllm_gpu_memory_utilization": Rules(above=0, at_most=1),
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


def train_fields(config: type) -> dict[str, tuple[Any, Rules]]:
    """Type and rules of every field of a TRL config that belongs into `[train]`, by name."""
    hints = get_type_hints(config)
    found = {}
    for each in fields(config):
        hint = _HINTS.get(each.name, hints[each.name])
        if not each.init or each.name.startswith("_") or each.name in ELSEWHERE or each.name in IDLE or not words(hint):
            continue
        rules = LIMITS.get(each.name, Rules())
        choices = tuple(each.metadata.get("choices") or CHOICES.get((config.__name__, each.name), ()))
        found[each.name] = (hint, Rules(**{**vars(rules), "choices": choices}))
    return found


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
        if name in known:
            hint, rules = known[name]
            if not (value == "none" and takes_nothing(hint)):
                found += check_value(f"{PLACE} {name}", value, hint, rules)
        else:
            found.append(Finding(f"{PLACE} {name}", _unknown(method, name, known, config)))
    return found


def make_args(config: type, table: Mapping[str, Any], **own: Any) -> Any:
    """TRL's config object.

    Args:
        table: `[train]`, checked; the text "none" stands for `None` where only that fits.
        own: fields that have their place elsewhere in the file.

    Raises:
        ValueError: TRL's own objection.
    """
    import torch

    known = train_fields(config)
    given = {
        name: None if value == "none" and takes_nothing(known[name][0]) else value for name, value in table.items()
    }
    if not torch.cuda.is_available():  # transformers wants to be told
        given = {"use_cpu": True, **given}
    return config(**given, **own)


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
