"""Reward functions with TRL's signature: keyword lists in, one number per completion out. Pass them in `reward_funcs`.

Each takes completions as text or as messages, reads the dataset's columns by name, and swallows what it does not use;
to change an argument use `functools.partial`. To combine several, pass a list and `GRPOConfig(reward_weights=[...])`,
or `weighted`. `load_reward` finds one by its name, or in a file of your own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qlora_rl.rewards.load import BUILT_IN, load_reward

if TYPE_CHECKING:
    from qlora_rl.rewards.formulas import math_match
    from qlora_rl.rewards.match import exact_match, format_match, length_match, numeric_match, weighted
    from qlora_rl.rewards.programs import program_isolation, program_match

__all__ = [
    "exact_match",
    "format_match",
    "length_match",
    "load_reward",
    "math_match",
    "numeric_match",
    "program_isolation",
    "program_match",
    "weighted",
]

_HOMES = {**BUILT_IN, "weighted": "match", "program_isolation": "programs"}


def __getattr__(name: str) -> Any:
    """Each is imported when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'qlora_rl.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
