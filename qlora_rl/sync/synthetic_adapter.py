"""`Probe`: a large synthetic adapter, pushed briefly like the policy's; its effect shows that the engine applies
adapters.

A policy's adapter does next to nothing in its first steps: one step at a learning rate of 1e-5 changes logprobs by less
than 16-bit rounding does, and an engine that leaves it out looks like one that applies it. The probe goes into the same
places, through the same transport and the same layers, and changes logprobs by several times the canary's threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from qlora_rl.contracts import IS_PROBE, AdapterBundle, lora_name, module_of


class Probe:
    """An `AdapterSource` with the modules and ranks of another one, whose values follow from a seed and a size.

    Args:
        like: the live adapter.
        size: standard deviation of the entries of B; those of A have 1 / sqrt(I).
    """

    def __init__(self, like: Any, size: float):
        self.shape = like.shape
        self._like, self._size = like.bundle(), size
        self._bundle: AdapterBundle | None = None

    def bundle(self) -> AdapterBundle:
        """In canonical form (CPU tensors), rounded to the engine's dtype; zero where a module's own rank leaves
        room."""
        if self._bundle is None:
            generator = torch.Generator().manual_seed(0)
            ranks = dict(self.shape)
            tensors: dict[str, torch.Tensor] = {}
            for name, like in self._like.tensors.items():
                values = torch.randn(like.shape, generator=generator)
                rank = ranks[module_of(name)]
                if ".lora_A." in name:
                    values *= like.shape[1] ** -0.5
                    values[rank:] = 0
                else:
                    values *= self._size
                    values[:, rank:] = 0
                tensors[name] = values.to(like.dtype)
            self._bundle = AdapterBundle(tensors, {**self._like.config, IS_PROBE: True})
        return self._bundle

    def write_into(self, places: Mapping[str, torch.Tensor]) -> int:
        """Copy it over `places`; returns bytes."""
        bundle = self.bundle()
        for name, tensor in bundle.tensors.items():
            places[name].copy_(tensor)
        return bundle.nbytes


@contextmanager
def added_to(base: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Have the linears of a transformers model add an adapter to their outputs; their weights are not touched.

    Args:
        base: the model inside PEFT's, whose own adapter must be switched off meanwhile.
        tensors: of the adapter, in canonical form.
    """
    hooks, seen = [], set()
    try:
        for name in AdapterBundle(tensors, {}).modules:
            a_RI, b_OR = (tensors[lora_name(name, part)] for part in "AB")
            module = base.get_submodule(name)
            if id(module) not in seen:  # it may have several names
                hooks.append(module.register_forward_hook(_adds(a_RI, b_OR)))
                seen.add(id(module))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _adds(a_RI: torch.Tensor, b_OR: torch.Tensor) -> Any:
    held: list[torch.Tensor] = []

    def hook(_: Any, inputs: tuple[torch.Tensor, ...], y: torch.Tensor) -> torch.Tensor:
        if not held:
            held.extend(part.to(y.device, torch.float32) for part in (a_RI, b_OR))
        a, b = held
        with torch.autocast(y.device.type, enabled=False):
            return y + (inputs[0].float() @ a.T @ b.T).to(y.dtype)

    return hook
