"""What stands for the other side's classes, objects and functions.

For each class there is a class with its name, bases and special methods, so that `isinstance`, `except`, `match` and
`sorted` find what they look for. Attributes are asked for, and methods are called, on the other side. An object of a
subclass of a kind of data is an object of that kind here, too, with a copy of its data.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Generator
from typing import Any

from .sharing import empty
from .values import CONTAINERS, COPIED, class_name, data_kind, is_standard, standard_class

COMPARISONS = frozenset(f"__{each}__" for each in ["eq", "ne", "lt", "le", "gt", "ge"])
_BINARY = [
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "divmod",
    "pow",
    "lshift",
    "rshift",
    "and",
    "xor",
    "or",
]
ARITHMETIC = frozenset(f"__{prefix}{each}__" for each in _BINARY for prefix in ("", "r", "i")) - {"__idivmod__"} | {
    "__neg__",
    "__pos__",
    "__invert__",
}
CONVERSIONS = frozenset(
    f"__{each}__"
    for each in ["abs", "int", "float", "complex", "index", "round", "trunc", "floor", "ceil", "bool", "len"]
)
_OTHERS = (
    "call length_hint getitem setitem delitem contains iter next reversed str repr format bytes hash "
    "enter exit aenter aexit aiter anext await fspath missing"
)
SPECIAL = COMPARISONS | ARITHMETIC | CONVERSIONS | {f"__{each}__" for each in _OTHERS.split()}
# What an object here answers itself; every other attribute is asked for.
_OWN = frozenset(
    [
        "_standin",
        "__class__",
        "__copy__",
        "__deepcopy__",
        "__reduce_ex__",
        "__traceback__",
        "__suppress_context__",
        "__context__",
        "with_traceback",
        "add_note",
    ]
)
_ASKED_OF_CLASSES = frozenset(
    [
        "__doc__",
        "__annotations__",
        "__match_args__",
        "__slots__",
        "__members__",
        "__init__",
        "__abstractmethods__",
        "__wrapped__",
        "__orig_bases__",
    ]
)


class Link:
    """What an object that stands for another knows of it.

    Args:
        peer: the other side.
        base: the kind of data that it is, too.
        is_made: the tests have constructed it.
        is_mixed: it comes of arithmetic with data of the tests.
    """

    def __init__(self, peer: Any, base: type | None):
        self.peer, self.base, self.is_made, self.is_mixed = peer, base, False, False


def link(value: Any) -> Link:
    """Of what stands for something of the other side's."""
    found: Link = object.__getattribute__(value, "_standin")
    return found


def is_standin(value: object) -> bool:
    """Whether a value stands for an object of the other side's; a class does not count."""
    return issubclass(type(value), StandIn)


