"""`QLoRARLOOTrainer`; and `SampledLogprobs`: TRL's RLOO drops the sampler's logprobs, here they are kept to be
measured."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import TrainerCallback
from trl import RLOOConfig, RLOOTrainer

from qlora_rl.contracts import RolloutEngine
from qlora_rl.methods import METHODS
from qlora_rl.train.metrics.measure import MeasuredSteps, logprobs_like
from qlora_rl.train.metrics.routing import RoutedSteps
from qlora_rl.train.online import OnlineOptions, OnlineTrainer
from qlora_rl.train.rollouts.batches import EndedCompletions, GroupedPrompts, ImageRows
from qlora_rl.train.rollouts.bridge import EngineBridge
from qlora_rl.train.setup import settings


class SampledLogprobs:
    """Comes between `MeasuredSteps` and TRL's RLOOTrainer. The loss of TRL does not read what is added.

    It costs nothing: TRL scores the completions anyway, and sums the logprobs up.
    """

    bridge: EngineBridge
    _scored: list[torch.Tensor] | None = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._scored = []
        try:
            output = super()._generate_and_score_completions(inputs)
            # The first pass is the policy's, the second the reference's.
            output["old_per_token_logps"] = self._scored[0]
        finally:
            self._scored = None
        output["sampling_per_token_logps"] = logprobs_like(output["completion_ids"], self.bridge.last.logprobs)
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._scored is not None:
            self._scored.append(found[0])
        return found


class QLoRARLOOTrainer(
    RoutedSteps, OnlineTrainer, MeasuredSteps, SampledLogprobs, EndedCompletions, GroupedPrompts, ImageRows, RLOOTrainer
):
    """RLOO on a 4-bit base: TRL's RLOOTrainer as `QLoRAGRPOTrainer` is TRL's GRPOTrainer, with the same further
    arguments.

    ::

        trainer = QLoRARLOOTrainer(
            model=prepare_base("Qwen/Qwen3-8B"), reward_funcs=reward, train_dataset=dataset,
            args=RLOOConfig(output_dir="run"), peft_config=LoraConfig(r=16, target_modules="all-linear"),
        )
        trainer.train()
    """

    _tag_names = ["trl", "rloo", "qlora-rl"]
    _name = "RLOO"
    _method = METHODS["rloo"]
    _refers = True

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: RLOOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        *,
        rollout: str | list[str] | RolloutEngine = "colocate",
        sync: str = "auto",
        adapter_dtype: str = "float32",
        engine_options: dict[str, Any] | None = None,
        sync_dir: str | os.PathLike[str] | None = None,
        existing_run: str = "reject",
        allow_base_mismatch: bool = False,
        canary_every: int = 4,
        on_mismatch: str = "stop",
        share_base: bool | str = "auto",
        gpu_memory: str | float = "auto",
        api_key_file: str | os.PathLike[str] | None = None,
        remove_padding: bool = True,
        routing_replay: bool = False,
    ):
        self.set_up(
            model,
            args if args is not None else settings.default_args(RLOOConfig, "qlora-rloo"),
            OnlineOptions(
                rollout=rollout,
                sync=sync,
                adapter_dtype=adapter_dtype,
                engine_options=engine_options,
                sync_dir=sync_dir,
                existing_run=existing_run,
                allow_base_mismatch=allow_base_mismatch,
                canary_every=canary_every,
                on_mismatch=on_mismatch,
                share_base=share_base,
                gpu_memory=gpu_memory,
                api_key_file=api_key_file,
                remove_padding=remove_padding,
                routing_replay=routing_replay,
            ),
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
