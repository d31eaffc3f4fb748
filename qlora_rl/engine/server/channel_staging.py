"""`ChannelStaging`: an open push whose weights go past the server into vLLM's worker, by a way of `weight_channels`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Mapping
from typing import Any

import torch

from qlora_rl.contracts import Leaf
from qlora_rl.engine.weight_channels import ALIGNED
from qlora_rl.errors import ConfigConflictError, SyncError

# Drops are awaited by nobody, and must not be collected before they are done.
_running: set[asyncio.Future[Any]] = set()


class ChannelStaging:
    """What `Stage` is to files: all parts are checked before the engine is touched. They wait in the worker's memory.

    Attributes:
        token: the push's name.
        nbytes: of all weights that must come.

    Args:
        engine: vLLM's AsyncLLM.
        expected: the weights that must come, by transformers' name.
        version: that they will have.
        session: of the client that may send them.
    """

    def __init__(self, engine: Any, expected: Mapping[str, Leaf], version: int, session: str):
        self.version, self.session, self.token = version, session, secrets.token_hex(16)
        self.nbytes = sum(math.prod(leaf.shape) * getattr(torch, leaf.kind).itemsize for leaf in expected.values())
        self._engine, self._expected = engine, expected
        self._taken: list[int] = []
        self._left = self.nbytes + ALIGNED * len(expected)

    async def begin(self, told: Mapping[str, Any]) -> None:
        """Have the worker open its end of the way.

        Raises:
            SyncError: it cannot.
            ConfigConflictError: what was told cannot be sent to it.
        """
        wanted = {name: [leaf.kind, list(leaf.shape)] for name, leaf in self._expected.items()}
        await self._ask("qlora_begin_carried", self.token, _sendable(told), wanted)

    async def take(self, index: int, part: Mapping[str, Any]) -> None:
        """Have the worker take a part, and check it; the same part may be announced again.

        Raises:
            SyncError: it is not what was sent, or does not fit the model.
        """
        try:
            check, size = int(part["checksum"]), int(part["nbytes"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ConfigConflictError(
                f"taking weights: part={index} comes without a checksum or its size. Send both."
            ) from None
        if index < len(self._taken) and self._taken[index] == check:
            return
        if index != len(self._taken):
            raise SyncError(f"taking weights: part={index} came, part={len(self._taken)} is due. Push again.")
        if not 0 <= size <= self._left:
            raise SyncError(
                f"taking weights: part={index} is said to have {size} bytes, and {self._left} are left of the model's "
                f"{self.nbytes}. Push to the right server."
            )
        await self._ask("qlora_take_carried", self.token, _sendable(part))
        self._taken.append(check)
        self._left -= size

    async def require_all(self) -> None:
        """Raise `SyncError` where a weight of the model is missing."""
        missing = (await self._engine.collective_rpc("qlora_missing_carried", args=(self.token,)))[0]
        if missing:
            raise SyncError(
                f"taking weights version={self.version}: no value came for {len(missing)} of {len(self._expected)} "
                f"weights of the engine, first {missing[0]}. The stream broke off, or the model is another one; push "
                "again.",
                reasons=missing,
            )

    def discard(self) -> None:
        """Have the worker let go of what has come; harmless when repeated, and waits for nobody."""

        async def drop() -> None:
            with contextlib.suppress(Exception):  # an engine that has ended holds nothing
                await self._engine.collective_rpc("qlora_drop_carried", args=(self.token,))

        with contextlib.suppress(RuntimeError):  # the loop has ended, and so has the engine
            task = asyncio.get_running_loop().create_task(drop())
            _running.add(task)
            task.add_done_callback(_running.discard)

    async def _ask(self, call: str, *arguments: Any) -> None:
        why = (await self._engine.collective_rpc(call, args=arguments))[0]
        if why:
            raise SyncError(why)


def _sendable(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a client has said, if it can be sent to vLLM's worker: huge numbers and half characters cannot."""
    import msgspec  # vLLM's own way between its processes

    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(dict(told)))
    except Exception as error:
        raise ConfigConflictError(
            f"taking weights: what was sent cannot be passed on: {error}. Send plain values."
        ) from error
