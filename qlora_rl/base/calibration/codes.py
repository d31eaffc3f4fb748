"""`choose_codes`: codes and scales of the linears that have one input, chosen by what that input is.

The error of a weight is what it changes in the outputs, trace((W - Q) H (W - Q)^T), where H is the sum of the inputs'
products x x^T. Column after column is rounded, and what that changes is made up for in the columns to come (GPTQ, arXiv
2210.17323). The values are those of bitsandbytes' 4-bit types; the scale of a block is chosen before its columns, among
those that can be stored, for the weights as they are by then.

Shape letters: O outputs, of all linears together; I inputs; S weights of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qlora_rl.base.quant import QuantSpec, ScaleGrid, packed, require_bitsandbytes, with_nested_scales

# Scales that are tried, as parts of the largest weight of a block.
SCALES = tuple(0.8 + 0.025 * step for step in range(13))
# Columns between two updates of all that follow; divides every block size.
_COLUMNS = 64
# Added to the diagonal of H, as a part of its mean: the first with which H can be inverted.
_DAMPING = (0.01, 0.1, 1.0)


@dataclass(frozen=True)
class Chosen:
    """A quantised weight.

    Attributes:
        tensors: of a checkpoint, as of `quantize_linear`.
        weight: what they stand for, float32 [O, I].
    """

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor


def choose_codes(
    weights: Sequence[torch.Tensor],
    spec: QuantSpec,
    moments_II: torch.Tensor | None,
    scales: Sequence[float] = SCALES,
) -> list[Chosen]:
    """Quantise the weights [O, I] of linears that have the same input.

    Args:
        weights: float, on one device.
        spec: a 4-bit spec, whose block size divides I.
        moments_II: H, or a multiple of it; `None` where no input was seen.
        scales: that are tried.
    """
    if moments_II is None:
        order_I = torch.arange(weights[0].shape[1], device=weights[0].device)
        factor_II = torch.eye(len(order_I), device=order_I.device)
    else:
        order_I = _order(moments_II.diagonal(), spec.blocksize)
        factor_II = _factor(moments_II[order_I][:, order_I])
    feedback = _Feedback(weights, spec, factor_II, scales)
    codes_OI, Q_OI, absmax = feedback.run(torch.cat([weight.float() for weight in weights]).T[order_I], order_I)
    rows = [weight.shape[0] for weight in weights]
    return [
        Chosen(feedback.tensors(number, codes, absmax), Q)
        for number, (codes, Q, absmax) in enumerate(
            zip(codes_OI.split(rows), Q_OI.split(rows), absmax.split(rows), strict=True)
        )
    ]


def _order(diagonal_I: torch.Tensor, blocksize: int) -> torch.Tensor:
    """Columns in which they are rounded: blocks with large inputs first, and so in each of them."""
    blocks = diagonal_I.reshape(-1, blocksize)
    first = blocks.sum(1).argsort(descending=True, stable=True)
    within = blocks[first].argsort(dim=1, descending=True, stable=True)
    return (first[:, None] * blocksize + within).flatten()


def _factor(moments_II: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of H, which is written to: several of its size are what a block takes most
    memory for.

    Inputs that were zero throughout count as an average one that goes with no other.
    """
    diagonal = moments_II.diagonal().clone()
    if bool((diagonal > 0).any()):
        mean = diagonal[diagonal > 0].mean()
        for share in _DAMPING:
            moments_II.diagonal().copy_(diagonal + torch.where(diagonal > 0, share * mean, mean))
            lower, failed = torch.linalg.cholesky_ex(moments_II)
            inverse = torch.cholesky_inverse(lower)
            del lower
            upper, failed_again = torch.linalg.cholesky_ex(inverse, upper=True)
            del inverse
            if not failed and not failed_again and bool(upper.isfinite().all()):
                return upper
    return torch.eye(len(diagonal), device=diagonal.device)


