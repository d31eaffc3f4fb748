"""x times a 4-bit weight of bitsandbytes, in one Triton kernel: the codes are decoded on the way into the product.

Every weight is decoded as bitsandbytes decodes it: table entry times scale in float32, rounded once to the dtype of x.
Sums are kept in float32 and rounded once. A long sum may be cut into parts that are added in a fixed order, so the same
call gives the same bits.

Not seen on a GPU yet. The tests run it in Triton's interpreter and compile it for sm_80 and sm_90.

Letters: T tokens, O and I out- and in-features, S parts of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tile:
    """How the product is cut.

    Attributes:
        tokens: rows of x that a program takes; 16 or more, a power of two.
        outputs: rows of the weight, likewise.
        inputs: of the sum, in one step of the loop; 32 or more, a power of two.
        parts: into how many programs the sum is cut.
        warps: of a program.
        stages: of the loop that are under way at once.
    """

    tokens: int = 16
    outputs: int = 64
    inputs: int = 64
    parts: int = 1
    warps: int = 4
    stages: int = 3

    def __str__(self) -> str:
        return f"{self.tokens}x{self.outputs}x{self.inputs}/{self.parts}w{self.warps}s{self.stages}"

    @classmethod
    def read(cls, text: str) -> Tile:
        """The tile that `str` of it wrote."""
        sizes, _, rest = text.partition("/")
        parts, _, rest = rest.partition("w")
        warps, _, stages = rest.partition("s")
        tokens, outputs, inputs = map(int, sizes.split("x"))
        return cls(tokens, outputs, inputs, int(parts), int(warps), int(stages))


def tiles_for(tokens: int) -> list[Tile]:
    """What is worth measuring for a product with so many tokens."""
    if tokens <= 32:
        rows = 16 if tokens <= 16 else 32
        return [
            Tile(rows, outputs, inputs, parts)
            for outputs, inputs in ((32, 128), (64, 64), (128, 64))
            for parts in (1, 4)
        ]
    rows = 64 if tokens <= 64 else 128
    return [Tile(rows, 64, 64, parts) for parts in (1, 4)] + [Tile(rows, 128, 64, 1, warps=8)]


@triton.jit
def _rounded(value, dtype: tl.constexpr, BY_HAND: tl.constexpr):
    """Float32 rounded to the nearest bf16 or fp16, ties to even. Triton's interpreter cuts bf16 off: there, BY_HAND."""
    if BY_HAND and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        value = bits.to(tl.uint32).to(tl.float32, bitcast=True)
    return value.to(dtype)


