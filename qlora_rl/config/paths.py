"""Which texts of a document are paths, and what they are relative to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_rl.config.schema import TABLES, TEACHERS, Table, options
from qlora_rl.data.files import is_file, looks_like_path


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


def split_reward(use: str) -> tuple[str, str]:
    """File and function of "path.py:function"; no file for one of ours."""
    path, colon, function = use.rpartition(":")
    return (path, function) if colon else ("", use)


def all_uses(value: Any) -> list[str]:
    """Every "path.py:name" of a field that may hold one, a list, or several by name."""
    if isinstance(value, Mapping):
        return list(value.values())
    return [value] if isinstance(value, str) else list(value or [])


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
    if kind in ("path", "file", "text", "adapter") or (kind == "teacher" and value not in TEACHERS):
        return _absolute(value, root)
    if kind == "data":
        return _absolute(value, root) if is_file(value) or os.path.exists(root / value) else value
    if kind == "model":
        return _absolute(value, root) if looks_like_path(value) or os.path.isdir(root / value) else value
    if kind in ("reward", "function"):
        path, function = split_reward(value)
        return f"{_absolute(path, root)}:{function}" if path else value
    return value


def _absolute(text: str, root: Path) -> str:
    # Not resolved: a link stays what it is.
    return os.path.normpath(root / os.path.expanduser(text))
