"""Does a value out of a TOML file fit a type hint, and what is the hint in plain words?"""

from __future__ import annotations

import types
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string in quotes", dict: "a table"}
_MANY = {bool: "booleans", int: "whole numbers", float: "numbers", str: "strings", dict: "tables"}

_SHOWN = 12  # of an enumeration


def fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value may stand where `hint` is asked for; a whole number is a number, true is neither."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in _narrowed(parts))
    if origin is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if origin in (list, tuple, dict) or hint in (list, dict):
        return _fits_inside(value, origin or hint, parts)
    if hint is Any:
        return True
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in choices(hint)
    return hint in (bool, str) and isinstance(value, hint)


def choices(hint: Any) -> list[str]:
    """The only texts that a hint admits: those of an enumeration or a Literal in it; none where any text will do."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return [str(member.value) for member in hint]
    if get_origin(hint) is Literal:
        return [part for part in get_args(hint) if isinstance(part, str)]
    parts = _narrowed(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else ()
    return [] if str in parts else [choice for part in parts for choice in choices(part)]


def takes_nothing(hint: Any) -> bool:
    """`None` may stand there, and no text: TOML has no null, so the text "none" is free to mean it."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return type(None) in parts and not fits("none", hint)


def words(hint: Any) -> str:
    """The hint for a reader: "a whole number", "a list of strings"; empty where no TOML value fits."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        found = dict.fromkeys(words(part) for part in _narrowed(parts) if part is not type(None))
        found.pop("", None)
        return " or ".join(found)
    if origin is Literal:
        shown = [_shown(part) for part in parts]
        return shown[0] if len(shown) == 1 else f"one of {', '.join(shown)}"
    if origin in (list, tuple):
        return f"a list of {_MANY.get(parts[0], 'values') if parts else 'values'}"
    if origin is dict:
        return f"a table of {_MANY.get(parts[1], 'values')}"
    if hint is list:
        return "a list"
    if hint is Any:
        return "any value"
    if isinstance(hint, type) and issubclass(hint, Enum):
        shown = [_shown(choice) for choice in choices(hint)]
        return f"one of {', '.join(shown[:_SHOWN])}{', ...' if len(shown) > _SHOWN else ''}"
    return _WORDS.get(hint, "")


def _narrowed(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """`SomeEnum | str` is the enumeration: transformers takes its values as text, and no other text."""
    if any(isinstance(part, type) and issubclass(part, Enum) for part in parts):
        return tuple(part for part in parts if part is not str)
    return parts


def _fits_inside(value: Any, kind: type, parts: tuple[Any, ...]) -> bool:
    if kind is dict:
        if not isinstance(value, Mapping):
            return False
        return not parts or all(fits(each, parts[1]) for each in value.values())
    if not isinstance(value, list | tuple):
        return False
    if kind is tuple and parts and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(fits, value, parts))
    return not parts or all(fits(each, parts[0]) for each in value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"'{value}'" if isinstance(value, str) else str(value)
