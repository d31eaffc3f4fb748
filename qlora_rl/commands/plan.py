"""`qlora-rl plan`: what fits on my card."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from qlora_rl.commands.codes import AS_JSON, COUNT, DOES_NOT_FIT, MODEL, POSITIVE, QUANTISED, UsageError
from qlora_rl.contracts import QUANT_TYPES
from qlora_rl.errors import ConfigConflictError
from qlora_rl.methods import ESTIMATED, OFFLINE, TAUGHT

if TYPE_CHECKING:
    from qlora_rl.memory.plan import MemoryEstimate

_GENERATIONS = 8
# Likeliest tokens that a server is asked for by default.
_TOP_K = 20


def add(commands: Any) -> None:
    """The command's arguments."""
    plan = commands.add_parser(
        "plan", parents=[MODEL, QUANTISED, AS_JSON], help="estimate the memory of a run without loading the model"
    )
    plan.add_argument(
        "--host-memory",
        type=POSITIVE,
        metavar="GIB",
        help="limit for layer inputs in host memory, in GiB (default: no limit; the trainers use what is free)",
    )
    plan.add_argument(
        "--method",
        choices=ESTIMATED,
        default="grpo",
        help="sft, dpo and kto have no engine; dpo has two sequences per row (default: %(default)s)",
    )
    plan.add_argument(
        "--teacher",
        metavar="WHO",
        help="of distill, a second model in 4 bits, the directory of an adapter or run on the same base, or the URL of "
        "a server (default: the base itself)",
    )
    plan.add_argument(
        "--max-length",
        type=COUNT,
        default=2048,
        metavar="N",
        help="prompt plus completion, in tokens (default: %(default)s)",
    )
    plan.add_argument(
        "--image-tokens",
        type=COUNT,
        metavar="N",
        help="of --max-length, tokens that stand for images, in a model that takes them (default: 1024, an image of "
        "about 900 x 900 pixels)",
    )
    plan.add_argument("--quant", choices=QUANT_TYPES, help="(default: as the base is stored, otherwise nf4)")
    plan.add_argument("--rank", type=COUNT, default=16, metavar="R", help="rank of the adapter (default: %(default)s)")
    plan.add_argument(
        "--target-modules",
        nargs="+",
        default=["all-linear"],
        metavar="NAME",
        help="linears to adapt (default: all-linear)",
    )
    plan.add_argument(
        "--adapters", type=COUNT, default=1, metavar="N", help="held at once, as `tinker` does (default: %(default)s)"
    )
    _add_training(plan)
    plan.add_argument("--cpu", action="store_true", help="plan for a CPU")
    plan.set_defaults(run=run)


