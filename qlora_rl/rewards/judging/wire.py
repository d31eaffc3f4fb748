"""What crosses between the tests and the program: data as JSON over two pipes. Each side may ask; while it waits it
answers.

Kinds that JSON has not are an object whose first key is the kind: `{"tuple": [1, 2]}`. Only exact kinds cross, and the
receiver makes them itself. Everything else stays where it is, and the other side knows it by a number.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import json
import operator
import os
import sys
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from types import NoneType
from typing import Any

_LONGEST = 64 * 2**20  # bytes of one message
_DEEPEST = 5000  # frames, for data that is nested
_PLAIN = {str, bool, NoneType, int, float}  # as JSON has them
_CONTAINERS: dict[str, Any] = {
    each.__name__: each
    for each in (
        list,
        dict,
        set,
        bytearray,
        collections.deque,
        collections.Counter,
        collections.OrderedDict,
        collections.defaultdict,
    )
}
_MAPPINGS = ("dict", "Counter", "OrderedDict", "defaultdict")
_NAMEDTUPLE: Any = collections.namedtuple
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
# Kinds that are made of what they say of themselves, and classes that are known by name.
_MADE = {"builtins.complex", "builtins.range", "decimal.Decimal", "fractions.Fraction"} | {
    f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")
}
_CLASSES = _MADE | {f"collections.{name}" for name in _CONTAINERS}
_CLASSES |= {
    f"builtins.{name}"
    for name, each in vars(builtins).items()
    if isinstance(each, type) and (issubclass(each, Exception) or not issubclass(each, BaseException))
}


class PeerGone(BaseException):
    """The other side has ended, or says what is no message. No `Exception`: tests that catch those do not catch
    this."""


class ProgramExit(SystemExit):
    """The program ends: no end of the tests."""


class Side:
    """One of the two. A subclass says what may be asked of it, and what stands for objects of the other.

    Args:
        reads: descriptor that the other side's messages come from.
        writes: descriptor for one's own.
    """

    serve: Any  # serve(operation, *arguments, **keywords) does what the other side asks for
    stand_for: Any  # stand_for() makes what stands for an object of the other side's
    own_errors: dict[str, type[BaseException]] = {}  # classes that stand for errors which the program defines
    classes: Set[str] = _CLASSES  # which the other side may name

    def __init__(self, reads: int, writes: int):
        self._reads, self._writes, self._lock = reads, writes, threading.RLock()
        self._lent: list[Any] = []
        self._borrowed: dict[int, Any] = {}  # by the other side's number
        self._numbers: dict[int, dict[str, Any]] = {}  # by id, as it crosses

    def check_lent(self, value: Any) -> None:
        """Raises: TypeError: the other side may not have it."""

    def check_attribute(self, name: str, value: Any) -> None:
        """Raises: PeerGone: data of the other side's may have no such attribute."""

    def known(self, kinds: Any) -> list[str]:
        """Names by which the tests know some classes of errors."""
        return []

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """What the other side answers; raises what it raises.

        Raises:
            PeerGone: the other side is gone.
        """
        crossing = Crossing(self)
        with self._lock:
            self._tell("ask", crossing, (operation, arguments, keywords))
            while (said := self._hear())[0] == "ask":
                self._answer(said)
            value = self._taken(crossing, said)
        if said[0] == "answer":
            return value
        if not isinstance(value, BaseException):
            raise PeerGone
        if isinstance(value, (StopIteration, StopAsyncIteration)):  # it would end a loop of the tests early, and well
            raise RuntimeError(f"the program raised {type(value).__name__}")
        raise value

    def answer(self) -> None:
        """Answer until the other side is gone."""
        while True:
            self._answer(self._hear())

    def lend(self, value: Any) -> dict[str, Any]:
        """How one's own value crosses, by a number; what the other side has lent goes back."""
        if id(value) not in self._numbers:
            self.check_lent(value)
            self._numbers[id(value)] = {"steps" if hasattr(type(value), "__next__") else "object": len(self._lent)}
            self._lent.append(value)
        return self._numbers[id(value)]

    def is_lent(self, value: Any) -> bool:
        """Whether a value crosses by a number."""
        return id(value) in self._numbers

    def lent_as(self, value: Any) -> str | None:
        """How one's own value has been lent, as "object" or "steps"; what was borrowed is "yours"."""
        return next(iter(self._numbers.get(id(value), ())), None)

    def crosses_as(self, alias: Any, value: Any) -> None:
        """Another thing crosses by the number of a value; it has to live as long as this."""
        self._numbers[id(alias)] = self._numbers[id(value)]

    def borrow(self, kind: str, number: int) -> Any:
        """What the other side has lent, or gives back."""
        if kind == "yours":
            return self._lent[number]
        if number not in self._borrowed:
            reference = object()
            made = self._steps(reference) if kind == "steps" else self.stand_for()
            self._borrowed[number] = made, reference
            self._numbers[id(made)] = self._numbers[id(reference)] = {"yours": number}
        return self._borrowed[number][0]

    def error(self, names: list[str], known: list[str], arguments: Any, more: Any, text: str | None) -> BaseException:
        """An error of the other side's: of the classes that the tests know, and of the first that is Python's."""
        standard = next(each for each in map(_standard_error, names) if each)
        own = [self.own_errors[each] for each in known if each in self.own_errors]
        kind = standard
        if own or _standard_error(names[0]) is None:
            bases = (*own, standard) if standard is not Exception or not own else tuple(own)
            shown = {"__module__": "program"} | ({} if text is None else {"__str__": lambda self: text})
            kind = type(names[0].rpartition(".")[2], bases, shown)
        error = kind.__new__(kind, *arguments)
        with suppress(TypeError):  # some are made of other arguments than they keep
            standard.__init__(error, *arguments)
        error.args = arguments
        for key, each in more.items():
            if not key.startswith("__"):
                self.check_attribute(key, each)
                setattr(error, key, each)
        return error

    def _answer(self, said: Any) -> None:
        crossing = Crossing(self)
        try:
            operation, arguments, keywords = self._taken(crossing, said)
        except (TypeError, ValueError) as error:
            raise PeerGone from error
        crossing.watch()
        try:
            kind, value = "answer", self.serve(operation, *arguments, **keywords)
        except (Exception, SystemExit) as error:
            kind, value = "raised", error
        try:
            self._tell(kind, crossing, value)
        except (TypeError, ValueError) as error:  # it cannot cross, and whoever has asked has no answer
            raise PeerGone from error

    def _steps(self, lent: Any) -> Iterator[Any]:
        """The items of an iterator of the other side's, each when it is needed."""
        while True:
            has_ended, value = self.ask("step", lent)
            if has_ended:
                return value
            yield value

    def _tell(self, kind: str, crossing: Crossing, value: Any) -> None:
        with _deep():
            message = json.dumps([kind, crossing.encode(value), crossing.changes()]).encode()
        try:
            write_frame(self._writes, message)
        except OSError as error:
            raise PeerGone from error

    def _hear(self) -> list[Any]:
        try:
            with _deep():
                kind, coded, changes = json.loads(read_frame(self._reads, _LONGEST))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise PeerGone from error
        return [kind, coded, changes]

    def _taken(self, crossing: Crossing, said: Any) -> Any:
        try:
            with _deep():
                value = crossing.decode(said[1])
                crossing.apply(said[2])
                return value
        except Exception as error:  # nothing that `encode` makes
            raise PeerGone from error


