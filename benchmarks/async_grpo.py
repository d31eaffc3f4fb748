"""What it is worth to draw rollouts while training, where the environment waits: GRPO against async GRPO, on the demo's
task.

    python benchmarks/async_grpo.py [--steps 60] [--seeds 0 1] [--wait 0.5] [--json benchmarks/results/async.json]

The reward of every batch comes half a second late, as from an environment or a judge that has to be asked. Everything
else is the demo's: tiny model, NF4, LoRA of rank 16, greedy accuracy on sums never trained on; 64 completions a step.
The kinds take turns, seed by seed. About ten minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from rounds import measured_at
from sync import ROOT
from trl import GRPOConfig

from qlora_rl import QLoRAAsyncGRPOTrainer, QLoRAGRPOTrainer, prepare_base
from qlora_rl.adapter.store import default_root
from qlora_rl.demo import task
from qlora_rl.demo.job import quieten
from qlora_rl.demo.tiny_model import answer_greedily, make_tiny_model
from qlora_rl.train.run import describe_machine, describe_versions

# Trainer, max_staleness, where the rollouts come from.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": (QLoRAGRPOTrainer, {"rollout": "colocate"}),
    "async 1": (QLoRAAsyncGRPOTrainer, {"rollout": "colocate", "max_staleness": 1}),
    "async 2": (QLoRAAsyncGRPOTrainer, {"rollout": "colocate", "max_staleness": 2}),
    "grpo, server": (QLoRAGRPOTrainer, {"rollout": "server"}),
    "async 1, server": (QLoRAAsyncGRPOTrainer, {"rollout": "server", "max_staleness": 1}),
}
FIRST = 5  # steps that fill the pipe, and vLLM's first ones


def late(wait_s: float, **columns: Any) -> list[float]:
    """The demo's reward, later."""
    time.sleep(wait_s)
    return task.reward_exact_match(**columns)


def accuracy(trainer: Any) -> float:
    """Share of the held-out sums that the policy gets right."""
    asked = task.problems("held_out")
    answers = answer_greedily(trainer.model, trainer.processing_class, asked)
    return sum(got == problem.answer for got, problem in zip(answers, asked, strict=True)) / len(asked)


def train(base: Any, out: Path, kind: str, steps: int, seed: int, wait_s: float) -> dict[str, float]:
    """One run."""
    reward = functools.partial(late, wait_s)
    reward.__name__ = "late"
    trainer_class, ours = KINDS[kind]
    config = GRPOConfig(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=task.LONGEST_ANSWER + 1,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        beta=0.0,
        seed=seed,
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        vllm_max_model_length=32,
        model_init_kwargs={"attn_implementation": "eager"},
    )
    with trainer_class(
        model=base,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(task.grpo_rows(seed, 600)),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        **ours,
    ) as trainer:
        before = accuracy(trainer)
        trainer.train()
        after = accuracy(trainer)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = rows[FIRST:]
    return {
        "accuracy_before": before,
        "accuracy_after": after,
        "reward_last": statistics.fmean(row["reward"] for row in rows[-5:]),
        "steps_per_s": len(kept) / sum(row["step_seconds"] for row in kept),
        "staleness_mean": statistics.fmean(row.get("staleness_mean", 0.0) for row in rows),
        "staleness_max": max(row.get("staleness_max", 0) for row in rows),
        "trainer_wait_seconds": statistics.median(row.get("trainer_wait_seconds", 0.0) for row in kept),
        "mismatch_kl_median": statistics.median(row["mismatch_kl"] for row in rows),
    }


def measure(
    work: Path,
    *,
    steps: int = 60,
    seeds: Sequence[int] = (0, 1),
    kinds: Sequence[str] = tuple(KINDS),
    wait_s: float = 0.5,
) -> dict[str, dict[str, dict[str, float]]]:
    """Every kind with every seed."""
    base = prepare_base(make_tiny_model(), "nf4")
    found: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in kinds}
    for seed in seeds:
        for kind in kinds:
            out = work / f"{kind.replace(', ', '-').replace(' ', '-')}-{seed}"
            found[kind][str(seed)] = run = train(base, out, kind, steps, seed, wait_s)
            print(kind, seed, {name: round(value, 3) for name, value in run.items()}, flush=True)
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--wait", type=float, default=0.5)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "async.json")
    arguments = parser.parse_args()
    quieten()
    with tempfile.TemporaryDirectory(dir=default_root()) as work:
        runs = measure(
            Path(work), steps=arguments.steps, seeds=arguments.seeds, kinds=arguments.kinds, wait_s=arguments.wait
        )
    commit = measured_at()
    about = {"commit": commit, "versions": describe_versions(), "machine": describe_machine()}
    result = about | {"steps": arguments.steps, "wait_s": arguments.wait, "kinds": runs}
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
