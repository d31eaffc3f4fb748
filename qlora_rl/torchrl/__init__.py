"""TorchRL's weight sync for adapters: a scheme whose two layers, RPC and transfer, can each be replaced."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "AdapterSyncScheme": "qlora_rl.torchrl.scheme",
    "AdapterSender": "qlora_rl.torchrl.sender",
    "AdapterReceiver": "qlora_rl.torchrl.receiver",
    "get_model_metadata": "qlora_rl.torchrl.metadata",
    "Channel": "qlora_rl.torchrl.rpc",
    "RPCLayer": "qlora_rl.torchrl.rpc",
    "InProcessRPC": "qlora_rl.torchrl.rpc",
    "MultiprocessingRPC": "qlora_rl.torchrl.rpc",
    "Transfer": "qlora_rl.torchrl.transfer",
    "DirectoryTransfer": "qlora_rl.torchrl.transfer",
    "BodyTransfer": "qlora_rl.torchrl.transfer",
    "BroadcastTransfer": "qlora_rl.torchrl.transfer",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qlora_rl.torchrl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
