"""Which texts of a document are paths, and what they are relative to."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_rl.config.schema import TABLES, Rules, options

DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")


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


def runs_of(usual: str) -> list[str]:
    """The directories that hold runs of one file, the first run's first: `usual`, and `usual`-2, -3, ... that were taken after it."""
    above, name = os.path.split(usual)
    ours = re.compile(rf"{re.escape(name)}(?:-([1-9]\d*))?")
    there = os.listdir(above) if os.path.isdir(above) else ()
    numbers = {each: int(found[1] or 1) for each in there if (found := ours.fullmatch(each))}
    paths = [os.path.join(above, each) for each in sorted(numbers, key=lambda each: numbers[each])]
    return [each for each in paths if holds_run(each)]


def next_of(usual: str) -> str:
    """The directory of the next run: `usual`, where no run is in it or in one of those after it; otherwise the number after the last."""
    taken = runs_of(usual)
    if not taken:
        return usual
    number = taken[-1].removeprefix(usual).removeprefix("-")
    return f"{usual}-{int(number or 1) + 1}"


def holds_run(directory: str) -> bool:
    """A run has trained in it."""
    return os.path.exists(os.path.join(directory, "metrics.jsonl"))


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


def _table(table: type, held: Any, root: Path) -> Any:
    if not isinstance(held, Mapping):
        return held
    known = options(table)
    return {name: _anchor(known[name][1], each, root) if name in known else each for name, each in held.items()}


def _anchor(rules: Rules, value: Any, root: Path) -> Any:
    if isinstance(value, list):
        return [_anchor(rules, each, root) for each in value]
    if isinstance(value, Mapping) and rules.kind == "function":
        return {name: _anchor(rules, each, root) for name, each in value.items()}
    if not isinstance(value, str) or not value:
        return value
    if rules.kind == "out":
        return _absolute(value, Path.cwd())
    if rules.kind == "path":
        return _absolute(value, root)
    if rules.kind == "data":
        return _absolute(value, root) if is_file(value) or os.path.exists(root / value) else value
    if rules.kind == "model":
        return _absolute(value, root) if _looks_like_path(value) or os.path.isdir(root / value) else value
    if rules.kind in ("reward", "function"):
        path, function = split_reward(value)
        return f"{_absolute(path, root)}:{function}" if path else value
    return value


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", ".", "~"))


def _absolute(text: str, root: Path) -> str:
    # Not resolved: a link stays what it is.
    return os.path.normpath(root / os.path.expanduser(text))
