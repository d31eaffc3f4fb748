"""`OnlineTrainer`: a mixin for TRL's trainers that sample; `LinkedTrainer`: the part of it that `attach` takes, too.

It does what has to be done around TRL's `__init__`.

Before it: the model becomes a prepared base, model and engine are paired, TRL is told that there is no vLLM. After it:
the adapter's dtype, the guarded rewards, the link to the engine, the run directory.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from qlora_rl.adapter.inspected import bare_model, is_bare
from qlora_rl.base.checkpoint import PreparedBase, models_are_whole
from qlora_rl.base.model_classes import directory_takes_images, may_take_images
from qlora_rl.contracts import RolloutEngine, SyncReport
from qlora_rl.distributed import join, ranks
from qlora_rl.engine.started import ENGINES, as_one, is_here
from qlora_rl.errors import ConfigConflictError, EngineClosedError, RewardFunctionError
from qlora_rl.stages import begin
from qlora_rl.sync.plan import plan_sync
from qlora_rl.train.metrics.alarm import alarm_for
from qlora_rl.train.metrics.rewards import agree_on, apply_attention_to, as_list, check_signature, guard
from qlora_rl.train.rollouts.engine_link import EngineChoice, Link, OnlineOptions, link_policy, release, why_dense
from qlora_rl.train.run import CONFIG, FINGERPRINTS, RunDirectory
from qlora_rl.train.run.progress import told
from qlora_rl.train.run.recorded_training import (
    RecordedTraining,
    load_tokenizer,
    open_run,
    trained_values,
)
from qlora_rl.train.scoring.logprobs import truncation_of, use_small_tiles
from qlora_rl.train.setup import config_checks, dataset_checks, settings
from qlora_rl.train.setup.engine_order import Pair, make_pair
from qlora_rl.train.setup.memory_budget import MemoryBudget, budget_of
from qlora_rl.train.setup.model_source import Source
from qlora_rl.train.setup.processes import check_processes, check_turns, shards_base
from qlora_rl.train.setup.residual_init import settle


class LinkedTrainer:
    """Comes before `MeasuredSteps` and TRL's class.

    Attributes:
        run: the run directory; `None` without one, and on other processes than the first.
    """

    run: RunDirectory | None = None
    engine: RolloutEngine
    _link: Link
    # Of reward functions, where several ranks must agree before one may raise.
    _failures: list[RewardFunctionError] | None = None

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, in which all ranks meet; then what a reward function has raised on one of them is raised on all."""
        rewards = super()._calculate_rewards(*args, **kwargs)
        agree_on(self._failures)
        return rewards

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._last_loaded_step = -1  # it is another policy now, though no step was made

    def _before_rollout(self, mode: str) -> None:
        if self._link.bridge.is_overtaken():
            self._last_loaded_step = -1
        self._link.bridge.begin(self.state.global_step, is_evaluation=mode == "eval")

    def _after_generation(self) -> None:
        self._link.bridge.rest()

    def _rollout_facts(self) -> dict[str, float]:
        return self._link.rollout_facts(self.run)

    def _follow(self, link: Link, model: Any, rollout_func: Any, on_mismatch: str) -> None:
        """TRL samples through the link, and the steps are measured; `model` is the policy."""
        self._link, self.engine, self.bridge = link, link.engine, link.bridge
        self.bridge.install(self)
        alarm = alarm_for(link, model, self.args, on_mismatch, rollout_func=rollout_func, truncated=self._truncated)
        self.measure_into(self.run, alarm, compares=self.bridge.knows_logprobs(rollout_func))


logger = logging.getLogger(__name__)

# Arguments of TRL's trainers that are read here, too.
_OF_TRL = ("reward_funcs", "reward_processing_classes", "train_dataset", "eval_dataset")


@dataclass(frozen=True)
class _Asked:
    """What a trainer was asked for, checked.

    Attributes:
        args: TRL's config, a copy of the user's, in which the memory plan chooses what was left open.
        rollout: several URLs as one text.
        peft_config: which TRL makes the adapter with.
        start: how the adapter begins where TRL does not know it; `None` otherwise.
        of_trl: further arguments of TRL's class.
        is_whole: all weights of the model are trained.
    """

    model: Any
    args: Any
    options: OnlineOptions
    rollout: Any
    peft_config: Any
    start: Any
    quantization_config: Any
    processing_class: Any
    of_trl: dict[str, Any]
    is_whole: bool

    @property
    def datasets(self) -> tuple[Any, Any]:
        """Those of training and of evaluation."""
        return self.of_trl["train_dataset"], self.of_trl["eval_dataset"]


