"""`GroupedPrompts`: a mixin for TRL's GRPO and RLOO, which tokenise each prompt once for each of its G completions;
here once for all."""

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
