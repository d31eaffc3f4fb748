"""`RayFleet`: engines in actors of a Ray cluster, one machine or many, as one engine. Ray places them; here they are proven."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qlora_rl.adapter.store import pack_adapter
from qlora_rl.contracts import BaseFingerprint, EngineCapabilities, Rollout, SamplingSpec
from qlora_rl.engine.asking import as_ids, read_directory
from qlora_rl.engine.fleet import Fleet
from qlora_rl.engine.hosted import Answer, HostedEngine, State
from qlora_rl.errors import (
    ConfigConflictError,
    EngineBrokenError,
    EngineClosedError,
    EngineUnsupportedError,
    MissingDependencyError,
    QloraRLError,
)

logger = logging.getLogger(__name__)

# Of a cluster that is started here: adapters lie there, of which two are on their way at once.
_STORE_BYTES = 512 * 2**20
# How long a look at an actor that is starting may take, in seconds.
_GLANCE_S = 0.5
# One that has not answered so many looks in a row stands still: a process can hang and not end.
_SILENT_LOOKS = 3
# What an actor takes to start; later it is said what the cluster has, for Ray may be waiting for room.
_SOON_S = 60.0
# An engine is asked by the threads of a rollout, a push, a proof and a look at the same time.
_AT_ONCE = 32
_numbers = itertools.count()


def require_ray() -> Any:
    """The module.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            "placing engines on Ray: ray is not installed. pip install 'qlora-rl[ray]'."
        ) from error
    return ray


class Parcels:
    """Adapters in Ray's object store: put there once, read by every actor; the newest is kept."""

    def __init__(self) -> None:
        self.puts = 0
        self._lock = threading.Lock()
        self._held: tuple[bytes, Any] | None = None

    def reference(self, blob: bytes) -> Any:
        """Where this very blob lies."""
        with self._lock:
            if self._held is None or self._held[0] is not blob:
                self._held = blob, require_ray().put(blob)
                self.puts += 1
            return self._held[1]


