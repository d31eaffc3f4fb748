"""Values as JSON. What is data crosses; of everything else only a number crosses, under which its owner knows it.

Other kinds than JSON's are an object with one key, the kind: `{"tuple": [1, 2]}`. What can be changed in place
(`CONTAINERS`) is kept equal on both sides by `sharing`. Objects of a class of the program's own stay there
(`standins`), but for a copy of the data that they are.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import math
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

_LARGE = 2**63
_STANDARD = frozenset(sys.stdlib_module_names)
# Kinds that are copied, each with what gives the data of an object of a subclass, whatever that has redefined.
COPIED: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    complex: complex.__complex__,
}
# Kinds that can be changed in place, those of the library first: they are subclasses of the others.
CONTAINERS: dict[str, type] = {
    "Counter": collections.Counter,
    "defaultdict": collections.defaultdict,
    "OrderedDict": collections.OrderedDict,
    "deque": collections.deque,
    "list": list,
    "dict": dict,
    "set": set,
    "bytearray": bytearray,
}
# Modules whose classes cross by name, as what they are.
_CLASSES = (
    "builtins",
    "collections",
    "collections.abc",
    "datetime",
    "decimal",
    "fractions",
    "numbers",
    "typing",
    "abc",
)
_HIDDEN = {kind.__name__: kind for kind in vars(types).values() if isinstance(kind, type)}  # `function` and others


def data_kind(kind: type) -> type | None:
    """The kind of data that objects of a class are, `None` where they are none."""
    return next((each for each in (*CONTAINERS.values(), *COPIED) if issubclass(kind, each)), None)


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """As what `json.dumps` takes; `other` makes it of what is no immutable data."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_LARGE < value < _LARGE else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind in (tuple, frozenset):
        return {kind.__name__: [encode(each, other) for each in value]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if kind in (range, slice):
        return {kind.__name__: [encode(each, other) for each in (value.start, value.stop, value.step)]}
    if value is Ellipsis or value is NotImplemented:
        return {"constant": repr(value)}
    if isinstance(value, type) and standard_class(name := class_name(value)) is value:
        return {"type": name}
    match class_name(kind):
        case "decimal.Decimal":
            return {"Decimal": str(value)}
        case "fractions.Fraction":
            return {"Fraction": [encode(value.numerator, other), encode(value.denominator, other)]}
        case "datetime.date":
            return {"date": value.isoformat()}
        case "datetime.datetime" | "datetime.time" if (
            value.tzinfo is None or class_name(type(value.tzinfo)) == "datetime.timezone"
        ):
            return {kind.__name__: value.isoformat()}
        case "datetime.timedelta":
            return {"timedelta": [value.days, value.seconds, value.microseconds]}
        case "datetime.timezone":
            return {"timezone": encode(value.utcoffset(None), other)}
    return other(value)


def decode(coded: Any, other: Callable[[str, Any], Any]) -> Any:
    """The value of what `encode` has made; `other(kind, ...)` makes something of what is no data."""
    if not isinstance(coded, dict):
        if isinstance(coded, list):
            raise ValueError(coded)
        return coded
    ((kind, inner),) = coded.items()
    match kind:
        case "int":
            return int(inner, 16)
        case "float":
            return float(inner)
        case "tuple" | "frozenset":
            return {"tuple": tuple, "frozenset": frozenset}[kind](decode(each, other) for each in inner)
        case "bytes":
            return bytes.fromhex(inner)
        case "complex":
            return complex(*map(float, inner))
        case "range" | "slice":
            return {"range": range, "slice": slice}[kind](*(decode(each, other) for each in inner))
        case "constant":
            return {"Ellipsis": ..., "NotImplemented": NotImplemented}[inner]
        case "type":
            return standard_class(inner)
        case "Decimal" | "Fraction":
            made = getattr(importlib.import_module(f"{kind.lower()}{'s' if kind == 'Fraction' else ''}"), kind)
            return made(*([inner] if kind == "Decimal" else (decode(each, other) for each in inner)))
        case "date" | "datetime" | "time" | "timedelta" | "timezone":
            made = getattr(importlib.import_module("datetime"), kind)
            return (
                made(*inner)
                if kind == "timedelta"
                else made(decode(inner, other))
                if kind == "timezone"
                else made.fromisoformat(inner)
            )
    return other(kind, inner)


def class_name(kind: type) -> str:
    """By which a class of the library is found."""
    return f"{type.__getattribute__(kind, '__module__')}.{type.__getattribute__(kind, '__qualname__')}"


def standard_class(name: str, modules: Iterable[str] = _CLASSES) -> type | None:
    """A class of the standard library by its name, of these modules and of those that hold errors."""
    module, _, own = name.rpartition(".")
    if module == "builtins" and own in _HIDDEN:
        return _HIDDEN[own]
    if module in modules:
        found = getattr(builtins if module == "builtins" else importlib.import_module(module), own, None)
    else:
        found = (
            getattr(sys.modules.get(module), own, None)
            if is_standard(module) and not module.startswith("unittest")
            else None
        )
        found = found if isinstance(found, type) and issubclass(found, BaseException) else None
    return found if isinstance(found, type) else None


def is_standard(module: str) -> bool:
    """Whether a module of this name is Python's."""
    return module.partition(".")[0] in _STANDARD
