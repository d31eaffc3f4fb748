"""`Peer`: one end of a conversation over two pipes. Each side may ask; while it waits for an answer it answers what the other asks."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from . import standins
from .sharing import Shared
from .values import CONTAINERS, class_name, data_kind, decode, encode, standard_class

_LONGEST = 64 * 2**20  # bytes of one message
_STEPS = ("__next__", "send", "throw")  # that end by StopIteration


class PeerGone(BaseException):
    """The other side has ended, or says what is no message. No `Exception`: tests that catch those do not catch this."""


class Peer:
    """Asks and answers, by threads one at a time.

    Args:
        reads: descriptor that the other side's messages come from.
        writes: descriptor for one's own.
    """

    serve: Callable[..., Any]  # serve(operation, *arguments, **keywords) does what the other side asks for
    releases = False  # one of the two sides says when a container is needed no more

    def __init__(self, reads: int, writes: int):
        self._reads, self._writes, self._lock = reads, writes, threading.RLock()
        self.shared = Shared()
        self._described: list[Any] = []  # what the next message makes known
        standins._Restoring.peer = self

    def check_lent(self, value: Any) -> None:
        """Raises: TypeError: the other side may not have it."""

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """What the other side answers; raises what it raises.

        Raises:
            PeerGone: the other side is gone.
        """
        with self._lock:
            coded = [
                operation,
                [self._coded(each) for each in arguments],
                {k: self._coded(v) for k, v in keywords.items()},
            ]
            self._send("ask", coded)
            while (message := self._receive())[0] == "ask":
                self._answer(*message[1])
            value = self._decoded(self._value, message[1])
        if message[0] == "answer":
            return value
        if not isinstance(value, BaseException):
            raise PeerGone
        ends_loop = isinstance(value, (StopIteration, StopAsyncIteration))
        if ends_loop and not (operation == "done" or (operation == "special" and arguments[1] in _STEPS)):
            raise RuntimeError(
                f"the program raised {type(value).__name__}"
            )  # it would end a loop of the tests early, and well
        raise value

    def answer(self) -> None:
        """Answer until the other side is gone."""
        while True:
            kind, content = self._receive()
            if kind != "ask":
                raise PeerGone
            self._answer(*content)

    def attribute(self, value: Any, name: str) -> Any:
        """Of what stands for an object of the other side's."""
        found = self.ask("get", value, name) if name != "__signature__" else self.ask("signature", value)
        return found if name != "__signature__" else standins.signature(found)

    def special(self, value: Any, name: str, arguments: tuple[Any, ...]) -> Any:
        """What a special method of it returns."""
        return standins.wait_for(value, self) if name == "__await__" else self.ask("special", value, name, *arguments)

    def told(self, error: BaseException) -> BaseException:
        """The error that the other side hears of."""
        return error

    def _answer(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> None:
        values = self._decoded(lambda: [self._value(each) for each in arguments])
        named = self._decoded(lambda: {key: self._value(each) for key, each in keywords.items()})
        try:
            kind, coded = "answer", self._coded(self.serve(operation, *values, **named))
        except (Exception, SystemExit, GeneratorExit) as error:
            kind, coded = "raised", self._raised(self.told(error))
        except BaseException as error:
            if type(error).__name__ != "CancelledError":
                raise
            kind, coded = "raised", self._raised(error)
        self._send(kind, coded)

    def _raised(self, error: BaseException) -> Any:
        try:
            return self._coded(error)
        except Exception:
            return {"exception": [["builtins.TypeError"], {"tuple": [str(type(error))]}, [], None]}

    def _coded(self, value: Any) -> Any:
        return encode(value, self._coded_object)

    def _coded_object(self, value: Any) -> Any:
        if isinstance(value, TracebackType):
            return None
        kind = type(value)
        if isinstance(value, BaseException) and standard_class(class_name(kind)) is kind:
            return {"exception": self._coded_error(value)}
        reference = self.shared.reference(value)
        if reference is None:
            self.check_lent(value)
            reference = self.shared.lend(value)
            (number,) = reference.values()
            self._described.append([number, self._description(value)])
            if data_kind(kind) in CONTAINERS.values():
                self.shared.track(value)
        return reference

    def _description(self, value: Any) -> list[Any]:
        return standins.describe(value, self._coded)

    def _coded_error(self, error: BaseException) -> list[Any]:
        names = [class_name(each) for each in type(error).__mro__]
        more = [[key, self._coded(each)] for key, each in vars(error).items()]
        return [names, self._coded(error.args), more, self._coded(error.__cause__)]

    def _value(self, coded: Any) -> Any:
        return decode(coded, self._other_value)

    def _other_value(self, kind: str, inner: Any) -> Any:
        if kind == "exception":
            return self._error(*inner)
        if kind in ("mine", "yours"):
            return self.shared.get(kind, inner)
        raise ValueError(kind)

    def _error(self, names: list[str], arguments: Any, more: list[Any], cause: Any) -> BaseException:
        kind = standard_class(names[0])
        if kind is None or not issubclass(kind, BaseException):
            kind = Exception
        values = self._value(arguments)
        if type(values) is not tuple:
            raise ValueError(arguments)
        try:
            error = kind(*values)
        except TypeError:  # it is made of other arguments than it keeps
            error = kind.__new__(kind)
            error.args = values
        for key, each in more:
            setattr(error, str(key), self._value(each))
        if cause is not None:
            error.__cause__ = self._value(cause)
        return error

    def _made(self, number: int, description: list[Any]) -> Any:
        return standins.make(number, description, self, self._value)

    def _decoded(self, make: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return make(*arguments)
        except Exception as error:  # nothing that `encode` makes
            raise PeerGone from error

    def _send(self, kind: str, coded: Any) -> None:
        changes = self.shared.changes(self._coded)
        lost = self.shared.release() if kind == "ask" and self.releases else []
        text = json.dumps([kind, coded, self._described, changes, lost])
        self._described = []
        try:
            write_frame(self._writes, text.encode())
        except OSError as error:
            raise PeerGone from error

    def _receive(self) -> tuple[str, Any]:
        try:
            kind, content, described, changes, lost = json.loads(read_frame(self._reads, _LONGEST))
            for number, description in described:
                self.shared.borrow(number, self._made(number, description))
                if data_kind(type(self.shared.get("mine", number))) in CONTAINERS.values():
                    self.shared.track(self.shared.get("mine", number))
            self.shared.apply(changes, self._value)
            self.shared.forget(lost)
        except (Exception, RecursionError) as error:
            raise PeerGone from error
        if kind not in ("ask", "answer", "raised") or (kind == "ask" and not _is_question(content)):
            raise PeerGone
        return kind, content


def _is_question(content: Any) -> bool:
    return isinstance(content, list) and [type(each) for each in content] == [str, list, dict]


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
