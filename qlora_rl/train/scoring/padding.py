"""`remove_padding`: a micro-batch is computed as one row of tokens, its sequences one behind the other.

TRL pads a micro-batch to [B, T]. Padding is computed like any token, and attention then needs a mask of T x T for every
sequence. Here the forward that TRL scores with makes one row of the batch (`qlora_rl.train.scoring.row`), with
positions that start again at each sequence, and puts logprobs and entropies back where TRL expects them.

Letters: B sequences, T tokens with padding, M of the row.
"""

from __future__ import annotations

import functools
import logging
import types
from typing import Any

import torch
from trl.trainer.utils import FusedCausalLMOutput

from qlora_rl.base.attention.attend import NAME, register, without_masks
from qlora_rl.base.experts import mixtures_in
from qlora_rl.base.model_classes import has_dropout
from qlora_rl.memory.shape import layer_kinds, layer_window
from qlora_rl.sync.forward import evaluating
from qlora_rl.train.scoring.row import HANDED_ON, make_row

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
