"""A trainer on the tiny base with `FakeEngine`: no vLLM, one or two steps, completions of at most three tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from recorded import Recorded
from support import tiny_training


def by_place(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs within every group, so that every step has a gradient."""
    return [float(i % 2) for i in range(len(completions))]


@pytest.fixture(scope="session")
def engine(base):
    """One engine for all tests: every trainer pushes its own adapter before it generates."""
    from qlora_rl import load_base
    from qlora_rl.engine.fake import FakeEngine

    with FakeEngine(load_base(base), max_model_length=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def exact(model_dir):
    """A float32 base, and an engine on it."""
    from qlora_rl import load_base, prepare_base
    from qlora_rl.engine.fake import FakeEngine

    base = prepare_base(model_dir, "none", compute_dtype="float32")
    with FakeEngine(load_base(base), max_model_length=64) as engine:
        yield base, engine


@pytest.fixture(scope="session")
def engine_in_flight(model_dir):
    """One on the base that bitsandbytes makes of the tiny model while transformers loads it: another base than the
    prepared one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from qlora_rl import load_base, prepare_base
    from qlora_rl.engine.fake import FakeEngine

    quant = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, quantization_config=quant)
    base = prepare_base(model, tokenizer=AutoTokenizer.from_pretrained(model_dir))
    with FakeEngine(load_base(base), max_model_length=64) as engine:
        yield engine


@pytest.fixture(scope="session")
def plain():
    """A dataset of plain prompts."""
    from datasets import Dataset

    return Dataset.from_list([{"prompt": f"{10 + i}+{11 + i}=", "answer": str(21 + 2 * i)} for i in range(8)])


@pytest.fixture
def config(tmp_path) -> Callable[..., Any]:
    """GRPOConfig for one short step; arguments replace its own."""

    def make(**fields: Any) -> Any:
        from trl import GRPOConfig

        tiny = tiny_training(output_dir=str(tmp_path / "run"), max_steps=1, num_generations=2, max_completion_length=3)
        return GRPOConfig(**tiny | fields)

    return make


@pytest.fixture
def lora() -> Any:
    """A new adapter."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])


@pytest.fixture
def make_trainer(base, engine, plain, config, lora):
    """QLoRAGRPOTrainer on the tiny base with a new adapter; arguments replace the usual ones."""
    made = []

    def make(**arguments: Any) -> Any:
        from qlora_rl import QLoRAGRPOTrainer

        usual = {
            "model": base,
            "reward_funcs": by_place,
            "train_dataset": plain,
            "peft_config": lora,
            "rollout": engine,
        } | arguments
        if "args" not in usual:
            usual["args"] = config()
        made.append(QLoRAGRPOTrainer(**usual))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def make_online(base, engine, plain, lora, tmp_path):
    """QLoRARLOOTrainer or QLoRAOnlineDPOTrainer with FakeEngine; arguments replace the usual ones, `fields` those of
    its config."""
    from online_kinds import KINDS, TINY
    from online_kinds import by_place as reward

    made = []

    def build(kind, fields=None, **arguments):
        trainer, config, own = KINDS[kind]
        usual = {
            "model": base,
            "reward_funcs": reward,
            "train_dataset": plain,
            "peft_config": lora,
            "rollout": engine,
        }
        args = config(**TINY | own | {"output_dir": str(tmp_path / "run")} | (fields or {}))
        made.append(trainer(**usual | arguments, args=args))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()


@pytest.fixture
def colocate(monkeypatch):
    """`rollout="colocate"` without vLLM."""
    Recorded.made.clear()
    monkeypatch.setattr("qlora_rl.engine.local.LocalEngine", Recorded)
    monkeypatch.setattr("qlora_rl.engine.compat.vllm_version", lambda: "0.31.0")
    return Recorded.made
