"""`ForkedEngine`: vLLM's engine process on a CPU, forked from the server's once that has imported vLLM, in place of a
new one that imports it again."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.context import ForkProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from qlora_rl.engine.cleanup import end_with
from qlora_rl.errors import EngineBrokenError

logger = logging.getLogger(__name__)

# Of vLLM 0.31, by the process of a server and by that of its engine.
BOTH_IMPORT = (
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.launchers.launcher",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)


class ForkedEngine(ForkProcess):
    """A process that waits to be told what to do; what a spawned one is told on its way, it reads from a pipe.

    vLLM has a CPU's engine spawned (`check_and_update_config` of platforms/cpu.py, 0.31): a fork takes no threads
    along, and one with a used pool of OpenMP waits for its threads forever. So it is forked before anything was
    multiplied. Exit handlers (`atexit`, `weakref.finalize`) do not run in it, as in every fork.

    Args:
        unwanted: descriptors that it must not hold, as locks.
    """

    def __init__(self, unwanted: Sequence[int]) -> None:
        self._here, there = Pipe()
        # In the copy this process' handler would clean up after it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            call = (os.getpid(), there, (*unwanted, self._here.fileno()), mask)
            super().__init__(target=_wait, args=call, name="EngineCore")
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        there.close()
        self._work: tuple[Any, ...] = ()

    def with_work(self, *, target: Callable[..., None], kwargs: Mapping[str, Any], **_: Any) -> ForkedEngine:
        """Itself, in the place of a new process; the arguments of `multiprocessing.Process`."""
        self._work = (target, dict(kwargs))
        return self

    def start(self) -> None:
        """It begins, in the environment of this moment.

        Raises:
            EngineBrokenError: it has ended meanwhile.
        """
        work = ForkingPickler.dumps((dict(os.environ), *self._work))
        try:
            self._here.send_bytes(work)
        except OSError as error:
            self.join()
            raise EngineBrokenError(
                f"starting vLLM's engine: its process has ended while it waited (exit status {self.exitcode}). Is "
                "there too little memory?"
            ) from error
        self._here.close()

    def end(self) -> None:
        """If it still waits."""
        if not self._here.closed:
            self._here.close()
            self.join()

    @contextlib.contextmanager
    def in_place_of_vllms(self) -> Iterator[None]:
        """What vLLM starts meanwhile is this process, but where only a new one can be what it asks for."""
        from vllm.v1.engine import utils

        theirs = utils.get_mp_context

        def process(**asked: Any) -> Any:
            if not _needs_a_new_one(**asked["kwargs"]):
                return self.with_work(**asked)
            self.end()
            logger.info(
                "vLLM's engine is started as a new process, which imports everything again: its options ask for one"
            )
            return theirs().Process(**asked)

        utils.get_mp_context = lambda: SimpleNamespace(Process=process, Queue=theirs().Queue)
        try:
            yield
        finally:
            utils.get_mp_context = theirs


def _needs_a_new_one(*, vllm_config: Any, tensor_queue: Any, **_: Any) -> bool:
    """Processes are spawned to hand them a queue, to bind them to a NUMA node, and to load another allocator before all
    else."""
    preloaded = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if path]
    mapped = Path("/proc/self/maps").read_text() if preloaded else ""
    return (
        tensor_queue is not None
        or vllm_config.parallel_config.numa_bind
        or not all(os.path.realpath(path) in mapped for path in preloaded)
    )


def _wait(parent: int, told: Any, unwanted: Sequence[int], mask: set[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for descriptor in unwanted:
        os.close(descriptor)
    if not end_with(parent, signal.SIGKILL):
        os._exit(1)
    from vllm.utils.system_utils import set_process_title

    set_process_title("EngineCore")  # it finds the place of the title only while the environment is the first one
    try:
        environment, target, given = ForkingPickler.loads(told.recv_bytes())
    except EOFError:  # there was no work
        return
    os.environ.clear()
    os.environ.update(environment)
    _read_again(environment)
    multiprocessing.set_start_method("spawn", force=True)  # as in a process that was spawned
    target(**given)


def _read_again(environment: Mapping[str, str]) -> None:
    """What vLLM tells its engine by variables that libraries have read when they were imported."""
    threads = environment.get("OMP_NUM_THREADS", "")
    # More than it has, torch would not have taken.
    if threads.isdecimal() and 0 < int(threads) < torch.get_num_threads():
        torch.set_num_threads(int(threads))
    inductor: Any = sys.modules.get("torch._inductor.config")
    if inductor is not None:
        inductor.compile_threads = int(environment.get("TORCHINDUCTOR_COMPILE_THREADS", inductor.compile_threads))
        inductor.cpp.dynamic_threads = environment.get("TORCHINDUCTOR_CPP_DYNAMIC_THREADS") == "1"
