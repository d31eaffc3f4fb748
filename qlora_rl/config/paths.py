"""Which texts of a document are paths, and what they are relative to."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_rl.config.schema import TABLES, Table, options
from qlora_rl.locks import is_held

DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
RESOLVED = "run.toml"  # of a run, in its directory
_SOURCE = "# A run of the file "


def anchored(document: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """A copy in which every path is absolute; what is no text, or no path, stays as it is.

    Args:
        document: tables of a run, right or wrong; lists of tables may be tables by number (`--set rewards.0.use=`).
        root: what paths are relative to; `[run] dir` is relative to the working directory.
    """
    found = dict(document)
    for name, table in TABLES.items():
        held = found.get(name)
        if isinstance(held, list):
            found[name] = [_table(table, each, root) for each in held]
        elif isinstance(held, Mapping) and name == "rewards":
            found[name] = {number: _table(table, each, root) for number, each in held.items()}
        else:
            found[name] = _table(table, held, root)
    return {name: each for name, each in found.items() if name in document}


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


def _numbered(usual: str) -> dict[str, int]:
    """What is there by the names `usual`, `usual`-2, ..., and the numbers, in their order."""
    above, name = os.path.split(usual)
    ours = re.compile(rf"{re.escape(name)}(?:-([1-9]\d*))?")
    numbers = {
        os.path.join(above, each): int(found[1] or 1) for each in _names(above) if (found := ours.fullmatch(each))
    }
    return dict(sorted(numbers.items(), key=lambda each: each[1]))


def is_file(text: str) -> bool:
    """A dataset on disk, not one on the hub."""
    return text.endswith(DATA_FILES) or _looks_like_path(text)


def split_reward(use: str) -> tuple[str, str]:
    """File and function of "path.py:function"; no file for one of ours."""
    path, colon, function = use.rpartition(":")
    return (path, function) if colon else ("", use)


def all_uses(value: Any) -> list[str]:
    """Every "path.py:name" of a field that may hold one, a list, or several by name."""
    if isinstance(value, Mapping):
        return list(value.values())
    return [value] if isinstance(value, str) else list(value or [])


def _names(directory: str) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        return os.listdir(directory)
    return []


def _table(table: type[Table], held: Any, root: Path) -> Any:
    if not isinstance(held, Mapping):
        return held
    known = options(table)
    return {name: _anchor(known[name]["kind"], each, root) if name in known else each for name, each in held.items()}


def _anchor(kind: str, value: Any, root: Path) -> Any:
    if isinstance(value, list):
        return [_anchor(kind, each, root) for each in value]
    if isinstance(value, Mapping) and kind == "function":
        return {name: _anchor(kind, each, root) for name, each in value.items()}
    if not isinstance(value, str) or not value:
        return value
    if kind == "out":
        return _absolute(value, Path.cwd())
    if kind in ("path", "file", "adapter"):
        return _absolute(value, root)
    if kind == "data":
        return _absolute(value, root) if is_file(value) or os.path.exists(root / value) else value
    if kind == "model":
        return _absolute(value, root) if _looks_like_path(value) or os.path.isdir(root / value) else value
    if kind in ("reward", "function"):
        path, function = split_reward(value)
        return f"{_absolute(path, root)}:{function}" if path else value
    return value


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", ".", "~"))


def _absolute(text: str, root: Path) -> str:
    # Not resolved: a link stays what it is.
    return os.path.normpath(root / os.path.expanduser(text))
