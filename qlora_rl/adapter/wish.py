"""The adapter that plain values ask for: a LoraConfig, or one on disk that is trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from qlora_rl.adapter.directory import adapter_in


def make_lora(fields: Mapping[str, Any]) -> Any:
    """A LoraConfig for a causal language model.

    Args:
        fields: of LoraConfig, by name; empty tables and `None` mean its default.
    """
    from peft import LoraConfig

    given = {name: value for name, value in fields.items() if value is not None and value != {}}
    return LoraConfig(task_type="CAUSAL_LM", **given)


def open_adapter(model: Any, directory: str | os.PathLike[str]) -> Any:
    """A PeftModel with the adapter of a directory, or of a run, to be trained on."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter_in(directory), is_trainable=True)
