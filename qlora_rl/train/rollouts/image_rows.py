"""`ImageRows`: a mixin for TRL's GRPO and RLOO, where rows with images and rows without share a batch.

TRL 1.16 hands the processor `None` for a row without images, which it does not take; and of a batch in whose `image`
column nothing stands it makes images all the same. Both get an empty list here.
"""

from __future__ import annotations

from typing import Any


class ImageRows:
    """Comes right before TRL's trainer."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if "image" in inputs[0] and "images" not in inputs[0]:
            inputs = [{**row, "images": [] if row.get("image") is None else [row["image"]]} for row in inputs]
        elif "images" in inputs[0]:
            inputs = [{**row, "images": row.get("images") or []} for row in inputs]
        return super()._generate_and_score_completions(inputs)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        ids, images, fields = super()._tokenize_prompts(prompts)
        return ids, None if images is None else [held or [] for held in images], fields
