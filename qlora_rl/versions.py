"""`Versions`: the newest version and the one before it."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class Versions(tuple[T, ...]):
    """At most two versions of whatever is pushed, the newest last; empty before the first push.

    A value that never changes: to undo a failed push is to assign the former value again. What a version was made of is
    not removed here.
    """

    @property
    def newest(self) -> T | None:
        """The version that was pushed last; `None` before the first push."""
        return self[-1] if self else None

    @property
    def before(self) -> T | None:
        """The version before the newest; `None` where it is not kept."""
        return self[-2] if len(self) == 2 else None

    def with_newest(self, newest: T) -> Versions[T]:
        """After a push: what was the newest is now the version before it."""
        return Versions((*self[-1:], newest))

    def without_newest(self) -> Versions[T]:
        """After the newest was revoked: the version before it is the newest."""
        return Versions(self[:-1])

    def without_before(self) -> Versions[T]:
        """After the version before the newest was overwritten."""
        return Versions(self[-1:])
