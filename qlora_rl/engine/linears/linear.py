"""One adapter multiplied without detours, where vLLM's CPU backend gathers A and B again for every token.

Which adapter each token of a step has is looked up once per step. `native`'s kernel then multiplies an adapter out of
vLLM's own buffers, all parts of a fused linear together. Where it cannot (another dtype, an odd shape, no compiler), an
adapter's tokens go through two products, A of all parts joined, and B of all parts as one block-diagonal matrix, both
packed the way vLLM packs a 16-bit weight. The buffers stay what counts: torch numbers the writes into a tensor, through
whatever view, so a copy is packed again at the first product after a write. Tokens without an adapter are left as they
are.

Letters: T tokens of a step, I and O in- and out-features, R rank of the slots, S slots, N parts of a fused linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.engine.linears.cpu_kernel import Adapter, CodesKernel

Groups = list[tuple[int, torch.Tensor | None]]
# The product of x [T, I] with a weight [O, I], and a bias [O] or none.
Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
Pack = Callable[[torch.Tensor], Product]
# Zeros that a block-diagonal B may hold: reading half a MiB of them costs less than another product does.
ZEROS = 2**18
# So many columns of A are read back at a time, and one sum of R products may be off by this share of its summands
# (16-bit rounding, twice).
COLUMNS, ROUNDING = 32, 0.02


@dataclass
class Packed:
    """One slot of a linear, copied into the form that vLLM's kernels multiply; the interface of `native.Adapter`.

    Attributes:
        down: the product with A [N R, I].
        up: the product with B [O, N R]; or one per part, where it would hold too many zeros.
        sizes: O of each part.
    """

    down: Product
    up: list[Product]
    sizes: list[int]

    def low(self, x: torch.Tensor) -> torch.Tensor:
        """A x of all parts [T, N R]."""
        return self.down(x, None)

    def add_up(self, y: torch.Tensor, low: torch.Tensor, scale: float) -> None:
        """Add scale * B low to y [T, O], part by part."""
        if len(self.up) == 1:
            y.add_(self.up[0](low, None), alpha=scale)
            return
        lows = low.chunk(len(self.sizes), dim=1)
        for part, own, up in zip(y.split(self.sizes, dim=1), lows, self.up, strict=True):
            part.add_(up(own.contiguous(), None), alpha=scale)

    def add(self, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """Add scale * B (A x)."""
        self.add_up(y, self.low(x), scale)


@dataclass
class Held:
    """The product with one slot of a linear, and what it was made of.

    Attributes:
        a_stacked: vLLM's buffers, A [S, 1, R, I] of each part.
        b_stacked: B [S, 1, O, R] of each part.
        mark: of the buffers when it was made: their addresses, where it reads them; torch's numbers of the writes into
            them, where it has a copy.
        product: with the slot.
    """

    a_stacked: tuple[torch.Tensor, ...]
    b_stacked: tuple[torch.Tensor, ...]
    mark: list[int]
    product: Packed | Adapter

    def is_current(self, a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...]) -> bool:
        """It is what these buffers hold now."""
        if self.a_stacked is not a_stacked or self.b_stacked is not b_stacked:
            return False
        mark = _writes if isinstance(self.product, Packed) else _addresses
        return self.mark == mark(a_stacked, b_stacked)


class AdapterProducts:
    """Takes the place of one vLLM wrapper's `add_lora_linear`.

    Args:
        own: vLLM's, for whatever is not of the plain kind.
        pack: makes of a weight [O, I] the product with a copy of it.
        kernel: adds adapters out of the buffers, where it takes them.
    """

    def __init__(self, own: Callable[..., Any], pack: Pack, kernel: CodesKernel | None = None) -> None:
        self._own, self._pack, self._kernel = own, pack, kernel
        self._groups: Groups | None = None
        self._tokens = 0
        # By the identity of vLLM's tuple, which is kept here, so that none can be taken for another.
        self._held: dict[tuple[int, int], Held] = {}

    def note(self, slots_T: torch.Tensor) -> None:
        """What adapter the tokens of the next steps have: their slots, -1 for none."""
        self._groups, self._tokens = group(slots_T), slots_T.numel()

    def __call__(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: Sequence[int],
        **more: Any,
    ) -> Any:
        """Add the adapter's part to y [T, O], for x [T, I]; O are the parts' together."""
        groups = self._groups
        is_plain = x.dtype == y.dtype == lora_a_stacked[0].dtype == lora_b_stacked[0].dtype and len(x) == self._tokens
        if groups is None or more or not is_plain:
            return self._own(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **more)
        for slot, rows in groups:
            product = self._slot(lora_a_stacked, lora_b_stacked, slot)
            if rows is None and y.is_contiguous():  # nearly always
                product.add(y, x.contiguous(), scale)
            else:
                chosen = slice(None) if rows is None else rows
                part = y[chosen].contiguous()
                product.add(part, x[chosen].contiguous(), scale)
                y[chosen] = part
        return None

    def read(
        self, a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...], slot: int, start: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What a slot is multiplied with now, read through its products: A [R, I] and B [O, R] of each part.

        A product with one 1 and else zeros is exact, up to the sign of a zero. B is read whole; of A only `COLUMNS`
        columns, from `start` on: the others are those of the buffers.
        """
        product = self._slot(a_stacked, b_stacked, slot)
        ranks, sizes = [a.shape[2] for a in a_stacked], [b.shape[2] for b in b_stacked]
        a_parts = [a[slot, 0].clone() for a in a_stacked]
        chosen = slice(start, min(start + COLUMNS, a_parts[0].shape[1]))
        for part, found in zip(a_parts, product.low(_one_hot(chosen, a_parts[0])).split(ranks, 1), strict=True):
            part[:, chosen] = found.T
        y = a_parts[0].new_zeros(sum(ranks), sum(sizes))
        product.add_up(y, torch.eye(sum(ranks), dtype=y.dtype), 1.0)
        own_rows = torch.arange(sum(ranks)).split(ranks)
        return a_parts, [part[rows].T for part, rows in zip(y.split(sizes, dim=1), own_rows, strict=True)]

    def is_applied(
        self, a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...], slot: int, start: int
    ) -> bool:
        """Tokens of this slot get B A x, up to rounding; asked of an x that is 1 at `start` and else zero."""
        sizes = [b.shape[2] for b in b_stacked]
        chosen = slice(start, start + 1)
        x = _one_hot(chosen, a_stacked[0])
        y = x.new_zeros(len(x), sum(sizes))
        groups, tokens = self._groups, self._tokens
        self._groups, self._tokens = [(slot, None)], len(x)
        try:
            self(y, x, a_stacked, b_stacked, 1.0, sizes)
        finally:
            self._groups, self._tokens = groups, tokens
        for part, a, b in zip(y.split(sizes, dim=1), a_stacked, b_stacked, strict=True):
            columns_TR, b_OR = a[slot, 0][:, chosen].T.float(), b[slot, 0].float()
            room = ROUNDING * (columns_TR.abs() @ b_OR.abs().T) + torch.finfo(torch.float32).tiny
            kind = torch.finfo(b.dtype)
            room += (
                b_OR.shape[1] * kind.tiny * kind.eps
            )  # what is too small for a normal number is rounded to multiples of this
            if not bool(((part.float() - columns_TR @ b_OR.T).abs() <= room).all()):
                return False
        return True

    def _slot(
        self, a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...], slot: int
    ) -> Packed | Adapter:
        held = self._held.get((id(a_stacked), slot))
        if held is None or not held.is_current(a_stacked, b_stacked):
            held = self._held[id(a_stacked), slot] = self._hold(a_stacked, b_stacked, slot)
        return held.product

    def _hold(self, a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...], slot: int) -> Held:
        a_parts, b_parts = [a[slot, 0] for a in a_stacked], [b[slot, 0] for b in b_stacked]
        sizes = [len(part) for part in b_parts]
        if self._kernel is not None and self._kernel.takes_adapter(a_parts, b_parts):
            mark = _addresses(a_stacked, b_stacked)
            return Held(a_stacked, b_stacked, mark, self._kernel.adapter(a_parts, b_parts))
        writes = _writes(a_stacked, b_stacked)
        columns, rows = sum(b.shape[1] for b in b_parts), sum(sizes)
        if rows * columns - sum(b.numel() for b in b_parts) <= ZEROS:
            b_parts = [torch.block_diag(*b_parts)]
        packed = Packed(self._pack(torch.cat(a_parts)), [self._pack(part.clone()) for part in b_parts], sizes)
        return Held(a_stacked, b_stacked, writes, packed)


