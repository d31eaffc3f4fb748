"""Policies that see: GRPO and RLOO with images in the prompts, sampled by real vLLM on the trainer's own 4-bit base."""

import json
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoProcessor
from trl import GRPOConfig, RLOOConfig
from vision import make_vision_model, picture

from qlora_rl import (
    AdapterRejectedError,
    ConfigConflictError,
    NotYetSupportedError,
    PolicyMismatchError,
    QLoRAAsyncGRPOTrainer,
    QLoRAGRPOTrainer,
    QLoRARLOOTrainer,
    prepare_base,
)
from qlora_rl.cli import main
from qlora_rl.config.launch import launch
from qlora_rl.config.read import read_config
from qlora_rl.config.text import to_toml
from qlora_rl.engine.images import ImagePrompt
from qlora_rl.export.job import LIMIT, export_run
from qlora_rl.inference.chat import Conversation
from qlora_rl.inference.prompts import model_inputs, with_images
from qlora_rl.inference.trained import open_trained

pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")
LANGUAGE = r"model\.language_model\..*_proj"
QUESTION = [{"role": "user", "content": "bright?"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    return prepare_base(make_vision_model(root / "source", "qwen2_5_vl"), out=root / "base")


def shade(is_bright, seed):
    """Dark or bright noise."""
    low = 160 if is_bright else 0
    return Image.fromarray(np.random.default_rng(seed).integers(low, low + 96, (56, 56, 3), dtype=np.uint8))


def says_bright(ids):
    return ids[0] >= 64


def sees(completion_ids, bright, **_):
    """1 where the first token is of the upper half for a bright picture, of the lower half for a dark one."""
    return [float(says_bright(ids) == is_bright) for ids, is_bright in zip(completion_ids, bright, strict=True)]


def config(kind, out, **fields):
    fields = {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4, "max_steps": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant", "vllm_max_model_length": 96, "beta": 0.0, "use_cpu": True, "bf16": True,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, **fields,
    }  # fmt: skip
    return kind(output_dir=str(out), **fields)


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def accuracy(trainer, seeds):
    """Over pictures that were not trained on."""
    processor = AutoProcessor.from_pretrained(trainer.base.path)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION[0]["content"]}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    right = []
    for seed in seeds:
        image = shade(seed % 2 == 0, seed)
        ids = processor(text=[text], images=[image])["input_ids"][0]
        sampled = trainer.engine.generate([ImagePrompt(ids, (image,))] * 4, max_tokens=1, seed=seed).completion_ids
        right += [says_bright(row) == (seed % 2 == 0) for row in sampled]
    return sum(right) / len(right)


def test_a_policy_learns_what_only_the_picture_shows(base, tmp_path):
    rows = [{"prompt": QUESTION, "image": shade(i % 2 == 0, i), "bright": i % 2 == 0} for i in range(32)]
    args = config(
        GRPOConfig, tmp_path, per_device_train_batch_size=32, num_generations=8, max_completion_length=1, max_steps=60
    )
    with QLoRAGRPOTrainer(
        model=base,
        reward_funcs=sees,
        args=args,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=LANGUAGE),
    ) as trainer:
        before = accuracy(trainer, range(100, 120))
        trainer.train()
        after = accuracy(trainer, range(100, 120))
    assert after > before + 0.35  # measured: 0.49 -> 0.99
    found = lines(tmp_path)
    assert max(line["mismatch_kl"] for line in found) < 1e-3
    assert {line["base_verified"] for line in found} == {1.0}
    for kind in ("adapter", "merged"):
        assert export_run(tmp_path, kind, out=tmp_path / f"as-{kind}", prompts=2).distance.kl_mean < LIMIT
    assert "AutoModelForImageTextToText.from_pretrained" in (tmp_path / "as-merged" / "README.md").read_text()
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["base_held"]["copies"] == 1
    assert {"pixels", "vision tower, one pass"} <= {line["name"] for line in about["memory"]["lines"]}
    assert about["memory"]["request"]["image_tokens"] == 95  # vllm_max_model_length less the completion


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "column"),
    [(QLoRAGRPOTrainer, GRPOConfig, "images"), (QLoRARLOOTrainer, RLOOConfig, "images"), (QLoRAGRPOTrainer, GRPOConfig,
    "image")],
)  # fmt: skip
def test_prompts_with_several_images_one_and_none_share_a_batch(base, tmp_path, trainer_class, config_class, column):
    images = [[picture(1)], [picture(2), picture(3, 84)], [picture(5, 84, 112)], None, [], [], [picture(4)], []]
    if column == "image":
        images = [each[0] if each else None for each in images]
    rows = Dataset.from_list([{"prompt": QUESTION, column: each} for each in images * 2])
    seen = []

    def reward(completions, **columns):
        seen.extend(columns[column])
        return [random.Random(str(each)).random() for each in completions]

    # Two prompts a rollout and one a micro-batch: some of either are without an image.
    args = config(
        config_class, tmp_path, per_device_train_batch_size=2, num_generations=2, gradient_accumulation_steps=2,
        max_steps=8, learning_rate=1e-4,
    )  # fmt: skip
    with trainer_class(
        model=base,
        reward_funcs=reward,
        args=args,
        train_dataset=rows,
        peft_config=LoraConfig(r=8, target_modules=LANGUAGE),
    ) as trainer:
        trainer.train()
    found = lines(tmp_path)
    assert len(found) == 8
    # One epoch, in which each row stands twice, and two completions of each.
    assert sum(not each for each in seen) == sum(not each for each in images) * 4
    assert max(line["mismatch_kl"] for line in found) < 1e-3
    assert all(line["grad_norm"] > 0 for line in found if "grad_norm" in line)


