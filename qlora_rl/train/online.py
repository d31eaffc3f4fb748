"""`OnlineTrainer`: a mixin for TRL's trainers that sample. It does what has to be done around TRL's `__init__`.

Before it: the model becomes a prepared base, model and engine are paired, TRL is told that there is no vLLM. After it: the
adapter's dtype, the guarded rewards, the link to the engine, the run directory.
"""

from __future__ import annotations

import logging
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.adapter.inspected import bare_model
from qlora_rl.base.checkpoint import models_are_whole
from qlora_rl.base.model_classes import directory_takes_images, may_take_images
from qlora_rl.contracts import RolloutEngine, SyncReport
from qlora_rl.distributed import join, ranks
from qlora_rl.errors import ConfigConflictError, EngineClosedError, RewardFunctionError
from qlora_rl.stages import begin, ended
from qlora_rl.sync.plan import WISHES, plan_sync
from qlora_rl.train.metrics.alarm import alarm_for, check_word
from qlora_rl.train.metrics.rewards import agree_on, as_list, guard
from qlora_rl.train.rollouts.engine_link import Link, link_policy, release, why_dense
from qlora_rl.train.rollouts.engines import EngineChoice
from qlora_rl.train.run import CONFIG, FINGERPRINTS
from qlora_rl.train.run.progress import show_progress
from qlora_rl.train.run.trained_run import (
    TrainedRun,
    check_adapter_dtype,
    check_optimizer,
    load_tokenizer,
    open_run,
    set_adapter_dtype,
    trained_values,
)
from qlora_rl.train.scoring.logprobs import use_small_tiles
from qlora_rl.train.scoring.padding import apply_padding
from qlora_rl.train.setup import settings
from qlora_rl.train.setup.engine_order import SHARE, Pair, expects_one_copy, make_pair
from qlora_rl.train.setup.full_finetuning import check_whole, trains_whole, unfreeze
from qlora_rl.train.setup.layer_inputs import keep_on_host
from qlora_rl.train.setup.linears import apply_linears
from qlora_rl.train.setup.memory_budget import MemoryBudget, expects_full_weights
from qlora_rl.train.setup.processes import begin_alike, check_processes, check_turns, shards_base
from qlora_rl.train.setup.residual_init import keep_start, settle
from qlora_rl.train.setup.tiled_mlp import tile_layers
from qlora_rl.train.setup.vision_tower import apply_tower

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnlineOptions:
    """The keyword arguments that our online trainers add to TRL's; `QLoRAGRPOTrainer` says what each means."""

    rollout: str | list[str] | RolloutEngine = "colocate"
    sync: str = "auto"
    adapter_dtype: str = "float32"
    engine_options: dict[str, Any] | None = None
    sync_dir: str | os.PathLike[str] | None = None
    existing_run: str = "reject"
    allow_base_mismatch: bool = False
    canary_every: int = 4
    on_mismatch: str = "stop"
    share_base: bool | str = "auto"
    gpu_memory: str | float = "auto"
    api_key_file: str | os.PathLike[str] | None = None
    remove_padding: bool = True
    routing_replay: bool = False

    def check(self) -> None:
        """Raises: ConfigConflictError: a word or number that means nothing."""
        check_adapter_dtype(self.adapter_dtype)
        check_word(self.on_mismatch)
        if self.sync not in WISHES:
            raise ConfigConflictError(
                f"reading the arguments: sync={self.sync!r} is not one of {WISHES}. Use 'auto'; nothing is ever merged here."
            )
        if self.share_base not in SHARE:
            raise ConfigConflictError(f"reading the arguments: share_base={self.share_base!r} is not one of {SHARE}.")
        if self.canary_every < 0:
            raise ConfigConflictError(f"reading the arguments: canary_every={self.canary_every} < 0. Use 0 for none.")


