"""`RayReplica`: an engine in an actor of a Ray cluster. One whose process has ended, or stands still, is replaced."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qlora_rl.adapter.store import pack_adapter, read_directory
from qlora_rl.contracts import BaseFingerprint, EngineCapabilities, Rollout, SamplingSpec
from qlora_rl.engine.chunks import Part
from qlora_rl.engine.fleet.ray_actor import Answer, State
from qlora_rl.engine.images import Prompt, as_prompts
from qlora_rl.errors import EngineBrokenError, EngineClosedError, MissingDependencyError, QloraRLError

logger = logging.getLogger(__name__)

# How long a look at an actor that is starting may take, in seconds.
_GLANCE_S = 0.5
# One that has not answered so many looks in a row stands still, although its process may be alive.
_SILENT_LOOKS = 3
# An actor that is waited for must show after each of so many seconds that it is alive.
_SIGN_OF_LIFE_S = 10.0
# What an actor takes to start; later it is said what the cluster has, for Ray may be waiting for room.
_SOON_S = 60.0


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
    """Adapters, and parts of full weights, in Ray's object store: put there once, read by every actor; the newest is
    kept."""

    def __init__(self) -> None:
        self.puts = 0
        self._lock = threading.Lock()
        self._held: tuple[bytes | Part, Any] | None = None

    def reference(self, packed: bytes | Part) -> Any:
        """Where this very adapter, or part, is."""
        with self._lock:
            if self._held is None or self._held[0] is not packed:
                self._held = packed, require_ray().put(packed.blob if isinstance(packed, Part) else packed)
                self.puts += 1
            return self._held[1]

    def forget(self) -> None:
        """Keep nothing; who is still reading goes on."""
        with self._lock:
            self._held = None


class ActorPush:
    """Full weights to an actor; each part is put into the object store once, for all of them.

    Args:
        ask: method, arguments -> the actor's answer.
        parcels: where parts are put.
        version: that the weights get.

    Attributes:
        nbytes: of all weights that the engine wants.
    """

    def __init__(self, ask: Callable[..., Any], parcels: Parcels, version: int):
        self._ask, self._parcels, self._index = ask, parcels, 0
        self._name, self.nbytes = ask("begin_dense", version)

    def send(self, part: Part) -> None:
        """One part; the actor checks it by its digest."""
        self._ask("take_part", self._name, self._index, self._parcels.reference(part), part.digest)
        self._index += 1

    def commit(self) -> None:
        """All parts were sent: serve them."""
        self._parcels.forget()
        self._ask("commit_dense", self._name)

    def abandon(self) -> None:
        """Throw away what has come."""
        self._parcels.forget()
        with contextlib.suppress(QloraRLError):
            self._ask("abandon_dense", self._name)


class RayReplica:
    """An engine in an actor. One whose process has ended, or stands still, is replaced at once, and the new one is
    taken note of by `wake`.

    Its own `max_restarts` is not used: Ray does not start an actor again whose start has failed, and starts one that
    dies each time again without a pause.

    Args:
        name: for messages.
        make_actor: a new actor; Ray finds a place for it.
        parcels: where adapters are put.
        timeout_s: of one request, in seconds.
        start_timeout_s: how long one in its place may take to start, in seconds.
        health_check_timeout_s: how long its process may take for a sign of life, in seconds.
    """

    def __init__(
        self,
        name: str,
        make_actor: Callable[[], Any],
        parcels: Parcels,
        *,
        timeout_s: float,
        start_timeout_s: float,
        health_check_timeout_s: float,
    ):
        self.url, self.timeout_s, self.wait_s = name, timeout_s, 0.0
        self.start_timeout_s, self.health_check_timeout_s = start_timeout_s, health_check_timeout_s
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
                f"starting {self.url}: no engine within {timeout_s:.0f} s. {held}: ask for fewer replicas, or for less "
                "with ray_options."
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
            actor = self._actor
            if not require_ray().wait([self._starting], timeout=min(timeout_s, _GLANCE_S))[0]:
                if time.monotonic() - self._begun > self.start_timeout_s:
                    logger.warning("%s: the one in its place has not started; another is begun", self.url)
                    self._replace(actor)
                return False
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
            if self.capabilities().takes_dense:
                self._ask("computes", timeout_s=timeout_s)
            else:
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
        """Take note of an actor that was started in its place: it serves the bare base, and was not verified."""
        with self._lock:
            if self._fresh is None:
                return
            self._state = _on_the_base_of(self._state, self._fresh)
            self._version = self._state.version
            self._incarnation += 1  # before it answers: who has asked it sees that it is another
            self._fresh = self._starting = self._pushed = None

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
        prompts: Sequence[Prompt],
        sampling: SamplingSpec | None = None,
        *,
        places: Sequence[int] | None = None,
        version: int | None = None,
        **fields: Any,
    ) -> Rollout:
        """One completion for each of B prompts (token ids), all by one version; see `LocalEngine.generate`."""
        named = {} if version is None else {"version": version}
        return self._ask("generate", as_prompts(prompts), sampling or SamplingSpec(**fields), places=places, **named)

    def score(self, sequences: Sequence[Prompt], *, bare: bool = False) -> list[list[float]]:
        """Natural logs of the probabilities of every token but the first."""
        return self._ask("score", as_prompts(sequences), bare=bare)

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
            SyncError: vLLM rejected it; the old version goes on serving.
        """
        self._ask("load_packed", self._parcels.reference(blob), version)
        self._pushed = blob, version

    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve a PEFT directory, by its bytes: another machine need not see it."""
        self.load_packed(pack_adapter(read_directory(Path(directory))[0]), version)

    def begin_dense(self, version: int) -> ActorPush:
        """Open a push of full weights, which are served as `version` from its `commit` on."""
        return ActorPush(self._ask, self._parcels, version)

    def withdraw_dense(self, reason: str) -> None:
        """Serve nothing until the next push of full weights."""
        self._ask("withdraw_dense", reason)

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
        actor = self._make_actor()
        # First: another thread that sees the actor sees that it is starting.
        self._starting, self._fresh, self._silent = actor.ask.remote("state"), None, 0
        self._actor, self._begun = actor, time.monotonic()

    def _replace(self, actor: Any) -> None:
        """Start another one, unless somebody has."""
        with self._lock:
            if self._actor is actor and not self._is_closed:
                with contextlib.suppress(require_ray().exceptions.RayError):
                    require_ray().kill(actor)
                self._begin()

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None, **named: Any) -> Any:
        self._reject_closed()
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

    def _reject_closed(self) -> None:
        if self._is_closed:
            raise EngineClosedError("using the engine: it was closed. Make a new RayFleet.")

    def _result(self, actor: Any, reference: Any, timeout_s: float) -> Answer:
        ray = require_ray()
        try:
            self._watch(actor, reference, timeout_s)
            return ray.get(reference, timeout=_GLANCE_S)
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

    def _watch(self, actor: Any, reference: Any, timeout_s: float) -> None:
        """Until there is an answer, or the time is over; a process that gives no sign of life meanwhile is ended, and
        replaced.

        Ray looks after processes that have ended, not after one that stands still.
        """
        wait, end = require_ray().wait, time.monotonic() + timeout_s
        while not wait([reference], timeout=min(_SIGN_OF_LIFE_S, max(0.0, end - time.monotonic())))[0]:
            left, limit_s = end - time.monotonic(), self.health_check_timeout_s
            self._reject_closed()  # without its cluster Ray would start another one to ask
            if left <= 0:
                return
            if not wait([actor.ask.remote("is_alive"), reference], timeout=min(limit_s, left))[0] and limit_s < left:
                self._replace(actor)
                raise EngineBrokenError(
                    f"asking {self.url}: its process stands still: no sign of life within "
                    f"health_check_timeout_s={limit_s:g} s. It is ended, and another is started in its place."
                )


def _on_the_base_of(first: State | None, new: State) -> State:
    """The base that was there at first stays the one that is wanted."""
    return new if first is None else replace(new, base=first.base)


def _brief(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={resources[name]:g}" for name in ("CPU", "GPU") if name in resources) or "nothing"


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[-1]
