"""Where a config of TRL contradicts itself or the other arguments, before anything is loaded."""

from __future__ import annotations

import importlib.util
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from qlora_rl.contracts import LEAST_TEMPERATURE, RolloutEngine
from qlora_rl.engine.started import ENGINES, STARTED, as_one, is_here, is_url
from qlora_rl.errors import ConfigConflictError, QloraRLError, collected
from qlora_rl.fidelity import CORRECTION
from qlora_rl.methods import METHODS
from qlora_rl.train.setup.settings import sampling_spec

if TYPE_CHECKING:
    from trl import GRPOConfig


# Fields of GRPOConfig that describe TRL's own way to a vLLM server; `rollout=` takes their place.
_SERVER_FIELDS = (
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
)
# Fields that describe an engine that is built; meaningless with an engine object.
_BUILD_FIELDS = (
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_model_impl",
    "vllm_enable_sleep_mode",
    "vllm_max_model_length",
)
# `recommend --toml` writes it into every file, which may then be run with a server.
_LEFT_OUT = {
    "vllm_max_model_length": "leave it out, in a run's file or by --set train.vllm_max_model_length=none; the limit is "
    "that of the engine; a server gets it by `qlora-rl serve --max-model-length`"
}
# Sampling arguments that a rollout cannot leave to the caller, and why.
_OWN_SAMPLING = {
    "n": "every prompt is repeated num_generations times",
    "seed": "one seed for all requests would sample the same completion again and again; set GRPOConfig(seed=...)",
    "logprobs": "those of the sampled tokens are needed, no others",
    "output_kind": "whole completions are needed",
}
_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def contradictions(method: str, args: Any, rollout: Any) -> list[str]:
    """What the trainer of a method would reject in its config, before it is made."""
    found = [f"report_to: {why}" for name in args.report_to or () if (why := _why_no_reporter(name))]
    if method == "kto":
        from qlora_rl.train.setup.kto import kto_contradictions

        found += kto_contradictions(args)
    if not METHODS[method].samples:
        return found
    try:
        check(args, as_one(rollout))
    except QloraRLError as error:
        found += error.reasons
    return found


def _why_no_reporter(name: str) -> str:
    """Why transformers cannot report to a service: it is not known, or not installed; empty where it can."""
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    try:
        for reporter in get_reporting_integration_callbacks([name]):
            reporter()
    except (ValueError, RuntimeError, ImportError) as error:
        return f"{' '.join(str(error).split()).removesuffix('.')}, or leave it out"
    return ""


def check(args: GRPOConfig, rollout: str | list[str] | RolloutEngine) -> None:
    """Everything that contradicts, found at once.

    Raises:
        NotYetSupportedError: `rollout` names something this version does not have.
        ConfigConflictError: with all reasons.
    """
    _check_rollout(args, rollout)
    changed = [name for name in _SERVER_FIELDS if _is_set(args, name)]
    reasons = []
    if args.vllm_mode != "colocate":
        reasons.append(
            f"vllm_mode={args.vllm_mode!r}: leave it out. rollout='server' starts a server next to the trainer, "
            "rollout='http://host:port' asks one of `qlora-rl serve`"
        )
    if changed:
        reasons.append(
            f"{', '.join(changed)}: leave them out; rollout='http://host:port' asks a server of `qlora-rl serve`"
        )
    if rollout not in STARTED:
        for name in _BUILD_FIELDS:
            if _is_set(args, name):
                reasons.append(
                    f"{name}={getattr(args, name)!r} with an engine object or a URL: "
                    f"{_LEFT_OUT.get(name, 'set it where the engine is made')}"
                )
    taken = sorted(set(args.generation_kwargs or {}) & set(_OWN_SAMPLING))
    if taken:
        ways = "; ".join(f"{name}: {_OWN_SAMPLING[name]}" for name in taken)
        reasons.append(
            f"generation_kwargs sets {', '.join(taken)}, which the trainer sets itself ({ways}): leave it out"
        )
    longest = "max_new_tokens" if hasattr(args, "max_new_tokens") else "max_completion_length"
    for name, field in {"temperature": "temperature", "max_tokens": longest}.items():
        given = (args.generation_kwargs or {}).get(name, getattr(args, field))
        if given != getattr(args, field):
            reasons.append(
                f"generation_kwargs sets {name}={given!r}, and the trainer computes with "
                f"{field}={getattr(args, field)!r}: set {field} alone"
            )
    whole, answer = getattr(args, "vllm_max_model_length", None), getattr(args, "max_completion_length", None)
    # TRL's default of 256 was asked for by nobody, and is cut off where the length ends.
    if rollout in STARTED and whole and answer and answer >= whole and _is_set(args, "max_completion_length"):
        reasons.append(
            f"max_completion_length={answer} leaves no room for a prompt: vllm_max_model_length={whole} counts prompt "
            "and completion: lower max_completion_length, or raise vllm_max_model_length"
        )
    corrects = getattr(args, "vllm_importance_sampling_correction", False)  # GRPO alone
    if corrects and args.vllm_importance_sampling_mode not in _CORRECTIONS:
        # TRL says so only after the first rollout.
        reasons.append(
            f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r}: use one of "
            f"{', '.join(_CORRECTIONS)}"
        )
    if getattr(args, "use_transformers_continuous_batching", False):
        reasons.append("use_transformers_continuous_batching=True: rollouts come from vLLM here, leave it out")
    if (
        corrects
        and args.loss_type == "vespo"
        and args.vllm_importance_sampling_mode not in ("token_truncate", "token_mask")
    ):
        # TRL makes this check only under use_vllm=True, which it is not told at construction.
        reasons.append(
            f"loss_type='vespo' with vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r}: use "
            "'token_truncate' or 'token_mask'"
        )
    if reasons:
        raise collected("reading the config", reasons, ConfigConflictError)


