"""What a caller's GRPOConfig, RLOOConfig or OnlineDPOConfig means for our engine, and where it contradicts the other
arguments."""

from __future__ import annotations

import copy
import importlib.util
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from qlora_rl.base.model_classes import directory_takes_images, load_processor
from qlora_rl.base.writer import check_vocabulary
from qlora_rl.contracts import RolloutEngine, SamplingSpec
from qlora_rl.engine.started import ENGINES, STARTED, is_url
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError, collected
from qlora_rl.fidelity import CORRECTION
from qlora_rl.rewards.load import OF_REWARDS

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
# Columns that hold conversations.
_SAID = ("prompt", "completion", "chosen", "rejected", "messages")
_LOOKED_AT = 10_000  # rows whose messages are looked at
_CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


Args = TypeVar("Args")  # a config of TRL's

# Completions of a prompt that online DPO compares.
PAIR = 2


def default_args(config: type[Args], directory: str, **fields: Any) -> Args:
    """The config of a trainer that was given none, which must run without a GPU too. One that was given stays as it
    is."""
    return config(directory, use_cpu=not torch.cuda.is_available(), **fields)


def own_copy(args: GRPOConfig) -> GRPOConfig:
    """A copy whose parts are its own: TRL and transformers write into the config that they are given."""
    mine = copy.copy(args)
    for name, value in vars(mine).items():
        if isinstance(value, dict | list) or name == "accelerator_config":
            setattr(mine, name, copy.deepcopy(value))
    return mine


@contextmanager
def told_no_vllm(args: GRPOConfig, reward_funcs: list[Any]) -> Iterator[None]:
    """While TRL's `__init__` runs: it would build its own VLLMGeneration and feed vLLM's sampling arguments to
    transformers."""
    wishes = {name: getattr(args, name) for name in ("use_vllm", "generation_kwargs", "model_init_kwargs")}
    args.use_vllm, args.generation_kwargs = False, None
    if not any(isinstance(reward, str) for reward in reward_funcs):  # TRL loads reward models with these
        args.model_init_kwargs = None
    try:
        yield
    finally:
        for name, value in wishes.items():
            setattr(args, name, value)


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
            "nothing can be learned. Set it above 0."
        )
    if isinstance(rollout, str | list):
        is_asked = rollout == "colocate" or bool(
            args.generation_kwargs
        )  # else vLLM would be loaded here for this alone
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


def check_datasets(*datasets: Any, why: str = "this trainer takes text prompts only") -> list[str]:
    """Columns that hold images, as far as they show; what columns do not show, the bridge rejects.

    Args:
        datasets: of the trainer; `None` and dictionaries are fine.
        why: images cannot be sampled from, in words; empty where they can.

    Raises:
        NotYetSupportedError: names the columns.
    """
    columns = {name for part in parts(datasets) for name in (getattr(part, "column_names", None) or [])}
    found = sorted(columns & {"image", "images"})
    if found and why:
        reject_images(found, why)
    return found


def check_prompts(args: Any, *datasets: Any) -> None:
    """Every dataset has the column that all online trainers read, in every row; a stream may not say which columns it
    has.

    Raises:
        ConfigConflictError: names the columns that there are, the row without a prompt, or columns that reward
            functions cannot be given.
    """
    for part in parts(datasets):
        columns = getattr(part, "column_names", None)
        taken = [name for name in OF_REWARDS if name in (columns or ()) and name != "environments"]
        if taken and not args.remove_unused_columns:
            raise ConfigConflictError(
                f"reading the dataset: its columns {', '.join(taken)} have names of arguments that TRL gives reward "
                f"functions itself. Rename them: dataset.rename_column({taken[0]!r}, 'given_{taken[0]}'), or in a "
                "run's file [data] columns."
            )
        if columns and "prompt" not in columns:
            raise ConfigConflictError(
                f"reading the dataset: it has no column prompt, but {', '.join(sorted(columns))}. Rename the one that "
                "holds the prompts: dataset.rename_column(name, 'prompt')."
            )
        if columns and hasattr(part, "select_columns") and hasattr(part, "__len__"):
            prompts = part.select_columns(["prompt"]).with_format("arrow")[:]["prompt"]
            if prompts.null_count:
                raise ConfigConflictError(
                    f"reading the dataset: row {prompts.is_null().to_pylist().index(True)} has no prompt. Fill it in, "
                    "or remove the row: dataset.filter(lambda row: row['prompt'] is not None)."
                )