class RayReplica:
    """An engine in an actor. One whose process has ended, or stands still, is started anew at once, and taken note of by `wake`.

    Its own `max_restarts` is not used: Ray does not start an actor again whose start has failed, and starts one that dies each time
    again without a pause.

    Args:
        name: for messages.
        make_actor: a new actor; Ray finds a place for it.
        parcels: where adapters are put.
        timeout_s: of one request, in seconds.
    """

    def __init__(self, name: str, make_actor: Callable[[], Any], parcels: Parcels, *, timeout_s: float):
        self.url, self.timeout_s, self.wait_s = name, timeout_s, 0.0
        self._make_actor, self._parcels = make_actor, parcels
        self._lock = threading.RLock()
        self._is_closed = False
        self._actor: Any = None
        self._starting: Any = None  # the state of an actor, once it has one; `None` where it was taken note of
        self._fresh: State | None = None
        self._state: State | None = None
        self._incarnation = self._version = self._silent = 0
        self._pushed: tuple[bytes, int] | None = None
        self._begin()

    def connect(self, timeout_s: float) -> None:
        """Wait until it has started.

        Raises:
            QloraRLError: why it could not. EngineBrokenError: not within `timeout_s`, or its process has ended.
        """
        ray = require_ray()
        is_soon = bool(ray.wait([self._starting], timeout=min(timeout_s, _SOON_S))[0])
        held = f"The cluster has {_brief(ray.cluster_resources())}, of which {_brief(ray.available_resources())} free"
        if not is_soon:
            logger.warning(
                "%s has not started after %.0f s: it is slow, or there is no room. %s", self.url, _SOON_S, held
            )
        if not is_soon and not ray.wait([self._starting], timeout=max(0.0, timeout_s - _SOON_S))[0]:
            raise EngineBrokenError(
                f"starting {self.url}: no engine within {timeout_s:.0f} s. {held}: ask for fewer replicas, or for less with ray_options."
            )
        answer = self._result(self._actor, self._starting, 60.0)
        if answer.error is not None:
            raise answer.error
        self._fresh = answer.value
        self.wake()

    # --- a replica --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The adapter version that it serves, as it said last."""
        return self._version

    @property
    def found(self) -> tuple[int, str]:
        """Nothing: it was started here."""
        return 0, ""

    @property
    def incarnation(self) -> int:
        """Grows when an actor was started in its place."""
        return self._incarnation

    @property
    def base(self) -> str:
        """Digest of the base that was there at first."""
        return self._state.base

    @property
    def start(self) -> str:
        """Ray's name of the actor."""
        return self._actor._actor_id.hex()

    @property
    def pid(self) -> int:
        """Of its process, on `host`."""
        return self._state.pid

    @property
    def host(self) -> str:
        """The machine that Ray has placed it on."""
        return self._state.host

    @property
    def pushed(self) -> tuple[bytes, int] | None:
        """The bytes of the adapter that was pushed last, and its version."""
        return self._pushed

    def is_there(self, timeout_s: float) -> bool:
        """It computes something within `timeout_s` seconds; one that is starting is only looked at."""
        if self._starting is None:
            return self._computes(timeout_s)
        with self._lock:
            if self._fresh is not None or self._starting is None:
                return True
            if not require_ray().wait([self._starting], timeout=min(timeout_s, _GLANCE_S))[0]:
                return False
            actor = self._actor
            try:
                answer = self._result(actor, self._starting, timeout_s)
            except EngineBrokenError as error:
                logger.warning("%s: %s", self.url, error)
                self._replace(actor)
                return False
            if answer.error is not None:
                logger.warning("%s: the engine in its place did not start: %s", self.url, answer.error)
                self._replace(actor)
                return False
            self._fresh = answer.value
            return True

    def _computes(self, timeout_s: float) -> bool:
        actor = self._actor
        try:
            self._ask("score", [[0, 0]], bare=True, timeout_s=timeout_s)
        except EngineBrokenError as error:
            self._silent += isinstance(error.__cause__, require_ray().exceptions.GetTimeoutError)
            if self._silent >= _SILENT_LOOKS:
                logger.warning("%s stands still: it is ended, and another is started in its place", self.url)
                self._replace(actor)
            return False
        self._silent = 0
        return True

    def wake(self) -> None:
        """Take note of an actor that was started in its place: it serves the bare base, and was not proven."""
        with self._lock:
            if self._fresh is None:
                return
            self._state = _on_the_base_of(self._state, self._fresh)
            self._fresh = self._starting = self._pushed = None
            self._version = self._state.version
            self._incarnation += 1

    def capabilities(self) -> EngineCapabilities:
        """What it can be asked for."""
        return self._state.capabilities

    def describe_base(self) -> BaseFingerprint:
        """The base as its vLLM holds it."""
        return BaseFingerprint.from_dict(self._ask("describe_base"))

    def repair_base(self) -> Mapping[str, float]:
        """Write the exact scales back (it has done so when it started)."""
        return self._ask("repair_base")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSpec | None = None,
        *,
        places: Sequence[int] | None = None,
        version: int | None = None,
        **fields: Any,
    ) -> Rollout:
        """One completion for each of B prompts (token ids), all by one version; see `LocalEngine.generate`."""
        named = {} if version is None else {"version": version}
        return self._ask("generate", as_ids(prompts), sampling or SamplingSpec(**fields), places=places, **named)

    def score(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[float]]:
        """Natural logs of the probabilities of every token but the first."""
        return self._ask("score", as_ids(sequences), bare=bare)

    def held_adapter(self, rank: int) -> Mapping[str, str]:
        """Digests of what it multiplies with."""
        return self._ask("held_adapter", rank)

    def note_canary(self, difference: float) -> None:
        """Nothing: nobody else looks at it."""

    def claim(self, *, force: bool = False) -> None:
        """Nothing: nobody else can push to it."""

    def load_packed(self, blob: bytes, version: int) -> None:
        """Serve the adapter in the bytes of `pack_adapter` as `version`.

        Raises:
            SyncError: vLLM refused it; the old version goes on serving.
        """
        self._ask("load_packed", self._parcels.reference(blob), version)
        self._pushed = blob, version

    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve a PEFT directory, by its bytes: another machine need not see it."""
        self.load_packed(pack_adapter(read_directory(Path(directory))[0]), version)

    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0."""
        self._ask("drop_adapter")
        self._pushed = None

    def cancel(self) -> None:
        """Have the calls of other threads end with `RolloutCancelledError`."""
        with contextlib.suppress(EngineBrokenError):
            self._ask("cancel", timeout_s=10.0)

    def close(self) -> None:
        """Stop the engine and end its process; harmless when repeated."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            ray, actor = require_ray(), self._actor
            if actor is None or not ray.is_initialized():
                return
            with contextlib.suppress(ray.exceptions.RayError):
                if self._starting is None:
                    ray.get(actor.close.remote(), timeout=30.0)
            ray.kill(actor)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._actor = self._make_actor()
        self._starting, self._fresh, self._silent = self._actor.ask.remote("state"), None, 0

    def _replace(self, actor: Any) -> None:
        """Start another one, unless somebody has."""
        with self._lock:
            if self._actor is actor and not self._is_closed:
                with contextlib.suppress(require_ray().exceptions.RayError):
                    require_ray().kill(actor)
                self._begin()

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None, **named: Any) -> Any:
        if self._is_closed:
            raise EngineClosedError("using the engine: it was closed. Make a new RayFleet.")
        actor = self._actor
        if self._starting is not None:
            raise EngineBrokenError(f"asking {self.url}: its process has ended; the one in its place is starting.")
        answer = self._result(actor, actor.ask.remote(method, *args, **named), timeout_s or self.timeout_s)
        # The answer to a rollout may be read later than that to a push which came after it.
        if method not in ("generate", "score"):
            self._version = answer.version
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _result(self, actor: Any, reference: Any, timeout_s: float) -> Answer:
        ray = require_ray()
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.ActorDiedError as error:
            self._replace(actor)
            raise EngineBrokenError(
                f"asking {self.url}: its process has ended ({_last_line(error)}). Another is started in its place."
            ) from error
        except ray.exceptions.GetTimeoutError as error:
            raise EngineBrokenError(f"asking {self.url}: no answer within {timeout_s:.0f} s.") from error
        except ray.exceptions.RayTaskError as error:
            raise EngineBrokenError(f"asking {self.url}: {type(error.cause).__name__}: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise EngineBrokenError(f"asking {self.url}: {type(error).__name__}: {_last_line(error)}") from error


class RayFleet(Fleet):
    """vLLM in actors of a Ray cluster, as one engine; everything else is as with several servers (`Fleet`).

    ::

        with RayFleet(prepare_base("Qwen/Qwen3-0.6B"), replicas=4) as engine:
            rollout = engine.generate([[40, 41, 42]] * 64, max_tokens=16, seed=0)

    A cluster that `ray.init()` has connected to is used; otherwise the one at `ray_address` or in RAY_ADDRESS; otherwise one is started on
    this machine, and ends with the fleet. The base directory must lie at the same path on every machine; what each engine really
    holds is proven there. An adapter is put into Ray's object store once a push, and every actor reads it from there.

    An actor whose process ends is replaced at once, wherever Ray finds room; the others draw its share meanwhile. The new one takes part
    when it has proven its base and holds the version that serves.

    Args:
        base: directory made by `prepare_base`.
        replicas: how many engines.
        ray_address: of a cluster, as `ray.init` takes it.
        ray_options: of each actor, as Ray's `.options()` takes them; by default one CPU, one GPU where the cluster has any, and spread
            over the machines.
        wait_s: how long to wait for an actor when none is left, in seconds.
        start_timeout_s: how long all may take to start, in seconds.
        timeout_s: of one request, in seconds.
        make: what makes the engine in the actor; `LocalEngine`.
        options: of `LocalEngine`.

    Raises:
        MissingDependencyError: ray is not installed.
        EngineUnsupportedError, BaseIncompleteError: an engine cannot start; as with `LocalEngine`.
        BaseMismatchError: a machine holds another base at that path.
        EngineBrokenError: they did not start in time; says what the cluster has.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        *,
        replicas: int = 1,
        ray_address: str | None = None,
        ray_options: Mapping[str, Any] | None = None,
        wait_s: float = 600.0,
        start_timeout_s: float = 900.0,
        timeout_s: float = 1800.0,
        make: Callable[..., Any] | None = None,
        **options: Any,
    ):
        if replicas < 1:
            raise ConfigConflictError(f"placing engines on Ray: replicas={replicas} < 1. Use at least 1.")
        ray = require_ray()
        self.parcels = Parcels()
        self._owns_ray = _connect(ray, ray_address, replicas, ray_options or {})
        placed: list[RayReplica] = []
        try:
            asked = _actor_options(ray, ray_options or {})
            kind = ray.remote(HostedEngine).options(**asked)

            def make_actor() -> Any:
                return kind.remote(os.fspath(base), dict(options), make)

            for _ in range(replicas):
                placed.append(RayReplica(f"ray:{next(_numbers)}", make_actor, self.parcels, timeout_s=timeout_s))
            end = time.monotonic() + start_timeout_s
            for each in placed:
                try:
                    each.connect(max(0.0, end - time.monotonic()))
                except QloraRLError as error:
                    raise type(error)(f"{error} (Said by {each.url}.)", reasons=error.reasons) from error
            super().__init__(placed, wait_s=wait_s)
        except BaseException:
            for each in placed:
                each.close()
            self._end_ray()
            raise
        logger.info("%s", "; ".join(f"{each.url}: process {each.pid} on {each.host}" for each in placed))

    def close(self) -> None:
        """Stop the engines, and the cluster if it was started here. Harmless when repeated."""
        super().close()
        self._end_ray()

    def _end_ray(self) -> None:
        if self._owns_ray:
            self._owns_ray = False
            require_ray().shutdown()


