"""`RayConnection`: to an engine in an actor of a Ray cluster. An actor whose process has ended, or stands still, is
replaced."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from qlora_rl.engine.client.engine_client import Answer
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
        self._held: tuple[bytes, Any] | None = None

    def reference(self, packed: bytes) -> Any:
        """Where these very bytes are."""
        with self._lock:
            if self._held is None or self._held[0] is not packed:
                self._held = packed, require_ray().put(packed)
                self.puts += 1
            return self._held[1]

    def forget(self) -> None:
        """Keep nothing; who is still reading goes on."""
        with self._lock:
            self._held = None


class RayConnection:
    """To an engine in an actor. One whose process has ended, or stands still, is replaced at once; the new one has
    another start, and is found out by that.

    Its own `max_restarts` is not used: Ray does not start an actor again whose start has failed, and starts one that
    dies each time again without a pause.

    Args:
        name: for messages.
        make_actor: a new `ActorEngine`; Ray finds a place for it.
        parcels: where adapters are put.
        timeout_s: of one request, in seconds.
        start_timeout_s: how long one in its place may take to start, in seconds.
        health_check_timeout_s: how long its process may take for a sign of life, in seconds.

    Attributes:
        pid, host: of the actor's process.
    """

    way, piece_bytes, cuts = "object_store", sys.maxsize, 0
    pid, host = 0, ""

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
        self.url, self.timeout_s = name, timeout_s
        self.start_timeout_s, self.health_check_timeout_s = start_timeout_s, health_check_timeout_s
        self._make_actor, self._parcels = make_actor, parcels
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)  # of what is asked
        self._is_closed = False
        self._actor: Any = None
        self._starting: Any = None  # the state of an actor, once it has one; `None` where that was looked at
        self._silent = 0
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
        self._started(self._result(self._actor, self._starting, 60.0).checked(""))

    # --- a connection -----------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: bytes | dict[str, Any] | None, start: str) -> Answer:
        """See `Connection`; who rejects or is away says it by errors of ours, and nobody is waited for."""
        self._reject_closed()
        actor = self._actor
        if self._starting is not None:
            raise EngineBrokenError(f"asking {self.url}: its process has ended; the one in its place is starting.")
        if path.startswith(("/weights?", "/weights/commit")) and body is None:  # no more parts of these weights
            self._parcels.forget()
        sent = self._parcels.reference(body) if isinstance(body, bytes) else body
        reference = actor.ask.remote(start, method, path, sent, next(self._numbers))
        return self._result(actor, reference, self.timeout_s).checked(start)

    def computes(self, timeout_s: float, *, bare: bool) -> bool:
        """See `Connection`; one that is starting is only looked at."""
        self._reject_closed()
        if self._starting is None:
            return self._scores(timeout_s, bare)
        with self._lock:
            self._reject_closed()
            if self._starting is None:
                return True
            actor = self._actor
            if not require_ray().wait([self._starting], timeout=min(timeout_s, _GLANCE_S))[0]:
                if time.monotonic() - self._begun > self.start_timeout_s:
                    logger.warning("%s: the one in its place has not started; another is begun", self.url)
                    self._replace(actor)
                return False
            try:
                answer = self._result(actor, self._starting, timeout_s).checked("")
            except QloraRLError as error:
                logger.warning("%s: the one in its place did not start: %s", self.url, error)
                self._replace(actor)
                return False
            self._started(answer)
            return True

    def _scores(self, timeout_s: float, bare: bool) -> bool:
        actor, body = self._actor, {"sequences": [[0, 0]], "bare": bare}
        try:
            answer = self._result(actor, actor.ask.remote("", "POST", "/score", body), timeout_s)
        except EngineBrokenError as error:
            self._silent += isinstance(error.__cause__, require_ray().exceptions.GetTimeoutError)
            if self._silent >= _SILENT_LOOKS:
                logger.warning("%s stands still: it is ended, and another is started in its place", self.url)
                self._replace(actor)
            return False
        self._silent = 0
        return answer.error is None or not bare  # full weights that were lost are said to be

    def cancel(self) -> None:
        """See `Connection`."""
        if self._starting is None and not self._is_closed:
            with contextlib.suppress(EngineBrokenError):
                self._result(self._actor, self._actor.cancel.remote(), 10.0)

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
        self._starting, self._silent = actor.ask.remote("", "GET", "/state"), 0
        self._actor, self._begun = actor, time.monotonic()

    def _started(self, answer: Answer) -> None:
        self.pid, self.host, self._starting = answer.found["pid"], answer.found["host"], None

    def _replace(self, actor: Any) -> None:
        """Start another one, unless somebody has."""
        with self._lock:
            if self._actor is actor and not self._is_closed:
                with contextlib.suppress(require_ray().exceptions.RayError):
                    require_ray().kill(actor)
                self._begin()

    def _reject_closed(self) -> None:
        """Before anything is asked: without its cluster Ray would start another one to ask."""
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
            self._reject_closed()
            if left <= 0:
                return
            if not wait([actor.is_alive.remote(), reference], timeout=min(limit_s, left))[0] and limit_s < left:
                self._replace(actor)
                raise EngineBrokenError(
                    f"asking {self.url}: its process stands still: no sign of life within "
                    f"health_check_timeout_s={limit_s:g} s. It is ended, and another is started in its place."
                )


def _brief(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={resources[name]:g}" for name in ("CPU", "GPU") if name in resources) or "nothing"


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[-1]
