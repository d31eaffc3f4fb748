"""Training on a plain 4-bit base, on calibrated ones and on 16 bits: the same seeds, data and settings.

    python benchmarks/calibrated_training.py [--rows NAME ...]

writes results/calibrated_training.json, row by row: rows that are in it are kept, unless they are named, and then only
those are measured. SmolLM2-135M-Instruct (downloaded) learns to answer sums of two numbers up to 19: by SFT to write
{"answer": 12}, by GRPO that the last number is right. Measured on sums that no run has seen: the share of greedy
answers with the right number. A seed decides the adapter's start, the order of rows and what is sampled. Seconds are
of the processor. One base is calibrated on the text that comes with the package.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rounds import described
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, SFTConfig

from qlora_rl import PreparedBase, QLoRAGRPOTrainer, QLoRASFTTrainer, load_base, prepare_base
from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.demo.real_model import real_model
from qlora_rl.demo.real_project.rewards import right_number
from qlora_rl.rewards.numbers import final_number

RESULTS = Path(__file__).parent / "results" / "calibrated_training.json"
LARGEST, HELD_OUT = 19, 48
BASES = ("16 bits", "plain NF4", "NF4, shipped text")
SEEDS = (0, 1, 2)
STEPS = (50, 100)  # after which a run is measured
ROWS = [f"start, {base}" for base in BASES]
ROWS += [f"{method}, {base}, seed {seed}" for method in ("SFT", "GRPO") for seed in SEEDS for base in BASES]
SHARED: dict[str, Any] = dict(
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    save_strategy="no",
    report_to="none",
    lr_scheduler_type="constant_with_warmup",
)
CONFIGS: dict[str, dict[str, Any]] = {
    "SFT": dict(learning_rate=5e-4, warmup_steps=5, per_device_train_batch_size=3, gradient_checkpointing=False),
    "GRPO": dict(
        learning_rate=2e-4,
        warmup_steps=3,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=16,
        vllm_max_model_length=80,
    ),
}


def sums() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """To train on, and held out: `prompt` and `completion` as messages, `answer` as text."""
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    random.Random(0).shuffle(pairs)
    rows = [
        {
            # Without a system message the template would write a long one.
            "prompt": [
                {"role": "system", "content": ""},
                {"role": "user", "content": f'What is {a} plus {b}? Answer in this form: {{"answer": 7}}'},
            ],
            "completion": [{"role": "assistant", "content": json.dumps({"answer": a + b})}],
            "answer": str(a + b),
        }
        for a, b in pairs
    ]
    return rows[HELD_OUT:], rows[:HELD_OUT]


@torch.no_grad()
def measured(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The share of right numbers in a policy's greedy answers to `rows`."""
    was_training = model.training
    model.eval()
    prompts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    asked = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    ids = model.generate(**asked, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    model.train(was_training)
    texts = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    said = zip(texts, rows, strict=True)
    return {"right": statistics.fmean(final_number(text) == int(row["answer"]) for text, row in said)}


class Measuring(TrainerCallback):
    """Measures after some of the steps."""

    def __init__(self, steps: tuple[int, ...], rows: list[dict[str, Any]]) -> None:
        self.steps, self.rows = steps, rows
        self.found: dict[str, dict[str, float]] = {}
        self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step in self.steps:
            began = time.process_time()
            self.found[str(state.global_step)] = measured(given["model"], given["processing_class"], self.rows)
            self.seconds += time.process_time() - began


def trained(method: str, base: PreparedBase, seed: int) -> dict[str, Any]:
    """A run: what was measured, by the step, and the seconds of a step."""
    train, held_out = sums()
    measuring = Measuring(STEPS, held_out)
    columns = {"SFT": ("prompt", "completion"), "GRPO": ("prompt", "answer")}[method]
    shared = dict(
        model=base,
        train_dataset=Dataset.from_list([{name: row[name] for name in columns} for row in train]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[measuring],
    )
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as home:
        settings = SHARED | CONFIGS[method] | dict(output_dir=f"{home}/run", seed=seed, max_steps=STEPS[-1])
        if method == "SFT":
            trainer: Any = QLoRASFTTrainer(**shared, args=SFTConfig(**settings))
        else:
            trainer = QLoRAGRPOTrainer(**shared, args=GRPOConfig(**settings), reward_funcs=right_number)
        with trainer:
            began = time.process_time()
            trainer.train()
            seconds = time.process_time() - began - measuring.seconds
    del trainer
    gc.collect()
    return {"seconds_a_step": seconds / STEPS[-1], "steps": measuring.found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="NAME", help="measure these, again if need be")
    named = parser.parse_args().rows
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"rows": {}}
    source, (train, held_out) = real_model(), sums()
    tokenizer = AutoTokenizer.from_pretrained(source)
    for name in named or [row for row in ROWS if row not in found["rows"]]:
        base_name = next(each for each in BASES if f", {each}" in name)
        method, seed = name.split(",")[0], name.rpartition(" ")[2]
        base = prepare_base(source, "none" if base_name == BASES[0] else "nf4", calibrate=base_name == BASES[2])
        if method == "start":
            with Float32Products(torch.bfloat16):
                row = {"steps": {"0": measured(load_base(base), tokenizer, held_out)}}
        else:
            row = trained(method, base, int(seed))
        found["rows"][name] = row | {"torch_kernels": torch.backends.cpu.get_cpu_capability()}
        found = described({"held_out": HELD_OUT, "trained_on": len(train), "settings": CONFIGS, "rows": found["rows"]})
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(name, row, flush=True)


if __name__ == "__main__":
    main()
