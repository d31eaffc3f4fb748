"""`SharedBase`: detects writes to a base that the trainer and the engine in this process both compute with.

Such a change is common to both sides, so no comparison of them can notice it.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, NoReturn

import torch

from qlora_rl.base.fingerprint import base_parameters
from qlora_rl.base.quant import plain_name
from qlora_rl.errors import BaseMismatchError, CannotShareError

_SLICE = 2**20
_LOW_HALF = 2**32 - 1
# Of the time of a step, for looking at the next slices.
_SHARE = 0.005
_LONGEST_S = 0.1


class SharedBase:
    """Sums over the base of a borrowed model, slice by slice, from the time when it was verified; and no merging into
    it.

    Args:
        model: a PeftModel on a model of `borrow_base`; only read.
    """

    def __init__(self, model: Any):
        self._model = weakref.ref(model)
        self._reject_merges()
        self._next, self._looked = 0, time.monotonic()
        self._factors: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._parameters = dict(base_parameters(model.get_base_model()))
        self._slices = [
            (name, part, first)
            for name, parameter in self._parameters.items()
            for part, held in enumerate(_parts(parameter))
            for first in range(0, held.numel() * held.element_size(), _SLICE)
        ]
        self._sums = [self._sum(*place) for place in self._slices]

    @classmethod
    def of(cls, model: Any) -> SharedBase | None:
        """For a model that borrows its base, else `None`."""
        bare = model.get_base_model() if hasattr(model, "get_base_model") else model
        return cls(model) if bare is not model and getattr(bare, "qlora_loan", None) is not None else None

    def look(self) -> None:
        """Check the next slices, for a 200th of the time since the last call, and at least one.

        Raises:
            BaseMismatchError: names the first weight that has changed.
        """
        now = time.monotonic()
        end, self._looked = now + min(_LONGEST_S, _SHARE * (now - self._looked)), now
        for _ in self._slices:
            self._check(self._next)
            self._next = (self._next + 1) % len(self._slices)
            if time.monotonic() >= end:
                return

    def look_everywhere(self) -> None:
        """Check all of it.

        Raises:
            BaseMismatchError: names the first weight that has changed.
        """
        self._reject_merges()  # a layer may be new
        for number in range(len(self._slices)):
            self._check(number)

    def _check(self, number: int) -> None:
        found, known = self._sum(*self._slices[number]), self._sums[number]
        # Cast by the model's owner, it is a copy of the model's own.
        if found[0] == known[0] and found != known:
            name = plain_name(self._slices[number][0])
            raise BaseMismatchError(
                f"looking at the shared base: {name} has changed in memory since it was verified. Something has "
                "written to it (code of your own, or load_state_dict); trainer and engine both compute with it, so no "
                "comparison of them notices. Resume from the last checkpoint, and pass share_base=False if the base "
                "has to be written to."
            )

    @torch.no_grad()
    def _sum(self, name: str, part: int, first: int) -> tuple[torch.dtype, int]:
        """Over the bytes of a slice: each word, its high half mixed into its low one, times an odd number of its own.

        One word that differs always changes it; of several, the signs alone may differ.
        """
        held = _parts(self._parameters[name])[part].detach()
        raw = held.reshape(-1).view(torch.uint8)[first : first + _SLICE]
        if raw.numel() % 8 or raw.storage_offset() % 8:
            aligned = raw.new_zeros(-(-raw.numel() // 8) * 8)
            aligned[: raw.numel()] = raw
            raw = aligned
        words = raw.view(torch.int64)
        words = words ^ ((words >> 32) & _LOW_HALF)
        return held.dtype, int((words * self._odd(len(words), words.device)).sum())

    def _odd(self, count: int, device: torch.device) -> torch.Tensor:
        if (count, device) not in self._factors:
            random = torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(count))
            self._factors[count, device] = (2 * random + 1).to(device)
        return self._factors[count, device]

    def _reject_merges(self) -> None:
        for module in self._layers():
            module.merge = _reject

    def release(self) -> None:
        """The engine is closed, or used by another trainer: PEFT's layers may merge again."""
        for module in self._layers():
            vars(module).pop("merge", None)

    def _layers(self) -> list[Any]:
        model = self._model()
        modules = () if model is None else model.modules()
        return [each for each in modules if hasattr(each, "adapter_layer_names") and hasattr(each, "merge")]


def _parts(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The codes or values, and the scales."""
    state = getattr(parameter, "quant_state", None)
    return [parameter.data] if state is None else [parameter.data, state.absmax, state.code]


def _reject(*_: Any, **__: Any) -> NoReturn:
    raise CannotShareError(
        "merging the adapter: the base is shared with the engine. Merged it would be another one than the engine's, "
        "or, where PEFT writes in place, change the engine's own. Use `qlora-rl export`, or merge after the trainer "
        "was closed."
    )
