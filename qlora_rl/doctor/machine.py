"""Memory, disks, network and environment of this machine, without any of the libraries."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from qlora_rl.doctor.finding import Finding
from qlora_rl.errors import ConfigConflictError
from qlora_rl.memory.cards import memory_gib

PART = "machine"
GIB = 2**30
# The demo, and a base of a few hundred million parameters, as seen; below, a run is likely to be killed.
_LEAST_MEMORY_GIB = 4.0
_LEAST_DISK_GIB = 2.0
_PREFIXES = ("QLORA_RL_", "VLLM_", "HF_", "TRANSFORMERS_", "PYTORCH_", "CUDA_", "NCCL_", "OMP_", "BNB_", "TRITON_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def check_machine() -> list[Finding]:
    """Memory, cores, disks, the hub and variables that change how the libraries work."""
    from qlora_rl.base.checkpoint import cache_root

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    hub = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    found = [Finding(PART, "cores", str(cores)), _memory(), _shared_memory()]
    try:
        found.append(_disk("cache of bases", cache_root()))
    except ConfigConflictError as error:
        found.append(Finding(PART, "cache of bases", "none", "problem", str(error)))
    found += [_disk("hub cache", hub, f"{_models(hub)} models in it")]
    found += [_disk("this directory", Path.cwd()), _hub()]
    said = environment(os.environ)
    return [*found, Finding(PART, "environment", " ".join(f"{k}={v}" for k, v in said.items()) or "nothing set")]


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that change how a run works; of secrets only that they are set, the home directory as `~`."""
    home = os.path.expanduser("~")
    return {
        name: "(set)" if any(word in name for word in _SECRET) else _plain(value, home)
        for name, value in sorted(variables.items())
        if name.startswith(_PREFIXES)
    }


def _plain(value: str, home: str) -> str:
    return "~" + value.removeprefix(home) if len(home) > 1 and value.startswith(home) else value


def _memory() -> Finding:
    try:
        total, free = memory_gib()
    except (OSError, KeyError):
        return Finding(PART, "memory", "unknown", "note", "/proc/meminfo cannot be read; Linux is needed")
    is_little = free < _LEAST_MEMORY_GIB
    advice = (
        f"the demo alone holds more than half of {_LEAST_MEMORY_GIB:.0f} GiB; end other processes" if is_little else ""
    )
    return Finding(PART, "memory", f"{free:.1f} of {total:.1f} GiB available", "note" if is_little else "ok", advice)


def _shared_memory() -> Finding:
    try:
        size = shutil.disk_usage("/dev/shm").total / GIB
    except OSError:
        return Finding(
            PART, "/dev/shm", "missing", "note", "engines of several ranks and full weights to servers need it"
        )
    # Docker's default is 64 MB.
    advice = "engines of several ranks need more: docker run --shm-size=8g, or --ipc=host" if size < 1 else ""
    return Finding(PART, "/dev/shm", f"{size:.1f} GiB", "note" if advice else "ok", advice)


def _disk(name: str, path: Path, more: str = "") -> Finding:
    there = next(each for each in (path, *path.parents) if each.exists())
    free = shutil.disk_usage(there).free / GIB
    text = ", ".join(filter(None, [_plain(str(path), os.path.expanduser("~")), f"{free:.0f} GiB free", more]))
    if not os.access(there, os.W_OK):
        return Finding(
            PART, name, text, "problem", "cannot be written to; set QLORA_RL_CACHE, HF_HOME, or change directory"
        )
    is_little = free < _LEAST_DISK_GIB
    return Finding(PART, name, text, "note" if is_little else "ok", "nearly full" if is_little else "")


def _models(hub: Path) -> int:
    caches = {hub / "hub", Path(os.environ.get("HF_HUB_CACHE") or hub / "hub")}
    return sum(len(list(each.glob("models--*"))) for each in caches)


def _hub() -> Finding:
    from qlora_rl.base.hub import hub_reachable

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return Finding(PART, "hub", "HF_HUB_OFFLINE is set", "note", "only cached models and datasets can be used")
    try:
        is_there = hub_reachable()
    except ImportError as error:
        return Finding(PART, "hub", f"unknown: {error}", "note", "huggingface_hub is missing")
    if is_there:
        return Finding(PART, "hub", "can be reached")
    return Finding(
        PART, "hub", "cannot be reached", "note", "only cached models and datasets can be used; the demo needs none"
    )
