"""Supervised fine-tuning of a vision-language model: it learns what only the picture shows, and its first loss is
TRL's."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoConfig, AutoProcessor
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from vision import make_vision_model

from qlora_rl import (
    ConfigConflictError,
    NotYetSupportedError,
    QLoRADPOTrainer,
    QLoRASFTTrainer,
    load_base,
    prepare_base,
)
from qlora_rl.config.launch import launch
from qlora_rl.config.read import read_config
from qlora_rl.config.text import to_toml
from qlora_rl.inference.prompts import model_inputs, with_images

pytest.importorskip("torchvision", reason="set-up installs it where the package index has it")
LANGUAGE = r"model\.language_model\..*_proj"
QUESTION = [{"role": "user", "content": "bright?"}]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    made = make_vision_model(tmp_path_factory.mktemp("vision") / "model")
    return prepare_base(made, out=tmp_path_factory.mktemp("bases") / "base")


def shade(number):
    """Bright noise for even numbers, dark for odd ones."""
    low = 0 if number % 2 else 160
    return Image.fromarray(np.random.default_rng(number).integers(low, low + 96, (56, 56, 3), dtype=np.uint8))


def row(number, images=None):
    answer = [{"role": "assistant", "content": "0" if number % 2 else "1"}]
    return {"prompt": QUESTION, "completion": answer, "images": [shade(number)] if images is None else images}


def arguments(out, **fields):
    usual = {
        "per_device_train_batch_size": 8, "learning_rate": 5e-3, "max_steps": 30, "logging_steps": 1, "use_cpu": True,
        "bf16": True,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return SFTConfig(output_dir=str(out), **usual | fields)


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def share_right(trainer, numbers):
    """Of the answers 0 and 1, how much of their probability the right one has, over pictures."""
    model, processor = trainer.model.eval(), trainer.processing_class
    found = []
    for number in numbers:
        given = model_inputs(processor, with_images(QUESTION, [shade(number)]))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(**given).logits[0, -1].float()
        pair = logits[[processor.tokenizer(text)["input_ids"][0] for text in "01"]].softmax(-1)
        found.append(pair[0 if number % 2 else 1].item())
    model.train()
    return sum(found) / len(found)


def test_it_learns_what_only_the_picture_shows(base, tmp_path):
    rows = [row(number, [] if number % 8 == 7 else None) for number in range(64)]  # some have none
    with QLoRASFTTrainer(
        model=base,
        args=arguments(tmp_path / "run"),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=LANGUAGE),
    ) as trainer:
        before = share_right(trainer, range(100, 116))
        trainer.train()
        after = share_right(trainer, range(100, 116))
    assert after > 0.9 > 0.65 > before
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] / 2
    about = json.loads((tmp_path / "run" / "config.json").read_text())
    assert about["adapter"]["travels_as"] == "adapter"


def test_its_first_losses_are_trls(base, tmp_path):
    rows = Dataset.from_list([row(number) for number in range(16)])
    lora = LoraConfig(r=8, target_modules=LANGUAGE)
    fields = {"max_steps": 2, "learning_rate": 0.0, "seed": 1}
    with QLoRASFTTrainer(
        model=base,
        args=arguments(tmp_path / "ours", **fields),
        train_dataset=rows,
        peft_config=lora,
    ) as trainer:
        trainer.train()
        processor = trainer.processing_class
    theirs = SFTTrainer(
        model=load_base(base),
        args=arguments(tmp_path / "theirs", **fields),
        train_dataset=rows,
        processing_class=processor,
        peft_config=lora,
    )
    theirs.train()
    assert losses(tmp_path / "ours") == pytest.approx(
        [line["loss"] for line in theirs.state.log_history if "loss" in line], rel=2e-3
    )


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_a_run_of_a_file_learns_from_images_too(base, tmp_path, method):
    for number in range(8):
        shade(number).save(tmp_path / f"{number}.png")
    rows = [{"q": "bright?", "a": "0" if n % 2 else "1", "photo": f"{n}.png"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    if method == "dpo":
        rows = [
            {"q": each["q"], "a": each["a"], "photo": each["photo"], "worse": "01"[each["a"] == "0"]} for each in rows
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    columns = {"sft": {"prompt": "q", "completion": "a"}, "dpo": {"prompt": "q", "chosen": "a", "rejected": "worse"}}
    document = {
        "method": method, "base": {"model": str(base.path)}, "adapter": {"r": 4, "target_modules": LANGUAGE},
        "data": {"train": "rows.jsonl", "images": "photo", "format": "chat", "columns": columns[method]},
        "train": {"max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3},
        "run": {"dir": str(tmp_path / "run")},
    }  # fmt: skip
    (tmp_path / "run.toml").write_text(to_toml(document))
    run = launch(read_config(tmp_path / "run.toml"))
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run / "adapter" / "adapter_model.safetensors").is_file()


def pair(number, images=None):
    right, wrong = ([{"role": "assistant", "content": text}] for text in ("01" if number % 2 else "10"))
    return {
        "prompt": QUESTION,
        "chosen": right,
        "rejected": wrong,
        "images": [shade(number)] if images is None else images,
    }


def preferring(out, **fields):
    usual = {
        name: value
        for name, value in arguments(out).to_dict().items()
        if name in ("per_device_train_batch_size", "save_strategy", "report_to")
    }
    return DPOConfig(
        output_dir=str(out), use_cpu=True, bf16=True, disable_tqdm=True, logging_steps=1, lr_scheduler_type="constant",
        **usual | fields
    )  # fmt: skip


def test_preferences_that_only_the_picture_explains_are_learned_and_the_losses_are_trls(base, tmp_path):
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=LANGUAGE)
    mixed = Dataset.from_list([pair(number, [] if number % 8 == 7 else None) for number in range(64)])
    args = preferring(tmp_path / "run", max_steps=30, learning_rate=3e-3)
    with QLoRADPOTrainer(model=base, args=args, train_dataset=mixed, peft_config=lora) as trainer:
        before = share_right(trainer, range(100, 116))
        trainer.train()
        assert share_right(trainer, range(100, 116)) > 0.9 > 0.65 > before
    rows, fields = (
        Dataset.from_list([pair(number) for number in range(16)]),
        {"max_steps": 3, "learning_rate": 3e-3, "seed": 1},
    )
    with QLoRADPOTrainer(
        model=base, args=preferring(tmp_path / "ours", **fields), train_dataset=rows, peft_config=lora
    ) as trainer:
        trainer.train()
        processor = trainer.processing_class
    theirs = DPOTrainer(
        model=load_base(base), args=preferring(tmp_path / "theirs", **fields), train_dataset=rows,
        processing_class=processor, peft_config=lora,
    )  # fmt: skip
    theirs.train()
    logged = [line["loss"] for line in theirs.state.log_history if "loss" in line]
    assert losses(tmp_path / "ours") == pytest.approx(logged, rel=2e-3)


def test_what_takes_no_images_says_so(base, tmp_path):
    lora = LoraConfig(r=8, target_modules=LANGUAGE)
    (tmp_path / "text").mkdir()
    AutoConfig.for_model("qwen2").save_pretrained(tmp_path / "text")
    rows = Dataset.from_list([row(0)])
    with pytest.raises(NotYetSupportedError, match="text takes none"):
        QLoRASFTTrainer(model=tmp_path / "text", args=arguments(tmp_path / "a"), train_dataset=rows, peft_config=lora)
    other = make_vision_model(tmp_path / "other")

    processor = AutoProcessor.from_pretrained(other)
    processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28}
    with pytest.raises(ConfigConflictError, match="image processor"):
        QLoRASFTTrainer(
            model=base, args=arguments(tmp_path / "b"), train_dataset=rows, peft_config=lora, processing_class=processor
        )
