"""`MeasuredSteps`: a mixin for GRPO trainers that records, per optimizer step, what both sides thought of the tokens.

It changes nothing of the training; the demo puts it on TRL's own trainer too, so that both are measured alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from qlora_rl.distributed import ranks
from qlora_rl.documents import read_object
from qlora_rl.errors import RunDirectoryError
from qlora_rl.fidelity import Fidelity, FidelityMonitor, measure
from qlora_rl.image_io import as_thumbnails
from qlora_rl.sync.truncated_sampling import TruncatedSampling
from qlora_rl.train.metrics.alarm import MismatchAlarm, filters_of, sampled_from
from qlora_rl.train.run import ROLLOUTS, RunDirectory, StepRecord

logger = logging.getLogger(__name__)

_KEPT = 8  # rollouts of a group that are written down
_FIRST = 3  # batches after which a run with one reward is warned of
_KEPT_STEPS = 12  # between the first and the newest, evenly spread over those that are planned

# TRL's metrics that a step's record keeps under TRL's names: of what was generated, and of the loss, known when TRL
# logs.
_OF_A_ROLLOUT = ("rewards/", "frac_reward_zero_std", "completions/", "tools/")
_OF_A_LOSS = ("loss", "grad_norm", "learning_rate", "entropy", "kl", "clip_ratio/")


class MeasuredSteps:
    """Call `measure_into` after the trainer's `__init__`; override `_rollout_facts`."""

    fidelity: FidelityMonitor
    alarm: MismatchAlarm | None = None
    _compares = True  # the sampler's logprobs are known
    _truncated: TruncatedSampling | None = None  # logprobs are of what it keeps, here as in the sampler
    _record: StepRecord

    def measure_into(
        self, run: RunDirectory | None, alarm: MismatchAlarm | None = None, *, compares: bool = True
    ) -> None:
        """Record every step from now on, in `run` and in TRL's log (names `qlora_rl/…`); `alarm` looks at each of them.

        Without `compares` the sampler's logprobs are not known.
        """
        self.fidelity, self.alarm, self._compares = FidelityMonitor(), alarm, compares
        self._record = StepRecord(run)
        self._kept_rollouts: list[dict[str, Any]] = []
        self._first_rewards: list[list[tuple[float | None, ...]]] | None = []
        # Before the user's, which may raise: the step is done all the same.
        self.callback_handler.callbacks.insert(0, StepClock(self._record))

    def _rollout_facts(self) -> dict[str, float]:
        """Tokens, seconds and sync of the generation that just ended."""
        return {}

    def _before_rollout(self, mode: str) -> None:
        """A generation begins, for "train" or "eval"."""

    def _after_generation(self) -> None:
        """All completions are there, before they are rewarded."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)  # all turns of all conversations
        self._after_generation()
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        mode = "train" if self.model.training else "eval"
        self._before_rollout(mode)
        output = super()._generate_and_score_completions(inputs)
        if not self._compares:
            output.pop("sampling_per_token_logps", None)
        self._note(mode, self._measured_rollout())
        if mode == "train":
            latest = {name: values[-1] for name, values in self._metrics[mode].items() if values}
            self._record.add(
                reward=latest.get("reward"),
                reward_std=latest.get("reward_std"),
                completion_length=latest.get("completions/mean_length"),
                **{n: v for n, v in latest.items() if n.startswith(_OF_A_ROLLOUT) and n != "completions/mean_length"},
            )
            self._note_rollouts(len(output["completion_ids"]) * ranks().size)  # TRL has gathered their texts
        if "sampling_per_token_logps" in output:
            self._compare(mode, output)
        return output

    def _measured_rollout(self) -> dict[str, Any]:
        """Of all ranks: how it was generated, and the threshold that it is held against."""
        measured: dict[str, Any] = of_all_ranks(dict(self._rollout_facts()))
        if self.alarm is not None and self.alarm.threshold is not None:
            measured["mismatch_threshold"] = self.alarm.threshold
        return measured

    def _note(self, mode: str, measured: dict[str, Any]) -> None:
        """Into TRL's log, which takes numbers, and into the record of the step."""
        for name, value in measured.items():
            if not name.endswith("by_position"):
                self._metrics[mode][f"qlora_rl/{name}"].append(value)
        if mode == "train":
            self._record.add(**measured)

    def _compare(self, mode: str, output: dict[str, Any]) -> None:
        """What was sampled, with what the trainer thinks of it."""
        self._look_at(mode, output, self._trainer_logprobs(output, mode))

    def _look_at(self, mode: str, batch: dict[str, Any], logprobs_BT: torch.Tensor) -> None:
        """Measure, and let the alarm judge.

        Args:
            mode: "train" or "eval".
            batch: of TRL's batch the ids and masks of prompts and completions, and the sampler's logprobs.
            logprobs_BT: the trainer's, under the policy that is trained.
        """
        mask_BT = sampled_mask(batch)
        parts = batch_of_all_ranks(logprobs_BT, batch["sampling_per_token_logps"], mask_BT)
        fidelity = self.fidelity.observe(*parts)
        self._note(mode, _said(fidelity))
        if mode == "train" and len(batches := self._record.kept("sampled tokens", parts)) > 1:
            self._record.add(**_said(measure(*stacked(batches))))  # of the whole step
        if self.alarm is not None:
            self._watch(fidelity, batch, mask_BT)

    def _watch(self, fidelity: Fidelity, output: Any, mask_BT: torch.Tensor) -> None:
        truncated = self._truncated
        filters = filters_of(self.bridge.sampling, truncated)
        found = self.alarm.observe(
            fidelity, lambda: sampled_from(output, mask_BT, self.temperature, filters, truncated)
        )
        if found is not None:
            self._record.add(mismatch_cause=found.cause)
            self.bridge.rest()  # the examination has woken it

    def _look_at_rewards(self, worth: list[tuple[float | None, ...]]) -> None:
        """Warn once where the rollouts of the first three batches have one reward all.

        Args:
            worth: of each completion its rewards, of a step's rollouts.
        """
        if self._first_rewards is None or self.state.global_step >= _FIRST or not any(worth):  # a teacher gives none
            return
        self._first_rewards.append(worth)
        rewards = [each for step in self._first_rewards for each in step]
        is_equal = len({str(each) for each in rewards}) == 1  # NaN is what TRL makes of None
        if is_equal and len(self._first_rewards) == _FIRST:
            logger.warning(
                "all %d rewards so far are equal (%s): nothing can be learned from equal rewards. The prompts may be "
                "too hard; or look at the reward function and at the answers: of chat prompts a completion is a list "
                "of messages, whose text is "
                'completion[-1]["content"] (docs/troubleshooting.md#wrong-without-an-error)',
                len(rewards),
                ", ".join("None" if value is None else f"{value:g}" for value in rewards[0]),
            )
            self._first_rewards = None
        elif not is_equal or len(self._first_rewards) == _FIRST:
            self._first_rewards = None

    def _note_rollouts(self, count: int) -> None:
        """Keep a group of rollouts of the first step, of some between, and of the newest, for people to read.

        Args:
            count: rollouts that TRL has just added to its log of texts.
        """
        run, texts = self._record.run, self._logs
        if not texts["prompt"]:
            return
        size = min(self.num_generations, count)
        prompts, completions = list(texts["prompt"])[-count:], list(texts["completion"])[-count:]
        rewards = {name: list(values)[-count:] for name, values in texts["rewards"].items()}
        worth = [tuple(values[i] for values in rewards.values()) for i in range(count)]
        if ranks().is_first:
            self._look_at_rewards(worth)
        if run is None:
            return
        # Of the groups one that teaches: where all rewards are equal there is no gradient.
        starts = range(0, count, size)
        start = next((i for i in starts if len(set(worth[i : i + size])) > 1), 0)
        rollouts = [
            {"completion": completions[i], "rewards": {name: values[i] for name, values in rewards.items()}}
            for i in range(start, start + min(size, _KEPT))
        ]
        last = {"step": self.state.global_step + 1, "prompt": as_thumbnails(prompts[start]), "rollouts": rollouts}
        held = run.path / ROLLOUTS  # of a run that goes on
        if not self._kept_rollouts and held.exists():
            try:
                told = read_object(held)
                before = [told["first"], *(each for each in told.get("steps", []) if each["step"] < last["step"])]
                self._kept_rollouts = before if "step" in before[0] else []
            except (OSError, ValueError, LookupError, TypeError) as error:
                logger.warning("%s is damaged (%s) and is begun again", held, error)
        if not self._kept_rollouts or last["step"] >= self._kept_rollouts[-1]["step"] + math.ceil(
            self.state.max_steps / _KEPT_STEPS
        ):
            self._kept_rollouts.append(last)
        first, *steps = self._kept_rollouts
        try:
            run.write_json(ROLLOUTS, {"first": first, "steps": steps, "last": last})
        except RunDirectoryError as error:  # the record of the steps ends a run on a full disk, this does not
            logger.warning("%s", error)

    def _trainer_logprobs(self, output: Any, mode: str) -> torch.Tensor:
        """[B, T] natural logs under the policy that sampled the tokens; TRL has them unless its correction is off."""
        if "old_per_token_logps" in output:
            return output["old_per_token_logps"]
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        size = self.args.per_device_train_batch_size if mode == "train" else self.args.per_device_eval_batch_size
        with torch.no_grad():
            logprobs_BT, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, mask, output["completion_ids"].size(1), batch_size=size
            )
        return logprobs_BT

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's `log`; loss, gradient norm and learning rate also go into the step's record."""
        of_trl = {
            name: fmean(values) for name, values in self._metrics["train"].items() if values
        }  # TRL's log empties it
        self._record.add(**{name: value for name, value in (of_trl | logs).items() if name.startswith(_OF_A_LOSS)})
        if torch.cuda.is_available():
            self._record.add(gpu_memory_gib=torch.cuda.max_memory_allocated() / 2**30)
        if "loss" in logs:
            self._record.flush()
        super().log(logs, start_time)
        if any(name.startswith("eval_") for name in logs):
            self._record.evaluated(self.state.log_history[-1])  # with what TRL has added


def sampled_mask(batch: dict[str, Any]) -> torch.Tensor:
    """[B, T], nonzero where the policy sampled: what a tool wrote was not sampled."""
    tool_mask_BT = batch.get("tool_mask")
    return batch["completion_mask"] if tool_mask_BT is None else batch["completion_mask"] * tool_mask_BT


def logprobs_like(ids_BT: torch.Tensor, rows: Sequence[Sequence[float | None]]) -> torch.Tensor:
    """The sampler's logprobs [B, T] of completions that TRL has padded: NaN where it gave none, zero behind an end."""
    values = [torch.tensor([math.nan if value is None else value for value in row]) for row in rows]
    rows_BT = pad_sequence(values, batch_first=True)
    sampled_BT = torch.zeros(ids_BT.shape, dtype=rows_BT.dtype)
    sampled_BT[:, : rows_BT.shape[1]] = rows_BT
    return sampled_BT.to(ids_BT.device)


