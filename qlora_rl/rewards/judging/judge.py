"""The judge's process: runs the tests, and no code of the program's. What they call is asked of the program; what comes back is data."""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from types import ModuleType
from typing import Any

from .peer import Peer, PeerGone

PASSED, FAILED, IDLE = b"passed", b"failed", b"idle"


class Remote:
    """Stands for an object of the program's: a function, a class, one of its instances.

    Its attributes, items and steps are asked for, and its methods are called; each comes back as data, or as another one of these. Whether it is
    equal to something is decided here, from its data. It has no order and no arithmetic: there the program's object would be asked what it is to
    be compared with.
    """

    __slots__ = ("_judging_data", "_judging_number", "_judging_peer")
    __hash__ = object.__hash__

    def __init__(self, peer: Peer, number: int):
        object.__setattr__(self, "_judging_peer", peer)
        object.__setattr__(self, "_judging_number", number)
        object.__setattr__(self, "_judging_data", (-1, None))

    def __eq__(self, other: object) -> bool:
        if other is self:
            return True
        if other is None:
            return False
        if isinstance(other, Remote):
            raise TypeError("two objects of the program's are no data: compare what they hold")
        return bool(_data(self) == other)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        """What the program's function returns."""
        return _ask(self, "call", *arguments, **keywords)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "set_item", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "delete_item", key)

    def __iter__(self) -> Any:
        return iter(steps) if not isinstance(steps := _ask(self, "iter"), Remote) else steps

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __len__(self) -> int:
        return _ask(self, "len")

    def __bool__(self) -> bool:
        return _ask(self, "bool")

    def __str__(self) -> str:
        return _ask(self, "str")

    def __repr__(self) -> str:
        return _ask(self, "repr")

    def __enter__(self) -> Any:
        return _ask(_ask(self, "get", "__enter__"), "call")

    def __exit__(self, *raised: object) -> Any:
        return _ask(_ask(self, "get", "__exit__"), "call", None, None, None)


class Names(dict[str, Any]):
    """What the tests can name: what they define and import themselves, then Python's own names, then what the program defines.

    A name of Python's or of the standard library is never the program's: it would decide how it is tested. `from program import sum` is.
    """

    def __init__(self, program: ModuleType, tests: ast.Module):
        super().__init__(__name__="__main__")
        self._program = program
        self._of_modules = {
            node.value.id
            for node in ast.walk(tests)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)  # looked for there next
        if name in sys.stdlib_module_names and name in self._of_modules:  # `math.pi`, imported by the program alone
            return importlib.import_module(name)
        try:
            return getattr(self._program, name)
        except AttributeError:
            raise KeyError(name) from None


class _Program(ModuleType):
    def __init__(self, peer: Peer):
        super().__init__("program")
        self.__dict__["_judging_peer"] = peer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `import` looks for
            raise AttributeError(name)
        return self._judging_peer.ask("name", name)


class _Asking(Peer):
    """Counts what is asked, and keeps a failure in a function of the tests that the program has called."""

    has_failed = False
    asked = 0

    def __init__(self, reads: int, writes: int):
        super().__init__(reads, writes, self._called, _can_be_lent, Remote, tells=False)

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        self.asked += 1
        try:
            return super().ask(operation, *arguments, **keywords)
        except PeerGone:
            self.has_failed = True
            raise

    def _called(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if operation not in ("call", "next") or not arguments or not self.has_lent(arguments[0]):
            raise PeerGone
        try:
            return next(arguments[0]) if operation == "next" else arguments[0](*arguments[1:], **keywords)
        except AssertionError:
            self.has_failed = True
            raise


def judge(tests: str, reads: int, writes: int) -> bytes:
    """Whether the program passes the tests; `IDLE` where they have asked nothing of it."""
    peer = _Asking(reads, writes)
    try:
        peer.ask("load")
        sys.modules["program"] = program = _Program(peer)
        tree = ast.parse(tests)
        names = Names(program, tree)
        peer.asked = 0
        exec(compile(tree, "tests", "exec"), names)
    except BaseException:  # exits too
        return FAILED
    if peer.has_failed:
        return FAILED
    return PASSED if peer.asked else IDLE


def _ask(remote: Remote, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
    return remote._judging_peer.ask(operation, remote, *arguments, **keywords)


def _data(remote: Remote) -> Any:
    """Asked for once, until something else is asked: in `f(3) in (4, 5)` a program must not answer twice."""
    peer = remote._judging_peer
    if remote._judging_data[0] != peer.asked:
        value = _ask(remote, "data")
        object.__setattr__(remote, "_judging_data", (peer.asked, value))
    return remote._judging_data[1]


def _can_be_lent(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__next__")
