"""The program's process: runs what the model wrote, as a module that is asked or as a script. Everything here is in that program's power."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .peer import Peer, PeerGone
from .values import decode, encode


class Callback:
    """Stands for a function, or an iterator, of the tests."""

    def __init__(self, peer: Peer, number: int):
        self._peer, self._judging_number = peer, number

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        """What the tests' function returns."""
        return self._peer.ask("call", self, *arguments, **keywords)

    def __iter__(self) -> Callback:
        return self

    def __next__(self) -> Any:
        return self._peer.ask("next", self)


def answer(source: str, reads: int, writes: int) -> None:
    """Run the program as a module when the judge asks for it, then do what the tests ask of it."""
    module = _module("program")

    def load() -> None:
        exec(compile(source, "program.py", "exec"), module.__dict__)

    operations: dict[str, Callable[..., Any]] = {
        "load": load,
        "name": lambda name: getattr(module, name),
        "call": lambda function, /, *arguments, **keywords: function(*arguments, **keywords),
        "get": getattr, "set": setattr, "item": operator.getitem, "set_item": operator.setitem, "delete_item": operator.delitem,
        "iter": iter, "next": next, "len": len, "str": str, "repr": repr, "bool": bool,
        "data": lambda value: decode(encode(value, whole=True), lambda kind, inner: None),
    }  # fmt: skip
    peer = Peer(reads, writes, lambda name, a, k: operations[name](*a, **k), lambda value: True, Callback, tells=True)
    try:
        peer.serve()
    except PeerGone:  # the tests have ended
        return


def run(source: str) -> int:
    """Run the program as a script; how it ends is what the interpreter would end with."""
    module = _module("__main__")
    code = 0
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        code = 1
    if "threading" in sys.modules:
        import threading

        for each in threading.enumerate():
            if each is not threading.current_thread() and not each.daemon:
                each.join()
    atexit._run_exitfuncs()
    vars(module).clear()  # what it has opened is written as it goes
    gc.collect()
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(ValueError, AttributeError):  # it has closed it
            stream.flush()
    return code & 0xFF


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["program.py"]
    sys.setrecursionlimit(sys.getrecursionlimit() + 50)  # for the frames below the program's
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # `site` makes them elsewhere
    return module
