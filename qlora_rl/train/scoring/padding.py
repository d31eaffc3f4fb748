"""`remove_padding`: a micro-batch is computed as one row of tokens, its sequences one behind the other.

TRL pads a micro-batch to [B, T]. Padding is computed like any token, and attention then needs a mask of T x T for every
sequence. Here the forward that TRL scores with makes one row of the batch (`make_row`), with positions that start again
at each sequence, and puts logprobs and entropies back where TRL expects them.

GRPO samples G completions of a prompt, and DPO compares two. What comes before the token that the first scored one
follows is then the same for all of them, and so is what every layer computes there. With `shares_prompts` those tokens
are in the row once, before all sequences, and attention finds them by `sources` (`qlora_rl.base.attention.attend`). A
sequence's last token, after which nothing is scored, is then left out, and so are sequences of which nothing is scored.

Letters: B sequences, T tokens with padding, N without, of all sequences together; M tokens of the row, N or fewer.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.utils import FusedCausalLMOutput

from qlora_rl.base.attention.attend import NAME, register, without_masks
from qlora_rl.base.experts import mixtures_in
from qlora_rl.base.model_classes import has_dropout
from qlora_rl.errors import ConfigConflictError
from qlora_rl.memory.shape import layer_kinds, layer_window
from qlora_rl.sync.forward import evaluating

# Arguments of a model that mean the same for one row. A batch with others stays as it is.
HANDED_ON = {"use_cache", "num_items_in_batch", "output_router_logits"}
_PADDED = {"input_ids", "attention_mask", "labels"}
# Of TRL's collator for SFT with `padding_free` or `packing`.
_LENGTHS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_ONE_ROW = {"input_ids", "position_ids", "labels"} | _LENGTHS
# Which sequence a token is of: for layers other than attention, of which no model here has any.
_IGNORED = {"seq_idx"}
# A row with more than this part of the tokens is not worth what attention does to find them.
_WORTH = 0.9


@dataclass(frozen=True)
class Row:
    """A batch as one row.

    Attributes:
        inputs: of the model: ids, positions, lengths; with shared prompts `sources` and `places`, too.
        targets_1M: the token that is scored after each one, in the order of the batch; -100 where none is.
    """

    inputs: dict[str, Any]
    targets_1M: torch.Tensor


def make_row(given: dict[str, Any], longest: int | None = None, *, shares_prompts: bool = False) -> Row | None:
    """A batch as one row; `None` where it would be no shorter, or where it cannot be one.

    Args:
        given: of a batch that TRL has padded `input_ids`, `attention_mask`, `labels`, [B, T] each; or of one without
            padding `cu_seq_lens_q` as well, and no mask.
        longest: tokens of the longest sequence that attends to all of itself; `None` for no limit.
        shares_prompts: of a padded batch, where it pays.

    Raises:
        ConfigConflictError: the first token of a packed sequence is scored.
    """
    names = given.keys() - HANDED_ON - _IGNORED
    if names == _PADDED and given["attention_mask"].ndim == 2:
        kept_BT, labels_BT = given["attention_mask"].bool(), given["labels"]
        starts_BT = kept_BT.clone()
        starts_BT[:, 1:] &= ~kept_BT[:, :-1]
        # One sequence a row, and what is scored follows a token.
        holes = (starts_BT.sum(1) > 1).any()
        astray = ((labels_BT[:, 1:] != -100) & ~(kept_BT[:, 1:] & kept_BT[:, :-1])).any()
        scored_BT = kept_BT & (labels_BT != -100)
        is_scored_B = scored_BT.any(1, keepdim=True)
        # A sequence that is not scored (`mask_truncated_completions`) is read by nobody; something has to be computed.
        if shares_prompts:
            kept_BT = kept_BT & (is_scored_B | ~is_scored_B.any())
        # Tokens before the one that the first scored token follows; none where nothing is scored.
        prompts_B = (kept_BT & (scored_BT.cumsum(1) == 0)).sum(1).sub(1).clamp(min=0) * is_scored_B[:, 0]
        found = torch.stack([*kept_BT.sum(1), *prompts_B, holes, astray]).tolist()
        counts, prompts, (has_holes, is_astray) = found[: len(kept_BT)], found[len(kept_BT) : -2], found[-2:]
        if has_holes or is_astray:
            return None
        starts_1N = starts_BT[kept_BT][None]
    elif names == _ONE_ROW:
        kept_BT, counts = torch.ones_like(given["input_ids"], dtype=torch.bool), given["cu_seq_lens_q"].diff().tolist()
        prompts, starts_1N = [0] * len(counts), given["position_ids"] == 0
        if (given["labels"][starts_1N] != -100).any():
            raise ConfigConflictError(
                "scoring a packed row: the labels of the data collator score the first token of a sequence, which "
                "follows no other. Set labels to -100 where position_ids is 0, as TRL's collator does."
            )
    else:
        return None
    prompts = [prompt for prompt, count in zip(prompts, counts, strict=True) if count]
    lengths = [count for count in counts if count]
    if not lengths or (longest is not None and max(lengths) > longest):
        return None
    ids_N = given["input_ids"][kept_BT]
    targets_N = torch.nn.functional.pad(
        given["labels"][kept_BT].masked_fill(starts_1N[0], -100)[1:], (0, 1), value=-100
    )
    if shares_prompts and names == _PADDED:
        row = _with_shared_prompts(ids_N, targets_N, lengths, prompts)
        if row is not None:
            return row
    if names == _PADDED and sum(counts) == kept_BT.numel():
        return None
    return Row(row_inputs(ids_N[None], tuple(lengths)), targets_N[None])


def row_inputs(ids_1N: torch.Tensor, lengths: tuple[int, ...]) -> dict[str, Any]:
    """What a model takes for sequences of these lengths, one behind the other."""
    device = ids_1N.device
    ends = torch.tensor((0, *lengths), device=device).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    return {
        "input_ids": ids_1N,
        "position_ids": positions,
        "sequence_lengths": lengths,
        # FlashAttention's, which transformers knows.
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def _with_shared_prompts(
    ids_N: torch.Tensor, targets_N: torch.Tensor, counts: Sequence[int], prompts: Sequence[int]
) -> Row | None:
    """The row in which equal prompts stand once; `None` where that saves little.

    Args:
        counts, prompts: tokens of each sequence, and how many of them may be shared.
    """
    ends = torch.tensor([0, *counts]).cumsum(0).tolist()
    known_ids = ids_N.cpu().numpy()
    groups: dict[bytes, list[int]] = {}
    for number, (start, prompt) in enumerate(zip(ends[:-1], prompts, strict=True)):
        groups.setdefault(known_ids[start : start + prompt].tobytes(), []).append(number)
    # Of each sequence: where its shared prompt begins in the row, and how long that is.
    prompt_at, shared = [0] * len(counts), [0] * len(counts)
    kept: list[range] = []
    tokens = 0
    for members in groups.values():
        prompt = prompts[members[0]]
        if len(members) > 1 and prompt:
            kept.append(range(ends[members[0]], ends[members[0]] + prompt))
            for number in members:
                prompt_at[number], shared[number] = tokens, prompt
            tokens += prompt
    # Nobody reads what follows a sequence's last token. Of a single token there has to be one.
    lengths = [max(count - 1, 1) for count in counts]
    own_at = []
    for number, length in enumerate(lengths):
        own_at.append(tokens)
        kept.append(range(ends[number] + shared[number], ends[number] + length))
        tokens += length - shared[number]
    if not any(shared) or tokens > _WORTH * len(ids_N):
        return None
    # Attention sees whole sequences, those of one length together.
    order = sorted(range(len(counts)), key=lengths.__getitem__)
    sources: list[int] = []
    places = [0] * tokens
    for number in order:
        own = lengths[number] - shared[number]
        for start, count in ((prompt_at[number], shared[number]), (own_at[number], own)):
            places[start : start + count] = range(len(sources), len(sources) + count)
            sources += range(start, start + count)
    device = ids_N.device
    kept_M = torch.cat([torch.arange(each.start, each.stop) for each in kept]).to(device)
    positions_N = torch.cat([torch.arange(count) for count in counts]).to(device)
    inputs = {
        "input_ids": ids_N[kept_M][None],
        "position_ids": positions_N[kept_M][None],
        "sequence_lengths": tuple(lengths[number] for number in order),
        "sources": torch.tensor(sources, device=device),
        "places": torch.tensor(places, device=device),
    }
    return Row(inputs, targets_N[kept_M][None])


logger = logging.getLogger(__name__)

_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# Of the first check: the largest difference of hidden states, relative to their size. A sequence that sees another one,
# or wrong positions, differs by more than 16 bits round.
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-4}
# Tokens of the sequences of the check, and how many of them are a prompt of both.
_PROBE, _PROMPT = (9, 6), 4


def remove_padding(model: Any) -> str:
    """Have `model(..., fused_lm_head=True)` compute its batches without padding, where that gives the same.

    Args:
        model: the bare transformers model, to which TRL has given its fused head.

    Returns:
        Why batches stay padded; empty where they do not.
    """
    before = model.config._attn_implementation
    is_sdpa = before in ("sdpa", NAME)  # another trainer may have had the model before
    why = _why_not(model, "sdpa" if is_sdpa else before)
    if not why:
        if is_sdpa:
            register()
            model.set_attn_implementation(NAME)
        why = _try(model)
        if why:
            model.set_attn_implementation(before)
    if why:
        logger.info("micro-batches stay padded: %s", why)
        return why
    why_not_shared = _why_prompts_are_not_shared(model) or _try(model, shares_prompts=True)
    of_trl = model.forward
    longest = layer_window(model.config) if is_sdpa else None  # FlashAttention has windows
    counts = {"without_padding": 0, "padded": 0}

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return of_trl(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if value is not None}
        row = None if args else make_row(given, longest, shares_prompts=not why_not_shared)
        if row is None:
            mask = given.get("attention_mask")
            counts["padded" if mask is not None and not mask.all() else "without_padding"] += 1
            return of_trl(*args, fused_lm_head=True, **kwargs)
        counts["without_padding"] += 1
        rest = {name: value for name, value in given.items() if name in HANDED_ON}
        with without_masks():
            found = of_trl(**row.inputs, **rest, shift_labels=row.targets_1M, fused_lm_head=True)
        return _spread(found, given["labels"][:, 1:] != -100)

    model.forward = types.MethodType(forward, model)
    model.qlora_micro_batches, model.qlora_why_not_shared = counts, why_not_shared
    return ""


def micro_batches(model: Any) -> dict[str, int]:
    """How many forwards that scored had no padding, and how many kept theirs (images, long sequences); empty where all
    do."""
    return dict(getattr(model, "qlora_micro_batches", {}))


def apply_padding(model: Any, why_not: str = "") -> dict[str, Any]:
    """`remove_padding`, unless there is a reason already; what came of it, for config.json."""
    why = why_not or remove_padding(model)
    if why:
        return {"removed": False, "reason": why}
    why = model.qlora_why_not_shared
    return {"removed": True, "shares_prompts": not why} | ({"prompts_reason": why} if why else {})


def _why_prompts_are_not_shared(model: Any) -> str:
    """Why a token that stands for several is not the same as several; empty where it is."""
    if model.config._attn_implementation != NAME:
        return f"attn_implementation={model.config._attn_implementation!r} does not find shared tokens"
    # The loss of balance counts tokens, and replayed routing has a choice for each.
    if mixtures_in(model) or hasattr(model.config.get_text_config(), "output_router_logits"):
        return f"{type(model).__name__} is a mixture of experts"
    if has_dropout(model):
        return "with dropout each sequence has a mask of its own"
    return ""


def _spread(found: FusedCausalLMOutput, wanted_BT: torch.Tensor) -> FusedCausalLMOutput:
    """The output for one row as that for the padded batch, [B, T - 1]; zero where nothing was scored."""
    scored_1M = found.label_mask
    for name in _PER_TOKEN:
        values = getattr(found, name)
        if values is not None:
            setattr(found, name, values.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, values[scored_1M]))
    found.label_mask = wanted_BT
    return found


def _why_not(model: Any, implementation: str) -> str:
    if implementation != "sdpa" and not implementation.startswith("flash_attention"):
        return f"attn_implementation={implementation!r} works on padded batches; 'sdpa' does not need to"
    if not model._supports_attention_backend:
        return f"{type(model).__name__} has its attention within itself"
    others = set(layer_kinds(model.config)) | set(getattr(model.config, "layers_block_type", None) or ())
    others -= {"full_attention", "sliding_attention", "attention"}
    if others:
        return f"{type(model).__name__} has layers of another kind than attention over a sequence: {sorted(others)}"
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return "under ZeRO-3 the model cannot be tried before the training begins"
    return ""


@torch.no_grad()
def _try(model: Any, *, shares_prompts: bool = False) -> str:
    """Two short sequences as a row, against each by itself; why they differ, empty where they do not."""
    try:
        mask_BT = (torch.arange(max(_PROBE)) < torch.tensor(_PROBE)[:, None]).long()
        ids_BT = 7 * torch.arange(mask_BT.numel()).view(mask_BT.shape) + 1
        ids_BT[1, :_PROMPT] = ids_BT[0, :_PROMPT]
        ids_BT = ids_BT % model.config.get_text_config().vocab_size
        labels_BT = ids_BT.masked_fill(mask_BT == 0, -100)
        labels_BT[:, : _PROMPT + 1] = -100
        device = model.get_input_embeddings().weight.device
        batch = {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels_BT}
        row = make_row({name: values.to(device) for name, values in batch.items()}, shares_prompts=shares_prompts)

        def states(**inputs: Any) -> torch.Tensor:
            return model.base_model(**inputs, use_cache=False).last_hidden_state[0].float()

        with evaluating(model):
            with without_masks():
                ours = states(**row.inputs)
            alone = [states(input_ids=ids[None, :n].to(device)) for ids, n in zip(ids_BT, _PROBE, strict=True)]
        if shares_prompts:
            ours, alone = ours[row.inputs["sources"]], [each[:-1] for each in reversed(alone)]  # the shorter one first
    except Exception as error:
        return f"{type(model).__name__} cannot be run without: {type(error).__name__}: {error}"
    # Of the sequence that is further off.
    parts = zip(ours.split([len(each) for each in alone]), alone, strict=True)
    difference = max(((mine - own).norm() / own.norm()).item() for mine, own in parts)
    bound = _BOUNDS.get(next(model.parameters()).dtype, _BOUNDS[torch.bfloat16])
    if shares_prompts and bound > 1e-3:
        # Wrong positions are a small fault between neighbours, and rounding was never above a thousandth times 2.5.
        bound /= 8
    if difference < bound:
        return ""
    return (
        f"the hidden states of {type(model).__name__} are others without, by {difference:.1e} of their size, which "
        f"is more than {bound:.1e}"
    )
