"""`judge_adapter`: is this adapter synced as plain LoRA, as full weights, or not at all?

The rules (adapter/rules.py) are read in order over the live PEFT model. Every rule that finds something adds a reason;
the gravest kind wins. A directory is opened as a live model without weights first (adapter/directory.py), and goes
through the same rules.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.adapter.directory import OpenedAdapter, open_adapter
from qlora_rl.adapter.inspected import InspectedAdapter, active_adapter, ranks_of
from qlora_rl.adapter.rules import RULES, Finding, Kind
from qlora_rl.base.experts import is_expert_matrix
from qlora_rl.contracts import EngineCapabilities

_GRAVITY: dict[Kind, int] = {"adapter": 0, "full_weights": 1, "reject": 2}


@dataclass(frozen=True)
class Verdict:
    """How an adapter can be synced.

    Attributes:
        kind: "adapter" (plain LoRA: only the adapter is synced), "full_weights" (dequantised full weights are synced)
            or `"reject"` (unsupported).
        reasons: one sentence per rule that spoke, each with the way out, those that decide first; empty for plain LoRA.
        rank: largest R of its modules (0 where there is none).
        method: PEFT's name of it, such as "LORA"; "" without an adapter.
        on_experts: some of it are adapters on a mixture's experts, which few engines serve.
    """

    kind: Kind
    reasons: tuple[str, ...]
    rank: int = 0
    method: str = "LORA"
    on_experts: bool = False

    def __bool__(self) -> bool:
        return self.kind == "adapter"


def judge_config(model: Any, peft_config: Any) -> Verdict:
    """Judge an adapter that has not been made yet, on a model without values (`outline`), which takes it on.

    Args:
        model: bare, all tensors on the meta device; a PeftModel afterwards.
        peft_config: the adapter's; not changed.

    Raises:
        Whatever PEFT does when it cannot make the adapter on such a model (some initialisations need values).
    """
    import copy

    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):  # the adapter's own initialisation comes later, and must not depend on this
        return judge_adapter(get_peft_model(model, copy.deepcopy(peft_config)))


def judge_adapter(
    model_or_directory: Any,
    capabilities: EngineCapabilities | None = None,
    *,
    base: str | os.PathLike[str] | None = None,
) -> Verdict:
    """Judge the active adapter of a live PeftModel, or a PEFT directory.

    Args:
        model_or_directory: a PeftModel, or the directory of an adapter or of a run.
        capabilities: of the engine that is to serve it; by default the limits of vLLM.
        base: for a directory: the base that it is meant for (a checkpoint or a prepared base), whose names and shapes
            it must fit. By default the one that the directory names, where that is a directory here.

    Returns:
        The verdict; pure, nothing is changed or moved.

    Raises:
        AdapterRejectedError: there is no such directory, it holds no adapter, or `base` is none.
    """
    if isinstance(model_or_directory, str | os.PathLike):
        return judge_opened(open_adapter(model_or_directory, base), capabilities)
    if base is not None:
        raise TypeError("judge_adapter: base= is for directories; a live model has its own.")
    if getattr(model_or_directory, "_hf_peft_config_loaded", False):
        return _none(
            "The adapter was added by transformers' own add_adapter or load_adapter. Pass a PeftModel (get_peft_model)."
        )
    if not hasattr(model_or_directory, "peft_config"):
        return _none("The model carries no adapter. Pass peft_config=LoraConfig(...), or a PeftModel.")
    if not hasattr(model_or_directory, "get_base_model"):
        return _none(f"A {type(model_or_directory).__name__} may mix methods. Pass a PeftModel with one LoRA.")
    return _judged(model_or_directory, capabilities)


def judge_opened(opened: OpenedAdapter, capabilities: EngineCapabilities | None = None) -> Verdict:
    """Judge a directory that was opened already."""
    return _judged(opened.model, capabilities, opened.findings, opened.method, opened.misfits)


def _none(reason: str) -> Verdict:
    return Verdict("reject", (reason,), 0, "")


def _judged(
    model: Any,
    capabilities: EngineCapabilities | None,
    findings: tuple[Finding, ...] = (),
    method: str = "",
    misfits: tuple[Finding, ...] = (),
) -> Verdict:
    found, rank, on_experts = list(findings), 0, False
    if model is not None:
        inspected = InspectedAdapter(model, active_adapter(model), capabilities)
        found += [finding for rule in RULES for finding in rule(inspected)]
        rank = max((ranks_of(layer, inspected.adapter) for layer in inspected.layers.values()), default=0)
        method = inspected.method
        on_experts = any(is_expert_matrix(f"{name}.weight") for name in inspected.layers)
    found = sorted(found or misfits, key=lambda finding: -_GRAVITY[finding[0]])
    kind: Kind = found[0][0] if found else "adapter"
    return Verdict(kind, tuple(dict.fromkeys(reason for _, reason in found)), rank, method, on_experts)
