"""How the engine is made equal to the trainer's policy. The trainer's weights are only read."""

from __future__ import annotations

import time
from typing import Any

import torch

from qlora_rl.adapter.export import export_adapter
from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.contracts import RolloutEngine, SyncReport, Transport


class AdapterSync:
    """Only the adapter travels; the base is in the engine already.

    Args:
        model: the live PeftModel.
        engine: where to.
        transport: by which way.
    """

    mode = "lora_adapter"

    def __init__(self, model: Any, engine: RolloutEngine, transport: Transport):
        self.model = model
        self.engine = engine
        self.transport = transport
        self._dtype = getattr(torch, engine.capabilities().adapter_dtype)

    def push(self) -> SyncReport:
        """Hand the current adapter to the engine as the version after the one it serves.

        Raises:
            AdapterRefusedError: the live adapter is no longer plain LoRA, or holds NaN; the old version serves.
            SyncError: it did not arrive; the old version serves, and the push can be repeated.
        """
        started = time.perf_counter()
        bundle = export_adapter(self.model, dtype=self._dtype, verdict=judge_adapter(self.model))
        exported = time.perf_counter()
        version = self.engine.version + 1
        delivery = self.transport.deliver(bundle, version, self.engine)
        return SyncReport(
            version=version,
            mode=self.mode,
            transport=delivery.transport,
            bytes=delivery.nbytes,
            tensors=len(bundle.tensors),
            export_seconds=exported - started,
            deliver_seconds=delivery.deliver_seconds,
            load_seconds=delivery.load_seconds,
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """Remove what lies between trainer and engine."""
        self.transport.close()
