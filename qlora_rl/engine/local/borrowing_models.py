"""`BorrowingModels`: the models whose parameters are an engine's own tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

import torch

from qlora_rl.base.experts import Names
from qlora_rl.base.quant import plain_name
from qlora_rl.engine.worker.extension import Lending, Lent
from qlora_rl.errors import EngineBusyError


class BorrowingModels:
    """The living models that borrow an engine's base. They are not kept alive."""

    def __init__(self) -> None:
        self._held: list[tuple[weakref.ref[torch.nn.Module], dict[str, int]]] = []

    def add(self, model: torch.nn.Module, weights: Mapping[str, Lent]) -> None:
        """Note a model that holds `weights`."""
        self._held.append((weakref.ref(model), _places(weights)))

    def alive(self) -> list[torch.nn.Module]:
        """Those that have not been collected."""
        self._held = [(ref, places) for ref, places in self._held if ref() is not None]
        return [model for ref, _ in self._held if (model := ref()) is not None]

    def reject(self, doing: str) -> None:
        """Raise while one is alive.

        Raises:
            EngineBusyError: names the ways out.
        """
        if self.alive():
            gc.collect()  # PEFT and TRL tie their objects into cycles: dropped, they may still be there
        if count := len(self.alive()):
            raise EngineBusyError(
                f"{doing}: {count} model{'s' if count > 1 else ''} made by borrow_base still "
                f"use{'' if count > 1 else 's'} its weights. Drop it first (del model, or the trainer that holds it), "
                "or call close(force=True): the tensors stay with the model then."
            )

    def point_to(self, lending: Lending) -> None:
        """Point all of them at the tensors of a rebuilt engine; what a model has cast or moved meanwhile stays its
        own."""
        for index, model in enumerate(self.alive()):
            ref, places = self._held[index]
            point(model, lending.weights, places)
            self._held[index] = (ref, _places(lending.weights))


def point(model: torch.nn.Module, weights: Mapping[str, Lent], only: Mapping[str, int] | None = None) -> dict[str, str]:
    """Point a model's parameters at `weights`, in place; with `only`, those that are still there.

    Returns:
        Why a parameter was filled with a copy, by name.
    """
    copied: dict[str, str] = {}
    names = Names(model)
    for full_name, parameter in model.named_parameters():
        name = names.stored(plain_name(full_name))
        lent = weights.get(name)
        if lent is None or ".lora_" in full_name:
            continue
        if only is not None and parameter.data_ptr() != only.get(name):
            continue
        if lent.state is None and parameter.dtype != lent.values.dtype:
            parameter.data = lent.values.to(parameter.dtype)
            copied[name] = f"transformers holds it as {str(parameter.dtype).removeprefix('torch.')}"
            continue
        parameter.data = lent.values
        if lent.state is not None:
            parameter.quant_state.absmax, parameter.quant_state.code = lent.state.absmax, lent.state.code
    return copied


def _places(weights: Mapping[str, Lent]) -> dict[str, int]:
    return {name: lent.values.data_ptr() for name, lent in weights.items()}
