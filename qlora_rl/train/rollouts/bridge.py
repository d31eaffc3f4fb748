"""`EngineBridge`: what TRL's GRPO and RLOO trainers need of a generation backend, over one engine and one strategy.

It holds no trainer. `install` sets the attributes by which TRL 1.16 uses a backend; they are set nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from qlora_rl.base.unsupported_configs import Limit
from qlora_rl.contracts import Rollout, RolloutEngine, SamplingSpec, SyncReport, SyncStrategy
from qlora_rl.distributed import ranks
from qlora_rl.engine.images import ImagePrompt
from qlora_rl.errors import EngineBrokenError, EngineUnsupportedError, NotYetSupportedError, PromptTooLongError
from qlora_rl.train.rollouts.batches import Endings

logger = logging.getLogger(__name__)

_APART = 2_654_435_761  # a prime: odd, because generators of torch look at the low 32 bits of a seed


class EngineBridge:
    """TRL's backend duck type: `sync_weights()` and `generate(prompts, images, num_generations, profiler)`.

    Args:
        engine: generates.
        strategy: makes it equal to the policy.
        sampling: how to sample; every call gets a seed of its own, derived from `seed`, the optimizer step, whether it
            is an evaluation, and its number among those: a run that goes on from a checkpoint samples what it would
            have sampled.
        seed: of the run.
        sleeps: the engine sleeps between rollouts.
        limit: of the base's config, for the error of a prompt that is too long.

    Attributes:
        last: the newest rollout; RLOO of TRL drops its logprobs.
        endings: of what has begun.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        strategy: SyncStrategy,
        sampling: SamplingSpec,
        *,
        seed: int,
        sleeps: bool = False,
        limit: Limit | None = None,
    ):
        self.engine = engine
        self.strategy = strategy
        self.sampling = sampling
        self.seed = seed
        self.sleeps = sleeps
        self.limit = limit
        self.holds_two = engine.capabilities().holds_two
        self.gives_logprobs = engine.capabilities().gives_logprobs
        self._alone, self._counting = threading.Lock(), threading.Lock()
        self._step, self._is_evaluation = 0, False
        self._calls = {False: 0, True: 0}
        self._width = 0  # prompts of the first call of what has begun
        # The version that was pushed last, and in which step: of the run, which may have begun in another process.
        self._pushed = (0, -1)
        self._serves: int | None = None  # the version that this bridge has pushed last
        self._verified = engine.incarnation
        self._reports: list[SyncReport] = []
        self._tokens = 0
        self._seconds = 0.0
        self._naps: dict[str, float] = {}
        # Of the newest batch of each kind, by all token ids of a sequence; `None` where nobody asks.
        self._routing: dict[bool, dict[tuple[int, ...], Any]] | None = None
        self.last: Rollout | None = None
        self.endings = Endings()

    def install(self, trainer: Any) -> None:
        """Make `trainer` (built with use_vllm=False) generate through this bridge."""
        trainer.use_vllm = True
        trainer.vllm_mode = "colocate"
        trainer.vllm_generation = self
        trainer._last_loaded_step = -1
        if not self.knows_logprobs(getattr(trainer, "rollout_func", None)):
            trainer.vllm_importance_sampling_correction = False
        self._calls = {False: 0, True: 0}  # a step that an earlier training has begun may come again

    def knows_logprobs(self, rollout_func: Any) -> bool:
        """Sampled tokens come with the logprobs with which they were sampled: the engine's, or those that a
        `rollout_func` returns."""
        return self.gives_logprobs or rollout_func is not None

    def begin(self, step: int, *, is_evaluation: bool = False) -> None:
        """What is sampled from now on belongs to this optimizer step."""
        if step != self._step:
            self._calls = {False: 0, True: 0}
        self._step, self._is_evaluation, self._width, self.endings = step, is_evaluation, 0, Endings()
        if self._routing is not None:
            self._routing[is_evaluation] = {}

    def keep_routing(self) -> None:
        """Keep, until the next batch is generated, which experts the engine chose for it, and their weights."""
        self._routing = {False: {}, True: {}}

    def routing_of(self, rows: Sequence[Sequence[int]]) -> list[tuple[Any, Any]]:
        """What the engine chose for sequences that it has generated, prompts included, and the weights (`Rollout`);
        `None` for others.

        Of equal sequences it is that of one of them: what they differ by is rounding.
        """
        return [
            next((known[key] for known in (self._routing or {}).values() if key in known), (None, None))
            for key in map(tuple, rows)
        ]

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        version, step = self._pushed
        return {"version": version, "pushed_in_step": step}

    def restore(self, saved: dict[str, Any], trainer: Any) -> None:
        """Inverse of `state`: versions go on behind the last one. The trainer holds the policy of the checkpoint."""
        self.strategy.after = saved["version"]
        if saved["pushed_in_step"] == trainer.state.global_step:
            # An evaluation had pushed this policy already: it keeps its version, and is no push of the next step.
            self.strategy.after -= 1
            self._step = trainer.state.global_step
            self.sync_weights()
            self._reports.clear()
            trainer._last_loaded_step = trainer.state.global_step
        self._pushed = (saved["version"], saved["pushed_in_step"])

    @property
    def llm(self) -> Any:
        """What TRL's tool loop reads of a colocated vLLM: the length at which it stops a conversation, in tokens."""
        limit = self.engine.capabilities().max_model_length
        return SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=limit)))

    def sync_weights(self, step: int | None = None) -> SyncReport:
        """Push the current policy; TRL calls it once per optimizer step, before the first generation.

        Args:
            step: optimizer steps that the policy has been trained for; by default that of `begin`.
        """
        if self.sleeps:
            self.wake()
        with ranks().together("pushing the policy"):
            report = self.strategy.push()
        self._reports.append(report)
        self._pushed, self._serves = (report.version, self._step if step is None else step), report.version
        self._prove()  # the push itself may not have been scored
        return report

    def is_overtaken(self) -> bool:
        """The engine serves another version than was pushed last, on any rank: it has lost it, or has another owner,
        too. All ranks ask."""
        found = any(ranks().gather(self.engine.version != self.serves, "asking which version serves"))
        if found:
            logger.warning(
                "the engine serves version %d, and version %d was pushed last: the policy is pushed again. An engine "
                "that was restarted, or one into which somebody else pushes, too",
                self.engine.version,
                self.serves,
            )
        return found

    @property
    def serves(self) -> int:
        """The version that was pushed last; before the first push what the engine came with."""
        return self.engine.version if self._serves is None else self._serves

    def generate(
        self, prompts: list[list[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float | None]]], list[list[list[int]]]]:
        """One completion per prompt (TRL has repeated each `num_generations` times already). The engine is awake
        afterwards: `rest` once all turns are there.

        Returns:
            Prompt ids and completion ids (B lists each), logprobs [B][T][1] of the sampled tokens, and their ids
            [B][T][1].
        """
        seed = self.next_seed()
        # Of later turns each rank has as many as its conversations need: no rank may wait for others there.
        is_alone = self._width > 0 and ranks().size > 1
        self.wake()
        if not is_alone:
            self._prove()  # it may have slept, or been rebuilt, since the last push
        elif self.engine.incarnation != self._verified:
            raise EngineBrokenError(
                f"generating: the engine of rank {ranks().rank} was rebuilt between two turns of a conversation, and "
                "the ranks verify it together before a rollout only. Start the run again with existing_run='resume'."
            )
        with profiler or nullcontext():
            try:
                rollout = self.sample(prompts, images, seed=seed)
            except EngineBrokenError:
                if is_alone or self.engine.incarnation == self._verified:
                    raise
                # A server was restarted in the middle, and has lost full weights: they are pushed again.
                self._prove()
                rollout = self.sample(prompts, images, seed=seed)
        if rollout.version != self.serves:
            raise EngineBrokenError(
                f"generating: version={rollout.version} has answered, and version={self.serves} was pushed: somebody "
                "else has pushed to this engine in the middle of a rollout. Give each trainer that runs at the same "
                "time an engine of its own."
            )
        self.last = rollout
        self.endings.note(prompts, rollout)
        return self.as_trl_wants(prompts, rollout)

    def sample(
        self,
        prompts: list[list[int]],
        images: Any = None,
        *,
        seed: int,
        version: int | None = None,
        width: int | None = None,
    ) -> Rollout:
        """One completion per prompt, from any thread. Nothing is woken or verified.

        Args:
            version: that samples, of those that the engine holds (`holds_two`); by default what serves.
            width: prompts of the first call of what these are a turn of; by default of what has begun.
        """
        asked: list[Any] = list(prompts)
        if images is not None and any(images):
            if not self.engine.capabilities().takes_images:
                raise NotYetSupportedError(
                    f"generating: the prompts hold images, which {self.engine.capabilities().name} does not take. Use "
                    "a base made of a vision-language model, or text prompts."
                )
            asked = [ImagePrompt(ids, tuple(held)) if held else ids for ids, held in zip(prompts, images, strict=True)]
        if width is None:
            width = self._width = self._width or len(prompts)
        # What is sampled does not depend on how many processes share the batch: each has its part of the places.
        spec = dataclasses.replace(self.sampling, seed=seed, first_place=ranks().rank * width)
        with self.alone():
            try:
                rollout = (
                    self.engine.generate(asked, spec)
                    if version is None
                    else self.engine.generate(asked, spec, version=version)
                )
            except PromptTooLongError as error:
                if self.limit is None or self.engine.capabilities().max_model_length < self.limit.length:
                    raise
                why = f"This base allows no more: beyond {self.limit.length} tokens, {self.limit.why}."
                raise PromptTooLongError(f"{error} {why}", reasons=error.reasons) from error
        with self._counting:
            self._tokens += rollout.tokens
            self._seconds += rollout.seconds
            if self._routing is not None and rollout.routing is not None:
                weights = rollout.routing_weights or [None] * len(prompts)
                for prompt, ids, *routed in zip(prompts, rollout.completion_ids, rollout.routing, weights, strict=True):
                    self._routing[self._is_evaluation][*prompt, *ids] = tuple(routed)
        if not self.gives_logprobs:
            # TRL reads a value for each token, and `MeasuredSteps` takes them out again.
            nothing: list[list[float | None]] = [[None] * len(ids) for ids in rollout.completion_ids]
            return dataclasses.replace(rollout, logprobs=nothing)
        if not rollout.logprobs and rollout.completion_ids:
            raise EngineUnsupportedError(
                f"generating: logprobs={rollout.logprobs!r} of {len(rollout.completion_ids)} completions by "
                f"{self.engine.capabilities().name}. Return a list for each completion, or set gives_logprobs=False in "
                "the engine's capabilities()."
            )
        return rollout

    @staticmethod
    def as_trl_wants(
        prompts: list[list[int]], rollout: Rollout
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float | None]]], list[list[list[int]]]]:
        """What `generate` returns."""
        return (
            [list(p) for p in prompts],
            rollout.completion_ids,
            [[[value] for value in values] for values in rollout.logprobs],
            [[[token] for token in ids] for ids in rollout.completion_ids],
        )

    def next_seed(self) -> int:
        """Of the next call of what has begun."""
        call = self._calls[self._is_evaluation]
        self._calls[self._is_evaluation] += 1
        return self.seed_of(self._step, call, is_evaluation=self._is_evaluation)

    def seed_of(self, step: int, call: int, *, is_evaluation: bool = False) -> int:
        """No two calls of a run have the same: they are counted within step and kind, and no run has as many steps as
        the prime."""
        return self.seed * 1_000_003 + step + (2 * call + is_evaluation) * _APART

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """An engine that knows nothing of threads is asked by one at a time; one that does is asked by all."""
        with nullcontext() if self.holds_two else self._alone:
            yield

    def _prove(self) -> None:
        """Verify the policy again where the engine is not the one it was verified on."""
        # What it takes all ranks do together, though each may have an engine of its own.
        is_another = self.engine.incarnation != self._verified
        if any(ranks().gather(is_another, "asking whether an engine is another one")):
            self.strategy.verify()
            self._verified = self.engine.incarnation
            if self._serves is not None:  # full weights that were lost were pushed again
                self._serves = self.engine.version
                self._pushed = (self._serves, self._pushed[1])

    def wake(self) -> None:
        """Undo `rest`."""
        with self._timed("wake_seconds"):
            self.engine.wake()

    def rest(self) -> None:
        """Have the engine give back its KV cache while the policy is trained, if it is to sleep between rollouts."""
        if self.sleeps:
            with self._timed("sleep_seconds"):
                self.engine.sleep()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.sleeps:
            self._naps[name] = self._naps.get(name, 0.0) + time.perf_counter() - began

    def drain(self) -> tuple[list[SyncReport], int, float, dict[str, float]]:
        """Pushes, sampled tokens, seconds of generation, and seconds of falling asleep and of waking, since the last
        call of `drain`."""
        with self._counting:
            taken = (self._reports, self._tokens, self._seconds, self._naps)
            self._reports, self._tokens, self._seconds, self._naps = [], 0, 0.0, {}
        return taken
