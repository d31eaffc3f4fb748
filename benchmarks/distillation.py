"""Distillation beside GRPO: sampled tokens to the same held-out accuracy, and the memory of a step.

    python benchmarks/distillation.py [--rows NAME ...]

writes results/distillation.json, row by row: rows that are in it are kept, unless they are named, and then only those
are measured. The task is that of notebook 207: SmolLM2-135M-Instruct (downloaded) is to answer in JSON with one field.
Measured is the share of greedy answers to 20 questions, which no run has seen, that are in this form, over the tokens
sampled until then. "distillation" is the notebook's first run, at a constant learning rate. GRPO is given 1 for an
answer in this form, 0.5 for other JSON, and 0.2 for what begins with "{".

Memory: live tensors of one step (2 x 32 + 512 or 1,024 tokens, the model of memory_step.py), with teachers on the
student's base that read the same prompt or 256 tokens more, beside GRPO.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import memory_step
import torch
from datasets import Dataset
from live_memory import Live
from peft import LoraConfig
from rounds import described
from transformers import TrainerCallback
from trl import DistillationConfig, GRPOConfig

from qlora_rl import FakeEngine, QLoRADistillationTrainer, QLoRAGRPOTrainer, load_base, prepare_base
from qlora_rl.demo.real_model import real_model

ROOT = Path(__file__).resolve().parent
RESULTS = ROOT / "results" / "distillation.json"
NOTEBOOK = ROOT.parent / "examples" / "notebooks" / "207-a-prompt-learned-into-the-weights.ipynb"
# Rows, their steps, and after how many of them is measured.
RUNS = {
    "distillation": (24, 4),
    "GRPO": (40, 8),
}
ROWS = [*RUNS, "memory"]
LENGTHS = (512, 1024)  # of completions, for the memory of a step
SHARED: dict[str, Any] = dict(
    max_completion_length=24,
    lr_scheduler_type="constant",
    gradient_checkpointing=False,
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
    logging_steps=1,
    save_strategy="no",
    report_to=[],
)


def task() -> dict[str, Any]:
    """What the notebook's cells of the task define: questions, examples, held-out questions, the form."""
    found: dict[str, Any] = {"json": json, "Dataset": Dataset}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        source = "".join(cell["source"])
        if "examples = {" in source:
            exec(compile(source, NOTEBOOK.name, "exec"), found)
    return found


