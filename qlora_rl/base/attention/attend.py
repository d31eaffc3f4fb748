"""`attend`: causal attention over sequences one behind the other, without a mask; and softcapped attention, with and
without.

An attention function of transformers (`AttentionInterface`). Without `sequence_lengths` and `softcap` it is
transformers' own SDPA.

Letters: N tokens of all sequences together, M of the row, where sequences share some, Q query heads, K key heads, D
head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qlora_rl.base.attention.softcap import Cap, capped_attention
from qlora_rl.errors import NotYetSupportedError, collected

# transformers' name of it (`config._attn_implementation`).
NAME = "sdpa_per_sequence"
# Tokens whose gradients are in float32 at once.
_AT_ONCE = 4096
_HALF = (torch.bfloat16, torch.float16)
# Up to so many tokens the backward pass of torch's fused attention for CPUs is faster in float32 than in bf16; from 256
# on it is not.
_SHORT = 128
# Tokens that are in float32 at once for it.
_LIFTED = 1024
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Arguments that models hand to every attention function and that change nothing here: a mask or `sequence_lengths` says
# it, or it is not of attention.
_WITHOUT_EFFECT = {
    "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "use_cache",
    "output_attentions",
    "output_hidden_states", "output_router_logits", "num_items_in_batch", "return_dict", "deterministic",
}  # fmt: skip
# transformers makes masks once in a forward pass, before the layers; it does not say for which arguments.
_without_masks: ContextVar[bool] = ContextVar("without_masks", default=False)


def register() -> None:
    """Make `NAME` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


@contextmanager
def without_masks() -> Iterator[None]:
    """Within it a model makes no mask: its layers are told `sequence_lengths`."""
    token = _without_masks.set(True)
    try:
        yield
    finally:
        _without_masks.reset(token)


def make_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask of transformers' SDPA, or none."""
    return None if _without_masks.get() else sdpa_mask(*args, **kwargs)


