"""SFT and DPO as they are trained, against the memory estimate of these methods."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import tiny_training
from trl import DPOConfig, SFTConfig

from qlora_rl import QLoRADPOTrainer, QLoRASFTTrainer, plan_memory, prepare_base
from qlora_rl.bench.live import Live
from qlora_rl.bench.shapes import Shape, make_model
from qlora_rl.ledger.shape import read_config

TOKENS = 640


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A base that is wide enough for its layers to be most of a step."""
    work = tmp_path_factory.mktemp("wide")
    return prepare_base(make_model(work / "model", Shape(256, 768, 2, 4, 2), positions=TOKENS), out=work / "base")


@pytest.mark.parametrize(("method", "batch"), [("sft", 2), ("dpo", 1)])
def test_a_step_is_within_5_percent_of_the_estimate(method, batch, wide, tmp_path):
    """Two sequences of the longest length, in both."""
    trainer, config, row = {
        "sft": (QLoRASFTTrainer, SFTConfig, {"text": "1+2=" * TOKENS}),
        "dpo": (QLoRADPOTrainer, DPOConfig, {"prompt": "1+2=", "chosen": "3" * TOKENS, "rejected": "4" * TOKENS}),
    }[method]
    fields = {
        "gradient_checkpointing": True,
        "per_device_train_batch_size": batch,
        "max_length": TOKENS,
        "max_steps": 1,
    }
    args = config(**tiny_training(output_dir=str(tmp_path), **fields))
    lora = LoraConfig(r=16, target_modules="all-linear")
    with trainer(wide, args=args, train_dataset=Dataset.from_list([row] * 4), peft_config=lora) as made:
        with torch.no_grad():
            for name, parameter in made.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.01)
        step, peaks = made.training_step, []

        def counted(*given):
            made.model.zero_grad()
            with Live() as live:
                loss = step(*given)
            peaks.append(live.peak)
            return loss

        made.training_step = counted
        made.train()
    request = {"method": method, "batch_size": batch, "max_length": TOKENS, "device": "cpu", "spec": wide.spec}
    planned = plan_memory(read_config(wide.path), lora=lora, **request)
    assert peaks == [pytest.approx(planned.step_bytes, rel=0.05)]