class OnlineTrainer(TrainedRun):
    """Comes before `MeasuredSteps` and TRL's class; a trainer's `__init__` calls `set_up`, and nothing else.

    Attributes:
        engine: generates.
        bridge: what TRL generates through.
        plan: how the policy is sent.
        `base_check`: the check that both sides hold one base.
        memory: what the run will hold; `None` where the memory estimate does not know this trainer's step.
    """

    memory: MemoryBudget | None
    # Of reward functions, where several ranks must agree before one may raise.
    _failures: list[RewardFunctionError] | None = None
    # The memory estimate knows the trainer's step, in which TRL scores with its fused head.
    _is_planned = True
    # Its prompts may hold images.
    _takes_images = False
    # The engine generates nothing while the policy is trained.
    _rests = True
    # Rollouts are generated ahead, in threads: each rank asks an engine that it shares on its own.
    _is_ahead = False

    @ended()
    def set_up(
        self,
        model: Any,
        args: Any,
        options: OnlineOptions,
        *,
        peft_config: Any,
        quantization_config: Any = None,
        processing_class: Any = None,
        reward_funcs: Any = None,
        reward_processing_classes: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        **of_trl: Any,
    ) -> None:
        """Everything, TRL's `__init__` included.

        Args:
            model: as the trainer takes it.
            args: TRL's config; it is copied.
            options: ours.
            of_trl: further arguments of TRL's class, handed through.
        """
        options.check()
        args = settings.own_copy(args)
        rollout = settings.as_one(options.rollout)
        settings.check(args, rollout)
        settings.check_logprobs(args, rollout, of_trl.get("rollout_func"))
        is_whole = trains_whole(model, peft_config, options.sync)
        check_processes(args, "choosing the engine", is_whole=is_whole)
        peft_config, start = settle(model, peft_config)
        is_shared = isinstance(rollout, str) and (rollout != "colocate" or _ranks_of_engine(args, options) > 1)
        if is_shared and not self._is_ahead:
            check_turns(args, of_trl)
        with join(args.ddp_timeout).one_outcome("preparing the training"), models_are_whole():
            # A model that is trained itself is float32 here anyway, and each push brings its head.
            if getattr(args, "cast_lm_head_to_fp32", False) and not (is_whole or options.allow_base_mismatch):
                raise ConfigConflictError(
                    "reading the config: cast_lm_head_to_fp32=True lifts the output head of the trainer's base to float32, and the engine "
                    "multiplies with the original. Leave it out, or pass allow_base_mismatch=True to train on two different bases."
                )
            why = "" if self._takes_images else f"{type(self).__name__} samples from text prompts only"
            if ranks().size > 1:
                why = "in several processes it is sampled from text prompts only"
            settings.check_prompts(args, train_dataset, eval_dataset)
            images = settings.check_datasets(train_dataset, eval_dataset, why=why)
            if images and not may_take_images(model):
                settings.reject_images(images, f"{model} takes none")
            if rollout in settings.STARTED:
                from qlora_rl.engine.compat import require_server, vllm_version

                (require_server if rollout == "server" else vllm_version)()  # before minutes of loading
            if rollout == "ray":
                from qlora_rl.engine.fleet import require_ray

                require_ray()
            settings.check_sampling(args, rollout)
            self.run = open_run(args.output_dir, options.existing_run)
            self.memory = None
            if self._is_planned:
                self.memory = _budget(
                    model,
                    args,
                    options,
                    rollout,
                    peft_config,
                    quantization_config,
                    optimizers[0],
                    is_whole=is_whole,
                    rests=self._rests,
                )
                self.memory.set_chosen(args)
            source = self._resolve(
                model,
                args,
                quantization_config=quantization_config,
                peft_config=peft_config,
                processing_class=processing_class,
                is_whole=is_whole,
            )
            if images and not directory_takes_images(self.base.path):
                settings.reject_images(images, f"{self.base} takes none")
            if is_whole:
                check_whole(self.base, options.share_base)
            is_given = processing_class is not None
            processing_class = processing_class if is_given else load_tokenizer(self.base, args)
            settings.check_processor(processing_class, self.base.path, is_given=is_given)
            given = getattr(args, "chat_template_kwargs", None) or {}
            if of_trl.get("rollout_func") is None:
                if "chat_template" not in given:
                    settings.check_template(processing_class, train_dataset, eval_dataset)
                if not images:  # which become parts of the messages
                    settings.check_messages(processing_class, train_dataset, eval_dataset, given=given)
            # The base verification below finds what was rounded, repairs it, and says so.
            engine_options = {
                "repair_scales": False,
                **self._engine_options(args),
                **(self.memory.engine_options() if self.memory is not None else {}),
                **(options.engine_options or {}),
            }
            choice = EngineChoice(
                rollout,
                engine_options,
                api_key_file=options.api_key_file,
                sync_dir=options.sync_dir,
                session=self.run.session if self.run is not None else None,
            )
            begin("loading the base")
            pair = _pair(source, choice, options, peft_config, is_whole=is_whole, sharded=shards_base(args))
            engine, link = pair.engine, None
            try:
                # What TRL rounds in a 4-bit model, which a model that is trained itself is not.
                model_of_trl = self._model_for_trl(pair.model, peft_config, args)
                before = {} if is_whole else trained_values(model_of_trl["model"])
                if is_whole:
                    unfreeze(pair.model)
                reward_funcs = as_list(reward_funcs)
                if isinstance(reward_processing_classes, list):
                    reward_processing_classes = list(reward_processing_classes)  # TRL fills it in
                with settings.told_no_vllm(args, reward_funcs):
                    super().__init__(
                        reward_funcs=reward_funcs,
                        args=args,
                        train_dataset=train_dataset,
                        eval_dataset=eval_dataset,
                        processing_class=processing_class,
                        reward_processing_classes=reward_processing_classes,
                        optimizers=optimizers,
                        **model_of_trl,
                        **of_trl,
                    )
                set_adapter_dtype(self.model, getattr(torch, options.adapter_dtype), before)
                keep_start(self, start)
                keep_on_host(bare_model(self.model))
                linears = {"reason": "the base is sharded"}
                if not shards_base(args):
                    linears = apply_linears(bare_model(self.model))
                    tile_layers(bare_model(self.model))
                apply_tower(bare_model(self.model))
                begin_alike(self.model)
                self._after_trl(args)
                padding = apply_padding(bare_model(self.model), self._why_padded(options))
                check_optimizer(optimizers[0], self.model)
                self.make_resumable()
                show_progress(self)
                owned, engine = engine, None  # from here on the link closes it
                with models_are_whole():  # TRL has told transformers of ZeRO-3; an engine may begin here
                    link = link_policy(
                        self.model,
                        self.base,
                        choice,
                        owned,
                        args,
                        settings.sampling_spec(args, self.eos_token_ids),
                        sync=options.sync,
                        sync_dir=options.sync_dir,
                        canary_every=options.canary_every,
                        allow_base_mismatch=options.allow_base_mismatch,
                        on_mismatch=options.on_mismatch,
                    )
                self._take(link)
                self.bridge.install(self)
                rollout_func = of_trl.get("rollout_func")
                alarm = alarm_for(link, self.model, args, options.on_mismatch, rollout_func=rollout_func)
                self.measure_into(self.run, alarm, compares=self.bridge.knows_logprobs(rollout_func))
                self.follow_routing(replays=options.routing_replay)
                if self.run is not None:
                    self.run.begin()
                    held = {
                        "base_held": pair.describe(),
                        "rollout": choice.name,
                        **link.facts(),
                        "padding": padding,
                        "linears": linears,
                        "memory": self.memory.as_dict() if self.memory is not None else {"reason": "not planned here"},
                    }
                    self.run.write_json(CONFIG, self._describe(options.adapter_dtype, held))
                    self.run.write_json(FINGERPRINTS, self.base_check.as_dict())
            except BaseException:
                # There will be no trainer to close.
                if link is not None:
                    link.close()
                else:
                    release(None, choice.closer(engine))
                raise
            # Also when nobody calls close().
            self._finalizer = weakref.finalize(self, link.close)

    def sync(self) -> SyncReport:
        """Push the current policy to the engine now; training does so only before it samples, so its last step is not pushed.

        Returns:
            What was sent: version, bytes, seconds. The newest version serves `trainer.engine.generate` from here on.

        Raises:
            CanaryError: the engine does not hold what was pushed; the version before serves on.
        """
        self._check_open("pushing")
        report = self.bridge.sync_weights(self.state.global_step)
        self._last_loaded_step = self.state.global_step  # the next rollout of this step does not push again
        return report

    def close(self) -> None:
        """Close the engine (if the trainer made it) and remove the adapter versions on tmpfs; harmless when repeated."""
        self._finalizer()

    def _check_open(self, doing: str) -> None:
        if not self._finalizer.alive:
            raise EngineClosedError(
                f"{doing}: the trainer was closed, as at the end of its `with`. Make a new one; existing_run='resume' goes on from the last "
                "checkpoint."
            )

    def _engine_options(self, args: Any) -> dict[str, Any]:
        """Arguments of an engine that is started, as far as TRL's config says them; the base is known."""
        return settings.engine_options(args)

    def _model_for_trl(self, model: Any, peft_config: Any, args: Any) -> dict[str, Any]:
        """The arguments by which TRL gets its model."""
        return {"model": model, "peft_config": peft_config}

    def _after_trl(self, args: Any) -> None:
        """What TRL has built is made ready; `args` are the user's again."""
        if not getattr(args, "cast_lm_head_to_fp32", False):
            use_small_tiles(bare_model(self.model), self.temperature)
        self._failures = [] if ranks().size > 1 else None
        self._guard_rewards()

    def follow_routing(self, *, replays: bool) -> None:
        """`RoutedSteps` compares the experts that both sides choose."""

    def _why_padded(self, options: OnlineOptions) -> str:
        if not self._is_planned:
            return "TRL holds all logits here"
        return "" if options.remove_padding else "remove_padding=False"

    def _guard_rewards(self) -> None:
        # Only now: an environment's own reward is among them, and TRL has named them all.
        self.reward_funcs = [
            guard(reward, name, self._failures)
            for reward, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, in which all ranks meet; then what a reward function has raised on one of them is raised on all."""
        rewards = super()._calculate_rewards(*args, **kwargs)
        agree_on(self._failures)
        return rewards

    def _take(self, link: Link) -> None:
        self._link = link
        self.engine: RolloutEngine = link.engine
        self.base_check, self.plan, self.bridge = link.base_check, link.plan, link.bridge

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `TrainedRun.train`.

        Raises:
            EngineClosedError: the trainer was closed; its run stays as it is.
        """
        self._check_open("training")
        return super().train(*args, **kwargs)

    def _before_train(self) -> None:
        super()._before_train()
        if reason := settings.why_no_step(self.args, self.train_dataset):
            logger.warning("%s", reason)
        self.bridge.install(self)  # a second call must push again, although its steps are counted from 0
        if hasattr(self, "_buffered_inputs"):
            self._step, self._buffered_inputs = 0, None  # an earlier call may have ended in the middle of a batch

    def _before_checkpoint(self) -> None:
        self._link.check_base()  # a checkpoint says that all is well

    def _after_train(self) -> None:
        self._link.check_base()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # it is another policy now, though no step was made

    def _before_rollout(self, mode: str) -> None:
        if self.bridge.is_overtaken():
            self._last_loaded_step = -1
        self.bridge.begin(self.state.global_step, is_evaluation=mode == "eval")

    def _after_generation(self) -> None:
        self.bridge.rest()

    def _states(self) -> dict[str, Any]:
        canary = self.bridge.strategy.canary
        return {
            "bridge": self.bridge.state(),
            "canary": canary.state() if canary is not None else None,
            "alarm": self.alarm.state() if self.alarm is not None else None,
        }

    def _restore_states(self, saved: dict[str, Any]) -> None:
        self.bridge.restore(saved["bridge"], self)
        canary = self.bridge.strategy.canary
        if canary is not None and saved["canary"] is not None:
            canary.restore(saved["canary"])
        if self.alarm is not None and saved.get("alarm") is not None:
            self.alarm.restore(saved["alarm"])

    def _write_rest(self) -> None:
        self._record.flush()
        self._rollout_facts()  # a push whose rollout or reward failed is still written down

    def _rollout_facts(self) -> dict[str, float]:
        return self._link.rollout_facts(self.run)


def _budget(
    model: Any,
    args: Any,
    options: OnlineOptions,
    rollout: Any,
    peft_config: Any,
    quantization_config: Any,
    optimizer: Any,
    *,
    is_whole: bool,
    rests: bool,
) -> MemoryBudget:
    if is_whole and options.gpu_memory != "auto":
        raise ConfigConflictError(
            f"reading the arguments: gpu_memory={options.gpu_memory} with peft_config=None: the memory of training all weights "
            "is not planned. Leave gpu_memory out."
        )
    return MemoryBudget(
        options.gpu_memory,
        model,
        args,
        peft_config=peft_config,
        quantization_config=quantization_config,
        engine_options=options.engine_options,
        optimizer=optimizer,
        adapter_dtype=options.adapter_dtype,
        shared=expects_one_copy(model, rollout, options.share_base),
        has_engine=rollout == "colocate",
        rests=rests,
        baked=expects_full_weights(model, peft_config, options.sync, trust_remote_code=args.trust_remote_code),
        padded=not options.remove_padding,
    )


def _pair(
    source: Any, choice: EngineChoice, options: OnlineOptions, peft_config: Any, *, is_whole: bool, sharded: bool
) -> Pair:
    try:
        return make_pair(
            source,
            choice.rollout if choice.engine is None else choice.engine,
            False if is_whole else options.share_base,
            peft_config,
            check=lambda verdict: why_dense(plan_sync(verdict, wish=options.sync), source.base),
            start=lambda rank: choice.start(source.base, rank),
            reason="the trainer's is sharded over the processes" if sharded else choice.why_no_base,
        )
    except BaseException:
        release(None, choice.closer(choice.engine))  # a connection; what make_pair started it has closed
        raise


def _ranks_of_engine(args: Any, options: OnlineOptions) -> int:
    return int((options.engine_options or {}).get("tensor_parallel_size", args.vllm_tensor_parallel_size))
