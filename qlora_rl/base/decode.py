"""4-bit codes decoded, or multiplied with, by bitsandbytes' own kernels and into memory of ours."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qlora_rl.base.quant import require_bitsandbytes

# In so many rows pairs are looked up, for as many threads: `gather` shares rows among threads.
SHARES = 8

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


class TableDecoder:
    """As `decoder`'s function, but two weights at a time out of a table of the 256 bytes.

    bitsandbytes' kernel takes 1.3 ns for a weight where it runs without AVX-512, this one a third of that.
    `index_select` is the faster kernel with one thread, and has no more than one.

    Args:
        values: what the 16 codes mean, float32 [16].
        blocksize: weights per scale.
        scratch: float32, of as many elements as are decoded at a time.
    """

    def __init__(self, values: torch.Tensor, blocksize: int, scratch: torch.Tensor) -> None:
        # The first weight of a byte is its upper half.
        pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
        self._pairs = pairs.view(torch.float64).view(1, 256).expand(SHARES, 256)
        self._blocksize, self._scratch = blocksize, scratch

    def __call__(self, codes: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor) -> None:
        """Write the bf16 weights [rows, I] of the codes into `out`, which is contiguous."""
        exact = self._scratch[: out.numel()]
        place = out.view(-1)  # for indices, and not needed before the end
        if torch.get_num_threads() == 1:
            index = place.view(torch.int32).copy_(codes.view(-1))
            torch.index_select(self._pairs[0], 0, index, out=exact.view(torch.float64))
        else:  # indices of 64 bits: there is room for half of them
            index = place.view(torch.int64).view(SHARES, -1)
            halves = exact.view(torch.float64).view(2, SHARES, -1)
            for half, part in zip(halves, codes.view(2, SHARES, -1), strict=True):
                torch.gather(self._pairs, 1, index.copy_(part), out=half)
        blocks = exact.view(-1, self._blocksize)
        torch.mul(blocks, absmax.view(-1, 1), out=blocks)
        out.copy_(exact.view_as(out))


def decode_plainly(codes: torch.Tensor, state: Any) -> torch.Tensor:
    """The bf16 weight [O, I] as bitsandbytes' own function gives it."""
    return require_bitsandbytes().functional.dequantize_4bit(codes, state).to(torch.bfloat16)


def fused_product(
    x: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor, shape: Sequence[int], blocksize: int, quant_type: str
) -> torch.Tensor:
    """x [..., I] times the weight [O, I] that the codes stand for, by the operator of bitsandbytes that its layers
    call.

    On a GPU that is one fused kernel, or, from some number of rows on, a decoded weight and a plain product;
    bitsandbytes chooses.

    Args:
        x: bf16, fp16 or float32.
        codes: uint8, of any shape.
        absmax: scales that are not quantised, float32.
        shape: (O, I).
        blocksize: weights per scale.
        quant_type: "nf4" or "fp4".
    """
    require_bitsandbytes()
    return torch.ops.bitsandbytes.gemm_4bit.default(
        x, codes.view(-1, 1), list(shape), absmax, blocksize, quant_type, bias=None
    )


def decoded_weight(
    codes: torch.Tensor, absmax: torch.Tensor, shape: Sequence[int], blocksize: int, quant_type: str, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [O, I] in `dtype`, as bitsandbytes' own kernel for the device decodes it; arguments as of
    `fused_product`."""
    require_bitsandbytes()
    return torch.ops.bitsandbytes.dequantize_4bit.default(
        codes.view(-1, 1), absmax, blocksize, quant_type, list(shape), dtype
    )
