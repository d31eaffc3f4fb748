"""`OnlineOptions`: what trainers that sample, and `attach`, take in addition to TRL's arguments. `EngineChoice`: the
engine that `rollout=` names: started here, connected to, or passed in. `Link`: a policy and an engine, verified to hold
one base, and everything that keeps them equal."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from qlora_rl.adapter.inspected import is_bare
from qlora_rl.adapter.verdict import Verdict, judge_adapter
from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.base.experts import directory_is_mixture
from qlora_rl.base.model_classes import directory_takes_images, load_processor
from qlora_rl.base.unsupported_configs import function_limit
from qlora_rl.contracts import DenseEngine, RolloutEngine, SamplingSpec, SyncStrategy
from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.distributed import ranks
from qlora_rl.engine.images import ImagePrompt
from qlora_rl.engine.linears.base_compute import BaseCompute
from qlora_rl.engine.started import ENGINES, is_here, is_url
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError, collected
from qlora_rl.stages import begin
from qlora_rl.sync.base_check import BaseCheck, verify_base
from qlora_rl.sync.canary import Canary, SeenPrompt
from qlora_rl.sync.function_check import FunctionCheck
from qlora_rl.sync.plan import WISHES, SyncPlan, plan_sync
from qlora_rl.sync.strategies import AdapterSync
from qlora_rl.sync.transports import transport_for
from qlora_rl.train.rollouts.bridge import EngineBridge
from qlora_rl.train.run import SYNCS, RunDirectory
from qlora_rl.train.run.recorded_training import check_adapter_dtype, products_of
from qlora_rl.train.setup.engine_order import SHARE, closer
from qlora_rl.train.setup.processes import check_common_base
from qlora_rl.train.setup.settings import autocast_dtype

ON_MISMATCH = ("stop", "warn")


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
        check_on_mismatch(self.on_mismatch)
        if self.sync not in WISHES:
            raise ConfigConflictError(
                f"reading the arguments: sync={self.sync!r} is not one of {WISHES}. Use 'auto'; nothing is ever merged "
                "here."
            )
        if self.sync_dir is not None and isinstance(self.rollout, str | list) and not is_here(self.rollout):
            raise ConfigConflictError(
                f"reading the arguments: sync_dir={str(self.sync_dir)!r}, and rollout={self.rollout!r} is sent its "
                "adapters, which are written into no directory of yours. Leave sync_dir out."
            )
        if self.share_base not in SHARE:
            raise ConfigConflictError(f"reading the arguments: share_base={self.share_base!r} is not one of {SHARE}.")
        if self.canary_every < 0:
            raise ConfigConflictError(f"reading the arguments: canary_every={self.canary_every} < 0. Use 0 for none.")


def check_on_mismatch(on_mismatch: str) -> None:
    """Reject another word.

    Raises:
        ConfigConflictError: it is none of `ON_MISMATCH`.
    """
    if on_mismatch not in ON_MISMATCH:
        raise ConfigConflictError(f"reading the arguments: on_mismatch={on_mismatch!r} is not one of {ON_MISMATCH}.")


class EngineChoice:
    """What `rollout=` means, and whose engine it is.

    Attributes:
        is_ours: it is started or connected to here, and closed with the trainer.
        engine: the one that was passed or connected to; `None` where one is to be started.
        name: for the record.

    Args:
        rollout: "colocate", "server", "ray", URLs in one text, or an engine object; checked by `config_checks.check`.
        options: arguments of an engine that is started.
        api_key_file: holds the key of a server.
        session: gives the name under which a server knows this run; asked where there is a server.

    Raises:
        EngineBrokenError, AccessDeniedError, ServerTakenError: a server that cannot be used.
        ConfigConflictError: an engine of several ranks that do not fit the trainer's.
    """

    def __init__(
        self,
        rollout: Any,
        options: dict[str, Any],
        *,
        api_key_file: str | os.PathLike[str] | None = None,
        session: Callable[[], str] | None = None,
    ):
        reject_ranks(rollout, options.get("tensor_parallel_size", 1))
        self.rollout = rollout
        self.options = options
        self.is_ours = isinstance(rollout, str)
        self.name = rollout if isinstance(rollout, str) else type(rollout).__name__
        self.engine: RolloutEngine | None = None if isinstance(rollout, str) else rollout
        if is_url(rollout):
            self.engine = _for_all(
                lambda: claim_servers(rollout, api_key_file, session() if session is not None else None)
            )

    @property
    def why_no_base(self) -> str:
        """Why an engine that is started here lends its base to nobody; empty where it may."""
        is_parted = is_here(self.rollout) and self.options.get("tensor_parallel_size", 1) > 1
        return "the engine's ranks are processes of their own" if is_parted else ""

    def start(self, base: PreparedBase, rank: int) -> RolloutEngine:
        """An engine on `base` for adapters of `rank`."""
        begin("starting vLLM on the base")
        return start_engine(self.rollout, base, rank, self.options)

    def start_dense(self, base: PreparedBase) -> RolloutEngine:
        """An engine that can be given all weights: on the baked base, or on one that is not 4-bit.

        Raises:
            NotYetSupportedError: one of several ranks cannot.
        """
        if (size := self.options.get("tensor_parallel_size", 1)) > 1:
            raise NotYetSupportedError(
                f"choosing the engine: tensor_parallel_size={size} takes adapters, and this policy needs full weights "
                "(see the reasons of its verdict: judge_adapter). Use tensor_parallel_size=1."
            )
        from qlora_rl.base.bake import bake_base

        baked = ranks().in_turn(lambda: bake_base(base), "baking the base") if base.spec.is_4bit else base
        begin("starting vLLM on the base")
        return start_engine(self.rollout, baked, 0, {**self.options, "max_lora_rank": 0})

    def closer(self, engine: RolloutEngine | None) -> Callable[[], None] | None:
        """What closes `engine`; `None` where that is its owner's business."""
        return closer(engine) if self.is_ours and engine is not None else None


