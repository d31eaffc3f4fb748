"""How the engine is made equal to the trainer's policy. The trainer's weights are only read."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from qlora_rl.adapter.export import export_adapter
from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.contracts import AdapterBundle, RolloutEngine, SyncReport, Transport
from qlora_rl.sync.canary import Canary

logger = logging.getLogger(__name__)


class AdapterSync:
    """Only the adapter travels; the base is in the engine already.

    Args:
        model: the live PeftModel.
        engine: where to.
        transport: by which way.
        canary: proves each push; without it a push is believed when the engine has not refused it.
    """

    mode = "lora_adapter"

    def __init__(self, model: Any, engine: RolloutEngine, transport: Transport, canary: Canary | None = None):
        self.canary = canary
        self.model = model
        self.engine = engine
        self.transport = transport
        self._pushed: AdapterBundle | None = None
        self._dtype = getattr(torch, engine.capabilities().adapter_dtype)

    def push(self) -> SyncReport:
        """Hand the current adapter to the engine as the version after the one it serves.

        Raises:
            AdapterRefusedError: the live adapter is no longer plain LoRA, or holds NaN; the old version serves.
            SyncError: it did not arrive; the old version serves, and the push can be repeated.
            CanaryError: it arrived, but the engine does not multiply with it; the old version serves again (the bare base, if it was the first).
        """
        started = time.perf_counter()
        bundle = export_adapter(self.model, dtype=self._dtype, verdict=judge_adapter(self.model))
        exported = time.perf_counter()
        version = self.engine.version + 1
        delivery = self.transport.deliver(bundle, version, self.engine)
        delivered = time.perf_counter()
        difference = None
        if self.canary is not None:
            try:
                difference = self.canary.check(bundle)
            except BaseException:
                # Whatever stopped the proof, an unproven version must not serve.
                try:
                    self.transport.revoke(self.engine)
                except Exception:
                    logger.exception("version %d could not be taken back", version)
                raise
        self._pushed = bundle
        return SyncReport(
            version=version,
            mode=self.mode,
            transport=delivery.transport,
            bytes=delivery.nbytes,
            tensors=len(bundle.tensors),
            export_seconds=exported - started,
            deliver_seconds=delivery.deliver_seconds,
            load_seconds=delivery.load_seconds,
            seconds=delivered - started,
            canary_seconds=time.perf_counter() - delivered,
            canary_difference=difference,
        )

    def verify(self) -> None:
        """Prove again that the engine serves the last version.

        Raises:
            CanaryError: it does not.
        """
        if self.canary is not None and self._pushed is not None:
            self.canary.check(self._pushed, scored=True)

    def close(self) -> None:
        """Remove what lies between trainer and engine."""
        self.transport.close()
