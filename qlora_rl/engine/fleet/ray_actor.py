"""`ActorEngine`: what runs in an actor: an engine that takes adapters as bytes, and answers with its errors. Knows
nothing of Ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qlora_rl.adapter.store import AdapterStore, default_root, unpack_adapter
from qlora_rl.contracts import BaseFingerprint, EngineCapabilities, Leaf
from qlora_rl.engine import compat
from qlora_rl.engine.staging import Stage, read_parts, reject_foreign
from qlora_rl.errors import EngineBrokenError, EngineUnsupportedError, QloraRLError
from qlora_rl.locks import hold, sweep

# Versions on disk: vLLM may read the two that it holds again, and the next one comes next to them.
_KEPT = 3
_THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class State:
    """What a started engine says of itself.

    Attributes:
        base: digest of its base, read from its weights.
        capabilities: of the engine.
        version: that serves.
        pid: of its process.
        host: that it runs on.
    """

    base: str
    capabilities: EngineCapabilities
    version: int
    pid: int
    host: str


@dataclass(frozen=True)
class Answer:
    """What was asked for, or the error of ours that came instead.

    Attributes:
        value: of the method.
        version: that serves now.
        error: that it has raised; errors of others end the call.
    """

    value: Any
    version: int
    error: QloraRLError | None = None


class ActorEngine:
    """An engine behind one method, `ask`; methods of its own come first, then those of the engine.

    Args:
        base: directory of a prepared base, as this machine sees it.
        options: of `make`.
        make: makes the engine; `LocalEngine` by default.
    """

    def __init__(self, base: str, options: dict[str, Any], make: Callable[..., Any] | None = None):
        for name in compat.launcher_variables():  # of the process that made the actor: this engine is nobody's rank
            del os.environ[name]
        # Several engines on one host: each has the threads that Ray gives it, on whatever cores are free; its ranks
        # share them.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if (ranks := options.get("tensor_parallel_size", 1)) > 1 and os.environ.get(_THREADS, "").isdecimal():
            os.environ[_THREADS] = str(max(1, int(os.environ[_THREADS]) // ranks))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        sweep(default_root(), "qlora-rl-hosted-*")  # of actors that were killed
        self._own = Path(tempfile.mkdtemp(prefix="qlora-rl-hosted-", dir=default_root()))
        self._handle = hold(self._own)
        self._store = AdapterStore(self._own, keep=_KEPT)
        self._changing = threading.Lock()
        self._leaves: Mapping[str, Leaf] = {}
        self._stage: Stage | None = None
        self._engine: Any = None
        self._failure: QloraRLError | None = None
        try:
            self._engine = (make or _local)(base, **options)
        except QloraRLError as error:
            self._failure = error

    def ask(self, method: str, *args: Any, **named: Any) -> Answer:
        """The answer of a method; what an engine that did not start answers is why."""
        if self._engine is None:
            return Answer(None, 0, self._failure)
        own: dict[str, Callable[..., Any]] = {
            "state": self._state,
            "load_packed": self._load_packed,
            "describe_base": self._describe_base,
            "computes": self._computes,
            "begin_dense": self._begin_dense,
            "take_part": self._take_part,
            "commit_dense": self._commit_dense,
            "abandon_dense": self._abandon_dense,
            "is_alive": lambda: True,  # a thread of this process has had its turn, whatever the engine is busy with
        }
        ask = own.get(method) or getattr(self._engine, method)
        try:
            return Answer(ask(*args, **named), self._engine.version)
        except QloraRLError as error:
            return Answer(None, self._engine.version, error)

    def close(self) -> None:
        """Stop the engine, and remove what is on tmpfs."""
        self._discard()
        if self._engine is not None:
            self._engine.close()
        os.close(self._handle)
        shutil.rmtree(self._own, ignore_errors=True)

    def _state(self) -> State:
        found = self._engine.capabilities()
        host = socket.gethostname()
        capabilities = replace(
            found,
            name=f"{found.name} in process {os.getpid()} on {host}",
            takes_in_place=False,
            takes_bytes=True,
            byte_way="object_store",
            dense_way="object_store",
            can_sleep=False,
        )
        base: BaseFingerprint = self._engine.describe_base()
        self._leaves = base.leaves
        return State(base.digest, capabilities, self._engine.version, os.getpid(), host)

    def _describe_base(self) -> dict[str, Any]:
        """As plain values."""
        found: BaseFingerprint = self._engine.describe_base()
        return found.as_dict()

    def _load_packed(self, blob: bytes, version: int) -> None:
        bundle = unpack_adapter(blob)
        with self._changing:
            directory = self._store.publish(bundle, version)
            try:
                self._engine.load_adapter(directory, version)
            except BaseException:
                self._store.withdraw(directory)
                raise
            self._store.retire()

    def _computes(self) -> None:
        """With whatever serves; weights of which only some were loaded serve nothing, and its answer says that vLLM is
        there."""
        with contextlib.suppress(EngineBrokenError):
            self._engine.score([[0, 0]], bare=not self._engine.holds_dense)

    def _begin_dense(self, version: int) -> tuple[str, int]:
        """Name of the push, and bytes of all weights that must come."""
        capabilities: EngineCapabilities = self._engine.capabilities()
        if not capabilities.takes_dense:
            raise EngineUnsupportedError(
                f"taking weights: {capabilities.name} serves a 4-bit base or a mixture of experts, where full weights "
                "cannot be written. Serve the baked base: RayFleet(bake_base(base), max_lora_rank=0)."
            )
        with self._changing:
            self._discard()
            self._stage = Stage(self._own, self._leaves, version, "trainer")
            return self._stage.token, self._stage.nbytes

    def _take_part(self, push: str, index: int, blob: bytes, digest: str) -> None:
        with self._changing:
            stage = reject_foreign(self._stage, push, "trainer")
            try:
                stage.write(index, 0, blob)
                stage.take(index, digest)
            except BaseException:
                self._discard()
                raise

    def _commit_dense(self, push: str) -> None:
        with self._changing:
            stage = reject_foreign(self._stage, push, "trainer")
            try:
                stage.require_all()
                self._engine.load_dense(read_parts(stage.parts), stage.version)
            finally:
                self._discard()

    def _abandon_dense(self, push: str) -> None:
        with self._changing:
            reject_foreign(self._stage, push, "trainer")
            self._discard()

    def _discard(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.discard()


def _local(base: str, **options: Any) -> Any:
    from qlora_rl.engine.local import LocalEngine

    return LocalEngine(base, **options)
