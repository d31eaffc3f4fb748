"""`attach`: our engine under a GRPOTrainer or RLOOTrainer of TRL that somebody has built already."""

from __future__ import annotations

import logging
import os
from typing import Any

from trl import GRPOTrainer, RLOOTrainer

from qlora_rl.adapter.inspected import active_adapter, bare_model, is_bare
from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.contracts import RolloutEngine, SyncReport
from qlora_rl.distributed import join, ranks
from qlora_rl.engine.started import as_one, is_here
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.fidelity import FidelityMonitor
from qlora_rl.sharded_tensors import is_sharded
from qlora_rl.train.metrics.alarm import MismatchAlarm
from qlora_rl.train.metrics.measure import MeasuredSteps
from qlora_rl.train.metrics.rewards import apply_attention_to, check_signature, guard
from qlora_rl.train.online import LinkedTrainer
from qlora_rl.train.rloo import SampledLogprobs
from qlora_rl.train.rollouts.batches import EndedCompletions
from qlora_rl.train.rollouts.engine_link import EngineChoice, Link, OnlineOptions, link_policy
from qlora_rl.train.run.progress import told
from qlora_rl.train.run.resume import WrappedModel
from qlora_rl.train.scoring.logprobs import truncation_of, use_small_tiles
from qlora_rl.train.setup import config_checks, dataset_checks, settings
from qlora_rl.train.setup.model_source import Source, base_of
from qlora_rl.train.setup.processes import begin_alike, check_processes, check_turns, fit_for_sharding
from qlora_rl.train.setup.residual_init import keep_start

logger = logging.getLogger(__name__)

# What `EngineBridge.install` sets.
_ATTRIBUTES = ("use_vllm", "vllm_mode", "vllm_generation", "_last_loaded_step", "vllm_importance_sampling_correction")


class Attachment:
    """What `attach` returns; a context manager.

    Attributes:
        engine: generates from now on.
        `base_check`: the check that both sides hold one base.
        plan: how the policy is sent.
        bridge: what TRL generates through.
    """

    def __init__(self, trainer: Any, link: Link, rollout_func: Any, on_mismatch: str):
        self.engine: RolloutEngine = link.engine
        self.base_check, self.plan, self.bridge = link.base_check, link.plan, link.bridge
        self._trainer, self._link, self._kind = trainer, link, type(trainer)
        names = (*_ATTRIBUTES, "reward_funcs")
        self._before = {name: trainer.__dict__[name] for name in names if name in trainer.__dict__}
        trainer.__class__ = _attached(self._kind)
        _prepare_rewards(trainer)
        callbacks = list(trainer.callback_handler.callbacks)
        keep_start(trainer)
        model = trainer.accelerator.unwrap_model(trainer.model)
        if (truncated := truncation_of(trainer, link.bridge.sampling)) is not None:
            bare = bare_model(model)
            self._before["forward"] = bare, bare.__dict__["forward"]  # TRL's, which has its fused head
            use_small_tiles(bare, trainer.temperature, truncated=truncated)
            trainer._truncated = truncated
        trainer._follow(link, model, rollout_func, on_mismatch)
        self._callbacks = [c for c in trainer.callback_handler.callbacks if c not in callbacks]
        logger.info("%s samples from %s", self._kind.__name__, link.engine.capabilities().name)

    @property
    def fidelity(self) -> FidelityMonitor:
        """The distance of trainer and engine, rollout by rollout."""
        return self._trainer.fidelity

    @property
    def alarm(self) -> MismatchAlarm | None:
        """What is normal for this pair, and what was examined; none where the engine gives no logprobs."""
        return self._trainer.alarm

    def push(self) -> SyncReport:
        """Hand the current policy over now; by itself that happens before the first rollout of every step."""
        return self.bridge.sync_weights()

    def close(self) -> None:
        """Give the trainer back as it was, and close the engine if it was started here; harmless when repeated."""
        trainer, self._trainer = self._trainer, None
        if trainer is None:
            return
        trainer.__class__ = self._kind
        for name in _ATTRIBUTES:
            if name in self._before:
                setattr(trainer, name, self._before[name])
            else:
                trainer.__dict__.pop(name, None)
        trainer.reward_funcs = self._before["reward_funcs"]
        trainer.callback_handler.callbacks = [c for c in trainer.callback_handler.callbacks if c not in self._callbacks]
        if "forward" in self._before:
            bare, bare.forward = self._before["forward"]
        for name in ("bridge", "engine", "_link", "alarm", "_failures", "_truncated"):
            trainer.__dict__.pop(name, None)
        self._link.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Attached(LinkedTrainer, WrappedModel):
    """The methods that an attached trainer has while it is attached."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's; a second call pushes again, although its steps are counted from 0."""
        self._link.bridge.install(self)
        with ranks().one_outcome("training"):
            return super().train(*args, **kwargs)


