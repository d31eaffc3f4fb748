"""The server's own routes, under `/qlora/v1`: what a trainer needs and vLLM's OpenAI server does not give; and which
trainer may push.

Every answer names the start of the server and the version that serves. A request that names another start is rejected
(412): after a restart nothing runs on the bare base by mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from qlora_rl.documents import parse_object
from qlora_rl.engine import compat
from qlora_rl.engine.client.engine import PREFIX, SESSION, VERSION
from qlora_rl.engine.client.http_errors import GAVE_UP, RESTARTED, START
from qlora_rl.engine.images import Prompt, token_ids, unpack
from qlora_rl.engine.server.auth import TooLargeError
from qlora_rl.engine.server.served_adapter import ServedPolicy, Wanted
from qlora_rl.errors import ConfigConflictError, QloraRLError, ServerTakenError

logger = logging.getLogger(__name__)

STATUS = {
    "AccessDeniedError": 403,
    "ConfigConflictError": 400,
    "PromptTooLongError": 400,
    "EngineUnsupportedError": 400,
    "ServerTakenError": 409,
    "VersionGoneError": 409,
    "SyncError": 422,
    "EngineBrokenError": 503,
}
Handler = Callable[[Request], Awaitable[dict[str, Any] | None]]
GONE = 499  # the client has closed the connection; nobody reads it


class TrainerLock:
    """One trainer at a time pushes.

    Args:
        idle_s: after so many seconds without a word from it, another may take its place.
    """

    def __init__(self, idle_s: float):
        self.idle_s = idle_s
        self._holder = ""
        self._heard = 0.0
        self._open: Counter[str] = Counter()
        self._changes = 0  # that were not rejected

    @contextlib.contextmanager
    def hearing(self, session: str) -> Iterator[None]:
        """A request: while one of the holder's is open, it is not silent."""
        self._open[session] += 1
        try:
            yield
        finally:
            self._open[session] -= 1
            self._open += Counter()  # forgets zeros
            if session == self._holder:
                self._heard = time.monotonic()

    @contextlib.contextmanager
    def awaiting(self, session: str) -> Iterator[None]:
        """Within `hearing`, while bytes of the request are waited for: if they do not come, its trainer is silent."""
        self._open[session] -= 1
        try:
            yield
        finally:
            self._open[session] += 1
        if session == self._holder:
            self._heard = time.monotonic()

    def claim(self, session: str, *, force: bool = False) -> None:
        """Become the holder.

        Raises:
            ServerTakenError: another one is.
        """
        if not force:
            self.reject_other(session)
        self._holder, self._heard = session, time.monotonic()

    @contextlib.contextmanager
    def trying(self, session: str) -> Iterator[None]:
        """A change that this trainer asks for: whoever is rejected does not become the holder.

        Raises:
            ServerTakenError: another one is.
        """
        before, changes = (self._holder, self._heard), self._changes
        self.claim(session)
        try:
            yield
        except BaseException:
            if before[0] != session == self._holder and changes == self._changes:
                self._holder, self._heard = before
            raise
        self._changes += 1

    def reject_other(self, session: str) -> None:
        """Raise `ServerTakenError` where another trainer holds the server."""
        silent = 0.0 if self._open[self._holder] else time.monotonic() - self._heard
        if self._holder and self._holder != session and silent < self.idle_s:
            raise ServerTakenError(
                f"taking the server: another trainer holds it and was heard {silent:.0f} s ago. Start a server of your "
                f"own, stop that trainer, wait until it has been silent for {self.idle_s:.0f} s, or take it with "
                "ServerEngine.claim(force=True)."
            )

    def release(self, session: str) -> None:
        """Stop being the holder."""
        if session == self._holder:
            self._holder = ""