def of_all_ranks(facts: dict[str, float]) -> dict[str, float]:
    """Tokens of all, seconds of the slowest; the rest is rank 0's."""
    if ranks().size == 1 or "rollout_tokens" not in facts:
        return facts
    parts = ranks().gather(facts, "measuring a rollout")
    tokens = sum(part["rollout_tokens"] for part in parts)
    slowest = {name: max(part[name] for part in parts) for name in parts[0] if name.endswith("seconds")}
    seconds = slowest["rollout_seconds"]
    per_s = tokens / seconds if seconds else float("nan")
    return parts[0] | slowest | {"rollout_tokens": tokens, "rollout_tokens_per_s": per_s}


def batch_of_all_ranks(*parts_BT: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The batch of which each rank holds a part, on all of them, padded with zeros to one T; so all decide alike."""
    if ranks().size == 1:
        return parts_BT
    return stacked(ranks().gather([part.detach().cpu() for part in parts_BT], "measuring a rollout"))


def stacked(batches: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Of batches of tensors [B, T] one batch, padded with zeros to one T."""
    longest = max(part.shape[1] for parts in batches for part in parts)
    return tuple(
        torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in column])
        for column in zip(*batches, strict=True)
    )


def _said(fidelity: Fidelity) -> dict[str, Any]:
    return {name: value for name, value in fidelity.as_dict().items() if name != "tokens"}


class StepClock(TrainerCallback):
    """Tells the record when an optimizer step begins and ends."""

    def __init__(self, record: StepRecord):
        self._record = record

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """It begins."""
        self._record.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """It has ended."""
        self._record.end(state.global_step)
