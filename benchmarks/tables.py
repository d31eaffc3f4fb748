"""Writes the tables of README and docs out of benchmarks/results/*.json; a number stands in prose only through here.

    python benchmarks/tables.py            rewrite what lies between the markers
    python benchmarks/tables.py --check    exit 1 where a file differs from its JSON

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def _load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def _values(runs: dict, key: str) -> list[float]:
    return [run[key] for run in runs.values()]


def _percent(values: list[float]) -> str:
    low, high = min(values), max(values)
    one, other = f"{low:.1%}", f"{high:.1%}"
    return one if one == other else f"{one} to {other}"


def _power(value: float) -> str:
    return f"{value:.1e}"


def _proof(run: dict) -> str:
    seconds = run.get("canary_seconds_mean")
    return "none" if seconds is None else f"{1e3 * seconds:.1f} ms"


def _share(runs: dict) -> str:
    shares = [run["sync_seconds_median"] / run["step_seconds_median"] for run in runs.values()]
    return f"{statistics.median(shares):.1%}"


def demo() -> str:
    """The first table of the README."""
    result = _load("demo.json")
    ours, merge = result["seeds"], result["trl_merge"]
    steps = next(iter(ours.values()))["steps"]
    problems = next(iter(ours.values()))["eval_problems"]

    def row(what: str, show: Callable[[dict], str]) -> str:
        return f"| {what} | {show(ours)} | {show(merge)} |"

    return "\n".join(
        [
            f"| {steps} steps of GRPO, {len(ours)} and {len(merge)} seeds | **qlora_rl**: the adapter travels | TRL 1.16: merge, push, unmerge |",
            "|---|---|---|",
            row(
                f"right on {problems} sums never trained on, before", lambda r: _percent(_values(r, "accuracy_before"))
            ),
            row("… and after", lambda r: f"**{_percent(_values(r, 'accuracy_after'))}**"),
            row(
                "distance of trainer and sampler (mismatch KL), median; worst step",
                lambda r: f"{_power(statistics.median(_values(r, 'mismatch_kl_median')))}; {_power(max(_values(r, 'mismatch_kl_max')))}",
            ),
            row(
                "handing over a new policy",
                lambda r: f"{1e3 * statistics.median(_values(r, 'sync_seconds_median')):.1f} ms, {_share(r)} of a step",
            ),
            row(
                "the whole command, pretraining not counted",
                lambda r: f"{statistics.median(_values(r, 'process_seconds')):.0f} s",
            ),
        ]
    )


def demo_seeds() -> str:
    """Every run of the demo benchmark, one line each."""
    result = _load("demo.json")
    lines = [
        "| run | accuracy before | after | reward first 5 | last 5 | KL median | p95 | max | sync | its proof | step | tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups = [
        ("seed ", result["seeds"]),
        ("temperature ", result["temperatures"]),
        ("TRL merge, seed ", result["trl_merge"]),
    ]
    for prefix, runs in groups:
        for name, r in runs.items():
            lines.append(
                f"| {prefix}{name} | {r['accuracy_before']:.1%} | {r['accuracy_after']:.1%} | {r['reward_first']:.3f} | "
                f"{r['reward_last']:.3f} | {_power(r['mismatch_kl_median'])} | {_power(r['mismatch_kl_p95'])} | "
                f"{_power(r['mismatch_kl_max'])} | {1e3 * r['sync_seconds_median']:.1f} ms | {_proof(r)} | "
                f"{1e3 * r['step_seconds_median']:.0f} ms | {r['rollout_tokens_per_s']:.0f} |"
            )
    return "\n".join(lines)


def base_proof() -> str:
    """Trainer and vLLM on the bare base: as vLLM loads it, repaired, and baked to float32."""
    result = _load("base_proof.json")
    rows = [("as loaded", "as_loaded"), ("repaired", "repaired"), ("float32 baked", "float32_baked")]
    lines = ["| state | mismatch KL | mean of abs(d) | max of abs(d) |", "|---|---|---|---|"]
    for what, key in rows:
        r = result[key]
        # Three digits: the first two rows differ in the third.
        kl, mean, largest = (f"{r[k]:.2e}" for k in ("mismatch_kl", "logprob_diff_mean", "logprob_diff_max"))
        lines.append(f"| {what} | {kl} | {mean} | {largest} |")
    return "\n".join(lines)


TABLES = {"demo": demo, "demo-seeds": demo_seeds, "base-proof": base_proof}
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """`text` with every marked table made anew."""
    return MARKED.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text)


def main() -> int:
    """Rewrite, or compare."""
    stale = []
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = file.read_text()
        fresh = render(text)
        if fresh == text:
            continue
        stale.append(str(file.relative_to(ROOT)))
        if "--check" not in sys.argv:
            file.write_text(fresh)
    print("\n".join(stale) or "all tables are as their JSON says")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