def reject_ranks(rollout: Any, size: int) -> None:
    """Reject an engine of several ranks that do not fit the trainer's.

    Raises:
        ConfigConflictError: with what can be done instead.
    """
    if size > 1 and is_here(rollout) and ranks().size > 1:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks().size))
        if here % size:
            raise ConfigConflictError(
                f"choosing the engine: tensor_parallel_size={size} under rollout='colocate', and {here} processes on "
                f"this machine: they cannot be parted into groups of {size}, each with an engine over its GPUs. Set "
                f"vllm_tensor_parallel_size to a divisor of {here}, or use rollout='server'."
            )


def start_engine(word: str, base: PreparedBase, rank: int, options: dict[str, Any]) -> RolloutEngine:
    """The engine of a word. In this process: vLLM there or, of several ranks, in processes on the GPUs of a group of
    the trainer's, next to them. Elsewhere: one for all, which ends with the trainer."""
    known, size = ENGINES[word], options.get("tensor_parallel_size", 1)
    options = {"max_lora_rank": rank, **options}
    if not known.is_here:
        # An engine elsewhere repairs its scales when it starts, and never sleeps.
        there = {name: value for name, value in options.items() if name not in ("repair_scales", "enable_sleep")}
        return _for_all(lambda: known.make(base, **there))
    if size > 1 and ranks().size > 1:
        return _for_all(lambda: known.make(base, **options), size)
    # Each rank has an engine of its own, on its own device; vLLM finds torch.distributed with all of them in it.
    launched = {"distributed_executor_backend": "external_launcher"} if ranks().size > 1 else {}
    return known.make(base, **launched | options)


def _for_all(make: Callable[[], RolloutEngine], group: int = 0) -> Any:
    """A server is rank 0's, and so are actors; what is on the GPUs of a group of ranks is the first one's."""
    if ranks().size == 1:
        return make()
    from qlora_rl.train.ranks.shared_engine import SharedEngine

    return SharedEngine(make, ranks(), group)


def claim_servers(url: str, api_key_file: str | os.PathLike[str] | None, session: str | None = None) -> RolloutEngine:
    """The server, or several, as an engine; from here on no other trainer may push to it."""
    from qlora_rl.engine.fleet import connect

    engine = connect(url, api_key_file=api_key_file, session=session)
    try:
        engine.claim()
        engine.drop_adapter()  # whatever an earlier run has left: the canary is calibrated on the bare base
    except BaseException:
        engine.close()
        raise
    return engine


logger = logging.getLogger(__name__)

DENSE = "full weights are sent, to an engine on the baked base"
# On a model without an adapter.
_WHOLE = Verdict("full_weights", ("The model carries no adapter: its own weights are trained.",), 0, "")


