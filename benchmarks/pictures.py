"""GRPO with images on the job of notebook 206: in one process, through a server, and TRL's own way.

`python benchmarks/pictures.py` writes results/pictures.json; half an hour on two idle cores. Each training is a process
of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rounds import add_to, described

RESULTS = Path(__file__).parent / "results" / "pictures.json"
WAYS = ("colocate", "server", "trl-merge")
STEPS, LONGEST_ANSWER, MODEL_LENGTH = 200, 4, 96


def row(number: int) -> dict[str, Any]:
    """A picture, a question about its shape or its colour, and the answer."""
    from qlora_rl.demo.picture_model import QUESTIONS, make_picture

    picture, kind = make_picture(number), "shape" if number % 2 else "colour"
    return {
        "prompt": [{"role": "user", "content": QUESTIONS[kind]}],
        "image": picture.image,
        "answer": getattr(picture, kind),
    }


def is_right(completions: Any, answer: Any, **_: Any) -> list[float]:
    """One for the right word."""
    said = [completion[0]["content"].strip() for completion in completions]
    return [float(each == right) for each, right in zip(said, answer, strict=True)]


def accuracy(model: Any, processor: Any) -> float:
    """Share of 200 held-out questions that the trainer's model answers rightly, sampled by transformers at temperature
    1 (greedily it was right before)."""
    asked = [row(number) for number in range(5_000, 5_200)]
    right = 0
    for start in range(0, len(asked), 50):
        part = asked[start : start + 50]
        texts = [
            processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text",
                "text": each["prompt"][0]["content"]}]}],
                add_generation_prompt=True,
                tokenize=False,
            )
            for each in part
        ]  # fmt: skip
        inputs = processor(text=texts, images=[[each["image"]] for each in part], padding=True, padding_side="left",
        return_tensors="pt")  # fmt: skip
        torch.manual_seed(start)
        with torch.no_grad():
            ids = model.generate(**inputs, max_new_tokens=LONGEST_ANSWER, do_sample=True, top_k=0)
        said = processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(text.strip() == each["answer"] for text, each in zip(said, part, strict=True))
    return right / len(asked)


def train(base: Path, way: str, steps: int, out: Path) -> dict[str, Any]:
    """GRPO on the questions, with rollouts made in one of the three ways."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoProcessor
    from trl import GRPOConfig

    from qlora_rl import QLoRAGRPOTrainer, load_base, start_server
    from qlora_rl.base.checkpoint import open_base
    from qlora_rl.base.model_classes import LANGUAGE_LINEARS
    from qlora_rl.demo.job import quieten, summarise_steps
    from qlora_rl.demo.merge import MergingTrainer
    from qlora_rl.train.run import METRICS, RunDirectory

    quieten()
    held = open_base(base)
    config = GRPOConfig(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=128, num_generations=8,
        max_completion_length=LONGEST_ANSWER, learning_rate=8e-4, lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        vllm_max_model_length=None if way == "server" else MODEL_LENGTH, use_cpu=not torch.cuda.is_available(),
        bf16=True,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "reward_funcs": is_right,
        "args": config,
        "train_dataset": Dataset.from_list([row(number) for number in range(10_000, 10_800)]),
        "peft_config": LoraConfig(r=16, lora_alpha=32, target_modules=LANGUAGE_LINEARS),
    }
    with ExitStack() as stack:
        if way == "trl-merge":
            config.use_vllm = True
            processor = AutoProcessor.from_pretrained(held.path)
            trainer: Any = MergingTrainer(run=RunDirectory(out), model=load_base(held), processing_class=processor,
            **arguments)  # fmt: skip
        else:
            rollout: dict[str, Any] = {"engine_options": {"use_tqdm_on_load": False}}
            if way == "server":
                server = stack.enter_context(start_server(held, max_lora_rank=16, max_model_length=MODEL_LENGTH))
                os.environ["QLORA_RL_API_KEY"], rollout = server.key, {"rollout": server.url}
            trainer = QLoRAGRPOTrainer(model=held, **rollout, **arguments)
        stack.callback(trainer.close)
        before = accuracy(trainer.model, trainer.processing_class)
        trainer.train()
        rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
        return {
            "accuracy_before": before,
            "accuracy_after": accuracy(trainer.model, trainer.processing_class),
            **summarise_steps(rows),
        }


def _report(step: int, steps: int, loss: float) -> None:
    if step % 50 == 0:
        print(f"pretraining: step {step} of {steps}, loss {loss:.3f}", flush=True)


def _in_a_process(base: Path, way: str, steps: int, work: Path) -> dict[str, Any]:
    """`train`, or the error that it ends with."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(base), way, str(steps), str(work)],
        capture_output=True, text=True, timeout=3600,
    )  # fmt: skip
    answer = work / "answer.json"
    if answer.is_file():
        return json.loads(answer.read_text())
    print(done.stderr[-3000:], file=sys.stderr)
    lines = [line for line in done.stderr.splitlines() if "Error: " in line]
    return {"error": lines[-1].split("]: ")[-1] if lines else f"exit {done.returncode}"}


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--child", nargs=4)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--model", type=Path, help="a model that is there; by default made on the spot")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    if arguments.child:
        base, way, steps, out = arguments.child
        found = train(Path(base), way, int(steps), Path(out) / "run")
        (Path(out) / "answer.json").write_text(json.dumps(found))
        return
    from qlora_rl import prepare_base
    from qlora_rl.demo.picture_model import make_picture_model

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        base = prepare_base(arguments.model or make_picture_model(progress=_report), out=root / "base")
        for way in [arguments.only] if arguments.only else WAYS:
            (root / way).mkdir()
            found = _in_a_process(base.path, way, arguments.steps, root / way)
            print(way, json.dumps(found, indent=1), flush=True)
            add_to(arguments.json, {way: described(found | {"steps": arguments.steps})})


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
