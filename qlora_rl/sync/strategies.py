"""How the policy is synced to the engine. The trainer's weights are only read."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from qlora_rl.adapter.live import LiveAdapter
from qlora_rl.contracts import AdapterBundle, RolloutEngine, SyncReport, Transport
from qlora_rl.distributed import ranks
from qlora_rl.errors import CanaryError
from qlora_rl.sync.canary import Canary
from qlora_rl.sync.shared_base import SharedBase

logger = logging.getLogger(__name__)


class AdapterSync:
    """Only the adapter is synced; the engine already holds the base.

    Args:
        model: the live PeftModel.
        engine: where to.
        transport: by which way.
        shared: looks at the base, where trainer and engine compute with the same tensors; made here by default.
        canary: checks each push; without it a push counts as done when the engine has not rejected it.

    Attributes:
        after: versions go on behind this one, whatever the engine serves; a run that is resumed sets it.
        shared: looks at the base, where trainer and engine compute with the same tensors.
    """

    mode = "lora_adapter"

    def __init__(
        self,
        model: Any,
        engine: RolloutEngine,
        transport: Transport,
        canary: Canary | None = None,
        shared: SharedBase | None = None,
    ):
        self.canary = canary
        self.model = model
        self.engine = engine
        self.transport = transport
        self._adapter = LiveAdapter(model, getattr(torch, engine.capabilities().adapter_dtype))
        self.shared = shared or SharedBase.of(model)
        self.after = 0
        self._pushed: AdapterBundle | None = None

    def push(self) -> SyncReport:
        """Hand the current adapter to the engine as the version after the one it serves.

        Raises:
            AdapterRejectedError: the live adapter is no longer plain LoRA, or holds NaN; the old version serves.
            SyncError: it did not arrive; the old version serves, and the push can be repeated.
            CanaryError: it arrived, but the engine does not multiply with it; the old version serves again (the bare
                base, if it was the first).
            BaseMismatchError: the base is shared, and was written to, which a slice that is looked at shows, or all of
                it where the canary fails; the old version serves.
        """
        if self.shared is not None:
            self.shared.look()
        started = time.perf_counter()
        self._adapter.look()
        looked = time.perf_counter()
        version = max(self.engine.version, self.after) + 1
        try:
            self._probe(version)
            probed = time.perf_counter()
            delivery = self.transport.deliver(self._adapter, version, self.engine)
            delivered = time.perf_counter()
            self._adapter.judge()
            self._pushed, difference = self._prove()
        except BaseException as error:
            if self.canary is not None:
                self.canary.doubt()
            # Whatever stopped it, a version that was not verified must not serve.
            if self.engine.version == version:
                self._take_back(version)
            if isinstance(error, CanaryError) and self.shared is not None:
                self.shared.look_everywhere()  # a base that was written to can be why, and then is what to name
            raise
        verified = time.perf_counter()
        self.transport.commit(self._pushed)
        self.after = version  # a server that is restarted says 0 until it has this one again
        self._adapter.forget()
        return SyncReport(
            version=version,
            mode=self.mode,
            transport=delivery.transport,
            bytes=delivery.nbytes,
            tensors=2 * len(self._adapter.shape),
            export_seconds=looked - started,
            deliver_seconds=delivery.deliver_seconds,
            load_seconds=delivery.load_seconds,
            seconds=delivered - probed + looked - started,
            canary_seconds=verified - delivered + probed - looked,
            canary_difference=difference,
        )

    def _probe(self, version: int) -> None:
        """Have the engine serve a probe as `version`, check its effect, and take it back; if the canary asks for one.

        Only where nothing samples from the engine's adapter or reads what is delivered, and taking back is no new load:
        while it serves the bare base, and between slots that are written in place. If the probe fails, `push` takes it
        back.
        """
        is_free = self.engine.version == 0 and not getattr(self.transport, "has_readers", False)
        is_free = is_free or getattr(self.transport, "keeps_before", False)
        wanted = self.canary is not None and is_free and self.canary.wants_probe()
        if not all(ranks().gather(wanted, "asking whether to probe")):  # all or none: they score together
            return
        probe = self.canary.probe(self._adapter) if self.canary is not None else None
        if probe is None:
            return
        self.transport.deliver(probe, version, self.engine)
        self.canary.check_probe(probe)
        self.transport.revoke(self.engine, version)

    def _take_back(self, version: int) -> None:
        try:
            self.transport.revoke(self.engine, version)
        except BaseException:
            logger.exception(
                "version %d could not be taken back; the engine serves nothing until the next push", version
            )
            self.engine.withdraw_adapter(
                f"the canary failed for version={version}, and the version before it could not be loaded"
            )

    def _prove(self) -> tuple[AdapterBundle | None, float | None]:
        if self.canary is None:
            return None, None
        bundle = self._adapter.bundle()
        return bundle, self.canary.check(bundle)

    def verify(self) -> None:
        """Check again that the engine serves the last version.

        Raises:
            CanaryError: it does not.
            PolicyMismatchError: it computes another function of the base.
        """
        if self.canary is not None and self._pushed is not None:
            if self.canary.function is not None:
                self.canary.function.compare()
            self.canary.doubt()  # it is another engine than was probed: the next push probes it
            self.canary.check(self._pushed, scored=True)

    def before(self) -> tuple[int, Mapping[str, torch.Tensor]] | None:
        """The version before the newest, and its tensors in canonical form, where the transport still has them."""
        return self.transport.before()

    def close(self) -> None:
        """Remove the files between trainer and engine."""
        if self.shared is not None:
            self.shared.release()
        self.transport.close()
