"""A run's file as text: plain values as TOML, which Python reads and does not write; and the schema for readers: a
table of every field, and a file to start from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qlora_rl.config.findings import words
from qlora_rl.config.schema import TABLES, TRAIN, Reward, Table, applies, options
from qlora_rl.methods import METHODS, Method

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


def markdown() -> str:
    """Every field of the file, as Markdown: one section per table."""
    methods = "\n".join(f"| `{name}` | {method.says} | {_columns(method)} |" for name, method in METHODS.items())
    parts = [f"| `method` | what it does | columns of the data |\n|---|---|---|\n{methods}"]
    for name, table in TABLES.items():
        head = f"[[{name}]]" if table is Reward else f"[{name}]"
        rows = [
            f"| `{field}` | {words(known).replace(chr(39), '`')} | {_default(known)} | {known['description']} |"
            for field, known in options(table).items()
        ]
        says = (table.__doc__ or "").strip()
        parts.append(
            f"### `{head}`\n\n{says}\n\n| field | is | default | says |\n|---|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(parts) + "\n"


def example(method: str) -> str:
    """A commented file for a method: what a first run needs is said, the rest stands there with its default."""
    lines = [
        f"# {method}: {METHODS[method].says}.",
        "# Lines that are commented out show the default, or an example. `qlora-rl train FILE --check` only checks.",
        "",
        f"method = {value(method)}",
    ]
    for name, table in TABLES.items():
        if table is Reward and not METHODS[method].scores:
            continue
        if body := list(_lines(METHODS[method], name, table)):
            lines += [
                "",
                f"# {(table.__doc__ or '').strip()}",
                f"[[{name}]]" if table is Reward else f"[{name}]",
                *body,
            ]
        if name == "data":
            lines += [
                "",
                "# Fields of TRL's config of the method, by TRL's names.",
                f"[{TRAIN}]",
                *_train_lines(METHODS[method]),
            ]
    return "\n".join(lines) + "\n"


def _lines(method: Method, place: str, table: type[Table]) -> Iterator[str]:
    for name, known in options(table).items():
        if not applies(known, method.name):
            continue
        shown, comment = known.get("default"), "# " if "default" in known else ""
        if shown in (None, [], {}):
            shown = known["example"]
        if (field := f"{place}.{name}") in method.example:
            comment, shown = "", method.example[field]
        yield f"{comment}{name} = {value(shown)}  # {known['description']}"


def _train_lines(method: Method) -> Iterator[str]:
    first = {
        "max_steps": (100, "optimizer steps"),
        "per_device_train_batch_size": (8, "rows, or completions, of a step"),
        "learning_rate": (method.learning_rate, "of AdamW"),
        **method.first,
        "logging_steps": (1, "steps between two lines of the log"),
    }
    for name, (shown, says) in first.items():
        yield f"{name} = {value(shown)}  # {says}"


def _default(known: Mapping[str, Any]) -> str:
    if "default" not in known:
        return "must be given"
    return "" if known["default"] is None else f"`{value(known['default'])}`"


def _columns(method: Method) -> str:
    return " or ".join(" and ".join(f"`{name}`" for name in each) for each in method.columns)
