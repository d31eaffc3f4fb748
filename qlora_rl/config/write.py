"""Plain values as TOML; Python reads it and does not write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(document: Mapping[str, Any]) -> str:
    """A document of tables, and of lists of tables; `None` and what holds nothing is left out.

    Args:
        document: values first, then tables: TOML needs this order at the top.
    """
    blocks = [[f"{_key(name)} = {value(each)}" for name, each in document.items() if not _is_table(each)]]
    for name, each in document.items():
        if not _is_table(each):
            continue
        many = isinstance(each, Sequence)
        head = f"[[{_key(name)}]]" if many else f"[{_key(name)}]"
        for table in each if many else [each]:
            lines = [f"{_key(key)} = {value(entry)}" for key, entry in table.items() if entry is not None]
            if lines:
                blocks.append([head, *lines])
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def value(each: Any) -> str:
    """One value, on one line."""
    if isinstance(each, bool):
        return "true" if each else "false"
    if isinstance(each, str):
        if "\\" in each and "'" not in each and each.isprintable():
            return f"'{each}'"  # a regular expression stays readable
        # JSON's escapes are TOML's, but for the one character that JSON leaves as it is.
        return json.dumps(each, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(each, float) and not math.isfinite(each):
        return "nan" if math.isnan(each) else "inf" if each > 0 else "-inf"
    if isinstance(each, int | float):
        return repr(each)
    if isinstance(each, Mapping):
        inside = ", ".join(f"{_key(key)} = {value(entry)}" for key, entry in each.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(each, Sequence):
        return f"[{', '.join(value(entry) for entry in each)}]"
    return str(each)  # dates, which are written as they are read


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else value(name)


def _is_table(each: Any) -> bool:
    """Written under a head of its own."""
    return isinstance(each, Mapping) or (
        isinstance(each, list | tuple) and bool(each) and all(isinstance(entry, Mapping) for entry in each)
    )
