"""`TruncatedSampling`: logprobs under top_k, top_p and min_p, of the tokens that may be sampled.

vLLM then reports log p - log S, where S is the probability of these tokens. A trainer that scores the whole vocabulary
is log S away, with nothing wrong, and the importance ratio exp(log S) makes every gradient smaller
(huggingface/trl#6789). So a trainer subtracts its own log S, with its gradient; a sampled token that rounding has put
beyond the edge counts as kept.

Letters: N scored tokens, V vocabulary, K likeliest tokens, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.contracts import SamplingSpec

# Fields of a sampling that leave a part of the vocabulary.
TRUNCATING = ("top_k", "top_p", "min_p")
# Tokens that are scored at once, with all logits of each.
_TOKENS = 32
# Of so many of the likeliest a try is made before the whole vocabulary is sorted.
_LIKELY = 1024
# So many may be as likely as the last of top_k.
_TIES = 64


@dataclass(frozen=True)
class TruncatedSampling:
    """Which tokens may be sampled, with vLLM's meaning of each field.

    Attributes:
        top_k: so many of the likeliest; 0 or less for all.
        top_p: of those the likeliest that together have this probability.
        min_p: before both, those with at least this share of the likeliest token's probability.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, sampling: SamplingSpec) -> TruncatedSampling | None:
        """What a rollout is truncated by; `None` where all tokens may be sampled."""
        found = cls(max(sampling.top_k, 0), sampling.top_p, sampling.min_p)
        return None if found == cls() or sampling.temperature == 0 else found

    def log_kept(self, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """Log of the probability of what may be sampled, and of the token that was: float32 [N].

        Args:
            logits_NV: float32, divided by the temperature.
            targets_N: the sampled tokens.
        """
        pairs = zip(logits_NV.split(_TOKENS), targets_N.split(_TOKENS), strict=True)
        return torch.cat([self._log_kept(logits, targets) for logits, targets in pairs])

    def _log_kept(self, logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        target_N = logits_NV.gather(1, targets_N[:, None])[:, 0]
        values_NK = self._kept(logits_NV)
        least_N = values_NK.masked_fill(values_NK == -math.inf, math.inf).amin(-1)
        beyond_N = target_N.masked_fill(target_N >= least_N, -math.inf)  # among ties any one stands for another
        return torch.logaddexp(values_NK.logsumexp(-1), beyond_N) - logits_NV.logsumexp(-1)

    def _kept(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The logits of what may be sampled, in any order, with -inf for others."""
        if self.min_p > 0:
            floor_N1 = logits_NV.amax(-1, keepdim=True) + math.log(self.min_p)
            logits_NV = logits_NV.masked_fill(logits_NV < floor_N1, -math.inf)
        if not self.top_k and self.top_p == 1:
            return logits_NV
        words = logits_NV.shape[1]
        values_NK = logits_NV.topk(min((self.top_k or _LIKELY) + _TIES, words)).values
        if 0 < self.top_k < values_NK.shape[1]:
            if logits_NV.device.type == "cpu":  # vLLM keeps what is as likely as the last one; on a GPU it counts
                values_NK = values_NK.masked_fill(values_NK < values_NK[:, self.top_k - 1, None], -math.inf)
            else:
                values_NK = values_NK[:, : self.top_k]
        if self.top_p == 1:
            return values_NK
        whole_N1 = (values_NK if self.top_k else logits_NV).logsumexp(-1, keepdim=True).detach()
        probs_NK = (values_NK.detach() - whole_N1).exp()
        if not self.top_k and values_NK.shape[1] < words and bool((probs_NK.sum(-1) < self.top_p).any()):
            values_NK = logits_NV.sort(-1, descending=True).values
            probs_NK = (values_NK.detach() - whole_N1).exp()
        before_NK = probs_NK.cumsum(-1) - probs_NK  # the first one always stays
        return values_NK.masked_fill(before_NK >= self.top_p, -math.inf)

    def log_kept_by_head(
        self,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature: float,
        softcap: float | None = None,
        scale: float = 1.0,
        gathers: Callable[..., AbstractContextManager[Any]] = lambda *_: nullcontext(),
    ) -> torch.Tensor:
        """`log_kept` of what the output head makes of hidden states; logits of few tokens at a time, again in the
        backward pass.

        Args:
            gathers: makes a sharded head whole while it multiplies; is given weight and bias.
        """

        def tile(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            own = hidden if torch.is_autocast_enabled(hidden.device.type) else hidden.to(weight_VH.dtype)
            logits = torch.nn.functional.linear(own, weight_VH, bias_V).float()
            return self._log_kept(as_sampled(logits, temperature, softcap, scale), targets)

        parts = zip(hidden_NH.split(_TOKENS), targets_N.split(_TOKENS), strict=True)
        return torch.cat(
            [_Recomputed.apply(hidden, weight_VH, bias_V, targets, tile, gathers) for hidden, targets in parts]
        )


def as_sampled(
    products: torch.Tensor, temperature: float, softcap: float | None = None, scale: float = 1.0
) -> torch.Tensor:
    """The logits that are sampled from, of the output head's products: scaled, capped, divided by the temperature."""
    logits = scale * products
    return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature


class _Recomputed(torch.autograd.Function):
    """A function of hidden states that holds nothing for the backward pass, in which its head is gathered again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: Any, bias: Any, targets: torch.Tensor, tile: Any, gathers: Any
    ) -> torch.Tensor:
        device = hidden.device.type
        ctx.autocast = dict(
            device_type=device, dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device)
        )
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.tile, ctx.gathers = tile, gathers
        with gathers(weight, bias):
            return tile(hidden, targets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, bias, targets = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_()
        wanted = [each for each in (hidden, weight, bias) if each is not None and each.requires_grad]
        with torch.enable_grad(), ctx.gathers(weight, bias), torch.autocast(**ctx.autocast):
            found = iter(torch.autograd.grad(ctx.tile(hidden, targets), wanted, gradient))
        asked = (each is not None and each.requires_grad for each in (hidden, weight, bias))
        return *(next(found) if is_asked else None for is_asked in asked), None, None, None
