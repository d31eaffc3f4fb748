"""Starts of LoRA on a base that stays as it is: what `start_adapter` is asked for and given, and a few steps of
training."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from kinds import lora
from peft import LoftQConfig
from peft.optimizers import create_loraplus_optimizer
from peft.tuners.lora.config import CordaConfig, EvaConfig

from qlora_rl import start_adapter

IDS = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(0))
BATCHES = [{"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}]
STARTS: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter": {"init_lora_weights": "pissa_niter_8"},
    "olora": {"init_lora_weights": "olora"},
    "olora, rsLoRA, patterns": {
        "init_lora_weights": "olora",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"down_proj": 3},
    },
    "corda": {"init_lora_weights": "corda", "corda_config": CordaConfig(corda_method="kpm")},
    "loftq": {"init_lora_weights": "loftq", "loftq_config": LoftQConfig()},
    "eva": {"init_lora_weights": "eva", "eva_config": EvaConfig(rho=1.0)},
    "rsLoRA": {"use_rslora": True},
    "LoRA+": {},
}
TWICE = [name for name in STARTS if name.startswith(("pissa", "olora", "corda"))]


def started(base: Any, name: str, original: Any) -> Any:
    """A PeftModel on `base`, which may be changed only by what is put into it."""
    torch.manual_seed(0)
    more = {"corda": {"batches": BATCHES}, "eva": {"batches": BATCHES}, "loftq": {"original": original}}.get(name, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return start_adapter(base, lora(**STARTS[name]), **more)


def steps(model: Any, count: int, *, decay: float = 0.0, ratio: float = 1.0) -> list[float]:
    """Clipped steps of AdamW; the gradients' norms. `ratio` is LoRA+'s, of the learning rates of B and A."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = (
        torch.optim.AdamW(trained, lr=1e-3, weight_decay=decay)
        if ratio == 1.0
        else create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=ratio)
    )
    norms = []
    for _ in range(count):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        if hasattr(model, "qlora_start"):
            model.qlora_start.restore()
    return norms
