"""`remove_padding`: a micro-batch is computed as one row of tokens, its sequences one behind the other.

TRL pads a micro-batch to [B, T]. Padding is computed like any token, and attention then needs a mask of T x T for every sequence. Here
the forward that TRL scores with takes the padding out, [1, N] with positions that start again at each sequence, and puts logprobs and
entropies back where TRL expects them.

Letters: B sequences, T tokens with padding, N without, of all sequences together.
"""

from __future__ import annotations

import functools
import logging
import types
from dataclasses import dataclass
from typing import Any

import torch
from trl.trainer.utils import FusedCausalLMOutput

from qlora_rl.errors import ConfigConflictError
from qlora_rl.ledger.shape import layer_kinds, layer_window
from qlora_rl.train.scoring.attention import NAME, register, without_masks

logger = logging.getLogger(__name__)

# Arguments that mean the same for one row. A batch with others stays as it is.
_HANDED_ON = {"use_cache", "num_items_in_batch", "output_router_logits"}
_PADDED = {"input_ids", "attention_mask", "labels"}
# Of TRL's collator for SFT with `padding_free` or `packing`.
_LENGTHS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_ONE_ROW = {"input_ids", "position_ids", "labels"} | _LENGTHS
# Which sequence a token is of: for layers other than attention, of which no model here has any.
_IGNORED = {"seq_idx"}
_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# Of the first check: the largest difference of hidden states, relative to their size. A sequence that sees another one, or wrong
# positions, differs by more than 16 bits round.
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-4}
_PROBE = (7, 5)


@dataclass(frozen=True)
class Row:
    """A batch as one row.

    Attributes:
        inputs: of the model: ids, positions, lengths.
        labels_1N: -100 where nothing is scored, so at the first token of each sequence.
    """

    inputs: dict[str, Any]
    labels_1N: torch.Tensor


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
        why = _probe(model)
        if why:
            model.set_attn_implementation(before)
    if why:
        logger.info("micro-batches stay padded: %s", why)
        return why
    of_trl = model.forward
    longest = layer_window(model.config) if is_sdpa else None  # FlashAttention has windows
    counts = {"without_padding": 0, "padded": 0}

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return of_trl(*args, **kwargs)
        given = {name: value for name, value in kwargs.items() if value is not None}
        row = None if args else make_row(given, longest)
        if row is None:
            mask = given.get("attention_mask")
            counts["padded" if mask is not None and not mask.all() else "without_padding"] += 1
            return of_trl(*args, fused_lm_head=True, **kwargs)
        counts["without_padding"] += 1
        rest = {name: value for name, value in given.items() if name in _HANDED_ON}
        with without_masks():
            found = of_trl(**row.inputs, **rest, labels=row.labels_1N, fused_lm_head=True)
        return _spread(found, given["labels"][:, 1:] != -100)

    model.forward = types.MethodType(forward, model)
    model.qlora_micro_batches = counts
    return ""


def micro_batches(model: Any) -> dict[str, int]:
    """How many forwards that scored had no padding, and how many kept theirs (images, long sequences); empty where all do."""
    return dict(getattr(model, "qlora_micro_batches", {}))


def settle_padding(model: Any, why_not: str = "") -> dict[str, Any]:
    """`remove_padding`, unless there is a reason already; what came of it, for config.json."""
    why = why_not or remove_padding(model)
    return {"removed": False, "reason": why} if why else {"removed": True}


