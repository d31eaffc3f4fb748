"""SFT, DPO, KTO and distillation as they are trained, against the memory estimate of these methods."""

import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import make_model as tiny_model
from support import program, tiny_training
from trl import DistillationConfig, DPOConfig, KTOConfig, SFTConfig

from qlora_rl import (
    FakeEngine,
    QLoRADistillationTrainer,
    QLoRADPOTrainer,
    QLoRAKTOTrainer,
    QLoRASFTTrainer,
    load_base,
    plan_memory,
    prepare_base,
)
from qlora_rl.base.experts import ATTENTION
from qlora_rl.memory.shape import read_config

Live = program("benchmarks/live_memory.py").Live
shapes = program("benchmarks/shapes.py")
Shape, make_model = shapes.Shape, shapes.make_model

TOKENS = 640


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A base that is wide enough for its layers to be most of a step."""
    work = tmp_path_factory.mktemp("wide")
    return prepare_base(make_model(work / "model", Shape(256, 768, 2, 4, 2), positions=TOKENS), out=work / "base")


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """In 4 bits and fused in 16, wide enough for their layers to be most of a step; of 8 experts, or of 32, 2 are
    chosen."""
    work, bases = tmp_path_factory.mktemp("mixture"), {}
    for kind, experts, width in (("4 bits", 8, 512), ("many", 32, 256), ("fused", 8, 512)):
        shape = {"head_dim": 128, "positions": TOKENS, "num_experts": experts, "moe_intermediate_size": width}
        model = tiny_model(work / f"{kind}-model", architecture="qwen3_moe", **shape)
        bases[kind] = prepare_base(model, out=work / kind, quantize_experts=kind != "fused")
    return bases


@pytest.mark.parametrize(("method", "batch"), [("sft", 2), ("dpo", 1), ("kto", 2)])
def test_a_step_is_within_10_percent_of_the_estimate(method, batch, wide, tmp_path):
    """Two sequences of the longest length, in both."""
    measure_step(method, batch, wide, LoraConfig(r=16, target_modules="all-linear"), tmp_path, within=0.1)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("4 bits", "all-linear"),
        ("4 bits", list(ATTENTION)),
        ("4 bits", [*ATTENTION, "experts.3.down_proj"]),
        ("many", list(ATTENTION)),
        ("fused", list(ATTENTION)),
    ],
)
def test_so_is_a_step_of_a_mixture(kind, targets, mixtures, tmp_path):
    measure_step("sft", 2, mixtures[kind], LoraConfig(r=8, target_modules=targets), tmp_path, within=0.1)


def measure_step(method, batch, base, lora, tmp_path, within):
    """The peak of live tensors of one step, against the estimate."""
    trainer, config, row = {
        "sft": (QLoRASFTTrainer, SFTConfig, {"text": "".join(random.Random(0).choices("0123456789+=", k=TOKENS))}),
        "dpo": (QLoRADPOTrainer, DPOConfig, {"prompt": "1+2=", "chosen": "3" * TOKENS, "rejected": "4" * TOKENS}),
        "kto": (QLoRAKTOTrainer, KTOConfig, {"prompt": "1+2=", "completion": "3" * TOKENS, "label": True}),
    }[method]
    fields = {
        "gradient_checkpointing": True,
        "per_device_train_batch_size": batch,
        "max_length": TOKENS,
        "max_steps": 1,
    }
    args = config(**tiny_training(output_dir=str(tmp_path), **fields))
    with trainer(base, args=args, train_dataset=Dataset.from_list([row] * 4), peft_config=lora) as made:
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
    request = {"method": method, "batch_size": batch, "max_length": TOKENS, "device": "cpu", "spec": base.spec}
    planned = plan_memory(read_config(base.path), lora=lora, **request)
    assert peaks == [pytest.approx(planned.step_bytes, rel=within)]


@pytest.fixture(scope="module")
def worded(tmp_path_factory):
    """As `wide`, with 16,384 words."""
    work = tmp_path_factory.mktemp("worded")
    shape = Shape(256, 768, 2, 4, 2, vocabulary=16_384)
    return prepare_base(make_model(work / "model", shape, positions=4 * TOKENS), out=work / "base")


@pytest.mark.parametrize(
    ("kind", "more", "top_k"),
    [("wide", 0, 0), ("worded", 0, 0), ("worded", 3 * TOKENS, 0), ("wide", 0, 20), ("worded", 0, 20)],
)
def test_so_is_a_step_of_distillation(kind, more, top_k, wide, worded, tmp_path):
    """On the student's base, with TRL's tiles, which are as wide as 32,768 words whatever the vocabulary is; with a
    teacher that reads four times as much; from a server's likeliest tokens, in float32."""
    base, lora = {"wide": wide, "worded": worded}[kind], LoraConfig(r=16, target_modules="all-linear")
    fields = {"gradient_checkpointing": True, "per_device_train_batch_size": 2, "max_completion_length": TOKENS - 8}
    args = DistillationConfig(**tiny_training(output_dir=str(tmp_path / "run"), max_steps=1, **fields))
    rows = Dataset.from_list([{"prompt": "1+2=", "told": "3=1+2="}] * 4)
    ids = torch.randint(3, 100, (2, TOKENS))
    batch = {"prompt_ids": ids[:, :4], "completion_ids": ids[:, 4:]}
    batch["teacher_prompt_ids"] = torch.randint(3, 100, (2, 4 + more))
    batch |= {name.replace("ids", "mask"): torch.ones_like(each) for name, each in batch.items()}
    batch["completion_mask"][1, -8:] = 0  # attention has masks where something is padded
    with (
        FakeEngine(load_base(base), max_model_length=TOKENS) as engine,
        QLoRADistillationTrainer(
            base,
            args=args,
            train_dataset=rows,
            peft_config=lora,
            rollout=engine,
            teacher_adapter="none",
            teacher_prompt="told",
        ) as made,
    ):
        if top_k:
            made.teacher_model, shape = None, (*batch["completion_ids"].shape, top_k + 1)
            batch["teacher_ids"] = torch.randint(100, shape)
            batch["teacher_logprobs"] = torch.randn(shape).log_softmax(-1)
        made.model.gradient_checkpointing_enable({"use_reentrant": False})
        made.model.train()
        made._unscored = 2  # as in training, where what was sampled is scored, too
        with Live() as live:
            made.compute_loss(made.model, batch).backward()
    request = {"method": "distill", "batch_size": 2, "max_length": TOKENS, "device": "cpu", "spec": base.spec}
    request |= {"teacher_more": more, "teacher_top_k": top_k}
    planned = plan_memory(read_config(base.path), lora=lora, **request)
    print(kind, more, top_k, live.peak / 2**20, planned.step_bytes / 2**20)
    assert live.peak == pytest.approx(planned.step_bytes, rel=0.1)
