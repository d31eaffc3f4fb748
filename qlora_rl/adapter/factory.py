"""The adapter that plain values ask for: a LoraConfig, or one on disk that is trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError

from qlora_rl.adapter.directory import adapter_in, why_no_weights
from qlora_rl.errors import AdapterRejectedError


def make_lora(fields: Mapping[str, Any]) -> Any:
    """A LoraConfig for a causal language model.

    Args:
        fields: of LoraConfig, by name; empty tables and `None` mean its default.
    """
    from peft import LoraConfig

    given = {name: value for name, value in fields.items() if value is not None and value != {}}
    return LoraConfig(task_type="CAUSAL_LM", **given)


def open_adapter(model: Any, directory: str | os.PathLike[str]) -> Any:
    """A PeftModel with the adapter of a directory, or of a run, to be trained on.

    Raises:
        AdapterRejectedError: it holds no weights in safetensors. PEFT would read a pickle, and ask the hub.
    """
    from peft import PeftModel

    path = adapter_in(directory)
    if why := why_no_weights(path):
        raise AdapterRejectedError(f"opening the adapter to train on: {why}")
    try:
        return PeftModel.from_pretrained(model, path, is_trainable=True)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise AdapterRejectedError(
            f"opening the adapter {path} to train on: it is damaged, or does not fit: {error}"
        ) from error