class _Feedback:
    """Rounds columns, and corrects those that follow."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        spec: QuantSpec,
        factor_II: torch.Tensor,
        scales: Sequence[float],
    ) -> None:
        functional = require_bitsandbytes().functional
        self._weights, self._spec, self._factor, self._scales = weights, spec, factor_II, scales
        self._table = functional.get_4bit_type(spec.quant_type, device="cpu", blocksize=spec.blocksize).float()
        # FP4 has two codes for zero, of which the first is taken.
        values, first = torch.unique(self._table, return_inverse=True)
        order = torch.stack([(first == number).nonzero()[0, 0] for number in range(values.numel())])
        device = factor_II.device
        self._values, self._codes = values.to(device), order.to(device, torch.uint8)
        self._middles = (self._values[1:] + self._values[:-1]) / 2
        self._importance = factor_II.diagonal() ** -2
        self._grids: list[ScaleGrid] = []
        if spec.double_quant:
            self._grids = [ScaleGrid.of(_absmax(weight.float(), spec.blocksize).flatten()) for weight in weights]

    def run(self, W_IO: torch.Tensor, order_I: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes [O, I] uint8, what they stand for [O, I], and what is stored of the scales [O, blocks]; columns of the
        weights, which are written to, are in another order, of the results in their own."""
        size, spec = len(W_IO), self._spec
        codes_IO, Q_IO = torch.empty_like(W_IO, dtype=torch.uint8), torch.empty_like(W_IO)
        stored: dict[int, torch.Tensor] = {}
        for start in range(0, size, _COLUMNS):
            end = start + _COLUMNS
            if start % spec.blocksize == 0:
                block = slice(start, start + spec.blocksize)
                number = int(order_I[start]) // spec.blocksize
                stored[number], scale_O = self._best_scales(W_IO[block], self._importance[block], number)
                inverse_O = _inverse(scale_O)
            errors_SO = torch.empty_like(W_IO[start:end])
            for column in range(start, end):
                w_O = W_IO[column]
                nearest = torch.bucketize(w_O * inverse_O, self._middles)
                codes_IO[column] = self._codes[nearest]
                torch.mul(self._values[nearest], scale_O, out=Q_IO[column])
                error_O = torch.div(w_O - Q_IO[column], self._factor[column, column], out=errors_SO[column - start])
                W_IO[column + 1 : end].addr_(self._factor[column, column + 1 : end], error_O, alpha=-1)
            W_IO[end:].addmm_(self._factor[start:end, end:].T, errors_SO, alpha=-1)
        back_I = order_I.argsort()
        return codes_IO[back_I].T, Q_IO[back_I].T, torch.stack([stored[number] for number in sorted(stored)], 1)

    def tensors(self, number: int, codes_OI: torch.Tensor, stored: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of one of the weights, from its rows of what `run` gives; on the CPU."""
        weight, spec = self._weights[number], self._spec
        pairs = codes_OI.contiguous().view(-1, 2)
        state = require_bitsandbytes().functional.QuantState(
            absmax=stored.flatten().cpu(),
            shape=weight.shape,
            dtype=weight.dtype,
            blocksize=spec.blocksize,
            code=self._table.clone(),
            quant_type=spec.quant_type,
        )
        if spec.double_quant:
            grid = self._grids[number]
            state = with_nested_scales(
                state, state.absmax, ScaleGrid(grid.offset.cpu(), grid.inner.cpu(), grid.table.cpu())
            )
        return packed((pairs[:, 0] << 4 | pairs[:, 1])[:, None].cpu(), state)

    def _best_scales(
        self, block_SO: torch.Tensor, importance_S: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is stored of the scales of a block [O], and the scales: those with the least error that can be stored.

        Args:
            block_SO: the weights as they are.
            importance_S: what an error of a column costs that is made up for in those behind it.
            number: of the block in its row.
        """
        largest_O = block_SO.abs().amax(0)
        for place, part in enumerate(self._scales):
            kept, scale_O = self._storable(largest_O * part, number)
            nearest = torch.bucketize(block_SO * _inverse(scale_O), self._middles, out_int32=True)
            wrong_SO = self._values[nearest].mul_(scale_O).sub_(block_SO)
            error_O = importance_S @ wrong_SO.square_()
            if place == 0:
                best_O, stored_O, chosen_O = error_O, kept, scale_O
                continue
            is_better = error_O < best_O
            best_O = torch.where(is_better, error_O, best_O)
            stored_O, chosen_O = torch.where(is_better, kept, stored_O), torch.where(is_better, scale_O, chosen_O)
        return stored_O, chosen_O

    def _storable(self, absmax_O: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is stored of scales, and the scales that this stands for."""
        if not self._grids:
            return absmax_O, absmax_O
        kept, scales, start = [], [], 0
        for weight, grid in zip(self._weights, self._grids, strict=True):
            rows = weight.shape[0]
            here = ScaleGrid(grid.offset, grid.inner.view(rows, -1)[:, number], grid.table)
            kept.append(here.codes(absmax_O[start : start + rows]))
            scales.append(here.scales(kept[-1]))
            start += rows
        return torch.cat(kept), torch.cat(scales)


def _absmax(weight_OI: torch.Tensor, blocksize: int) -> torch.Tensor:
    return weight_OI.unflatten(1, (-1, blocksize)).abs().amax(2)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 1.0, scale).reciprocal()
