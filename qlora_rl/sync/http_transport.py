"""`HttpTransport`: the adapter as one safetensors blob, which the engine sends on; no directory that both sides see."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from qlora_rl.adapter.store import pack_adapter, unpack_adapter
from qlora_rl.contracts import AdapterSource, ByteEngine, Delivery
from qlora_rl.versions import Versions

if TYPE_CHECKING:
    import torch


class HttpTransport:
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

    def commit(self) -> None:
        """Nothing: the server keeps its own copy."""

    def revoke(self, engine: ByteEngine) -> None:
        """Have the engine serve the version before the newest, or the bare base before the first."""
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
