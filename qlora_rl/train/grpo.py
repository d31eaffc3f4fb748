"""`QLoRAGRPOTrainer`: TRL's GRPOTrainer with a prepared base and our engine; only the adapter is synced."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from qlora_rl.contracts import RolloutEngine
from qlora_rl.fidelity import CORRECTION
from qlora_rl.methods import METHODS
from qlora_rl.train.metrics.measure import MeasuredSteps
from qlora_rl.train.metrics.routing import RoutedSteps
from qlora_rl.train.online import OnlineOptions, OnlineTrainer
from qlora_rl.train.rollouts.batches import EndedCompletions, GroupedPrompts, ImageRows
from qlora_rl.train.setup import settings
from qlora_rl.train.single_forward import SingleForward


class QLoRAGRPOTrainer(
    RoutedSteps, OnlineTrainer, SingleForward, MeasuredSteps, EndedCompletions, GroupedPrompts, ImageRows, GRPOTrainer
):
    """GRPO on a 4-bit base. TRL's arguments and config, unchanged, and these:

    ::

        trainer = QLoRAGRPOTrainer(
            model=prepare_base("Qwen/Qwen3-8B"), reward_funcs=reward, train_dataset=dataset,
            args=GRPOConfig(output_dir="run"), peft_config=LoraConfig(r=16, target_modules="all-linear"),
        )
        trainer.train()

    The base is never merged and never changed. `args.output_dir` becomes the run directory: config.json, metrics.jsonl
    (one line per optimizer step), sync.jsonl (one per push), adapter/, summary.json.

    Args:
        model: prepared base, hub name, checkpoint directory, model object (4-bit ones are written down with their own
            bytes), or PeftModel (its adapter is trained on).
        rollout: "colocate" (vLLM in this process), the URL of a server (`qlora-rl serve`), several URLs in a list
            (replicas), "server" (one is started next to the trainer and stopped with it), "ray"
            (engine_options={"replicas": N} engines in actors of a Ray cluster), or an engine object, which is not
            closed with it.
        api_key_file: holds the key of that server; or set QLORA_RL_API_KEY.
        sync: "lora_adapter"; "weights" (dense weights, to an engine on the baked base, for any adapter that is a change
            of weights); "auto": the first where the adapter can be sent alone, otherwise the second. "weights" without
            any adapter trains all weights of a base that is not 4-bit; the model is left in model/ of the run
            directory.
        adapter_dtype: of the trained LoRA weights. "float32" (default): small updates are not rounded away; under bf16
            autocast they are multiplied in bf16 as the engine does. "bfloat16" is what TRL does to 4-bit models.
        engine_options: further arguments of LocalEngine (of RayFleet, start_server); they win over the `vllm_*` fields
            of `args`.
        sync_dir: where adapter versions are written that an engine of this process must load; by default tmpfs.
        existing_run: what to do when `args.output_dir` holds a run: `"reject"`, `"overwrite"`, `"continue"` (append),
            or `"resume"`: `train()` goes on from its last whole checkpoint, or begins where there is none yet.
        canary_every: what the engine's buffers hold is compared with what was sent after every push; fixed sequences
            are scored by both sides after each n-th one, which costs two small forwards. 0 switches both off.
        on_mismatch: when rollouts were sampled by something else than the trainer's policy
            (docs/fidelity.md#the-alarm): "stop" ends the run with the likely cause, "warn" logs it.
        share_base: "auto" (default): a model that is not loaded yet is trained on the tensors of the engine that the
            trainer starts, so that the base is held once, or a log line says why not. True: also on those of a
            LocalEngine that was passed; an error where it cannot be. False: two copies.
        gpu_memory: what the run may hold: the size of a card, such as 24, or GiB (rejected with the numbers, before
            anything is loaded, if it cannot fit), or "auto": what is free on the card, with a warning; no limit on the
            CPU. The KV cache gets what the optimizer step leaves.
        remove_padding: the sequences of a micro-batch are computed one behind the other, without padding and without
            attention masks, where the model allows it (docs/memory.md#without-padding). False: padded, as TRL does.
        routing_replay: of a mixture of experts: the trainer computes with the experts that the engine chose for each
            token, and the engine's weights (docs/mixtures.md#routing). For an engine in this process on a CPU.
        allow_base_mismatch: train although the engine holds another base; every metric and the report are marked.

    Raises:
        BaseMismatchError, CannotShareError, ConfigConflictError, AdapterRejectedError, UnsupportedQuantError,
        MissingDependencyError, EngineUnsupportedError,
        NotYetSupportedError, RunDirectoryError, MemoryBudgetError: before anything is trained, each with the way out.
    """

    _tag_names = ["trl", "grpo", "qlora-rl"]
    _name = "GRPO"
    _method = METHODS["grpo"]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Any] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
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
            args if args is not None else settings.default_args(GRPOConfig, "qlora-grpo", **CORRECTION),
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
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
