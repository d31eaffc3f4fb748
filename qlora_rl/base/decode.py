"""4-bit codes decoded, or multiplied with, by bitsandbytes' own kernels and into memory of ours."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from qlora_rl.base.quant import require_bitsandbytes

Decode = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def uses_avx512() -> bool:
    """bitsandbytes' compiled CPU kernels run with AVX-512 here; its library asks the processor itself."""
    require_bitsandbytes()
    from bitsandbytes.cextension import lib

    try:
        return bool(lib.has_avx512f_cpu() & 1)
    except (AttributeError, RuntimeError):  # built without it
        return False


def decoder(quant_type: str, blocksize: int) -> Decode | None:
    """A function (codes, absmax, out) that writes bf16 weights [rows, I] into `out`; `None` where bitsandbytes has
    none.

    bitsandbytes' own function allocates its result at each call, which for a large weight takes longer than the
    decoding: the pages are freed and fetched again. The kernel underneath is the same, so is its result, bit for bit.
    The name is private to bitsandbytes 0.50; remove when `dequantize_4bit(out=...)` writes into `out` on the CPU.

    Args:
        quant_type: "nf4" or "fp4".
        blocksize: weights per scale; a row must hold whole blocks.
    """
    require_bitsandbytes()
    try:
        from bitsandbytes.cextension import lib

        kernel = getattr(lib, f"cdequantize_blockwise_cpu_{quant_type}_bf16")
    except (ImportError, AttributeError, RuntimeError):
        return None
    # Where its library did not load, or lacks the kernel, it gives a Python function that raises when it is called.
    if not hasattr(kernel, "argtypes"):
        return None
    # bitsandbytes itself does not use the kernel for such blocks: it is inexact there.
    if blocksize >= 2048:
        return None

    def decode(codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor) -> None:
        kernel(
            ctypes.c_void_p(codes.data_ptr()),
            ctypes.c_void_p(absmax.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_longlong(blocksize),
            ctypes.c_longlong(out.shape[0]),
            ctypes.c_longlong(out.shape[1]),
        )

    return decode


def decode_plainly(codes: torch.Tensor, state: Any) -> torch.Tensor:
    """The bf16 weight [O, I] as bitsandbytes' own function gives it."""
    return require_bitsandbytes().functional.dequantize_4bit(codes, state).to(torch.bfloat16)
