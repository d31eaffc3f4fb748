"""`plan_sync`: how this adapter is synced to this engine, and why. A function of values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from qlora_rl.adapter.verdict import Verdict
from qlora_rl.base.experts import ATTENTION
from qlora_rl.base.fingerprint import Diff
from qlora_rl.contracts import EngineCapabilities, SyncWish
from qlora_rl.errors import (
    AdapterRejectedError,
    BaseMismatchError,
    ConfigConflictError,
    collected,
)

WISHES = get_args(SyncWish)
# How an adapter is sent as bytes.
BYTE_WAYS = {
    "http": "The engine is a server: the adapter is sent in the body of a request.",
    "object_store": "The engines are actors: the adapter is put into Ray's object store, once for all of them.",
}
# How full weights are sent, as the end of a sentence.
DENSE_WAYS = {
    "stream": "streamed into an engine on the baked base, in this process",
    "http": "sent to a server on the baked base, in requests or through a directory that both see, which loads it when "
    "all is there",
    "object_store": "sent through Ray's object store, in parts, to actors on the baked base, which load it when all is "
    "there",
}


@dataclass(frozen=True)
class SyncPlan:
    """The decision for a run (vocabulary of TRL #5188).

    Attributes:
        strategy: "lora_adapter" or "weights".
        transport: how the bytes are sent.
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


def plan_sync(
    verdict: Verdict,
    capabilities: EngineCapabilities | None = None,
    diff: Diff | None = None,
    wish: str = "auto",
    *,
    allow_base_mismatch: bool = False,
) -> SyncPlan:
    """Decide how the policy is synced.

    Args:
        verdict: of the adapter.
        capabilities: of the engine; without them only the adapter decides.
        diff: of the trainer's base and the engine's; without it nothing is said of the base.
        wish: "auto", "lora_adapter" or "weights".
        allow_base_mismatch: plan although the bases differ.

    Raises:
        BaseMismatchError: an adapter is nothing without its base, and the engine holds another one.
        AdapterRejectedError: the adapter cannot be synced as `wish` says; names every reason and the way out.
        ConfigConflictError: an unknown wish, an engine without LoRA, or one that cannot take full weights where they
            are needed.
    """
    if wish not in WISHES:
        raise ConfigConflictError(f"planning the sync: sync={wish!r} is not one of {WISHES}. Use 'auto'.")
    if verdict.kind == "reject":
        raise collected("planning the sync", verdict.reasons, AdapterRejectedError)
    if verdict.kind == "full_weights" and wish == "lora_adapter":
        raise collected(
            "planning the sync: sync='lora_adapter', but this adapter cannot be synced alone. Use sync='weights'",
            verdict.reasons,
            AdapterRejectedError,
        )
    if wish == "weights" or verdict.kind == "full_weights":
        return _dense(verdict, capabilities, diff, allow_base_mismatch)
    if capabilities is not None and not capabilities.takes_adapters:
        raise ConfigConflictError(
            f"planning the sync: {capabilities.name} was started without LoRA. Start it with "
            f"max_lora_rank={verdict.rank}."
        )
    if capabilities is not None and verdict.rank > capabilities.max_lora_rank:
        raise ConfigConflictError(
            f"planning the sync: rank={verdict.rank} > max_lora_rank={capabilities.max_lora_rank} of "
            f"{capabilities.name}. Start the engine with max_lora_rank={verdict.rank}."
        )
    if capabilities is not None and verdict.on_experts and not capabilities.adapts_experts:
        raise ConfigConflictError(
            f"planning the sync: the adapter is also on experts of a mixture, and {capabilities.name} does not serve "
            "that: vLLM's own kernels for experts take no adapter here, those for 4-bit experts do on a CPU. Adapt the "
            f"attention alone (target_modules={list(ATTENTION)}), or sample on a CPU with prepare_base(..., "
            "quantize_experts=True)."
        )
    reasons = [f"The adapter is plain LoRA of rank {verdict.rank}: only the adapter is synced."]
    transport = "directory"
    if capabilities is not None and capabilities.takes_in_place:
        transport = "in_place"
        reasons.append("The engine is in this process: the adapter is copied into its buffers.")
    elif capabilities is not None and capabilities.takes_bytes:
        transport = capabilities.byte_way
        reasons.append(BYTE_WAYS[transport])
    elif capabilities is not None:
        reasons.append("It is written into a directory that both sides see.")
    if diff is not None:
        reasons.append(_of_the_base(diff, allow_base_mismatch))
    return SyncPlan("lora_adapter", transport, tuple(reasons))


def _dense(
    verdict: Verdict, capabilities: EngineCapabilities | None, diff: Diff | None, is_mismatch_allowed: bool
) -> SyncPlan:
    reasons = list(verdict.reasons or ("sync='weights' was asked for; the adapter alone would be exact and smaller.",))
    if capabilities is not None and not capabilities.takes_dense:
        raise collected(
            f"planning the sync: this adapter can be synced as full weights only, and {capabilities.name} cannot take "
            "them: a 4-bit base would read them as packed codes, a mixture of experts keeps its own in an order of "
            "vLLM's, and a server takes them only without LoRA. Serve the baked base without LoRA, "
            "LocalEngine(bake_base(base), max_lora_rank=0) or `qlora-rl serve BAKED --max-lora-rank 0`, or pass "
            "rollout='colocate' or 'server', which do this automatically",
            reasons,
            ConfigConflictError,
        )
    way = capabilities.dense_way if capabilities is not None else "stream"
    reasons.append(f"Every weight is dequantised, adapted in float32 and {DENSE_WAYS[way]}.")
    if diff is not None:
        reasons.append(_of_the_base(diff, is_mismatch_allowed))
    return SyncPlan("weights", way, tuple(reasons))


def _of_the_base(diff: Diff, is_allowed: bool) -> str:
    if diff.state == "equal":
        return "Both sides hold the same base."
    if diff.state == "repairable":
        return f"The engine's scales are rounded at {len(diff.entries)} weights; repair_base writes them back."
    if is_allowed:
        return f"The engine holds another base ({len(diff.entries)} differences), which the caller allows."
    raise BaseMismatchError(
        f"planning the sync: the engine holds another base, for which this adapter was not trained: {diff.entries[0]} "
        f"({len(diff.entries)} differences in all). Start it on the trainer's own base directory.",
        reasons=[str(entry) for entry in diff.entries],
        module=diff.entries[0].name,
    )
