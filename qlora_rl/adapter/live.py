"""`LiveAdapter`: the adapter of a model in training, as a push sees it.

The layers are walked once; a push looks at each of them again (merged? switched off? rescaled? its matrices replaced?),
which takes a fraction of a millisecond, and copies in a few batched calls. Whatever looks different than before is
judged again, in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qlora_rl.adapter.export import export_subject, is_folded_after
from qlora_rl.adapter.inspected import Factors, InspectedAdapter, active_adapter, factors_of, not_finite
from qlora_rl.adapter.verdict import Verdict, judge_adapter
from qlora_rl.contracts import AdapterBundle, lora_name
from qlora_rl.errors import AdapterRejectedError, collected
from qlora_rl.sharded_tensors import shape_of, whole


class LiveAdapter:
    """The active LoRA of a PeftModel; only read.

    Args:
        model: the PeftModel.
        dtype: in which the engine multiplies.
    """

    def __init__(self, model: Any, dtype: torch.dtype):
        self.model = model
        self.dtype = dtype
        self._verdict: Verdict | None = None
        self._subject: InspectedAdapter | None = None
        self._seen: list[Factors] = []
        self._bundle: AdapterBundle | None = None
        self._shape: tuple[tuple[str, int], ...] = ()
        self._places: tuple[Any, ...] = ()
        self._gathered: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def rank(self) -> int:
        """Largest R of its modules."""
        return 0 if self._verdict is None else self._verdict.rank

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """Name and R of every module: what a place that was made for it must fit."""
        return self._shape

    def look(self) -> None:
        """Check whether its structure is the same as at the last push.

        Raises:
            AdapterRejectedError: it is not plain LoRA (any more); names every reason.
        """
        self._bundle = self._gathered = None
        try:
            seen = [] if self._subject is None else self._signature()
        except (KeyError, AttributeError):  # the adapter was taken off, or a part of it replaced
            seen = []
        if seen and _is_same(seen, self._seen):
            self._seen = seen
        else:
            self._bind()

    def judge(self) -> None:
        """Check that all of its numbers are finite; `look` has checked its structure.

        Raises:
            AdapterRejectedError: it holds NaN or infinity.
        """
        if self._subject is None or self._first_not_finite() is not None:
            self._bind()
        if self.dtype == torch.float16:
            self.bundle()  # what is finite here may be too large there

    def bundle(self) -> AdapterBundle:
        """In canonical form, as it is now; made once per `look`."""
        if self._bundle is None:
            names = self._subject.layers
            self._bundle = export_subject(self._subject, self.dtype, dict(zip(names, self._weights(), strict=True)))
        return self._bundle

    def forget(self) -> None:
        """Free what was gathered for a push."""
        self._gathered = None

    def _weights(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A and B of every layer, in full; gathered once per `look`, layer after layer, by all ranks."""
        if self._gathered is None:
            flat = whole([weight for entry in self._seen for weight in entry[:2]])
            self._gathered = list(zip(flat[::2], flat[1::2], strict=True))
        return self._gathered

    def _first_not_finite(self) -> str | None:
        if not any(one is not entry.a_RI for (one, _), entry in zip(self._weights(), self._seen, strict=True)):
            return not_finite(self._subject)
        bad = [not bool(torch.isfinite(torch.stack([*a.aminmax(), *b.aminmax()])).all()) for a, b in self._weights()]
        return next((name for (name, _), is_bad in zip(self._shape, bad, strict=True) if is_bad), None)

    @torch.no_grad()
    def write_into(self, places: Mapping[str, torch.Tensor]) -> int:
        """Copy it in canonical form over `places`, in a few batched calls; the same bytes as `bundle`.

        Args:
            places: by canonical name, A [R, I] and B [O, R], with zeros where a smaller rank leaves room.

        Returns:
            Bytes that were written.
        """
        a_places, b_places = self._cut(places)
        a_sources, b_sources = ([pair[i] for pair in self._weights()] for i in (0, 1))
        scales = [entry.scale for entry in self._seen]
        torch._foreach_copy_(a_places, a_sources)
        if b_sources[0].is_cpu:
            for b_OR, place, scale in zip(b_sources, b_places, scales, strict=True):
                if b_OR.dtype in (torch.float32, place.dtype):
                    torch.mul(b_OR, scale, out=place)  # one pass, rounded once
                else:
                    place.copy_(b_OR.float() * scale)
        else:
            scaled = [
                b.to(place.dtype) * scale if is_folded_after(scale, place.dtype) else b.float() * scale
                for b, place, scale in zip(b_sources, b_places, scales, strict=True)
            ]
            torch._foreach_copy_(b_places, scaled)
        return sum(place.numel() * place.element_size() for place in (*a_places, *b_places))

    def _cut(self, places: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The places of A and B, each cut to its own rank; those of two slots are remembered."""
        for known, shape, cut in self._places:
            if known is places and shape is self._shape:
                return cut
        a_places = [places[lora_name(name, "A")][:rank] for name, rank in self._shape]
        b_places = [places[lora_name(name, "B")][:, :rank] for name, rank in self._shape]
        self._places = (*self._places[-1:], (places, self._shape, (a_places, b_places)))
        return a_places, b_places

    def _bind(self) -> None:
        self._subject, self._shape = None, ()
        verdict = judge_adapter(self.model)
        if verdict.kind != "adapter":
            raise collected("exporting the adapter", verdict.reasons, AdapterRejectedError)
        self._verdict, self._subject = verdict, InspectedAdapter(self.model, active_adapter(self.model))
        self._seen = self._signature()
        names = self._subject.layers
        self._shape = tuple((name, shape_of(entry.a_RI)[0]) for name, entry in zip(names, self._seen, strict=True))

    def _signature(self) -> list[Factors]:
        """What each layer multiplies with, as objects; empty where one of them is merged or switched off."""
        adapter = self._subject.adapter
        if self.model.active_adapters != [adapter]:
            return []
        found = []
        for layer in self._subject.layers.values():
            if layer.merged_adapters or layer.disable_adapters or layer.active_adapters != [adapter]:
                return []
            found.append(factors_of(layer, adapter))
        return found


def _is_same(seen: list[Factors], before: list[Factors]) -> bool:
    """The same objects in the same layers; scales may have changed, numbers are not looked at."""
    return len(seen) == len(before) and all(
        one is other
        for now, then in zip(seen, before, strict=True)
        for one, other in zip((*now[:2], *now.rest), (*then[:2], *then.rest), strict=True)
    )
