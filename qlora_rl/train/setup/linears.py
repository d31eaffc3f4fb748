"""`settle_linears`: on a CPU the trainer multiplies with 4-bit codes, by the kernel that the engine has.

bitsandbytes decodes a weight into memory for each product, and torch reads it again; with a few hundred tokens that is a fifth of the product. The
kernel decodes what fits into a cache. Forward it is the engine's own, so that both sides have the same bits, also with a bias; backward it adds up
along the rows of the weight. What it does not take, bitsandbytes multiplies as ever.

Letters: N tokens, I and O in- and out-features.
"""

from __future__ import annotations

import logging
import types
from typing import Any

import torch

from qlora_rl.base.quant import dequantize_exactly, exact_absmax, require_bitsandbytes
from qlora_rl.engine.linears.native import CodesKernel, codes_kernel

logger = logging.getLogger(__name__)

# Columns and rows of a weight that must come out of the products as they are decoded.
CHECKED = 64


def settle_linears(model: torch.nn.Module) -> dict[str, Any]:
    """Have the 4-bit linears of a model multiply their codes where the processor has a kernel for that.

    Args:
        model: with whole, frozen weights; not sharded.

    Returns:
        For config.json: the instructions of the kernel and the number of linears that have it, or the reason why none has.
    """
    bnb = require_bitsandbytes()
    linears = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    if not linears:
        return {"reason": "the base has no 4-bit linears"}
    if any(linear.weight.device.type != "cpu" for linear in linears):
        return {"reason": "bitsandbytes has kernels for this device"}
    kernel = codes_kernel()
    if isinstance(kernel, str):
        logger.info("bitsandbytes decodes weights for each product: %s", kernel)
        return {"reason": kernel}
    exact: dict[tuple[Any, ...], bool] = {}
    count = 0
    for linear in linears:
        linear.__dict__.pop("forward", None)  # of an earlier trainer
        if not _fits(kernel, linear):
            continue
        state = linear.weight.quant_state
        kind = (*state.shape, state.blocksize, state.quant_type)
        if kind not in exact:
            exact[kind] = _is_exact(kernel, linear)
        if exact[kind]:
            linear.forward = types.MethodType(multiplied, linear)
            count += 1
    return {"kernel": kernel.instructions, "linears": count, "of": len(linears)}


def multiplied(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward of a linear that has the kernel: x [..., I] gives [..., O] in the dtype of x."""
    kernel = codes_kernel()
    if (
        isinstance(kernel, str)
        or torch.compiler.is_compiling()
        or (linear.compute_dtype or x.dtype) != torch.bfloat16
        or not x.numel()
        or not _fits(kernel, linear)
    ):
        return type(linear).forward(linear, x)
    product = _Product.apply(x.to(torch.bfloat16), linear.weight, kernel)
    if linear.bias is not None:
        product = product + linear.bias.to(product.dtype)
    return product.to(x.dtype)


def gradient_of_input(gradient: torch.Tensor, weight: Any, state: Any) -> torch.Tensor:
    """A gradient [..., O] times a 4-bit weight [O, I], in the dtype of the gradient."""
    rows, columns = state.shape
    kernel = codes_kernel() if weight.device.type == "cpu" and gradient.dtype == torch.bfloat16 else ""
    if isinstance(kernel, str) or not kernel.takes_back(rows, columns, state.blocksize):
        return gradient @ require_bitsandbytes().functional.dequantize_4bit(weight.view(-1, 1), state).to(
            gradient.dtype
        )
    absmax, values, flat = exact_absmax(state), state.code, gradient.reshape(-1, rows).contiguous()
    found = kernel.multiply_back(flat, weight.data_ptr(), absmax.data_ptr(), values, columns, state.blocksize)
    return found.view(*gradient.shape[:-1], columns)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, kernel: CodesKernel) -> torch.Tensor:
        state = weight.quant_state
        ctx.weight, ctx.state = weight, state
        rows, columns = state.shape
        absmax, flat = exact_absmax(state), x.reshape(-1, columns).contiguous()
        found = kernel.multiply(
            flat, [weight.data_ptr()], [absmax.data_ptr()], (0, len(flat)), state.code, rows, state.blocksize
        )
        return found.view(*x.shape[:-1], rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return gradient_of_input(gradients[0], ctx.weight, ctx.state), None, None


def _fits(kernel: CodesKernel, linear: Any) -> bool:
    """Its weight is whole, in a form that the kernel reads, and what is trained there is not the base."""
    weight, state = linear.weight, getattr(linear.weight, "quant_state", None)
    return (
        state is not None
        and linear.compute_type_is_set
        and not getattr(state, "packing_format_for_cpu", False)
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and 2 * weight.numel() * weight.element_size() == state.shape.numel()
        and kernel.takes(state.shape[1], state.blocksize)
        and state.code.dtype == torch.float32
        and not weight.requires_grad
        and (linear.bias is None or not linear.bias.requires_grad)
    )


def _is_exact(kernel: CodesKernel, linear: Any) -> bool:
    """Some columns come out of the product as they are decoded, and some rows out of that of a gradient."""
    state, codes = linear.weight.quant_state, linear.weight.detach()
    rows, columns = state.shape
    exact = dequantize_exactly(codes, exact_absmax(state), state.code, state.blocksize, (rows, columns)).bfloat16()
    some_I, some_O = (torch.linspace(0, size - 1, min(CHECKED, size)).long() for size in (columns, rows))
    x = torch.nn.functional.one_hot(some_I, columns).bfloat16()
    gradient = torch.nn.functional.one_hot(some_O, rows).bfloat16()
    return torch.equal(_Product.apply(x, linear.weight, kernel), exact[:, some_I].t()) and torch.equal(
        gradient_of_input(gradient, linear.weight, state), exact[some_O]
    )
