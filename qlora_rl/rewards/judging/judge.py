"""The judge's process: runs tests that compare values. None of the program's code runs here, and none of its classes is known."""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Callable
from typing import Any

from .modes import errors_of
from .names import PROGRAM, Names
from .wire import PeerGone, ProgramExit, Side, step

TESTS = "tests"  # the file name of the tests' code
PASSED, FAILED, IDLE = b"passed", b"failed", b"idle"
# Attributes of data that are asked about what is expected: no object that stands in the place of data answers that.
_TOLD = frozenset({"startswith", "endswith", "index", "count", "find", "issubset", "issuperset", "isdisjoint"})
_CLOSED = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)


class _Judge(Side):
    """Asks the program for what the tests ask of it."""

    has_failed = False

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().ask(operation, *arguments, **keywords)
        except PeerGone:
            self.has_failed = True
            raise

    def serve(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """The program calls a function of the tests, or takes the next item of an iterator."""
        if operation == "call" and arguments:
            return arguments[0](*arguments[1:], **keywords)
        if operation == "step":
            return step(*arguments)
        raise PeerGone

    def named(self, name: str) -> Any:
        """What a name of the program's stands for."""
        if name in self.own_errors:
            return self.own_errors[name]
        value = self.ask("name", name)
        if isinstance(value, _Handle):
            object.__setattr__(value, "_kind", "class" if name[0].isupper() else "object")
        return value

    def check_lent(self, value: Any) -> None:
        if isinstance(value, _CLOSED) or not (callable(value) or hasattr(type(value), "__next__")):
            raise TypeError(f"a {type(value).__name__} of the tests cannot be given to the program")

    def stand_for(self) -> Any:
        return _Handle(self)


def _asking(operation: str) -> Any:
    return lambda self, /, *arguments: self._judge.ask(operation, self, *arguments)


class _Handle:
    """An object of the program's, which only answers: it is never compared."""

    __slots__ = ("_judge", "_kind")
    __hash__ = object.__hash__
    __setattr__, __getitem__, __iter__, __len__, __bool__, __str__, __repr__ = map(
        _asking, ("set", "item", "iter", "len", "bool", "str", "repr")
    )

    def __init__(self, judge: _Judge):
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_kind", "object")

    def __getattr__(self, name: str) -> Any:
        if name in _TOLD and self._kind == "object":
            self._judge.has_failed = True
        return self._judge.ask("get", self, name)

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        made = self._judge.ask("call", self, *arguments, **keywords)
        if self._kind == "class" and isinstance(made, _Handle):
            object.__setattr__(made, "_kind", "made by the tests")
        return made

    def __eq__(self, other: object) -> bool:
        self._judge.has_failed = True
        raise TypeError("an object of the program's, where the tests compare data")


def judge(tests: str, reads: int, writes: int) -> bytes:
    """Whether the program passes the tests; `IDLE` where they have asked nothing of it."""
    try:
        tree = ast.parse(tests)
        peer = _Judge(reads, writes)
        peer.ask("load")
        peer.own_errors = {name: type(name, (Exception,), {"__module__": "program"}) for name in errors_of(tree)}
        names = Names(tree, vars(builtins), peer.named)
        have_passed = run(tree, names)
    except SystemExit as error:
        have_passed = not error.code and not isinstance(error, ProgramExit)
    except BaseException:
        return FAILED
    if peer.has_failed or not have_passed:
        return FAILED
    return PASSED if names.is_asked else IDLE


def run(tests: ast.Module, names: Names) -> bool:
    """The tests, as the module `__main__`, to their end; whether what `unittest` has run of them has passed."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = names
    sys.modules |= {"__main__": main} | dict.fromkeys(PROGRAM, _ProgramModule(names))
    sys.argv = [TESTS]
    failures: list[Any] = []
    if any(isinstance(node, ast.Attribute) and node.attr == "TestCase" for node in ast.walk(tests)):
        _tell(failures)
    exec(compile(tests, TESTS, "exec", dont_inherit=True), vars(main))
    return not failures


def _tell(failures: list[Any]) -> None:
    """Where `unittest` ends well whatever has failed (`exit=False`), nobody else may look."""
    import unittest

    def telling(add: Callable[..., None]) -> Callable[..., None]:
        def told(result: Any, test: Any, error: Any) -> None:
            failures.append(test)
            add(result, test, error)

        return told

    for name in ("addFailure", "addError"):
        setattr(unittest.TestResult, name, telling(getattr(unittest.TestResult, name)))


class _ProgramModule(types.ModuleType):
    def __init__(self, names: Names):
        super().__init__("program")
        self.__dict__["_names"] = names

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `import` looks for
            raise AttributeError(name)
        return self.__dict__["_names"].of_program(name)
