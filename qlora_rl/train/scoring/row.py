"""`make_row`: the sequences of a micro-batch one behind the other, a prompt that several of them begin with only once.

GRPO samples G completions of a prompt, and DPO compares two. What comes before the token that the first scored one
follows is then the same for all of them, and so is what every layer computes there. With `shares_prompts` those tokens
are in the row once, before all sequences, and attention finds them by `sources` (`qlora_rl.base.attention.attend`). A
sequence's last token, after which nothing is scored, is then left out, and so are sequences of which nothing is scored.

Letters: B sequences, T tokens with padding, N without, of all sequences together; M tokens of the row, N or fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.errors import ConfigConflictError

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
