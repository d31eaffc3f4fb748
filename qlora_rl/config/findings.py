"""What is wrong with one value, where it stands, and what was probably meant; for readers, out of JSON Schema."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qlora_rl.config.schema import ALIASES, ELSEWHERE, TABLES, TRAIN, Reward, options

_ONE = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a string in quotes",
    "array": "a list",
    "object": "a table",
    "null": "",
}
_MANY = {"boolean": "booleans", "integer": "whole numbers", "number": "numbers", "string": "strings"}
_BOUNDS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
_SHOWN = 12  # of the values that there are


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        place: such as "[train] learning_rate".
        text: what is wrong, and the way out.
    """

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def misfit(value: Any, schema: Mapping[str, Any]) -> str:
    """A value that pydantic does not take, and what it may be.

    Args:
        value: as it was written.
        schema: JSON Schema of the field.
    """
    near = nearest(value, choices(schema)) if isinstance(value, str) else ""
    return f"{show(value)} is not {words(schema)}{near}"


def words(schema: Mapping[str, Any]) -> str:
    """What JSON Schema asks for, for a reader: "a whole number of at least 1", "a list of strings"."""
    if parts := schema.get("anyOf"):
        return " or ".join(filter(None, dict.fromkeys(map(words, parts))))
    if known := _listed(schema):
        shown = [*map(show, known[:_SHOWN]), *(["..."] if len(known) > _SHOWN else [])]
        return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"
    inside = schema.get("items", schema.get("additionalProperties"))
    many = f" of {_MANY.get(inside.get('type'), 'values')}" if isinstance(inside, Mapping) else ""
    many = f" of {len(schema['prefixItems'])} values" if "prefixItems" in schema else many
    bounds = " and ".join(f"{word} {schema[bound]:g}" for bound, word in _BOUNDS.items() if bound in schema)
    return f"{_ONE.get(schema.get('type', ''), 'any value')}{many} {bounds}".rstrip()


def choices(schema: Mapping[str, Any]) -> list[str]:
    """The only texts that JSON Schema admits; none where any text will do."""
    parts = schema.get("anyOf", [schema])
    is_free = any(part.get("type") == "string" and not _listed(part) for part in parts)
    return [] if is_free else [each for part in parts for each in _listed(part) if isinstance(each, str)]


def _listed(schema: Mapping[str, Any]) -> list[Any]:
    return schema.get("enum") or ([schema["const"]] if "const" in schema else [])


def not_among(value: str, known: Iterable[str]) -> str:
    """The text is none of these, and the nearest of them."""
    known = list(known)
    return f"{show(value)} is none of {', '.join(map(show, known))}{nearest(value, known)}"


def nearest(value: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?", or nothing."""
    close = kin(value, known)
    return f"; did you mean {show(close)}?" if close else ""


def kin(value: str, known: Iterable[str], share: float = 0.6) -> str:
    """The word that was probably meant; empty where there is none.

    A slip seldom hits the first letter, and a short word that begins with another one is another word: ppo is no dpo.

    Args:
        value: as it was written.
        known: the words that there are.
        share: of the letters that must be the same.
    """
    alike = [each for each in known if each.lstrip("-")[:1].lower() == value.lstrip("-")[:1].lower()]
    lower = {each.lower(): each for each in alike}
    close = difflib.get_close_matches(value.lower(), lower, 1, share)
    return lower[close[0]] if close else ""


def elsewhere(name: str, place: str, train: Iterable[str] = ()) -> str:
    """Where a name that a table does not have belongs, as "[table] field"; empty where nothing is called so, or nearly
    so.

    Args:
        name: of a field, as it was written.
        place: of the table that it was written in.
        train: fields of [train].
    """
    found = {each: f"[{TRAIN}] {each}" for each in train}
    for table, held in TABLES.items():
        head = f"[[{table}]]" if held is Reward else f"[{table}]"
        found |= {each: f"{head} {each}" for each in options(held) if head != place}
    found = {**found, **ELSEWHERE, **ALIASES}
    return found.get(name if name in found else kin(name, found, 0.8), "")


def overrides_of(words: Iterable[str], train: Iterable[str]) -> list[str]:
    """`--set table.field=value` for options that name fields of a run's file, such as --learning_rate 1e-5; none where
    one of them does not.

    Args:
        words: of a command line: --name value, --name=value, --table.field=value.
        train: fields of [train].
    """
    found, left = [], list(words)
    while left:
        name, equals, value = left.pop(0).partition("=")
        if not name.startswith("--") or not (field := _dotted(name[2:], train)):
            return []
        if not equals:
            value = left.pop(0) if left and not left[0].startswith("--") else "VALUE"
        found += ["--set", f"{field}={value}"]
    return found


def _dotted(name: str, train: Iterable[str]) -> str:
    table, dot, _ = name.partition(".")
    if dot and table in (*TABLES, TRAIN):
        return name
    head, _, field = elsewhere(name.replace("-", "_"), "", train).partition("] ")
    return f"{head.strip('[]')}{'.0' if head.startswith('[[') else ''}.{field.strip()}" if field else ""


def show(value: Any) -> str:
    """A value as TOML has it, cut where it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return f"the table {{{', '.join(map(str, value))}}}"
    text = f"'{value}'" if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."