# Not by whether there are 16 tokens or 17: a kernel may not be recompiled while a graph is captured.
@triton.jit(do_not_specialize=["token_count"])
def _product(
    x_ptr, codes_ptr, absmax_ptr, values_ptr, bias_ptr, out_ptr,
    token_count, output_count, input_count, x_stride, span,
    BLOCKSIZE: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    ONE_SCALE: tl.constexpr, IS_PART: tl.constexpr, HAS_BIAS: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """One tile of the product; the weight is the left factor, so that its decoded tile need not leave the registers.

    span: inputs of one part of the sum. ONE_SCALE: a row of the tile is in one block. IS_PART: the sum so far goes to
    float32 out [S, T, O]; otherwise, with the bias, to out [T, O]. BY_HAND: in Triton's interpreter,
    which multiplies bf16 as if its bits were integers; in float32 the products are the same, exactly.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tokens = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    part = tl.program_id(2)
    has_output, has_token = outputs < output_count, tokens < token_count
    rows = outputs.to(tl.int64)
    half = tl.arange(0, INPUTS // 2)
    values = tl.load(values_ptr + tl.arange(0, 16))
    total = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for first in range(part * span, min(part * span + span, input_count), INPUTS):
        pairs = first // 2 + half
        is_there = has_output[:, None] & (pairs < input_count // 2)[None, :]
        places = rows[:, None] * (input_count // 2) + pairs[None, :]
        packed = tl.load(codes_ptr + places, mask=is_there, other=0).to(tl.int32)
        if ONE_SCALE:
            blocks = rows * (input_count // BLOCKSIZE) + first // BLOCKSIZE
            scale = tl.load(absmax_ptr + blocks, mask=has_output, other=0.0)[:, None]
        else:
            scale = tl.load(absmax_ptr + places // (BLOCKSIZE // 2), mask=is_there, other=0.0)
        # The first of two weights is in the high half of a byte.
        flat = tl.reshape(packed, (OUTPUTS * INPUTS // 2,))
        even = tl.reshape(tl.gather(values, flat >> 4, 0), (OUTPUTS, INPUTS // 2)) * scale
        odd = tl.reshape(tl.gather(values, flat & 15, 0), (OUTPUTS, INPUTS // 2)) * scale
        weight = _rounded(tl.interleave(even, odd), x_ptr.dtype.element_ty, BY_HAND)
        inputs = first + tl.arange(0, INPUTS)
        x = tl.load(
            x_ptr + tokens.to(tl.int64)[None, :] * x_stride + inputs[:, None],
            mask=has_token[None, :] & (inputs < input_count)[:, None],
            other=0.0,
        )
        if BY_HAND:  # noqa: SIM108
            total = tl.dot(weight.to(tl.float32), x.to(tl.float32), total)
        else:
            total = tl.dot(weight, x, total)
    where = tokens.to(tl.int64)[None, :] * output_count + outputs[:, None]
    is_there = has_output[:, None] & has_token[None, :]
    if IS_PART:
        tl.store(out_ptr + part.to(tl.int64) * token_count * output_count + where, total, mask=is_there)
    else:
        if HAS_BIAS:
            total += tl.load(bias_ptr + outputs, mask=has_output, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + where, _rounded(total, out_ptr.dtype.element_ty, BY_HAND), mask=is_there)


@triton.jit(do_not_specialize=["count"])
def _sum(
    parts_ptr, bias_ptr, out_ptr, count, output_count,
    PARTS: tl.constexpr, SIZE: tl.constexpr, HAS_BIAS: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Out [T, O] of parts float32 [S, T, O], added in their order; `count` is T times O."""
    places = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    is_there = places < count
    total = tl.zeros((SIZE,), tl.float32)
    for part in range(PARTS):
        total += tl.load(parts_ptr + part * count.to(tl.int64) + places, mask=is_there, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + places % output_count, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out_ptr + places, _rounded(total, out_ptr.dtype.element_ty, BY_HAND), mask=is_there)


def multiply(
    x_TI: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    values: torch.Tensor,
    outputs: int,
    blocksize: int,
    bias_O: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [T, I] times the weight [O, I] that the codes stand for, plus the bias; [T, O] in the dtype of x.

    Args:
        x_TI: bf16 or fp16; its rows may be strided, its columns not.
        codes: uint8, two weights in a byte, [O * I / 2] in any shape.
        absmax: the scales, float32 [O * I / blocksize], of blocks that may span rows; already decoded where they are
            quantised.
        values: what the 16 codes mean, float32 [16].
        outputs: O.
        blocksize: weights per scale; even.
        bias_O: in the dtype of x.
        tile: how it is cut.

    Raises:
        ValueError: shapes or dtypes that the kernel would read wrongly.
    """
    tokens, inputs = x_TI.shape
    tile = tile or tiles_for(tokens)[0]
    _reject_misfits(x_TI, codes, absmax, values, outputs, blocksize, bias_O)
    out = torch.empty((tokens, outputs), dtype=x_TI.dtype, device=x_TI.device)
    if out.numel() == 0:
        return out
    steps = triton.cdiv(inputs, tile.inputs)
    span = triton.cdiv(steps, tile.parts) * tile.inputs
    parts = triton.cdiv(inputs, span)  # no part is empty
    cut = torch.empty((parts, tokens, outputs), dtype=torch.float32, device=x_TI.device) if parts > 1 else out
    by_hand = bool(triton.knobs.runtime.interpret)
    grid = (triton.cdiv(outputs, tile.outputs), triton.cdiv(tokens, tile.tokens), parts)
    _product[grid](
        x_TI, codes, absmax, values, bias_O, cut,
        tokens, outputs, inputs, x_TI.stride(0), span,
        BLOCKSIZE=blocksize, TOKENS=tile.tokens, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        ONE_SCALE=blocksize % tile.inputs == 0 and inputs % blocksize == 0,
        IS_PART=parts > 1, HAS_BIAS=bias_O is not None, BY_HAND=by_hand,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts > 1:
        size = 1024
        _sum[(triton.cdiv(out.numel(), size),)](
            cut, bias_O, out, out.numel(), outputs,
            PARTS=parts, SIZE=size, HAS_BIAS=bias_O is not None, BY_HAND=by_hand,
        )  # fmt: skip
    return out


def _reject_misfits(
    x_TI: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    values: torch.Tensor,
    outputs: int,
    blocksize: int,
    bias_O: torch.Tensor | None,
) -> None:
    inputs, count = x_TI.shape[1], outputs * x_TI.shape[1]
    wrong = [
        (x_TI.dtype not in (torch.bfloat16, torch.float16), f"x is {x_TI.dtype}, not bfloat16 or float16"),
        (x_TI.stride(1) != 1, "the columns of x are not contiguous"),
        (inputs % 2 == 1, f"in-features {inputs} are odd: a byte would span two rows"),
        (blocksize % 2 == 1, f"blocksize {blocksize} is odd: a byte would have two scales"),
        (codes.dtype != torch.uint8 or not codes.is_contiguous(), "the codes are not contiguous uint8"),
        (codes.numel() * 2 != count, f"{codes.numel()} bytes of codes are not {outputs} x {inputs} weights"),
        (absmax.dtype != torch.float32 or not absmax.is_contiguous(), "the scales are not contiguous float32"),
        (
            absmax.numel() != -(-count // blocksize),
            f"{absmax.numel()} scales are not {count} weights / blocksize {blocksize}",
        ),
        (values.dtype != torch.float32 or values.shape != (16,), "the values of the codes are not float32 [16]"),
        (
            bias_O is not None
            and (bias_O.dtype != x_TI.dtype or bias_O.shape != (outputs,) or not bias_O.is_contiguous()),
            f"the bias is not [{outputs}] in the dtype of x",
        ),
    ]
    reasons = [why for is_wrong, why in wrong if is_wrong]
    if reasons:
        raise ValueError("; ".join(reasons))
