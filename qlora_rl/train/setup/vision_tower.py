"""`apply_tower`: the vision tower of a model of which only the language part is trained.

Gradient checkpointing has transformers require gradients of every embedding, that of a tower's patches too: the frozen
tower would keep what its backward pass needs, and make one that ends nowhere. And it fails at a batch without a single
image.
"""

from __future__ import annotations

from typing import Any

import torch

from qlora_rl.base.model_classes import vision_parts

# What a vision-language model is given besides tokens, one entry for each image or patch of it.
_OF_IMAGES = ("pixel_values", "image_grid_thw")
_BEFORE = "_qlora_rl_grad_before"


def apply_tower(model: torch.nn.Module) -> None:
    """Run what is outside the language model without gradients where nothing of it is trained, and none of them where
    no row has an image.

    Args:
        model: the bare transformers model; one for text alone stays as it is.
    """
    parts = [model.get_submodule(name) for name in vision_parts(model)]
    if not parts:
        return
    model.register_forward_pre_hook(_without_empty_images, with_kwargs=True)
    if any(parameter.requires_grad for part in parts for parameter in part.parameters()):
        return  # a frozen projector passes on the gradients of a tower that is trained
    for part in parts:
        part.register_forward_pre_hook(_stop_gradients)
        part.register_forward_hook(_restore_gradients, always_call=True)


def _without_empty_images(
    _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    pixels = kwargs.get("pixel_values")
    if pixels is None or len(pixels):
        return None
    return args, {name: value for name, value in kwargs.items() if name not in _OF_IMAGES}


def _stop_gradients(part: torch.nn.Module, _: Any) -> None:
    setattr(part, _BEFORE, torch.is_grad_enabled())
    torch.set_grad_enabled(False)


def _restore_gradients(part: torch.nn.Module, _: Any, __: Any) -> None:
    torch.set_grad_enabled(getattr(part, _BEFORE))
