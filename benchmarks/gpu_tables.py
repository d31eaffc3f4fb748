"""The tables of benchmarks/results/gpu.json, which scripts/gpu_check.py writes; until then they say that nothing was
run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NOT_YET = "| GPU | |\n|---|---|\n| none | **not run yet** |"


def stacks(result: dict[str, Any]) -> str:
    """A GPU with its versions to a line: how many pieces passed, and which did not."""
    if not result:
        return NOT_YET
    lines = [
        "| GPU | Python, torch, vLLM | commit | passed | did not pass | not run, or left |",
        "|---|---|---|---|---|---|",
    ]
    for check in result.values():
        pieces, packages = check["pieces"], check["packages"]
        bad = [f"{name} ({p['status']})" for name, p in pieces.items() if p["status"] in ("failed", "timed out")]
        other = [n for n in check["planned"] if n not in pieces or pieces[n]["status"] in ("not run", "cut off")]
        passed = sum(p["status"] == "passed" for p in pieces.values())
        stack = f"{check['python']}, {packages.get('torch')}, {packages.get('vllm')}"
        lines.append(
            f"| {check['gpu']} | {stack} | `{check['commit']}` | {passed} of {len(check['planned'])} | "
            f"{', '.join(bad) or 'none'} | {', '.join(other) or 'none'} |"
        )
    return "\n".join(lines)


def numbers(result: dict[str, Any]) -> str:
    """What the demo and the benches gave, per GPU."""
    if not result:
        return NOT_YET
    lines = ["| GPU, vLLM | what | here |", "|---|---|---|"]
    for check in result.values():
        where = f"{check['gpu']}, {check['packages'].get('vllm')}"
        lines += [f"| {where} | {what} | {shown} |" for what, shown in _figures(check["pieces"])]
    return "\n".join(lines)


def _figures(pieces: dict[str, Any]) -> Iterator[tuple[str, str]]:
    held = {name: piece["numbers"] for name, piece in pieces.items() if "numbers" in piece}
    if "demo" in held:
        run = held["demo"]
        yield "demo, right before and after", f"{run['accuracy_before']:.1%}, {run['accuracy_after']:.1%}"
        yield "demo, mismatch KL, median and worst", f"{run['mismatch_kl_median']:.1e}, {run['mismatch_kl_max']:.1e}"
        yield "demo, one push", f"{1e3 * run['sync_seconds_median']:.1f} ms"
    for name, found in held.items():
        if name.startswith("bench-rollout"):
            for shape, facts in found.items():
                for way, row in facts["modes"].items():
                    yield f"rollout, {shape}, `{way}` / stock vLLM", f"{row['ratio']:.2f}x, {row['ours']:.0f} tokens/s"
        elif name.startswith("bench-step"):
            for shape, facts in found.items():
                row = facts["modes"]["step"]
                yield f"a step, {shape}, against TRL", f"{row['ratio']:.2f}x as fast, {1e3 * row['ours']:.0f} ms"
        elif name.startswith("field-"):
            for contender in found["contenders"].values():
                run = next(iter(contender["runs"].values()), None)
                if run is None:
                    yield contender["title"], f"{contender['status']}: `{contender['why']}`"
                elif "accuracy_after" in run:
                    yield contender["title"], f"right {run['accuracy_after']:.1%}, {run['steps_per_s']:.2f} steps/s"
                else:
                    yield contender["title"], f"{run['tokens_per_s']:.0f} tokens/s"