def _on_the_base_of(first: State | None, new: State) -> State:
    """The base that was there at first stays the one that is wanted."""
    return new if first is None else replace(new, base=first.base)


def _connect(ray: Any, address: str | None, replicas: int, wishes: Mapping[str, Any]) -> bool:
    """Use the cluster that there is, or start one; whether it was started here."""
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        if address is not None:
            ray.init(address=address, log_to_driver=False)
            return False
        cpus = max(os.cpu_count() or 1, math.ceil(replicas * wishes.get("num_cpus", 1)))
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"connecting to the Ray cluster at {address}" if address else "starting Ray on this machine"
        raise EngineUnsupportedError(
            f"{where}: {type(error).__name__}: {error}. Start one with `ray start --head`, and pass its address."
        ) from error
    return True


def _actor_options(ray: Any, wishes: Mapping[str, Any]) -> dict[str, Any]:
    usual: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
    if ray.cluster_resources().get("GPU", 0) > 0:
        usual["num_gpus"] = 1
    ours = {"max_concurrency": _AT_ONCE, "max_restarts": 0, "max_task_retries": 0}
    if taken := sorted(set(wishes) & set(ours)):
        raise ConfigConflictError(
            f"placing engines on Ray: ray_options sets {', '.join(taken)}, which are set here. Leave them out."
        )
    return {**usual, **wishes, **ours}


def _brief(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={resources[name]:g}" for name in ("CPU", "GPU") if name in resources) or "nothing"


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[-1]
