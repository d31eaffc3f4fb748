"""The ways to multiply with a 4-bit weight on a GPU, and the rules that say which one for how many tokens.

A rule is measured, never assumed: for a number of tokens that was not measured the way is vLLM's own, one product of
bitsandbytes' for each part. The rules of a linear are one line of text, because they are passed through an operator of
torch's: inside a compiled graph only the operator knows how many tokens there are.

Letters: T tokens, O and I out- and in-features.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from qlora_rl.base.decode import decoded_weight, fused_product
from qlora_rl.engine.linears.fused_weight import Joined
from qlora_rl.errors import ConfigConflictError

PARTS = "parts"
JOINED = "joined"
DECODED = "decoded"
TRITON = "triton "
# Tokens that are measured: a step with fewer goes by the next of them.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# A way that is no vLLM's own must be so much faster.
MARGIN = 0.03


def ways_for(tokens: int, *, with_triton: bool) -> list[str]:
    """What there is to be measured with so many tokens.

    "parts": bitsandbytes' product for each part, as vLLM's plugin makes it; "joined": one of them for all parts;
    "decoded": the whole weight decoded, then a 16-bit product; "triton …": our kernel, with the sizes of its tiles.
    """
    ways = [PARTS, JOINED, DECODED]
    if with_triton:
        from qlora_rl.engine.linears.triton_nf4 import tiles_for

        ways += [f"{TRITON}{tile}" for tile in tiles_for(tokens)]
    return ways


def multiply_by(
    way: str,
    x_TI: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    values: torch.Tensor,
    sizes: Sequence[int],
    blocksize: int,
    quant_type: str,
) -> torch.Tensor:
    """x [T, I] times the weight [O, I]; arguments as the attributes of `Joined`.

    Raises:
        ConfigConflictError: there is no such way.
    """
    inputs, outputs = x_TI.shape[1], sum(sizes)
    if way == JOINED or (way == PARTS and len(sizes) == 1):
        return fused_product(x_TI, codes, absmax, (outputs, inputs), blocksize, quant_type)
    if way == PARTS:
        out = torch.empty((len(x_TI), outputs), dtype=x_TI.dtype, device=x_TI.device)
        row = 0
        for size in sizes:
            low, high = row * inputs, (row + size) * inputs
            part = codes[low // 2 : high // 2], absmax[low // blocksize : high // blocksize]
            out[:, row : row + size] = fused_product(x_TI, *part, (size, inputs), blocksize, quant_type)
            row += size
        return out
    if way == DECODED:
        weight = decoded_weight(codes, absmax, (outputs, inputs), blocksize, quant_type, x_TI.dtype)
        return torch.nn.functional.linear(x_TI, weight)
    if way.startswith(TRITON):
        from qlora_rl.engine.linears import triton_nf4

        tile = triton_nf4.Tile.read(way.removeprefix(TRITON))
        return triton_nf4.multiply(x_TI, codes, absmax, values, outputs, blocksize, tile=tile)
    raise ConfigConflictError(f"multiplying: there is no way {way!r}. Use one of {ways_for(1, with_triton=False)}.")


def choose_rules(seconds: Mapping[int, Mapping[str, float]]) -> str:
    """Rules out of what was measured: "8=joined,64=parts" is joined up to 8 tokens, then parts.

    Args:
        seconds: of one product, by tokens and way; `PARTS` is among the ways.
    """
    rules: list[tuple[int, str]] = []
    for tokens in sorted(seconds):
        times = seconds[tokens]
        fastest = min(times, key=lambda way: times[way])
        way = fastest if times[fastest] < (1 - MARGIN) * times[PARTS] else PARTS
        if rules and rules[-1][1] == way:
            rules[-1] = (tokens, way)
        else:
            rules.append((tokens, way))
    while rules and rules[-1][1] == PARTS:
        rules.pop()
    return ",".join(f"{tokens}={way}" for tokens, way in rules)


@functools.lru_cache(maxsize=1024)
def way_for(rules: str, tokens: int) -> str:
    """What the rules say for so many tokens; `PARTS` where they say nothing."""
    for rule in filter(None, rules.split(",")):
        most, _, way = rule.partition("=")
        if tokens <= int(most):
            return way
    return PARTS


@torch.library.custom_op("qlora_rl::product_4bit", mutates_args=())
def product_4bit(
    x_TI: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    values: torch.Tensor,
    sizes: list[int],
    blocksize: int,
    quant_type: str,
    rules: str,
) -> torch.Tensor:
    """`multiply_by` the way that the rules say for this number of tokens; one opaque operator for torch's compiler."""
    return multiply_by(
        way_for(rules, x_TI.shape[0]), x_TI.contiguous(), codes, absmax, values, sizes, blocksize, quant_type
    )


@product_4bit.register_fake
def _(
    x_TI: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    values: torch.Tensor,
    sizes: list[int],
    blocksize: int,
    quant_type: str,
    rules: str,
) -> torch.Tensor:
    return x_TI.new_empty((x_TI.shape[0], sum(sizes)))


class RuledLinear:
    """Takes the place of `apply` of one linear's quantisation method.

    Args:
        joined: its weight.
        rules: see `choose_rules`.
    """

    def __init__(self, joined: Joined, rules: str) -> None:
        self._joined, self._rules = joined, rules
        self._sizes, self._outputs = list(joined.sizes), joined.shape[0]

    def refresh(self) -> None:
        """Nothing to do: there are no copies."""

    def __call__(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., I] times the weight, plus the bias; multiplied in bf16, as vLLM's layer does."""
        joined = self._joined
        if (
            not torch.compiler.is_compiling()
        ):  # a captured graph holds the tensors that it was captured with, like vLLM's own
            joined.renew()
        flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        out = product_4bit(
            flat,
            joined.codes,
            joined.absmax,
            joined.values,
            self._sizes,
            joined.blocksize,
            joined.quant_type,
            self._rules,
        )
        out = out.to(x.dtype).view(*x.shape[:-1], self._outputs)
        return out if bias is None else out + bias
