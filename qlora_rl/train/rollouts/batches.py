"""Mixins for TRL's GRPO and RLOO that make a batch what it should be.

`EndedCompletions`: which completions were cut off; the engine knows (`Endings`), TRL 1.16 looks for an EOS at the end.
One that a stop token or a stop text ends has none: TRL would count it among those that reached the limit, and with
`mask_truncated_completions` train on nothing. `GroupedPrompts`: TRL tokenises each prompt once for each of its
completions, here once for all. `ImageRows`: what rows with images need.

B completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer, RLOOTrainer

from qlora_rl.contracts import Rollout

_CLIPPED = "completions/clipped_ratio"


class Endings:
    """Of the turns of one rollout: has the engine ended each sequence, by its token ids, prompt included?"""

    def __init__(self) -> None:
        self._has_ended: dict[tuple[int, ...], bool] = {}

    def note(self, prompts: Sequence[Sequence[int]], rollout: Rollout) -> None:
        """Of a turn."""
        if rollout.has_ended is not None:
            for prompt, ids, has_ended in zip(prompts, rollout.completion_ids, rollout.has_ended, strict=True):
                self._has_ended[*prompt, *ids] = has_ended

    def of(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> bool | None:
        """`None` where it is not known: a tool has written last, or TRL has cut it."""
        return self._has_ended.get((*prompt_ids, *completion_ids))


class EndedCompletions:
    """A mixin for TRL's GRPO and RLOO trainers, directly before them or what changes their rows; their
    `vllm_generation` has `endings`.

    TRL's metrics are corrected behind it, and its mask is made here in its place: it has no seam where it looks at the
    last token.
    """

    _are_cut: Sequence[bool] = ()
    _masks = False  # TRL makes a batch without its mask

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)
        prompts, completions, third = generated[:3]
        told = [self.vllm_generation.endings.of(*row) for row in zip(prompts, completions, strict=True)]
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        by_token = [ids[-1] not in ends for ids in completions]
        self._are_cut = [cut if ended is None else not ended for ended, cut in zip(told, by_token, strict=True)]
        masks = third if isinstance(self, GRPOTrainer) else None  # nonzero where the policy sampled
        self._correct([len(ids) for ids in completions] if masks is None else [sum(mask) for mask in masks])
        return generated

    def _correct(self, lengths: list[int]) -> None:
        """TRL's metrics of which completions have ended, as it gathers them."""
        gather, device = self.accelerator.gather, self.accelerator.device
        are_cut_B = gather(torch.tensor(self._are_cut, device=device))
        ended = gather(torch.tensor(lengths, device=device))[~are_cut_B].float()
        if not len(ended):
            ended = torch.zeros(1)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics[_CLIPPED][-1] = are_cut_B.float().mean().item()
        for name in ("mean", "min", "max"):
            metrics[f"completions/{name}_terminated_length"][-1] = getattr(ended, name)().item()

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if not self.mask_truncated_completions:
            return super()._generate_and_score_completions(inputs)
        self.mask_truncated_completions, self._masks = False, True
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self.mask_truncated_completions, self._masks = True, False
        for name in ("completion_mask", "tool_mask"):
            if output.get(name) is not None:
                output[name] = self._without_cut(output[name])
        if "num_items_in_batch" in output:
            mask_BT = output["completion_mask"] * output.get("tool_mask", 1)
            output["num_items_in_batch"] = self.accelerator.gather(mask_BT.sum()).sum()
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        # RLOO sums up here, for its ratios and its KL, what its loss masks.
        if self._masks and isinstance(self, RLOOTrainer):
            return (self._without_cut(found[0]), *found[1:])
        return found

    def _without_cut(self, values_BT: torch.Tensor) -> torch.Tensor:
        return values_BT.masked_fill(torch.tensor(self._are_cut, device=values_BT.device)[:, None], 0)


class GroupedPrompts:
    """Comes before `ImageRows`. Prompts with images, and those of environments, each with tools of its own, are left to
    TRL."""

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        is_plain = (
            isinstance(self.processing_class, PreTrainedTokenizerBase)
            and getattr(self, "environment_factories", None) is None
            and all(map(_is_text, prompts))
        )
        if not is_plain:
            return super()._tokenize_prompts(prompts)
        firsts, places = groups_of(prompts)
        ids, _, fields = super()._tokenize_prompts([prompts[i] for i in firsts])
        return [list(ids[i]) for i in places], None, {name: [rows[i] for i in places] for name, rows in fields.items()}


def groups_of(prompts: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Where each run of equal neighbours begins, and for each prompt the number of its run."""
    firsts: list[int] = []
    places: list[int] = []
    for i, prompt in enumerate(prompts):
        if not firsts or prompt != prompts[firsts[-1]]:
            firsts.append(i)
        places.append(len(firsts) - 1)
    return firsts, places


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or all(isinstance(message.get("content"), str) for message in prompt)


class ImageRows:
    """Rows with images and rows without share a batch. Comes right before TRL's trainer.

    TRL 1.16 hands the processor `None` for a row without images, which it does not take; and of a batch in whose
    `image` column nothing stands it makes images all the same. Both get an empty list here.
    """

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if "image" in inputs[0] and "images" not in inputs[0]:
            inputs = [{**row, "images": [] if row.get("image") is None else [row["image"]]} for row in inputs]
        elif "images" in inputs[0]:
            inputs = [{**row, "images": row.get("images") or []} for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        ids, images, fields = super()._tokenize_prompts(prompts)
        return ids, None if images is None else [held or [] for held in images], fields