def attach(
    trainer: GRPOTrainer | RLOOTrainer,
    rollout: str | list[str] | RolloutEngine = "colocate",
    sync: str = "auto",
    *,
    engine_options: dict[str, Any] | None = None,
    sync_dir: str | os.PathLike[str] | None = None,
    canary_every: int = 4,
    on_mismatch: str = "stop",
    allow_base_mismatch: bool = False,
    api_key_file: str | os.PathLike[str] | None = None,
) -> Attachment:
    """Let a trainer of TRL that is built already sample from our engine, on its own base, sending only the adapter.

    ::

        trainer = GRPOTrainer(model=four_bit_model, ..., args=GRPOConfig(use_vllm=False), peft_config=...)
        with attach(trainer):
            trainer.train()

    Its base is written down with its own bytes and loaded by the engine; the base verification, the canary and the
    measurement (TRL's log, names `qlora_rl/…`) are those of `QLoRAGRPOTrainer`. Its config is not changed; its LoRA
    weights stay in the dtype that TRL gave them. While it is attached, the trainer's class is a subclass of its own;
    `close()` undoes that.

    In several processes each of them attaches to its own trainer, and `push` is called by all.

    Args:
        trainer: GRPOTrainer or RLOOTrainer, built with use_vllm=False and a PeftModel or peft_config.
        rollout: and all further arguments: as `QLoRAGRPOTrainer` takes them. The base is held twice.

    Raises:
        ConfigConflictError: another trainer, one with vLLM of TRL's, without an adapter, or attached already.
        BaseMismatchError, AdapterRejectedError, EngineUnsupportedError: as there.
        NotYetSupportedError: a model that is split over processes already.
    """
    options = OnlineOptions(
        rollout=rollout,
        sync=sync,
        engine_options=engine_options,
        sync_dir=sync_dir,
        canary_every=canary_every,
        on_mismatch=on_mismatch,
        allow_base_mismatch=allow_base_mismatch,
        api_key_file=api_key_file,
    )
    options.check()
    _check(trainer)
    rollout = as_one(rollout)
    config_checks.check(trainer.args, rollout)
    rollout_func = getattr(trainer, "rollout_func", None)
    config_checks.check_logprobs(trainer.args, rollout, rollout_func)
    check_processes(trainer.args, "attaching to a trainer")
    with told(trainer.args), join(trainer.args.ddp_timeout).one_outcome("attaching to a trainer"):
        model = trainer.accelerator.unwrap_model(trainer.model)
        base = _base(model, trainer, rollout)
        begin_alike(model)
        started = {"repair_scales": False, **settings.engine_options(trainer.args), **(engine_options or {})}
        choice = EngineChoice(rollout, started, api_key_file=api_key_file)
        sampling = settings.sampling_spec(trainer.args, trainer.eos_token_ids)
        link = link_policy(model, base, choice, choice.engine, trainer.args, sampling, options)
    return Attachment(trainer, link, rollout_func, on_mismatch)


def _prepare_rewards(trainer: Any) -> None:
    """Errors of one rank are raised on all; a model that rewards attends as the policy does."""
    if ranks().size > 1:
        trainer._failures = []
        named = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
        trainer.reward_funcs = [guard(reward, name, trainer._failures) for reward, name in named]
    apply_attention_to(trainer.reward_funcs, trainer.accelerator.unwrap_model)


def _attached(kind: type) -> type:
    """A subclass of a trainer's class that samples and measures as ours do."""
    parts = (Attached, MeasuredSteps, SampledLogprobs) if issubclass(kind, RLOOTrainer) else (Attached, MeasuredSteps)
    return type(
        kind.__name__, (*parts, EndedCompletions, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )


def _base(model: Any, trainer: Any, rollout: Any) -> PreparedBase:
    """The base of the trainer's model, which is made ready to be split over processes, where it will be."""
    args = trainer.args
    dataset_checks.check_datasets(
        trainer.train_dataset,
        trainer.eval_dataset,
        **({"why": "in several processes it is sampled from text prompts only"} if ranks().size > 1 else {}),
    )
    config_checks.check_sampling(args, rollout)
    if is_sharded(model):
        raise NotYetSupportedError(
            f"attaching to a trainer: its model is split over {ranks().size} processes already, and its base can no "
            "longer be written down. Attach before train(); under ZeRO-3 load the model before its config is made."
        )
    if isinstance(rollout, str) and (not is_here(rollout) or args.vllm_tensor_parallel_size > 1):
        asks = {name: getattr(trainer, name, None) for name in ("tools", "rollout_func")}
        check_turns(args, asks | {"environment_factory": getattr(trainer, "environment_factories", None)})
    base = ranks().in_turn(lambda: _written_down(model, trainer), "preparing the base")
    fit_for_sharding(Source(base, model), args).load()
    return base


def _written_down(model: Any, trainer: Any) -> PreparedBase:
    """The base of a model that TRL has made ready for training; what is trained stays what it was."""
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    uses_cache, model.config.use_cache = (
        model.config.use_cache,
        True,
    )  # TRL has switched it off, which is no part of the base
    try:
        return base_of(model, trainer.args, trainer.processing_class)
    finally:
        model.config.use_cache = uses_cache
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])


def _check(trainer: Any) -> None:
    doing = "attaching to a trainer"
    if not isinstance(trainer, GRPOTrainer | RLOOTrainer):
        raise ConfigConflictError(
            f"{doing}: it is a {type(trainer).__name__}. GRPOTrainer and RLOOTrainer of TRL sample through a backend "
            "that can be set; for others use the trainers of qlora_rl."
        )
    if isinstance(trainer, MeasuredSteps):
        raise ConfigConflictError(
            f"{doing}: this {type(trainer).__name__} has an engine of ours already. Close that one first."
        )
    if trainer.use_vllm:
        raise ConfigConflictError(
            f"{doing}: it was built with use_vllm=True and has started or joined a vLLM of TRL's. Build it with "
            "use_vllm=False."
        )
    if is_bare(trainer.model):
        raise ConfigConflictError(
            f"{doing}: its model carries no adapter. Build it with peft_config=LoraConfig(...), or use "
            "QLoRAGRPOTrainer(sync='weights') to train all weights of a base that is not 4-bit."
        )
    active_adapter(trainer.model)  # exactly one
    for reward, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
        check_signature(reward, None, name)
