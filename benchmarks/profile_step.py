"""Where the time of a training step goes, by samples of the stack: ours, and TRL 1.16 with its own vLLM and its merge.

    pip install py-spy
    python benchmarks/profile_step.py [--sizes demo 0.1b] [--steps 20] [--json benchmarks/results/profile.json] [--flame DIR]

py-spy looks at the main thread 50 times a second, without stopping it, while `qlora_rl.bench.step` trains, and each sample counts for the first of the parts
below that is on the stack. `--flame DIR` keeps the stacks, one line each with its count, as flamegraph.pl and speedscope read them.
Shares are of the samples inside the training loop; examinations by the alarm are left out, as a run has one or two, whatever its length.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from qlora_rl.bench.rounds import described
from qlora_rl.bench.step import JOBS, SIDES, _make_base

# Outermost first: a sample inside several counts for the first.
PARTS = {
    "alarm": ("Examiner.examine",),
    "proof": ("Canary.check",),
    "push": ("EngineBridge.sync_weights", "VLLMGeneration.sync_weights"),
    "rollout": ("EngineBridge.generate", "VLLMGeneration.generate"),
    "first pass": ("GRPOTrainer._generate_and_score_completions>GRPOTrainer._get_per_token_logps_and_entropies",),
    "forward and loss": ("GRPOTrainer.compute_loss",),
    "backward": ("Accelerator.backward",),
    "optimizer": ("AcceleratedOptimizer.step", "Accelerator.clip_grad_norm_"),
    "rewards, batches": ("GRPOTrainer._generate_and_score_completions",),
}
LOOP = "Trainer._inner_training_loop"


def part_of(names: list[str]) -> str:
    """Of a stack, outermost frame first."""
    for part, marks in PARTS.items():
        for mark in marks:
            outer, _, inner = mark.rpartition(">")
            if inner in names and (not outer or (outer in names and names.index(outer) < names.index(inner))):
                return part
    return "the rest of TRL and transformers"


def shares(stacks: str) -> dict[str, float]:
    """Share of each part, from lines of `frame;frame;... count`."""
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        names = [frame.split(" (")[0] for frame in stack.split(";")]
        if LOOP in names:
            counts[part_of(names)] += int(count)
    counts.pop("alarm", None)
    total = sum(counts.values())
    return {part: count / total for part, count in counts.most_common()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=JOBS, default=["demo", "0.1b"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flame", type=Path)
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as work:
        flames = arguments.flame or Path(work)
        flames.mkdir(parents=True, exist_ok=True)
        for size in arguments.sizes:
            (Path(work) / size).mkdir()
            base = _make_base(size, Path(work) / size)
            found[size] = {"steps": arguments.steps}
            for side in SIDES:
                raw = flames / f"{size}-{side}.txt"
                job = [sys.executable, "-m", "qlora_rl.bench.step", side, size, str(base), str(arguments.steps), "{}"]
                spy = ["py-spy", "record", "--nonblocking", "-r", "50", "-f", "raw", "-o", str(raw), "--", *job]
                subprocess.run(spy, check=True, capture_output=True, text=True)
                found[size][side] = shares(raw.read_text())
                line = ", ".join(f"{part} {share:.0%}" for part, share in found[size][side].items())
                print(f"{size}, {side}: {line}", flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({size: described(facts) for size, facts in found.items()}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
