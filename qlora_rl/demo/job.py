"""`run_demo`: the main job, small: a 4-bit model that mostly forgets to carry learns to, by reinforcement."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from qlora_rl.cpu_features import processor
from qlora_rl.demo import task
from qlora_rl.engine.loading import quieten
from qlora_rl.errors import raise_where
from qlora_rl.report import quantities, read_run, write_report
from qlora_rl.train.run import SUMMARY, RunDirectory, describe_machine, describe_versions

logger = logging.getLogger(__name__)

SYNCS = ("lora_adapter", "weights", "trl-merge")
ADAPTERS = ("lora", "dora", "ia3")
# Prompt of 6 tokens, completion of at most 4.
MAX_MODEL_LENGTH = 32


@dataclasses.dataclass(frozen=True)
class DemoSettings:
    """Everything that decides a demo run.

    Attributes:
        steps: optimizer steps.
        seed: of the adapter, the order of the problems and the sampling; the pretrained model is the same for all.
        sync: "lora_adapter", "weights" (dense weights, to vLLM on the baked base), or "trl-merge" for TRL's own way.
        adapter: "lora"; with sync "weights" also "dora" or "ia3".
        temperature: of the rollouts.
        learning_rate: of AdamW, after a short warm-up.
        rank: of the LoRA adapters; alpha is twice that.
        target_modules: where they are.
        routing_replay: see QLoRAGRPOTrainer.
        completions_per_step: B = prompts x 8 rollouts.
        adapter_dtype: see QLoRAGRPOTrainer.
        rollout: "colocate", "server" (one is started), "ray" (two actors), or the URL of a server on the demo's base
            (key: QLORA_RL_API_KEY).
    """

    steps: int = 100
    seed: int = 0
    sync: str = "lora_adapter"
    adapter: str = "lora"
    temperature: float = 1.0
    learning_rate: float = 1e-3
    rank: int = 16
    completions_per_step: int = 128
    adapter_dtype: str = "float32"
    rollout: str = "colocate"
    target_modules: str | Sequence[str] = "all-linear"
    routing_replay: bool = False

    def __post_init__(self) -> None:
        raise_where(
            "starting the demo",
            [
                (self.sync not in SYNCS, f"sync={self.sync!r} is not one of {SYNCS}."),
                (self.adapter not in ADAPTERS, f"adapter={self.adapter!r} is not one of {ADAPTERS}."),
                (
                    self.adapter != "lora" and self.sync != "weights",
                    f"adapter={self.adapter!r} with sync={self.sync!r}; it is synced as full weights only. Use --sync "
                    "weights.",
                ),
                (self.steps < 1, f"steps={self.steps} < 1."),
            ],
        )


def default_out(settings: DemoSettings) -> Path:
    """A directory of its own for every run."""
    return Path("runs") / f"demo-{settings.sync}-seed{settings.seed}-{datetime.now():%Y%m%d-%H%M%S}"


def run_demo(
    settings: DemoSettings,
    out: str | os.PathLike[str],
    *,
    say: Callable[[str], None] = print,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Make the model, quantise it, train it, measure it; leave a run directory with summary.json and report.html.

    Args:
        settings: of the run.
        out: run directory; must not hold another run.
        say: gets each line for people.
        show_progress: a live bar on stderr.

    Returns:
        What stands in summary.json.

    Raises:
        RunDirectoryError: `out` holds another run.
        KeyboardInterrupt: passed on after the run directory was completed.
    """
    quieten()
    run = RunDirectory(out)
    say(f"     {processor()}")
    started = time.perf_counter()
    say("1/4  a tiny language model that has read sums by two pupils, one of whom forgets to carry")
    base = _make_base(run, say, show_progress)
    prepared = time.perf_counter()

    say(
        {
            "lora_adapter": "2/4  starting vLLM on the same 4-bit base",
            "weights": "2/4  starting vLLM on the same base, baked",
            "trl-merge": "2/4  starting TRL's own vLLM",
        }[settings.sync]
    )
    trainer = make_trainer(settings, base, run)
    try:
        held_out = task.problems("held_out")
        before = _answers(trainer, held_out, settings)
        accuracy_before = _accuracy(before, held_out)
        say(f"     {accuracy_before:.0%} of {len(held_out)} sums that it will never train on are right")

        say(f"3/4  {settings.steps} steps of GRPO; reward 1 for a right sum, 0 for a wrong one")
        if show_progress:
            from qlora_rl.train.run.progress import Progress

            trainer.add_callback(Progress("     training"))
        return _train(trainer, settings, run, say, before, started=started, prepared=prepared)
    finally:
        trainer.close()