class Api:
    """The handlers.

    Args:
        policy: what serves.
        about: what does not change while the server runs, for `/state`.
        lease: who may push.
    """

    def __init__(self, policy: ServedPolicy, about: dict[str, Any], lease: TrainerLock):
        self.policy, self.about, self.lease = policy, about, lease
        self.start = secrets.token_hex(8)

    def router(self) -> APIRouter:
        """All of them."""
        router = APIRouter(prefix=PREFIX, tags=["qlora-rl"])
        changing = (
            ("/repair", "POST", self.repair),
            ("/adapter", "PUT", self.push),
            ("/adapter", "DELETE", self.drop),
            ("/weights", "POST", self.begin_weights),
            ("/weights", "PUT", self.write_part),
            ("/weights/part", "POST", self.take_part),
            ("/weights/commit", "POST", self.commit_weights),
            ("/weights", "DELETE", self.withdraw_weights),
        )
        for path, method, handler in (
            ("/state", "GET", self.state),
            ("/base", "GET", self.base),
            ("/held", "GET", self.held),
            ("/generate", "POST", self.generate),
            ("/score", "POST", self.score),
            ("/lease", "POST", self.claim),
            ("/lease", "DELETE", self.release),
            *((path, method, self._by_its_trainer(handler)) for path, method, handler in changing),
        ):
            router.add_api_route(path, self._answering(handler), methods=[method], name=handler.__name__)
        return router

    def _by_its_trainer(self, handler: Handler) -> Handler:
        """For what changes the server: needs the lease, and gives it only to what is not rejected."""

        @functools.wraps(handler)
        async def changed(request: Request) -> dict[str, Any] | None:
            session = _session(request)
            self.lease.reject_other(session)  # before its body comes
            await request.body()
            with self.lease.trying(session):
                return await handler(request)

        return changed

    async def state(self, request: Request) -> dict[str, Any]:
        """What the server is, and the digest of what serves."""
        return {**self.about, "digest": self.policy.digest, "pushes": self.policy.pushes}

    async def base(self, request: Request) -> dict[str, Any]:
        """The base as vLLM holds it (`BaseFingerprint.as_dict`)."""
        return await self.policy.describe_base()

    async def repair(self, request: Request) -> dict[str, Any]:
        """Write the exact scales back; the largest relative error of each weight."""
        return (await self.policy.engine.collective_rpc("qlora_repair_scales"))[0]

    async def held(self, request: Request) -> dict[str, Any]:
        """Digests of what vLLM multiplies with, cut to `rank`."""
        return {"held": await self.policy.holds(_number(request, "rank"))}

    async def push(self, request: Request) -> dict[str, Any]:
        """The body is an adapter (`pack_adapter`); its version and digest are in the query."""
        version, digest = _number(request, "version"), request.query_params.get("digest", "")
        blob = await request.body()
        async with self.policy.order:
            self.lease.claim(_session(request))  # somebody may have taken it meanwhile
            return {"new": await self.policy.push(blob, version, digest), "digest": self.policy.digest}

    async def drop(self, request: Request) -> dict[str, Any]:
        """Serve the bare base."""
        async with self.policy.order:
            self.lease.claim(_session(request))
            await self.policy.drop()
        return {}

    async def generate(self, request: Request) -> dict[str, Any] | None:
        """One completion for each prompt, all by one version."""
        asked = await _json(request, prompts=list, sampling=dict)
        prompts, places = await self._prompts(asked, "prompts"), None
        if asked.get("places") is not None:
            places = token_ids(unpack([asked["places"]], None, 0)[0])
            if len(places) != len(prompts):
                raise ConfigConflictError(
                    f"generating: {len(places)} places for {len(prompts)} prompts. Send one for each."
                )
        return await _unless_gone(request, self.policy.generate(prompts, asked["sampling"], places, _wanted(asked)))

    async def score(self, request: Request) -> dict[str, Any] | None:
        """Logprobs of every token but the first."""
        asked = await _json(request, sequences=list, bare=bool)
        wanted = (None, None, False) if asked["bare"] else _wanted(asked)
        sequences = await self._prompts(asked, "sequences")
        return await _unless_gone(request, self.policy.score(sequences, asked["bare"], wanted))

    async def claim(self, request: Request) -> dict[str, Any]:
        """Become the one trainer that pushes."""
        self.lease.claim(_session(request), force=request.query_params.get("force") == "1")
        return {}

    async def release(self, request: Request) -> dict[str, Any]:
        """Stop being it."""
        self.lease.release(_session(request))
        await self.policy.weights.leave(_session(request))
        return {}

    async def begin_weights(self, request: Request) -> dict[str, Any]:
        """Open a push of full weights; `version` in the query. Gives its name, and a directory for a client on this
        host."""
        return await self.policy.weights.begin(_session(request), _number(request, "version"))

    async def write_part(self, request: Request) -> dict[str, Any]:
        """The body is a piece of a part (safetensors); `push`, `part` and `offset` in bytes are in the query."""
        push, part = request.query_params.get("push", ""), _number(request, "part")
        offset = _number(request, "offset")
        await self.policy.weights.write(_session(request), push, part, offset, await request.body())
        return {}

    async def take_part(self, request: Request) -> dict[str, Any]:
        """A part is complete; `push`, `part` and its `digest` (sha256) are in the query."""
        push, digest = request.query_params.get("push", ""), request.query_params.get("digest", "")
        await self.policy.weights.take(_session(request), push, _number(request, "part"), digest)
        return {}

    async def commit_weights(self, request: Request) -> dict[str, Any]:
        """All parts were sent: serve them."""
        session = _session(request)
        async with self.policy.order:
            self.lease.claim(session)  # somebody may have taken it meanwhile
            return {"new": await self.policy.weights.commit(session, request.query_params.get("push", ""))}

    async def withdraw_weights(self, request: Request) -> dict[str, Any]:
        """Serve nothing until the next push (`reason`); or, with `push`, only throw that unfinished push away."""
        session, push = _session(request), request.query_params.get("push", "")
        if push:
            await self.policy.weights.abandon(session, push)
            return {}
        reason = request.query_params.get("reason", "")
        if not reason:
            raise ConfigConflictError("withdrawing weights: the query gives no reason. Send one.")
        self.policy.weights.withdraw(reason[:200])
        return {}

    async def _prompts(self, asked: dict[str, Any], name: str) -> list[Prompt]:
        """Of a body; images are decoded aside, while others are answered."""
        most = self.about.get("most_images", 0)
        if not asked.get("images"):
            return unpack(asked[name], None, most)
        return await asyncio.to_thread(unpack, asked[name], asked["images"], most)

    def _heard(self, request: Request, session: str) -> Request:
        """The request, whose trainer is silent while its body does not come: its machine may be gone."""
        is_whole = False

        async def receive() -> Any:
            nonlocal is_whole
            if is_whole:
                return await request.receive()
            with self.lease.awaiting(session):
                message = await request.receive()
            is_whole = not message.get("more_body")
            return message

        return Request(request.scope, receive)

    def _answering(self, handler: Handler) -> Callable[..., Any]:
        async def answer(request: Request) -> Response:
            marks = {START: self.start, VERSION: str(self.policy.version)}
            expected = request.headers.get(START)
            if expected is not None and expected != self.start:
                text = "asking the server: it was restarted since. Verify its base and push the adapter again."
                return _error(RESTARTED, "EngineBrokenError", text, (), marks)
            try:
                with self.lease.hearing(session := request.headers.get(SESSION, "")):
                    found = await handler(self._heard(request, session))
            except QloraRLError as error:
                kind = type(error).__name__
                return _error(STATUS.get(kind, 500), kind, str(error), error.reasons, marks)
            except (ClientDisconnect, TooLargeError):
                return Response(status_code=GONE)
            except RecursionError:  # what could be parsed, and not handled
                text = "asking the server: what was sent is nested too deeply. Send flat values."
                return _error(400, "ConfigConflictError", text, (), marks)
            except Exception as error:
                if isinstance(
                    error, compat.EngineEndingError
                ):  # or has dropped this one: a client asks again, not for ever
                    return _error(503, "", f"asking the server: {error}", (), marks | {GAVE_UP: "1"})
                if compat.is_dead_engine(error):  # this server ends too: a client waits for the next one
                    return _error(
                        503, "", "asking the server: vLLM's engine has died. It has to be restarted.", (), marks
                    )
                logger.exception("%s %s failed", request.method, request.url.path)
                text = f"asking the server: {type(error).__name__}: {error}. Its log says more."
                return _error(503, "EngineBrokenError", text, (), marks)
            marks[VERSION] = str(self.policy.version)
            if found is None:
                return Response(status_code=GONE)
            return Response(json.dumps(found), media_type="application/json", headers=marks)

        answer.__doc__ = handler.__doc__
        return answer


