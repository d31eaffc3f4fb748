"""`InPlaceTransport`: into the buffers that an engine of this process multiplies with."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qlora_rl.adapter.store import AdapterStore, read_tensors
from qlora_rl.contracts import AdapterBundle, AdapterSlots, AdapterSource, Delivery, InPlaceEngine
from qlora_rl.errors import SyncError
from qlora_rl.versions import Versions

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Placed:
    """A version and its place: a slot that was lent by the engine, and a directory, once that is written."""

    slots: AdapterSlots
    slot: int
    version: int
    directory: Path | None = None
    writing: Future[Path] | None = None


class InPlaceTransport:
    """One batched copy into buffers that the engine multiplies with; no file on the way.

    Two slots take turns: one serves, the other is written, so the version before stays whole until it is overwritten,
    two pushes later. A verified version is also written to a directory by a background thread, from which an engine
    that must be rebuilt loads it.

    Args:
        root: parent directory of these directories.
    """

    name = "in_place"

    def __init__(self, root: str | os.PathLike[str] | None = None):
        self.store = AdapterStore(root, keep=3)  # both slots, and the one that was loaded when they were lent
        self._slots: AdapterSlots | None = None
        self._shape: Hashable = None
        self._config: dict[str, Any] = {}
        self._names: list[str] = []
        self._live: Versions[_Placed] = Versions()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="qlora-rl-adapter")

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
        for placed in self._live:
            if placed.slot == slot:
                self._settle(placed)  # its version must have been written to its directory
        self._slots.let_go(slot)
        nbytes = adapter.write_into(self._slots.places[slot])
        copied = time.perf_counter()
        self._serve(engine, _Placed(self._slots, slot, version))
        return Delivery(self.name, nbytes, copied - started, time.perf_counter() - copied)

    @property
    def keeps_before(self) -> bool:
        """The version that serves stays in its slot while another one is pushed, and is served again without a load."""
        return bool(self._live) and self._is_in_slot(self._live.newest)

    def commit(self) -> None:
        """Start to write the newest version to its directory."""
        if self._live:
            self._write(self._live.newest)

    def revoke(self, engine: InPlaceEngine) -> None:
        """Have the engine serve the version before the newest (the bare base before the first)."""
        newest, before = self._live.newest, self._live.before
        self._live = self._live.without_newest()
        if before is None:
            engine.drop_adapter()
            self._slots = None
        elif self._is_in_slot(before):
            self._turn(engine, before)
        else:  # the slots were lent again since, and hold the newest
            engine.load_adapter(self._recover(before), before.version)
        self._settle(newest)
        if newest.directory is not None:
            self.store.withdraw(newest.directory)

    def before(self) -> tuple[int, Mapping[str, torch.Tensor]] | None:
        """The version before the newest, and its tensors (views of its slot); `None` where there is none, or it was not
        kept."""
        placed = self._live.before
        if placed is None:
            return None
        if self._is_in_slot(placed):
            places = placed.slots.places[placed.slot]
            return placed.version, {name: places[name] for name in self._names}
        return (placed.version, read_tensors(placed.directory)) if placed.directory is not None else None

    def close(self) -> None:
        """Remove all versions."""
        try:
            self._writer.shutdown(wait=True)
        finally:
            self._slots, self._live = None, Versions()
            self.store.close()

    def _open(self, adapter: AdapterSource, version: int, engine: InPlaceEngine, started: float) -> Delivery:
        """The first push, and the first after the engine has taken its slots back: through a directory."""
        for placed in self._live:
            self._settle(placed)
        bundle = adapter.bundle()
        directory = self.store.publish(bundle, version)
        written = time.perf_counter()
        try:
            self._slots = None
            self._slots = engine.lend_slots(directory)
            self._serve(engine, _Placed(self._slots, 0, version, directory))
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

    def _recover(self, placed: _Placed) -> Path:
        """The directory of a version; written now, if it has not been."""
        self._write(placed)
        if placed.directory is None:
            placed.directory = placed.writing.result()
        return placed.directory

    def _write(self, placed: _Placed) -> None:
        if placed.directory is None and placed.writing is None:
            placed.writing = self._writer.submit(self._write_behind, placed)

    def _write_behind(self, placed: _Placed) -> Path:
        # The engine has places for layers that this adapter leaves out, too.
        places = placed.slots.places[placed.slot]
        tensors = {name: _copied(places[name]) for name in self._names}
        if not placed.slots.is_valid():
            raise SyncError(
                f"keeping adapter version={placed.version}: the engine took its slot back meanwhile. Push again."
            )
        directory = self.store.publish(AdapterBundle(tensors, self._config), placed.version)
        self.store.retire()
        return directory

    def _settle(self, placed: _Placed) -> None:
        """Wait until a version is written, if that was started."""
        if placed.directory is None and placed.writing is not None:
            try:
                placed.directory = placed.writing.result()
            except Exception as error:
                # The engine serves from its buffers; the directory matters only when it must be rebuilt.
                logger.warning("an adapter version could not be kept for recovery: %s", error)
                placed.writing = None  # as long as the slot holds it, this may be tried again


def _copied(place: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, made without torch's threads.

    A copy of torch's would give this thread a pool of OpenMP threads of its own. With more of them than cores, GNU's
    library lets all threads of the process sleep between two operators instead of waiting awake, and every rollout from
    then on takes up to twice as long.
    """
    held = place.detach()
    if not held.is_cpu:
        torch.cuda.synchronize(held.device)  # it was written on the stream of another thread
        return held.to("cpu", copy=True).contiguous()
    return torch.from_numpy(held.view(torch.uint8).numpy().copy()).view(held.dtype)
