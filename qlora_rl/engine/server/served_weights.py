"""`ServedWeights`: the full weights that a server serves: of one version all, or nothing. Runs next to vLLM's async
engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from qlora_rl.contracts import Leaf
from qlora_rl.engine import compat
from qlora_rl.engine.local.dense import LoadedWeights
from qlora_rl.engine.server.auth import OPEN_PATH, Receive, Scope, Send
from qlora_rl.engine.staging import OpenPush, Stage
from qlora_rl.errors import EngineBrokenError, EngineUnsupportedError, QloraRLError, SyncError

# How long a push waits for requests that are running, in seconds.
DRAIN_S = 600.0
# A push that was not heard of for so long is thrown away, in seconds.
IDLE_S = 600.0
# vLLM frees the cache of an aborted request a moment after its answer, in seconds.
_CACHE_S = 10.0


class ServedWeights(LoadedWeights):
    """Takes weights part by part into a `Stage`, and loads them when all are there.

    Attributes:
        push: name of the push that brought them; empty for the base directory's.

    Args:
        engine: vLLM's AsyncLLM.
        root: directory for stages.
        expected: every weight of the engine; empty where it takes none.
    """

    def __init__(self, engine: Any, root: Path, expected: Mapping[str, Leaf]):
        super().__init__()
        self.engine, self.root, self.expected = engine, root, expected
        self._open = OpenPush()
        self.push = ""
        self._withdrawn = ""
        self._heard = 0.0
        self._lock = asyncio.Lock()
        self._doors = _Doors()

    @property
    def takes_any(self) -> bool:
        """It can be given weights."""
        return bool(self.expected)

    async def begin(self, session: str, version: int) -> dict[str, Any]:
        """Open a push; whatever an earlier one has left is thrown away.

        Args:
            session: of the client.
            version: that the weights get.

        Raises:
            EngineUnsupportedError: the engine takes no weights. SyncError: no room for them.
        """
        self._reject_adapters()
        if version < 1:
            raise SyncError(f"taking weights version={version}: versions begin with 1; 0 is the bare base.")
        async with self._lock:
            self._open.discard()
            self._open.staging = stage = await asyncio.to_thread(Stage, self.root, self.expected, version, session)
            self._hear()
        return {"push": stage.token, "directory": stage.incoming.name, "nbytes": stage.nbytes}

    async def write(self, session: str, push: str, index: int, offset: int, piece: bytes) -> None:
        """See `Stage.write`."""
        async with self.own(session, push) as stage:
            await asyncio.to_thread(stage.write, index, offset, piece)

    async def take(self, session: str, push: str, index: int, digest: str) -> None:
        """See `Stage.take`."""
        async with self.own(session, push) as stage:
            await asyncio.to_thread(stage.take, index, digest)

    async def commit(self, session: str, push: str) -> bool:
        """Serve what was taken, when no request is running; a repeated call changes nothing.

        Returns:
            It was not there already.

        Raises:
            SyncError: not all weights came, or requests do not end: what served goes on serving. vLLM broke off:
                nothing is served.
        """
        if push and push == self.push:
            return False
        try:
            async with self.own(session, push) as stage:
                await asyncio.to_thread(stage.require_all)
                await self._write_over(stage.version, "qlora_load_parts", ([str(file) for file in stage.parts],))
                self.push, self._open.staging = push, None
                await asyncio.to_thread(stage.discard)
                return True
        except SyncError:
            if push == self.push:  # it came again while the first call was at work
                return False
            raise

    async def drop(self) -> None:
        """Serve the weights of the base directory again, as version 0."""
        async with self._lock:
            self._open.discard()
            if self.version or self.lost:
                self.push = ""
                await self._write_over(0, "qlora_load_base", ())

    async def clear_cache(self) -> None:
        """Write zeros over the KV cache, when no request is inside: NaN in it would reach later requests."""
        async with self._lock, self._doors.shut("clearing the KV cache", self.version):
            await self.engine.collective_rpc("qlora_clear_cache")
            await self._forget_cache()

    async def leave(self, session: str) -> None:
        """Throw the open push of a client away that goes."""
        async with self._lock:
            if self._open.staging is not None and self._open.staging.session == session:
                self._open.discard()

    def withdraw(self, reason: str) -> None:
        """Serve nothing until the next push; what a commit that is at work brings is withdrawn as well.

        Raises:
            EngineUnsupportedError: the engine takes no weights, so none would ever be served again.
        """
        self._reject_adapters()
        self.lost = self._withdrawn = reason

    @contextlib.asynccontextmanager
    async def reading(self, *, bare: bool = False) -> AsyncIterator[None]:
        """While a request runs: the weights stay as they are.

        Raises:
            EngineBrokenError: they may not serve.
        """
        async with self._doors.inside():
            self.reject_lost(bare=bare)
            yield

    @contextlib.asynccontextmanager
    async def own(self, session: str, push: str) -> AsyncIterator[Stage]:
        """The open push, if it is this one; it is thrown away at an error."""
        async with self._lock:
            with self._open.own(push, session) as stage:
                self._hear()
                yield stage

    async def abandon(self, session: str, push: str) -> None:
        """Throw that push away."""
        async with self.own(session, push):
            self._open.discard()

    def _reject_adapters(self) -> None:
        if not self.takes_any:
            raise EngineUnsupportedError(
                "taking weights: this server cannot be given full weights. Serve the baked base without LoRA: "
                "qlora-rl serve "
                "BAKED --max-lora-rank 0, where BAKED was written by bake_base(base)."
            )

    def _hear(self) -> None:
        self._heard = time.monotonic()
        asyncio.get_running_loop().call_later(IDLE_S + 1, self._forget)

    def _forget(self) -> None:
        """A trainer that was killed comes back no more: its weights must not fill the host's memory."""
        if not self._lock.locked() and time.monotonic() - self._heard > IDLE_S:
            self._open.discard()

    async def _write_over(self, version: int, call: str, arguments: tuple[Any, ...]) -> None:
        """Have vLLM read weights over its own, when no request is inside."""
        self._withdrawn = ""
        async with self._doors.shut(f"taking weights version={version}", self.version):
            self.version, self.lost = version, f"only a part of weights version={version} was loaded"
            self.loads += 1
            try:
                missing = (await self.engine.collective_rpc(call, args=arguments))[0]
                if missing:
                    raise SyncError(f"no value came for {len(missing)} weights of the engine, first {missing[0]}")
                await self._forget_cache()
            except Exception as error:
                if compat.is_dead_engine(error):
                    raise
                reasons = error.reasons if isinstance(error, QloraRLError) else ()
                raise SyncError(
                    f"loading weights version={version} into vLLM: {error}. Nothing is served until a push arrives "
                    "whole. Push again.",
                    reasons=reasons,
                ) from error
            self.lost = self._withdrawn

    async def _forget_cache(self) -> None:
        """Requests of OpenAI clients carry no salt: what was cached under older weights must go.

        Raises:
            SyncError: it cannot.
        """
        end = time.monotonic() + _CACHE_S
        while not await self.engine.reset_prefix_cache():
            if time.monotonic() > end:
                raise SyncError("vLLM does not empty its prefix cache")
            await asyncio.sleep(0.05)
        await self.engine.reset_encoder_cache()  # what another vision tower has made of images


