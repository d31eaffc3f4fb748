"""`capped_attention`: softmax(c tanh(q k / c)) v, some queries at a time, which are computed again in the backward
pass.

Gemma 2 bounds the scores of its attention, c = 50. torch's SDPA has no such bound, and transformers' eager attention
keeps several matrices of scores for every layer. Products and softmax are in float32 here.

Letters: Q query heads, K key heads, G = Q / K of them for each key head, S queries, T keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import dropout

# Scores that are held at a time: 4 MiB each of the half dozen matrices, and 64 MiB.
SCORES = {"cpu": 2**20, "cuda": 2**24}
# Of a key that is not attended to. Finite, so that a query of padding that attends to nothing has numbers.
_LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Cap:
    """How scores become weights.

    Attributes:
        scaling: that products of queries and keys are multiplied with.
        bound: of a score.
        is_causal: where there is no mask, query n of S attends to keys 0 to n.
    """

    scaling: float
    bound: float
    is_causal: bool


def capped_attention(
    query_QSD: torch.Tensor,
    key_KTD: torch.Tensor,
    value_KTD: torch.Tensor,
    mask_ST: torch.Tensor | None,
    cap: Cap,
    dropped: float = 0.0,
) -> torch.Tensor:
    """Of one sequence, [Q, S, D] in the dtype of the values.

    Args:
        mask_ST: true, or what is added to the score, where a query attends to a key.
        dropped: rate of dropout; with one the weights of all queries are kept for the backward pass.
    """
    if cap.is_causal and mask_ST is None:
        key_KTD, value_KTD = key_KTD[:, : query_QSD.shape[1]], value_KTD[:, : query_QSD.shape[1]]
    if dropped:
        return _attend(query_QSD, key_KTD.float(), value_KTD.float(), mask_ST, cap, 0, dropped).to(value_KTD.dtype)
    return _Capped.apply(query_QSD, key_KTD, value_KTD, mask_ST, cap)


def _attend(
    query_QSD: torch.Tensor,
    key_KTD: torch.Tensor,
    value_KTD: torch.Tensor,
    mask_ST: torch.Tensor | None,
    cap: Cap,
    first: int,
    dropped: float = 0.0,
) -> torch.Tensor:
    """Float32 [Q, S, D] of queries `first` and on, with keys and values in float32."""
    heads, count = len(key_KTD), query_QSD.shape[1]
    with torch.autocast(key_KTD.device.type, enabled=False):
        query = (query_QSD.float() * (cap.scaling / cap.bound)).unflatten(0, (heads, -1)).flatten(1, 2)
        scores_KGST = ((query @ key_KTD.transpose(1, 2)).tanh() * cap.bound).unflatten(1, (-1, count))
        if mask_ST is None and cap.is_causal:
            places = torch.arange(key_KTD.shape[1], device=key_KTD.device)
            mask_ST = places <= places[first : first + count, None]
        if mask_ST is not None:
            is_kept = mask_ST.dtype == torch.bool
            scores_KGST = scores_KGST.masked_fill(~mask_ST, _LEAST) if is_kept else scores_KGST + mask_ST
        weights_KGST = dropout(scores_KGST.softmax(-1), dropped)
        return (weights_KGST.flatten(1, 2) @ value_KTD).unflatten(1, (-1, count)).flatten(0, 1)


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        cap: Cap,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.cap = cap
        wide_key, wide_value = key.float(), value.float()
        out = value.new_empty(*query.shape[:2], value.shape[-1])
        for first, last in _blocks(query, key):
            seen = last if mask is None and cap.is_causal else key.shape[1]
            part = None if mask is None else mask[first:last]
            out[:, first:last] = _attend(
                query[:, first:last], wide_key[:, :seen], wide_value[:, :seen], part, cap, first
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        cap = ctx.cap
        wide_key, wide_value = key.float(), value.float()
        sums = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
        found = torch.empty_like(query)
        for first, last in _blocks(query, key):
            seen = last if mask is None and cap.is_causal else key.shape[1]
            part = None if mask is None else mask[first:last]
            parts = [query[:, first:last], wide_key[:, :seen], wide_value[:, :seen]]
            parts = [each.detach().requires_grad_() for each in parts]
            with torch.enable_grad():
                out = _attend(parts[0], parts[1], parts[2], part, cap, first)
            of_query, *others = torch.autograd.grad(out, parts, gradients[0][:, first:last].float())
            found[:, first:last] = of_query
            for total, each in zip(sums, others, strict=True):
                total[:, :seen] += each
        return found, sums[0].to(key.dtype), sums[1].to(value.dtype), None, None


def _blocks(query: torch.Tensor, key: torch.Tensor) -> list[tuple[int, int]]:
    """First and last of the queries that are computed together."""
    most = SCORES["cpu" if query.device.type == "cpu" else "cuda"]
    count = max(1, most // (len(query) * key.shape[1]))
    return [(first, min(first + count, query.shape[1])) for first in range(0, query.shape[1], count)]
