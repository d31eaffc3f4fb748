"""Logprobs and entropies of the tokens that are trained on, in tiles that are small on every device.

TRL 1.16 never holds logits of B x T x V: it multiplies the hidden states with the output head in tiles of 4096 tokens x
32768 words (`trl.kernels.ChunkedLogProbFunction`). With Triton a tile is 256 MiB in bf16 and worked on in place.
Without Triton, on the CPU, it is worked on as whole float32 tensors: a tile takes gigabytes, and a batch below 4096
tokens is not cut at all. Prompt and padding are scored there too. So where there is no Triton the same function of TRL
is called on fewer tokens at a time, and only on those that count. Where there is, TRL's own way stays.

Letters: N scored tokens, V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # TRL takes it for all mixtures
from trl.kernels import ChunkedLogProbFunction
from trl.kernels.chunked_logprob import OPTIONAL_OUTPUTS, TOKEN_CHUNK_SIZE
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head, maybe_gather_lm_head_ctx

from qlora_rl.contracts import SamplingSpec
from qlora_rl.memory.lines import HEAD_VOCABULARY, SMALL_TILE
from qlora_rl.sync.truncated_sampling import TruncatedSampling

# A tile of 128 x 32768 float32 is 16 MiB.
TOKENS, WORDS = SMALL_TILE, HEAD_VOCABULARY


def use_small_tiles(
    model: Any,
    temperature: float,
    outputs: Collection[str] = ("entropy",),
    truncated: TruncatedSampling | None = None,
) -> bool:
    """Have `model(..., fused_lm_head=True)` score in small tiles; all other calls stay as they are.

    Args:
        model: the bare transformers model, to which TRL has given its fused head.
        temperature: that logits are divided by.
        outputs: what is computed besides logprobs, by TRL's names (`trl.kernels.chunked_logprob.OPTIONAL_OUTPUTS`).
        truncated: logprobs are of what this keeps; entropies stay those of the whole vocabulary.

    Returns:
        Whether it was done: on a device with Triton, where TRL's tiles do, only for truncated sampling.
    """
    text = model.config.get_text_config()
    has_triton = model.get_output_embeddings().weight.device.type in ("cuda", "xpu")
    if has_triton and truncated is None:
        return False
    tokens = TOKEN_CHUNK_SIZE if has_triton else TOKENS
    of_trl, names = model.forward, tuple(name for name in OPTIONAL_OUTPUTS if name in outputs)
    softcap, scale = getattr(text, "final_logit_softcapping", None), logit_scale_of(text)

    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, shift_labels: Any = None, **kwargs: Any
    ) -> Any:
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels}
            return of_trl(*args, **{name: each for name, each in given.items() if each is not None}, **kwargs)
        count = kwargs.pop("num_items_in_batch", None)
        kwargs["use_cache"] = False
        if getattr(text, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        found = self.base_model(*args, **kwargs)
        hidden_BTH, targets_BT = found.last_hidden_state, shift_labels
        if shift_labels is None:
            hidden_BTH, targets_BT = hidden_BTH[:, :-1], labels[:, 1:]
        wanted_BT = targets_BT != -100
        head = self.get_output_embeddings()
        # The head itself is not called, so ZeRO-3 would not gather it.
        gathers = maybe_gather_lm_head_ctx if hasattr(head.weight, "ds_id") else lambda *_: nullcontext()
        hidden_NH, targets_N = hidden_BTH[wanted_BT], targets_BT[wanted_BT]
        with gathers(head.weight, head.bias):
            scored = (hidden_NH, head.weight, head.bias, targets_N, temperature, softcap, scale)
            logprobs, *others = score(*scored, names, tokens)
        if truncated is not None:
            logprobs = logprobs - truncated.log_kept_by_head(*scored, gathers=gathers)

        def spread(values_N: torch.Tensor) -> torch.Tensor:
            # Stays connected to the model where nothing is scored at all.
            return values_N.new_zeros(wanted_BT.shape).masked_scatter(wanted_BT, values_N)

        loss = -logprobs.sum() / (wanted_BT.sum().clamp(min=1) if count is None else count)
        balance = None
        if kwargs.get("output_router_logits"):
            mask = kwargs.get("attention_mask")
            balance = load_balancing_loss_func(found.router_logits, text.num_experts, text.num_experts_per_tok, mask)
            loss = loss + getattr(text, "router_aux_loss_coef", 0.0) * balance
        spreads = {
            name: spread(values) for name, values in zip(("log_probs", *names), (logprobs, *others), strict=True)
        }
        return FusedCausalLMOutput(loss=loss, label_mask=wanted_BT, aux_loss=balance, **spreads)

    model.forward = types.MethodType(forward, model)
    return True


def truncation_of(trainer: Any, sampling: SamplingSpec) -> TruncatedSampling | None:
    """What a trainer's logprobs follow of its sampling.

    Nothing where TRL computes the head in float32 itself, where a `rollout_func` has sampled in its own way, and where
    a reference model has a head of its own.
    """
    is_cast = getattr(trainer.args, "cast_lm_head_to_fp32", False)
    if is_cast or any(getattr(trainer, name, None) is not None for name in ("rollout_func", "ref_model")):
        return None
    return TruncatedSampling.of(sampling)


def logit_scale_of(text: Any) -> float:
    """By what a model of this config multiplies its logits; the fields as TRL's fused head reads them."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(text, name, None)) is not None:
            return float(factor)
    if (divisor := getattr(text, "logits_scaling", None)) is not None:
        return float(divisor if text.model_type == "hyperclovax" else 1 / divisor)
    return 1.0


def use_fused_head(model: Any, temperature: float = 1.0) -> None:
    """Give a bare model the output head that the trainers give theirs: TRL's, in small tiles where there is no
    Triton."""
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    use_small_tiles(model, temperature)


def score(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperature: float,
    softcap: float | None = None,
    scale: float = 1.0,
    outputs: tuple[str, ...] = ("entropy",),
    tokens: int = TOKENS,
) -> tuple[torch.Tensor, ...]:
    """Logprobs of `targets_N`, float32 [N], and each of `outputs`, with at most `tokens` x WORDS logits at a time.

    Args:
        outputs: in the order of `OPTIONAL_OUTPUTS`; entropies are float32 [N].
    """
    words = min(WORDS, weight_VH.shape[0])
    parts = [
        ChunkedLogProbFunction.apply(hidden, weight_VH, bias_V, targets, temperature, words, softcap, scale, outputs)
        for hidden, targets in zip(hidden_NH.split(tokens), targets_N.split(tokens), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True) if column[0] is not None)