@dataclass
class Link:
    """What `link_policy` has made.

    Attributes:
        engine: generates.
        `base_check`: the check that both sides hold one base.
        plan: how the policy is sent.
        strategy: does it.
        bridge: what TRL generates through.
        close_engine: closes it with the link; `None` where the engine is somebody else's.
        products: the trainer's claim on products in float32, where the processor asks for it.
        rounding: how far trainer and engine are from the trainer's float32 pass, as a mean scaled difference; 0 where
            that was not measured.
    """

    engine: RolloutEngine
    base_check: BaseCheck
    plan: SyncPlan
    strategy: SyncStrategy
    bridge: EngineBridge
    close_engine: Callable[[], None] | None
    products: Float32Products
    rounding: float = 0.0

    def close(self) -> None:
        """Remove the versions on their way, and close the engine if it was started here."""
        try:
            release(self.strategy, self.close_engine)
        finally:
            self.products.close()

    def check_base(self) -> None:
        """Look at all of a shared base; pushes look at slices of it.

        Raises:
            BaseMismatchError: something has written to it.
        """
        if isinstance(self.strategy, AdapterSync) and self.strategy.shared is not None:
            self.strategy.shared.look_everywhere()

    def rollout_facts(self, run: RunDirectory | None) -> dict[str, float]:
        """What was sampled and pushed since the last call, for the step's record; the pushes also go to `run`."""
        reports, tokens, seconds, naps = self.bridge.drain()
        facts: dict[str, float] = {
            "base_verified": float(self.base_check.is_verified),
            "rollout_tokens": tokens,
            "rollout_seconds": seconds,
            "rollout_tokens_per_s": tokens / seconds if seconds else float("nan"),
            **naps,
        }
        for report in reports:
            facts |= {"sync_seconds": report.seconds, "sync_bytes": report.bytes, "policy_version": report.version}
            facts["canary_seconds"] = report.canary_seconds
            if report.canary_difference is not None:
                facts["canary_difference"] = report.canary_difference
            if run is not None:
                run.append(SYNCS, report.as_dict())
        return facts

    def facts(self) -> dict[str, Any]:
        """For config.json; only an engine in this process says what its linears multiply with."""
        engine = getattr(self.engine, "inner", None) or self.engine  # of several ranks, the first one's
        compute = getattr(engine, "base_compute", None)
        return {
            "engine": self.engine.capabilities().name,
            **({"base_compute": compute.as_dict()} if isinstance(compute, BaseCompute) else {}),
            "sync": self.plan.strategy,
            "plan": self.plan.as_dict(),
            "base_proof": {
                "verified": self.base_check.is_verified,
                "digest": self.base_check.ours.digest,
                "repaired": len(self.base_check.repaired),
                "largest_relative_error": max(self.base_check.repaired.values(), default=0.0),
                "differences": len(self.base_check.diff.entries),
            },
        }


def link_policy(
    model: Any,
    base: PreparedBase,
    choice: EngineChoice,
    engine: RolloutEngine | None,
    args: Any,
    sampling: SamplingSpec,
    options: OnlineOptions,
) -> Link:
    """Judge the adapter, start the engine if there is none, verify the base and what is computed with it, calibrate the
    canary; nothing is pushed yet.

    If it fails, the engine is closed where it is ours.

    Args:
        model: the policy as it is trained.
        base: that it stands on.
        choice: starts an engine.
        engine: that runs already.
        args: of TRL: seed, precision, sleep.
        sampling: how completions are sampled.
        options: how the policy is sent, and how that is checked.

    Raises:
        AdapterRejectedError, BaseMismatchError, CanaryError, ConfigConflictError, PolicyMismatchError: with the way
            out.
    """
    strategy: SyncStrategy | None = None
    products = products_of(model, base, args)
    try:
        verdict = _WHOLE if is_bare(model) else judge_adapter(model)
        # Raises before an engine is started that is not there yet.
        is_dense = bool(why_dense(plan_sync(verdict, wish=options.sync), base))
        if is_dense and options.sync_dir is not None:
            raise ConfigConflictError(
                f"choosing the transport: sync_dir={str(options.sync_dir)!r}, and full weights are sent, which are "
                "written into no directory of yours. Leave it out."
            )
        if engine is None:
            engine = choice.start_dense(base) if is_dense else choice.start(base, verdict.rank)
        plan_sync(verdict, engine.capabilities(), wish=options.sync)  # before the bases are read
        begin("verifying that trainer and engine hold one base")
        base_check = verify_base(model, engine, allow_base_mismatch=options.allow_base_mismatch)
        check_common_base(base_check.ours.digest)
        plan = plan_sync(
            verdict,
            engine.capabilities(),
            base_check.diff,
            options.sync,
            allow_base_mismatch=options.allow_base_mismatch,
        )
        canary, function, rounding = None, None, 0.0
        if base_check.is_verified:
            function = FunctionCheck(model, engine, autocast=autocast_dtype(args), on_mismatch=options.on_mismatch)
            begin("comparing what trainer and engine compute")
            function.compare()
            rounding = max(ranks().gather(function.rounding, "measuring rounding"))  # they examine together
            if options.canary_every:
                canary = _canary(model, base, engine, args, options.canary_every, function)
        if is_dense:
            from qlora_rl.sync.full_weights import DenseSync

            strategy = DenseSync(model, cast(DenseEngine, engine), canary)
        else:
            strategy = AdapterSync(model, engine, _transport(plan.transport, options.sync_dir, engine), canary)
        sleeps = _sleeps(args, engine)
        bridge = EngineBridge(
            engine, strategy, sampling, seed=args.seed, sleeps=sleeps, limit=function_limit(model.config)
        )
        logger.info("%s", plan)
        if canary is None:
            logger.warning(
                "pushes are not verified: %s",
                "canary_every=0" if not options.canary_every else "another base is allowed",
            )
    except BaseException:
        products.close()
        release(strategy, choice.closer(engine))
        raise
    return Link(engine, base_check, plan, strategy, bridge, choice.closer(engine), products, rounding)


