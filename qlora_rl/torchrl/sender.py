"""`AdapterSender`: the trainer's side, with the method names of TorchRL's `VLLMWeightSender`."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.contracts import SyncReport, SyncStrategy
from qlora_rl.errors import ConfigConflictError, PeerLostError, QloraRLError, SyncError
from qlora_rl.sync.base_check import BaseCheck, verify_base
from qlora_rl.sync.canary import Canary
from qlora_rl.sync.full_weights import DenseSync
from qlora_rl.sync.function_check import FunctionCheck
from qlora_rl.sync.plan import SyncPlan, plan_sync
from qlora_rl.sync.shared_base import SharedBase
from qlora_rl.sync.strategies import AdapterSync
from qlora_rl.torchrl import metadata as md
from qlora_rl.torchrl.messages import Asking, NotJoinedError, Terms, lost, pack_error
from qlora_rl.torchrl.remote import RemoteEngine, RemoteTransport

logger = logging.getLogger(__name__)


class AdapterSender:
    """Pushes the registered policy to the receiver. Made by `AdapterSyncScheme.create_sender`.

    Attributes:
        version: of the newest push that the receiver has taken; 0 before the first.
        last_report: of that push.
        plan: how the policy is synced; known after the first join.
        `base_check`: the result of the base verification.
    """

    def __init__(self, scheme: Terms):
        self._scheme = scheme
        self._asking = Asking(scheme.rpc.connect, scheme.timeout_s)
        self._model_ref: Any = None
        self._canary: Canary | None = None
        self._shared: SharedBase | None = None
        self._engine: RemoteEngine | None = None
        self._metadata: md.Metadata | None = None
        self._collectors: list[Any] = []
        self._is_closed = False
        self.version = 0
        self.last_report: SyncReport | None = None
        self.plan: SyncPlan | None = None
        self.base_check: BaseCheck | None = None

    def register_model(self, model: Any) -> None:
        """The policy to push: a PeftModel, or a TorchRL wrapper with one as its `model`. Held by a weak reference."""
        self._model_ref = weakref.ref(policy_of(model))

    def register_collector(self, collector: Any, *, push_after_batch: bool = True) -> None:
        """Push after each batch that this collector has collected, and count each push as a version of its policy.

        Args:
            collector: of this process, such as `LLMCollector`.
            push_after_batch: as its `post_collect_hook`, behind one that is there already. It is called before the
                batch is handed out, so that what the batch teaches is pushed behind the next one. Pass False, and call
                `update_weights` after each optimizer step, to sample every batch with the newest policy; versions are
                counted all the same.
        """
        self._collectors.append(collector)
        if not push_after_batch:
            return
        before = collector.post_collect_hook

        def push(batch: Any) -> None:
            if before is not None:
                before(batch)
            if not self._is_closed:
                self.update_weights()

        collector.post_collect_hook = push

    def init_all_workers_group(self, model_metadata: md.Metadata | None = None) -> None:
        """Join the receiver, which must do the same within the time limit: verify the base, agree on what will be sent.

        A receiver that is behind (it was restarted) is brought to the current version.

        Args:
            model_metadata: of `get_model_metadata`; made of the registered model where it is left out.

        Raises:
            BaseMismatchError, AdapterRejectedError, ConfigConflictError: the two do not fit; raised in the receiver
                too.
            PeerLostError: there is no receiver within the time limit.
        """
        self._metadata = model_metadata
        self._join()
        if self.version:
            self.update_weights()

    def update_weights(self, weights: Any = None) -> SyncReport:
        """Push the registered model as the next version; returns when the receiver serves it and that was verified.

        Args:
            weights: the registered model itself, or nothing. The live policy is what is verified: other tensors are
                rejected.

        Raises:
            PeerLostError: the receiver is gone, or silent for longer than the time limit; names the stage. The push can
                be repeated: a restarted receiver is joined again first.
            AdapterRejectedError, SyncError, CanaryError: as a push without TorchRL; the version before still serves.
        """
        model = self._model()
        if weights is not None and policy_of(weights) is not model:
            raise ConfigConflictError(
                f"updating weights: {type(weights).__name__} is not the registered model, against which a push is "
                "verified. Register the model that is trained and call update_weights()."
            )
        self._meet()
        try:
            self.last_report = self._push(model)
        except BaseException as error:
            self._leave(error)
            raise
        self.version = self.last_report.version
        for collector in self._collectors:
            collector.increment_version()
        return self.last_report

    def shutdown(self) -> None:
        """Leave the receiver, which goes on serving; free everything on this side."""
        self._is_closed = True
        self._collectors.clear()
        self._scheme.transfer.close()
        self._asking.close()

    def _model(self) -> Any:
        if self._is_closed:
            raise SyncError("updating weights: the sender was shut down. Make a new one with create_sender().")
        model = None if self._model_ref is None else self._model_ref()
        if model is None:
            raise ConfigConflictError(
                "updating weights: no model is registered, or it is gone (only a weak reference is held). Call "
                "register_model(model)."
            )
        return model

    def _meet(self) -> None:
        """Open a push; a receiver that lost the session or was restarted is joined again."""
        if self._asking.is_lost:
            self._join()
        try:
            self._begin()
        except NotJoinedError:
            self._join()
            self._begin()
        except PeerLostError as error:
            if error.__cause__ is None:  # it is there, and silent: it has had its time
                raise
            self._join()
            self._begin()

    def _begin(self) -> None:
        self._asking.stage = "begin"
        self._engine.version = self._asking.ask("begin", purpose="push")["version"]

    def _push(self, model: Any) -> SyncReport:
        report = self._strategy_for(model).push()
        self._asking.stage = "commit"
        self._asking.ask("commit", version=report.version)
        self._asking.stage = "end"
        self._asking.ask("end")
        return report

    def _leave(self, error: BaseException) -> None:
        """Tell the receiver that a push has ended before its end; it takes back what was not committed."""
        if self._canary is not None:
            self._canary.doubt()
        if isinstance(error, NotJoinedError):
            stage = self._asking.stage
            self._asking.close()
            raise lost(stage, "receiver", "was restarted during the push") from error
        if not self._asking.is_lost:
            try:
                self._asking.ask("end")
            except QloraRLError as another:
                logger.warning("the receiver could not be told that a push has failed: %s", another)
                self._asking.close()

    def _join(self) -> None:
        model = self._model()
        verdict = judge_adapter(model)
        plan_sync(verdict, wish=self._scheme.sync)  # raises before waiting for the receiver
        self._asking.stage = "join"
        self._asking.open()
        try:
            self._engine = RemoteEngine(self._asking, self._scheme.transfer)
            self._engine.version = self._asking.ask("begin", purpose="join")["version"]
            self._agree(model, verdict)
        except BaseException as error:
            self._reject(error)
            raise

    def _agree(self, model: Any, verdict: Any) -> None:
        capabilities = self._engine.capabilities()
        plan_sync(verdict, capabilities, wish=self._scheme.sync)  # before the bases are read
        self._asking.stage = "prove"
        self.base_check = verify_base(model, self._engine, allow_base_mismatch=self._scheme.allow_base_mismatch)
        self.plan = plan_sync(
            verdict,
            capabilities,
            self.base_check.diff,
            self._scheme.sync,
            allow_base_mismatch=self._scheme.allow_base_mismatch,
        )
        is_dense = self.plan.strategy == "weights"
        live = md.get_model_metadata(model, getattr(torch, capabilities.adapter_dtype), is_dense=is_dense)
        if self._metadata is not None and (differs := md.difference(self._metadata, live)):
            raise ConfigConflictError(
                f"agreeing on metadata: {differs}, in the registered model. Take get_model_metadata(model, dtype) with "
                f"dtype=torch.{capabilities.adapter_dtype}, in which the receiver's engine multiplies, or none."
            )
        self._asking.stage = "join"
        self._asking.ask(
            "agree",
            offer=self._scheme.transfer.offer(),
            transport="" if is_dense else self.plan.transport,
            metadata=md.to_json(live),
        )
        self._canary = self._make_canary(model)
        self._shared = SharedBase.of(model)  # from here on: each push has a strategy of its own
        self._asking.ask("admit")
        self._asking.ask("end")

    def _strategy_for(self, model: Any) -> SyncStrategy:
        """Made for each push: it holds the model, which between two pushes belongs to the caller alone."""
        engine: Any = self._engine  # a RemoteEngine is as much of an engine as a strategy asks for
        if self.plan.strategy == "weights":
            strategy: SyncStrategy = DenseSync(model, engine, self._canary)
        else:
            transport = RemoteTransport(self._asking, self._scheme.transfer)
            strategy = AdapterSync(model, engine, transport, self._canary, self._shared)
        strategy.after = self.version
        return strategy

    def _make_canary(self, model: Any) -> Canary | None:
        if not self.base_check.is_verified:
            return None
        engine: Any = self._engine
        seen: Any = weakref.proxy(model)
        self._asking.stage = "prove"
        FunctionCheck(seen, engine, autocast=self._scheme.autocast).compare()
        if not self._scheme.canary_every:
            return None
        canary = Canary(seen, engine, every=self._scheme.canary_every, autocast=self._scheme.autocast)
        canary.calibrate()
        return canary

    def _reject(self, error: BaseException) -> None:
        """The receiver raises what this side raises."""
        if self._asking.is_lost:
            return
        try:
            self._asking.ask("reject", error=pack_error(error))
            self._asking.ask("end")
        except QloraRLError as another:
            logger.warning("the receiver could not be told that the join was rejected: %s", another)
        self._asking.close()


def policy_of(model: Any) -> Any:
    """The PeftModel in whatever TorchRL calls the policy: itself, or the `model` of its wrapper."""
    found = model
    while not hasattr(found, "peft_config") and hasattr(found, "model"):
        found = found.model
    if not hasattr(found, "peft_config"):
        raise ConfigConflictError(
            f"registering a model: {type(model).__name__} is not a PeftModel and has none as its `model`. Register the "
            "PeftModel that is trained."
        )
    return found
