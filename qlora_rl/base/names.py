"""`Names`: what checkpoints call the weights of one model, where that is not what transformers calls them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from qlora_rl.base.experts import naming_of, stored_name, stored_parts

# Of published checkpoints, from which vLLM loads. transformers reads both forms, and has dropped the inner name.
_TOWERS = {"gemma3": ("model.vision_tower.", "model.vision_tower.vision_model.")}


class Names:
    """Names in checkpoints, from names in transformers' model.

    Args:
        model: of transformers, bare.
    """

    def __init__(self, model: Any):
        self._mixture = naming_of(model)
        self._tower = _TOWERS.get(getattr(getattr(model, "config", None), "model_type", ""))

    def stored(self, name: str) -> str:
        """Of a weight that checkpoints store as it is."""
        return self._lengthened(stored_name(self._mixture, name))

    def parts(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Of a weight, and of the parts in which checkpoints store it (`stored_parts`); views."""
        for stored, part in stored_parts(self._mixture, name, weight):
            yield self._lengthened(stored), part

    def _lengthened(self, name: str) -> str:
        if self._tower is None or not name.startswith(self._tower[0]) or name.startswith(self._tower[1]):
            return name
        return self._tower[1] + name.removeprefix(self._tower[0])