def _add_training(plan: argparse.ArgumentParser) -> None:
    """What the trainers and the engine are told."""
    plan.add_argument(
        "--batch-size", type=COUNT, default=8, metavar="N", help="per_device_train_batch_size (default: %(default)s)"
    )
    plan.add_argument(
        "--num-generations", type=COUNT, metavar="N", help=f"completions per prompt (default: {_GENERATIONS})"
    )
    plan.add_argument(
        "--optim",
        default="adamw_torch_fused",
        metavar="NAME",
        help="transformers' name of the optimizer (default: %(default)s)",
    )
    plan.add_argument(
        "--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True, help="(default: on)"
    )
    plan.add_argument(
        "--offload",
        action=argparse.BooleanOptionalAction,
        help="keep layer inputs in host memory, gradient_checkpointing_kwargs (default: only if the run does not fit "
        "otherwise)",
    )
    plan.add_argument("--two-copies", action="store_true", help="trainer and engine each hold a copy of the base")
    plan.add_argument("--padded", action="store_true", help="keep the padding of micro-batches (remove_padding=False)")
    plan.add_argument(
        "--sleep",
        action=argparse.BooleanOptionalAction,
        help="free the KV cache between rollouts (default: only if the run does not fit otherwise)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 fits (or no limit), 3 does not fit."""
    import json

    estimate = _estimate(arguments)
    from qlora_rl.cpu_features import processor
    from qlora_rl.memory.calibrating import calibration_cost
    from qlora_rl.memory.plan import largest_length
    from qlora_rl.memory.shape import read_config, stored_base

    longest = largest_length(estimate) if arguments.gpu_memory is not None else None
    base = stored_base(arguments.model) if arguments.quant is None else None
    measured = None if base is None else base.measured
    config = read_config(arguments.model, trust_remote_code=arguments.trust_remote_code)
    is_quantised = base is not None or getattr(config, "quantization_config", None)
    # The cost is that of a dense model: experts that stay in 16 bits are in a block, too.
    is_known = estimate.request.spec.is_4bit and not is_quantised and not estimate.shape.experts
    cost = calibration_cost(estimate.shape) if is_known else None
    if arguments.json:
        found = estimate.as_dict() | {"longest_max_length": longest}
        found["savings"] = [vars(saving) for saving in estimate.savings()]
        found["measured"] = None if measured is None else measured.as_dict()
        found["calibration"] = None if cost is None else vars(cost)
        if estimate.request.device == "cpu":
            found["processor"] = processor().as_dict()
        print(json.dumps(found, indent=1))
        return 0 if estimate.fits else DOES_NOT_FIT
    print(estimate)
    if measured is not None:
        print(f"\nbase: {measured}")
    if cost is not None:
        print(f"\nto calibrate the base (prepare --calibrate): {cost}")
    if estimate.request.device == "cpu":
        print(f"\nprocessor: {processor()}")
    _show_lengths(estimate, longest)
    if not estimate.fits:
        _show_what_to_lower(estimate)
    return 0 if estimate.fits else DOES_NOT_FIT


def _estimate(arguments: argparse.Namespace) -> MemoryEstimate:
    """Of a run with these arguments.

    Raises:
        UsageError: options that contradict each other.
        ConfigConflictError: there is no such model, or it is not supported.
    """
    if arguments.model.endswith(".toml"):
        raise ConfigConflictError(
            f"planning {arguments.model}: plan takes the model, not a run's file. Name its [base] model, with "
            "--gpu-memory and --max-length (vllm_max_model_length); train plans a run before it loads anything."
        )
    from qlora_rl.engine.loading import loading

    with loading("qlora_rl.adapter.initialization"):
        from qlora_rl.advice.rows import is_adapter
        from qlora_rl.memory.plan import plan_memory, teacher_fields
        from qlora_rl.memory.shape import check_supported, read_config, stored_spec

        # What is wrong with the model or its directory is said before seconds of imports.
        spec = stored_spec(
            arguments.model,
            arguments.quant,
            double_quant=arguments.double_quant,
            quantize_experts=arguments.quantize_experts,
            quantize_tower=arguments.quantize_tower,
        )
        config = read_config(arguments.model, trust_remote_code=arguments.trust_remote_code)
        check_supported(config, None if arguments.method in OFFLINE else arguments.max_length)
    from qlora_rl.engine.compat import may_sleep

    targets = arguments.target_modules
    of_the_engine = {
        "--two-copies": arguments.two_copies,
        "--sleep": arguments.sleep is not None,
        "--num-generations": arguments.num_generations is not None,
    }
    if arguments.method in OFFLINE and (said := [option for option, is_said in of_the_engine.items() if is_said]):
        raise UsageError(
            f"planning the memory: {', '.join(said)} with --method {arguments.method}, which makes no engine. Leave it "
            "out."
        )
    taught_by: dict[str, Any] = {}
    if (who := arguments.teacher) is not None:
        if arguments.method not in TAUGHT:
            raise UsageError(
                f"planning the memory: --teacher with --method {arguments.method}, which has no teacher. Pass "
                "--method distill."
            )
        place = {"top_k": _TOP_K} if "://" in who else {"adapter" if is_adapter(who) else "model": who}
        taught_by = teacher_fields(**place, trust_remote_code=arguments.trust_remote_code)
    return plan_memory(
        config,
        **taught_by,
        method=arguments.method,
        rank=arguments.rank,
        adapters=arguments.adapters,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        spec=spec,
        max_length=arguments.max_length,
        image_tokens=arguments.image_tokens,
        batch_size=arguments.batch_size,
        sequences=max(arguments.batch_size, arguments.num_generations or _GENERATIONS),
        optimizer=arguments.optim,
        gradient_checkpointing=arguments.gradient_checkpointing,
        offload=False if arguments.cpu else arguments.offload,
        shared=not arguments.two_copies,
        sleeps=arguments.sleep,
        can_sleep=bool(arguments.sleep) or may_sleep(lends=not arguments.two_copies),
        padded=arguments.padded,
        device="cpu" if arguments.cpu else "cuda",
        gpu_memory_gib=arguments.gpu_memory,
        host_memory_gib=arguments.host_memory,
    )


def _show_lengths(estimate: MemoryEstimate, longest: int | None) -> None:
    from qlora_rl.memory.pace import pace_of
    from qlora_rl.memory.plan import WAYS

    request = estimate.request
    if request.method not in OFFLINE:
        print(
            f"\nKV cache: {estimate.cache_sequences} sequences of {request.max_length} tokens at once, "
            f"{estimate.cache_tokens} tokens in all"
        )
    if longest is not None:
        wanted = estimate.changed(max_length=longest or request.max_length).request
        on = ", ".join(way.setting for way in WAYS if getattr(wanted, way.field))
        told = f"with per_device_train_batch_size={wanted.batch_size}{', ' if on else ''}{on}"
        print(f"longest --max-length that fits: {f'{longest}, {told}' if longest else 'none'}")
    if estimate.fits and (pace := pace_of(estimate)):
        print(pace)


def _show_what_to_lower(estimate: MemoryEstimate) -> None:
    if not estimate.fits_host:
        print(estimate.too_much_for_host())
        return
    savings = estimate.savings()
    one_does = any(saving.is_enough for saving in savings)
    print(
        "to make it fit, change one of these:"
        if one_does
        else "no single change is enough; combine several, or use a larger card or a smaller model:"
    )
    for saving in savings:
        enough = ", which is enough" if saving.is_enough else ""
        print(f"  {saving.advice}: saves {saving.nbytes / 2**30:.2f} GiB{enough}")