def attend(
    module: torch.nn.Module,
    query_1QND: torch.Tensor,
    key_1KND: torch.Tensor,
    value_1KND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sequence_lengths: tuple[int, ...] | None = None,
    sources: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each sequence over itself; the arguments are those of transformers' attention functions.

    Args:
        sequence_lengths: tokens of each sequence, in order; the sum is N. `None`: a batch, which may be padded.
        sources, places: where sequences share tokens, and the row has M of them: which token of the row each of the
            sequences' N is, and which of the N each token of the row is (any, where it is several).
        softcap: bound of a score.
        s_aux: scores that no key has.

    Returns:
        [1, N, Q, D], or [1, M, Q, D], and no attention weights.

    Raises:
        NotYetSupportedError: an argument that would have no effect.
    """
    kind = type(module).__name__
    if s_aux is not None:
        raise NotYetSupportedError(
            f"attention of {kind}: {NAME!r} has no sinks (s_aux). Use attn_implementation='eager'."
        )
    if sequence_lengths is None:
        if _without_masks.get():
            raise ValueError(f"{kind} does not hand `sequence_lengths` on to its attention")
        if softcap is None:
            return sdpa_attention_forward(
                module, query_1QND, key_1KND, value_1KND, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        if kwargs.get("position_bias") is not None:
            raise NotYetSupportedError(
                f"attention of {kind}: {NAME!r} has softcap={softcap} or position_bias, not both. Use "
                "attn_implementation='eager'."
            )
        cap = _cap(module, query_1QND, scaling, softcap, kwargs.get("is_causal"))
        found = []
        for number, (query, key, value) in enumerate(zip(query_1QND, key_1KND, value_1KND, strict=True)):
            mask = None if attention_mask is None else attention_mask.expand(len(query_1QND), 1, -1, -1)[number, 0]
            # As in SDPA, a single query attends to all keys.
            is_causal = cap.is_causal and query.shape[1] > 1
            found.append(capped_attention(query, key, value, mask, replace(cap, is_causal=is_causal), dropout))
        return torch.stack(found).transpose(1, 2).contiguous(), None
    _check(module, sequence_lengths, kwargs)
    if sources is not None:
        query_1QND, key_1KND, value_1KND = (
            _Gathered.apply(whole, sources) for whole in (query_1QND, key_1KND, value_1KND)
        )
    shares_keys = query_1QND.shape[1] != key_1KND.shape[1]
    dtypes = {query_1QND.dtype, key_1KND.dtype, value_1KND.dtype}
    if softcap is not None:
        cap = _cap(module, query_1QND, scaling, softcap, is_causal=True)
        whole = (part[0].split(sequence_lengths, dim=1) for part in (query_1QND, key_1KND, value_1KND))
        found = [
            capped_attention(query, key, value, None, cap, dropout) for query, key, value in zip(*whole, strict=True)
        ]
        found_1NQD = torch.cat(found, dim=1).transpose(0, 1)[None]
    elif query_1QND.is_cuda and len(dtypes) == 1 and query_1QND.dtype in _HALF and not dropout:
        found_1NQD = _one_kernel(query_1QND, key_1KND, value_1KND, sequence_lengths, scaling, shares_keys)
    else:
        found_1NQD = _by_length(query_1QND, key_1KND, value_1KND, sequence_lengths, scaling, shares_keys, dropout)
    return found_1NQD if places is None else found_1NQD.index_select(1, places), None


def _check(module: torch.nn.Module, lengths: tuple[int, ...], given: dict[str, Any]) -> None:
    """Raise where sequences one behind the other would be attended to otherwise than the arguments say."""
    reasons = []
    window = given.get("sliding_window")
    if window is not None and max(lengths) > window:
        reasons.append(f"sliding_window={window} < {max(lengths)} tokens of a sequence")
    is_causal = given.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        reasons.append("is_causal=False")
    others = given.keys() - _WITHOUT_EFFECT - {"sliding_window", "is_causal"}
    reasons += [f"{name}, which is unknown here" for name in sorted(others) if given[name] is not None]
    if reasons:
        raise collected(
            f"attention of {type(module).__name__} without padding (remove_padding=False keeps it)",
            reasons,
            NotYetSupportedError,
        )


def _cap(module: Any, query: torch.Tensor, scaling: float | None, softcap: float, is_causal: bool | None) -> Cap:
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return Cap(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, is_causal)


class _Gathered(torch.autograd.Function):
    """Tokens of a row as those of its sequences, [1, H, N, D] from [1, H, M, D]; gradients of a token that several
    share are added up in float32.

    On CUDA in an order of its own, so that the last bits differ from run to run, as those of other kernels there do.
    """

    @staticmethod
    def forward(ctx: Any, row_1HMD: torch.Tensor, sources_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sources_N)
        ctx.like = row_1HMD.shape
        return row_1HMD.index_select(2, sources_N)

    @staticmethod
    def backward(ctx: Any, gradient_1HND: torch.Tensor) -> tuple[torch.Tensor, None]:
        (sources_N,) = ctx.saved_tensors
        total = gradient_1HND.new_zeros(ctx.like, dtype=torch.float32)
        parts = zip(sources_N.split(_AT_ONCE), gradient_1HND.split(_AT_ONCE, dim=2), strict=True)
        for sources, gradient in parts:
            total.index_add_(2, sources, gradient.float())
        return total.to(gradient_1HND.dtype), None


class _Fused(torch.autograd.Function):
    """torch's fused causal attention for CPUs, its backward pass in float32, rounded once: in bf16 that takes up to 13
    times as long (torch 2.13).

    Query [B, Q, S, D], key and value [B, K, S, D], all bf16; returns [B, Q, S, D]. A base in float32 under autocast has
    queries and keys in float32, from the rotation, and values in bf16: that is left to torch.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
    ) -> torch.Tensor:
        found, sums = _FUSED(query, key, value, 0.0, True, scale=scaling)
        ctx.save_for_backward(query, key, value, found, sums)
        ctx.scaling = scaling
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *parts, sums = ctx.saved_tensors
        found = [torch.empty_like(part) for part in parts[:3]]
        count = max(1, _LIFTED // gradient.shape[2])
        for start in range(0, len(gradient), count):
            some = slice(start, start + count)
            lifted = [part[some].float() for part in (gradient, *parts)]
            exact = _FUSED_BACKWARD(*lifted, sums[some], 0.0, True, scale=ctx.scaling)
            for whole, part in zip(found, exact, strict=True):
                whole[some] = part
        return *found, None


def _by_length(
    query_1QND: torch.Tensor,
    key_1KND: torch.Tensor,
    value_1KND: torch.Tensor,
    lengths: tuple[int, ...],
    scaling: float | None,
    shares_keys: bool,
    dropout: float,
) -> torch.Tensor:
    """torch's SDPA, or `_Fused`; one call for neighbours of one length."""
    runs = [(length, len(list(alike))) for length, alike in groupby(lengths)]
    sizes = [length * count for length, count in runs]
    found = []
    # `split` rather than slices: the gradient of a slice is as large as what was sliced, for each sequence.
    for (length, count), *parts in zip(
        runs, *(whole.split(sizes, dim=2) for whole in (query_1QND, key_1KND, value_1KND)), strict=True
    ):
        alike = [part[0].unflatten(1, (count, length)).transpose(0, 1) for part in parts]
        if length <= _SHORT and _is_fused(alike, scaling, shares_keys, dropout):
            run = _Fused.apply(*alike, scaling)
        else:
            query, key, value = alike
            run = scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=shares_keys
            )
        found.append(run.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)[None]


def _is_fused(parts: Sequence[torch.Tensor], scaling: float | None, shares_keys: bool, dropout: float) -> bool:
    """On a CPU, in bf16, and torch would take its fused kernel; its compiler cannot ask that."""
    if torch.compiler.is_compiling() or not all(part.is_cpu and part.dtype == torch.bfloat16 for part in parts):
        return False
    chosen = torch._fused_sdp_choice(*parts, None, dropout, True, scale=scaling, enable_gqa=shares_keys)
    return chosen == SDPBackend.FLASH_ATTENTION.value


def _one_kernel(
    query_1QND: torch.Tensor,
    key_1KND: torch.Tensor,
    value_1KND: torch.Tensor,
    lengths: tuple[int, ...],
    scaling: float | None,
    shares_keys: bool,
) -> torch.Tensor:
    """All sequences in one kernel of FlashAttention. Written for CUDA, and not run on a GPU yet."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor((0, *lengths), device=query_1QND.device).cumsum(0, dtype=torch.int32)
    query, key, value = (whole[0].transpose(0, 1) for whole in (query_1QND, key_1KND, value_1KND))
    longest = max(lengths)
    shares: dict[str, bool] = {}
    if shares_keys and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        shares = {"enable_gqa": True}
    elif shares_keys:  # torch before 2.13
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    found = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), **shares)
    return found[None]
