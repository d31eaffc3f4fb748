"""`apply_linears`: on a CPU the trainer multiplies with 4-bit codes, by the kernel that the engine has.

bitsandbytes decodes a weight into memory for each product, and torch reads it again; with a few hundred tokens that is
a fifth of the product. The kernel decodes what fits into a cache. Forward it has the bits of an engine that multiplies
codes, also with a bias; backward it adds up along the rows of the weight. What it does not take, bitsandbytes
multiplies as ever.

Letters: N tokens, I and O in- and out-features.
"""

from __future__ import annotations

import logging
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from qlora_rl.base.quant import dequantised_rows, require_bitsandbytes
from qlora_rl.engine.linears.cpu_kernel import CodesKernel, codes_kernel

logger = logging.getLogger(__name__)

# Columns and rows of a weight that must come out of the products as they are decoded.
CHECKED = 64


@dataclass(frozen=True)
class Coded:
    """A 4-bit weight [O, I] that the kernel takes.

    Attributes:
        codes: of the weight as it was when it was asked for; they are kept.
        state: bitsandbytes' QuantState.
        kernel: that multiplies.
    """

    codes: torch.Tensor
    state: Any
    kernel: CodesKernel

    def multiply(self, x_NI: torch.Tensor) -> torch.Tensor:
        """[N, O], bf16."""
        scales, (rows, _) = self._scales(), self.state.shape
        addresses = [self.codes.data_ptr()], [scales.data_ptr()]
        return self.kernel.multiply(x_NI, *addresses, (0, len(x_NI)), self.state.code, rows, self.state.blocksize)

    def multiply_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient [..., O] times the weight, in the dtype of the gradient."""
        (rows, columns), blocksize = self.state.shape, self.state.blocksize
        if gradient.dtype != torch.bfloat16 or not self.kernel.takes_back(rows, columns, blocksize):
            return gradient @ decoded(self.codes, self.state).to(gradient.dtype)
        scales, flat = self._scales(), gradient.reshape(-1, rows).contiguous()
        found = self.kernel.multiply_back(
            flat, self.codes.data_ptr(), scales.data_ptr(), self.state.code, columns, blocksize
        )
        return found.view(*gradient.shape[:-1], columns)

    def _scales(self) -> torch.Tensor:
        """As `exact_absmax`, by bitsandbytes' kernel. They are not kept from forward to backward: an eighth of the
        codes."""
        state = self.state
        if not state.nested:
            return state.absmax.float().flatten()
        scales = require_bitsandbytes().functional.dequantize_blockwise(state.absmax, state.state2)
        return (scales + state.offset).float().flatten()


def apply_linears(model: torch.nn.Module) -> dict[str, Any]:
    """Have the 4-bit linears of a model multiply their codes where the processor has a kernel for that.

    Linears with a forward of somebody else keep it.

    Args:
        model: with whole, frozen weights; not sharded.

    Returns:
        For config.json: the instructions of the kernel and the number of linears that have it, or the reason why none
            has.
    """
    bnb = require_bitsandbytes()
    linears = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    for linear in linears:  # of an earlier trainer
        if has_kernel(linear):
            del linear.forward
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
        coded = _coded(linear, kernel)
        if coded is None or "forward" in vars(linear) or type(linear).forward is not bnb.nn.Linear4bit.forward:
            continue
        kind = (*coded.state.shape, coded.state.blocksize, coded.state.quant_type)
        if kind not in exact:
            exact[kind] = _is_exact(coded, linear.weight)
        if exact[kind]:
            linear.forward = types.MethodType(forward, linear)
            count += 1
    return {"kernel": kernel.instructions, "linears": count, "of": len(linears)}


def has_kernel(linear: Any) -> bool:
    """Its forward is the one of this module."""
    return getattr(vars(linear).get("forward"), "__func__", None) is forward


def coded_weight(linear: Any) -> Coded | None:
    """The weight of a linear that has the kernel, as it is now; `None` where bitsandbytes is to multiply it."""
    kernel = codes_kernel() if has_kernel(linear) else ""
    return None if isinstance(kernel, str) else _coded(linear, kernel)


def decoded(codes: torch.Tensor, state: Any) -> torch.Tensor:
    """The weight [O, I], as bitsandbytes decodes it."""
    return require_bitsandbytes().functional.dequantize_4bit(codes.view(-1, 1), state)


# A method is pickled by the name of its function: `forward`, which a linear has by itself where it is read back.
def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Of a linear that has the kernel: x [..., I] gives [..., O] in the dtype of x."""
    coded = None
    if not (torch.compiler.is_compiling() or torch.jit.is_tracing()) and _is_plain(x):
        coded = coded_weight(self)
    if (
        coded is None
        or (self.compute_dtype or x.dtype) != torch.bfloat16
        or not x.numel()
        or x.shape[-1] != self.in_features
    ):
        return type(self).forward(self, x)
    flat_NI = x.to(torch.bfloat16).reshape(-1, x.shape[-1]).contiguous()
    # The view is made out here, so that it may be written into.
    product = _Product.apply(flat_NI, coded).view(*x.shape[:-1], self.out_features)
    if self.bias is not None:
        product = product + self.bias.to(product.dtype)
    return product.to(x.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: torch.Tensor, coded: Coded) -> torch.Tensor:
        ctx.coded = coded
        return coded.multiply(x_NI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.coded.multiply_back(gradients[0]), None


def _is_plain(x: torch.Tensor) -> bool:
    """In this process's memory, and nothing that stands for another tensor."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"


def _coded(linear: Any, kernel: CodesKernel) -> Coded | None:
    """Its weight is whole, in a form that the kernel reads, and what is trained there is not the base."""
    weight, state = linear.weight, getattr(linear.weight, "quant_state", None)
    fits = (
        state is not None
        and linear.compute_type_is_set
        and not getattr(state, "packing_format_for_cpu", False)
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and tuple(state.shape) == (linear.out_features, linear.in_features)
        and 2 * weight.numel() * weight.element_size() == state.shape.numel()
        and kernel.takes(linear.in_features, state.blocksize)
        and state.code.dtype == torch.float32
        and not weight.requires_grad
        and (linear.bias is None or not linear.bias.requires_grad)
    )
    return Coded(weight.detach(), state, kernel) if fits else None


def _is_exact(coded: Coded, weight: torch.Tensor) -> bool:
    """Some columns come out of the product as they are decoded, and some rows out of that of a gradient."""
    rows, columns = coded.state.shape
    some_I, some_O = (torch.linspace(0, size - 1, min(CHECKED, size)).long() for size in (columns, rows))
    found_OI = coded.multiply(torch.nn.functional.one_hot(some_I, columns).bfloat16()).t()
    back_OI = coded.multiply_back(torch.nn.functional.one_hot(some_O, rows).bfloat16())
    for first, exact in dequantised_rows(weight):
        here = (some_O >= first) & (some_O < first + len(exact))
        if not torch.equal(found_OI[first : first + len(exact)], exact[:, some_I].bfloat16()):
            return False
        if not torch.equal(back_OI[here], exact[some_O[here] - first].bfloat16()):
            return False
    return True
