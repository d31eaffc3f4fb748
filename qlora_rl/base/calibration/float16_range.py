"""Whether what a model computes fits into float16, which ends at 65504."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from qlora_rl.base.calibration.text import shipped_text, token_sequences
from qlora_rl.base.quant import FLOAT16_END, MARGIN
from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.errors import UnsupportedQuantError

logger = logging.getLogger(__name__)

# Texts that are looked at, and tokens of each: what is large is so from the first tokens on (arXiv 2402.17762).
_TEXTS, _TOKENS = 2, 64


def check_float16(model: Any, tokenizer: Callable[[], Any], *, is_quantized: bool) -> None:
    """Compute two short texts with a model of transformers in its own dtype; warn where values come near float16's end.

    Args:
        tokenizer: returns the model's; without one that takes the text nothing is looked at, which a warning says.
        is_quantized: it is in 4 bits already, and keeps its dtype whatever is asked for.

    Raises:
        UnsupportedQuantError: values are beyond it.
    """
    try:
        largest, where = _largest(model, tokenizer())
    except Exception as error:  # whatever a model finds in text
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.warning("whether the model's activations fit into float16 was not looked at (%s)", said)
        return
    instead = "Start from the 16-bit original with" if is_quantized else "Use"
    said = f"activations of a short text reach {largest:.3g} at {where}, and float16 ends at {FLOAT16_END:.0f}"
    if not largest <= FLOAT16_END:
        raise UnsupportedQuantError(
            f"preparing a base: compute_dtype='float16': {said}: they would be infinite. {instead} "
            "compute_dtype='bfloat16'."
        )
    if largest * MARGIN > FLOAT16_END:
        logger.warning("%s: those of other texts may be infinite. %s compute_dtype='bfloat16'", said, instead)


def largest_of(value: Any) -> float:
    """The largest absolute value of a tensor, 0 of anything else; NaN is as far beyond all as infinity."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel()
    return float(value.abs().max().nan_to_num(nan=torch.inf, posinf=torch.inf)) if is_float else 0.0


@torch.no_grad()
def _largest(model: Any, tokenizer: Any) -> tuple[float, str]:
    """The largest absolute value that goes into or comes out of a module, and the module's name."""
    found = (0.0, "")

    def look(name: str) -> Callable[..., None]:
        def hook(_: Any, inputs: Any, output: Any) -> None:
            nonlocal found
            for value in (*inputs, *(output if isinstance(output, tuple) else (output,))):
                if (size := largest_of(value)) > found[0]:
                    found = size, name

        return hook

    texts = token_sequences(shipped_text(held_out=True), tokenizer, model)[:_TEXTS]
    hooks = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    was_training = model.training
    try:
        with Float32Products(torch.bfloat16, torch.float16):
            for ids in texts:
                model.eval()(input_ids=torch.tensor([ids[:_TOKENS]], device=model.device), use_cache=False)
    finally:
        model.train(was_training)
        for each in hooks:
            each.remove()
    return found