class OnlineTrainer(LinkedTrainer, RecordedTraining):
    """Comes before `MeasuredSteps` and TRL's class; a trainer's `__init__` calls `set_up`, and nothing else.

    Attributes:
        engine: generates.
        bridge: what TRL generates through.
        plan: how the policy is sent.
        `base_check`: the check that both sides hold one base.
        memory: what the run will hold; `None` where the memory estimate does not know this trainer's step.
    """

    memory: MemoryBudget | None

    def set_up(
        self,
        model: Any,
        args: Any,
        options: OnlineOptions,
        *,
        peft_config: Any,
        quantization_config: Any = None,
        processing_class: Any = None,
        **of_trl: Any,
    ) -> None:
        """Everything, TRL's `__init__` included: check, plan the memory, load base and engine, build TRL's trainer,
        connect both.

        Args:
            model: as the trainer takes it.
            args: TRL's config; it is copied.
            options: ours.
            of_trl: further arguments of TRL's class, handed through.
        """
        of_trl = {**dict.fromkeys(_OF_TRL), "optimizers": (None, None), **of_trl}
        asked = self._checked(
            model,
            args,
            options,
            peft_config=peft_config,
            quantization_config=quantization_config,
            processing_class=processing_class,
            of_trl=of_trl,
        )
        with (
            told(asked.args),
            join(asked.args.ddp_timeout).one_outcome("preparing the training"),
            models_are_whole(),
        ):
            images = self._check_data(asked)
            self.run = open_run(asked.args.output_dir, options.existing_run)
            self.memory = self._planned(asked)
            source, processing_class = self._prepared(asked, images)
            choice = self._engine_choice(asked)
            begin("loading the base")
            pair = _pair(source, choice, asked)
            with ExitStack() as undo:  # where this fails there will be no trainer to close
                undo.callback(release, None, choice.closer(pair.engine))
                facts = self._build(pair, processing_class, asked)
                undo.pop_all()  # from here on the link closes the engine
                link = self._connect(pair.engine, choice, asked)
                undo.callback(link.close)
                self._begin(link, asked, {"base_held": pair.describe(), "rollout": choice.name}, facts)
                undo.pop_all()
            # Also when nobody calls close().
            self._finalizer = weakref.finalize(self, link.close)

    def _checked(
        self,
        model: Any,
        args: Any,
        options: OnlineOptions,
        *,
        peft_config: Any,
        quantization_config: Any,
        processing_class: Any,
        of_trl: dict[str, Any],
    ) -> _Asked:
        """What the arguments alone contradict is rejected before anything is opened."""
        options.check()
        args = settings.own_copy(args)
        rollout = as_one(options.rollout)
        config_checks.check(args, rollout)
        config_checks.check_logprobs(args, rollout, of_trl.get("rollout_func"))
        # No adapter anywhere, and sync="weights" says that it is meant so.
        is_whole = is_bare(model) and peft_config is None and options.sync == "weights"
        check_processes(args, "choosing the engine")
        peft_config, start = settle(model, peft_config)
        is_shared = isinstance(rollout, str) and (not is_here(rollout) or _ranks_of_engine(args, options) > 1)
        if is_shared and not self._method.is_ahead:  # whose threads ask it, each rank on its own
            check_turns(args, of_trl)
        return _Asked(
            model,
            args,
            options,
            rollout,
            peft_config,
            start,
            quantization_config,
            processing_class,
            of_trl,
            is_whole=is_whole,
        )

    def _check_data(self, asked: _Asked) -> list[str]:
        """The columns that hold images. Everything here is known before minutes of loading."""
        args, rollout, datasets = asked.args, asked.rollout, asked.datasets
        # A model that is trained itself is float32 here anyway, and each push brings its head.
        lifts_head = getattr(args, "cast_lm_head_to_fp32", False)
        if lifts_head and not (asked.is_whole or asked.options.allow_base_mismatch):
            raise ConfigConflictError(
                "reading the config: cast_lm_head_to_fp32=True lifts the output head of the trainer's base to float32, "
                "and the engine multiplies with the original. Leave it out, or pass allow_base_mismatch=True to train "
                "on two different bases."
            )
        why = "" if self._method.takes_images else f"{type(self).__name__} samples from text prompts only"
        if ranks().size > 1:
            why = "in several processes it is sampled from text prompts only"
        dataset_checks.check_prompts(args, *datasets)
        images = dataset_checks.check_datasets(*datasets, why=why)
        if images and not may_take_images(asked.model):
            dataset_checks.reject_images(images, f"{asked.model} takes none")
        if isinstance(rollout, str) and rollout in ENGINES:
            ENGINES[rollout].require()
        config_checks.check_sampling(args, rollout)
        for reward in as_list(asked.of_trl["reward_funcs"]):
            check_signature(reward, _columns(asked))
        return images

    def _planned(self, asked: _Asked) -> MemoryBudget | None:
        """What the run will hold; what it leaves open in TRL's config is chosen in `asked.args`."""
        if not self._method.is_planned:
            return None
        options = asked.options
        if asked.is_whole and options.gpu_memory != "auto":
            raise ConfigConflictError(
                f"reading the arguments: gpu_memory={options.gpu_memory} with peft_config=None: the memory of training "
                "all weights is not planned. Leave gpu_memory out."
            )
        budget = budget_of(
            asked.model,
            asked.args,
            vars(options),
            peft_config=asked.peft_config,
            quantization_config=asked.quantization_config,
            optimizer=asked.of_trl["optimizers"][0],
            rests=not self._method.is_ahead,
            of_method=lambda: self._of_method(asked),
        )
        budget.set_chosen(asked.args)
        return budget

    def _of_method(self, asked: _Asked) -> dict[str, Any]:
        """What the memory estimate is told of a method that is not GRPO's."""
        return {}

    def _prepared(self, asked: _Asked, images: list[str]) -> tuple[Source, Any]:
        """The prepared base, and the tokenizer or processor, which fits it and the data."""
        args, given = asked.args, asked.processing_class
        source = self._resolve(
            asked.model,
            args,
            quantization_config=asked.quantization_config,
            peft_config=asked.peft_config,
            processing_class=given,
            is_whole=asked.is_whole,
        )
        base = source.base
        if images and not directory_takes_images(base.path):
            dataset_checks.reject_images(images, f"{base} takes none")
        if asked.is_whole:
            _check_whole(base, asked.options.share_base)
        processing_class = given if given is not None else load_tokenizer(base, args)
        dataset_checks.check_processor(processing_class, base.path, is_given=given is not None)
        of_template = getattr(args, "chat_template_kwargs", None) or {}
        if asked.of_trl.get("rollout_func") is None:
            if "chat_template" not in of_template:
                dataset_checks.check_template(processing_class, *asked.datasets)
            if not images:  # which become parts of the messages
                dataset_checks.check_messages(processing_class, *asked.datasets, given=of_template)
        return source, processing_class

    def _engine_choice(self, asked: _Asked) -> EngineChoice:
        options = asked.options
        engine_options = {
            "repair_scales": False,  # the base verification finds what was rounded, repairs it, and says so
            **self._engine_options(asked.args),
            **(self.memory.engine_options() if self.memory is not None else {}),
            **(options.engine_options or {}),
        }
        return EngineChoice(
            asked.rollout,
            engine_options,
            api_key_file=options.api_key_file,
            session=self.run.session if self.run is not None else None,
        )

    def _build(self, pair: Pair, processing_class: Any, asked: _Asked) -> dict[str, Any]:
        """TRL's `__init__`, and what its model then needs; returns how that model computes."""
        args, options, of_trl = asked.args, asked.options, dict(asked.of_trl)
        # What TRL rounds in a 4-bit model, which a model that is trained itself is not.
        model_of_trl = self._model_for_trl(pair.model, asked.peft_config, args)
        before = {} if asked.is_whole else trained_values(model_of_trl["model"])
        if asked.is_whole:
            for parameter in pair.model.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
        rewards = as_list(of_trl.pop("reward_funcs"))
        for_rewards = of_trl.pop("reward_processing_classes")
        with settings.told_no_vllm(args, rewards):
            super().__init__(
                reward_funcs=rewards,
                reward_processing_classes=list(for_rewards) if isinstance(for_rewards, list) else for_rewards,
                args=args,
                processing_class=processing_class,
                **model_of_trl,
                **of_trl,
            )
        apply_attention_to(self.reward_funcs, self.accelerator.unwrap_model)
        return self._fit(
            args, asked.start, options.adapter_dtype, before, options.remove_padding, of_trl["optimizers"][0]
        )

    def _connect(self, engine: RolloutEngine | None, choice: EngineChoice, asked: _Asked) -> Link:
        """The policy and the engine, which is closed where this fails."""
        args = asked.args
        with models_are_whole():  # TRL has told transformers of ZeRO-3; an engine may begin here
            return link_policy(
                self.model,
                self.base,
                choice,
                engine,
                args,
                settings.sampling_spec(args, self.eos_token_ids),
                asked.options,
            )

    def _begin(self, link: Link, asked: _Asked, held: dict[str, Any], computes: dict[str, Any]) -> None:
        """TRL samples through the link, steps are measured, and the run directory says what runs.

        Args:
            held: how the base is held, and by which engine; for config.json.
            computes: of `_build`.
        """
        options = asked.options
        self.base_check, self.plan = link.base_check, link.plan
        self._follow(link, self.model, asked.of_trl.get("rollout_func"), options.on_mismatch)
        self.follow_routing(replays=options.routing_replay)
        if self.run is None:
            return
        self.run.begin()
        memory = self.memory.as_dict() if self.memory is not None else {"reason": "not planned here"}
        facts = {**held, **link.facts(), **computes, "memory": memory}
        self.run.write_json(CONFIG, self._describe(options.adapter_dtype, facts))
        self.run.write_json(FINGERPRINTS, self.base_check.as_dict())

    def sync(self) -> SyncReport:
        """Push the current policy to the engine now; training does so only before it samples, so its last step is not
        pushed.

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
        """Close the engine (if the trainer made it) and remove the adapter versions on tmpfs; harmless when
        repeated."""
        self._finalizer()

    def _check_open(self, doing: str) -> None:
        if not self._finalizer.alive:
            raise EngineClosedError(
                f"{doing}: the trainer was closed, as at the end of its `with`. Make a new one; existing_run='resume' "
                "goes on from the last checkpoint."
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
            self._truncated = truncation_of(self, settings.sampling_spec(args))
            use_small_tiles(bare_model(self.model), self.temperature, truncated=self._truncated)
        self._failures = [] if ranks().size > 1 else None
        self._guard_rewards()

    def follow_routing(self, *, replays: bool) -> None:
        """`RoutedSteps` compares the experts that both sides choose."""

    def _guard_rewards(self) -> None:
        # Only now: an environment's own reward is among them, and TRL has named them all.
        self.reward_funcs = [
            guard(reward, name, self._failures)
            for reward, name in zip(self.reward_funcs, self.reward_func_names, strict=True)
        ]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `RecordedTraining.train`.

        Raises:
            EngineClosedError: the trainer was closed; its run stays as it is.
        """
        self._check_open("training")
        return super().train(*args, **kwargs)

    def _before_train(self) -> None:
        super()._before_train()
        if reason := dataset_checks.why_no_step(self.args, self.train_dataset):
            logger.warning("%s", reason)
        self.bridge.install(self)  # a second call must push again, although its steps are counted from 0
        if hasattr(self, "_buffered_inputs"):
            self._step, self._buffered_inputs = 0, None  # an earlier call may have ended in the middle of a batch

    def _before_checkpoint(self) -> None:
        self._link.check_base()  # a checkpoint says that all is well

    def _after_train(self) -> None:
        self._link.check_base()

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