class _Doors:
    """Many may be inside; who shuts it waits until all have left, and lets nobody in before it is done."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._count = 0

    @contextlib.asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self._count += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def shut(self, doing: str, version: int) -> AsyncIterator[None]:
        self._open.clear()
        try:
            try:
                await asyncio.wait_for(self._empty.wait(), DRAIN_S)
            except TimeoutError as error:
                raise SyncError(
                    f"{doing}: {self._count} requests are still running after {DRAIN_S:.0f} s. Version {version} goes "
                    "on serving. End them, and push again."
                ) from error
            yield
        finally:
            self._open.set()


class Shutter:
    """In front of vLLM's own routes, behind the gate: no request runs while weights are written, none where they are
    not whole.

    Args:
        app: what is guarded.
        weights: that serve.
        own: prefix of the routes that look after themselves.
    """

    def __init__(self, app: Any, weights: ServedWeights, own: str):
        self.app, self.weights, self.own = app, weights, own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, wait, or answer 503."""
        asks = scope["type"] == "http" and scope["method"] == "POST"
        if not asks or scope["path"] == OPEN_PATH or scope["path"].startswith(self.own + "/"):
            await self.app(scope, receive, send)
            return
        from starlette.responses import JSONResponse

        try:
            async with self.weights.reading():
                await self.app(scope, receive, send)
        except EngineBrokenError as error:
            content = {"kind": "EngineBrokenError", "type": "EngineBrokenError", "message": str(error), "code": 503}
            await JSONResponse({"error": content}, 503)(scope, receive, send)
