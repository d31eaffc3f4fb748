"""Reward functions by name: one of ours, or `path.py:function`. Looked at without being run, then imported."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qlora_rl.config.findings import nearest, not_among, show
from qlora_rl.config.paths import split_reward
from qlora_rl.config.schema import Reward
from qlora_rl.rewards.load import BUILT_IN, OF_REWARDS, built_in, parameters_of
from qlora_rl.rewards.programs import program_match, tell_modes


def check_use(use: str) -> list[str]:
    """What is wrong with the name of a reward function."""
    path, function = split_reward(use)
    if not path:
        wrong = built_in(function) is None
        return [not_among(function, [*BUILT_IN, "path.py:function"])] if wrong else []
    try:
        names = _parameters_of_file(path)
    except OSError as error:
        return [f"{path}: {error.strerror}"]
    except (SyntaxError, ValueError) as error:
        return [f"{path} is no Python: {error}"]
    if function not in names:
        there = ", ".join(names) or "nothing"
        return [f"{path} has no {show(function)}, but {there}{nearest(function, names)}"]
    return []


def check_arguments(use: str, arguments: Mapping[str, Any]) -> list[str]:
    """Arguments that the function does not take, and arguments of ours that it cannot do without."""
    path, function = split_reward(use)
    takes, required = (_parameters_of_file(path)[function], []) if path else parameters_of(built_in(function))
    found = []
    if takes is not None:
        found += [
            f"{show(name)} is none of {', '.join(sorted(takes))}{nearest(name, takes)}"
            for name in arguments
            if name not in takes
        ]
    return found + [f"{name} is missing: {show(function)} needs it" for name in required if name not in arguments]


def column_of(use: str, arguments: Mapping[str, Any]) -> str | None:
    """The column of the data that a reward of ours compares with; `None` where it needs none, or where it is
    unknown."""
    path, function = split_reward(use)
    if path or built_in(function) is None:
        return None
    column = inspect.signature(built_in(function)).parameters.get("column")
    found = arguments.get("column", column.default if column else None)
    return found if isinstance(found, str) else None


def tell_program_tests(rewards: Iterable[Reward], rows: Any) -> None:
    """Log once how many rows' tests a program could cheat (`program_match`).

    Raises:
        ConfigConflictError: tests of a form that `program_match` does not take.
    """
    for each in rewards:
        column = column_of(each.use, each.arguments)
        if built_in(each.use) is program_match and column in rows.column_names:
            tell_modes(rows[column], column)


def digest(use: str) -> str:
    """SHA-256 of the file of "path.py:function", for the record; empty for a reward of ours."""
    path, _ = split_reward(use)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def _parameters_of_file(path: str) -> dict[str, set[str] | None]:
    """What can be called in a file: names of its arguments, `None` where any will do or they cannot be seen."""
    found: dict[str, set[str] | None] = {}
    for node in ast.parse(Path(path).read_text(encoding="utf-8"), path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            found[node.name] = None if node.args.kwarg else names - set(OF_REWARDS)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.Assign):
            found |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: None for alias in node.names}
    return found
