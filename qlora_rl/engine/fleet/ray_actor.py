"""`ActorEngine`: what runs in an actor: an engine that is asked by a server's routes. Knows nothing of Ray."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from qlora_rl.adapter.store import AdapterStore, default_root, unpack_adapter
from qlora_rl.contracts import BaseFingerprint, EngineCapabilities, SamplingSpec
from qlora_rl.engine import compat
from qlora_rl.engine.client.engine_client import Answer
from qlora_rl.engine.images import Prompt, unpack
from qlora_rl.engine.staging import OpenPush, Stage, read_parts
from qlora_rl.errors import EngineUnsupportedError, QloraRLError, SyncError
from qlora_rl.locks import hold, sweep

# Versions on disk: vLLM may read the two that it holds again, and the next one comes next to them.
_KEPT = 3
_THREADS = "OMP_NUM_THREADS"
# What changes what serves: methods, and further routes.
_CHANGE, _PUSH = ("PUT", "DELETE"), ("/weights", "/weights/part", "/weights/commit")
# Who sends full weights: an actor knows no other.
_TRAINER = "trainer"


class ActorEngine:
    """An engine behind the routes of `qlora-rl serve`, each of which is a call of `ask`.

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
        self._changing, self._changes = threading.Lock(), 0
        self._weights = OpenPush()
        self._start = secrets.token_hex(8)
        self._engine: Any = None
        self._failure: QloraRLError | None = None
        self._routes: dict[tuple[str, str], Callable[[dict[str, str], Any], Any]] = {
            ("GET", "/state"): lambda asked, body: self._about,
            ("GET", "/base"): lambda asked, body: self._engine.describe_base().as_dict(),
            ("POST", "/repair"): lambda asked, body: self._engine.repair_base(),
            ("GET", "/held"): lambda asked, body: {"held": self._engine.held_adapter(int(asked["rank"]))},
            ("POST", "/generate"): self._generate,
            ("POST", "/score"): self._score,
            ("POST", "/lease"): lambda asked, body: {},  # nobody else can push to it
            ("PUT", "/adapter"): self._push,
            ("DELETE", "/adapter"): self._drop,
            ("POST", "/weights"): self._begin,
            ("PUT", "/weights"): self._write,
            ("POST", "/weights/part"): self._take,
            ("POST", "/weights/commit"): self._commit,
            ("DELETE", "/weights"): self._withdraw,
        }
        try:
            self._engine = (make or _local)(base, **options)
        except QloraRLError as error:
            self._failure = error

    def ask(self, start: str, method: str, path: str, body: Any = None, number: int | None = None) -> Answer:
        """The answer, with the error of ours that came instead; what an engine that did not start answers is why.

        Nothing is done for whoever means another `start`, nor for a change whose `number` is lower than that of one
        which has been made: it was given up, and is late.
        """
        if self._engine is None:
            return Answer({}, self._start, 0, self._failure)
        route, _, query = path.partition("?")
        found, failure = None, None
        try:
            if start in ("", self._start):
                answers, asked = self._routes[method, route], dict(parse_qsl(query))
                with self._in_order(number) if method in _CHANGE or route in _PUSH else contextlib.nullcontext():
                    found = answers(asked, body)
        except QloraRLError as error:
            failure = error
        return Answer(found or {}, self._start, self._engine.version, failure)

    def cancel(self) -> None:
        """Have the calls that generate end."""
        self._engine.cancel()

    def is_alive(self) -> None:
        """A thread of this process has its turn, whatever the engine is busy with."""

    def close(self) -> None:
        """Stop the engine, and remove what is on tmpfs."""
        self._weights.discard()
        if self._engine is not None:
            self._engine.close()
        os.close(self._handle)
        shutil.rmtree(self._own, ignore_errors=True)

    @contextlib.contextmanager
    def _in_order(self, number: int | None) -> Iterator[None]:
        """One change at a time. Ray may bring a change without an adapter before an earlier one, whose adapter is still
        fetched."""
        with self._changing:
            if number is not None:
                if number < self._changes:
                    raise SyncError("changing what serves: a later change was made before this one came. Push again.")
                self._changes = number
            yield

    @functools.cached_property
    def _base(self) -> BaseFingerprint:
        """That was there at first."""
        return self._engine.describe_base()

    @functools.cached_property
    def _about(self) -> dict[str, Any]:
        found: EngineCapabilities = self._engine.capabilities()
        host = socket.gethostname()
        return {
            "name": f"{found.name} in process {os.getpid()} on {host}",
            "base": self._base.digest,
            "max_lora_rank": found.max_lora_rank,
            "takes_dense": found.takes_dense,
            "most_images": sys.maxsize if found.takes_images else 0,
            "holds_two": found.holds_two,
            "adapts_experts": found.adapts_experts,
            "gives_logprobs": found.gives_logprobs,
            "max_model_length": found.max_model_length,
            "max_body_bytes": sys.maxsize,
            "adapter_dtype": found.adapter_dtype,
            "pid": os.getpid(),
            "host": host,
        }

    def _prompts(self, body: dict[str, Any], name: str) -> list[Prompt]:
        return unpack(body[name], body.get("images"), sys.maxsize)

    def _generate(self, asked: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        named = {"version": body["version"]} if body.get("held") else {}  # else the newest, whatever it is
        prompts, spec = self._prompts(body, "prompts"), SamplingSpec(**body["sampling"])
        rollout = self._engine.generate(prompts, spec, places=body.get("places"), **named)
        found = {name: getattr(rollout, name) for name in ("completion_ids", "logprobs", "version", "has_ended")}
        if not self._about["gives_logprobs"]:  # whatever it returns: shares of a rollout are put together by their rows
            found["logprobs"] = [[None] * len(ids) for ids in rollout.completion_ids]
        return found

    def _score(self, asked: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        sequences = self._prompts(body, "sequences")
        return {"logprobs": self._engine.score(sequences, bare=body["bare"]), "version": self._engine.version}

    def _push(self, asked: dict[str, str], blob: bytes) -> dict[str, Any]:
        version = _pushed_version(asked)
        directory = self._store.publish(unpack_adapter(blob), version)
        try:
            self._engine.load_adapter(directory, version)
        except BaseException:
            self._store.withdraw(directory)
            raise
        self._store.retire()
        return {"digest": hashlib.sha256(blob).hexdigest()}

    def _drop(self, asked: dict[str, str], body: None) -> None:
        self._weights.discard()
        self._engine.drop_adapter()

    def _begin(self, asked: dict[str, str], body: None) -> dict[str, Any]:
        capabilities: EngineCapabilities = self._engine.capabilities()
        if not capabilities.takes_dense:
            raise EngineUnsupportedError(
                f"taking weights: {capabilities.name} serves a 4-bit base or a mixture of experts, where full weights "
                "cannot be written. Serve the baked base: RayFleet(bake_base(base), max_lora_rank=0)."
            )
        version = _pushed_version(asked)
        self._weights.discard()
        self._weights.staging = stage = Stage(self._own, self._base.leaves, version, _TRAINER)
        return {"push": stage.token, "directory": stage.incoming.name, "nbytes": stage.nbytes}

    def _open(self, asked: dict[str, str]) -> contextlib.AbstractContextManager[Stage]:
        return self._weights.own(asked.get("push", ""), _TRAINER)

    def _write(self, asked: dict[str, str], piece: bytes) -> None:
        with self._open(asked) as stage:
            stage.write(int(asked["part"]), int(asked["offset"]), piece)

    def _take(self, asked: dict[str, str], body: None) -> None:
        with self._open(asked) as stage:
            stage.take(int(asked["part"]), asked["digest"])

    def _commit(self, asked: dict[str, str], body: None) -> None:
        with self._open(asked) as stage:
            stage.require_all()
            self._engine.load_dense(read_parts(stage.parts), stage.version)
            self._weights.discard()

    def _withdraw(self, asked: dict[str, str], body: None) -> None:
        """A push that was given up; or what serves."""
        if "reason" in asked:
            self._engine.withdraw_dense(asked["reason"])
            return
        with self._open(asked):
            self._weights.discard()


def _pushed_version(asked: dict[str, str]) -> int:
    version = int(asked["version"])
    if version < 1:
        raise SyncError(f"taking version={version}: versions begin with 1; 0 is the bare base.")
    return version


def _local(base: str, **options: Any) -> Any:
    from qlora_rl.engine.local import LocalEngine

    return LocalEngine(base, **options)
