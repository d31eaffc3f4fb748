"""What both sides hold: containers are kept equal, and everything else is known to the other side by a number."""

from __future__ import annotations

import operator
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from .values import data_kind

Reference = dict[str, int]  # {"mine": 3} of the sender's objects, {"yours": 3} of the receiver's


class Shared:
    """The objects that have crossed, each under the number that its owner has given it."""

    def __init__(self) -> None:
        self._numbers: dict[int, Reference] = {}  # by id; what is known here lives on in the tables
        self._tables: dict[str, dict[int, Any]] = {"mine": {}, "yours": {}}
        self._tracked: dict[
            tuple[str, int], Any
        ] = {}  # containers: what they held when the other side last heard of them
        self._kept: list[Any] = []  # what is known by its id must not end
        self._next = 0

    def reference(self, value: Any) -> Reference | None:
        """By which the other side knows a value, `None` where it does not."""
        return self._numbers.get(id(value))

    def lend(self, value: Any) -> Reference:
        """Make one's own value known."""
        self._next += 1
        return self._keep("mine", self._next, value)

    def borrow(self, number: int, value: Any) -> None:
        """Keep what stands for a value of the other side's; two things may, of which the later one is used."""
        if not isinstance(number, int):
            raise ValueError(number)
        self._kept.append(self._tables["yours"].get(number))
        self._keep("yours", number, value)

    def get(self, owner: str, number: int) -> Any:
        """The value, `owner` as the other side says it: "mine" is its own."""
        return self._tables["yours" if owner == "mine" else "mine"][number]

    def has_lent(self, value: Any) -> bool:
        """Whether the other side was given this very object."""
        return "mine" in (self._numbers.get(id(value)) or {})

    def track(self, value: Any) -> None:
        """Tell the other side of its changes, from the next message on."""
        ((owner, number),) = self._numbers[id(value)].items()
        self._tracked[owner, number] = None

    def changes(self, encode: Callable[[Any], Any]) -> list[Any]:
        """What the other side has not heard of; that it hears of new containers makes more of them."""
        told = []
        for owner, number in _growing(self._tracked):
            value = self._tables[owner][number]
            items = _items(value)
            before = self._tracked[owner, number]
            if before is None or len(items) != len(before) or not all(map(operator.is_, items, before)):
                self._tracked[owner, number] = items
                told.append([owner, number, [encode(each) for each in items]])
        return told

    def apply(self, changes: list[Any], decode: Callable[[Any], Any]) -> None:
        """What the other side has told."""
        told = [("yours" if owner == "mine" else "mine", number, items) for owner, number, items in changes]
        for owner, number, _ in told:
            self._tracked.pop(
                (owner, number), None
            )  # a key of a set may ask for its hash: nothing is told of what is half done
        for owner, number, items in told:
            value = self._tables[owner][number]
            _fill(value, [decode(each) for each in items])
        for owner, number, _ in told:
            self._tracked[owner, number] = _items(self._tables[owner][number])

    def release(self) -> list[Any]:
        """Forget containers that nobody here holds any more, and say which."""
        lost = []
        for owner, number in list(self._tracked):
            if sys.getrefcount(self._tables[owner][number]) == 2:  # the table's and the question's
                self._forget(owner, number)
                lost.append([owner, number])
        return lost

    def forget(self, lost: list[Any]) -> None:
        """What the other side has released."""
        for owner, number in lost:
            self._forget("yours" if owner == "mine" else "mine", number)

    def _keep(self, owner: str, number: int, value: Any) -> Reference:
        self._tables[owner][number] = value
        self._numbers[id(value)] = {owner: number}
        return self._numbers[id(value)]

    def _forget(self, owner: str, number: int) -> None:
        del self._tracked[owner, number]
        del self._numbers[id(self._tables[owner].pop(number))]


def _growing(tracked: dict[tuple[str, int], Any]) -> Iterator[tuple[str, int]]:
    """Its keys, those that are added meanwhile too."""
    seen = 0
    while seen < len(tracked):
        keys = list(tracked)[seen:]
        seen += len(keys)
        yield from keys


def _items(value: Any) -> tuple[Any, ...]:
    """In order: of a dict its keys, then its values; not asked of a subclass."""
    kind: Any = data_kind(type(value))
    if issubclass(kind, dict):
        return (*kind.keys(value), *kind.values(value))
    return (bytes(value),) if kind is bytearray else tuple(kind.__iter__(value))


def _fill(value: Any, new: list[Any]) -> None:
    kind: Any = data_kind(type(value))
    kind.clear(value)
    if issubclass(kind, dict):
        half = len(new) // 2
        for key, each in zip(new[:half], new[half:], strict=True):
            kind.__setitem__(value, key, each)
    elif kind is set:
        set.update(value, new)
    else:
        kind.extend(value, new[0] if kind is bytearray else new)


def empty(kind: Any, extra: Any) -> Any:
    """A container to be filled; `extra` is the default of a `defaultdict`, the greatest length of a `deque`."""
    made = kind.__new__(kind)
    if issubclass(kind, defaultdict):
        made.default_factory = extra
    elif issubclass(kind, deque):
        deque.__init__(made, (), extra)
    return made
