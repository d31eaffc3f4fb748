"""`InPlaceTransport`: into the buffers that an engine of this process multiplies with."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qlora_rl.adapter.store import AdapterStore
from qlora_rl.contracts import AdapterBundle, AdapterSlots, AdapterSource, Delivery, InPlaceEngine
from qlora_rl.errors import SyncError
from qlora_rl.versions import Versions


@dataclass(eq=False)
class _Placed:
    """A version and its place: a slot that was lent by the engine; a copy, once it was verified; and a directory, where
    one was asked for."""

    slots: AdapterSlots
    slot: int
    version: int
    kept: AdapterBundle | None = None
    directory: Path | None = None


class InPlaceTransport:
    """One batched copy into buffers that the engine multiplies with; no file on the way.

    Two slots take turns: one serves, the other is written, so the version before stays whole until it is overwritten,
    two pushes later. Of a verified version a copy is kept, from which an engine that must be rebuilt loads it.

    Args:
        root: parent directory of what such an engine loads.
    """

    name = "in_place"

    def __init__(self, root: str | os.PathLike[str] | None = None):
        self.store = AdapterStore(root, keep=3)  # both slots, and the one that was loaded when they were lent
        self._slots: AdapterSlots | None = None
        self._shape: Hashable = None
        self._config: dict[str, Any] = {}
        self._names: list[str] = []
        self._live: Versions[_Placed] = Versions()

    def deliver(self, adapter: AdapterSource, version: int, engine: InPlaceEngine) -> Delivery:
        """Copy the adapter into the slot that does not serve, and have the engine serve it.

        Raises:
            SyncError: the engine lent no slots; the old version serves.
        """
        started = time.perf_counter()
        engine.wake()  # an engine that must be rebuilt is rebuilt here, and has no slots of ours then
        if self._slots is None or not self._slots.is_valid() or self._shape != adapter.shape:
            return self._open(adapter, version, engine, started)
        newest = self._live.newest
        slot = 1 - newest.slot if newest and newest.slots is self._slots else 0
        self._slots.let_go(slot)
        nbytes = adapter.write_into(self._slots.places[slot])
        copied = time.perf_counter()
        self._serve(engine, _Placed(self._slots, slot, version))
        return Delivery(self.name, nbytes, copied - started, time.perf_counter() - copied)

    @property
    def keeps_before(self) -> bool:
        """The version that serves stays in its slot while another one is pushed, and is served again without a load."""
        return bool(self._live) and self._is_in_slot(self._live.newest)

    def commit(self, pushed: AdapterBundle | None = None) -> None:
        """Keep the newest version: what was `pushed`, or a copy of its slot."""
        if self._live and self._is_in_slot(self._live.newest):
            self._live.newest.kept = pushed or self._copy(self._live.newest)

    def revoke(self, engine: InPlaceEngine, version: int) -> None:
        """Have the engine serve the version before `version` (the bare base before the first); can be repeated."""
        newest = self._live.newest
        if newest is not None and newest.version == version:
            self._live = self._live.without_newest()
            if newest.directory is not None:
                self.store.withdraw(newest.directory)
        before = self._live.newest
        if before is None:
            engine.drop_adapter()
            self._slots = None
        elif self._is_in_slot(before):
            self._turn(engine, before)
        else:  # the slots were lent again since, and hold the newest
            engine.load_adapter(self._recover(before), before.version)

    def before(self) -> tuple[int, Mapping[str, torch.Tensor]] | None:
        """The version before the newest, and its tensors; `None` where there is none."""
        placed = self._live.before
        return None if placed is None or placed.kept is None else (placed.version, placed.kept.tensors)

    def close(self) -> None:
        """Remove all versions."""
        self._slots, self._live = None, Versions()
        self.store.close()

    def _open(self, adapter: AdapterSource, version: int, engine: InPlaceEngine, started: float) -> Delivery:
        """The first push, and the first after the engine has taken its slots back: through a directory."""
        bundle = adapter.bundle()
        directory = self.store.publish(bundle, version)
        written = time.perf_counter()
        try:
            self._slots = None
            self._slots = engine.lend_slots(directory)
            self._serve(engine, _Placed(self._slots, 0, version, directory=directory))
        except BaseException:
            if engine.version != version:
                self.store.withdraw(directory)
            raise
        self._shape, self._config, self._names = adapter.shape, dict(bundle.config), list(bundle.tensors)
        self.store.retire()
        return Delivery(self.name, bundle.nbytes, written - started, time.perf_counter() - written)

    def _is_in_slot(self, placed: _Placed) -> bool:
        return placed.slots is self._slots and self._slots.is_valid()

    def _serve(self, engine: InPlaceEngine, placed: _Placed) -> None:
        before, self._live = self._live, self._live.with_newest(placed)
        try:
            self._turn(engine, placed)
        except BaseException:
            if engine.version != placed.version:  # an interrupt may strike when it serves already: then it is revoked
                self._live = before
            raise

    def _turn(self, engine: InPlaceEngine, placed: _Placed) -> None:
        engine.serve_slot(placed.slots, placed.slot, placed.version, lambda: self._recover(placed))

    def _copy(self, placed: _Placed) -> AdapterBundle:
        """What is in its slot; the engine has places for layers that this adapter leaves out, too."""
        places = placed.slots.places[placed.slot]
        tensors = {name: places[name].detach().to("cpu", copy=True).contiguous() for name in self._names}
        return AdapterBundle(tensors, self._config)

    def _recover(self, placed: _Placed) -> Path:
        """The directory of a version; written now, if it has not been."""
        if placed.directory is None or not placed.directory.is_dir():
            if placed.kept is None and not placed.slots.is_valid():
                raise SyncError(
                    f"keeping adapter version={placed.version}: the engine took its slot back before it was verified. "
                    "Push again."
                )
            placed.directory = self.store.publish(placed.kept or self._copy(placed), placed.version)
            self.store.retire()
        return placed.directory
