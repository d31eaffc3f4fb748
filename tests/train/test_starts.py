"""Starts and learning rates of PEFT's optimizers under our trainers."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from resumed import adapter, make

from qlora_rl import load_base


@pytest.mark.parametrize(("warmup", "part"), [(0, 1.0), (4, 0.5)])
def test_lora_plus_trains_b_with_its_own_learning_rate_and_the_adapter_is_synced_alone(base, tmp_path, warmup, part):
    model = get_peft_model(load_base(base), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0)
    with make(
        base, tmp_path / "run", "fake", existing="reject", model=model, peft_config=None, max_steps=2,
        optimizers=(optimizer, None), lr_scheduler_type="constant_with_warmup", warmup_steps=warmup, save_strategy="no",
    ) as trainer:  # fmt: skip
        trainer.train()
        assert trainer.plan.strategy == "lora_adapter"
        rates = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
        trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        assert {rates[id(p)] for name, p in trained.items() if "lora_A" in name} == {part * 1e-3}
        assert {rates[id(p)] for name, p in trained.items() if "lora_B" in name} == {part * 1.6e-2}
        assert all(p.any() for name, p in trained.items() if "lora_B" in name)


def test_rslora_under_a_schedule_is_plain_lora_with_alpha_times_the_root_of_its_rank_bit_for_bit(base, tmp_path):
    asked = {"max_steps": 4, "lr_scheduler_type": "cosine", "warmup_steps": 1, "save_strategy": "no"}
    trained = {}
    for name, factor in (("rslora", {"lora_alpha": 8, "use_rslora": True}), ("plain", {"lora_alpha": 16})):
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **factor)
        with make(base, tmp_path / name, "fake", existing="reject", peft_config=config, **asked) as trainer:
            trainer.train()
            assert trainer.plan.strategy == "lora_adapter"
        trained[name] = adapter(tmp_path / name)
    assert trained["rslora"].keys() == trained["plain"].keys()
    assert all(torch.equal(trained["rslora"][name], value) for name, value in trained["plain"].items())
    assert any(value.any() for name, value in trained["plain"].items() if "lora_B" in name)
