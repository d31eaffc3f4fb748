"""Every trainer that samples learns on real vLLM and real bitsandbytes, on one engine; `attach` starts its own."""

import json
import os

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import DistillationConfig, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from qlora_rl import (
    QLoRADistillationTrainer,
    QLoRAGRPOTrainer,
    QLoRAOnlineDPOTrainer,
    QLoRARLOOTrainer,
    attach,
)

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.online_dpo import OnlineDPOConfig

ROWS = Dataset.from_list([{"prompt": f"{a}+{a}="} for a in range(10, 42)])
STEPS = 20
GROUP = {"num_generations": 8, "max_completion_length": 4, "per_device_train_batch_size": 32}
KINDS = {
    "grpo": (QLoRAGRPOTrainer, GRPOConfig, GROUP),
    "rloo": (QLoRARLOOTrainer, RLOOConfig, GROUP | {"beta": 0.0}),
    "online_dpo": (
        QLoRAOnlineDPOTrainer,
        OnlineDPOConfig,
        {"max_new_tokens": 4, "max_length": 32, "per_device_train_batch_size": 16, "temperature": 1.0},
    ),
}


def reward_sevens(completions, **_):
    """Share of the digit 7: about 1 in 100 of what a random model says."""
    return [text.count("7") / 4 for text in completions]


def fields(directory, **own):
    return {
        "output_dir": str(directory),
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": True,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        **own,
    }


def adapter():
    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reward_rises_and_the_engine_stays_with_the_policy(kind, base, engine, tmp_path):
    trainer, config, own = KINDS[kind]
    torch.manual_seed(0)
    with trainer(
        model=base,
        reward_funcs=reward_sevens,
        train_dataset=ROWS,
        peft_config=adapter(),
        rollout=engine,
        args=config(**fields(tmp_path, **own)),
    ) as made:
        made.train()
    steps = lines(tmp_path)
    rewards = [step["reward"] for step in steps]
    print(kind, "rewards", [round(r, 2) for r in rewards])
    print(kind, "mismatch", max(step["mismatch_kl"] for step in steps))
    assert len(steps) == STEPS
    assert mean(rewards[:3]) < 0.1
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.25
    # bf16 against bf16 at a learning rate far above any sane one; a version too old would be far above.
    assert torch.tensor([step["mismatch_kl"] for step in steps]).median() < 5e-4
    assert [step["policy_version"] for step in steps] == list(range(engine.version - STEPS + 1, engine.version + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_mean_the_tokens_that_truncated_sampling_keeps(kind, base, engine, tmp_path):
    trainer, config, own = KINDS[kind]
    engine.drop_adapter()
    with trainer(
        model=base,
        reward_funcs=reward_sevens,
        train_dataset=ROWS,
        peft_config=adapter(),
        rollout=engine,
        args=config(**fields(tmp_path, **own | {"top_p": 0.7, "temperature": 0.8, "max_steps": 3})),
    ) as made:
        made.train()
    found = [step["mismatch_kl"] for step in lines(tmp_path)]
    print(kind, "mismatch", found)
    assert max(found) < 1e-3


@pytest.mark.parametrize("truncated", [{}, {"top_p": 0.8}], ids=str)
def test_a_student_learns_what_its_prompt_said_and_the_engine_stays_with_it(truncated, base, engine, tmp_path):
    rows = ROWS.map(lambda row: {"told": f"7777{row['prompt']}"})
    own = {"max_completion_length": 4, "per_device_train_batch_size": 16, "max_steps": 10, **truncated}
    torch.manual_seed(0)
    with QLoRADistillationTrainer(
        base,
        args=DistillationConfig(**fields(tmp_path, **own)),
        train_dataset=rows,
        peft_config=adapter(),
        teacher_adapter="none",
        teacher_prompt="told",
        rollout=engine,
    ) as made:
        made.train()
    steps = lines(tmp_path)
    losses = [step["loss"] for step in steps]
    print("losses", losses, "mismatch", max(step["mismatch_kl"] for step in steps))
    assert mean(losses[-3:]) < 0.6 * mean(losses[:2])
    assert torch.tensor([step["mismatch_kl"] for step in steps]).median() < 5e-4
    assert [step["policy_version"] for step in steps] == list(range(engine.version - 9, engine.version + 1))


@pytest.mark.parametrize(("kind", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_a_trainer_of_trl_learns_with_an_engine_attached(kind, config, model_dir, tmp_path):
    trainer = of_trl(kind, config, model_dir, tmp_path)
    with attach(trainer) as held:
        assert held.base_check.is_verified
        assert len(held.base_check.repaired) == 14  # vLLM's loader rounds the scales of a doubly quantised base
        trainer.train()
        logs = [log for log in trainer.state.log_history if "reward" in log]
        rewards = [log["reward"] for log in logs]
        print(kind.__name__, "rewards", [round(r, 2) for r in rewards])
        assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.25
        assert torch.tensor([log["qlora_rl/mismatch_kl"] for log in logs]).median() < 5e-4
        assert held.engine.version == STEPS
    assert held.engine._is_closed


def test_an_attached_trainer_scores_what_truncated_sampling_keeps_while_it_is_attached(model_dir, tmp_path):
    trainer = of_trl(GRPOTrainer, GRPOConfig, model_dir, tmp_path, top_p=0.7, max_steps=2)
    bare = trainer.model.get_base_model()
    before = bare.forward.__func__
    with attach(trainer) as held:
        trainer.train()
        assert [log for log in trainer.state.log_history if "reward" in log]
        assert held.fidelity.last.mismatch_kl < 1e-3
        assert bare.forward.__func__ is not before
    assert bare.forward.__func__ is before


def of_trl(kind, config, model_dir, directory, **own):
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return kind(
        model=AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=nf4, dtype=torch.bfloat16),
        processing_class=AutoTokenizer.from_pretrained(model_dir, padding_side="left"),
        reward_funcs=reward_sevens,
        train_dataset=ROWS,
        peft_config=adapter(),
        args=config(**fields(directory, **GROUP, beta=0.0, vllm_max_model_length=32, **own)),
    )
