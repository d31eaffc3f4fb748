"""The engines that a word starts, in `rollout=` and in `where` of a run's file: one row of `ENGINES` for each."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class StartedEngine:
    """An engine that the trainer starts, and stops at the end.

    Attributes:
        says: what it is, for people.
        engine: its class, as "module:name"; takes a base and options.
        needs: functions that raise `MissingDependencyError` where what it needs is not installed.
        is_here: it runs in the trainer's process: it can lend its base, and the memory of both is planned together.
    """

    says: str
    engine: str
    needs: tuple[str, ...]
    is_here: bool = False

    def make(self, base: Any, **options: Any) -> Any:
        """Start it."""
        return pkgutil.resolve_name(self.engine)(base, **options)

    def require(self) -> None:
        """Raise `MissingDependencyError` where what it needs is not installed."""
        for each in self.needs:
            pkgutil.resolve_name(each)()


_VLLM = "qlora_rl.engine.compat:vllm_version"
ENGINES: Mapping[str, StartedEngine] = MappingProxyType(
    {
        "colocate": StartedEngine("vLLM in this process", "qlora_rl.engine.local:LocalEngine", (_VLLM,), is_here=True),
        "server": StartedEngine(
            "a vLLM server started on this host",
            "qlora_rl.engine.server:LocalServer",
            ("qlora_rl.engine.compat:require_server",),
        ),
        "ray": StartedEngine(
            "actors of a Ray cluster", "qlora_rl.engine.fleet:RayFleet", (_VLLM, "qlora_rl.engine.fleet:require_ray")
        ),
    }
)
STARTED = tuple(ENGINES)


def is_here(rollout: Any) -> bool:
    """It is a word for an engine that runs in the trainer's process."""
    return isinstance(rollout, str) and rollout in ENGINES and ENGINES[rollout].is_here


def is_url(rollout: Any) -> bool:
    """It names a server that runs already."""
    return isinstance(rollout, str) and rollout.startswith(("http://", "https://"))


def as_one(rollout: Any) -> Any:
    """Several URLs as one text, "http://a,http://b"; anything else as it is."""
    if isinstance(rollout, list | tuple) and rollout and all(is_url(each) for each in rollout):
        return ",".join(rollout)
    return rollout
