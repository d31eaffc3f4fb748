"""`plan_sync`: what will be done with this adapter on this engine, and why. A function of values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from qlora_rl.adapter.verdict import Verdict
from qlora_rl.contracts import EngineCapabilities
from qlora_rl.errors import AdapterRefusedError, ConfigConflictError, NotYetSupportedError, collected

Wish = Literal["auto", "lora_adapter", "weights"]
WISHES: tuple[str, ...] = ("auto", "lora_adapter", "weights")


@dataclass(frozen=True)
class SyncPlan:
    """The decision for a run (vocabulary of TRL #5188).

    Attributes:
        strategy: "lora_adapter".
        transport: how the bytes travel.
        reasons: why, one sentence each.
    """

    strategy: str
    transport: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"sync: {self.strategy} by {self.transport}; {' '.join(self.reasons)}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def plan_sync(verdict: Verdict, capabilities: EngineCapabilities | None = None, wish: str = "auto") -> SyncPlan:
    """Decide how the policy travels.

    Args:
        verdict: of the adapter.
        capabilities: of the engine; without them only the adapter decides.
        wish: "auto", "lora_adapter" or "weights".

    Raises:
        AdapterRefusedError: the adapter cannot travel as wished; names every reason and the way out.
        NotYetSupportedError: full weights are wished or needed; this version has no way for them.
        ConfigConflictError: an unknown wish, or an engine without LoRA.
    """
    if wish not in WISHES:
        raise ConfigConflictError(f"planning the sync: sync={wish!r} is not one of {WISHES}. Use 'auto'.")
    if wish == "weights":
        raise NotYetSupportedError(
            "planning the sync: sync='weights' (dequantised full weights) is not there yet. Use sync='lora_adapter', which is "
            "exact for plain LoRA."
        )
    if verdict.kind == "refuse":
        raise collected("planning the sync", verdict.reasons, AdapterRefusedError)
    if verdict.kind == "full_weights":
        if wish == "lora_adapter":
            raise collected(
                "planning the sync: sync='lora_adapter', but this adapter cannot travel alone; only sync='weights' could "
                "carry it, which is not there yet",
                verdict.reasons,
                AdapterRefusedError,
            )
        raise collected(
            "planning the sync: only full weights can carry this adapter, and sync='weights' is not there yet",
            verdict.reasons,
            NotYetSupportedError,
        )
    if capabilities is not None and not capabilities.takes_adapters:
        raise ConfigConflictError(
            f"planning the sync: {capabilities.name} was started without LoRA. Start it with max_lora_rank={verdict.rank}."
        )
    if capabilities is not None and verdict.rank > capabilities.max_lora_rank:
        raise ConfigConflictError(
            f"planning the sync: rank={verdict.rank} > max_lora_rank={capabilities.max_lora_rank} of {capabilities.name}. "
            f"Start the engine with max_lora_rank={verdict.rank}."
        )
    return SyncPlan(
        "lora_adapter", "directory", (f"The adapter is plain LoRA of rank {verdict.rank}: it travels alone.",)
    )