def _error(status: int, kind: str, message: str, reasons: Any, headers: dict[str, str]) -> Response:
    content = {"error": {"kind": kind, "type": kind, "message": message, "reasons": list(reasons), "code": status}}
    # Not as UTF-8: a message may quote half of a surrogate pair, which JSON can send and UTF-8 cannot.
    return Response(json.dumps(content), status, headers, "application/json")


async def _unless_gone(request: Request, work: Any) -> Any:
    """The result, or `None` when the client has closed the connection: then the work is cancelled."""
    task = asyncio.ensure_future(work)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def _wanted(asked: dict[str, Any]) -> Wanted:
    """Version and digest that must serve, where the client has named them; or that need only be held."""
    return _optional(asked, "version", int), _optional(asked, "digest", str), asked.get("held") is True


def _session(request: Request) -> str:
    session = request.headers.get(SESSION, "")
    if not session:
        raise ConfigConflictError(
            f"asking the server: the header {SESSION} is missing. Send a name of your own, the same each time."
        )
    return session


def _number(request: Request, name: str) -> int:
    value = request.query_params.get(name, "")
    if not (value.isascii() and value.isdigit()) or len(value) > 12:  # "²" is a digit, and no number
        raise ConfigConflictError(f"asking the server: {name}={value[:20]!r} is no number.")
    return int(value)


async def _json(request: Request, **fields: type) -> dict[str, Any]:
    try:
        asked = parse_object(await request.body())
    except ValueError as error:
        raise ConfigConflictError(f"asking the server: the body is no JSON object: {error}.") from error
    wrong = [name for name, kind in fields.items() if not _is_a(asked.get(name), kind)]
    if wrong:
        raise ConfigConflictError(f"asking the server: {', '.join(wrong)} missing in the body, or of another type.")
    return asked


def _optional(asked: dict[str, Any], name: str, kind: type) -> Any:
    value = asked.get(name)
    if value is not None and not _is_a(value, kind):
        raise ConfigConflictError(f"asking the server: {name} is no {kind.__name__}. Send one, or leave it out.")
    return value


def _is_a(value: Any, kind: type) -> bool:
    """Of this very type, as True is no number; an integer as large as those in a query."""
    return type(value) is kind and not (isinstance(value, int) and not 0 <= value < 10**12)
