"""Which of transformers' classes a base is loaded with, and what of a vision-language model is not its language model;
and whether one drops anything."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from qlora_rl.base.experts import ATTENTION, is_mixture
from qlora_rl.base.hub import is_local
from qlora_rl.errors import MissingDependencyError, NotYetSupportedError

# Whose names and values in vLLM were compared with transformers'.
VISION_TYPES = ("gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# Of these, those in which the tokens of an image attend to each other in both directions.
_BOTH_WAYS = ("gemma3",)
# Their linears that an adapter may be on, as PEFT's `target_modules`.
LANGUAGE_LINEARS = r"model\.language_model\..*_proj"


def takes_images(config: Any) -> bool:
    """The config is that of a vision-language model.

    Args:
        config: transformers' config, or the content of a config.json.
    """
    held = config if isinstance(config, dict) else config.to_dict()
    return isinstance(held.get("vision_config"), dict)


def directory_takes_images(directory: str | os.PathLike[str]) -> bool:
    """The checkpoint in a directory is a vision-language model."""
    return takes_images(json.loads((Path(directory) / "config.json").read_text()))


def image_tokens(directory: str | os.PathLike[str]) -> list[int]:
    """`image_tokens_of` a checkpoint in a directory."""
    return image_tokens_of(json.loads((Path(directory) / "config.json").read_text()))


def image_tokens_of(config: Any) -> list[int]:
    """Token ids that stand for images and videos: a completion that holds one could not be scored. Empty for a text
    model.

    Args:
        config: transformers' config, or the content of a config.json.
    """
    held = config if isinstance(config, dict) else config.to_dict()
    names = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
    return sorted({int(held[name]) for name in names if held.get(name) is not None}) if takes_images(held) else []


def attends_both_ways(directory: str | os.PathLike[str]) -> bool:
    """In the checkpoint in a directory the tokens of an image attend to each other in both directions."""
    return json.loads((Path(directory) / "config.json").read_text()).get("model_type") in _BOTH_WAYS


def may_take_images(model: Any) -> bool:
    """A model object, directory or hub name is, or may be, that of a vision-language model; nothing is loaded."""
    if isinstance(model, str | os.PathLike):
        file = Path(model) / "config.json"
        return takes_images(json.loads(file.read_text())) if file.is_file() else not is_local(model)
    return takes_images((model.get_base_model() if hasattr(model, "get_base_model") else model).config)


def auto_class(config: Any) -> Any:
    """transformers' auto class for a config: `AutoModelForImageTextToText` where it takes images, else
    `AutoModelForCausalLM`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def load_processor(directory: str | os.PathLike[str], **options: Any) -> Any:
    """The tokenizer of a checkpoint; of a vision-language model the processor, which has one.

    Args:
        directory: of the checkpoint.
        options: of transformers' `from_pretrained`.
    """
    from transformers import AutoProcessor, AutoTokenizer

    return (AutoProcessor if directory_takes_images(directory) else AutoTokenizer).from_pretrained(directory, **options)


def adaptable(config: Any, target_modules: str | Sequence[str]) -> str | Sequence[str]:
    """What of `target_modules` an adapter on a model of this config may be on.

    "all-linear" is the attention alone in a mixture of experts, and the language model alone in a vision-language
    model.
    """
    if target_modules != "all-linear":
        return target_modules
    if takes_images(config):
        return LANGUAGE_LINEARS
    return list(ATTENTION) if is_mixture(config) else target_modules


def check_vision_type(config: Any) -> None:
    """Reject a vision-language model of a type that was not compared.

    Raises:
        NotYetSupportedError: names those that were.
        MissingDependencyError: its processor cannot be loaded without torchvision.
    """
    if not takes_images(config):
        return
    if config.model_type not in VISION_TYPES:
        raise NotYetSupportedError(
            f"preparing a base: {config.model_type} takes images, and what vLLM makes of it has not been compared with "
            f"transformers. Use one of {', '.join(VISION_TYPES)}, or a text model."
        )
    try:
        import torchvision  # noqa: F401
    except Exception as error:
        raise MissingDependencyError(
            f"preparing a base: {config.model_type} needs torchvision for its processor ({type(error).__name__}: "
            f"{error}). Install the build that belongs to the installed torch: pip install torchvision, from the index "
            "that torch came from, or make setup in a checkout."
        ) from error


def vision_parts(model: torch.nn.Module) -> list[str]:
    """Names of the parts of a vision-language model that are not its language model: tower and projector, such as
    "model.visual"."""
    config = getattr(model, "config", None)  # layers by name alone have none
    if config is None or not takes_images(config):
        return []
    inner = getattr(model, "model", None)
    return sorted(
        f"model.{name}"
        for name, child in ([] if inner is None else inner.named_children())
        if name != "language_model" and any(True for _ in child.parameters())
    )


def drops(module: torch.nn.Module) -> bool:
    """The module itself, without those in it: a layer of dropout, or one with a rate, as attention and some MLPs have
    it."""
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