class AdaptedLinear:
    """Takes the place of `apply` of one of vLLM's linears with LoRA; the same calls, without the detours in Python
    between them.

    Args:
        layer: vLLM's, with `base_layer`.
        products: of its wrapper.
    """

    def __init__(self, layer: Any, products: AdapterProducts) -> None:
        self._base, self._method, self._products = layer.base_layer, layer.base_layer.quant_method, products
        self._stacked = layer.lora_a_stacked, layer.lora_b_stacked
        self._slices = layer.output_slices

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., I] times the weight, plus the bias, plus the adapter's part."""
        y = self._method.apply(self._base, x, bias)
        if y.ndim == 2:
            self._products(y, x, *self._stacked, 1.0, self._slices)
        else:  # transformers' model code has a batch of one
            self._products(y.flatten(0, -2), x.flatten(0, -2), *self._stacked, 1.0, self._slices)
        return y


def _one_hot(columns: slice, like: torch.Tensor) -> torch.Tensor:
    """[T, I], in row t a 1 in the t-th of the columns."""
    rows = like.new_zeros(columns.stop - columns.start, like.shape[-1])
    rows[:, columns].fill_diagonal_(1)
    return rows


def read_products(layer: Any, slot: int, turn: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What one of vLLM's linears with LoRA multiplies a slot with; nothing where it multiplies with its buffers.

    B of a layer that leaves its adapter out is zero. A is read in turns.
    """
    products = getattr(getattr(layer, "punica_wrapper", None), "add_lora_linear", None)
    if not isinstance(products, AdapterProducts):
        return [], []
    stacked = layer.lora_a_stacked, layer.lora_b_stacked
    start = turn % -(-stacked[0][0].shape[3] // COLUMNS) * COLUMNS
    a_parts, b_parts = products.read(*stacked, slot, start)
    if not products.is_applied(*stacked, slot, start):
        b_parts = [part.new_zeros(part.shape) for part in b_parts]
    return a_parts, b_parts


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal; numbers that are too small for a normal float32 may be zero, and the sign of a zero is nothing."""
    return torch.equal(one, other) or bool(
        ((one.float() - other.float()).abs() <= torch.finfo(torch.float32).tiny).all()
    )


def _writes(a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...]) -> list[int]:
    return [tensor._version for tensor in (*a_stacked, *b_stacked)]


def _addresses(a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...]) -> list[int]:
    return [tensor.data_ptr() for tensor in (*a_stacked, *b_stacked)]


def group(slots_T: torch.Tensor) -> Groups:
    """The slots that occur, each with the numbers of its tokens; `None` for all of them. Tokens of slot -1 are left
    out."""
    if slots_T.numel() == 0:
        return []
    found = torch.unique(slots_T).tolist()
    if len(found) == 1:
        return [] if found[0] < 0 else [(found[0], None)]
    return [(slot, (slots_T == slot).nonzero().flatten()) for slot in found if slot >= 0]
