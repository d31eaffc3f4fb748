"""How far the trainer's probabilities are from those the engine sampled with.

Both sides score the very same tokens. `delta = trainer_logprob - engine_logprob` is 0 everywhere when they hold the
same policy; what remains is rounding.

Shapes: B completions, T tokens (padded).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

POSITION_BINS = 8
# What a single token may add to the scaled difference.
_LARGEST = 0.5
# How TRL corrects for what is left of the distance, with two sides that hold the same weights
# (docs/fidelity.md#the-correction).
CORRECTION: Mapping[str, Any] = {
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}


@dataclass(frozen=True)
class Fidelity:
    """The distance over one batch of sampled tokens.

    Attributes:
        mismatch_kl: mean over tokens of `exp(d) - 1 - d` with d = trainer - engine: the k3 estimator of
            KL(engine || trainer) (Schulman, "Approximating KL divergence", 2020), in nats. Never negative.
        logprob_diff_mean: mean of |d|.
        logprob_diff_max: largest |d|.
        ratio_p01: 1st percentile of the ratio exp(d) over tokens.
        ratio_p50: median ratio.
        ratio_p99: 99th percentile.
        ess: effective sample size of the sequences weighted by exp(sum of d), as a share of their number: 1 when all
            weights are equal.
        masked_share: share of sampled tokens that were left out because a side has no logprob, or NaN.
        scaled_diff: mean of min(|d| / max(1, |engine's logprob|), 0.5). 16-bit logits are rounded in proportion to
            their size, so a rare token may differ by more; and no single token can carry the mean away. The alarm
            watches this one.
        by_position: mean of |d| over each eighth of the T positions, first to last; NaN where nothing was sampled.
        tokens: tokens that were compared.
    """

    mismatch_kl: float
    logprob_diff_mean: float
    logprob_diff_max: float
    ratio_p01: float
    ratio_p50: float
    ratio_p99: float
    ess: float
    masked_share: float
    scaled_diff: float
    by_position: tuple[float, ...]
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, for a log."""
        return asdict(self)


def measure(trainer_logprobs_BT: torch.Tensor, engine_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor) -> Fidelity:
    """Compare both sides' logprobs of the same sampled tokens.

    Args:
        trainer_logprobs_BT: natural logs, any float dtype.
        engine_logprobs_BT: the same for the engine; NaN where it reported none.
        mask_BT: nonzero where a token was sampled by the policy (no padding, no tool output).

    Raises:
        ValueError: shapes differ.
    """
    if not trainer_logprobs_BT.shape == engine_logprobs_BT.shape == mask_BT.shape:
        raise ValueError(
            f"comparing logprobs: trainer={tuple(trainer_logprobs_BT.shape)} != "
            f"engine={tuple(engine_logprobs_BT.shape)} or mask={tuple(mask_BT.shape)}. Pass three [B, T] tensors."
        )
    sampled = mask_BT.bool()
    delta_BT = trainer_logprobs_BT.double() - engine_logprobs_BT.double()
    known = sampled & ~delta_BT.isnan()
    d = delta_BT[known]
    count = int(d.numel())
    if count == 0:
        nan = float("nan")
        masked = 1.0 if bool(sampled.any()) else 0.0
        return Fidelity(nan, nan, nan, nan, nan, nan, nan, masked, nan, (nan,) * POSITION_BINS, tokens=0)
    ratio = d.exp()
    # `torch.quantile` takes no more than 2**24 values.
    at = (count - 1) * torch.tensor([0.01, 0.5, 0.99], dtype=torch.double, device=ratio.device)
    ordered = ratio.sort().values
    quantiles = torch.lerp(ordered[at.floor().long()], ordered[at.ceil().long()], at.frac())
    log_weight_B = torch.where(known, delta_BT, torch.zeros_like(delta_BT)).sum(1)[known.any(1)]
    weight_B = (log_weight_B - log_weight_B.max()).exp()
    ess = weight_B.sum() ** 2 / (weight_B**2).sum() / weight_B.numel()
    return Fidelity(
        mismatch_kl=float((d.expm1() - d).mean()),
        logprob_diff_mean=float(d.abs().mean()),
        logprob_diff_max=float(d.abs().max()),
        ratio_p01=float(quantiles[0]),
        ratio_p50=float(quantiles[1]),
        ratio_p99=float(quantiles[2]),
        ess=float(ess),
        masked_share=1.0 - count / int(sampled.sum()),
        scaled_diff=float(scaled_differences(d, engine_logprobs_BT.double()[known]).mean()),
        by_position=mean_by_position(delta_BT, known),
        tokens=count,
    )


def importance_ratio(
    trainer_logprobs_BT: torch.Tensor,
    engine_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> torch.Tensor:
    """The weight of a sampled token in the loss: trainer's probability over the engine's, kept within bounds, as in TRL
    1.16.

    Args:
        trainer_logprobs_BT: natural logs.
        engine_logprobs_BT: the same for the engine; NaN where it reported none: weighed by 1.
        mask_BT: nonzero where a token was sampled by the policy.
        mode: "token_truncate", "token_mask": of each token; "sequence_truncate", "sequence_mask": of each sequence, the
            product of its tokens'. "truncate" clamps what is out of bounds, "mask" leaves it out.
        clip_min: lower bound, if any.
        clip_max: upper bound, if any.

    Returns:
        [B, T], or [B, 1] of sequences.

    Raises:
        ValueError: unknown mode.
    """
    of, _, how = mode.partition("_")
    if of not in ("token", "sequence") or how not in ("truncate", "mask"):
        raise ValueError(
            f"weighing rollouts: {mode!r} is no mode of importance sampling. Use token_truncate, token_mask, "
            "sequence_truncate or sequence_mask."
        )
    log_ratio = torch.nan_to_num((trainer_logprobs_BT - engine_logprobs_BT) * mask_BT, nan=0.0)
    ratio = (log_ratio if of == "token" else log_ratio.sum(dim=-1, keepdim=True)).exp()
    if clip_min is None and clip_max is None:
        return ratio
    if how == "truncate":
        return ratio.clamp(min=clip_min, max=clip_max)
    low, high = (-math.inf if clip_min is None else clip_min), (math.inf if clip_max is None else clip_max)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def scaled_differences(d: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """min(|d| / max(1, |logprob|), 0.5) of each token: a distance whose mean rare tokens do not decide.

    Args:
        d: differences in nats, one for each token.
        logprobs: of the same tokens.
    """
    return (d.abs() / logprobs.abs().clamp(min=1.0)).clamp(max=_LARGEST)


def mean_by_position(values_BT: torch.Tensor, known_BT: torch.Tensor) -> tuple[float, ...]:
    """Mean of |value| over each eighth of the T positions, first to last; NaN where none is known."""
    length = values_BT.shape[1]
    place_T = torch.arange(length, device=values_BT.device) * POSITION_BINS // length
    found = []
    for place in range(POSITION_BINS):
        here_BT = known_BT & (place_T == place)
        found.append(float(values_BT[here_BT].abs().mean()))  # NaN of none
    return tuple(found)


class FidelityMonitor:
    """Keeps the measurements of a run; `last` is the newest."""

    def __init__(self) -> None:
        self.history: list[Fidelity] = []

    @property
    def last(self) -> Fidelity | None:
        """The newest measurement."""
        return self.history[-1] if self.history else None

    def observe(
        self, trainer_logprobs_BT: torch.Tensor, engine_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> Fidelity:
        """Measure one batch and keep the result; see `measure`."""
        fidelity = measure(trainer_logprobs_BT, engine_logprobs_BT, mask_BT)
        self.history.append(fidelity)
        return fidelity