def _sleeps(args: Any, engine: RolloutEngine) -> bool:
    """Whether the engine sleeps between rollouts; it is said where TRL's config asks for it and the engine cannot."""
    can_sleep = engine.capabilities().can_sleep
    if args.vllm_enable_sleep_mode and not can_sleep:
        logger.warning(
            "vllm_enable_sleep_mode=True: %s cannot sleep, it stays awake; before vLLM 0.31 no engine sleeps that "
            "lends its base",
            engine.capabilities().name,
        )
    return args.vllm_enable_sleep_mode and can_sleep


def _canary(
    model: Any, base: PreparedBase, engine: RolloutEngine, args: Any, every: int, function: FunctionCheck
) -> Canary:
    """Calibrated."""
    image = canary_image(base) if engine.capabilities().takes_images else None
    if image is None and engine.capabilities().takes_images:
        logger.warning(
            "the canary scores text alone: %s has no chat template, which says how an image is written", base
        )
    # With sleep mode each wake would ask again; what is rebuilt in this process has the same options.
    again = None if args.vllm_enable_sleep_mode else function
    canary = Canary(model, engine, image=image, every=every, function=again, autocast=autocast_dtype(args))
    begin("calibrating the check of pushes")
    canary.calibrate()
    return canary


def _transport(name: str, sync_dir: str | os.PathLike[str] | None, engine: RolloutEngine) -> Any:
    transport = transport_for(name, sync_dir)
    if ranks().size == 1:
        return transport
    from qlora_rl.train.ranks.shared_engine import SharedEngine, SharedTransport

    return SharedTransport(transport, engine) if isinstance(engine, SharedEngine) else transport


def why_dense(plan: SyncPlan, base: PreparedBase) -> str:
    """Why the base cannot be shared, as far as the plan tells.

    Raises:
        NotYetSupportedError: full weights, for a mixture of experts.
    """
    if plan.strategy == "lora_adapter":
        return ""
    if directory_is_mixture(base):
        raise collected(
            "planning the sync: this policy can be synced as full weights only, and vLLM cannot be given those of a "
            "mixture of experts",
            plan.reasons[:-1],
            NotYetSupportedError,
        )
    return DENSE


def release(strategy: Any, close_engine: Callable[[], None] | None) -> None:
    """Close both, the engine also where the strategy fails to."""
    try:
        if strategy is not None:
            strategy.close()
    finally:
        if close_engine is not None:
            close_engine()


def canary_image(base: PreparedBase) -> SeenPrompt | None:
    """A question about a fixed picture, for the canary; `None` where the base takes no images, or no chat template says
    how one is written."""
    if not directory_takes_images(base.path):
        return None
    processor = load_processor(base.path)
    if not processor.chat_template:
        return None
    from PIL import Image

    # Colours that change from pixel to pixel: one of an even colour would look alike to many towers.
    side = range(64)
    picture = Image.new("RGB", (64, 64))
    picture.putdata([(4 * x, 4 * y, 16 * ((x ^ y) % 16)) for y in side for x in side])
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]
    try:
        made = processor.apply_chat_template(
            [[{"role": "user", "content": content}]],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    except Exception as error:  # jinja's, or whatever else a template comes to
        raise ConfigConflictError(
            f"comparing trainer and engine: the chat template of {base.path} does not take a message with an image: "
            f"{type(error).__name__}: "
            f"{error}. Use the template that the model was published with."
        ) from error
    inputs = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
    return SeenPrompt(ImagePrompt(made["input_ids"][0].tolist(), (picture,)), inputs)
