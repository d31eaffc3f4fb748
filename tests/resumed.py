"""A run that is killed and goes on: what is trained, in a process of its own, and what must be equal in the end."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

# What a clock shows, and what depends on how fast a thread is.
TIMES = ("seconds", "_per_s", "runtime", "_per_second", "step_time", "rollouts_ready")


def reward_digits(completions, **_):
    """Share of digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def make(
    base, out, engine, *, existing="resume", pause_s=0.0, trainer=None, config=None, reward=reward_digits, **fields
):
    """A small run on `base`, of GRPO by default; `engine`: "fake", or what the trainer takes as rollout=."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig

    from qlora_rl import QLoRAGRPOTrainer, load_base
    from qlora_rl.engine.fake import FakeEngine

    def slow_reward(completions, **columns):
        time.sleep(pause_s)
        return reward(completions, **columns)

    extra = {
        k: fields.pop(k)
        for k in (
            "train_dataset",
            "eval_dataset",
            "peft_config",
            "model",
            "adapter_dtype",
            "rollout",
            "optimizers",
            "max_staleness",
            "canary_every",
            "sync",
            "engine_options",
        )
        if k in fields
    }
    settings = {
        "output_dir": str(out),
        "max_steps": 20,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "learning_rate": 1e-2,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_steps": 10,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": True,
        **fields,
    }
    arguments = {
        "model": base,
        "train_dataset": Dataset.from_list([{"prompt": f"{10 + i}+{11 + i}="} for i in range(16)]),
        "peft_config": LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "down_proj"]),
        "rollout": FakeEngine(load_base(base), max_model_length=64) if engine == "fake" else engine,
        **extra,
    }
    if engine in ("colocate", "server"):
        settings["vllm_max_model_length"] = 32
    kind, config = trainer or QLoRAGRPOTrainer, config or GRPOConfig
    known = {each.name for each in dataclasses.fields(config)}
    args = config(**{name: value for name, value in settings.items() if name in known})
    return kind(reward_funcs=slow_reward, args=args, existing_run=existing, **arguments)


def lines(out, name="metrics.jsonl"):
    """The lines of a .jsonl file, without what a clock shows."""
    found = [json.loads(line) for line in (Path(out) / name).read_text().splitlines()]
    return [{k: v for k, v in line.items() if not any(t in k for t in TIMES)} for line in found]


def history(out):
    """What trackers were told, without what a clock shows: the log history in the newest checkpoint."""
    from qlora_rl.train.run.checkpoints import last_whole

    found = json.loads((last_whole(Path(out)) / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in line.items() if not any(t in k for t in TIMES)} for line in found]


def without_proofs(found):
    """The first push after a beginning is scored, whatever the cadence says: the one difference."""
    return [{k: v for k, v in line.items() if not k.endswith("canary_difference")} for line in found]


def adapter(out):
    """The trained tensors in the run directory."""
    from safetensors.torch import load_file

    return load_file(Path(out) / "adapter" / "adapter_model.safetensors")


def assert_same_run(out, reference):
    """Adapter, metrics, pushes and log of both are equal, bit for bit, but for times."""
    import torch

    ours, theirs = adapter(out), adapter(reference)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert without_proofs(lines(out)) == without_proofs(lines(reference))
    assert without_proofs(lines(out, "sync.jsonl")) == without_proofs(lines(reference, "sync.jsonl"))
    assert without_proofs(history(out)) == without_proofs(history(reference))


def run(base, out, engine, **fields):
    """Train to the end, in this process."""
    from transformers import TrainerCallback

    class Begun(TrainerCallback):
        """Leaves a file when training begins, for whoever wants to kill it then."""

        def on_train_begin(self, args, state, control, **_):
            (Path(out) / f"begun-{os.getpid()}").touch()

    with make(base, out, engine, **fields) as trainer:
        trainer.add_callback(Begun())
        trainer.train()


if __name__ == "__main__":
    call = json.loads(sys.argv[1])
    run(call.pop("base"), call.pop("out"), call.pop("engine"), **call)
