"""`RayRPC`: messages through a named actor; both sides are drivers, or actors, of one Ray cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from qlora_rl.errors import MissingDependencyError

POLL_S = 0.5  # one call of the actor waits no longer: a reader that was killed must not be waited for


class RayRPC:
    """A mailbox in the cluster; whichever side comes first starts it.

    Args:
        name: of the actor.
        namespace: of Ray; both sides' own by default, which must then be one.
    """

    def __init__(self, name: str = "qlora-rl-sync", namespace: str | None = None):
        self.name, self.namespace = name, namespace

    def connect(self, timeout_s: float) -> _Mailed:
        """The sender's end."""
        return _Mailed(self._mailbox, "receiver", "sender", timeout_s)

    def listen(self) -> _Mailed:
        """The receiver's end."""
        return _Mailed(self._mailbox, "sender", "receiver")

    def _mailbox(self) -> Any:
        try:
            import ray
        except ImportError as error:
            raise MissingDependencyError(
                "opening RayRPC: ray is not installed. pip install 'qlora-rl[ray]'."
            ) from error
        options = {"name": self.name, "get_if_exists": True, "num_cpus": 0, "max_concurrency": 16}
        if self.namespace is not None:
            options["namespace"] = self.namespace
        return ray.remote(Mailbox).options(**options).remote()


class Mailbox:
    """Runs as an actor. Messages stay until a later one is asked for: one that a killed reader had asked for is not
    lost."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[int, bytes]]] = {"sender": [], "receiver": []}
        self._last = 0
        self._arrived = asyncio.Condition()

    async def put(self, whom: str, message: bytes) -> None:
        """Keep it for a side."""
        async with self._arrived:
            self._last += 1
            self._kept[whom].append((self._last, message))
            self._arrived.notify_all()

    async def newest(self) -> int:
        """Where a reader begins that has no business with what was sent before it came."""
        return self._last

    async def get(self, whom: str, after: int, timeout_s: float) -> tuple[int, bytes] | None:
        """The first message of a side behind number `after`; those up to it are dropped."""
        async with self._arrived:
            self._kept[whom] = [entry for entry in self._kept[whom] if entry[0] > after]
            try:
                await asyncio.wait_for(self._arrived.wait_for(lambda: self._kept[whom]), timeout_s)
            except TimeoutError:
                return None
            return self._kept[whom][0]


class _Mailed:
    def __init__(self, open_mailbox: Callable[[], Any], whom: str, me: str, timeout_s: float = 60.0):
        self._open, self._mailbox, self._whom, self._me = open_mailbox, open_mailbox(), whom, me
        # A receiver begins with what was sent before it came: its sender may have been first.
        self._after = self._call("newest", timeout_s=timeout_s) if me == "sender" else 0

    def send(self, message: bytes, timeout_s: float) -> None:
        self._call("put", self._whom, message, timeout_s=timeout_s)

    def receive(self, timeout_s: float) -> bytes | None:
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.001, min(POLL_S, deadline - time.monotonic()))
            entry = self._call("get", self._me, self._after, left, timeout_s=left + 30.0)
            if entry is not None:
                self._after, message = entry
                return message
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        """The actor ends with the process that started it."""

    def _call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(getattr(self._mailbox, method).remote(*arguments), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"Ray's mailbox has not answered for {timeout_s:g} s") from error
        except ray.exceptions.RayActorError as error:
            self._mailbox, self._after = self._open(), 0
            raise ConnectionError(f"Ray's mailbox is gone: {error}") from error
