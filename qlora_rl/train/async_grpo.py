"""`QLoRAAsyncGRPOTrainer`: rollouts of the next steps are drawn and rewarded while this one is trained on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from qlora_rl.errors import ConfigConflictError, QloraRLError
from qlora_rl.fidelity import Fidelity
from qlora_rl.sync.diagnosis import Drawn as Examined
from qlora_rl.train.grpo import QLoRAGRPOTrainer
from qlora_rl.train.rollouts.ahead import Batch, LookAhead
from qlora_rl.train.rollouts.turnstile import Turnstile
from qlora_rl.train.rollouts.workers import Drawn, RolloutWorkers
from qlora_rl.train.watch.alarm import few_of

logger = logging.getLogger(__name__)


class QLoRAAsyncGRPOTrainer(QLoRAGRPOTrainer):
    """`QLoRAGRPOTrainer` whose rollouts (generation, tools, environments, rewards) and training overlap.

    ::

        trainer = QLoRAAsyncGRPOTrainer(
            model=base, reward_funcs=slow_judge, train_dataset=dataset, args=GRPOConfig(output_dir="run"),
            peft_config=LoraConfig(r=16, target_modules="all-linear"), max_staleness=1,
        )

    Every batch is trained on once, in the order of the dataset, whatever its age; none is dropped for being old, because none
    begins that would become too old. What a batch is drawn with it is drawn with to its end, also when a push comes in between.
    TRL's importance sampling (`vllm_importance_sampling_correction`, on by default) weighs it by the probabilities of the policy
    that trains against those of the sampler that drew.

    Reward functions, tools and environments run in `max_staleness + 1` threads, several batches at once; `trainer_state` is the
    state in which the batch began. Each thread has environments of its own.

    Args:
        max_staleness: by how many policies the one that trains may be newer than the one that drew. 0 is GRPO without overlap.
        rollout_threads: batches that are drawn at once; 1 for reward functions that cannot be called by two threads.

    Raises:
        ConfigConflictError: besides those of `QLoRAGRPOTrainer`.
    """

    _tag_names = ["trl", "grpo", "async", "qlora-rl"]

    _one_process = "rollouts are drawn ahead by one"

    def __init__(self, *args: Any, max_staleness: int = 1, rollout_threads: int | None = None, **kwargs: Any):
        if max_staleness < 0:
            raise ConfigConflictError(
                f"reading the arguments: max_staleness={max_staleness} < 0. Use 0 for no overlap."
            )
        threads = max_staleness + 1 if rollout_threads is None else rollout_threads
        if threads < 1:
            raise ConfigConflictError(f"reading the arguments: rollout_threads={rollout_threads} < 1. Use at least 1.")
        self.max_staleness, self.rollout_threads = max_staleness, threads
        self._is_running = False
        self._ahead: LookAhead | None = None
        self._waiting: deque[Batch] = deque()  # given to training, and not yet asked for by it
        self._drawn: Drawn | None = None
        self._drawn_version = 0  # of the batch that is trained on
        self._facts: dict[str, float] = {}
        self._ages: list[int] = []
        self._policy = 0
        self._trained: Examined | None = None  # of the newest batch that was trained on
        self._rescored: dict[str, float] = {}
        super().__init__(*args, **kwargs)
        try:
            self._check_config()
        except BaseException:
            self.close()
            raise
        self._workers = self._new_workers()

    def _check_config(self) -> None:
        if self.bridge.sleeps:
            raise ConfigConflictError(
                "reading the config: vllm_enable_sleep_mode=True with overlapping rollouts: the engine never rests between them. Leave it "
                "out, or use QLoRAGRPOTrainer."
            )
        if self.max_staleness and not self.vllm_importance_sampling_correction:
            logger.warning(
                "without importance sampling correction: rollouts of up to %d policies ago are trained on as if they were new",
                self.max_staleness,
            )

    # --- the run ----------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `train`. An error of a rollout ends it as itself, at the step that would have trained on it; afterwards no thread is left."""
        self._waiting.clear()
        self._ahead, self._policy, self._trained = None, 0, None
        self._workers, self._is_running = self._new_workers(), True
        try:
            return super().train(*args, **kwargs)
        finally:
            self._is_running, self._ahead = False, None
            try:
                if left := self._workers.close():
                    logger.info("%d batches that had begun were not trained on; a resumed run draws them again", left)
            finally:
                self._workers = self._new_workers()  # for evaluations

    def _new_workers(self) -> RolloutWorkers:
        bridge = self.bridge
        turnstile = Turnstile(self.max_staleness, lambda: bridge.serves, holds_two=bridge.holds_two)
        return RolloutWorkers(self, self.bridge, turnstile, self.rollout_threads)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """transformers asks here for the batches of an optimizer step; those of the next ones are begun."""
        if self._ahead is None:
            self._ahead = LookAhead(
                self.callback_handler.train_dataloader,
                accumulation=self.args.gradient_accumulation_steps,
                generate_every=self.args.steps_per_generation * self.num_iterations,
                first_step=self.state.global_step,
                last_step=self.state.max_steps,
                loaded=self._step,
                is_skipping=not self.args.ignore_data_skip,
            )
        batches = self._ahead.take(epoch_iterator, num_batches)
        for batch in self._ahead.begun(self.max_staleness):
            self._workers.submit(batch)
            self._waiting.append(batch)
        return batches, self._get_num_items_in_batch(batches, device)

    # --- one batch --------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._before_rollout("train" if self.model.training else "eval")
        drawn = self._next(inputs) if self.model.training and self._is_running else self._evaluated(inputs)
        self._drawn, self._drawn_version = drawn, drawn.version
        # The environments have been asked already, with threads of their own.
        held = self.environment_factories, self.environments
        self.environment_factories = self.environments = None
        try:
            return super()._generate_and_score_completions(drawn.rows)
        finally:
            self.environment_factories, self.environments = held
            self._drawn, self._facts = None, {}

    def _next(self, inputs: Any) -> Drawn:
        batch = self._waiting.popleft() if self._waiting else None
        if batch is None or batch.rows is not inputs:
            raise QloraRLError(
                "training on a rollout: another batch is asked for than the one that was drawn for this step. Do not call "
                "training_step from outside, and leave get_batch_samples as it is."
            )
        self._push_if_changed()
        self._workers.turnstile.advance(batch.policy)
        drawn, waited, ready = self._workers.take(batch.number)
        if batch.policy != self._policy:
            self._policy, self._ages = batch.policy, []
        self._ages.append(batch.policy - drawn.policy)
        self._facts = {
            "staleness_mean": sum(self._ages) / len(self._ages),
            "staleness_max": max(self._ages),
            "policy_version": self.engine.version,
            "rollout_version": drawn.version,
            "rollouts_ready": ready,
            "trainer_wait_seconds": waited,
            "rollout_idle_seconds": drawn.idle_seconds,
            "rollout_drawn_seconds": drawn.drawn_seconds,
            **self._rescored,
        }
        self._rescored = {}
        return drawn

    def _evaluated(self, inputs: Any) -> Drawn:
        """Drawn now, by the policy of the moment; rollouts that have begun go on with theirs."""
        self._push_if_changed()
        return self._workers.draw_now(inputs, self.bridge.serves)

    def _push_if_changed(self) -> None:
        if self.state.global_step == self._last_loaded_step:  # TRL's own note, which a resumed run finds as it was
            return
        with self._workers.turnstile.pushing():
            self.bridge.sync_weights()
            self._last_loaded_step = self.state.global_step
            self._look_again()

    def _generate(self, prompts: list[Any]) -> Any:
        """What a thread has drawn."""
        drawn, mode = self._drawn, "train" if self.model.training else "eval"
        if mode == "train":
            self.state.num_input_tokens_seen += drawn.tokens_seen
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        for name, values in drawn.metrics.items():
            self._metrics[mode][name].extend(values)
        for name, values in drawn.extra_logs.items():
            self._pending_extra_logs[name].extend(values)
        for name, values in drawn.extra_metrics.items():
            self._pending_metrics[name].extend(values)
        return drawn.generated

    def _calculate_rewards(self, *_: Any) -> torch.Tensor:
        """What a thread has found."""
        return self._drawn.rewards

    def _rollout_facts(self) -> dict[str, float]:
        facts, drawn = super()._rollout_facts(), self._drawn
        if drawn is not None:  # of this batch alone, whatever else threads have drawn
            tokens, seconds = drawn.tokens, drawn.engine_seconds
            facts |= {"rollout_tokens": tokens, "rollout_seconds": seconds}
            facts["rollout_tokens_per_s"] = tokens / seconds if seconds else float("nan")
        return facts | self._facts

    def decisive(self) -> dict[str, Any]:
        """Another staleness is another run."""
        return super().decisive() | {"max_staleness": self.max_staleness}

    def _describe(self, *args: Any) -> dict[str, Any]:
        described = super()._describe(*args)
        return described | {
            "max_staleness": self.max_staleness,
            "rollout_threads": self.rollout_threads,
        }

    # --- the alarm --------------------------------------------------------------------------------------------------

    def _watch(self, fidelity: Fidelity, output: Any, mask_BT: torch.Tensor) -> None:
        """A batch is looked at as in GRPO where the policy that drew it is the one that trains; otherwise its distance is staleness too."""
        if self.model.training and self.max_staleness:
            self._trained = few_of(output, mask_BT)
        if self._drawn_version == self.bridge.serves:
            super()._watch(fidelity, output, mask_BT)
        elif (found := self.alarm.observe_gaps(fidelity)) is not None:
            self._record.add(mismatch_cause=found.cause)

    def _look_again(self) -> None:
        """After a push, while nothing is in its way: the engine scores what was drawn before under the version that serves now."""
        drawn, self._trained = self._trained, None
        if drawn is None or self.alarm is None:
            return
        distance, found = self.alarm.observe_again(drawn)
        self._rescored = {"rescored_diff": distance}
        if found is not None:
            self._record.add(mismatch_cause=found.cause)