def check_ids(rows: int, *datasets: Any) -> None:
    """Token ids that rows bring themselves have a row in the embedding; a stream is not looked at.

    Args:
        rows: of the embedding.

    Raises:
        ConfigConflictError: names the row and the id.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for part in parts(datasets):
        columns = getattr(part, "column_names", None) or ()
        for name, least in {"input_ids": 0, "labels": -100}.items():  # which the loss leaves out
            if name not in columns or not (hasattr(part, "select_columns") and hasattr(part, "__len__")):
                continue
            before = 0
            for chunk in part.select_columns([name]).with_format("arrow")[:][name].chunks:
                if not (pa.types.is_list(chunk.type) and pa.types.is_integer(chunk.type.value_type)):
                    break  # no token ids
                ids = chunk.flatten()
                first = pc.index(pc.or_(pc.less(ids, least), pc.greater_equal(ids, rows)), True).as_py()
                if first >= 0:
                    row = before + pc.list_parent_indices(chunk)[first].as_py()
                    raise ConfigConflictError(
                        f"reading the dataset: {name} of row {row} hold {ids[first].as_py()}, and the embedding of the "
                        f"base has {rows} rows, for ids 0 to {rows - 1}. Make them with the base's tokenizer."
                    )
                before += len(chunk)


def check_template(processing_class: Any, *datasets: Any) -> None:
    """Messages need a chat template; the first row of each dataset is looked at, a stream is not.

    Raises:
        ConfigConflictError: the tokenizer has none.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(processing_class, "chat_template", None) or getattr(tokenizer, "chat_template", None):
        return
    for part in parts(datasets):
        if hasattr(part, "__len__") and len(part) and _is_talk(part[0].get("prompt")):
            raise ConfigConflictError(
                "reading the dataset: its prompts are messages, and the base has no chat template. Pass text prompts, "
                "or a tokenizer with a template as processing_class."
            )


def rendered(dataset_kwargs: Any, *datasets: Any) -> list[Any]:
    """The datasets of SFT whose messages TRL renders: it leaves those with tokens as they are, and all where
    `dataset_kwargs` say so."""
    if isinstance(dataset_kwargs, Mapping) and dataset_kwargs.get("skip_prepare_dataset"):
        return []
    return [part for part in parts(datasets) if "input_ids" not in (getattr(part, "column_names", None) or ())]


def check_messages(
    processing_class: Any, *datasets: Any, given: Mapping[str, Any] | None = None, is_online: bool = True
) -> None:
    """The chat template takes the messages: those of the first rows are rendered, of each sequence of roles one. A
    stream is not looked at.

    Args:
        processing_class: a tokenizer or a processor.
        given: arguments of the chat template; those of a row come from its columns `chat_template_kwargs` and `tools`,
            as TRL has it.
        is_online: the prompts alone are rendered, and completions sampled.

    Raises:
        ConfigConflictError: names the row, and what the template says.
    """
    for part in parts(datasets):
        if not hasattr(part, "__len__"):
            continue
        seen = set()
        columns = getattr(part, "column_names", None)
        known = [name for name in (*_SAID, "chat_template_kwargs", "tools") if name in (columns or ())]
        rows = part.select_columns(known) if known and hasattr(part, "select_columns") else part
        for number in range(min(len(rows), _LOOKED_AT)):
            row = rows[number]
            if isinstance(prompt := row.get("prompt"), list) and not _is_talk(prompt):
                raise ConfigConflictError(
                    f"reading the dataset: the prompt of row {number} is a list, but not of messages: "
                    f"{reprlib.repr(prompt)}. Pass a text, or messages: "
                    "[{'role': 'user', 'content': '...'}]."
                )
            for name, messages, asks in _talks(row, is_online):
                shape = (name, *(message.get("role") for message in messages))
                if shape in seen:
                    continue
                seen.add(shape)
                of_row = (
                    {} if is_online else {"tools": _tools(row.get("tools")), **(row.get("chat_template_kwargs") or {})}
                )
                try:
                    processing_class.apply_chat_template(
                        list(messages), tokenize=False, add_generation_prompt=asks, **{**(given or {}), **of_row}
                    )
                except Exception as error:  # jinja's, or whatever else a template comes to
                    roles = ", ".join(map(str, shape[1:]))
                    system = (
                        " A template without a system role takes the instruction in the user's message: in a run's "
                        "file [data] prompt_template in place of system_prompt."
                    )
                    raise ConfigConflictError(
                        f"reading the dataset: the chat template does not take the {name} of row {number}, whose roles "
                        f"are {roles}: {type(error).__name__}: {error}. Change the messages to what it takes, or use "
                        f"another template (processing_class).{system if 'system' in shape else ''}"
                    ) from error


