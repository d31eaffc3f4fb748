"""What the dtype of the trained adapter costs and gains: the demo with float32 and with bfloat16, three seeds, two
learning rates.

    python benchmarks/adapter_dtype.py [--steps 60] [--work DIR] [--json benchmarks/results/adapter_dtype.json]

Twelve runs of the demo, each in a process of its own. Seconds are not reported: the runs differ by less than a busy
machine does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rounds import measured_at

from qlora_rl.train.run import describe_machine, describe_versions

SEEDS = (0, 1, 2)
LEARNING_RATES = (1e-3, 1e-4)
DTYPES = ("float32", "bfloat16")
KEPT = ("accuracy_before", "accuracy_after", "reward_first", "reward_last", "mismatch_kl_median", "mismatch_kl_p95")
KEPT += ("mismatch_kl_max",)
_RUN = """
import json, sys
from qlora_rl.demo.job import DemoSettings, run_demo
run_demo(DemoSettings(**json.loads(sys.argv[1])), sys.argv[2], say=lambda _: None, show_progress=False)
"""


def run(out: Path, **settings: object) -> dict[str, object]:
    """The figures of one run; a finished one is read again."""
    if not (out / "summary.json").exists():
        subprocess.run([sys.executable, "-c", _RUN, json.dumps(settings), str(out)], check=True)
    summary = json.loads((out / "summary.json").read_text())
    found = {name: summary[name] for name in KEPT}
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found["logprob_diff_mean"] = sum(step["logprob_diff_mean"] for step in steps) / len(steps)
    print(out.name, found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--work", type=Path, help="where the runs go, and finished ones are taken from")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "adapter_dtype.json")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="qlora-rl-bench-"))
    commit = measured_at()
    runs = {
        f"{rate:g}": {
            dtype: {
                str(seed): run(
                    work / f"{rate:g}-{dtype}-{seed}",
                    steps=arguments.steps,
                    seed=seed,
                    learning_rate=rate,
                    adapter_dtype=dtype,
                )
                for seed in SEEDS
            }
            for dtype in DTYPES
        }
        for rate in LEARNING_RATES
    }
    result = {
        "command": f"python benchmarks/adapter_dtype.py --steps {arguments.steps}",
        "commit": commit,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "steps": arguments.steps,
        "runs": runs,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(arguments.json)
    if arguments.work is None:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
