"""`Terms`: what a sender and a receiver are made from; `AdapterSyncScheme` gives it."""

from __future__ import annotations

from typing import Protocol

import torch

from qlora_rl.torchrl.rpc import RPCLayer
from qlora_rl.torchrl.transfer import Transfer


class Terms(Protocol):
    """The arguments of `AdapterSyncScheme`, the same on both sides."""

    rpc: RPCLayer
    transfer: Transfer
    sync: str
    timeout_s: float
    canary_every: int
    autocast: torch.dtype | None
    allow_base_mismatch: bool