def _check_rollout(args: GRPOConfig, rollout: Any) -> None:
    """Raise `ConfigConflictError` where `rollout` names or is no engine."""
    if isinstance(rollout, list | tuple):
        raise ConfigConflictError(
            f"choosing the engine: rollout={list(rollout)!r}: several engines are several URLs of `qlora-rl serve`. "
            "Pass ['http://a:8000', 'http://b:8000'], or 'colocate'."
        )
    if isinstance(rollout, str) and rollout not in STARTED and not is_url(rollout):
        raise ConfigConflictError(
            f"choosing the engine: rollout={rollout!r} is none of "
            f"{', '.join(f'{name!r} ({known.says})' for name, known in ENGINES.items())}, a URL such as "
            "'http://127.0.0.1:8000' (or several, in a list), or an engine object."
        )
    if args.world_size > 1 and hasattr(rollout, "url"):
        raise ConfigConflictError(
            f"choosing the engine: rollout is a {type(rollout).__name__}, which each of {args.world_size} processes "
            "would own. Pass the URL, or 'ray': rank 0 connects to it, or starts it, for all."
        )
    if not isinstance(rollout, str) and not isinstance(rollout, RolloutEngine):
        raise ConfigConflictError(
            f"choosing the engine: rollout is a {type(rollout).__name__}. Pass 'colocate' or an engine (LocalEngine, "
            "or any object with its methods)."
        )


def check_logprobs(args: GRPOConfig, rollout: str | list[str] | RolloutEngine, rollout_func: Any) -> None:
    """Reject settings of importance sampling with an engine without logprobs; TRL's defaults and ours are not taken for
    a wish.

    Raises:
        ConfigConflictError: names what was chosen.
    """
    if isinstance(rollout, str | list) or rollout_func is not None or rollout.capabilities().gives_logprobs:
        return
    if not getattr(args, "vllm_importance_sampling_correction", False):
        return
    names = ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max")
    chosen = [n for n in names if _is_set(args, n) and (n not in CORRECTION or getattr(args, n) != CORRECTION[n])]
    if chosen:
        raise ConfigConflictError(
            f"reading the config: {', '.join(f'{name}={getattr(args, name)!r}' for name in chosen)}: importance "
            f"sampling needs the logprobs of sampled tokens, and {rollout.capabilities().name} gives no logprobs. "
            "Leave it out, or set vllm_importance_sampling_correction=False."
        )


def check_sampling(args: GRPOConfig, rollout: str | list[str] | RolloutEngine) -> None:
    """vLLM takes the sampling arguments; asked where it is installed, and, with an engine elsewhere, where
    `generation_kwargs` are set.

    Raises:
        ConfigConflictError: what vLLM says of them; or a temperature with which nothing is learned.
    """
    temperature = args.temperature
    if isinstance(temperature, int | float) and temperature <= 0:  # what is no number vLLM rejects
        raise ConfigConflictError(
            f"reading the config: temperature={temperature:g} is greedy: all completions of a prompt are the same, and "
            f"nothing can be learned. Set it to {LEAST_TEMPERATURE} or more."
        )
    if isinstance(temperature, int | float) and temperature < LEAST_TEMPERATURE:
        raise ConfigConflictError(
            f"reading the config: temperature={temperature:g} < {LEAST_TEMPERATURE}: vLLM would sample with "
            f"{LEAST_TEMPERATURE}, and the trainer divide by {temperature:g}. Set it to {LEAST_TEMPERATURE} or more."
        )
    if isinstance(rollout, str | list):
        is_asked = is_here(rollout) or bool(args.generation_kwargs)  # else vLLM would be loaded here for this alone
    else:
        is_asked = rollout.capabilities().name.startswith("vllm")
    if not is_asked or importlib.util.find_spec("vllm") is None:
        return
    from qlora_rl.engine.sampling import sampling_params

    try:
        sampling_params(sampling_spec(args), [0])
    except ImportError:
        return  # starting the engine says why; one that is elsewhere has a vLLM of its own
    except ConfigConflictError as error:
        if isinstance(error.__cause__, ImportError):
            return
        extra = f" (generation_kwargs={args.generation_kwargs!r})" if args.generation_kwargs else ""
        raise ConfigConflictError(
            f"reading the config: vLLM rejects the sampling arguments{extra}: {error.__cause__ or error}. Correct "
            "them; generation_kwargs takes fields of vLLM's SamplingParams."
        ) from error


def _is_set(args: GRPOConfig, name: str) -> bool:
    """The config has the field, and it differs from its default."""
    field = next((f for f in fields(args) if f.name == name), None)
    if field is None:
        return False
    default = field.default if field.default is not MISSING else None
    return getattr(args, name) != default
