"""The demo's figures: five seeds, two more temperatures, and TRL's own way, each run as a newcomer runs it.

    python benchmarks/demo.py [--steps 100] [--work DIR] [--json benchmarks/results/demo.json]

About ten minutes on two cores. Run it alone: two torch jobs on the same cores slow each other down tenfold.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rounds import measured_at

from qlora_rl.train.run import describe_machine, describe_versions

SEEDS = (0, 1, 2, 3, 4)
MERGED = SEEDS[:2]


def run(out: Path, *arguments: object) -> dict[str, object]:
    started = time.perf_counter()
    command = [sys.executable, "-m", "qlora_rl.cli", "demo", "--quiet", "--out", str(out), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((out / "summary.json").read_text())
    summary["process_seconds"] = time.perf_counter() - started
    shown = ("accuracy_before", "accuracy_after", "mismatch_kl_median", "mismatch_kl_p95", "mismatch_kl_max")
    print(out.name, {k: round(summary[k], 7) for k in shown}, f"{summary['process_seconds']:.0f} s", flush=True)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--work", type=Path, help="where the runs go (default: a temporary directory)")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "demo.json")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="qlora-rl-bench-"))
    commit = measured_at()
    steps = ["--steps", arguments.steps]
    seeds, merges = {}, {}
    for seed in SEEDS:  # both ways in turns: a machine that slows down slows both
        seeds[str(seed)] = run(work / f"seed{seed}", "--seed", seed, *steps)
        if seed in MERGED:
            merge = ["--sync", "trl-merge", "--seed", seed]
            merges[str(seed)] = run(work / f"trl-merge-seed{seed}", *merge, *steps)
    result = {
        "command": f"python benchmarks/demo.py --steps {arguments.steps}",
        "commit": commit,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "seeds": seeds,
        "temperatures": {str(t): run(work / f"t{t}", "--temperature", t, *steps) for t in (0.7, 1.3)},
        "trl_merge": merges,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(arguments.json)
    if arguments.work is None:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
