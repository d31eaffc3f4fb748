"""A model without PEFT: a base that is not 4-bit is trained itself, and its weights are sent as full weights."""

from __future__ import annotations

from typing import Any

from qlora_rl.adapter.inspected import is_bare
from qlora_rl.adapter.verdict import Verdict, judge_adapter
from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.errors import ConfigConflictError

_REASON = "The model carries no adapter: its own weights are trained."


def trains_whole(model: Any, peft_config: Any, sync: str) -> bool:
    """All weights are asked to be trained: no adapter anywhere, and sync="weights" says that it is meant so."""
    return is_bare(model) and peft_config is None and sync == "weights"


def check_whole(base: PreparedBase, share_base: bool | str) -> None:
    """Raise where a base itself cannot be trained.

    Raises:
        ConfigConflictError: it is 4-bit, or is to be shared with the engine.
    """
    if base.spec.is_4bit:
        raise ConfigConflictError(
            f"reading the model: peft_config=None, and {base} is 4-bit, which cannot be trained itself. Pass "
            "peft_config=LoraConfig(r=16, target_modules='all-linear'), or a base of prepare_base(model, quant='none')."
        )
    if share_base is True:
        raise ConfigConflictError(
            "reading the arguments: share_base=True, and the base itself is trained, under which the engine's must not "
            "move. Leave share_base out."
        )


def unfreeze(model: Any) -> None:
    """Train every weight."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())


def judge_policy(model: Any) -> Verdict:
    """`judge_adapter`, or what is to be said of a model without one."""
    return Verdict("full_weights", (_REASON,), 0, "") if is_bare(model) else judge_adapter(model)
