"""`load_adapter`: a saved adapter on a loaded model, for inference; `add_frozen`: next to one that is trained, without
dropout; `open_adapter`: to be trained on; `make_lora`: the LoraConfig of a new one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from qlora_rl.adapter.directory import adapter_in, put_exactly, why_no_weights, without_place
from qlora_rl.adapter.inspected import bare_model, stop_dropout
from qlora_rl.adapter.store import read_tensors
from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.errors import AdapterRejectedError, collected


def load_adapter(model: Any, directory: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None) -> Any:
    """A PeftModel with the adapter that `save_pretrained` has written, whatever its method.

    Args:
        model: of transformers; PEFT's layers are put into it.
        directory: of the adapter, or of a run.
        base: directory that the adapter is held against (names, shapes, the digest that it was trained on); `None`:
            none.

    Raises:
        AdapterRejectedError: it is damaged, was made for another base, or does not fit the model.
    """
    from peft import PeftModel

    doing = f"loading the adapter {directory}"
    directory, config = _read(directory, base, doing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = PeftModel.from_pretrained(model, directory, config=config)
        except (RuntimeError, ValueError, KeyError) as error:
            raise AdapterRejectedError(f"{doing}: it does not fit {type(model).__name__}: {error}") from error
    if lost := without_place(adapted, directory):
        raise AdapterRejectedError(
            f"{doing}: {len(lost)} of its tensors have no place in {type(model).__name__}, the first is {lost[0]}, and "
            "PEFT leaves them out without an error. Load it on the base that it was trained on; experts in 4 bits are "
            "other modules than experts in 16 bits."
        )
    if put_exactly(adapted, read_tensors(directory)):
        _fit_copies(adapted)
    return adapted.eval()


def _fit_copies(model: Any) -> None:
    """Have float32 copies of modules take what 16-bit weights compute, and give them what they take, where no autocast
    does. They keep that when PEFT puts them in the place of the base's own."""
    head = bare_model(model).get_output_embeddings()
    for module in model.modules():
        copies = getattr(module, "modules_to_save", None) or getattr(module, "ln_tuning_layers", None)
        if not isinstance(copies, torch.nn.ModuleDict) or "default" not in copies:
            continue
        copy, own = copies["default"], getattr(module, "original_module", None) or module.base_layer
        copy.register_forward_pre_hook(partial(_given, dtype=next(copy.parameters()).dtype))
        if module is not head:
            copy.register_forward_hook(partial(_returned, dtype=next(own.parameters()).dtype))


def _given(module: Any, given: tuple[Any, ...], *, dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(_cast(each, dtype) for each in given)


def _returned(module: Any, given: tuple[Any, ...], returned: Any, *, dtype: torch.dtype) -> Any:
    return _cast(returned, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value if torch.is_autocast_enabled(value.device.type) else value.to(dtype)


def add_frozen(model: Any, directory: str | os.PathLike[str], name: str, *, base: str | os.PathLike[str]) -> None:
    """Give a PeftModel a further adapter, frozen; which one is active, and what is trained, does not change.

    Args:
        model: the PeftModel.
        directory: of the adapter, or of a run.
        name: of the adapter in the model.
        base: directory of the base.

    Raises:
        AdapterRejectedError: it is damaged, was made for another base, or cannot stand next to the model's own.
    """
    from peft import set_peft_model_state_dict

    doing = f"loading the adapter {directory}"
    directory, config = _read(directory, base, doing)
    config.inference_mode = False  # which would freeze the other one
    trained = {n for n, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        model.add_adapter(name, config)
        found = set_peft_model_state_dict(model, tensors := read_tensors(directory), adapter_name=name)
    except (RuntimeError, ValueError, KeyError) as error:
        raise AdapterRejectedError(f"{doing}: it cannot stand next to the adapter of the model: {error}") from error
    put_exactly(model, tensors, name)
    stop_dropout(model, name)
    for n, parameter in model.named_parameters():
        parameter.requires_grad_(n in trained)
    if found.unexpected_keys:
        raise AdapterRejectedError(f"{doing}: {found.unexpected_keys[0]} has no place in {type(model).__name__}.")


def _read(directory: str | os.PathLike[str], base: str | os.PathLike[str] | None, doing: str) -> tuple[Path, Any]:
    """Where the adapter is, and its PeftConfig, with which its tensors are not initialised in a way of their own."""
    from peft import PeftConfig

    path = adapter_in(directory)
    verdict = judge_adapter(path, base=base)
    if verdict.kind == "reject":
        raise collected(doing, verdict.reasons, AdapterRejectedError)
    config = PeftConfig.from_pretrained(path)
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # PiSSA and the like would be initialised again, and change the base once more
    return path, config


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
        adapted = PeftModel.from_pretrained(model, path, is_trainable=True)
        put_exactly(adapted, read_tensors(path))
        return adapted
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise AdapterRejectedError(
            f"opening the adapter {path} to train on: it is damaged, or does not fit: {error}"
        ) from error