class ClassStandIn(type):
    """Of the classes that stand for classes, and of the tests' own subclasses of them."""

    _peer: Any
    _stands_for: type | None = None

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> Any:
        """For a `class` statement of the tests. The other side gets a subclass, whose methods ask this one."""
        made = super().__new__(mcs, name, bases, namespace)
        peer = next(vars(each)["_peer"] for each in made.__mro__ if "_peer" in vars(each))
        own = {
            key: each for key, each in namespace.items() if key not in ("__module__", "__qualname__", "__classcell__")
        }
        members = {key: _taken_apart(each) for key, each in own.items()}
        peer.shared.borrow(peer.ask("subclass", name, bases, members, keywords), made)
        return made

    def __init__(cls, *arguments: Any, **keywords: Any):
        pass

    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            if name == "__dataclass_fields__":
                return getattr(dataclasses.make_dataclass("Fields", cls._peer.ask("fields", cls)), name)
            if name == "__signature__":
                return signature(cls._peer.ask("signature", cls))
            if name in ("__mro__", "__bases__"):
                shown = tuple(each for each in type.__getattribute__(cls, name) if each is not StandIn)
                return shown or (object,)
            if name not in _ASKED_OF_CLASSES:
                return type.__getattribute__(cls, name)
        if name == "mro":
            return lambda: list(cls.__mro__)
        if name in ("_peer", "_stands_for") or _is_defined_here(cls, name):
            return type.__getattribute__(cls, name)
        return cls._peer.ask("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._peer.ask("set", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        cls._peer.ask("delete", cls, name)

    def __call__(cls, /, *arguments: Any, **keywords: Any) -> Any:
        """An object that is constructed over there."""
        made = cls._peer.ask("call", cls, *arguments, **keywords)
        if type(made) is cls and cls.__name__[:1].isupper():
            link(made).is_made = True
        return made

    def __instancecheck__(cls, value: Any) -> bool:
        return type.__instancecheck__(cls, value) or (
            is_standin(value) and cls._peer.ask("isinstance", value, cls) is True
        )

    def __getitem__(cls, key: Any) -> Any:
        return cls._peer.ask("item", cls, key)

    def __iter__(cls) -> Any:
        return iter(cls._peer.ask("list", cls))

    def __len__(cls) -> int:
        return cls._peer.ask("special", cls, "__len__")

    def __bool__(cls) -> bool:
        return True

    def __contains__(cls, value: Any) -> bool:
        return any(each is value for each in cls) if is_standin(value) else False


class StandIn:
    """Base of the classes that stand for classes: an object of it stands for an object."""

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return (
                getattr(type(self), "_stands_for", None) or type(self)
                if name == "__class__"
                else object.__getattribute__(self, name)
            )
        if name == "__dataclass_fields__":
            return getattr(type(self), name)
        if _is_defined_here(type(self), name):
            return object.__getattribute__(self, name)
        return link(self).peer.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        link(self).peer.ask("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        link(self).peer.ask("delete", self, name)

    def __copy__(self) -> Any:
        return link(self).peer.ask("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return link(self).peer.ask("deepcopy", self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (link(self).peer.ask("dumps", self),)


class _Restoring:
    peer: Any = None


def _restored(data: bytes) -> Any:
    return _Restoring.peer.ask("loads", data)


class _Member:
    """An attribute of a class over there, for `super()`."""

    def __init__(self, name: str):
        self._name = name

    def __set_name__(self, owner: Any, name: str) -> None:
        self._owner = owner

    def __get__(self, value: Any, kind: Any) -> Any:
        return self._owner._peer.ask("member", self._owner, self._name, kind if value is None else value)


def describe(value: Any, lend: Callable[[Any], Any]) -> list[Any]:
    """One's own class or object, for the other side to make what stands for it; `lend` gives what it refers to."""
    if isinstance(value, type):
        bases = [lend(each) for each in value.__bases__ if each is not object]
        members = [name for name in vars(value) if _is_member(name)]
        return ["class", value.__name__, value.__qualname__, value.__module__, bases, members, _specials(value)]
    kind = type(value)
    base = data_kind(kind)
    data: Any = None
    if base in COPIED:
        data = COPIED[base](value)
    elif base is not None:
        data = (
            getattr(value, "default_factory", None)
            if base is CONTAINERS["defaultdict"]
            else getattr(value, "maxlen", None)
        )
    elif isinstance(value, BaseException):
        data = value.args
    if (is_standard(kind.__module__) and base is None) or kind in CONTAINERS.values():
        return ["standard", class_name(kind), None if base else _specials(kind), lend(data)]
    return ["object", lend(kind), lend(data)]


def make(number: int, description: list[Any], peer: Any, value_of: Callable[[Any], Any]) -> Any:
    """What stands for a class or an object that the other side has described."""
    match description:
        case ["class", str(name), str(qualified), str(module), bases, members, specials]:
            return _make_class(name, qualified, module, [value_of(each) for each in bases], members, specials, peer)
        case ["standard", str(name), specials, data]:
            if specials is None:
                return empty(CONTAINERS[name.rpartition(".")[2]], value_of(data))
            own = name.rpartition(".")[2]
            made = _make_object(
                _make_class(own, own, "program", [], [], specials, peer, standard_class(name)), peer, None
            )
            peer.shared.borrow(number, made)
            return _native(own, made, peer)
        case ["object", kind, data]:
            return _make_object(value_of(kind), peer, value_of(data))
    raise ValueError(description)


def _make_class(
    name: str,
    qualified: str,
    module: str,
    bases: list[Any],
    members: list[str],
    specials: dict[str, bool],
    peer: Any,
    stands_for: Any = None,
) -> ClassStandIn:
    namespace: dict[str, Any] = {each: _Member(each) for each in members if _is_member(each)}
    namespace |= {
        each: _forwarded(each) if is_there else None for each, is_there in specials.items() if each in SPECIAL
    }
    if "__eq__" in namespace and "__hash__" not in namespace:
        namespace["__hash__"] = object.__hash__
    namespace |= {"__module__": module, "__qualname__": qualified, "_peer": peer, "_stands_for": stands_for}
    if stands_for is types.FunctionType:
        namespace["__get__"] = lambda self, value, kind=None: self if value is None else types.MethodType(self, value)
    real = tuple(each for each in bases if isinstance(each, ClassStandIn) or issubclass(each, BaseException))
    kinds = tuple(kind for each in bases if each not in real and (kind := data_kind(each)))
    above = (*real, *(each for each in kinds if not any(issubclass(one, each) for one in real)))
    if not any(isinstance(each, ClassStandIn) for each in above):
        above = (StandIn, *above)
    made: ClassStandIn = type.__new__(ClassStandIn, name, above, namespace)
    for each in bases:
        if each not in real and isinstance(each, types.GenericAlias | type) and hasattr(each, "register"):
            each.register(made)
    return made


def _make_object(kind: Any, peer: Any, data: Any) -> Any:
    if not isinstance(kind, ClassStandIn):
        raise ValueError(kind)
    base: Any = data_kind(kind)
    made: Any
    if base in COPIED:
        made = base.__new__(kind, data)
    elif base is not None:
        made = empty(kind, data)
    elif issubclass(kind, BaseException):
        made = kind.__new__(kind)
        vars(BaseException)["args"].__set__(made, data)
    else:
        made = object.__new__(kind)
    object.__setattr__(made, "_standin", Link(peer, base))
    return made


def _native(name: str, made: Any, peer: Any) -> Any:
    """Coroutines and generators of this side that wait for those of the other."""
    if name == "coroutine":

        async def waiting() -> Any:
            return await _Awaited(made, peer)

        return waiting()
    if name == "generator":

        def going() -> Generator[Any, Any, Any]:
            return (yield from _Steps(made, peer))

        return going()
    return made


class _Steps:
    def __init__(self, value: Any, peer: Any):
        self._value, self._peer = value, peer

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> Any:
        return self._peer.ask("special", self._value, "__next__")

    def send(self, value: Any) -> Any:
        return self._peer.ask("special", self._value, "send", value)

    def throw(self, *raised: Any) -> Any:
        return self._peer.ask("special", self._value, "throw", *raised)

    def close(self) -> Any:
        return self._peer.ask("special", self._value, "close")


class _Awaited:
    def __init__(self, value: Any, peer: Any):
        self._value, self._peer = value, peer

    def __await__(self) -> Generator[None, None, Any]:
        return wait_for(self._value, self._peer)


def wait_for(value: Any, peer: Any) -> Generator[None, None, Any]:
    """Await something of the other side's: its loop goes on a little with each question."""
    task = peer.ask("task", value)
    done = ()
    try:
        while not done:
            yield
            done = peer.ask("done", task)
    except GeneratorExit:
        raise
    except BaseException as error:
        if type(error).__name__ == "CancelledError":
            peer.ask("cancel", task)
        raise
    return done[0]


def _forwarded(name: str) -> Callable[..., Any]:
    def special(self: Any, /, *arguments: Any) -> Any:
        return link(self).peer.special(self, name, arguments)

    def call(self: Any, /, *arguments: Any, **keywords: Any) -> Any:
        return link(self).peer.ask("call", self, *arguments, **keywords)

    return call if name == "__call__" else special


def _specials(kind: type) -> dict[str, bool]:
    """The special methods that a class does not have from `object` or a kind of data; False where one is `None`."""
    found = {}
    for name in SPECIAL:
        owner = next((each for each in kind.__mro__ if name in vars(each)), object)
        is_native = owner is object or (
            is_standard(owner.__module__)
            and (owner in (*CONTAINERS.values(), *COPIED) or issubclass(owner, BaseException))
        )
        if not is_native:
            found[name] = vars(owner)[name] is not None
    return found


def _is_member(name: str) -> bool:
    """Whether `super()` may look for it; what Python itself looks for in a class is in `SPECIAL`."""
    return not name.startswith("__") or name in ("__init__", "__post_init__")


def _is_defined_here(kind: Any, name: str) -> bool:
    """Whether a class of the tests, between this one and the first that stands for another, has the name."""
    for each in type.__getattribute__(kind, "__mro__"):
        own = type.__getattribute__(each, "__dict__")
        if "_peer" in own:
            return False
        if name in own:
            return True
    return False


def _taken_apart(value: Any) -> Any:
    """A member of a class as what can cross: kind, then its functions."""
    if isinstance(value, property):
        return ("property", value.fget, value.fset, value.fdel)
    if isinstance(value, (classmethod, staticmethod)):
        return (type(value).__name__, value.__func__)
    return ("value", value)


def put_together(member: tuple[Any, ...]) -> Any:
    """Again."""
    kind, *parts = member
    made: dict[str, Callable[..., Any]] = {
        "property": property,
        "classmethod": classmethod,
        "staticmethod": staticmethod,
    }
    return made[kind](*parts) if kind in made else parts[0]


def parameters(function: Any) -> tuple[Any, ...]:
    """Of a function, as data."""
    found = inspect.signature(function)
    return tuple(
        (each.name, int(each.kind), *([] if each.default is each.empty else [each.default]))
        for each in found.parameters.values()
    )


def signature(shown: tuple[Any, ...]) -> inspect.Signature:
    """Of what `parameters` has given."""
    made = [
        inspect.Parameter(
            name, inspect._ParameterKind(kind), default=default[0] if default else inspect.Parameter.empty
        )
        for name, kind, *default in shown
    ]
    return inspect.Signature(made)
