"""From the command to the end of the demo's first optimizer step: seconds of processor and clock, and the most memory
held until then.

    python benchmarks/start.py [--before CHECKOUT] [--rounds 5] [--json benchmarks/results/start.json]

`qlora-rl demo` is started with a cache that has the tiny model and the base, in turns with TRL's own way (`--sync
trl-merge`), and with the same command of another checkout of this repository. Each is ended as soon as its first step
stands in `metrics.jsonl`. The sums that the demo asks before it trains are part of it. Libraries' files are in the
system's cache: a round before the first is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rounds import compare, described

ROOT = Path(__file__).parents[1]
LIMIT_S = 600
TICKS = os.sysconf("SC_CLK_TCK")


def start(checkout: Path, sync: str) -> dict[str, float]:
    """One start of the demo.

    Raises:
        RuntimeError: it ended before its first step, or did not reach it in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "run" / "metrics.jsonl"
        command = [sys.executable, "-m", "qlora_rl", "demo", "--steps", "50", "--quiet", "--sync", sync]
        began = time.perf_counter()
        errors = Path(directory) / "errors"
        with errors.open("wb") as sink:
            process = subprocess.Popen(
                [*command, "--out", str(metrics.parent)],
                env=os.environ | {"PYTHONPATH": str(checkout)},
                cwd=directory,
                stdout=subprocess.DEVNULL,
                stderr=sink,
                start_new_session=True,
            )
        try:
            while not metrics.is_file() or not metrics.read_text().endswith("\n"):
                if process.poll() is not None or time.perf_counter() - began > LIMIT_S:
                    raise RuntimeError(
                        f"no first step in {time.perf_counter() - began:.0f} s: {errors.read_text()[-2000:]}"
                    )
                time.sleep(0.02)
            seconds = time.perf_counter() - began
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{process.pid}/status").read_text()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    used = sum(int(fields[i]) for i in (11, 12, 13, 14))  # its own, and of children that have ended
    return {"seconds": seconds, "cpu_seconds": used / TICKS, "peak_gib": int(peak.split()[1]) / 2**20}


def main() -> None:
    """Measure and print; with --json also write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout with the code to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sides = {"ours": (ROOT, "lora_adapter"), "trl": (ROOT, "trl-merge")}
    if arguments.before:
        sides["before"] = (arguments.before.resolve(), "lora_adapter")
    rows: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(arguments.rounds + 1):
        for side, (checkout, sync) in sides.items():
            row = start(checkout, sync)
            print(
                side,
                *(f"{name} {value:.2f}" for name, value in row.items()),
                "" if number else "(not counted)",
                flush=True,
            )
            if number:
                rows[side].append(row)
    found = {
        "medians": {
            side: {name: statistics.median(row[name] for row in of) for name in of[0]} for side, of in rows.items()
        },
        "ratios": {
            side: {
                name: compare([row[name] for row in rows["ours"]], [row[name] for row in of])["ratio"] for name in of[0]
            }
            for side, of in rows.items()
            if side != "ours"
        },
        "rounds": rows,
    }
    print(json.dumps({name: found[name] for name in ("medians", "ratios")}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(described(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
