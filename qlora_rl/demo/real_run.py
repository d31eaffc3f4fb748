"""`run_real`: a real model learns to add, by the commands with which one trains one's own.

The files of the run (`real_project/`, and the sums) are written into a directory, to be looked at and changed.
"""

from __future__ import annotations

import csv
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from qlora_rl.demo.real_model import real_model
from qlora_rl.errors import RunDirectoryError

_FILES = ("run.toml", "rewards.py")
_HELD_OUT = 24


def write_project(directory: Path, model: str | os.PathLike[str]) -> None:
    """Write run.toml, rewards.py, train.csv and held_out.csv: sums of two digits, as questions.

    Raises:
        RunDirectoryError: the directory is there already.
    """
    _check_free(directory)
    directory.mkdir(parents=True)
    for name in _FILES:
        text = (files(__package__) / "real_project" / name).read_text(encoding="utf-8")
        (directory / name).write_text(text.replace('"MODEL"', f'"{model}"'), encoding="utf-8")
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(sums)
    for name, part in (("held_out.csv", sums[:_HELD_OUT]), ("train.csv", sums[_HELD_OUT:])):
        with (directory / name).open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("question", "answer"))
            rows.writerows((f"What is {a} plus {b}?", a + b) for a, b in part)


def _check_free(directory: Path) -> None:
    if directory.exists():
        raise RunDirectoryError(
            f"starting the demo: {directory} is there already. Choose another directory with --out, or go on with it: "
            f"qlora-rl train {shlex.quote(str(directory / 'run.toml'))}"
        )


def run_real(directory: Path, steps: int | None = None, say: Callable[[str], None] = print) -> int:
    """Make the model and the files, train, evaluate, report; each command is said before it runs.

    Args:
        directory: to write; the run is in `runs/` there.
        steps: optimizer steps; by default those of run.toml.
        say: gets each line for people.

    Returns:
        The exit code of the command that failed; 0.
    """
    _check_free(directory)  # before anything is downloaded
    write_project(directory, real_model().resolve())
    run = directory / "runs" / "sums"
    options = ["--set", f"run.dir={run.resolve()}", *([] if steps is None else ["--set", f"train.max_steps={steps}"])]
    for words in (
        ["eval", str(directory / "run.toml")],
        ["train", str(directory / "run.toml"), *options],
        ["eval", str(run)],
        ["report", str(run)],
    ):
        say(f"\n$ qlora-rl {shlex.join(words)}")
        if code := subprocess.run([sys.executable, "-m", "qlora_rl", *words], check=False).returncode:
            return code
    say(f"\n  its files:     {directory}\n  talk to it:    qlora-rl chat {shlex.quote(str(run))}")
    return 0
