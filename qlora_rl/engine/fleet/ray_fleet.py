"""`RayFleet`: engines in actors of a Ray cluster, one machine or many, as one engine. Ray places them; here they are
verified."""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from qlora_rl.engine.client import EngineClient
from qlora_rl.engine.fleet.engine import Fleet
from qlora_rl.engine.fleet.ray_actor import ActorEngine
from qlora_rl.engine.fleet.ray_connection import Parcels, RayConnection, require_ray
from qlora_rl.errors import ConfigConflictError, EngineUnsupportedError, QloraRLError

logger = logging.getLogger(__name__)

# Of a cluster that is started here: adapters are kept there, of which two are on their way at once.
_STORE_BYTES = 512 * 2**20
# An engine is asked by the threads of a rollout, a push, a check and a look at the same time.
_AT_ONCE = 32
_numbers = itertools.count()


class RayFleet(Fleet):
    """vLLM in actors of a Ray cluster, as one engine; everything else is as with several servers (`Fleet`).

    ::

        with RayFleet(prepare_base("Qwen/Qwen3-0.6B"), replicas=4) as engine:
            rollout = engine.generate([[40, 41, 42]] * 64, max_tokens=16, seed=0)

    A cluster that `ray.init()` has connected to is used; otherwise the one at `ray_address` or in RAY_ADDRESS;
    otherwise one is started on this machine, and ends with the fleet. The base directory must be at the same path on
    every machine; what each engine really holds is verified there. An adapter is put into Ray's object store once a
    push, and every actor reads it from there; full weights, part by part.

    An actor whose process ends is replaced at once, wherever Ray finds room; the others generate its share meanwhile.
    The new one takes part when its base is verified and it holds the version that serves. So is one whose process
    stands still.

    Args:
        base: directory made by `prepare_base`.
        replicas: how many engines.
        ray_address: of a cluster, as `ray.init` takes it.
        ray_options: of each actor, as Ray's `.options()` takes them; by default spread over the machines, each with one
            CPU and, where the cluster has any, one GPU, or with `tensor_parallel_size` of both.
        wait_s: how long to wait for an actor when none is left, in seconds.
        start_timeout_s: how long all may take to start, and later each one in the place of another, in seconds.
        timeout_s: of one request, in seconds.
        health_check_timeout_s: an actor that is asked for something, and whose process gives no sign of life for so
            many seconds, is ended and replaced. Ray Serve's word.
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
        health_check_timeout_s: float = 60.0,
        make: Callable[..., Any] | None = None,
        **options: Any,
    ):
        if replicas < 1:
            raise ConfigConflictError(f"placing engines on Ray: replicas={replicas} < 1. Use at least 1.")
        if health_check_timeout_s <= 0:
            raise ConfigConflictError(
                f"placing engines on Ray: health_check_timeout_s={health_check_timeout_s} is no time. Use seconds, 60 "
                "for example."
            )
        wishes = _of_ranks(options.get("tensor_parallel_size", 1), ray_options or {})
        ray = require_ray()
        self.parcels = Parcels()
        self._owns_ray = _connect(ray, ray_address, replicas, wishes)
        placed: list[RayConnection] = []
        try:
            asked = _actor_options(ray, wishes, options.get("tensor_parallel_size", 1))
            kind = ray.remote(ActorEngine).options(**asked)

            def make_actor() -> Any:
                return kind.remote(os.fspath(base), dict(options), make)

            limits = {
                "timeout_s": timeout_s,
                "start_timeout_s": start_timeout_s,
                "health_check_timeout_s": health_check_timeout_s,
            }
            for _ in range(replicas):
                placed.append(RayConnection(f"ray:{next(_numbers)}", make_actor, self.parcels, **limits))
            end = time.monotonic() + start_timeout_s
            for each in placed:
                try:
                    each.connect(max(0.0, end - time.monotonic()))
                except QloraRLError as error:
                    raise type(error)(f"{error} (Said by {each.url}.)", reasons=error.reasons) from error
            super().__init__([EngineClient(each, timeout_s=timeout_s, wait_s=0.0) for each in placed], wait_s=wait_s)
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


def _connect(ray: Any, address: str | None, replicas: int, wishes: Mapping[str, Any]) -> bool:
    """Use the cluster that there is, or start one; whether it was started here."""
    if ray.is_initialized():
        return False
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        if address is not None:
            ray.init(address=address, log_to_driver=False)
            return False
        cpus = max(os.cpu_count() or 1, math.ceil(replicas * wishes["num_cpus"]))
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
            # Ray's own is 15: on a CPU, anything else that runs would come before rollouts that a training waits for.
            _system_config={} if "RAY_worker_niceness" in os.environ else {"worker_niceness": 0},
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = f"connecting to the Ray cluster at {address}" if address else "starting Ray on this machine"
        raise EngineUnsupportedError(
            f"{where}: {type(error).__name__}: {error}. Start one with `ray start --head`, and pass its address."
        ) from error
    return True


def _of_ranks(size: int, wishes: Mapping[str, Any]) -> dict[str, Any]:
    """What an actor needs whose engine has so many ranks: a CPU each, and as many GPUs as they are.

    Raises:
        ConfigConflictError: it would get some GPUs, but fewer.
    """
    if 0 < (gpus := wishes.get("num_gpus", 0)) < size:
        raise ConfigConflictError(
            f"placing engines on Ray: ray_options gives an actor num_gpus={gpus:g} < tensor_parallel_size={size}: each "
            "rank needs a GPU. Leave num_gpus out."
        )
    return {"num_cpus": size, **wishes}


def _actor_options(ray: Any, wishes: Mapping[str, Any], size: int) -> dict[str, Any]:
    usual: dict[str, Any] = {"scheduling_strategy": "SPREAD"}
    if ray.cluster_resources().get("GPU", 0) > 0:
        usual["num_gpus"] = size
    ours = {"max_concurrency": _AT_ONCE, "max_restarts": 0, "max_task_retries": 0}
    if taken := sorted(set(wishes) & set(ours)):
        raise ConfigConflictError(
            f"placing engines on Ray: ray_options sets {', '.join(taken)}, which are set here. Leave them out."
        )
    return {**usual, **wishes, **ours}
