"""`Witness`: what the trained policy says about some tokens, kept, and how far an export is from it.

Shape letters: N tokens, V vocabulary.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from qlora_rl.adapter.inspected import bare_model
from qlora_rl.config.schema import Data
from qlora_rl.data.load import read_file
from qlora_rl.engine.images import token_ids
from qlora_rl.errors import ConfigConflictError
from qlora_rl.image_io import without_images
from qlora_rl.inference.prompts import encode
from qlora_rl.inference.rows import as_trained
from qlora_rl.inference.sampling import end_tokens, precision
from qlora_rl.stages import begin, count
from qlora_rl.sync.forward import NotComparedError, completion_logits, in_float32
from qlora_rl.train.run import ROLLOUTS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Distance:
    """How far an export is from the policy, over N tokens that the policy itself sampled.

    Attributes:
        kl_mean: KL(policy || export) of a token, over the whole vocabulary, in nats.
        kl_max: of the worst token.
        agreement: share of tokens where both find the same one likeliest.
        tokens: N.
    """

    kl_mean: float
    kl_max: float
    agreement: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"KL to the trained policy {self.kl_mean:.1e} nats per token (worst token {self.kl_max:.1e}), the same "
            f"likeliest token in {self.agreement:.1%} of {self.tokens} tokens"
        )


class Witness:
    """The policy's distributions over its own completions of some prompts; the policy may be freed afterwards.

    Args:
        policy: a model.
        prompts: token ids.
        tokens: to sample for each prompt, at most.
        autocast: torch name of the dtype under which the policy is asked; `None`: as it is.
        seed: of the sampling.
        ends: tokens that end a completion, besides those of the policy's generation config.

    Attributes:
        rounding: mean KL of the policy to its own float32 forward pass, in nats per token: what 16 bits cost this
            model. 0 where that was not measured.
    """

    def __init__(
        self,
        policy: Any,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int = 24,
        autocast: str | None = None,
        seed: int = 0,
        ends: Iterable[int] = (),
    ):
        self._cases = _sampled(policy, prompts, tokens, autocast, seed, {*ends})
        with precision(policy, autocast):
            self._logprobs_NV = list(_logprobs(policy, self._cases))
        self.rounding = 0.0
        if policy.dtype == torch.float32 and autocast is None:
            return
        begin("scoring it in float32")
        try:
            with in_float32(policy, self.longest):
                self.rounding = self._distance_of(_logprobs(policy, self._cases)).kl_mean
        except NotComparedError as why:
            logger.warning(
                "the rounding of the policy is not measured, and its limit is that of a small model: %s", why
            )

    @property
    def tokens(self) -> int:
        """N."""
        return sum(len(logprobs_NV) for logprobs_NV in self._logprobs_NV)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(ids) for ids, _ in self._cases)

    def distance(self, model: Any, *, autocast: str | None = None) -> Distance:
        """How far a model is from the policy."""
        with precision(model, autocast):
            return self._distance_of(_logprobs(model, self._cases))

    def distance_of(self, logprobs: Callable[[list[int], int], torch.Tensor]) -> Distance:
        """How far something is that gives [N, V] natural logs of every token of some ids from a place on."""
        return self._distance_of(logprobs(ids, start) for ids, start in self._cases)

    def _distance_of(self, logprobs: Iterable[torch.Tensor]) -> Distance:
        found, agreed = [], 0
        for theirs_NV, ours_NV in zip(self._logprobs_NV, logprobs, strict=True):
            ours_NV = ours_NV[:, : theirs_NV.shape[1]]  # a file's vocabulary may be padded
            found.append((theirs_NV.exp() * (theirs_NV - ours_NV)).sum(-1))
            agreed += int((theirs_NV.argmax(-1) == ours_NV.argmax(-1)).sum())
        kl_N = torch.cat(found)
        return Distance(float(kl_N.mean()), float(kl_N.max()), agreed / len(kl_N), len(kl_N))


def choose_prompts(
    run: Path,
    tokenizer: Any,
    vocabulary: int,
    *,
    data: Path | None = None,
    rows: Data | None = None,
    count: int = 16,
    longest: int = 256,
    **template_kwargs: Any,
) -> tuple[list[list[int]], str]:
    """Prompts to verify an export with, as token ids, and where they are from.

    Args:
        run: its rollouts.json has two prompts of the training.
        tokenizer: of the base.
        vocabulary: size of it, for prompts of random tokens where there are no others.
        data: file that [data] reads, with a column "prompt" (text or messages), or with the columns of the run; it
            goes first.
        rows: [data] of the run's file, which makes prompts of its columns.
        count: how many.
        longest: tokens of a prompt; what is longer is cut at its beginning.
        template_kwargs: of the chat template.
    """
    found, where = [], ""
    if data is not None:
        held = [*read_file(data, "choosing prompts")]
        found, where = _prompts_of(as_trained(held, rows)), data.name
        if not found:
            named = "" if rows is None else ", nor those out of which the run made its prompts"
            raise ConfigConflictError(
                f'choosing prompts: {data} has no column "prompt"{named}; there are {", ".join(held[0])}. Rename one.'
            )
    elif (run / ROLLOUTS).is_file():
        # Two prompts, sampled many times: each sample has its own seed.
        kept = json.loads((run / ROLLOUTS).read_text())
        found = (_prompts_of([kept[when] for when in ("first", "last") if when in kept]) * count)[:count]
        where = "rollouts of the run"
    if found:
        step = max(1, len(found) // count)
        ids = [token_ids(encode(tokenizer, prompt, **template_kwargs))[-longest:] for prompt in found[::step][:count]]
        ids = [each for each in ids if each]
        if not ids:
            raise ConfigConflictError(f"choosing prompts: those of {where} are all empty. Pass others: --data F.jsonl.")
        return ids, where
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (count, 8), generator=generator).tolist(), "random tokens"


def _prompts_of(rows: Any) -> list[Any]:
    """Without the images, of which a run keeps small copies: what is compared is the language model."""
    found = (row["prompt"] for row in rows if isinstance(row, dict) and isinstance(row.get("prompt"), str | list))
    return [without_images(prompt) for prompt in found]


@torch.no_grad()
def _sampled(
    policy: Any, prompts: Sequence[Sequence[int]], tokens: int, autocast: str | None, seed: int, more: set[int]
) -> list[tuple[list[int], int]]:
    """Each prompt with what the policy says after it, and the length of the prompt; all are sampled at once."""
    device, longest = next(policy.parameters()).device, max(map(len, prompts))
    ids_BT = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask_BT = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    room = policy.config.get_text_config().max_position_embeddings - longest
    base, ends, cases = bare_model(policy), end_tokens(policy.generation_config) | more, []
    # What a checkpoint says of sampling (a penalty, beams, a filter) would be sampled with, too.
    own, base.generation_config = base.generation_config, GenerationConfig(eos_token_id=[*ends - {None}] or None)
    try:
        with torch.random.fork_rng(), precision(policy, autocast):
            torch.manual_seed(seed)
            said = policy.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=min(tokens, room),
                pad_token_id=0,
                do_sample=True,
                top_k=0,
            )
    finally:
        base.generation_config = own
    for prompt, row in zip(prompts, said[:, longest:].tolist(), strict=True):
        length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        cases.append(([*prompt, *row[:length]], len(prompt)))
    return cases


@torch.no_grad()
def _logprobs(model: Any, cases: Sequence[tuple[list[int], int]]) -> Iterator[torch.Tensor]:
    """[N, V] natural logs, float64, for each of some ids: of every token from its place on."""
    prompts, completions = [ids[:start] for ids, start in cases], [ids[start:] for ids, start in cases]
    for number, logits_NV in enumerate(completion_logits(model, prompts, completions), start=1):
        count("prompt", number, len(cases))
        yield logits_NV.double().log_softmax(-1).cpu()
