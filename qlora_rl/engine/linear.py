"""One adapter multiplied without detours, where vLLM's CPU backend gathers A and B anew for every token.

Which adapter each token of a step has is looked up once per step. An adapter's tokens then go through two products, the A
matrices of q, k and v (of gate and up) joined into one; tokens without an adapter are left as they are. In the dtype of the
model, like a trainer's forward under autocast, and from vLLM's own buffers: whatever is written into a slot counts from the
next product on.

Letters: T tokens of a step, I and O in- and out-features, R rank of the slots, S slots, N parts of a fused linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Groups = list[tuple[int, torch.Tensor | None]]


@dataclass
class Place:
    """Views of one slot of a linear: A [R, I] of its parts, or one of all of them joined; B [R, O] and R of each part."""

    a_stacked: tuple[torch.Tensor, ...]
    b_stacked: tuple[torch.Tensor, ...]
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    ranks: list[int]


class AdapterProducts:
    """Takes the place of one vLLM wrapper's `add_lora_linear`.

    Args:
        own: vLLM's, for whatever is not of the plain kind.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own
        self._groups: Groups | None = None
        self._tokens = 0
        # By the identity of the tuple that vLLM hands in, which is kept here, so that none can be taken for another.
        self._joined: dict[int, tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}

        self._places: dict[tuple[int, int], Place] = {}

    def note(self, slots_T: torch.Tensor) -> None:
        """What adapter the tokens of the next steps have: their slots, -1 for none."""
        self._groups, self._tokens = group(slots_T), slots_T.numel()

    def join(self, a_stacked: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Views of one new tensor with the values of these: A [S, 1, R, I] of each of N parts."""
        joined = torch.cat(a_stacked, dim=2)
        parts = tuple(joined.split([a.shape[2] for a in a_stacked], dim=2))
        self._joined[id(parts)] = (parts, joined)
        return parts

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
            if rows is None:
                self._add(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, slot)
            else:
                part = y[rows]
                self._add(part, x[rows], lora_a_stacked, lora_b_stacked, scale, output_slices, slot)
                y[rows] = part
        return None

    def _add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a_stacked: tuple[torch.Tensor, ...],
        b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        sizes: Sequence[int],
        slot: int,
    ) -> None:
        place = self._places.get((id(a_stacked), slot))
        if place is None or place.a_stacked is not a_stacked or place.b_stacked is not b_stacked:
            place = self._places[id(a_stacked), slot] = self._find(a_stacked, b_stacked, slot)
        lows = [torch.nn.functional.linear(x, a) for a in place.a]
        if len(lows) < len(sizes):
            lows = lows[0].split(place.ranks, dim=1)
        if len(sizes) == 1:
            y.addmm_(lows[0], place.b[0], alpha=scale)
            return
        for part, low, b in zip(y.split(sizes, dim=1), lows, place.b, strict=True):
            part.addmm_(low, b, alpha=scale)

    def _find(self, a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...], slot: int) -> Place:
        held = self._joined.get(id(a_stacked))
        return Place(
            a_stacked,
            b_stacked,
            [a[slot, 0] for a in a_stacked] if held is None else [held[1][slot, 0]],
            [b[slot, 0].t() for b in b_stacked],
            [a.shape[2] for a in a_stacked],
        )


def group(slots_T: torch.Tensor) -> Groups:
    """The slots that occur, each with the numbers of its tokens; `None` for all of them. Tokens of slot -1 are left out."""
    if slots_T.numel() == 0:
        return []
    found = torch.unique(slots_T).tolist()
    if len(found) == 1:
        return [] if found[0] < 0 else [(found[0], None)]
    return [(slot, (slots_T == slot).nonzero().flatten()) for slot in found if slot >= 0]
