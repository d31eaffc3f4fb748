"""The server's routes for full weights, under `/qlora/v1/weights`: begin, pieces, parts, commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from qlora_rl.documents import parse_object
from qlora_rl.engine.server.served_weights import ServedWeights
from qlora_rl.engine.server.trainer_lock import TrainerLock
from qlora_rl.errors import ConfigConflictError

if TYPE_CHECKING:
    from fastapi import Request

Handler = Callable[["Request"], Awaitable[dict[str, Any] | None]]


class WeightsApi:
    """The handlers; all of them are asked by the one trainer that pushes (`TrainerLock.trying`).

    Args:
        weights: that serve.
        lease: who may push.
        session: of a request.
        number: of a request's query, by name.
        order: in which changes of what serves are done.
    """

    def __init__(
        self,
        weights: ServedWeights,
        lease: TrainerLock,
        session: Callable[[Request], str],
        number: Callable[[Request, str], int],
        order: asyncio.Lock,
    ):
        self.weights, self.lease, self._session, self._number = weights, lease, session, number
        self._order = order

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Path, method, handler."""
        return [
            ("/weights", "POST", self.begin),
            ("/weights", "PUT", self.write),
            ("/weights/part", "POST", self.take),
            ("/weights/commit", "POST", self.commit),
            ("/weights", "DELETE", self.withdraw),
        ]

    async def begin(self, request: Request) -> dict[str, Any]:
        """Open a push of full weights; `version` in the query. Gives its name, and a directory for a client on this
        host.

        A body, in JSON, says by which other way they come: `WeightChannel.describe`.
        """
        told = await _told(request)
        return await self.weights.begin(self._session(request), self._number(request, "version"), told)

    async def write(self, request: Request) -> dict[str, Any]:
        """The body is a piece of a part (safetensors); `push`, `part` and `offset` in bytes are in the query."""
        push, part = request.query_params.get("push", ""), self._number(request, "part")
        offset = self._number(request, "offset")
        await self.weights.write(self._session(request), push, part, offset, await request.body())
        return {}

    async def take(self, request: Request) -> dict[str, Any]:
        """A part is complete; `push`, `part` and its `digest` (sha256) are in the query. One that comes by another way
        has a body instead: its ticket, size, checksum, and the places of its weights."""
        session, push, index = (
            self._session(request),
            request.query_params.get("push", ""),
            self._number(request, "part"),
        )
        if (carried := await _told(request)) is not None:
            await self.weights.take_carried(session, push, index, carried)
        else:
            await self.weights.take(session, push, index, request.query_params.get("digest", ""))
        return {}

    async def commit(self, request: Request) -> dict[str, Any]:
        """All parts were sent: serve them."""
        session = self._session(request)
        async with self._order:
            self.lease.claim(session)  # somebody may have taken it meanwhile
            return {"new": await self.weights.commit(session, request.query_params.get("push", ""))}

    async def withdraw(self, request: Request) -> dict[str, Any]:
        """Serve nothing until the next push (`reason`); or, with `push`, only throw that unfinished push away."""
        session, push = self._session(request), request.query_params.get("push", "")
        if push:
            async with self.weights.own(session, push):
                self.weights.discard()
            return {}
        reason = request.query_params.get("reason", "")
        if not reason:
            raise ConfigConflictError("withdrawing weights: the query gives no reason. Send one.")
        self.weights.withdraw(reason[:200])
        return {}


async def _told(request: Request) -> dict[str, Any] | None:
    """The body, if there is one.

    Raises:
        ConfigConflictError: it is no JSON object.
    """
    body = await request.body()
    if not body:
        return None
    try:
        return parse_object(body)
    except ValueError as error:
        raise ConfigConflictError(
            f"taking weights: the body is no JSON object ({error}). Send one, or none."
        ) from error
