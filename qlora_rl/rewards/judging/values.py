"""Values as JSON. What crosses is data; of everything else only a number crosses, under which its owner knows it.

A list is a list. Of other kinds there is an object with one key, the kind: `{"tuple": [1, 2]}`. Objects of a class of the program's own stay
there, even where the class is a number's or a list's: what compares, sorts or prints a value here is never code of the program's.
"""

from __future__ import annotations

import builtins
import math
import sys
from collections.abc import Callable
from typing import Any

_PLAIN = (type(None), bool, str)
_LARGE = 2**63
_STANDARD = frozenset(sys.stdlib_module_names)


class NotData(TypeError):
    """A value that cannot cross."""


def encode(value: Any, lend: Callable[[Any], Any] | None = None, *, whole: bool = False) -> Any:
    """As what `json.dumps` takes.

    Args:
        value: to be encoded.
        lend: makes something of what is no data; without it that is `NotData`.
        whole: take an object of a subclass of a kind of data as that kind, whoever has written the class.

    Raises:
        NotData: of something that is no data.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value

    def inner(each: Any) -> Any:
        return encode(each, lend)

    if _is_named_tuple(kind):
        return {"namedtuple": [kind.__name__, list(kind._fields), [inner(each) for each in value]]}
    if not (whole or kind.__module__ in _STANDARD):
        return _lent(value, lend)
    if isinstance(value, int):
        number = int(value)
        return number if -_LARGE < number < _LARGE else {"int": hex(number)}
    if isinstance(value, float):
        real = float(value)
        return real if math.isfinite(real) else {"float": repr(real)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [inner(each) for each in value]
    for known in (tuple, set, frozenset):
        if isinstance(value, known):
            return {known.__name__: [inner(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[inner(key), inner(each)] for key, each in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if kind is range:
        return {"range": [inner(value.start), inner(value.stop), inner(value.step)]}
    if value is Ellipsis or value is NotImplemented:
        return {"constant": repr(value)}
    if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
        return {"type": value.__name__}
    return _of_the_library(value, kind, inner, lend)


def decode(coded: Any, borrow: Callable[[str, Any], Any]) -> Any:
    """The value of what `encode` has made, in kinds of data of this process; `borrow(kind, ...)` makes something of all others."""
    if isinstance(coded, list):
        return [decode(each, borrow) for each in coded]
    if not isinstance(coded, dict):
        return coded
    ((kind, inner),) = coded.items()
    match kind:
        case "int":
            return int(inner, 16)
        case "float":
            return float(inner)
        case "tuple" | "set" | "frozenset":
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(each, borrow) for each in inner)
        case "dict":
            return {decode(key, borrow): decode(each, borrow) for key, each in inner}
        case "bytes" | "bytearray":
            return (bytes if kind == "bytes" else bytearray).fromhex(inner)
        case "complex":
            return complex(*map(float, inner))
        case "range":
            return range(*inner)
        case "constant":
            return {"Ellipsis": ..., "NotImplemented": NotImplemented}[inner]
        case "type":
            found = getattr(builtins, inner)
            return found if isinstance(found, type) else None
        case "namedtuple":
            from collections import namedtuple

            return namedtuple(inner[0], inner[1])(*decode(inner[2], borrow))
        case "deque":
            from collections import deque

            return deque(decode(inner[0], borrow), inner[1])
        case "Decimal":
            from decimal import Decimal

            return Decimal(inner)
        case "Fraction":
            from fractions import Fraction

            return Fraction(*decode(inner, borrow))
        case "date" | "datetime" | "time" | "timedelta":
            return _moment(kind, inner)
    return borrow(kind, inner)


def _of_the_library(value: Any, kind: type, inner: Callable[[Any], Any], lend: Callable[[Any], Any] | None) -> Any:
    """Of modules that are imported only where such values are."""
    match f"{kind.__module__}.{kind.__name__}":
        case "collections.deque":
            return {"deque": [[inner(each) for each in value], value.maxlen]}
        case "decimal.Decimal":
            return {"Decimal": str(value)}
        case "fractions.Fraction":
            return {"Fraction": [inner(value.numerator), inner(value.denominator)]}
        case "datetime.date":
            return {"date": value.isoformat()}
        case "datetime.datetime" | "datetime.time" if value.tzinfo is None:
            return {kind.__name__: value.isoformat()}
        case "datetime.timedelta":
            return {"timedelta": [value.days, value.seconds, value.microseconds]}
    return _lent(value, lend)


def _moment(kind: str, inner: Any) -> Any:
    import datetime

    made = getattr(datetime, kind)
    return made(*inner) if kind == "timedelta" else made.fromisoformat(inner)


def _is_named_tuple(kind: type) -> bool:
    """One that has fields, and nothing else that could be called."""
    fields = getattr(kind, "_fields", ())
    return (
        kind.__bases__ == (tuple,)
        and fields != ()
        and all(name.startswith("_") or name in fields for name in vars(kind))
    )


def _lent(value: Any, lend: Callable[[Any], Any] | None) -> Any:
    if lend is None:
        raise NotData(f"a {type(value).__name__} cannot be compared outside of the program")
    return lend(value)