def test_a_run_from_a_file_is_evaluated_and_talked_to_with_images(base, tmp_path, capfd):
    (tmp_path / "seen").mkdir()
    rows = []
    for number in range(8):
        shade(number % 2 == 0, number).save(tmp_path / "seen" / f"{number}.png")
        rows.append({"question": "bright?", "photo": f"seen/{number}.png", "answer": "1"})
    rows[3]["photo"] = None
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "method": "grpo", "base": {"model": str(base.path)}, "adapter": {"r": 4, "target_modules": LANGUAGE},
        "data": {"train": "rows.jsonl", "images": "photo", "format": "chat", "columns": {"prompt": "question"}},
        "rewards": [{"use": "length_match", "arguments": {"at_most": 4}}], "run": {"dir": str(tmp_path / "run")},
        "train": {"max_steps": 1, "per_device_train_batch_size": 8, "num_generations": 2, "max_completion_length": 4,
            "vllm_max_model_length": 64},
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(to_toml(document))
    run = launch(read_config(tmp_path / "run.toml"))
    kept = json.loads((run / "rollouts.json").read_text())["first"]["prompt"]
    assert kept[0]["content"][0]["image"].startswith("data:image/jpeg;base64,")
    assert main(["eval", str(run), "--data", str(tmp_path / "rows.jsonl"), "--limit", "4", "--max-tokens", "3"]) == 0
    shown = [row["prompt"][0]["content"] for row in json.loads((run / "eval.json").read_text())["rows"]]
    assert [isinstance(content, str) for content in shown] == [False, False, False, True]
    assert "4 prompts" in capfd.readouterr().out

    talk = Conversation(open_trained(run), temperature=0.0, max_tokens=4)
    answers = []
    for image in (shade(True, 0), shade(False, 1)):
        talk.forget()
        prompt = with_images([{"role": "user", "content": "bright?"}], [image])
        given = model_inputs(talk.tokenizer, prompt)
        sampled = list(talk._sample(dict(given)))
        # Without a cache: all of it again for each token, the image's positions included.
        ids, types = given["input_ids"], given["mm_token_type_ids"]
        for token in sampled:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                logits = talk._model(**given | {"input_ids": ids, "mm_token_type_ids": types}).logits[0, -1].float()
            assert logits.max() - logits[token] < 0.1  # of bf16; another position or image is further off
            ids, types = (
                torch.cat([ids, torch.tensor([[token]])], 1),
                torch.cat([types, torch.zeros(1, 1, dtype=types.dtype)], 1),
            )
        answers.append("".join(talk.answer("bright?", [image])))
        assert answers[-1] == talk.tokenizer.decode(sampled, skip_special_tokens=True)
    assert answers[0] != answers[1]
    assert len(talk._said) == 2
    with pytest.raises(ConfigConflictError, match="images are parts of messages"):
        next(Conversation(open_trained(run), uses_template=False).answer("bright?", [image]))


