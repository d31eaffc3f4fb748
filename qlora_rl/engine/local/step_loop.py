"""`Driver`: one vLLM engine stepped for the calls of several threads; between two steps anybody may have a turn.

vLLM's engine of this process is made for one thread. Here a thread that generates holds the lock for one step at a
time: a second call joins the running batch, and a push or a check goes in between, while the requests that have begun
go on as they are.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qlora_rl.engine.sampling import are_cut_off
from qlora_rl.engine.signals import ForcedInterrupt, interrupts_between_steps
from qlora_rl.errors import EngineBrokenError, EngineUnsupportedError, RolloutCancelledError
from qlora_rl.stages import count

logger = logging.getLogger(__name__)


def alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an engine that has a `_driver`, between two steps of vLLM, whichever thread makes them."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._driver.door, self._driver.lock, self._driver.stream.turn():
            return method(self, *args, **kwargs)

    return call


@dataclass(eq=False)
class Call:
    """The requests of one call.

    Attributes:
        names: of its requests, as they were handed to vLLM.
        finished: their outputs, in order; `None` for those that are not done.
        internal: as vLLM calls them; as many as were added.
        left: how many are not done.
        adapter: vLLM's number of the adapter that generates them; 0 is none.
        ended: what has ended all calls from outside.
        params: vLLM's parameters of its requests.
        thread: that has begun it.
    """

    names: list[str]
    finished: list[Any]
    adapter: int = 0
    internal: list[str] = field(default_factory=list)
    left: int = 0
    ended: Exception | None = None
    params: Sequence[Any] = ()
    thread: int = field(default_factory=threading.get_ident)


class Driver:
    """Adds requests and steps until they are done.

    Python gives a lock to whoever asks first, and that would always be the thread that has just stepped. Hence a second
    lock, `door`: who wants a turn holds it until the turn is over, and who steps goes through it before every step. A
    turn comes after one step of each thread that is past it, whatever the machine is busy with.

    Both are locks of C's, taken by `with` alone: an interrupt strikes before one is taken or after it was given back.

    Args:
        on_failure: is called when vLLM's engine must be rebuilt.
        on_end: with each call that has ended, whatever came of it.

    Attributes:
        `door`: who wants a turn takes it first.
        lock: guards everything that vLLM is asked in this process.
        stream: on which vLLM is asked; on a GPU the order of two threads.
    """

    def __init__(self, on_failure: Callable[[], None], on_end: Callable[[Call], None] = lambda call: None) -> None:
        self.door, self.lock, self.stream = threading.RLock(), threading.RLock(), OwnStream()
        self._on_failure, self._on_end = on_failure, on_end
        self._open: list[Call] = []
        self._number = 0

    def begin(self, engine: Any, prompts: Sequence[Any], params: Sequence[Any], lora: Any) -> Call:
        """Hand B requests to vLLM's engine.

        Raises:
            EngineUnsupportedError: vLLM rejects one; none is left there.
        """
        with self.lock, self.stream.turn():
            count = len(prompts)
            names = [f"{self._number + i}" for i in range(count)]
            call = Call(names, [None] * count, getattr(lora, "lora_int_id", 0), left=count, params=params)
            self._number += count
            self._open.append(call)
            try:
                for name, prompt, each in zip(call.names, prompts, params, strict=True):
                    call.internal.append(engine.add_request(name, prompt, each, lora_request=lora))
            except Exception as error:
                rejected = len(call.internal)
                self._abort(engine, call)
                raise EngineUnsupportedError(f"generating: vLLM rejects prompt {rejected}: {error}") from error
            except BaseException:
                self._forget(call)
                raise
        return call

    def finish(self, engine: Any, call: Call, raise_if_interrupted: Callable[[], None]) -> list[Any]:
        """Step until all requests of the call are done; whatever happens, none of them stays behind.

        Returns:
            Their outputs, in order.

        Raises:
            EngineBrokenError: vLLM failed in a step, whoever's it was; every call that was open has failed. Or it has
                given some of these requests up.
            RolloutCancelledError: `cancel` was called.
        """
        try:
            while True:
                with self.door:
                    pass  # who waits in it comes first
                with self.lock, self.stream.turn():
                    if self._is_over(engine, call, raise_if_interrupted):
                        break
                    self._step(engine)
                    if (done := len(call.names) - call.left) < len(call.names):
                        count("sequence", done, len(call.names))
                    else:
                        count()
        except BaseException:
            self._forget(call)  # also where a signal of somebody else's has struck within a step
            raise
        if are_cut_off(call.finished, call.params):
            raise EngineBrokenError(
                "generating: vLLM has given requests up before their end; its log says why. Ask again."
            )
        return call.finished

    def _is_over(self, engine: Any, call: Call, raise_if_interrupted: Callable[[], None]) -> bool:
        if call.ended is not None and not isinstance(call.ended, RolloutCancelledError):
            raise call.ended
        try:
            if call.ended is not None:
                raise call.ended
            raise_if_interrupted()
        except (KeyboardInterrupt, RolloutCancelledError):
            self._abort(engine, call)
            raise
        if not call.left:
            self._forget(call)
        return not call.left

    def drain(self, engine: Any, adapter: int | None = None) -> None:
        """Step until the open calls are done, in the turn of somebody who changes what they read; nobody begins one
        meanwhile.

        Args:
            engine: vLLM's.
            adapter: only those that it generates.

        Raises:
            EngineBrokenError: vLLM failed in a step.
        """
        with self.door, self.lock, self.stream.turn(), self.between_steps() as raise_if_interrupted:
            while found := [each for each in self._open if each.left and adapter in (None, each.adapter)]:
                raise_if_interrupted()
                for each in found:
                    if each.ended is not None:
                        self._abort(engine, each)
                self._step(engine)

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[Callable[[], None]]:
        """What is yielded raises KeyboardInterrupt where Ctrl-C is due; a second one in the same step gives the engine
        up."""
        try:
            with interrupts_between_steps() as raise_if_interrupted:
                yield raise_if_interrupted
        except ForcedInterrupt:
            self.fail(
                EngineBrokenError(
                    "generating: another thread has given the engine up in the middle of a step; ask again."
                )
            )
            raise KeyboardInterrupt from None

    def reads(self, adapters: Sequence[int]) -> bool:
        """Somebody generates with one of these."""
        return any(call.left and call.adapter in adapters for call in list(self._open))

    def cancel(self, which: Callable[[Call], bool] = lambda call: True) -> None:
        """Have the open calls end between two steps, or those of them that are meant."""
        for call in list(self._open):
            if call.left and call.ended is None and which(call):
                call.ended = RolloutCancelledError("generating: the call was cancelled, because the run ends.")

    def fail(self, error: Exception) -> None:
        """The engine is lost: so are all open calls."""
        self._on_failure()
        for call in self._open:
            call.ended = error
        self._open.clear()

    def _step(self, engine: Any) -> None:
        try:
            outputs = engine.step()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            broken = EngineBrokenError(
                f"generating: vLLM failed in a step ({said}). The engine is rebuilt at its next use."
            )
            self.fail(broken)
            raise broken from error
        for output in outputs:
            if output.finished:
                self._note(output)

    def _note(self, output: Any) -> None:
        for call in self._open:
            if output.request_id in call.names:
                call.finished[call.names.index(output.request_id)] = output
                call.left -= 1

    def _forget(self, call: Call) -> None:
        with contextlib.suppress(ValueError):  # `fail` has, from a thread that was interrupted
            self._open.remove(call)
        self._on_end(call)

    def _abort(self, engine: Any, call: Call) -> None:
        """Take all requests of a call out of scheduler and workers; those of other calls go on."""
        self._forget(call)
        try:
            engine.abort_request(call.internal, internal=True)
            while not self._open and engine.has_unfinished_requests():
                engine.step()
            self._step(engine)  # tells the worker to forget them
        except Exception as error:
            logger.warning("aborting the requests failed; the engine is rebuilt at its next use", exc_info=True)
            self.fail(EngineBrokenError(f"generating: {error}. The engine is rebuilt at its next use."))


class OwnStream:
    """On a GPU the current stream is a setting of each thread, and what is enqueued on two streams has no order.

    A new thread is on the default stream. vLLM puts the thread that builds an engine on a new stream (`current_stream`
    of its utils/torch_utils.py), captures its graphs there, and copies sampled tokens to the host behind that stream
    alone (`main_stream` of its GPU model runner). A step of another thread would be read before it is done, and would
    not wait for a push. So all of them take their turns on that stream.

    Args:
        current: gives the stream of this thread; for tests.
        on: a block on a stream; for tests.
    """

    def __init__(
        self,
        current: Callable[[], Any] = torch.cuda.current_stream,
        on: Callable[[Any], contextlib.AbstractContextManager[Any]] = torch.cuda.stream,
    ) -> None:
        self._current, self._on = current, on
        self._own: Any = None

    def keep(self, is_gpu: bool) -> None:
        """An engine was built in this thread."""
        self._own = self._current() if is_gpu else None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A block behind what this thread has enqueued, and before what it will; nothing changes without an engine on a
        GPU."""
        own = self._own
        if own is None or (mine := self._current()) == own:
            yield
            return
        own.wait_stream(mine)
        try:
            with self._on(own):
                yield
        finally:
            mine.wait_stream(own)
