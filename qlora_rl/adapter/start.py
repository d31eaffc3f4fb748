"""Creates adapters where TRL would change the base."""

from __future__ import annotations

from typing import Any

import torch
from peft import get_peft_model

REFERENCE = "ref"  # TRL's name of it


def start_adapter(model: Any, peft_config: Any) -> Any:
    """A PeftModel with a new adapter; the base is left as it is (TRL's `prepare_peft_model` lifts parts of it)."""
    return get_peft_model(model, peft_config)


@torch.no_grad()
def copy_adapter(model: Any, name: str, copy: str = REFERENCE) -> None:
    """Give a PeftModel a frozen copy of its adapter `name`; which one is active does not change."""
    model.add_adapter(copy, model.peft_config[name])
    own = dict(model.named_parameters())
    for at, parameter in own.items():
        if f".{name}." in at or at.endswith(f".{name}"):
            twin = own[at.replace(f".{name}", f".{copy}")]
            twin.copy_(parameter)
            twin.requires_grad_(False)
