"""The program's process: runs what the model wrote, as a module that is asked. All of it is in that program's power."""

from __future__ import annotations

import operator
import sys
from types import ModuleType
from typing import Any

from .wire import PeerGone, Side, step

NAME = "program.py"  # in the directory where it runs


def answer(reads: int, writes: int) -> None:
    """Run the program as a module when the judge asks for it, then do what the tests ask of it."""
    try:
        _Program(reads, writes).answer()
    except PeerGone:  # the tests have ended
        return


class _Program(Side):
    def __init__(self, reads: int, writes: int):
        super().__init__(reads, writes)
        sys.setrecursionlimit(sys.getrecursionlimit() + 50)  # for the frames below the program's
        self._operations: dict[str, Any] = {
            "load": self._load,
            "name": self._named,
            "call": lambda function, /, *arguments, **keywords: function(*arguments, **keywords),
            "step": step,
            "get": getattr,
            "set": setattr,
            "item": operator.getitem,
        } | {each.__name__: each for each in (iter, len, bool, str, repr)}

    def serve(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        return self._operations[operation](*arguments, **keywords)

    def stand_for(self) -> Any:
        def asks(*arguments: Any, **keywords: Any) -> Any:
            return self.ask("call", asks, *arguments, **keywords)

        return asks

    def known(self, kinds: Any) -> list[str]:
        return [name for name, each in vars(self._module).items() if any(each is kind for kind in kinds)]

    def _load(self) -> None:
        self._module = load()

    def _named(self, name: str) -> tuple[Any, bool]:
        value = getattr(self._module, name)
        return value, isinstance(value, type)


def load() -> ModuleType:
    """The program, as a module."""
    module = sys.modules["program"] = ModuleType("program")
    prepare(vars(module))
    run(vars(module))
    return module


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