def _train(
    trainer: Any,
    settings: DemoSettings,
    run: RunDirectory,
    say: Callable[[str], None],
    before: Sequence[str],
    *,
    started: float,
    prepared: float,
) -> dict[str, Any]:
    """Train, answer again, and complete the run directory, also where the training fails; what stands in summary.json.

    Args:
        before: answers to the held-out sums.
        started: second in which the demo began.
        prepared: second in which it had its base.
    """
    held_out = task.problems("held_out")
    trained = time.perf_counter()
    summary: dict[str, Any] = {"status": "finished", "steps": settings.steps}
    trained_seconds = None
    try:
        trainer.train()
        trained_seconds = time.perf_counter() - trained
    except KeyboardInterrupt:
        summary |= {"status": "interrupted", "steps": trainer.state.global_step}
        raise
    except Exception as error:
        summary |= {
            "status": "failed",
            "steps": trainer.state.global_step,
            "error": f"{type(error).__name__}: {error}",
        }
        raise
    finally:
        with _second_to(summary["status"]):
            summary |= summarise_steps(read_run(run.path).metrics)
            summary["accuracy_before"] = _accuracy(before, held_out)
            if summary["status"] == "finished":
                say("4/4  the same sums again")
                after = _answers(trainer, held_out, settings)
                summary["accuracy_after"] = _accuracy(after, held_out)
                run.write_json("eval.json", _evaluation(held_out, before, after))
            if settings.sync == "trl-merge":  # TRL's trainer does not do it by itself
                run.save_adapter(trainer.model)
            summary |= {
                "prepare_seconds": prepared - started,
                "train_seconds": trained_seconds,
                "seconds": time.perf_counter() - started,
                "settings": dataclasses.asdict(settings),
            }
            run.write_json(SUMMARY, summary)
            say(f"     report: {write_report(run.path)}")
    return summary


@contextlib.contextmanager
def _second_to(status: str) -> Iterator[None]:
    """Book-keeping after a run that did not finish must not hide what ended it."""
    try:
        yield
    except Exception:
        if status == "finished":
            raise
        logger.exception("the run directory could not be completed")