def test_what_cannot_be_sampled_with_images_is_rejected_before_anything_is_loaded(base, tmp_path):
    rows = Dataset.from_list([{"prompt": QUESTION, "image": picture(1), "bright": True}] * 4)
    common = {"model": base, "reward_funcs": sees, "train_dataset": rows}
    lora = LoraConfig(r=8, target_modules=LANGUAGE)
    args = config(GRPOConfig, tmp_path)
    with pytest.raises(NotYetSupportedError, match="QLoRAAsyncGRPOTrainer"):
        QLoRAAsyncGRPOTrainer(**common, args=args, peft_config=lora)
    with pytest.raises(ConfigConflictError, match="4-bit"):
        QLoRAGRPOTrainer(**common, args=args, sync="weights")
    other = AutoProcessor.from_pretrained(base.path)
    other.image_processor.image_mean = [0.0, 0.0, 0.0]
    with pytest.raises(ConfigConflictError, match="image_mean"):
        QLoRAGRPOTrainer(**common, args=args, peft_config=lora, processing_class=other)
    everywhere = LoraConfig(r=8, target_modules="all-linear")
    with pytest.raises(
        AdapterRejectedError, match=r"model\.visual\.blocks\.0\.attn\.\w+ and \d+ more belong to the vision tower"
    ):
        QLoRAGRPOTrainer(**common, args=args, peft_config=everywhere, sync="lora_adapter")


@pytest.mark.parametrize("kind", ["DoRA", "tower", "whole"])
def test_what_no_adapter_carries_is_synced_as_full_weights(base, tmp_path, kind):
    rows = Dataset.from_list(
        [{"prompt": QUESTION, "image": shade(i % 2 == 0, i), "bright": i % 2 == 0} for i in range(16)]
    )
    how = {
        "DoRA": {"model": base, "peft_config": LoraConfig(r=8, target_modules=LANGUAGE, use_dora=True)},
        "tower": {"model": base, "peft_config": LoraConfig(r=8, target_modules="all-linear")},
        "whole": {"model": prepare_base(base.path.parent / "source", "none", out=tmp_path / "base"), "sync": "weights"},
    }[kind]  # fmt: skip
    args = config(GRPOConfig, tmp_path / "run", max_completion_length=1, max_steps=3, learning_rate=1e-3)
    with QLoRAGRPOTrainer(reward_funcs=sees, args=args, train_dataset=rows, canary_every=1, **how) as trainer:
        trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
        assert any("visual" in name for name in trained) is (kind != "DoRA")
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if name in trained}
        trainer.train()
        moved = {
            name for name, p in trainer.model.named_parameters() if name in trained and not torch.equal(p, before[name])
        }
    assert any("visual" in name for name in moved) is (kind != "DoRA")
    for line in lines(tmp_path / "run"):
        assert line["canary_difference"] < 0.02
        assert line["mismatch_kl"] < 1e-2


# By default one of two; that Gemma 3 samples with images as the trainer does is in test_vision.py.
@pytest.mark.parametrize("architecture", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.full)])
def test_a_broken_sync_is_named_though_the_prompts_hold_images(architecture, tmp_path, monkeypatch):
    base = prepare_base(make_vision_model(tmp_path / "source", architecture), out=tmp_path / "base")
    rows = [{"prompt": QUESTION, "images": [picture(i)] if i % 4 else [], "bright": i % 2 == 0} for i in range(16)]
    args = config(GRPOConfig, tmp_path / "run", per_device_train_batch_size=16, max_steps=8, learning_rate=2e-2)
    trainer = QLoRAGRPOTrainer(
        model=base, reward_funcs=sees, args=args, train_dataset=Dataset.from_list(rows), canary_every=0,
        peft_config=LoraConfig(r=8, target_modules=LANGUAGE),
    )  # fmt: skip
    strategy, real, count = trainer.bridge.strategy, trainer.bridge.strategy.push, []
    held = trainer.engine.held_adapter

    def push():
        report = real()
        count.append(report.version)
        if len(count) > 3:  # as if the buffers were right, and the multiplication twice too strong
            digests = held(8)
            placed = strategy.transport._live[-1]
            for name, place in placed.slots.places[placed.slot].items():
                if "lora_B" in name:
                    place.mul_(2.0)
            monkeypatch.setattr(trainer.engine, "held_adapter", lambda rank: digests)
        return report

    monkeypatch.setattr(strategy, "push", push)
    with trainer, pytest.raises(PolicyMismatchError) as stopped:
        trainer.train()
    assert trainer.state.global_step in (3, 4)
    assert (stopped.value.cause, "2 times as strongly" in str(stopped.value)) == ("scale", True)
