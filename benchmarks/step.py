"""Seconds and memory of a GRPO step, against TRL with its own colocated vLLM and its merge; each side in processes of
its own.

The same job on both sides: NF4 base, LoRA of rank 16 on all linears, the demo's sums as prompts, TRL's GRPOConfig; on a
CPU TRL has eager attention, the faster one of its two in the demo. Ours runs with all its checks: the canary after each
push, the distance of both sides at each step. TRL has none of them, and what it pushes is wrong (docs/comparison.md);
here only its time and its memory are measured.

    python benchmarks/step.py SIDE SIZE BASE STEPS OPTIONS     one process: prints its numbers as JSON
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rounds import compare, described
from shapes import SIZES, make_model

from qlora_rl.errors import EngineUnsupportedError

SIDES = ("ours", "trl")
# Steps at the start that are not counted: caches fill, kernels are chosen.
WARM = 3
# The default canary_every: one push of so many is scored, so a step alone is a cheap or a dear one.
CYCLE = 4
PARTS = ("rollout_seconds", "sync_seconds", "canary_seconds")
GIB = 2**30
# What TRL's vLLM takes at least on a CPU, where it counts in whole GiB; ours takes what it needs, but memory is
# compared.
KV_CACHE_GIB = 1.0


@dataclass(frozen=True)
class Job:
    """What is trained: B completions of at most T tokens per step, and further fields of GRPOConfig."""

    completions: int
    config: Mapping[str, Any] = field(default_factory=dict)


JOBS = {
    "demo": Job(128),
    "0.1b": Job(16, {"max_completion_length": 32, "vllm_max_model_length": 64}),
    "0.4b": Job(16, {"max_completion_length": 32, "vllm_max_model_length": 64}),
}


def bench_step(
    size: str,
    *,
    steps: int = 20,
    rounds: int = 2,
    options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Both sides train in turns.

    Args:
        size: of `JOBS`; "demo" is the demo's own job, on its own model.
        steps: of each training, of which the first three are not counted.
        rounds: trainings of each side.
        options: `engine_options` of ours. The KV cache is as large on both sides, on a CPU.

    Returns:
        Under `size`, and what the engine multiplies with where `options` say it: the rounds' medians of a step and its
            parts, the ratio of the rounds, peak memory; commit, versions, machine.

    Raises:
        EngineUnsupportedError: a side could not train; with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as work:
        base = _make_base(size, Path(work))
        options = {"kv_cache_gib": KV_CACHE_GIB, **(options or {})}
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for number in range(rounds):
            for side in SIDES:
                found[side].append(_child(side, size, base, steps, options))
                say(f"round {number + 1}, {side}: {_line(found[side][-1])}")
    seconds = {side: [row["step_seconds"] for row in rows] for side, rows in found.items()}
    # How often faster, so TRL's seconds over ours.
    ratio = compare(seconds["trl"], seconds["ours"])["ratio"]
    facts = {
        "size": size,
        "steps": steps,
        "warm": WARM,
        "rounds": rounds,
        "job": vars(JOBS[size]),
        "engine_options": dict(options),
        "unit": "s",
        "modes": {
            "step": {
                "ours": statistics.median(seconds["ours"]),
                "against": statistics.median(seconds["trl"]),
                "ratio": ratio,
            }
        },
        "sides": {side: _median_of(rows) for side, rows in found.items()},
    }
    mode = options.get("base_compute")
    return {f"{size}, {mode}" if mode else size: described(facts)}


def table(result: Mapping[str, Any]) -> str:
    """For the terminal."""
    lines = []
    for size, facts in result.items():
        row = facts["modes"]["step"]
        lines.append(f"{size}: a step {row['ours']:.3f} s, TRL {row['against']:.3f} s, {row['ratio']:.2f}x")
        lines += [f"  {side:<5} {_line(facts['sides'][side])}" for side in SIDES]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    parts = ", ".join(
        f"{name.removesuffix('_seconds')} {1e3 * row[name]:.0f}" for name in PARTS if row.get(name) is not None
    )
    return (
        f"step {1e3 * row['step_seconds']:.0f} ms ({parts}), {row['rollout_tokens']:.0f} tokens, peak "
        f"{row['peak_gib']:.2f} GiB"
    )


def _median_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: None if rows[0][name] is None else statistics.median(row[name] for row in rows) for name in rows[0]}


def _make_base(size: str, work: Path) -> Path:
    from qlora_rl.base.checkpoint import prepare_base

    if size == "demo":
        from qlora_rl.demo.tiny_model import make_tiny_model

        return Path(prepare_base(make_tiny_model(), "nf4", out=work / "base").path)
    return Path(prepare_base(make_model(work / "model", SIZES[size]), out=work / "base").path)


def _child(side: str, size: str, base: Path, steps: int, options: Mapping[str, Any]) -> dict[str, Any]:
    arguments = [side, size, str(base), str(steps), json.dumps(options)]
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        raise EngineUnsupportedError(f"measuring a step of {side}, size {size}: it failed.\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _resident(name: str) -> float:
    """GiB that this process holds (VmRSS), or held at its peak (VmHWM)."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields[name].split()[0]) * 1024 / GIB


def measure(side: str, size: str, base: Path, steps: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Train in this process: medians over groups of steps after the first, and what the process holds."""
    from qlora_rl.base.checkpoint import open_base
    from qlora_rl.demo.job import DemoSettings, make_trainer
    from qlora_rl.train.run import METRICS, RunDirectory

    sync = "lora_adapter" if side == "ours" else "trl-merge"
    settings = DemoSettings(steps=steps, sync=sync, completions_per_step=JOBS[size].completions)
    with tempfile.TemporaryDirectory() as directory:
        run = RunDirectory(directory)
        imported = _resident("VmRSS")
        trainer = make_trainer(settings, open_base(base, verify=False), run, JOBS[size].config, options)
        started = _resident("VmHWM")
        try:
            trainer.train()
            # Before anything is closed.
            held, peak = _resident("VmRSS"), _resident("VmHWM")
        finally:
            trainer.close()
        lines = [json.loads(line) for line in (run.path / METRICS).read_text().splitlines()][WARM:]
    names = ("step_seconds", *PARTS, "rollout_tokens", "rollout_tokens_per_s")
    values = {name: [line[name] for line in lines if line.get(name) is not None] for name in names}
    found: dict[str, Any] = {name: typical(column) if column else None for name, column in values.items()}
    budget = getattr(trainer, "memory", None)
    estimate = None if budget is None or budget.estimate is None else budget.estimate.peak_bytes / GIB
    return found | {
        "imported_gib": imported,
        "start_peak_gib": started,
        "held_gib": held,
        "peak_gib": peak,
        "planned_gib": estimate,
    }


def typical(column: list[float]) -> float:
    """The median of the means of `CYCLE` neighbours: what comes in one step of them counts its part, where a median
    alone would not see it."""
    whole = len(column) // CYCLE * CYCLE or len(column)
    return statistics.median(statistics.mean(column[start : start + CYCLE]) for start in range(0, whole, CYCLE))


def main() -> None:
    """One side, as `bench_step` starts it."""
    from qlora_rl.demo.job import quieten

    quieten()
    side, size, base, steps, options = sys.argv[1:]
    print(json.dumps(measure(side, size, Path(base), int(steps), json.loads(options))))


if __name__ == "__main__":
    main()
