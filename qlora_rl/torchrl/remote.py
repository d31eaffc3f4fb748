"""The receiver's engine, as the sender sees it: what a push and its canary need of an engine, over the RPC layer.

`AdapterSync`, `DenseSync`, `Canary` and `verify_base` use it like an engine of their own process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from qlora_rl.contracts import AdapterBundle, AdapterSource, BaseFingerprint, Delivery, EngineCapabilities
from qlora_rl.errors import PeerLostError, QloraRLError
from qlora_rl.torchrl.messages import Asking, lost
from qlora_rl.torchrl.transfer import Part, Transfer


class RemoteEngine:
    """The engine at the other end.

    Args:
        asking: the conversation.
        transfer: sends the tensors.
    """

    def __init__(self, asking: Asking, transfer: Transfer):
        self._asking, self._transfer = asking, transfer
        self._capabilities: EngineCapabilities | None = None
        self.version = 0

    @property
    def incarnation(self) -> int:
        """Of the engine; grows with every start, rebuild and wake of it."""
        return self._asking.ask("incarnation")

    @property
    def holds_dense(self) -> bool:
        """It still holds the weights that it was given last."""
        return self._asking.ask("holds_dense")

    def capabilities(self) -> EngineCapabilities:
        """What it can be asked for."""
        if self._capabilities is None:
            self._capabilities = EngineCapabilities(**self._asking.ask("capabilities"))
        return self._capabilities

    def describe_base(self) -> BaseFingerprint:
        """The base that it multiplies with."""
        return BaseFingerprint.from_dict(self._asking.ask("describe_base"))

    def repair_base(self) -> Mapping[str, float]:
        """Write the exact scales back."""
        return self._asking.ask("repair_base")

    def score(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[float]]:
        """Natural log of the probability of every token but the first."""
        return self._asking.ask("score", sequences=[list(ids) for ids in sequences], bare=bare)

    def held_adapter(self, rank: int) -> Mapping[str, str]:
        """Digests of what it multiplies with."""
        return self._asking.ask("held_adapter", rank=rank)

    def withdraw_adapter(self, reason: str) -> None:
        """Have it serve nothing."""
        self._withdraw("withdraw_adapter", reason)

    def withdraw_dense(self, reason: str) -> None:
        """Have it serve nothing."""
        self._withdraw("withdraw_dense", reason)

    def load_dense(self, weights: Iterable[Part], version: int) -> int:
        """Serve these weights as `version`: all of them, or nothing; returns bytes."""
        nbytes = self.take("dense", version, weights)["nbytes"]
        self.version = version
        return nbytes

    def take(self, kind: str, version: int, parts: Iterable[Part], config: Mapping[str, Any] | None = None) -> Any:
        """Send tensors to the receiver, which applies them; returns its answer.

        Raises:
            PeerLostError: it is gone; says whether during the transfer or while they were applied.
            Whatever the receiver raised.
        """
        self._asking.stage = "transfer"

        def announce(ticket: Mapping[str, Any], body: bytes = b"") -> Callable[[], Any]:
            return self._asking.begin(
                "apply", body, kind=kind, version=version, ticket=dict(ticket), config=dict(config or {})
            )

        try:
            answer = self._transfer.send(version, parts, announce)
        except QloraRLError:
            raise
        except OSError as error:
            self._asking.close()
            raise lost("transfer", "receiver", f"is gone ({error})") from error
        self._asking.stage = "apply"
        value = answer()
        self._asking.stage = "prove"
        return value

    def _withdraw(self, method: str, reason: str) -> None:
        if not self._asking.is_lost:  # a receiver that has lost its sender withdraws by itself what was not verified
            self._asking.ask(method, reason=reason)


class RemoteTransport:
    """A transport of `AdapterSync`, over the transfer layer."""

    # Others may read what is transferred, too: no version is delivered twice.
    has_readers = True

    def __init__(self, asking: Asking, transfer: Transfer):
        self._asking, self._transfer = asking, transfer
        self.name = transfer.name
        self._before = 0

    def deliver(self, adapter: AdapterSource, version: int, engine: RemoteEngine) -> Delivery:
        """Send the adapter, and have the receiver's engine serve it on trial."""
        started = time.perf_counter()
        bundle, self._before = adapter.bundle(), engine.version
        load_seconds = engine.take("adapter", version, bundle.tensors.items(), bundle.config)["seconds"]
        engine.version = version
        return Delivery(self.name, bundle.nbytes, time.perf_counter() - started - load_seconds, load_seconds)

    def commit(self, pushed: AdapterBundle | None = None) -> None:
        """Nothing yet: the sender commits when all of a push is done."""

    def revoke(self, engine: RemoteEngine, version: int) -> None:
        """Have the receiver serve the version before; one that has lost its sender does so by itself."""
        engine.version = self._before
        if not self._asking.is_lost:
            try:
                self._asking.ask("revoke")
            except PeerLostError:
                return

    def before(self) -> tuple[int, Mapping[str, torch.Tensor]] | None:
        """Not kept on this side."""
        return None

    def close(self) -> None:
        """Close the sender's end of the transfer."""
        self._transfer.close()
