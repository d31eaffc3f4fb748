"""Sides that take turns until the time is up, and what comes of it."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LEAST_ROUNDS = 3


def in_turns(sides: Mapping[str, Callable[[], float]], seconds: float, most: int = 20) -> dict[str, list[float]]:
    """What every side gives, once per round; one round before the first is not counted.

    Args:
        sides: each gives a number.
        seconds: after which no new round begins; there are three at least.
        most: rounds.
    """
    for side in sides.values():
        side()
    started = time.perf_counter()
    found: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(most):
        if i >= LEAST_ROUNDS and time.perf_counter() - started > seconds:
            break
        for name, side in sides.items():
            found[name].append(side())
    return found


def compare(ours: list[float], against: list[float]) -> dict[str, float | int]:
    """Medians of both, and the median of the ratios of the rounds: what slows a round down slows both sides."""
    return {
        "ours": statistics.median(ours),
        "against": statistics.median(against),
        "ratio": statistics.median([one / other for one, other in zip(ours, against, strict=True)]),
        "rounds": len(ours),
    }


def described(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result under the commit, versions and machine of now; those of an earlier measurement in it give way."""
    import torch

    from qlora_rl.train.run import describe_machine, describe_versions

    now = {
        "commit": measured_at(),
        "versions": describe_versions(),
        "machine": {**describe_machine(), "torch_threads": torch.get_num_threads()},
    }
    return now | {name: value for name, value in result.items() if name not in now}


def measured_at() -> str:
    """The commit of this checkout, with "+changes" where files differ from it; "unknown" without git, or in a copy that
    is no checkout."""
    if shutil.which("git") is None:
        return "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()

    head = git("rev-parse", "HEAD")
    return head + ("+changes" if git("status", "--porcelain", "-uno") else "") if head else "unknown"


def add_to(path: Path, results: Mapping[str, Any]) -> None:
    """Write results into a JSON file of several, under their keys; the others stay."""
    held = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted({**held, **results}.items())), indent=1) + "\n")
