"""The tensors of an adapter by shape, made on the meta device: PEFT itself decides which modules it adapts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from qlora_rl.errors import ConfigConflictError

logger = logging.getLogger(__name__)


def adapter_shapes(
    model: torch.nn.Module,
    lora: Any = None,
    *,
    rank: int = 16,
    target_modules: str | Sequence[str] = "all-linear",
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that an adapter on `model` trains, by name.

    Args:
        model: on the meta device; it is changed and of no further use.
        lora: PEFT's config; without one, plain LoRA of `rank` on `target_modules`.
        rank: R.
        target_modules: as PEFT takes them.

    Raises:
        ConfigConflictError: PEFT finds nothing to adapt; with its words.
    """
    from peft import LoraConfig, get_peft_model

    if lora is None:
        targets = target_modules if isinstance(target_modules, str) else list(target_modules)
        lora = LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM")
    else:
        lora = copy.deepcopy(lora)
        if hasattr(lora, "init_lora_weights"):
            lora.init_lora_weights = False  # PiSSA and its kind would decompose weights that are not there
    try:
        with torch.device("meta"):
            adapted = get_peft_model(model, lora, low_cpu_mem_usage=True)
    except Exception as error:
        raise ConfigConflictError(f"making the adapter: {error}") from error
    return trained_shapes(adapted)


def finds_nothing(error: BaseException) -> bool:
    """`adapter_shapes` has raised this because no module has a name that the adapter's config asks for."""
    from peft.utils import NoMatchingPeftModuleError

    return isinstance(error.__cause__, NoMatchingPeftModuleError)


def warn_of_unmatched(lora: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Name the entries of a list of `target_modules` that no adapted module has; PEFT says so only where none of them
    matches.

    Args:
        lora: PEFT's config.
        shapes: of the tensors that its adapter trains, by name.
    """
    targets = getattr(lora, "target_modules", None) or ()
    if isinstance(targets, str):  # a pattern, or "all-linear"
        return
    left = sorted(name for name in targets if not any(f".{name}." in f".{tensor}" for tensor in shapes))
    if left:
        logger.warning("target_modules: the adapter is on no module called %s", " or ".join(left))


def trained_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a PeftModel that are trained, by name."""
    return {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}


def adapted_inputs(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """(I, R) of every adapted module, by its name."""
    return {
        name.split(".lora_A.")[0]: (shape[1], shape[0])
        for name, shape in shapes.items()
        if ".lora_A." in name and len(shape) == 2
    }