@contextmanager
def _deep() -> Iterator[None]:
    """For data that is nested deeply, and long numbers; programs have the interpreter's own limits."""
    deepest, longest = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    sys.setrecursionlimit(max(deepest, _DEEPEST))
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.setrecursionlimit(deepest)
        sys.set_int_max_str_digits(longest)


def step(value: Any) -> tuple[bool, Any]:
    """Whether an iterator has ended, and what it gives."""
    try:
        return False, next(value)
    except StopIteration as end:
        return True, end.value


class Crossing:
    """One question and its answer. Containers in it have numbers, in the order in which both sides meet them."""

    def __init__(self, side: Side):
        self._side = side
        self._met: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._before: list[Any] = []

    def watch(self) -> None:
        """From now on, changes of what has been met are told."""
        self._before = [_items(each) for each in self._met]

    def changes(self) -> list[Any]:
        """What has changed since, for the other side's `apply`."""
        told = []
        for number, before in enumerate(self._before):
            items = _items(self._met[number])
            if len(items) != len(before) or not all(map(operator.is_, items, before)):
                told.append([number, self._all(items)])
        return told

    def apply(self, changes: list[Any]) -> None:
        """Change one's own containers as the other side has."""
        for number, coded in changes:
            _fill(self._met[number], self._each(coded))

    def encode(self, value: Any) -> Any:
        """As what `json.dumps` takes."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if self._side.is_lent(value):
            return self._side.lend(value)
        if _CONTAINERS.get(kind.__name__) is kind:
            if id(value) in self._numbers:
                return {"same": self._numbers[id(value)]}
            self._meet(value)
            more = getattr(value, "default_factory", getattr(value, "maxlen", None))
            return {kind.__name__: self._all(_items(value))} | ({} if more is None else {"more": self.encode(more)})
        if kind in (tuple, frozenset):
            return {kind.__name__: self._all(value)}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind.__bases__ == (tuple,) and hasattr(kind, "_fields"):
            does_more = any(name[0] != "_" and name not in kind._fields for name in vars(kind))
            items = self._all(tuple(tuple.__iter__(value)))
            return {"namedtuple": [kind.__name__, kind._fields, items, self._side.lend(value) if does_more else None]}
        name = class_name(kind)
        if name in _MADE and _class(name) is kind:
            return {"made": [name, self._all(_parts(value))]}
        if isinstance(value, BaseException):
            return {"error": self._error(value)}
        if kind in _VIEWS:
            return self.encode(list(value))
        if isinstance(value, type) and _class(class_name(value)) is value:
            return {"class": class_name(value)}
        return self._side.lend(value)

    def decode(self, coded: Any) -> Any:
        """The value of what `encode` has made."""
        if not isinstance(coded, dict):
            if isinstance(coded, list):
                raise ValueError(coded)
            return coded
        (kind, inner), *_ = coded.items()
        if kind in _CONTAINERS:
            more = self.decode(coded.get("more"))
            made = _CONTAINERS[kind](*([more] if kind == "defaultdict" else [(), more] if kind == "deque" else []))
            self._meet(made)
            _fill(made, self._each(inner))
            return made
        match kind:
            case "same":
                return self._met[inner]
            case "bytes":
                return bytes.fromhex(inner)
            case "tuple" | "frozenset":
                return {"tuple": tuple, "frozenset": frozenset}[kind](self._each(inner))
            case "namedtuple":
                name, fields, items, lent = inner
                named = _NAMEDTUPLE(name, fields)
                if lent is not None:  # its methods are the program's
                    methods = self.decode(lent)
                    named = type(name, (named,), {"__getattr__": lambda _, own: getattr(methods, own)})
                made = named(*self._each(items))
                for field, each in zip(named._fields, made, strict=True):
                    self._side.check_attribute(field, each)
                return made
            case "made" if inner[0] in _MADE:
                return _class(inner[0])(*self._each(inner[1]))
            case "class" if inner in self._side.classes:
                return _class(inner)
            case "error":
                names, known, arguments, more, text = inner
                return self._side.error(names, known, self.decode(arguments), self.decode(more), text)
            case "object" | "steps" | "yours":
                return self._side.borrow(kind, inner)
        raise ValueError(kind)

    def _meet(self, value: Any) -> None:
        self._numbers[id(value)] = len(self._met)
        self._met.append(value)

    def _all(self, values: Any) -> list[Any]:
        return list(values) if set(map(type, values)) <= _PLAIN else [self.encode(each) for each in values]

    def _each(self, coded: list[Any]) -> list[Any]:
        return coded if set(map(type, coded)) <= _PLAIN else [self.decode(each) for each in coded]

    def _error(self, error: BaseException) -> list[Any]:
        mro = type(error).__mro__
        names = [class_name(each) for each in mro]
        text = None if _standard_error(names[0]) else str(error)
        return [names, self._side.known(mro), self.encode(error.args), self.encode(vars(error)), text]


def _items(value: Any) -> list[Any]:
    return [each for pair in value.items() for each in pair] if type(value).__name__ in _MAPPINGS else list(value)


def _fill(value: Any, items: list[Any]) -> None:
    value.clear()
    if type(value).__name__ in _MAPPINGS:
        for key, each in zip(items[::2], items[1::2], strict=True):
            value[key] = each
    elif isinstance(value, set):
        value.update(items)
    else:
        value.extend(items)


def _parts(value: Any) -> Any:
    if isinstance(value, complex):
        return (value.real, value.imag)
    if type(value).__name__ == "timezone":
        return (value.utcoffset(None),)
    return value.__reduce__()[1]


def class_name(kind: Any) -> str:
    """By which a class of the library is found."""
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"


def _standard_error(name: str) -> Any:
    """A class of errors of the library; what ends the interpreter is one of its own."""
    if name == "builtins.SystemExit":
        return ProgramExit
    module, _, own = name.rpartition(".")
    root = module.partition(".")[0]
    found = (
        getattr(sys.modules.get(module), own, None) if root in sys.stdlib_module_names and root != "unittest" else None
    )
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _class(name: str) -> Any:
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own) if name in _CLASSES else None


def read_frame(descriptor: int, longest: int = 2**31) -> bytes:
    """One message: four bytes of its length, then it.

    Raises:
        OSError: there is no whole one, or it is longer.
    """
    length = int.from_bytes(_read(descriptor, 4), "big")
    if length > longest:
        raise OSError(f"a message of {length} bytes")
    return _read(descriptor, length)


def write_frame(descriptor: int, message: bytes) -> None:
    """All of it."""
    left = memoryview(len(message).to_bytes(4, "big") + message)
    while left:
        left = left[os.write(descriptor, left) :]


def _read(descriptor: int, length: int) -> bytes:
    """Not a byte more: what comes behind is not for everybody."""
    parts = []
    while length:
        part = os.read(descriptor, min(length, 2**16))
        if not part:
            raise OSError("the other side has ended")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
