"""A selection of the tests for every supported stack, and a demo of ten steps; what came of them is recorded for the
table of benchmarks/details.md.

    make test-stack VLLM=0.32.0                     makes .venv-0.32.0, runs this in it
    python scripts/test_stack.py [--json FILE] [--only WORD ...] [--workers 2]

--only runs the groups with one of these words in their name, and replaces their rows alone. Exit code: 0 all passed or
were skipped, 1 not.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
STEPS = 10
DEMO = f"demo, {STEPS} steps"
# Rows of the table, and their files.
GROUPS: dict[str, tuple[str, ...]] = {
    "versions and moved names": ("unit/test_compat.py",),
    "an engine in the trainer's process": ("engine/test_local.py",),
    "pushes in place": ("engine/test_in_place.py",),
    "the canary": ("engine/test_canary.py",),
    "one base for trainer and engine": ("engine/test_shared.py",),
    "adapters of all kinds: patterns, PiSSA and other starts": ("engine/test_exact.py",),
    "full weights: DoRA and others": ("engine/test_dense.py", "engine/test_dense_training.py"),
    "mixtures, adapters on experts": ("engine/test_mixtures.py", "engine/test_expert_adapters.py"),
    "images": ("engine/test_vision.py",),
    "GRPO on vLLM": ("engine/test_training.py",),
    "the server, its gate": (
        "engine/test_server.py",
        "unit/test_serve.py",
    ),
}
# What another vLLM cannot change is left to the default tests: how often a thing can be done, streams and bodies that
# are ours, noise of 16 bits, and of parametrised tests all kinds but one.
LEFT_OUT = {
    "test_in_place": "500_pushes",
    "test_canary": "two_hundred or small_adapter or gemma or mistral or llama",
    "test_exact": "no_config_of_300 or on_the_4_bit_base",
    "test_dense.py": "in_16_bits or stream or cut_at or hundred or nan or infinite or damaged",
    "test_mixtures": "olmoe or mixtral or qwen3_moe-dense",
    "test_expert_adapters": "olmoe or mixtral or qwen3_moe-dense",
    "test_vision": "gemma3 or qwen2_vl or qwen2_5_vl",
    "test_training": "hundred or temperature",
    "test_server": "many_pushes or signal or second_trainer or gone",
}
SELECTED = " and ".join(f"not ({file} and ({words}))" for file, words in LEFT_OUT.items())


def run_tests(files: list[str], workers: int) -> tuple[dict[str, collections.Counter], list[str]]:
    """Counts of each file, and the names of what failed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--continue-on-collection-errors",
            "--durations=25",
            "-k",
            SELECTED,
        ]
        command += ["-n", str(workers), "--dist", "loadfile"] if workers else []
        command += [f"--junitxml={report}", *(f"tests/{file}" for file in files)]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run(command, cwd=ROOT, env=environment)
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    counts: dict[str, collections.Counter] = {file: collections.Counter() for file in files}
    failed = []
    for case in cases:
        place = case.get("classname") or case.get("name", "")  # a module that was not collected has its name alone
        file = place.removeprefix("tests.").replace(".", "/") + ".py"
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts.setdefault(file, collections.Counter())[kind] += 1
        if kind == "failed":
            failed.append(f"{file}::{case.get('name')}")
    return counts, failed


def run_demo() -> dict[str, object]:
    """What the demo measured, or its end."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        command = [sys.executable, "-m", "qlora_rl.cli", "demo", "--steps", str(STEPS), "--quiet", "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            return {"failed": 1, "error": done.stderr[-2000:]}
        summary = json.loads((out / "summary.json").read_text())
        return {"passed": 1, "mismatch_kl_max": summary["mismatch_kl_max"]}


def main() -> int:
    """Run, record, say."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    arguments.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "stacks.json")
    arguments.add_argument("--only", nargs="*", default=[])
    arguments.add_argument("--workers", type=int, default=2, help="0: all tests in one process")
    asked = arguments.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    from rounds import described

    from qlora_rl.engine.compat import vllm_version

    chosen = [name for name in (*GROUPS, DEMO) if not asked.only or any(word in name for word in asked.only)]
    started = time.perf_counter()
    files = [file for name in chosen for file in GROUPS.get(name, ())]
    counts, failed = run_tests(files, asked.workers) if files else ({}, [])
    rows: dict[str, dict[str, object]] = {
        name: {"passed": 0, **sum((counts[file] for file in GROUPS[name]), collections.Counter())}
        for name in chosen
        if name in GROUPS
    }
    if DEMO in chosen:
        rows[DEMO] = run_demo()
    stacks = json.loads(asked.json.read_text()) if asked.json.is_file() else {}
    before = stacks.get(vllm_version(), {})
    old = before.get("rows", {}) if asked.only else {}
    kept = [name for name in before.get("failed", []) if asked.only and name.partition("::")[0] not in counts]
    merged = old | rows
    stacks[vllm_version()] = described(
        {
            "minutes": round((time.perf_counter() - started) / 60 + (before.get("minutes", 0) if asked.only else 0), 1),
            "files": (before.get("files", {}) if asked.only else {}) | counts,
            "rows": {name: merged[name] for name in (*GROUPS, DEMO) if name in merged},
            "failed": [*kept, *failed],
        }
    )
    asked.json.write_text(json.dumps(dict(sorted(stacks.items())), indent=1) + "\n")
    for name, row in rows.items():
        print(f"{name}: {', '.join(f'{value} {kind}' for kind, value in row.items())}")
    return int(any(row.get("failed") for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
