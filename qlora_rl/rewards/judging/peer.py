"""`Peer`: one end of a conversation over two pipes. Each side may ask; while it waits for an answer it answers what the other asks."""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from .values import decode, encode

_LONGEST = 64 * 2**20  # bytes of one message
_CHANGEABLE = (list, dict, set, bytearray)
_STANDARD = frozenset(sys.stdlib_module_names)


class PeerGone(BaseException):
    """The other side has ended, or says what is no message. No `Exception`: tests that catch those do not catch this."""


class Peer:
    """Asks and answers.

    Args:
        reads: descriptor that the other side's messages come from.
        writes: descriptor for one's own.
        serve: `serve(operation, arguments, keywords)` does what the other side asks for.
        may_lend: what of one's own the other side may hold, by a number; nothing else than data and this crosses.
        proxy: a class; `proxy(peer, number)` stands for something of the other side's, and knows its `_judging_number`.
        tells: whether the other side hears what an error says, or its class alone.
    """

    def __init__(
        self,
        reads: int,
        writes: int,
        serve: Callable[[str, list[Any], dict[str, Any]], Any],
        may_lend: Callable[[Any], bool],
        proxy: type[Any],
        *,
        tells: bool,
    ):
        self._reads, self._writes, self._serve, self._may_lend = reads, writes, serve, may_lend
        self._proxy, self._tells = proxy, tells
        self._lent: list[Any] = []
        self._numbers: dict[int, int] = {}  # by id; what is lent lives on in the list
        self._borrowed: dict[int, Any] = {}
        self._errors: dict[str, type[BaseException]] = {}

    def ask(self, operation: str, /, *arguments: Any, **keywords: Any) -> Any:
        """What the other side answers; raises what it raises.

        Raises:
            PeerGone: the other side is gone.
        """
        self._send(
            ["ask", operation, [self._coded(a) for a in arguments], {k: self._coded(a) for k, a in keywords.items()}]
        )
        while (message := self._receive())[0] == "ask":
            self._answer(*message[1:])
        try:
            value = self._error(*message[1:]) if message[0] == "raised" else self._value(message[1])
            for place, changed in message[2] if message[0] == "answer" else ():
                _change(arguments[place], self._value(changed))
        except Exception as error:  # nothing that `encode` makes
            raise PeerGone from error
        if message[0] != "raised":
            return value
        if isinstance(value, StopIteration) and operation != "next":  # it would end a loop of the tests early, and well
            raise RuntimeError("the program raised StopIteration")
        raise value

    def serve(self) -> None:
        """Answer until the other side is gone."""
        while True:
            message = self._receive()
            if message[0] != "ask":
                raise PeerGone
            self._answer(*message[1:])

    def has_lent(self, value: Any) -> bool:
        """Whether the other side was given this very object."""
        return any(each is value for each in self._lent)

    def _answer(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> None:
        try:
            values = [self._value(each) for each in arguments]
            result = self._serve(operation, values, {key: self._value(each) for key, each in keywords.items()})
            after = [[n, self._coded(v)] for n, v in enumerate(values) if type(v) in _CHANGEABLE]
            message = ["answer", self._coded(result), [[n, coded] for n, coded in after if coded != arguments[n]]]
            text = json.dumps(message)
        except Exception as error:
            text = json.dumps(
                ["raised", _names(type(error)), [self._told(each) for each in error.args] if self._tells else []]
            )
        except SystemExit:
            text = json.dumps(["raised", ["builtins.SystemExit"], []])
        self._send_text(text)

    def _told(self, value: Any) -> Any:
        try:
            return encode(value)
        except Exception:
            return str(value)

    def _coded(self, value: Any) -> Any:
        return encode(value, self._lend_coded)

    def _lend_coded(self, value: Any) -> Any:
        if isinstance(value, self._proxy):
            return {"yours": value._judging_number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": _names(value)}
        if not self._may_lend(value):
            raise TypeError(
                f"a {type(value).__name__} of the tests cannot be given to the program: data and functions can"
            )
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._lent)
            self._lent.append(value)
        return {"mine": self._numbers[id(value)]}

    def _value(self, coded: Any) -> Any:
        return decode(coded, self._borrow)

    def _borrow(self, kind: str, inner: Any) -> Any:
        match kind:
            case "mine":
                if inner not in self._borrowed:  # one for each
                    self._borrowed[inner] = self._proxy(self, inner)
                return self._borrowed[inner]
            case "yours":
                return self._lent[inner]
            case "error":
                return self._error_class(inner)
        raise PeerGone

    def _error(self, names: list[str], arguments: list[Any]) -> BaseException:
        kind = self._error_class(names)
        try:
            error = kind.__new__(kind)
        except TypeError:  # one that needs arguments
            error = Exception.__new__(Exception)
        error.args = tuple(self._value(each) for each in arguments)
        return error

    def _error_class(self, names: list[str]) -> type[BaseException]:
        """This side's class of an error of the other side: Python's own, or one made under it for each of the other's."""
        if names[0] not in self._errors:
            known = [each for each in map(_standard_error, names) if each is not None]
            base = known[0] if known else Exception
            is_own = _standard_error(names[0]) is None
            self._errors[names[0]] = type(names[0].rpartition(".")[2], (base,), {}) if is_own else base
        return self._errors[names[0]]

    def _send(self, message: list[Any]) -> None:
        self._send_text(json.dumps(message))

    def _send_text(self, text: str) -> None:
        try:
            write_frame(self._writes, text.encode())
        except OSError as error:
            raise PeerGone from error

    def _receive(self) -> list[Any]:
        try:
            message = json.loads(read_frame(self._reads, _LONGEST))
            if isinstance(message, list) and len(message) >= 3 and message[0] in ("ask", "answer", "raised"):
                return message
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise PeerGone from error
        raise PeerGone


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


def _change(own: Any, new: Any) -> None:
    """What the other side has changed in what it was given."""
    if type(own) is not type(new) or type(own) not in _CHANGEABLE:
        raise PeerGone
    own.clear()
    own.extend(new) if isinstance(own, (list, bytearray)) else own.update(new)


def _names(kind: type) -> list[str]:
    return [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__ if issubclass(each, BaseException)]


def _standard_error(name: str) -> type[BaseException] | None:
    """An error of the standard library by its name, where its module is loaded."""
    module, _, own = name.rpartition(".")
    if module.partition(".")[0] not in _STANDARD:
        return None
    found = getattr(builtins if module == "builtins" else sys.modules.get(module), own, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
