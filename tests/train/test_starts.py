"""Starts and learning rates of PEFT's optimizers under our trainers."""

import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from resumed import make

from qlora_rl import load_base


def test_lora_plus_trains_b_with_its_own_learning_rate_and_the_adapter_is_synced_alone(base, tmp_path):
    model = get_peft_model(load_base(base), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)
    with make(
        base, tmp_path / "run", "fake", existing="refuse", model=model, peft_config=None, max_steps=2,
        optimizers=(optimizer, None), lr_scheduler_type="constant", save_strategy="no",
    ) as trainer:  # fmt: skip
        trainer.train()
        assert trainer.plan.strategy == "lora_adapter"
        rates = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
        trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        assert {rates[id(p)] for name, p in trained.items() if "lora_A" in name} == {1e-3}
        assert {rates[id(p)] for name, p in trained.items() if "lora_B" in name} == {1.6e-2}
        assert all(p.any() for name, p in trained.items() if "lora_B" in name)