def _check_whole(base: PreparedBase, share_base: bool | str) -> None:
    """Raises: ConfigConflictError: the base itself is to be trained, and it is 4-bit, or shared with the engine."""
    if base.spec.is_4bit:
        raise ConfigConflictError(
            f"reading the model: peft_config=None, and {base} is 4-bit, which cannot be trained itself. Pass "
            "peft_config=LoraConfig(r=16, target_modules='all-linear'), or a base of prepare_base(model, quant='none')."
        )
    if share_base is True:
        raise ConfigConflictError(
            "reading the arguments: share_base=True, and the base itself is trained, under which the engine's must not "
            "move. Leave share_base out."
        )


def _columns(asked: _Asked) -> Any:
    """Of the rows that rewards get; `None` where something else than the dataset's columns may be among them."""
    dataset = asked.of_trl["train_dataset"]
    gives_more = any(asked.of_trl.get(name) is not None for name in ("rollout_func", "environment_factory"))
    made_of_rows = getattr(dataset, "format", None)  # by `with_transform`
    if gives_more or (isinstance(made_of_rows, dict) and made_of_rows.get("type") == "custom"):
        return None
    return getattr(dataset, "column_names", None)


def _pair(source: Source, choice: EngineChoice, asked: _Asked) -> Pair:
    sync = asked.options.sync
    try:
        return make_pair(
            source,
            choice.rollout if choice.engine is None else choice.engine,
            False if asked.is_whole else asked.options.share_base,
            asked.peft_config,
            check=lambda verdict: why_dense(plan_sync(verdict, wish=sync), source.base),
            start=lambda rank: choice.start(source.base, rank),
            reason="the trainer's is sharded over the processes" if shards_base(asked.args) else choice.why_no_base,
        )
    except BaseException:
        release(None, choice.closer(choice.engine))  # a connection; what make_pair started it has closed
        raise


def _ranks_of_engine(args: Any, options: OnlineOptions) -> int:
    return int((options.engine_options or {}).get("tensor_parallel_size", args.vllm_tensor_parallel_size))
