"""Divergence of a student from its teacher, of each token, in tiles: logits of all tokens are never held.

`from_hidden` is TRL's own function, on the tokens that count and, without Triton, on few at a time, as `logprobs.py`
has it.

`from_candidates`: a server says the K likeliest tokens and the one that was sampled. The probability of all others is
one further outcome, "the rest", on both sides. What is compared are then two whole distributions over the same
outcomes: the divergence is never negative, 0 for equal models, at most that over the whole vocabulary, and reaches it
as K grows; and any `beta` has its meaning. TRL 1.16's server distillation has the same rest, but for `beta` > 0 takes
one likeliest token (for reverse KL the sampled one alone), whose divergence stays far below.

Letters: N scored tokens, K + 1 candidates, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch.utils.checkpoint import checkpoint
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from qlora_rl.sync.truncated_sampling import as_sampled
from qlora_rl.train.scoring.logprobs import WORDS, score

# The rest is never less: sums of float32 probabilities are no more exact.
_LEAST = 1e-6


def from_hidden(
    student: tuple[torch.Tensor, torch.nn.Linear, float | None, float],
    teacher: tuple[torch.Tensor, torch.nn.Linear, float | None, float],
    beta: float,
    temperature: float,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence over the whole vocabulary (its gradient flows to the student), and the student's entropy, without:
    float32 [N].

    Args:
        student: hidden states [N, H], output head, softcap and scale of its logits.
        teacher: likewise; H may be another one.
        beta: 0 for forward KL, 1 for reverse KL, between them the generalised Jensen-Shannon divergence, as TRL has it.
        tokens: of one tile of logits; so large is what is held at most.
    """
    (ours_NH, own, own_cap, own_scale), (theirs_NH, its, its_cap, its_scale) = student, teacher
    heads = (own.weight, own.bias), (its.weight, its.bias)
    settings = (beta, temperature, own_scale, own_cap, its_scale, its_cap)
    parts = [
        ChunkedDivergenceFunction.apply(one, *heads[0], other, *heads[1], *settings)
        for one, other in zip(ours_NH.split(tokens), theirs_NH.split(tokens), strict=True)
    ]
    found_N, entropy_N = (torch.cat(column) for column in zip(*parts, strict=True))
    return found_N, entropy_N.detach()


def from_candidates(
    student: tuple[torch.Tensor, torch.nn.Linear, float | None, float],
    ids_NK: torch.Tensor,
    teacher_NK: torch.Tensor,
    beta: float,
    temperature: float,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence over the candidates and the rest, and the student's entropy, as `from_hidden` returns them.

    Args:
        student: as `from_hidden` takes it; its head is not trained.
        ids_NK: candidates, of which the first is the token that was sampled.
        teacher_NK: their logprobs by the teacher, float32; -inf where there is no such candidate. One that the teacher
            rules out belongs to the rest on both sides, be it the sampled one.
        beta, tokens: as `from_hidden` has them.
    """
    hidden_NH, head, softcap, scale = student
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device):
        hidden_NH = hidden_NH.to(torch.get_autocast_dtype(device))
    # Products of what is rounded, summed in float32: a logit in 16 bits would make the rest of a sure token noise.
    with torch.autocast(device, enabled=False):
        hidden_NH = hidden_NH.float()
        scored = (head.weight, head.bias, ids_NK[:, 0], temperature, softcap, scale, ("entropy",), tokens)
        sampled_N, entropy_N = score(hidden_NH, *scored)
        at_once = max(1, tokens * WORDS // (ids_NK.shape[1] * hidden_NH.shape[1]))
        parts = [
            checkpoint(_of_tile, *tile, head, beta, temperature, softcap, scale, use_reentrant=False)
            for tile in zip(*(each.split(at_once) for each in (hidden_NH, sampled_N, ids_NK, teacher_NK)), strict=True)
        ]
    return torch.cat(parts) if parts else sampled_N, entropy_N.detach()


def _of_tile(
    hidden_NH: torch.Tensor,
    sampled_N: torch.Tensor,
    ids_NK: torch.Tensor,
    teacher_NK: torch.Tensor,
    head: torch.nn.Linear,
    beta: float,
    temperature: float,
    softcap: float | None,
    scale: float,
) -> torch.Tensor:
    logits_NK = torch.bmm(head.weight[ids_NK].float(), hidden_NH[:, :, None])[:, :, 0]
    if head.bias is not None:
        logits_NK = logits_NK + head.bias[ids_NK].float()
    logits_NK = as_sampled(logits_NK, temperature, softcap, scale)
    student_NK = logits_NK - logits_NK[:, :1] + sampled_N[:, None]
    exists_NK = teacher_NK > -math.inf
    ours_NK, theirs_NK = (_with_rest(each, exists_NK) for each in (student_NK, teacher_NK))
    return _of_outcomes(ours_NK, theirs_NK, beta)


def _with_rest(logprobs_NK: torch.Tensor, exists_NK: torch.Tensor) -> torch.Tensor:
    """Logprobs of the candidates and, last, of all other tokens; a candidate that is none is never chosen."""
    held_NK = logprobs_NK.masked_fill(~exists_NK, -math.inf)
    rest_N = (1 - held_NK.exp().sum(-1)).clamp(min=_LEAST).log()
    return torch.cat([held_NK, rest_N[:, None]], dim=-1)


def _of_outcomes(student_NK: torch.Tensor, teacher_NK: torch.Tensor, beta: float) -> torch.Tensor:
    """Divergence of two distributions given by logprobs, [N]; an outcome that is -inf on both sides does not count."""
    exists_NK = teacher_NK > -math.inf
    student_NK, teacher_NK = (each.masked_fill(~exists_NK, 0.0) for each in (student_NK, teacher_NK))
    p_NK, q_NK = (each.exp() * exists_NK for each in (student_NK, teacher_NK))
    if beta == 0:
        terms_NK = q_NK * (teacher_NK - student_NK)
    elif beta == 1:
        terms_NK = p_NK * (student_NK - teacher_NK)
    else:
        mean_NK = torch.logaddexp(student_NK + math.log(1 - beta), teacher_NK + math.log(beta))
        terms_NK = beta * q_NK * (teacher_NK - mean_NK) + (1 - beta) * p_NK * (student_NK - mean_NK)
    return terms_NK.sum(-1)
