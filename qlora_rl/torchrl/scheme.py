"""`AdapterSyncScheme`: usable wherever TorchRL 0.14 takes a `WeightSyncScheme`."""

from __future__ import annotations

from typing import Any

import torch

from qlora_rl.contracts import RolloutEngine
from qlora_rl.errors import ConfigConflictError, MissingDependencyError
from qlora_rl.torchrl.receiver import AdapterReceiver
from qlora_rl.torchrl.rpc import InProcessRPC, RPCLayer
from qlora_rl.torchrl.sender import AdapterSender
from qlora_rl.torchrl.transfer import BodyTransfer, Transfer

try:
    from tensordict import TensorDict
    from torchrl.weight_update import WeightSyncScheme
except ImportError as error:
    raise MissingDependencyError(
        f"importing qlora_rl.torchrl: {error}. pip install 'qlora-rl[torchrl]' (TorchRL 0.14)."
    ) from error


class AdapterSyncScheme(WeightSyncScheme):
    """What both sides are made from: hand it to both processes.

    Two ways to use it. As TorchRL's schemes for LLM engines: `create_sender`, `create_receiver`. Or as a collector or
    an inference server does it: `init_on_sender` / `init_on_receiver`, `connect`, `send`, `receive`.

    Args:
        rpc: how the sides talk; by default within one process.
        transfer: how weights are sent; by default in the messages.
        sync: "auto", "lora_adapter" or "weights"; see `plan_sync`.
        timeout_s: after which a side that has not answered is given up; longer than it takes to read a base.
        canary_every: the engine's logprobs are compared at each n-th push; 0: never.
        autocast: dtype of the trainer's forward (`None`: as the weights are).
        allow_base_mismatch: go on with different bases.
    """

    def __init__(
        self,
        rpc: RPCLayer | None = None,
        transfer: Transfer | None = None,
        *,
        sync: str = "auto",
        timeout_s: float = 60.0,
        canary_every: int = 1,
        autocast: torch.dtype | None = None,
        allow_base_mismatch: bool = False,
    ):
        super().__init__()
        self.rpc = rpc or InProcessRPC()
        self.transfer = transfer or BodyTransfer()
        if isinstance(self.rpc, InProcessRPC) and getattr(self.transfer, "is_collective", False):
            raise ConfigConflictError(
                f"making a scheme: InProcessRPC and {self.transfer.name!r}: a collective needs two processes. Use "
                "BodyTransfer()."
            )
        self.sync, self.timeout_s, self.canary_every = sync, timeout_s, canary_every
        self.autocast, self.allow_base_mismatch = autocast, allow_base_mismatch
        self._sender: AdapterSender | None = None
        self._receiver: AdapterReceiver | None = None

    def create_sender(self) -> AdapterSender:
        """The trainer's side."""
        return AdapterSender(self)

    def create_receiver(self, engine: RolloutEngine) -> AdapterReceiver:
        """The side of whatever generates: `LocalEngine`, `ServerEngine`, `FakeEngine`."""
        return AdapterReceiver(self, engine)

    def create_transport(self, **_: Any) -> _SchemeTransport:
        """TorchRL's data-plane interface over this scheme."""
        return _SchemeTransport(self)

    def _init_on_sender_impl(self, model_id: str = "policy", context: Any = None, model: Any = None, **_: Any) -> None:
        self.model_id, self.context = model_id, context
        self._sender = self.create_sender()
        self._sender.register_model(self.model if model is None else model)

    def _init_on_receiver_impl(self, model_id: str, context: Any = None, model: Any = None, **options: Any) -> None:
        self.model_id = model_id
        if context is not None:  # a server makes itself the context before
            self.context = context
        self.worker_idx = options.get("worker_idx")
        self._receiver = self.create_receiver(_engine_of(self.model if model is None else model))

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Join the other side; the sender pushes the first version."""
        if self.initialized_on_sender:
            self._sender.init_all_workers_group()
            self._sender.update_weights(weights)
            self.synchronized_on_sender = True
        elif self.initialized_on_receiver:
            self._receiver.init_all_workers_group()
            self.synchronized_on_receiver = True
        else:
            raise ConfigConflictError("connecting a scheme: call init_on_sender or init_on_receiver first.")

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Push; returns when the version serves and was verified. There is one receiver, without a number."""
        if not self.synchronized_on_sender:
            raise ConfigConflictError(
                "sending weights: this side is not a connected sender. Call init_on_sender, connect."
            )
        self._sender.update_weights(weights)

    def receive(self, timeout: float | None = None) -> TensorDict | None:
        """Wait for a push, and serve it.

        Args:
            timeout: seconds; the scheme's time limit where it is left out.

        Returns:
            The adapter's tensors, or `None` when nothing was applied. A collector or server in which this happens
            counts the version.
        """
        if not self.synchronized_on_receiver:
            raise ConfigConflictError(
                "receiving weights: this side is not a connected receiver. Call init_on_receiver, connect."
            )
        if not self._receiver.poll_and_apply(self.timeout_s if timeout is None else timeout):
            return None
        weights = TensorDict(dict(self._receiver.weights))
        context = self.context
        if hasattr(context, "increment_version"):
            context.increment_version()
        elif hasattr(context, "update_policy_weights_"):  # TorchRL's inference server counts in it
            context.update_policy_weights_(model_id=self.model_id, policy_or_weights=weights)
        return weights

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Not offered: what did not come from a sender is verified by nobody."""
        raise ConfigConflictError("applying weights: only what a sender pushes is served. Call update_weights() there.")

    def shutdown(self) -> None:
        """Close this side."""
        for side in (getattr(self, "_sender", None), getattr(self, "_receiver", None)):
            if side is not None:
                side.shutdown()
        self._sender = self._receiver = None
        super().shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_sender": None, "_receiver": None}


class _SchemeTransport:
    """`torchrl.weight_update.TransportBackend`."""

    def __init__(self, scheme: AdapterSyncScheme):
        self._scheme = scheme

    def send_weights(self, weights: Any = None) -> None:
        self._scheme.send(weights)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> TensorDict | None:
        return self._scheme.receive(timeout)


def _engine_of(policy: Any) -> RolloutEngine:
    """An engine, in whatever TorchRL calls the policy: itself, or its `engine`."""
    found = policy if hasattr(policy, "load_adapter") else getattr(policy, "engine", None)
    if not hasattr(found, "load_adapter"):
        raise ConfigConflictError(
            f"receiving weights: {type(policy).__name__} is not an engine of qlora_rl and has none as its `engine`. "
            "Pass model=LocalEngine(...)."
        )
    return found