def _talks(row: Mapping[str, Any], is_online: bool) -> Iterator[tuple[str, Sequence[Mapping[str, Any]], bool]]:
    """The conversations of a row that are rendered: name, messages, whether an answer follows."""
    prompt, answers = row.get("prompt"), {name: row.get(name) for name in _SAID[1:]}
    is_talk = _is_talk(prompt)
    if is_talk:
        yield "prompt", prompt, True
    for name, said in answers.items():
        if not is_online and _is_talk(said):
            yield name, [*prompt, *said] if is_talk and name != "messages" else said, False


def _is_talk(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _tools(given: Any) -> Any:
    return json.loads(given) if isinstance(given, str) else given


def why_no_step(args: Any, dataset: Any) -> str:
    """Why TRL's sampler, which leaves out a batch of prompts that is not whole, gives none; empty where it gives
    some."""
    size = getattr(args, "generation_batch_size", None)
    if not size or not hasattr(dataset, "__len__") or len(dataset) >= (needed := size // args.num_generations):
        return ""
    return (
        f"the dataset has {len(dataset)} rows, and a batch takes {needed} prompts (generation_batch_size={size}, "
        f"num_generations={args.num_generations}): not one step will be made. Pass more rows, or lower "
        "per_device_train_batch_size or gradient_accumulation_steps"
    )


def parts(datasets: Sequence[Any]) -> list[Any]:
    """`None` is left out, and of a dictionary all values are there."""
    return [part for d in datasets if d is not None for part in (d.values() if isinstance(d, dict) else [d])]


def check_processor(processing_class: Any, base: Path, *, is_given: bool) -> None:
    """Reject a tokenizer with tokens that the base has no embedding for, and an image processor that is not the one
    stored with the base, with which the engine processes images.

    Args:
        is_given: it was passed to the trainer; else it is the one stored with the base.

    Raises:
        ConfigConflictError: names the tokens, or what differs.
    """
    config = json.loads((base / "config.json").read_text())
    rows = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if rows:
        doing = "reading processing_class" if is_given else f"reading the tokenizer of the base {base}"
        check_vocabulary(processing_class, rows, doing, lambda: load_processor(base) if is_given else processing_class)
    given = getattr(processing_class, "image_processor", None)
    if given is None or not directory_takes_images(base):
        return
    from transformers import AutoProcessor

    ours, theirs = given.to_dict(), AutoProcessor.from_pretrained(base).image_processor.to_dict()
    differs = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if differs:
        raise ConfigConflictError(
            "reading processing_class: its image processor differs from the one stored with the base in "
            f"{', '.join(differs)}, and the engine uses that. Leave processing_class out, or prepare the base with it: "
            "prepare_base(model, tokenizer=processor)."
        )


def reject_images(columns: Sequence[str], why: str) -> NoReturn:
    """Raise `NotYetSupportedError`."""
    raise NotYetSupportedError(
        f"reading the dataset: its column {', '.join(columns)} holds images, and {why}. Remove the column and use text "
        "prompts."
    )


def engine_options(args: GRPOConfig) -> dict[str, Any]:
    """Arguments of LocalEngine out of the `vllm_*` fields, with TRL's meaning of each."""
    return {
        "max_model_length": getattr(args, "vllm_max_model_length", None),
        "max_num_seqs": args.per_device_train_batch_size * args.vllm_tensor_parallel_size * _completions(args),
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "enable_sleep": args.vllm_enable_sleep_mode,
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
        "seed": args.seed,
    }


def _completions(args: Any) -> int:
    """How many completions one row of a training batch stands for in one rollout."""
    return getattr(args, "steps_per_generation", None) or PAIR


def sampling_spec(args: GRPOConfig, ends: Sequence[int] = ()) -> SamplingSpec:
    """How TRL's config wants completions sampled; without a seed, which the bridge gives to each call.

    Args:
        args: of the trainer.
        ends: tokens that end a completion for TRL; the engine knows those of the base alone.
    """
    extra: Mapping[str, Any] = args.generation_kwargs or {}
    return SamplingSpec(
        max_tokens=args.max_new_tokens if hasattr(args, "max_new_tokens") else args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=0.0 if args.min_p is None else args.min_p,
        repetition_penalty=args.repetition_penalty,
        regex=args.vllm_structured_outputs_regex,
        extra=dict(extra),
        stop_token_ids=tuple(ends),
    )


def _is_set(args: GRPOConfig, name: str) -> bool:
    """The config has the field, and it differs from its default."""
    field = next((f for f in fields(args) if f.name == name), None)
    if field is None:
        return False
    default = field.default if field.default is not MISSING else None
    return getattr(args, name) != default


def autocast_dtype(args: Any) -> torch.dtype | None:
    """In which dtype the trainer's products are made under autocast; `None` without it, as for fp16 on a CPU."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 and args.device.type != "cpu" else None