def summarise_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The numbers of a run out of its metrics, one mapping per optimizer step (none: no numbers)."""

    def values(name: str) -> list[float]:
        return [float(s[name]) for s in steps if s.get(name) is not None]

    def median(name: str) -> float | None:
        return statistics.median(values(name)) if values(name) else None

    rewards, kl, seconds = values("reward"), sorted(values("mismatch_kl")), values("step_seconds")
    rollout = sum(values("rollout_seconds"))
    return {
        "reward_first": statistics.fmean(rewards[:5]) if rewards else None,
        "reward_last": statistics.fmean(rewards[-5:]) if rewards else None,
        "mismatch_kl_median": statistics.median(kl) if kl else None,
        "mismatch_kl_p95": kl[min(len(kl) - 1, int(0.95 * len(kl)))] if kl else None,
        "mismatch_kl_max": kl[-1] if kl else None,
        "sync_seconds_median": median("sync_seconds"),
        "sync_bytes_median": median("sync_bytes"),
        "canary_seconds_mean": statistics.fmean(values("canary_seconds")) if values("canary_seconds") else None,
        "step_seconds_median": median("step_seconds"),
        "rollout_tokens_per_s": sum(values("rollout_tokens")) / rollout if rollout else None,
        "steps_per_s": len(seconds) / sum(seconds) if seconds else None,
    }


def table(summary: Mapping[str, Any]) -> str:
    """A short table for the terminal."""

    def show(name: str, form: str) -> str:
        value = summary.get(name)
        return "-" if value is None else format(value, form)

    share = ""
    if summary.get("sync_seconds_median") and summary.get("step_seconds_median"):
        share = f" ({summary['sync_seconds_median'] / summary['step_seconds_median']:.1%} of a step)"
    rows = [
        ("held-out accuracy", f"{show('accuracy_before', '.1%')} -> {show('accuracy_after', '.1%')}"),
        ("reward (first 5, last 5 steps)", f"{show('reward_first', '.3f')} -> {show('reward_last', '.3f')}"),
        (
            "mismatch KL (median, p95, max)",
            f"{show('mismatch_kl_median', '.1e')}, {show('mismatch_kl_p95', '.1e')}, {show('mismatch_kl_max', '.1e')}",
        ),
        ("one sync", f"{quantities.seconds(summary.get('sync_seconds_median'))}{share}"),
        ("one step", f"{show('step_seconds_median', '.2f')} s"),
        ("rollouts", f"{show('rollout_tokens_per_s', '.0f')} tokens/s"),
        ("training", f"{show('train_seconds', '.0f')} s of {show('seconds', '.0f')} s in all"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _make_base(run: RunDirectory, say: Callable[[str], None], show_progress: bool) -> Any:
    from tqdm import tqdm

    from qlora_rl.base.checkpoint import prepare_base
    from qlora_rl.demo.tiny_model import make_tiny_model

    bar: Any = None

    def progress(step: int, steps: int, loss: float) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=steps, desc="     pretraining", disable=not show_progress, leave=False)
        bar.set_postfix(loss=f"{loss:.2f}", refresh=False)
        bar.update()

    model = make_tiny_model(progress=progress)
    if bar is not None:
        bar.close()
    base = prepare_base(model, "nf4")
    say(f"     quantised to NF4: {base}")
    return base


def _arguments(settings: DemoSettings, run: RunDirectory, *, on_gpu: bool) -> dict[str, Any]:
    """Of GRPOConfig."""
    return dict(
        output_dir=str(run.path),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.completions_per_step,
        num_generations=8,
        max_completion_length=task.LONGEST_ANSWER + 1,
        temperature=settings.temperature,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        beta=0.0,
        seed=settings.seed,
        bf16=True,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        vllm_max_model_length=None if "://" in settings.rollout else MAX_MODEL_LENGTH,
        # On TRL's padded batches of ten tokens the backward pass of fused attention costs a CPU more than half of the
        # step.
        model_init_kwargs=None if on_gpu or settings.sync != "trl-merge" else {"attn_implementation": "eager"},
    )


def make_trainer(
    settings: DemoSettings,
    base: Any,
    run: RunDirectory,
    changes: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
) -> Any:
    """The demo's trainer, or TRL's own for "trl-merge".

    Args:
        settings: of the run.
        base: that `prepare_base` made.
        run: where it is recorded.
        changes: arguments of GRPOConfig that are to be others.
        engine_options: of `LocalEngine`, besides the demo's own.
    """
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig

    config = GRPOConfig(**_arguments(settings, run, on_gpu=torch.cuda.is_available()) | dict(changes or {}))
    arguments: dict[str, Any] = {
        "reward_funcs": task.reward_exact_match,
        "train_dataset": Dataset.from_list(task.grpo_rows(settings.seed, 600)),
        "peft_config": _peft_config(settings),
    }
    if settings.sync != "trl-merge":
        from qlora_rl.train.grpo import QLoRAGRPOTrainer

        replicas = {"replicas": 2} if settings.rollout == "ray" else {}
        # The directory is ours and fresh; the trainer completes it.
        trainer: Any = QLoRAGRPOTrainer(
            model=base,
            args=config,
            adapter_dtype=settings.adapter_dtype,
            sync=settings.sync,
            existing_run="continue",
            rollout=settings.rollout,
            routing_replay=settings.routing_replay,
            engine_options={"use_tqdm_on_load": False, **replicas, **(engine_options or {})},
            **arguments,
        )
    else:
        from transformers import AutoTokenizer

        from qlora_rl.base.checkpoint import load_base
        from qlora_rl.demo.merge import MergingTrainer

        config.use_vllm = True
        tokenizer = AutoTokenizer.from_pretrained(base.path, padding_side="left")
        model = load_base(base, **(config.model_init_kwargs or {}))
        config.model_init_kwargs = None
        trainer = MergingTrainer(run=run, model=model, args=config, processing_class=tokenizer, **arguments)
        run.write_json(
            "config.json",
            {
                "model": base.path.name,
                "base": {"path": str(base.path), "identity": base.identity, **base.spec.as_dict()},
                "sync": settings.sync,
                "rollout": "TRL colocate",
                "seed": settings.seed,
                "grpo": trainer.args.to_dict(),
                "versions": describe_versions(),
                "machine": describe_machine(is_4bit=base.spec.is_4bit),
            },
        )
    described = json.loads((run.path / "config.json").read_text())
    described |= {"command": "qlora-rl demo", "steps": settings.steps}
    run.write_json("config.json", described)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _peft_config(settings: DemoSettings) -> Any:
    from peft import IA3Config, LoraConfig

    if settings.adapter == "ia3":
        return IA3Config(
            target_modules=["k_proj", "v_proj", "up_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            task_type="CAUSAL_LM",
        )
    return LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        target_modules=settings.target_modules,
        use_dora=settings.adapter == "dora",
    )


def _answers(trainer: Any, asked: Sequence[task.Problem], settings: DemoSettings) -> list[str]:
    """Greedy answers of the policy as the trainer holds it, whichever way it is synced."""
    import torch

    from qlora_rl.demo.tiny_model import answer_greedily

    # IA3 multiplies 16-bit activations with float32 vectors: attention takes that under autocast only, as in training.
    with torch.autocast(trainer.model.device.type, torch.bfloat16, enabled=settings.adapter == "ia3"):
        return answer_greedily(trainer.model, trainer.processing_class, asked)


def _accuracy(answers: Sequence[str], asked: Sequence[task.Problem]) -> float:
    return sum(answer.strip() == problem.answer for answer, problem in zip(answers, asked, strict=True)) / len(asked)


def _evaluation(asked: Sequence[task.Problem], before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
    """As `qlora-rl eval` leaves it, for the report; every twelfth problem with both answers."""
    from qlora_rl.inference.evaluation import compare

    known = [problem.answer for problem in asked]
    was, now = (task.reward_exact_match(list(answers), known) for answers in (before, after))
    rows = zip(asked, before, after, was, now, strict=True)
    return {
        "rewards": {"exact_match": dataclasses.asdict(compare(was, now, 1))},
        "prompts": len(asked),
        "sampling": {"temperature": 0.0},
        "rows": [
            {
                "prompt": problem.prompt,
                "answer": problem.answer,
                "before": old,
                "after": new,
                "before_rewards": {"exact_match": first},
                "after_rewards": {"exact_match": last},
            }
            for problem, old, new, first, last in list(rows)[::12]
        ],
    }
