"""`TaughtSteps`: a mixin for distillation that records, per optimizer step, how far student and teacher are apart: the
mean over the tokens, by place, and, for people, the tokens at which they disagree most.

Letters: B completions, T tokens (padded), K shown tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from qlora_rl.documents import read_object
from qlora_rl.errors import RunDirectoryError
from qlora_rl.fidelity import mean_by_position
from qlora_rl.sync.truncated_sampling import as_sampled
from qlora_rl.train.run import TEACHING, StepRecord

logger = logging.getLogger(__name__)

_SHOWN = 8  # tokens of a step
_LIKELIEST = 3  # of either side there
_BEFORE = 40  # tokens that are shown before


class _Token(NamedTuple):
    """A token at which the two are far apart: ids, and the likeliest ids of either side with their probabilities."""

    divergence: float
    place: int
    before: list[int]
    token: int
    sides: dict[str, list[tuple[int, float]]]


class TaughtSteps:
    """Comes before `MeasuredSteps` and TRL's DistillationTrainer."""

    _record: StepRecord
    _taught: Sequence[tuple[torch.Tensor, torch.Tensor, list[_Token]]] = ()
    _first_taught: dict[str, Any] | None = None

    @torch.no_grad()
    def _note_teaching(
        self, inputs: dict[str, Any], divergence_N: torch.Tensor, sides: dict[str, tuple[torch.Tensor, Any]]
    ) -> None:
        """Keep what is known of a part of the batch.

        Args:
            inputs: TRL's, of the part; N are the tokens of its completions.
            divergence_N: in nats.
            sides: of student and teacher the hidden states [N, H], with the output head, softcap and scale of its
                logits; or, of a server, ids and logprobs of candidates [N, C].
        """
        mask_BT = inputs["completion_mask"].bool()
        divergence_N = divergence_N.detach().float()
        divergence_BT = divergence_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, divergence_N)
        top_K = divergence_N.topk(min(_SHOWN, len(divergence_N))).indices
        said = {name: _likeliest(held[top_K], what, top_K, self.temperature) for name, (held, what) in sides.items()}
        tokens = []
        for number, (row, at) in enumerate(mask_BT.nonzero()[top_K].tolist()):
            prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
            *before, token = [*prompt, *inputs["completion_ids"][row, : at + 1].tolist()]
            value = divergence_BT[row, at].item()
            sides_here = {name: side[number] for name, side in said.items()}
            tokens.append(_Token(value, at, before[-_BEFORE:], token, sides_here))
        self._taught = [*self._taught, (divergence_BT, mask_BT, tokens)]

    def _look_at(self, mode: str, batch: dict[str, Any], logprobs_BT: torch.Tensor) -> None:
        """Of a whole batch, when its last part was computed."""
        super()._look_at(mode, batch, logprobs_BT)
        parts, self._taught = self._taught, ()
        if not parts:
            return
        divergences, masks, tokens = zip(*parts, strict=True)
        divergence_BT, mask_BT = torch.cat(divergences).double(), torch.cat(masks)
        by_position = mean_by_position(divergence_BT, mask_BT)
        mean = float(divergence_BT[mask_BT].mean())
        self._note(mode, {"teacher_divergence": mean, "teacher_divergence_by_position": by_position})
        if mode == "train" and self._record.run is not None:
            furthest = sorted((each for part in tokens for each in part), key=lambda each: -each.divergence)
            self._write_tokens(furthest[:_SHOWN])

    def _write_tokens(self, tokens: list[_Token]) -> None:
        decode, run = self._tokenizer.decode, self._record.run
        last = {
            "step": self.state.global_step + 1,
            "tokens": [
                {
                    "divergence": each.divergence,
                    "place": each.place,
                    "before": decode(each.before),
                    "token": decode([each.token]),
                    **{n: [[decode([token]), chance] for token, chance in side] for n, side in each.sides.items()},
                }
                for each in tokens
            ],
        }
        held = run.path / TEACHING
        if self._first_taught is None and held.exists():  # of a run that goes on
            try:
                first = read_object(held)["first"]
                self._first_taught = first if first["step"] < last["step"] else None
            except (OSError, ValueError, LookupError, TypeError) as error:
                logger.warning("%s is damaged (%s) and is begun again", held, error)
        self._first_taught = self._first_taught or last
        try:
            run.write_json(TEACHING, {"first": self._first_taught, "last": last})
        except RunDirectoryError as error:  # the record of the steps ends a run on a full disk, this does not
            logger.warning("%s", error)


def _likeliest(
    held_KX: torch.Tensor, what: Any, places_K: torch.Tensor, temperature: float
) -> list[list[tuple[int, float]]]:
    """Of each place the likeliest tokens with their probabilities; arguments as `_note_teaching` has them."""
    if isinstance(what, torch.Tensor):  # a server's candidates, which it has at temperature 1
        chances, order = what[places_K].exp().topk(min(_LIKELIEST, what.shape[1]))
        ids = held_KX.gather(1, order)
    else:
        head, softcap, scale = what
        products_KV = torch.nn.functional.linear(held_KX.to(head.weight.dtype), head.weight, head.bias).float()
        logits_KV = as_sampled(products_KV, temperature, softcap, scale)
        chances, ids = logits_KV.softmax(-1).topk(min(_LIKELIEST, logits_KV.shape[1]))
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), chances.tolist(), strict=True)]
