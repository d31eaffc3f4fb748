"""The judge's process: runs the tests, and no code of the program's.

What they call is asked of the program; what comes back is data or a stand-in.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import sys
import types
from types import ModuleType
from typing import Any

from .names import Names
from .peer import Peer, PeerGone
from .reached import TESTS, Assertions
from .standins import ARITHMETIC, COMPARISONS, CONVERSIONS, SPECIAL, is_standin, link, parameters
from .values import CONTAINERS, data_kind

_CATCHES = "__judging_catches"
PASSED, FAILED, IDLE = b"passed", b"failed", b"idle"
# What the tests give the program of these it can call or step on, and nothing else: their attributes lead to the
# tests' names.
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
_CLOSED = (
    *_CALLED,
    types.ModuleType,
    types.FrameType,
    types.CodeType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.TracebackType,
)
_EXITS = ("__exit__", "__aexit__")
_SAYING_YES = frozenset(["startswith", "endswith", "issubset", "issuperset", "isdisjoint"])


class _Tests(ModuleType):
    """The module of the tests, as `unittest` and `pickle` look for it; not what the program defines."""

    def __init__(self, names: Names):
        super().__init__("__main__")
        self.__dict__["_names"] = names

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__["_names"]
        if name not in names:
            raise AttributeError(name)
        return names[name]

    def __dir__(self) -> list[str]:
        return list(self.__dict__["_names"])


class _ProgramModule(ModuleType):
    def __init__(self, peer: Peer):
        super().__init__("program")
        self.__dict__["_peer"] = peer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what `import` looks for
            raise AttributeError(name)
        return self.__dict__["_peer"].ask("name", name)


class _Judge(Peer):
    """Asks for the tests, decides what may not be the program's word, and keeps their failures out of its hands."""

    releases = True

    def __init__(self, reads: int, writes: int, tests: ast.Module):
        super().__init__(reads, writes)
        self.has_failed = False
        self.asked = 0
        self.exits: list[BaseException] = []
        self._assertions = Assertions(tests)
        self._owed: list[Any] = []  # functions with assertions that the program has not called to their end
        self._tasks: list[Any] = []

    def is_done(self) -> bool:
        """Whether nothing has failed, and nothing was left out."""
        return not self.has_failed and not self._owed

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        self.asked += operation not in ("load", "library")
        try:
            return super().ask(operation, *arguments, **keywords)
        except PeerGone:
            self.has_failed = True
            raise
        except SystemExit as error:
            self.exits.append(error)
            raise

    def attribute(self, value: Any, name: str) -> Any:
        known = link(value)
        if not known.is_made and known.base is not None and hasattr(known.base, name):
            found = inspect.getattr_static(known.base, name)  # of the kind of data: not as the program has it
            return found.__get__(value, type(value)) if hasattr(found, "__get__") else found
        if name in _SAYING_YES and not known.is_made:
            raise TypeError(f"{name} of an object of the program's, where a text or a set is expected")
        return super().attribute(value, name)

    def special(self, value: Any, name: str, arguments: tuple[Any, ...]) -> Any:
        known: Any = link(value)
        if name in _EXITS and arguments and arguments[0] is not None:
            return self._leave(value, name, arguments) if name == "__exit__" else self._leave_later(value, arguments)
        are_ours = [not is_standin(each) for each in arguments]
        if name in COMPARISONS and any(are_ours):
            return getattr(known.base, name)(value, *arguments) if known.base else NotImplemented
        if name == "__contains__" and not known.is_made and any(are_ours):
            return (
                known.base.__contains__(value, *arguments)
                if known.base
                else any(each is arguments[0] or each == arguments[0] for each in value)
            )
        if known.is_mixed and (name in CONVERSIONS or (name == "__format__" and arguments != ("",))):
            raise TypeError(f"{name} of what the program has made of data of the tests")
        result = super().special(value, name, arguments)
        mixes = any(are_ours) or any(link(each).is_mixed for each in (value, *arguments) if is_standin(each))
        if name in ARITHMETIC and any(are_ours) and result is NotImplemented and known.base is not None:
            raise TypeError(name)
        if name in ARITHMETIC and mixes and result is not NotImplemented:
            for each in result if type(result) is tuple else (result,):
                if not is_standin(each) or link(each).base is not None:
                    raise TypeError(f"{name} of an object of the program's with data gives data")
                link(each).is_mixed = True
        return result

    def _leave(self, value: Any, name: str, arguments: tuple[Any, ...]) -> bool:
        """The program's manager hears of no failure of the tests, and may not keep them from an assertion."""
        _, error, raised = arguments
        try:
            is_kept = bool(self.ask("special", value, name, *_heard(error)))
        except BaseException:
            self.has_failed = self.has_failed or _is_failure(error)
            raise
        return self._is_kept(is_kept, error, raised)

    def catches(self, kinds: Any) -> Any:
        """What a handler of the tests catches. That the program calls `Exception` its error is no right answer."""
        is_failed = isinstance(sys.exc_info()[1], AssertionError)
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            if is_failed and not is_standin(kind) and isinstance(kind, type) and issubclass(AssertionError, kind):
                self.has_failed = True
        return kinds

    async def _leave_later(self, value: Any, arguments: tuple[Any, ...]) -> bool:
        _, error, raised = arguments
        try:
            is_kept = bool(await self.ask("special", value, "__aexit__", *_heard(error)))
        except BaseException:
            self.has_failed = self.has_failed or _is_failure(error)
            raise
        return self._is_kept(is_kept, error, raised)

    def _is_kept(self, is_kept: bool, error: BaseException, raised: types.TracebackType | None) -> bool:
        if _is_failure(error):
            return False
        if is_kept and self._assertions.are_skipped(raised):
            self.has_failed = True
        return is_kept

    def _other_value(self, kind: str, inner: Any) -> Any:
        """What the program hands over is no longer what the tests have constructed, even where it is that."""
        value = super()._other_value(kind, inner)
        if isinstance(value, SystemExit):
            self.exits.append(value)
        if is_standin(value):
            link(value).is_made = False
        return value

    def check_lent(self, value: Any) -> None:
        kind = type(value)
        is_open = (
            callable(value)
            or hasattr(kind, "__next__")
            or hasattr(kind, "__await__")
            or data_kind(kind) in CONTAINERS.values()
        )
        if isinstance(value, ModuleType) or not (is_open or _is_of_tests(kind) or not isinstance(value, _CLOSED)):
            raise TypeError(f"a {kind.__name__} of the tests cannot be given to the program")
        if self._assertions.are_in(value):
            self._owed.append(value)

    def _description(self, value: Any) -> list[Any]:
        if isinstance(value, _CALLED):
            try:
                shown = _without_defaults(value)
                hints = [
                    (k, v)
                    for k, v in getattr(value, "__annotations__", {}).items()
                    if isinstance(v, type) and v.__module__ == "builtins"
                ]
                coded = self._coded((shown, tuple(hints)))
            except (TypeError, ValueError):
                coded = None
            name = getattr(value, "__name__", "function")
            return ["function", name, getattr(value, "__doc__", None), coded, inspect.iscoroutinefunction(value)]
        return super()._description(value)

    def told(self, error: BaseException) -> BaseException:
        """The program does not hear why an assertion has failed."""
        if _is_failure(error):
            self.has_failed = True
            return AssertionError()
        return error

    def serve(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """What the program asks of what it was given; nothing else, and nothing that leads further."""
        if operation in ("done", "cancel"):
            return self._task_is(operation, *arguments)
        if not arguments or not self.shared.has_lent(arguments[0]):
            raise PeerGone
        value, *rest = arguments
        kind = type(value)
        if operation == "call":
            result = value(*rest, **keywords)
            if not inspect.isawaitable(result):
                self._owed = [each for each in self._owed if each is not value]
            return result if not inspect.iscoroutine(result) else self._ended(result, value)
        if operation == "special" and rest and rest[0] in (*SPECIAL, "send", "throw", "close"):
            return getattr(kind, rest[0])(value, *rest[1:])
        if operation == "task":
            return self._task(value)
        if operation in ("copy", "deepcopy") and _is_of_tests(kind):
            return getattr(copy, operation)(value)
        if operation in ("isinstance", "signature"):
            return isinstance(value, *rest) if operation == "isinstance" else _without_defaults(value)
        if operation not in ("get", "set", "delete") or not rest or type(rest[0]) is not str:
            raise PeerGone
        if (
            rest[0].startswith("__")
            or isinstance(value, _CLOSED)
            or (isinstance(value, type) and not _is_of_tests(value))
        ):
            raise AttributeError(rest[0])
        if operation == "get":
            return getattr(value, rest[0])
        if not _is_of_tests(kind) or callable(getattr(value, rest[0], None)):
            raise AttributeError(f"{rest[0]} of the tests cannot be set")
        return setattr(value, *rest) if operation == "set" else delattr(value, *rest)

    async def _ended(self, result: Any, function: Any) -> Any:
        value = await result
        self._owed = [each for each in self._owed if each is not function]
        return value

    def _task(self, value: Any) -> int:
        import asyncio

        try:
            self._tasks.append(asyncio.ensure_future(value, loop=asyncio.get_running_loop()))
        except RuntimeError:

            async def alone() -> Any:
                return await value

            self._tasks.append(asyncio.run(alone()))
        return len(self._tasks) - 1

    def _task_is(self, operation: str, number: int) -> Any:
        import asyncio

        task = self._tasks[number]
        if not isinstance(task, asyncio.Future):
            return (task,)
        if operation == "cancel":
            task.cancel()
            return None
        return (task.result(),) if task.done() else ()


class _Handlers(ast.NodeTransformer):
    """Has `except E` ask `_Judge.catches` where E is no name of Python's: it may stand for `Exception`."""

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        """Of each handler of the tests."""
        self.generic_visit(node)
        if node.type is not None and not all(
            hasattr(builtins, each.id) for each in ast.walk(node.type) if isinstance(each, ast.Name)
        ):
            node.type = ast.copy_location(ast.Call(ast.Name(_CATCHES, ast.Load()), [node.type], []), node.type)
        return node


def judge(tests: str, reads: int, writes: int) -> bytes:
    """Whether the program passes the tests; `IDLE` where they have asked nothing of it."""
    try:
        tree = ast.parse(tests)
        peer = _Judge(reads, writes, tree)
        peer.ask("load")
        sys.modules["program"] = _ProgramModule(peer)
        names = Names(tree, lambda name: peer.ask("library", name), lambda name: peer.ask("name", name))
        names[_CATCHES] = peer.catches
        sys.modules["__main__"] = _Tests(names)
        sys.argv = [TESTS]
        exec(compile(ast.fix_missing_locations(_Handlers().visit(tree)), TESTS, "exec", dont_inherit=True), names)
    except SystemExit as error:
        if error.code or any(each is error for each in peer.exits):
            return FAILED
    except BaseException:
        return FAILED
    if not peer.is_done():
        return FAILED
    return PASSED if peer.asked or names.is_answered else IDLE


def _without_defaults(function: Any) -> tuple[Any, ...]:
    """Its parameters; what the tests expect may be a default."""
    return tuple((name, kind, *([...] if rest else [])) for name, kind, *rest in parameters(function))


def _is_failure(error: BaseException | None) -> bool:
    """How tests say that a program is wrong."""
    is_ending = (
        isinstance(error, BaseException) and not isinstance(error, Exception) and not isinstance(error, GeneratorExit)
    )
    return (
        isinstance(error, AssertionError)
        or type(error) is Exception
        or (is_ending and type(error).__name__ != "CancelledError")
    )


def _heard(error: BaseException | None) -> tuple[Any, Any, None]:
    """What the program's manager is told of an error."""
    return (None, None, None) if _is_failure(error) else (type(error), error, None)


def _is_of_tests(kind: type) -> bool:
    return kind.__module__ == "__main__"
