"""The judge's process: runs tests that compare values. None of the program's code runs here, and none of its classes is
known."""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Callable
from typing import Any

from .modes import classes_of, errors_of
from .names import PROGRAM, Names
from .wire import PeerGone, ProgramExit, Side, step

TESTS = "tests"  # the file name of the tests' code
PASSED, FAILED, IDLE = b"passed", b"failed", b"idle"
# Methods of data that are told what is expected: no object that stands in the place of data answers that.
_TOLD = frozenset({
    "startswith", "endswith", "index", "rindex", "count", "find", "rfind", "removeprefix", "removesuffix", "issubset",
    "issuperset", "isdisjoint", "intersection", "union", "difference", "symmetric_difference",
})  # fmt: skip
_CLOSED = (type, types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)


class _Judge(Side):
    """Asks the program for what the tests ask of it."""

    has_failed = False
    named_classes: frozenset[str] = frozenset()  # names that are classes in the tests' text
    classes = Side.classes - {"builtins.type"}  # of it the program could have a class made here

    def __init__(self, reads: int, writes: int):
        super().__init__(reads, writes)
        self._aliases: dict[tuple[int, str], _Handle] = {}

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        try:
            return super().ask(operation, *arguments, **keywords)
        except PeerGone:
            self.has_failed = True
            raise

    def serve(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """The program calls a function that the tests have lent it, or takes the next item of such an iterator; nothing
        else."""
        lent = self.lent_as(arguments[0]) if arguments else None
        if operation == "call" and lent == "object":
            return arguments[0](*arguments[1:], **keywords)
        if operation == "step" and lent == "steps":
            return step(*arguments)
        raise PeerGone

    def named(self, name: str) -> Any:
        """What a name of the program's stands for."""
        if name in self.own_errors:
            return self.own_errors[name]
        value, is_class = self.ask("name", name)
        if is_class and name in self.named_classes and isinstance(value, _Handle):
            return self.alias(value, "class")
        return value

    def alias(self, handle: _Handle, kind: str) -> _Handle:
        """The same object, of another kind for the tests alone: what the program gives is always of the kind
        "object"."""
        if (id(handle), kind) not in self._aliases:
            alias = self._aliases[id(handle), kind] = _Handle(self, kind)
            self.crosses_as(alias, handle)
        return self._aliases[id(handle), kind]

    def check_attribute(self, name: str, value: Any) -> None:
        if name in _TOLD and callable(value):
            raise PeerGone

    def check_lent(self, value: Any) -> None:
        if isinstance(value, _CLOSED) or not (callable(value) or hasattr(type(value), "__next__")):
            raise TypeError(f"a {type(value).__name__} of the tests cannot be given to the program")

    def stand_for(self) -> Any:
        return _Handle(self)


def _asking(operation: str) -> Any:
    return lambda self, /, *arguments: self._judge.ask(operation, self, *arguments)


class _Handle:
    """An object of the program's, which only answers: it is never compared.

    Its kind says whether it may be told what is expected: a "class" that the tests name and what they have "made" of it
    may, an "object" that the program gives may not, and a method of that which would be "told" may not either.
    """

    __slots__ = ("_judge", "_kind")
    __hash__ = object.__hash__
    __setattr__, __getitem__, __iter__, __len__, __bool__, __str__, __repr__ = map(
        _asking, ("set", "item", "iter", "len", "bool", "str", "repr")
    )

    def __init__(self, judge: _Judge, kind: str = "object"):
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_kind", kind)

    def __getattr__(self, name: str) -> Any:
        value = self._judge.ask("get", self, name)
        if name in _TOLD and self._kind not in ("class", "made") and callable(value):
            if isinstance(value, _Handle):
                return self._judge.alias(value, "told")
            self._judge.has_failed = True
        return value

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        if self._kind == "told" and not all(isinstance(each, _Handle) for each in (*arguments, *keywords.values())):
            self._judge.has_failed = True
        answer = self._judge.ask("call", self, *arguments, **keywords)
        return self._judge.alias(answer, "made") if self._kind == "class" and isinstance(answer, _Handle) else answer

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
        peer.named_classes = frozenset(classes_of(tree).values())
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
