"""`QLoRAGRPOTrainer`: TRL's GRPOTrainer with a prepared base, our engine, and only the adapter travelling."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from qlora_rl.adapter.verdict import active_adapter, judge_adapter
from qlora_rl.contracts import RolloutEngine
from qlora_rl.errors import ConfigConflictError
from qlora_rl.sync.admission import prove_base
from qlora_rl.sync.canary import Canary
from qlora_rl.sync.plan import plan_sync
from qlora_rl.sync.strategies import AdapterSync
from qlora_rl.sync.transports import DirectoryTransport
from qlora_rl.train import settings
from qlora_rl.train.bridge import EngineBridge
from qlora_rl.train.entry import resolve_model
from qlora_rl.train.measure import MeasuredSteps
from qlora_rl.train.rewards import as_list, guard
from qlora_rl.train.run import CONFIG, FINGERPRINTS, SUMMARY, SYNCS, RunDirectory, describe_machine, describe_versions

logger = logging.getLogger(__name__)

ADAPTER_DTYPES = ("float32", "bfloat16")


class QLoRAGRPOTrainer(MeasuredSteps, GRPOTrainer):
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
        rollout: "colocate" (vLLM in this process), or an engine object, which is not closed with the trainer.
        sync: "auto" or "lora_adapter".
        adapter_dtype: of the trained LoRA weights. "float32" (default): small updates are not rounded away; under bf16
            autocast they are multiplied in bf16 as the engine does. "bfloat16" is what TRL does to 4-bit models.
        engine_options: further arguments of LocalEngine; they win over the `vllm_*` fields of `args`.
        sync_dir: where adapter versions lie on their way; by default tmpfs.
        existing_run: what to do when `args.output_dir` holds a run: "refuse", "overwrite", "continue".
        canary_every: what the engine's buffers hold is compared with what was sent after every push; fixed sequences are
            scored by both sides after each n-th one, which costs two small forwards. 0 switches both off.
        allow_base_mismatch: train although the engine holds another base; every metric and the report are marked.

    Raises:
        BaseMismatchError, ConfigConflictError, AdapterRefusedError, UnsupportedQuantError, MissingDependencyError, EngineUnsupportedError,
        NotYetSupportedError, RunDirectoryError: before anything is trained, each with the way out.
    """

    _tag_names = ["trl", "grpo", "qlora-rl"]
    _name = "GRPO"

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
        rollout: str | RolloutEngine = "colocate",
        sync: str = "auto",
        adapter_dtype: str = "float32",
        engine_options: dict[str, Any] | None = None,
        sync_dir: str | os.PathLike[str] | None = None,
        existing_run: str = "refuse",
        allow_base_mismatch: bool = False,
        canary_every: int = 2,
    ):
        if adapter_dtype not in ADAPTER_DTYPES:
            raise ConfigConflictError(
                f"reading the arguments: adapter_dtype={adapter_dtype!r} is not one of {ADAPTER_DTYPES}."
            )
        if canary_every < 0:
            raise ConfigConflictError(f"reading the arguments: canary_every={canary_every} < 0. Use 0 for none.")
        args = settings.own_copy(args) if args is not None else GRPOConfig("qlora-grpo")
        settings.check(args, rollout)
        settings.check_datasets(train_dataset, eval_dataset)
        if isinstance(rollout, str):
            from qlora_rl.engine.compat import vllm_version

            vllm_version()  # before minutes of loading
        self.run = RunDirectory(args.output_dir, existing_run) if args.process_index == 0 else None

        model, self.base = resolve_model(
            model,
            args,
            quantization_config=quantization_config,
            peft_config=peft_config,
            processing_class=processing_class,
        )
        if processing_class is None:
            from transformers import AutoTokenizer

            processing_class = AutoTokenizer.from_pretrained(
                self.base.path, padding_side="left", truncation_side="left", trust_remote_code=args.trust_remote_code
            )
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        sampling = settings.sampling_spec(args)
        wishes = {name: getattr(args, name) for name in ("use_vllm", "generation_kwargs", "model_init_kwargs")}
        reward_funcs = as_list(reward_funcs)
        # TRL would build its own VLLMGeneration and feed vLLM's sampling arguments to transformers.
        args.use_vllm, args.generation_kwargs = False, None
        if not any(isinstance(reward, str) for reward in reward_funcs):  # TRL loads reward models with these
            args.model_init_kwargs = None
        if isinstance(reward_processing_classes, list):
            reward_processing_classes = list(reward_processing_classes)  # TRL fills it in
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        for name, value in wishes.items():
            setattr(args, name, value)
        set_adapter_dtype(self.model, getattr(torch, adapter_dtype), before)
        # Only now: an environment's own reward is among them, and TRL has named them all.
        self.reward_funcs = [
            guard(reward, name) for reward, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]

        verdict = judge_adapter(self.model)
        plan_sync(verdict, None, sync)  # refuses before the engine is started
        _check_optimizer(optimizers[0], self.model)
        self._owns_engine = isinstance(rollout, str)
        if isinstance(rollout, str):
            from qlora_rl.engine.local import LocalEngine

            # The handshake below finds what was rounded, repairs it, and says so.
            options = {
                "max_lora_rank": verdict.rank,
                "repair_scales": False,
                **settings.engine_options(args),
                **(engine_options or {}),
            }
            engine: RolloutEngine = LocalEngine(self.base, **options)
        else:
            engine = rollout
        self.engine = engine
        strategy: AdapterSync | None = None
        try:
            self.plan = plan_sync(verdict, engine.capabilities(), sync)
            self.admission = prove_base(self.model, engine, allow_base_mismatch=allow_base_mismatch)
            canary = None
            if canary_every and self.admission.is_proven:
                autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
                canary = Canary(self.model, engine, every=canary_every, autocast=autocast)
                canary.calibrate()
            strategy = AdapterSync(self.model, engine, DirectoryTransport(sync_dir), canary)
            self.bridge = EngineBridge(
                engine,
                strategy,
                sampling,
                seed=args.seed,
                sleeps=args.vllm_enable_sleep_mode and engine.capabilities().can_sleep,
            )
            self.bridge.install(self)
            logger.info("%s", self.plan)
            if canary is None:
                logger.warning(
                    "pushes are not proven: %s", "canary_every=0" if not canary_every else "another base is allowed"
                )
            if args.vllm_enable_sleep_mode and not engine.capabilities().can_sleep:
                logger.warning(
                    "vllm_enable_sleep_mode=True: %s cannot sleep, it stays awake", engine.capabilities().name
                )
            self.measure_into(self.run)
            if self.run is not None:
                self.run.begin()
                self.run.write_json(CONFIG, self._describe(adapter_dtype))
                self.run.write_json(FINGERPRINTS, self.admission.as_dict())
        except BaseException:
            # There will be no trainer to close.
            _release(strategy, engine if self._owns_engine else None)
            raise
        # Also when nobody calls close().
        self._finalizer = weakref.finalize(self, _release, strategy, engine if self._owns_engine else None)

    # --- the run ----------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's `train`. However it ends, the run directory is readable and holds the last step's adapter."""
        self.bridge.install(self)  # a second call must push again, although its steps are counted from 0
        try:
            result = super().train(*args, **kwargs)
        except KeyboardInterrupt:
            self._finish("interrupted", None)
            raise
        except Exception as error:
            self._finish("failed", error)
            raise
        self._finish("finished", None)
        return result

    def close(self) -> None:
        """Close the engine (if the trainer made it) and remove the adapter versions on tmpfs; harmless when repeated."""
        self._finalizer()

    def __enter__(self) -> QLoRAGRPOTrainer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _finish(self, status: str, error: Exception | None) -> None:
        if self.run is None:
            return
        try:
            self._record.flush()
            self._rollout_facts()  # a push whose rollout or reward failed is still written down
            summary = {"status": status, "steps": self.state.global_step}
            self.run.write_json(SUMMARY, summary | ({"error": f"{type(error).__name__}: {error}"} if error else {}))
            self.run.save_adapter(self.accelerator.unwrap_model(self.model))
        except OSError:
            # A full disk must not hide what ended the run.
            if status == "finished":
                raise
            logger.exception("the run directory could not be completed")

    def _describe(self, adapter_dtype: str) -> dict[str, Any]:
        adapter = self.model.peft_config[active_adapter(self.model)].to_dict()
        return {
            "command": "QLoRAGRPOTrainer",
            "model": self.base.path.name,
            "base": {"path": str(self.base.path), "digest": self.base.digest, **self.base.spec.as_dict()},
            "engine": self.engine.capabilities().name,
            "rollout": "colocate" if self._owns_engine else type(self.engine).__name__,
            "sync": self.plan.strategy,
            "plan": self.plan.as_dict(),
            "base_proof": {
                "proven": self.admission.is_proven,
                "digest": self.admission.ours.digest,
                "repaired": len(self.admission.repaired),
                "largest_relative_error": max(self.admission.repaired.values(), default=0.0),
                "differences": len(self.admission.diff.entries),
            },
            "seed": self.args.seed,
            "adapter_dtype": adapter_dtype,
            "lora": {k: sorted(v) if isinstance(v, set) else v for k, v in adapter.items() if v is not None},
            "grpo": self.args.to_dict(),
            "versions": describe_versions(),
            "machine": describe_machine(),
        }

    def _rollout_facts(self) -> dict[str, float]:
        reports, tokens, seconds = self.bridge.drain()
        facts: dict[str, float] = {
            "base_is_proven": float(self.admission.is_proven),
            "rollout_tokens": tokens,
            "rollout_seconds": seconds,
            "rollout_tokens_per_s": tokens / seconds if seconds else float("nan"),
        }
        for report in reports:
            facts |= {"sync_seconds": report.seconds, "sync_bytes": report.bytes, "policy_version": report.version}
            facts["canary_seconds"] = report.canary_seconds
            if report.canary_difference is not None:
                facts["canary_difference"] = report.canary_difference
            if self.run is not None:
                self.run.append(SYNCS, report.as_dict())
        return facts


@torch.no_grad()
def set_adapter_dtype(model: Any, dtype: torch.dtype, before: dict[str, torch.Tensor]) -> None:
    """Give the trained weights their dtype, with the values they had before TRL rounded them to bf16.

    Args:
        model: the PeftModel that TRL has built.
        dtype: of the trained weights.
        before: trainable weights of the model that was passed in, by name; empty when TRL made the adapter.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            exact = before.get(name)
            parameter.data = (exact if exact is not None else parameter.data).to(dtype)


def _check_optimizer(optimizer: Any, model: Any) -> None:
    """Refuse an optimizer that was made for other parameters than those that are trained."""
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in model.parameters() if parameter.requires_grad):
        raise ConfigConflictError(
            f"reading the arguments: the {type(optimizer).__name__} in optimizers= holds none of the adapter's parameters, so "
            "nothing would be trained; peft_config= makes the adapter after it. Make the PeftModel first, the optimizer for "
            "its parameters, and pass both; or leave optimizers out and use GRPOConfig(optim=...)."
        )


def _release(strategy: Any, engine: Any) -> None:
    if strategy is not None:
        strategy.close()
    if engine is not None:
        engine.close()
