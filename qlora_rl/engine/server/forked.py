"""`EngineCopy`: vLLM's engine process on a CPU, forked from the server's once that has imported everything, in place of a new one that imports it again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.context import ForkProcess
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch

from qlora_rl.engine.leftovers import end_with


class EngineCopy(ForkProcess):
    """A process that waits to be told what to do; what a spawned one is told on its way, it reads from a pipe.

    vLLM has a CPU's engine spawned (`check_and_update_config` of platforms/cpu.py, 0.31): a fork takes no threads along, and
    one with a used pool of OpenMP waits for its threads forever. So it is forked before anything was multiplied.

    Args:
        unwanted: descriptors that it must not hold, as locks.
    """

    def __init__(self, unwanted: Sequence[int]) -> None:
        self._here, there = Pipe()
        call = (os.getpid(), there, (*unwanted, self._here.fileno()))
        super().__init__(target=_wait, args=call, name="EngineCore")
        super().start()
        there.close()
        self._work: tuple[Any, ...] = ()

    def with_work(self, *, target: Callable[..., None], kwargs: Mapping[str, Any], **_: Any) -> EngineCopy:
        """Itself, in the place of a new process; the arguments of `multiprocessing.Process`."""
        self._work = (target, dict(kwargs))
        return self

    def start(self) -> None:
        """It begins, in the environment of this moment."""
        self._here.send_bytes(ForkingPickler.dumps((dict(os.environ), *self._work)))
        self._here.close()

    def end(self) -> None:
        """If it still waits."""
        if not self._here.closed:
            self._here.close()
            self.join()

    @contextlib.contextmanager
    def in_place_of_vllms(self) -> Iterator[None]:
        """What vLLM starts meanwhile is this process."""
        from vllm.v1.engine import utils

        theirs = utils.get_mp_context

        def process(**asked: Any) -> Any:
            given = asked["kwargs"]
            # A queue travels, and a new process is bound to a NUMA node, only where processes are spawned.
            is_spawned = given["tensor_queue"] is not None or given["vllm_config"].parallel_config.numa_bind
            return theirs().Process(**asked) if is_spawned else self.with_work(**asked)

        utils.get_mp_context = lambda: SimpleNamespace(Process=process, Queue=theirs().Queue)
        try:
            yield
        finally:
            utils.get_mp_context = theirs


def _wait(parent: int, told: Any, unwanted: Sequence[int]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
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
    if "OMP_NUM_THREADS" in environment:  # libraries have read it when they were imported
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    target(**given)
