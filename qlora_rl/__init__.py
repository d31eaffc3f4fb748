"""QLoRA fine-tuning where the sampler holds the trainer's 4-bit base and only the LoRA adapter is synced.

Importing this package loads nothing but the standard library; each public name brings in what it needs when it is
first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "prepare_base": "qlora_rl.base.checkpoint",
    "load_base": "qlora_rl.base.checkpoint",
    "bake_base": "qlora_rl.base.bake",
    "PreparedBase": "qlora_rl.base.checkpoint",
    "QuantSpec": "qlora_rl.base.quant",
    "fingerprint_base": "qlora_rl.base.fingerprint",
    "compare": "qlora_rl.base.fingerprint",
    "verify_base": "qlora_rl.sync.base_check",
    "judge_adapter": "qlora_rl.adapter.verdict",
    "export_adapter": "qlora_rl.adapter.export",
    "read_adapter": "qlora_rl.adapter.export",
    "start_adapter": "qlora_rl.adapter.initialization",
    "plan_memory": "qlora_rl.memory.plan",
    "MemoryEstimate": "qlora_rl.memory.plan",
    "recommend": "qlora_rl.advice",
    "Recommendation": "qlora_rl.advice",
    "plan_sync": "qlora_rl.sync.plan",
    "Canary": "qlora_rl.sync.canary",
    "AdapterSync": "qlora_rl.sync.strategies",
    "DenseSync": "qlora_rl.sync.full_weights",
    "iter_weights": "qlora_rl.adapter.merged_weights",
    "LocalEngine": "qlora_rl.engine.local",
    "ServerEngine": "qlora_rl.engine.client",
    "connect": "qlora_rl.engine.fleet",
    "RayFleet": "qlora_rl.engine.fleet",
    "serve": "qlora_rl.engine.server",
    "start_server": "qlora_rl.engine.server",
    "borrow_base": "qlora_rl.engine.local",
    "FakeEngine": "qlora_rl.engine.fake",
    "ImagePrompt": "qlora_rl.engine.images",
    "SamplingSpec": "qlora_rl.contracts",
    "SyncReport": "qlora_rl.contracts",
    "FidelityMonitor": "qlora_rl.fidelity",
    "QLoRAGRPOTrainer": "qlora_rl.train.grpo",
    "QLoRARLOOTrainer": "qlora_rl.train.rloo",
    "QLoRAOnlineDPOTrainer": "qlora_rl.train.online_dpo",
    "QLoRADistillationTrainer": "qlora_rl.train.distillation",
    "QLoRASFTTrainer": "qlora_rl.train.offline",
    "QLoRADPOTrainer": "qlora_rl.train.offline",
    "QLoRAKTOTrainer": "qlora_rl.train.offline",
    "attach": "qlora_rl.train.attach",
    "Adapters": "qlora_rl.train.adapters",
    "TrainingRow": "qlora_rl.train.scoring.losses",
    "export_run": "qlora_rl.export.job",
    "open_trained": "qlora_rl.inference.trained",
    "QLoRAAsyncGRPOTrainer": "qlora_rl.train.async_grpo",
}
_ERRORS = [
    "AccessDeniedError",
    "AdapterRejectedError",
    "BaseIncompleteError",
    "BaseMismatchError",
    "CanaryError",
    "CannotShareError",
    "ConfigConflictError",
    "EngineBrokenError",
    "EngineBusyError",
    "EngineClosedError",
    "EngineUnsupportedError",
    "ExportError",
    "MemoryBudgetError",
    "MissingDependencyError",
    "NotYetSupportedError",
    "PeerLostError",
    "PolicyMismatchError",
    "PromptTooLongError",
    "QloraRLError",
    "RewardFunctionError",
    "RolloutCancelledError",
    "RunDirectoryError",
    "ServerTakenError",
    "SyncError",
    "UnsupportedQuantError",
    "VersionGoneError",
]
_HOMES |= dict.fromkeys(_ERRORS, "qlora_rl.errors")

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qlora_rl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
