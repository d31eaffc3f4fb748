"""`GroupedPrompts`: a mixin for TRL's GRPO and RLOO, which tokenise each prompt once for each of its G completions;
here once for all; and `ImageRows`, what their rows with images need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


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
