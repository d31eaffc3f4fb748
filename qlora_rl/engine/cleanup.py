"""What an engine must not leave behind: processes of a killed server, memory, changed classes and loggers. Directories
are the business of `held`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qlora_rl.cpu_matmul import Float32Products


def end_with(parent: int, by: int) -> bool:
    """Have the kernel send `by` when the thread that started this process ends, however it ends (Linux); whether it
    still lives."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
    return os.getppid() == parent


class FirstThing:
    """Put into vLLM's config, what each process does first that is started with that config: it is killed when its
    parent ends, and multiplies in float32 where the processor asks for that.

    vLLM hands its config to its processes as the first thing that they read, long before they load our worker
    extension: a server that is killed while it starts would leave them behind, and the first pass through the model
    would be slow.

    Args:
        dtypes: of the model, and of its products.
    """

    def __init__(self, *dtypes: torch.dtype) -> None:
        self._dtypes = dtypes

    def __getstate__(self) -> dict[str, Any]:
        return {"parent": os.getpid(), "dtypes": self._dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        parent, self._dtypes = state["parent"], state["dtypes"]
        if parent == os.getpid():  # within one process it was only copied
            return
        if not end_with(parent, signal.SIGKILL):
            os._exit(1)
        Float32Products(*self._dtypes)  # for the life of the process

    def compute_hash(self) -> str:
        """What vLLM compiles does not depend on it."""
        return ""


@contextlib.contextmanager
def transformers_classes_kept() -> Iterator[None]:
    """While an engine is built: where vLLM decorates a class of transformers, its own model gets a decorated subclass
    instead.

    A model that vLLM has no code for (SmolLM3, OLMo) runs there with transformers' code, and vLLM decorates its
    decoder's class for torch's compiler, in place: for the rest of the process no other model of that class, the
    trainer's among them, could be made or called without vLLM's config. Remove when `_decorate_cls_for_torch_compile`
    decorates a class of vLLM's own.
    """
    from transformers import PreTrainedModel
    from vllm.compilation import decorators

    decorate = decorators._support_torch_compile
    before: dict[Any, Any] = {}

    def decorate_subclass(cls: Any, *arguments: Any, **named: Any) -> Any:
        if not issubclass(cls, PreTrainedModel):
            return decorate(cls, *arguments, **named)
        if cls in before:
            return cls
        of_engine: Any = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
        decorate(of_engine, *arguments, **named)
        before[cls], begin = vars(cls).get("__init__"), cls.__init__

        def __init__(self: Any, *arguments: Any, **named: Any) -> None:
            if type(self) is cls:
                self.__class__, begin_self = of_engine, of_engine.__init__
            else:
                begin_self = begin
            begin_self(self, *arguments, **named)

        cls.__init__ = __init__
        return cls

    decorators._support_torch_compile = decorate_subclass
    try:
        yield
    finally:
        decorators._support_torch_compile = decorate
        for cls, own in before.items():
            if own is None:
                del cls.__init__
            else:
                cls.__init__ = own


@contextlib.contextmanager
def log_handlers_kept() -> Iterator[None]:
    """While an engine is built: `dictConfig`, with which vLLM sets up its logger, finds no handler of this process.

    It closes all that it finds, and a log file that was opened with "w" takes no line after that. Remove when vLLM adds
    its own handler alone.
    """
    every, by_name = logging._handlerList[:], dict(logging._handlers)  # type: ignore[attr-defined]
    logging._handlerList.clear()  # type: ignore[attr-defined]
    logging._handlers.clear()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        logging._handlerList[:0] = every  # type: ignore[attr-defined]
        logging._handlers.update(by_name)  # type: ignore[attr-defined]


@contextlib.contextmanager
def process_groups_kept() -> Iterator[None]:
    """While an engine is built: where that fails, the process groups end that were made for it. Those of a trainer or
    of another engine stay.

    vLLM leaves them (0.31) and takes them for those of the next engine: a mixture of experts finds none for its
    experts, and what vLLM made would count as the caller's.
    """
    from vllm.distributed import parallel_state

    had_groups, had_default = parallel_state.model_parallel_is_initialized(), torch.distributed.is_initialized()
    try:
        yield
    except BaseException:
        if not had_groups:
            parallel_state.destroy_model_parallel()
        if not had_default:
            parallel_state.destroy_distributed_environment()
        raise


# Files through which the ranks of torch's process group find each other.
_stores: set[Path] = set()


def note_store(executor: object) -> None:
    """An engine was started, perhaps with a file for torch's process group."""
    method = getattr(getattr(executor, "driver_worker", None), "distributed_init_method", "")
    if method.startswith("file://"):
        _stores.add(Path(method.removeprefix("file://")))


def remove_stores() -> None:
    """The process group has ended. Torch removes its file with the last reference to it, which may be kept to the end
    of the process."""
    while _stores:
        _stores.pop().unlink(missing_ok=True)


def forget_adapter_places() -> None:
    """Empty what vLLM's Triton kernels for adapters remember of their buffers, when no engine of this process is left.

    0.31 remembers strides by address alone, for the life of the process, and with them some of the buffers: another
    engine at the same addresses with another `max_lora_rank` would be multiplied with wrong strides, and an engine that
    can sleep could not start again. Captured graphs read those tables, so they stay while an engine lives. Remove when
    `_get_lora_a_ptr` knows its engine.
    """
    tables = sys.modules.get("vllm.lora.ops.triton_ops.utils")
    for name in ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT"):
        getattr(tables, name, {}).clear()


def held_for_sleep() -> int:
    """Bytes in the pool of vLLM's sleep mode, of which a process has one: while any are in use, no engine with sleep
    mode can start.

    After `trim_memory` those that somebody still refers to: a model that borrows the base, or slots of an adapter.
    """
    pool = sys.modules.get("vllm.device_allocator.cumem")
    one = None if pool is None else pool.CuMemAllocator.instance
    return 0 if one is None else int(one.get_current_usage())


def trim_memory() -> None:
    """Collect garbage and hand freed pages back to the system (glibc keeps them otherwise)."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
