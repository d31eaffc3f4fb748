"""TRL's config class of each method, for those who read configs and know no TRL."""

from __future__ import annotations

import importlib
import os
from typing import Any

from qlora_rl.errors import QloraRLError

_CONFIGS = {
    "sft": ("trl", "SFTConfig"),
    "dpo": ("trl", "DPOConfig"),
    "grpo": ("trl", "GRPOConfig"),
    "rloo": ("trl", "RLOOConfig"),
    "online_dpo": ("trl.experimental.online_dpo", "OnlineDPOConfig"),
    "async_grpo": ("trl", "GRPOConfig"),  # ours is GRPO ahead of itself, not TRL's experimental trainer
}


def config_class(method: str) -> type:
    """TRL's config of a method; importing it loads transformers and torch, no model."""
    module, name = _CONFIGS[method]
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    return getattr(importlib.import_module(module), name)


def contradictions(method: str, args: Any, rollout: Any) -> list[str]:
    """What the trainer of a method would refuse in its config, before it is made."""
    if method in ("sft", "dpo"):
        return []
    from qlora_rl.train import settings

    try:
        settings.check(args, settings.as_one(rollout))
    except QloraRLError as error:
        return list(error.reasons)
    return []