class Measuring(TrainerCallback):
    """Of greedy answers to the held-out questions the share in the form, and the tokens that were sampled by then."""

    def __init__(self, every: int, of_task: dict[str, Any]) -> None:
        self.every, self.task = every, of_task
        self.found: list[dict[str, float]] = []
        self.trainer: Any = None

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step % self.every == 0:
            self.measure(state.global_step)

    def measure(self, step: int) -> None:
        model, tokenizer = self.trainer.model, self.trainer.processing_class
        chats = [self.task["ask"](question) for question in self.task["held_out"]]
        texts = [tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in chats]
        asked = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        was_training = model.training
        model.eval()
        ids = model.generate(**asked, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        model.train(was_training)
        said = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        lines = [json.loads(line) for line in (self.trainer.run.path / "metrics.jsonl").read_text().splitlines()]
        rows = self.trainer.args.per_device_train_batch_size * self.trainer.args.gradient_accumulation_steps
        self.found.append(
            {
                "step": step,
                "in_form": statistics.fmean(self.task["is_in_form"](each.strip()) for each in said),
                "tokens": round(sum(line["completion_length"] for line in lines) * rows),
                "loss": lines[-1]["loss"],
                "mismatch_kl": lines[-1]["mismatch_kl"],
                "reward": lines[-1].get("reward"),
                "said": said[0][:60],
            }
        )
        print(self.found[-1], flush=True)


def trained(name: str) -> dict[str, Any]:
    """One run."""
    of_task, (steps, every) = task(), RUNS[name]
    base, measuring = prepare_base(real_model()), Measuring(every, of_task)
    shared = dict(
        model=base,
        train_dataset=of_task["dataset"],
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        engine_options={"max_model_length": 256, "max_num_seqs": 32},
        callbacks=[measuring],
        existing_run="overwrite",
    )

    def rewarded(completions: list[Any], **_: Any) -> list[float]:
        texts = [each[0]["content"].strip() for each in completions]
        return [1.0 if of_task["is_in_form"](text) else _parts(text) for text in texts]

    with tempfile.TemporaryDirectory() as home:
        settings = SHARED | dict(max_steps=steps, output_dir=f"{home}/run")
        if name == "GRPO":
            settings |= dict(learning_rate=5e-4, num_generations=8)
            args: Any = GRPOConfig(**settings, per_device_train_batch_size=16)
            trainer: Any = QLoRAGRPOTrainer(**shared, args=args, reward_funcs=rewarded)
        else:
            settings |= dict(learning_rate=1e-3, beta=0.0)
            args = DistillationConfig(**settings, per_device_train_batch_size=4)
            teacher = dict(teacher_adapter="none", teacher_prompt="told")
            trainer = QLoRADistillationTrainer(**shared, **teacher, args=args)
        with trainer:
            measuring.trainer = trainer
            trainer.train()
    return {"points": measuring.found}


def _parts(text: str) -> float:
    try:
        json.loads(text)
    except ValueError:
        return 0.2 * text.startswith("{")
    return 0.5


def memory() -> dict[str, Any]:
    """MiB of live tensors in a step, by the tokens of a completion."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        base = memory_step.make_base(Path(directory) / "base")
        memory_step.LENGTHS = LENGTHS
        points = memory_step.measure("ours", base)
        found["GRPO"] = {str(length): points[str(length)]["live_mib"] for length in LENGTHS}
        longer = LoraConfig(r=8, target_modules="all-linear")
        for name, more in (("none", 0), ("none", 256), ("policy", 256), ("adapter", 256)):
            teacher: Any = name
            if name == "adapter":
                teacher = Path(directory) / "adapter"
                from peft import get_peft_model

                get_peft_model(load_base(base), longer).save_pretrained(teacher)
            found[f"{name}, {more} tokens more"] = _step_of(base, teacher, more, directory)
            print(name, more, found, flush=True)
    return found


def _step_of(base: Any, teacher: Any, more: int, directory: str) -> dict[str, float]:
    rows = Dataset.from_list([{"prompt": "1+1=", "told": f"2=1+{i}="} for i in range(8)])
    args = DistillationConfig(
        output_dir=f"{directory}/run", per_device_train_batch_size=2, use_cpu=True, bf16=True, report_to=[], beta=0.5
    )
    with (
        FakeEngine(load_base(base), max_model_length=64) as engine,
        QLoRADistillationTrainer(
            base,
            args=args,
            train_dataset=rows,
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
            rollout=engine,
            canary_every=0,
            teacher_adapter=teacher,
            teacher_prompt="told",
            existing_run="overwrite",
        ) as made,
    ):
        made.model.gradient_checkpointing_enable({"use_reentrant": False})
        made.model.train()
        peaks = {}
        for length in (16, *LENGTHS):
            ids = torch.randint(3, memory_step.VOCABULARY, (2, more + memory_step.PROMPT + length))
            batch = {
                "teacher_prompt_ids": ids[:, : more + memory_step.PROMPT],
                "prompt_ids": ids[:, more : more + memory_step.PROMPT],
                "completion_ids": ids[:, -length:],
            }
            batch |= {name.replace("ids", "mask"): torch.ones_like(each) for name, each in batch.items()}
            batch["completion_mask"][0, -length // 8 :] = 0
            made.model.zero_grad()
            made._unscored = 2  # as in training, where what was sampled is scored, too
            with Live() as live:
                made.compute_loss(made.model, batch).backward()
            if length > 16:
                peaks[str(length)] = live.peak / 2**20
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="NAME", help="measure these, again if need be")
    named = parser.parse_args().rows
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"rows": {}}
    for name in named or [row for row in ROWS if row not in found["rows"]]:
        found["rows"][name] = memory() if name == "memory" else trained(name)
        found = described({"command": "python benchmarks/distillation.py", "rows": found["rows"]})
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
