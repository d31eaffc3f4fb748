"""The directory of a run: named by the file or chosen for it, free to be trained in, and whose run it holds."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
from pathlib import Path

from qlora_rl.config.findings import Finding
from qlora_rl.config.schema import Run
from qlora_rl.locks import is_held

RESOLVED = "run.toml"  # of a run, in its directory
_SOURCE = "# A run of the file "


def usual_directory(path: Path) -> str:
    """Of the first run of a file that does not say it."""
    return str(Path.cwd() / "runs" / path.stem)


def own_directory(run: Run, path: Path) -> tuple[str, list[Finding]]:
    """Of a run whose file does not say it: the next free one, or that of its one run, which is resumed, overwritten or
    continued.

    Which of several runs is meant is never guessed; nor that a run is of this file.
    """
    usual, existing = usual_directory(path), run.existing
    if existing not in ("overwrite", "continue", "resume") or run.dir is not None:
        # Processes on several machines see different directories, and must agree.
        return (usual if are_several() or existing != "auto" else next_of(usual)), []
    own, possible = runs_of(usual, path), possible_runs(usual, path)
    chosen = (possible or [usual])[-1]
    if possible == own and len(own) <= 1 and (chosen == usual or not are_several()):
        return chosen, []
    if len(possible) > 1:
        why = f"several runs may be meant: {', '.join(possible)}"
    elif own:
        why = f"{chosen} is meant, and several processes must be told"
    else:
        why = f"{chosen} may be meant, and is not recorded as a run of this file"
    text = f"'{existing}' without [run] dir: {why}. Say which: --set run.dir={shlex.quote(chosen)}"
    return usual, [Finding("[run] existing", text)]


def check_directory(out: str, existing: str) -> list[Finding]:
    """What is in the way of a run in its directory.

    Args:
        out: the directory.
        existing: what [run] existing says.
    """
    if os.path.exists(out) and not os.path.isdir(out):
        return [Finding("[run] dir", f"{out} is a file")]
    # Rank 0 writes it; other ranks may be on other machines.
    if os.environ.get("RANK", "0") == "0" and (reason := _why_not_writable(out)):
        what = "written" if os.path.isdir(out) else "made"
        return [Finding("[run] dir", f"{out} cannot be {what}: {reason}. Choose another")]
    if not has_trained(out) or existing not in ("auto", "reject"):
        return []
    return [
        Finding(
            "[run] dir",
            f"{out} holds a run. Choose another (--set run.dir={shlex.quote(next_of(out))}), or set [run] existing = "
            "'resume' (go on from its last checkpoint), "
            "'overwrite', or 'continue' (begin again at step 1, after its lines); on the command line: --set "
            "run.existing=overwrite",
        )
    ]


def next_of(usual: str) -> str:
    """The directory of the next run: the number after the last; `usual` where there is none. No process is in it, and
    no run, whosever."""
    taken = {
        each: number
        for each, number in _numbered(usual).items()
        if not os.path.isdir(each) or holds_run(each) or is_held(Path(os.path.realpath(each)))
    }
    sources = {each: source_of(each) for each in taken}
    stem = os.path.basename(usual)
    number = max((taken[each] for each, of in sources.items() if of is None or Path(of).stem == stem), default=0) + 1
    while (found := usual if number == 1 else f"{usual}-{number}") in taken:
        number += 1
    return found


def runs_of(usual: str, file: Path) -> list[str]:
    """The directories whose run is recorded as one of the file, the first run's first.

    Args:
        usual: of its first run; `usual`-2, -3, ... are those of the next ones.
        file: of the runs. Names alone do not tell: `exp-2` may be the second run of exp.toml, or the first of
            exp-2.toml.
    """
    return [each for each in _numbered(usual) if holds_run(each) and source_of(each) == os.path.realpath(file)]


def possible_runs(usual: str, file: Path) -> list[str]:
    """`runs_of`, and those that may be of the file too: nothing is recorded, or, where none is surely its, a file of
    this name elsewhere."""
    own = runs_of(usual, file)

    def may_be(each: str) -> bool:
        source = source_of(each)
        return source is None or (not own and (each == usual or Path(source).stem == os.path.basename(usual)))

    return [each for each in _numbered(usual) if each in own or (holds_run(each) and may_be(each))]


def holds_run(directory: str) -> bool:
    """A run has begun in it, also one that was killed before its first step ended."""
    return has_trained(directory) or os.path.exists(os.path.join(directory, "config.json"))


def has_trained(directory: str) -> bool:
    """A run has left steps in it."""
    return any(each == "metrics.jsonl" or each.startswith("checkpoint-") for each in _names(directory))


def source_line(file: str) -> str:
    """The line of `RESOLVED` that says which file the run is of."""
    return f"{_SOURCE}{json.dumps(file)}"


def source_of(directory: str) -> str | None:
    """The file whose run is in the directory, resolved; `None` where that is not recorded."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(directory, RESOLVED), encoding="utf-8") as handle:
        for line in itertools.takewhile(lambda line: line.startswith("#"), handle):
            if line.startswith(_SOURCE):
                return str(json.loads(line.removeprefix(_SOURCE)))
    return None


def are_several() -> bool:
    """The run is one of several processes, of this machine or of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _numbered(usual: str) -> dict[str, int]:
    """What is there by the names `usual`, `usual`-2, ..., and the numbers, in their order."""
    above, name = os.path.split(usual)
    ours = re.compile(rf"{re.escape(name)}(?:-([1-9]\d*))?")
    numbers = {
        os.path.join(above, each): int(found[1] or 1) for each in _names(above) if (found := ours.fullmatch(each))
    }
    return dict(sorted(numbers.items(), key=lambda each: each[1]))


def _names(directory: str) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        return os.listdir(directory)
    return []


def _why_not_writable(out: str) -> str:
    """What is wrong with the directory, or with the first above it that there is; empty where nothing is."""
    there = os.path.abspath(out)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        return f"{there} is no directory"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"
