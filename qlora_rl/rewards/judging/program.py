"""The program's process: runs what the model wrote, as a module that is asked. All of it is in that program's power."""

from __future__ import annotations

import copy
import operator
import pickle
import sys
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .peer import Peer, PeerGone
from .standins import parameters, put_together, signature
from .values import is_standard

NAME = "program.py"  # in the directory where it runs


def answer(reads: int, writes: int) -> None:
    """Run the program as a module when the judge asks for it, then do what the tests ask of it."""
    try:
        _Program(reads, writes).answer()
    except PeerGone:  # the tests have ended
        return


class _Program(Peer):
    def __init__(self, reads: int, writes: int):
        super().__init__(reads, writes)
        self._module = ModuleType("program")
        sys.setrecursionlimit(sys.getrecursionlimit() + 50)  # for the frames below the program's
        self._tasks: list[Any] = []
        self._operations: dict[str, Callable[..., Any]] = {
            "load": self._load,
            "name": lambda name: getattr(self._module, name),
            "library": self._library,
            "call": lambda function, /, *arguments, **keywords: function(*arguments, **keywords),
            "special": lambda value, name, *arguments: getattr(type(value), name)(value, *arguments),
            "member": self._member,
            "subclass": self._subclass,
            "task": self._task,
            "done": self._done,
            "cancel": lambda number: self._tasks[number].cancel() and None,
            "dumps": pickle.dumps,
            "loads": pickle.loads,
            "signature": parameters,
            "fields": lambda kind: list(kind.__dataclass_fields__),
            "get": getattr,
            "set": setattr,
            "delete": delattr,
            "item": operator.getitem,
            "list": list,
            "isinstance": isinstance,
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
        }

    def serve(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        return self._operations[operation](*arguments, **keywords)

    def _load(self) -> None:
        sys.modules["program"] = self._module
        prepare(vars(self._module))
        run(vars(self._module))

    def _library(self, name: str) -> str | None:
        """Where a name of the program's comes from: a module of Python's, or what such a module holds."""
        value = getattr(self._module, name)
        if isinstance(value, ModuleType):
            return value.__name__
        module = getattr(value, "__module__", None)
        is_taken = (
            isinstance(module, str) and is_standard(module) and getattr(sys.modules.get(module), name, None) is value
        )
        return f"{module}.{name}" if is_taken else None

    def _member(self, kind: type, name: str, value: Any) -> Any:
        member = vars(kind)[name]
        if not hasattr(type(member), "__get__"):
            return member
        return member.__get__(None, value) if isinstance(value, type) else member.__get__(value, type(value))

    def _subclass(self, name: str, bases: tuple[type, ...], members: dict[str, Any], keywords: dict[str, Any]) -> int:
        namespace = {key: put_together(each) for key, each in members.items()}
        made = types.new_class(name, bases, keywords, lambda own: own.update(namespace, __module__="__main__"))
        (number,) = self.shared.lend(made).values()
        return number

    def _made(self, number: int, description: list[Any]) -> Any:
        if description[0] == "function":
            _, name, document, shown, is_asynchronous = description
            return _function(name, document, self._value(shown), is_asynchronous, self)
        return super()._made(number, description)

    def _task(self, value: Any) -> int:
        import asyncio

        if not hasattr(self, "_loop"):
            self._loop = asyncio.new_event_loop()
        self._tasks.append(asyncio.ensure_future(value, loop=self._loop))
        return len(self._tasks) - 1

    def _done(self, number: int) -> tuple[Any, ...]:
        import asyncio

        task = self._tasks[number]
        if not task.done() and not self._loop.is_running():
            self._loop.run_until_complete(asyncio.wait([task], timeout=0.002))
        return (task.result(),) if task.done() else ()


def _function(name: str, document: str | None, shown: Any, is_asynchronous: bool, peer: Peer) -> Any:
    """A function that asks for one of the tests'; it looks like that one."""

    def asks(*arguments: Any, **keywords: Any) -> Any:
        return peer.ask("call", made, *arguments, **keywords)

    async def waits(*arguments: Any, **keywords: Any) -> Any:
        return await asks(*arguments, **keywords)

    made: Any = waits if is_asynchronous else asks
    made.__name__ = made.__qualname__ = name
    made.__doc__ = document
    if shown is not None:
        made.__signature__ = signature(shown[0])
        made.__annotations__ = dict(shown[1])
    return made


def prepare(names: dict[str, Any]) -> None:
    """The interpreter, for a program that is to be run with these names."""
    import site

    names.update(__file__=NAME, __builtins__=sys.modules["builtins"])
    sys.argv = [NAME]
    site.setquit()
    site.setcopyright()
    site.sethelper()


def run(names: dict[str, Any]) -> None:
    """The program, from its file."""
    with open(NAME, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    exec(compile(source.removeprefix("\ufeff"), NAME, "exec", dont_inherit=True), names)
