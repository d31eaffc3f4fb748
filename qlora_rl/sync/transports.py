"""How an adapter's bytes are sent; one class per transport."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qlora_rl.adapter.store import AdapterStore, pack_adapter, read_tensors, unpack_adapter
from qlora_rl.contracts import AdapterBundle, AdapterSource, ByteEngine, Delivery, RolloutEngine
from qlora_rl.sync.in_place import InPlaceTransport
from qlora_rl.versions import Versions

if TYPE_CHECKING:
    import torch


class DirectoryTransport:
    """A directory that trainer and engine both see, by default on tmpfs; a fresh path for each version.

    Args:
        root: parent directory.
        keep: versions that stay on disk.
    """

    name = "directory"

    def __init__(self, root: str | os.PathLike[str] | None = None, keep: int = 2):
        self.store = AdapterStore(root, keep)
        self._live: Versions[tuple[Path, int]] = Versions()

    def deliver(self, adapter: AdapterSource, version: int, engine: RolloutEngine) -> Delivery:
        """Write the version, have the engine load it, then let go of the oldest.

        Raises:
            SyncError: writing or loading failed; what was written is gone and the old version serves.
        """
        started = time.perf_counter()
        bundle = adapter.bundle()
        directory = self.store.publish(bundle, version)
        written = time.perf_counter()
        before, self._live = self._live, self._live.with_newest((directory, version))
        try:
            engine.load_adapter(directory, version)
        except BaseException:
            if engine.version != version:  # an interrupt may strike when it serves already: then it is revoked
                self.store.withdraw(directory)
                self._live = before
            raise
        loaded = time.perf_counter()
        self.store.retire()
        return Delivery(self.name, bundle.nbytes, written - started, loaded - written)

    def commit(self, pushed: AdapterBundle | None = None) -> None:
        """Nothing to do: it is already on disk."""

    def revoke(self, engine: RolloutEngine, version: int) -> None:
        """Have the engine serve the version before `version` (the bare base before the first), and remove that; can be
        repeated."""
        if self._live and self._live.newest[1] == version:
            newest, _ = self._live.newest
            self._live = self._live.without_newest()  # also where this fails: the newest must not serve again
            self.store.withdraw(newest)
        if self._live:
            engine.load_adapter(*self._live.newest)
        else:
            engine.drop_adapter()

    def before(self) -> tuple[int, Mapping[str, torch.Tensor]] | None:
        """The version before the newest, and its tensors; `None` where there is none."""
        if self._live.before is None:
            return None
        directory, version = self._live.before
        return version, read_tensors(directory)

    def close(self) -> None:
        """Remove all versions."""
        self.store.close()


def transport_for(
    name: str, root: str | os.PathLike[str] | None = None
) -> DirectoryTransport | InPlaceTransport | BytesTransport:
    """The transport that a plan names."""
    if name in ("http", "object_store"):
        return BytesTransport(name)
    return {"directory": DirectoryTransport, "in_place": InPlaceTransport}[name](root)


class BytesTransport:
    """Packs the adapter and hands the bytes to the engine, which sends them; keeps the two newest versions to take one
    back.

    Args:
        name: "http", or "object_store" where the engine puts them into Ray's.
    """

    def __init__(self, name: str = "http") -> None:
        self.name = name
        self._live: Versions[tuple[bytes, int]] = Versions()

    def deliver(self, adapter: AdapterSource, version: int, engine: ByteEngine) -> Delivery:
        """Pack and send.

        Raises:
            SyncError: the server rejected it; the old version serves.
        """
        started = time.perf_counter()
        blob = pack_adapter(adapter.bundle())
        packed = time.perf_counter()
        before, self._live = self._live, self._live.with_newest((blob, version))
        try:
            engine.load_packed(blob, version)
        except BaseException:
            if engine.version != version:  # an interrupt may strike when it serves already: then it is revoked
                self._live = before
            raise
        return Delivery(self.name, len(blob), packed - started, time.perf_counter() - packed)

    def commit(self, pushed: AdapterBundle | None = None) -> None:
        """Nothing: the server keeps its own copy."""

    def revoke(self, engine: ByteEngine, version: int) -> None:
        """Have the engine serve the version before `version`, or the bare base before the first; can be repeated."""
        if self._live and self._live.newest[1] == version:
            self._live = self._live.without_newest()  # also where this fails: the newest must not serve again
        if self._live:
            engine.load_packed(*self._live.newest)
        else:
            engine.drop_adapter()

    def before(self) -> tuple[int, Mapping[str, torch.Tensor]] | None:
        """The version before the newest, and its tensors; `None` where there is none."""
        if self._live.before is None:
            return None
        blob, version = self._live.before
        return version, unpack_adapter(blob).tensors

    def close(self) -> None:
        """Let go of the bytes."""
        self._live = Versions()