def make_row(given: dict[str, Any], longest: int | None = None) -> Row | None:
    """A batch as one row; `None` where there is nothing to take out, or where it cannot be one.

    Args:
        given: of a batch that TRL has padded `input_ids`, `attention_mask`, `labels`, [B, T] each; or of one without padding
            `cu_seq_lens_q` as well, and no mask.
        longest: tokens of the longest sequence that attends to all of itself; `None` for no limit.

    Raises:
        ConfigConflictError: the first token of a packed sequence is scored.
    """
    names = given.keys() - _HANDED_ON - _IGNORED
    if names == _PADDED and given["attention_mask"].ndim == 2:
        kept_BT, labels_BT = given["attention_mask"].bool(), given["labels"]
        starts_BT = kept_BT.clone()
        starts_BT[:, 1:] &= ~kept_BT[:, :-1]
        # One sequence a row, and what is scored follows a token.
        holes = (starts_BT.sum(1) > 1).any()
        astray = ((labels_BT[:, 1:] != -100) & ~(kept_BT[:, 1:] & kept_BT[:, :-1])).any()
        *counts, has_holes, is_astray = torch.stack([*kept_BT.sum(1), holes, astray]).tolist()
        if has_holes or is_astray or sum(counts) == kept_BT.numel():
            return None
        starts_1N = starts_BT[kept_BT][None]
    elif names == _ONE_ROW:
        kept_BT, counts = torch.ones_like(given["input_ids"], dtype=torch.bool), given["cu_seq_lens_q"].diff().tolist()
        starts_1N = given["position_ids"] == 0
        if (given["labels"][starts_1N] != -100).any():
            raise ConfigConflictError(
                "scoring a packed row: the labels of the data collator score the first token of a sequence, which follows no other. Set labels "
                "to -100 where position_ids is 0, as TRL's collator does."
            )
    else:
        return None
    lengths = tuple(count for count in counts if count)
    if not lengths or (longest is not None and max(lengths) > longest):
        return None
    labels_1N = given["labels"][kept_BT][None].masked_fill(starts_1N, -100)
    return Row(row_inputs(given["input_ids"][kept_BT][None], lengths), labels_1N)


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


def _spread(found: FusedCausalLMOutput, wanted_BT: torch.Tensor) -> FusedCausalLMOutput:
    """The output for one row as that for the padded batch, [B, T - 1]; zero where nothing was scored."""
    scored_1N = found.label_mask
    for name in _PER_TOKEN:
        values = getattr(found, name)
        if values is not None:
            setattr(found, name, values.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, values[scored_1N]))
    found.label_mask = wanted_BT
    return found


def _why_not(model: Any, implementation: str) -> str:
    if implementation != "sdpa" and not implementation.startswith("flash_attention"):
        return f"attn_implementation={implementation!r} works on padded batches; 'sdpa' does not need to"
    if not model._supports_attention_backend:
        return f"{type(model).__name__} has its attention within itself"
    others = set(layer_kinds(model.config)) - {"full_attention", "sliding_attention"}
    if others:
        return f"{type(model).__name__} has layers of another kind than attention over a sequence: {sorted(others)}"
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        return "under ZeRO-3 the model cannot be tried before the training begins"
    return ""


@torch.no_grad()
def _probe(model: Any) -> str:
    """Two short sequences one behind the other, against each by itself; why they differ, empty where they do not."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        ids_1N = torch.arange(sum(_PROBE), device=model.get_input_embeddings().weight.device)[None]
        ids_1N = (7 * ids_1N + 1) % model.config.get_text_config().vocab_size

        def states(**inputs: Any) -> torch.Tensor:
            return model.base_model(**inputs, use_cache=False).last_hidden_state.float()

        with without_masks():
            ours = states(**row_inputs(ids_1N, _PROBE))
        alone = torch.cat([states(input_ids=ids) for ids in ids_1N.split(_PROBE, dim=1)], dim=1)
    except Exception as error:
        return f"{type(model).__name__} cannot be run without: {type(error).__name__}: {error}"
    finally:
        for module, mode in modes.items():
            module.training = mode
    difference = ((ours - alone).norm() / alone.norm()).item()
    bound = _BOUNDS.get(next(model.parameters()).dtype, _BOUNDS[torch.bfloat16])
    if difference < bound:
        return ""
    return f"the hidden states of {type(model).__name__} are others without, by {difference:.1e} of their size, which is more than {bound:.1e}"
