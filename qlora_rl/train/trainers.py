"""`QLoRAGRPOTrainer`: TRL's GRPOTrainer with a prepared base, our engine, and only the adapter travelling."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from qlora_rl.adapter.subject import active_adapter
from qlora_rl.base.bake import bake_base
from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.contracts import RolloutEngine
from qlora_rl.errors import ConfigConflictError
from qlora_rl.sync.admission import prove_base
from qlora_rl.sync.canary import Canary
from qlora_rl.sync.dense import DenseSync
from qlora_rl.sync.plan import SyncPlan, plan_sync
from qlora_rl.sync.strategies import AdapterSync
from qlora_rl.sync.transports import transport_for
from qlora_rl.train import settings
from qlora_rl.train.bridge import EngineBridge
from qlora_rl.train.budget import MemoryBudget, expects_full_weights
from qlora_rl.train.entry import resolve_model
from qlora_rl.train.logprobs import use_small_tiles
from qlora_rl.train.measure import MeasuredSteps
from qlora_rl.train.pairing import SHARE, closer, expects_one_copy, make_pair
from qlora_rl.train.rewards import as_list, guard
from qlora_rl.train.run import CONFIG, FINGERPRINTS, SUMMARY, SYNCS, RunDirectory, describe_machine, describe_versions
from qlora_rl.train.whole import bare_model, check_whole, is_bare, judge_policy, trains_whole, unfreeze

logger = logging.getLogger(__name__)

DENSE = "full weights travel, to an engine on the baked base"
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
        rollout: "colocate" (vLLM in this process), the URL of a server (`qlora-rl serve`), several URLs in a list (replicas),
            "server" (one is started beside the trainer and stopped with it), or an engine object, which is not closed with it.
        api_key_file: holds the key of that server; or set QLORA_RL_API_KEY.
        sync: "lora_adapter"; "weights" (dense weights, to an engine on the baked base, for any adapter that is a change of weights);
            "auto": the first where the adapter can travel alone, otherwise the second. "weights" without any adapter trains all
            weights of a base that is not 4-bit; the model is left in model/ of the run directory.
        adapter_dtype: of the trained LoRA weights. "float32" (default): small updates are not rounded away; under bf16
            autocast they are multiplied in bf16 as the engine does. "bfloat16" is what TRL does to 4-bit models.
        engine_options: further arguments of LocalEngine; they win over the `vllm_*` fields of `args`.
        sync_dir: where adapter versions lie on their way; by default tmpfs. With a server: its adapter directory, if this machine
            sees it; otherwise adapters travel in requests.
        existing_run: what to do when `args.output_dir` holds a run: "refuse", "overwrite", "continue".
        canary_every: what the engine's buffers hold is compared with what was sent after every push; fixed sequences are
            scored by both sides after each n-th one, which costs two small forwards. 0 switches both off.
        share_base: "auto" (default): a model that is not loaded yet is trained on the tensors of the engine that the trainer
            starts, so that the base is held once, or a log line says why not. True: also on those of a LocalEngine that was
            passed; an error where it cannot be. False: two copies.
        gpu_memory: what the run may hold: GiB (refused with the numbers, before anything is loaded, if it cannot fit), or "auto":
            what is free on the card, with a warning; no limit on the CPU. The KV cache gets what the optimizer step leaves.
        allow_base_mismatch: train although the engine holds another base; every metric and the report are marked.

    Raises:
        BaseMismatchError, CannotShareError, ConfigConflictError, AdapterRefusedError, UnsupportedQuantError, MissingDependencyError, EngineUnsupportedError,
        NotYetSupportedError, RunDirectoryError, MemoryBudgetError: before anything is trained, each with the way out.
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
        rollout: str | list[str] | RolloutEngine = "colocate",
        sync: str = "auto",
        adapter_dtype: str = "float32",
        engine_options: dict[str, Any] | None = None,
        sync_dir: str | os.PathLike[str] | None = None,
        existing_run: str = "refuse",
        allow_base_mismatch: bool = False,
        canary_every: int = 2,
        share_base: bool | str = "auto",
        gpu_memory: str | float = "auto",
        api_key_file: str | os.PathLike[str] | None = None,
    ):
        if adapter_dtype not in ADAPTER_DTYPES:
            raise ConfigConflictError(
                f"reading the arguments: adapter_dtype={adapter_dtype!r} is not one of {ADAPTER_DTYPES}."
            )
        if share_base not in SHARE:
            raise ConfigConflictError(f"reading the arguments: share_base={share_base!r} is not one of {SHARE}.")
        if canary_every < 0:
            raise ConfigConflictError(f"reading the arguments: canary_every={canary_every} < 0. Use 0 for none.")
        args = settings.own_copy(args) if args is not None else GRPOConfig("qlora-grpo")
        rollout = settings.as_one(rollout)
        settings.check(args, rollout)
        settings.check_datasets(train_dataset, eval_dataset)
        if rollout in settings.STARTED:
            from qlora_rl.engine.compat import vllm_version

            vllm_version()  # before minutes of loading
        self.run = RunDirectory(args.output_dir, existing_run) if args.process_index == 0 else None
        is_whole = trains_whole(model, peft_config, sync)
        if is_whole and not isinstance(gpu_memory, str):
            raise ConfigConflictError(
                f"reading the arguments: gpu_memory={gpu_memory} with peft_config=None: the memory of training all weights is not planned. "
                "Leave gpu_memory out."
            )
        self.memory = MemoryBudget(
            gpu_memory,
            model,
            args,
            peft_config=peft_config,
            quantization_config=quantization_config,
            engine_options=engine_options,
            optimizer=optimizers[0],
            adapter_dtype=adapter_dtype,
            shared=expects_one_copy(model, rollout, share_base),
            has_engine=rollout == "colocate",
            baked=expects_full_weights(model, peft_config, sync, trust_remote_code=args.trust_remote_code),
        )

        source = resolve_model(
            model,
            args,
            quantization_config=quantization_config,
            peft_config=peft_config,
            processing_class=processing_class,
            is_whole=is_whole,
        )
        self.base = source.base
        if is_whole:
            check_whole(self.base, share_base)
        if processing_class is None:
            from transformers import AutoTokenizer

            processing_class = AutoTokenizer.from_pretrained(
                self.base.path, padding_side="left", truncation_side="left", trust_remote_code=args.trust_remote_code
            )
        # The handshake below finds what was rounded, repairs it, and says so.
        options = {
            "repair_scales": False,
            **settings.engine_options(args),
            **self.memory.engine_options(),
            **(engine_options or {}),
        }
        self._owns_engine = isinstance(rollout, str)
        self._rollout = rollout if isinstance(rollout, str) else type(rollout).__name__
        start = _start_server if rollout == "server" else _start
        connected = connect(rollout, api_key_file, sync_dir) if settings.is_url(rollout) else None
        try:
            pair = make_pair(
                source,
                connected or rollout,
                False if is_whole else share_base,
                peft_config,
                check=lambda verdict: _of_the_plan(plan_sync(verdict, wish=sync)),
                start=lambda rank: start(self.base, rank, options),
            )
        except BaseException:
            if connected is not None:
                connected.close()
            raise
        engine, strategy = pair.engine, None
        try:
            # What TRL rounds in a 4-bit model, which a model that is trained itself is not.
            before = {name: p.detach().clone() for name, p in pair.model.named_parameters() if p.requires_grad}
            if is_whole:
                before = {}
                unfreeze(pair.model)
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
                model=pair.model,
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
            if not args.cast_lm_head_to_fp32:
                use_small_tiles(bare_model(self.model), self.temperature)
            # Only now: an environment's own reward is among them, and TRL has named them all.
            self.reward_funcs = [
                guard(reward, name) for reward, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
            ]

            verdict = judge_policy(self.model)
            # Refuses before an engine is started that is not there yet.
            is_dense = bool(_of_the_plan(plan_sync(verdict, wish=sync)))
            _check_optimizer(optimizers[0], self.model)
            if engine is None:
                if is_dense:
                    engine = start(_dense_base(self.base), 0, {**options, "max_lora_rank": 0})
                else:
                    engine = start(self.base, verdict.rank, options)
            self.engine: RolloutEngine = engine
            plan_sync(verdict, engine.capabilities(), wish=sync)  # before the bases are read
            self.admission = prove_base(self.model, engine, allow_base_mismatch=allow_base_mismatch)
            self.plan = plan_sync(
                verdict,
                engine.capabilities(),
                self.admission.diff,
                sync,
                allow_base_mismatch=allow_base_mismatch,
            )
            canary = None
            if canary_every and self.admission.is_proven:
                autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
                canary = Canary(self.model, engine, every=canary_every, autocast=autocast)
                canary.calibrate()
            strategy = (
                DenseSync(self.model, engine, canary)
                if is_dense
                else AdapterSync(self.model, engine, transport_for(self.plan.transport, sync_dir), canary)
            )
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
                self.run.write_json(CONFIG, self._describe(adapter_dtype, pair.describe()))
                self.run.write_json(FINGERPRINTS, self.admission.as_dict())
        except BaseException:
            # There will be no trainer to close.
            _release(strategy, closer(engine) if self._owns_engine and engine is not None else None)
            raise
        # Also when nobody calls close().
        self._finalizer = weakref.finalize(self, _release, strategy, closer(engine) if self._owns_engine else None)

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
            trained = self.accelerator.unwrap_model(self.model)
            if is_bare(trained):
                self.run.save_model(trained, self.base.path)
            else:
                self.run.save_adapter(trained, self.base.parent or self.base.digest)
        except OSError:
            # A full disk must not hide what ended the run.
            if status == "finished":
                raise
            logger.exception("the run directory could not be completed")

    def _describe(self, adapter_dtype: str, base_held: dict[str, Any]) -> dict[str, Any]:
        adapter = {} if is_bare(self.model) else self.model.peft_config[active_adapter(self.model)].to_dict()
        return {
            "command": "QLoRAGRPOTrainer",
            "model": self.base.path.name,
            "base": {"path": str(self.base.path), "digest": self.base.digest, **self.base.spec.as_dict()},
            "base_held": base_held,
            "engine": self.engine.capabilities().name,
            "rollout": self._rollout,
            "sync": self.plan.strategy,
            "plan": self.plan.as_dict(),
            "base_proof": {
                "proven": self.admission.is_proven,
                "digest": self.admission.ours.digest,
                "repaired": len(self.admission.repaired),
                "largest_relative_error": max(self.admission.repaired.values(), default=0.0),
                "differences": len(self.admission.diff.entries),
            },
            "memory": self.memory.as_dict(),
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


def _start(base: PreparedBase, rank: int, options: dict[str, Any]) -> RolloutEngine:
    from qlora_rl.engine.local import LocalEngine

    return LocalEngine(base, **{"max_lora_rank": rank, **options})


def connect(
    url: str, api_key_file: str | os.PathLike[str] | None, sync_dir: str | os.PathLike[str] | None
) -> RolloutEngine:
    """The server, or several, as an engine; from here on no other trainer may push to it."""
    from qlora_rl.engine.client import ServerEngine

    engine = ServerEngine(url, api_key_file=api_key_file, shared_dir=sync_dir)
    try:
        engine.claim()
        engine.drop_adapter()  # whatever an earlier run has left: the canary is calibrated on the bare base
    except BaseException:
        engine.close()
        raise
    return engine


def _start_server(base: PreparedBase, rank: int, options: dict[str, Any]) -> RolloutEngine:
    from qlora_rl.engine.beside import ServerBeside

    known = {name: value for name, value in options.items() if name not in ("repair_scales", "enable_sleep")}
    return ServerBeside(base, **{"max_lora_rank": rank, **known})


def _dense_base(base: PreparedBase) -> PreparedBase:
    """What an engine holds that can be given all weights: the baked base, or one that is not 4-bit."""
    return bake_base(base) if base.spec.is_4bit else base


def _of_the_plan(plan: SyncPlan) -> str:
    """Why the base cannot be shared, as far as the plan tells."""
    return DENSE if plan.strategy == "weights" else ""


def _release(strategy: Any, close_engine: Callable[[], None] | None) -> None:
    try:
        if strategy is not None:
            strategy.close()
    finally:
        if close_engine is not None:
            close_engine()
