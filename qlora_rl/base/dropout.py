"""Whether a model drops anything while it trains: by a layer, or by a rate that it hands to a function."""

from __future__ import annotations

import torch
from torch.nn.modules.dropout import _DropoutNd


def drops(module: torch.nn.Module) -> bool:
    """The module itself, without those in it: a layer of dropout, or one with a rate, as attention and some MLPs have it."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return any("drop" in name and isinstance(rate, float) and rate > 0 for name, rate in vars(module).items())


def has_dropout(model: torch.nn.Module) -> bool:
    """Two passes in training mode have a mask each: a module drops, or there is a rate in the config."""
    if any(drops(module) for module in model.modules()):
        return True
    config = getattr(model, "config", None)
    known = config.to_dict() if hasattr(config, "to_dict") else {}
    parts = [known, *(value for value in known.values() if isinstance(value, dict))]
    # Some read the rate there; one that nobody reads is counted too.
    return any(
        "drop" in str(name) and isinstance(rate, float) and rate > 0 for part in parts for name, rate in part.items()
    )
