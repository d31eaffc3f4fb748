"""`SingleForward`: a mixin for GRPO that scores the sampled tokens once, in the pass that is trained with.

TRL 1.16 scores every batch twice where vLLM samples: without gradients when it is generated, for the importance
sampling between sampler and trainer, and with gradients in the loss. Where a batch is trained on by the policy of the
moment it was generated for, the two passes give the same numbers: TRL itself then leaves the first out when its
correction is off. So the correction is off while TRL makes a batch, and made here, from the second pass, before the
loss reads it.

B completions, T tokens (padded).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from qlora_rl.base.model_classes import has_dropout
from qlora_rl.fidelity import importance_ratio
from qlora_rl.train.metrics.measure import sampled_mask

logger = logging.getLogger(__name__)

_DIFFERENCE = "sampling/sampling_logp_difference"
_RATIO = "sampling/importance_sampling_ratio"
# What of a batch is looked at when it has been trained on; TRL shuffles the rows of all of it alike.
_ROWS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps")


class SingleForward:
    """Comes before `MeasuredSteps`, whose measurement waits for the last part of the batch, before the optimizer's
    step."""

    # TRL makes a batch without its correction, which waits for the training pass.
    _is_deferred = False
    # Rows of the batch that have no logprobs yet, and what is known of the others.
    _unscored = 0
    _parts: Sequence[tuple[dict[str, Any], torch.Tensor]] = ()
    # The part whose loss is being computed.
    _part: dict[str, Any] | None = None

    def _scores_once(self) -> bool:
        """Is each batch trained on within the optimizer step that it was generated for, by TRL's own loss?"""
        generate_every = self.args.steps_per_generation * self.num_iterations
        return (
            self.model.training
            and self.use_vllm
            and self.vllm_importance_sampling_correction
            and self.args.gradient_accumulation_steps % generate_every == 0
            # It is given the trainer, and would find its correction off.
            and self.rollout_func is None
            and self._is_trls_own()
            # TRL's two passes have a mask each: its ratio is not 1, and one pass would train on another objective.
            and not has_dropout(self.model)
        )

    def _is_trls_own(self) -> bool:
        """Nobody has changed what comes between sampling and loss: another loss may want what TRL's has."""
        names = (
            "_compute_loss",
            "compute_loss",
            "_generate_and_score_completions",
            "_get_per_token_logps_and_entropies",
        )
        foreign = [
            each
            for each in type(self).__mro__
            if not each.__module__.startswith(("qlora_rl.", "trl.", "transformers."))
        ]
        return not any(name in vars(each) for each in (*foreign, self) for name in names)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self._unscored and self.model.training:
            logger.warning("%d completions of the last batch were not trained on, and so not compared", self._unscored)
        self._unscored, self._parts = 0, ()
        if not self._scores_once():
            return super()._generate_and_score_completions(inputs)
        self._is_deferred, self.vllm_importance_sampling_correction = True, False
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self._is_deferred, self.vllm_importance_sampling_correction = False, True

    def _compare(self, mode: str, output: dict[str, Any]) -> None:
        if self._is_deferred:
            self._unscored = len(output["completion_ids"])
        else:
            super()._compare(mode, output)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._part is not None:
            part, self._part = self._part, None
            self._weigh(part, found[0].detach())
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        self._part = inputs if self._unscored and "importance_sampling_ratio" not in inputs else None
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._part = None

    def _weigh(self, inputs: dict[str, Any], logprobs_BT: torch.Tensor) -> None:
        """The ratio that TRL's loss is about to read. Without `old_per_token_logps` it takes those of this pass."""
        inputs["importance_sampling_ratio"] = importance_ratio(
            logprobs_BT,
            inputs["sampling_per_token_logps"],
            sampled_mask(inputs),
            mode=self.vllm_importance_sampling_mode,
            clip_min=self.vllm_importance_sampling_clip_min,
            clip_max=self.vllm_importance_sampling_clip_max,
        )
        self._parts = [*self._parts, (inputs, logprobs_BT)]
        self._unscored -= len(logprobs_BT)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; after the backward pass of a batch's last part, what the trainer thinks of the whole batch is
        measured."""
        with _before_step(self.accelerator, self._look_at_parts):
            return super().training_step(*args, **kwargs)

    def _look_at_parts(self) -> None:
        if not self._parts or self._unscored:
            return
        parts, self._parts = self._parts, ()
        names = [name for name in _ROWS if parts[0][0].get(name) is not None]
        batch: dict[str, Any] = {name: torch.cat([inputs[name] for inputs, _ in parts]) for name in names}
        batch["has_images"] = any(inputs.get("pixel_values") is not None for inputs, _ in parts)
        batch["parts"] = [inputs for inputs, _ in parts]
        logprobs_BT = torch.cat([logprobs for _, logprobs in parts])
        ratios = torch.cat([inputs["importance_sampling_ratio"] for inputs, _ in parts])
        self._log_ratios(batch, logprobs_BT, ratios)
        self._look_at("train", batch, logprobs_BT)

    def _log_ratios(self, batch: dict[str, Any], logprobs_BT: torch.Tensor, ratios: torch.Tensor) -> None:
        """TRL's own metrics, of [B, T] ratios, or [B, 1] of sequences."""
        mask_BT = sampled_mask(batch).bool()
        differences = (logprobs_BT - batch["sampling_per_token_logps"]).abs()[mask_BT]
        differences = differences[~differences.isnan()]
        flat = ratios.flatten() if ratios.shape != mask_BT.shape else ratios[mask_BT]
        zero = logprobs_BT.new_zeros(1)
        differences, flat = (values if values.numel() else zero for values in (differences, flat))
        of_all = self.accelerator.gather
        logged = {
            f"{_DIFFERENCE}/mean": of_all(differences.mean()).mean(),
            f"{_DIFFERENCE}/max": of_all(differences.max()).max(),
            f"{_RATIO}/min": of_all(flat.min()).min(),
            f"{_RATIO}/mean": of_all(flat.mean()).nanmean(),
            f"{_RATIO}/max": of_all(flat.max()).max(),
        }
        for name, value in logged.items():
            self._metrics["train"][name].append(value.item())


@contextlib.contextmanager
def _before_step(accelerator: Any, look: Callable[[], None]) -> Iterator[None]:
    """Call `look` when the backward pass in this block is over and no optimizer has stepped.

    By accelerate's `backward` DeepSpeed does both; any other way to spread a trainer leaves the step to transformers.
    """
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is None:
        yield
        look()
        return
    engine = wrapped.engine
    step = engine.step

    def step_after(*args: Any, **kwargs: Any) -> Any:
        look()
        return step(*args, **kwargs)

    engine.step = step_after
    try:
        yield
    finally:
        del engine.step  # the method is there again
