"""`RolloutWorkers`: generation batches drawn and rewarded in threads, by TRL's own code, ahead of the trainer that takes them.

A rollout is made in two halves. What needs the engine, the environments and the reward functions happens in a thread, in a
`Drawing`: a view of the trainer, with everything that TRL writes to on the way its own. What needs the policy of the moment (the
trainer's logprobs, the ratios, the advantages, the metrics) TRL does when the batch is trained on, in the trainer's thread.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from trl import GRPOTrainer

from qlora_rl.contracts import CancellableEngine
from qlora_rl.errors import EngineBrokenError, VersionGoneError
from qlora_rl.train.rollouts.ahead import Batch
from qlora_rl.train.rollouts.bridge import EngineBridge
from qlora_rl.train.rollouts.turnstile import Turnstile

logger = logging.getLogger(__name__)


@dataclass
class Drawn:
    """One generation batch, drawn and rewarded: B rows.

    Attributes:
        number: of the batch, from 0; -1 where it is evaluated.
        rows: of the dataset, with the prompts that the environments have made of theirs.
        generated: what TRL's `_generate` has returned.
        rewards: [B, reward functions].
        policy: the number of the policy that was trained when the batch began.
        version: of the adapter that drew every token.
        tokens_seen: prompt and completion tokens, as TRL counts them.
        metrics, extra_logs, extra_metrics: what TRL has noted on the way.
        tokens, engine_seconds: that the engine has drawn, and how long it took for them.
        drawn_seconds, idle_seconds: how long it took, and how long its thread had had nothing to do before.
    """

    number: int
    rows: list[dict[str, Any]]
    generated: tuple[Any, ...] = ()
    rewards: torch.Tensor | None = None
    policy: int = 0
    version: int = 0
    tokens_seen: float = 0
    metrics: Mapping[str, list[float]] = field(default_factory=dict)
    extra_logs: Mapping[str, list[Any]] = field(default_factory=dict)
    extra_metrics: Mapping[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    engine_seconds: float = 0.0
    drawn_seconds: float = 0.0
    idle_seconds: float = 0.0


class Front:
    """TRL's backend duck type for one batch: every turn is drawn by the version with which the first one began.

    Args:
        bridge: to the engine.
        number: of the batch, for messages.
        version: that draws; an engine that holds one alone is not asked for it by name.
        seed_of: the seed of each turn, from 0.
        refuse_stopped: raises where the run ends.

    Attributes:
        tokens, seconds: drawn so far, and how long the engine took.
    """

    def __init__(
        self,
        bridge: EngineBridge,
        number: int,
        version: int,
        seed_of: Callable[[int], int],
        refuse_stopped: Callable[[], None],
    ):
        self._bridge, self._number = bridge, number
        self._seed_of, self._refuse_stopped = seed_of, refuse_stopped
        self.version = version
        self.tokens, self.seconds = 0, 0.0
        self._turn = 0

    @property
    def llm(self) -> Any:
        """What TRL's tool loop reads of a colocated vLLM."""
        return self._bridge.llm

    def sync_weights(self) -> None:
        """Nothing: the trainer pushes, in its own thread."""

    def generate(
        self, prompts: list[list[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> Any:
        """See `EngineBridge.generate`."""
        self._refuse_stopped()
        seed = self._seed_of(self._turn)
        self._turn += 1
        with profiler or contextlib.nullcontext():
            asked = self.version if self._bridge.holds_two else None
            rollout = self._bridge.draw(prompts, images, seed=seed, version=asked)
        if rollout.version != self.version:
            raise EngineBrokenError(
                f"drawing batch {self._number}: it began with version={self.version}, and version={rollout.version} has answered: somebody "
                "else has pushed to this engine. Give each trainer that runs at the same time an engine of its own."
            )
        self.tokens, self.seconds = self.tokens + rollout.tokens, self.seconds + rollout.seconds
        return EngineBridge.as_trl_wants(prompts, rollout)


class Drawing(GRPOTrainer):
    """A shallow copy of a trainer for one batch: TRL's rollout code, with nothing that it shares with the training but what is only read.

    A `rollout_func`, tools and reward models may read any attribute of the trainer, so no list of some would do. Reading the trainer
    itself would be a race: it changes its attributes while threads draw.

    Args:
        picture: the attributes of the trainer.
        own: those that this batch has for itself.
        is_training: the batch is trained on, not evaluated.
    """

    def __init__(self, picture: Mapping[str, Any], own: Mapping[str, Any], *, is_training: bool):
        vars(self).update({**picture, **own})
        self._mode = "train" if is_training else "eval"
        self.model = _Policy(picture["model"], is_training)
        self._metrics: dict[str, defaultdict[str, list[Any]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._pending_extra_logs: defaultdict[str, list[Any]] = defaultdict(list)
        self._pending_metrics: defaultdict[str, list[Any]] = defaultdict(list)
        self._last_loaded_step = self.state.global_step  # the trainer pushes

    def draw(self, drawn: Drawn, leave: Callable[[], None]) -> None:
        """Fill in `drawn`, from its rows: environments, generation with its tools, rewards; `leave` when the engine is free."""
        seen = self.state.num_input_tokens_seen
        prompts, (*generated, extra_fields, images, tool_images) = self._first_half(drawn.rows)
        leave()
        for i, row in enumerate(drawn.rows):
            for name, values in extra_fields.items():
                if not isinstance(values, list) or i < len(values):
                    row[name] = values[i] if isinstance(values, list) else values
        _, completion_ids, _, completions, _ = generated
        drawn.rewards = self._calculate_rewards(drawn.rows, prompts, completions, completion_ids)
        drawn.generated = (*generated, {}, images, tool_images)
        drawn.rows = [{**row, "prompt": prompt} for row, prompt in zip(drawn.rows, prompts, strict=True)]
        drawn.tokens_seen = self.state.num_input_tokens_seen - seen
        metrics = self._metrics[self._mode]
        metrics.pop("num_tokens", None)  # a sum over the run, which only the trainer knows
        drawn.metrics, drawn.extra_logs, drawn.extra_metrics = metrics, self._pending_extra_logs, self._pending_metrics

    def _first_half(self, rows: list[dict[str, Any]]) -> tuple[list[Any], Any]:
        """Prompts, as the environments have made them, and what TRL's `_generate` returns for them.

        TRL has no method for this half alone, so its method for both is left where `_generate` returns. A copy would be fifty lines about
        environments, their pools, tools and images, with six private attributes of TRL.
        """
        try:
            self._generate_and_score_completions(rows)
        except _Generated as half:
            return half.prompts, half.output
        raise AssertionError("TRL's _generate_and_score_completions has not called _generate")

    def _generate(self, prompts: list[Any]) -> Any:
        raise _Generated(prompts, super()._generate(prompts))


class _Generated(Exception):
    """The first half of a rollout is done."""

    def __init__(self, prompts: list[Any], output: tuple[Any, ...]):
        super().__init__()
        self.prompts, self.output = prompts, output


class _Policy:
    """The trainer's model as rollout code sees it: always in the mode that the batch was asked for."""

    def __init__(self, model: Any, training: bool):
        self._model, self.training = model, training

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class RolloutWorkers:
    """Threads that draw batches, in the order in which they were submitted.

    Args:
        trainer: whose batches they are; its attributes are looked at now, `state` at each batch.
        bridge: to the engine.
        turnstile: lets batches begin.
        count: of threads; each has its own tokenizer and its own environments.
    """

    def __init__(self, trainer: Any, bridge: EngineBridge, turnstile: Turnstile, count: int):
        self.turnstile, self._bridge = turnstile, bridge
        self._picture = dict(vars(trainer))
        self._trainer = weakref.ref(trainer)  # threads must not keep it alive
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="qlora-rl-rollouts")
        self._kits: list[_Kit] = []  # that no thread uses
        self._own_kit: _Kit | None = None
        self._made = itertools.count()
        self._futures: dict[int, Future[Drawn]] = {}

    def submit(self, batch: Batch) -> None:
        """Have it drawn, as soon as it may begin."""
        self._futures[batch.number] = self._executor.submit(self._draw, batch)

    def take(self, number: int) -> tuple[Drawn, float, int]:
        """Batch `number`, once.

        Returns:
            The batch, the seconds that the caller has waited for it, and how many batches lay ready before.

        Raises:
            Exception: whatever ended its thread, as itself.
        """
        ready = sum(future.done() for future in self._futures.values())
        started = time.perf_counter()
        drawn = self._futures.pop(number).result()
        return drawn, time.perf_counter() - started, ready

    def draw_now(self, rows: list[dict[str, Any]], version: int) -> Drawn:
        """A batch that is evaluated, in the caller's thread; its seeds are the bridge's."""
        self._own_kit = self._own_kit or self._new_kit()
        drawn = Drawn(-1, _copied(rows))
        self._fill(
            self._own_kit, drawn, version, lambda turn: self._bridge.next_seed(), lambda: None, is_training=False
        )
        return drawn

    def close(self) -> int:
        """End the threads, and what they are drawing; harmless when repeated.

        Returns:
            How many batches were submitted and not taken.
        """
        self.turnstile.stop()
        running = {future for future in self._futures.values() if not future.cancel()}
        engine = self._bridge.engine
        while running and isinstance(engine, CancellableEngine):
            engine.cancel()  # again, should one have begun just then
            running = wait(running, timeout=0.2).not_done
        self._executor.shutdown(wait=True, cancel_futures=True)
        left, self._futures = len(self._futures), {}
        return left

    def _draw(self, batch: Batch) -> Drawn:
        kit = self._kits.pop() if self._kits else self._new_kit()

        def seed_of(turn: int) -> int:
            return self._bridge.seed_of(batch.step, batch.call(turn))

        try:
            while True:
                visit = self.turnstile.enter(batch.policy)
                started = time.perf_counter()
                drawn = Drawn(batch.number, _copied(batch.rows), policy=visit.policy, idle_seconds=started - kit.since)
                leave = functools.partial(self.turnstile.leave, visit)
                try:
                    self._fill(kit, drawn, visit.version, seed_of, leave, is_training=True)
                except VersionGoneError as error:
                    if visit.version == self._bridge.serves:
                        raise
                    # The engine was started anew in the middle of it, with the newest version alone. Nothing was rewarded yet.
                    logger.warning("batch %d is drawn again: %s", batch.number, error)
                    continue
                finally:
                    leave()
                drawn.drawn_seconds = time.perf_counter() - started
                return drawn
        finally:
            kit.since = time.perf_counter()
            self._kits.append(kit)

    def _fill(
        self,
        kit: _Kit,
        drawn: Drawn,
        version: int,
        seed_of: Callable[[int], int],
        leave: Callable[[], None],
        *,
        is_training: bool,
    ) -> None:
        front = Front(self._bridge, drawn.number, version, seed_of, self.turnstile.refuse_stopped)
        own = {**kit.own, "state": copy.copy(self._trainer().state), "vllm_generation": front}
        Drawing(self._picture, own, is_training=is_training).draw(drawn, leave)
        drawn.version = version
        drawn.tokens, drawn.engine_seconds = front.tokens, front.seconds

    def _new_kit(self) -> _Kit:
        picture, is_first = self._picture, next(self._made) == 0
        processor, tokenizer = copy.deepcopy((picture["processing_class"], picture["_tokenizer"]))
        own = {"processing_class": processor, "_tokenizer": tokenizer}
        if not is_first and picture["environment_factories"] is not None:
            own["_environment_pool"] = {name: [] for name in picture["_environment_pool"]}
        return _Kit(own)


@dataclass
class _Kit:
    """What a thread has for itself: fast tokenizers cannot be asked by two threads at once, nor can environments."""

    own: dict[str, Any]
    since: float = field(default_factory=time.perf_counter)  # when it was put down


def _copied(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(row) for row in rows]
