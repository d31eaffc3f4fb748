"""A checked `RunConfig` becomes a trainer, and is trained."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import qlora_rl
from qlora_rl.adapter.load import make_lora, open_adapter
from qlora_rl.base.checkpoint import PreparedBase, load_base, prepare_base
from qlora_rl.base.hub import hub_reachable, is_local, why_missing
from qlora_rl.base.model_classes import adaptable, takes_images
from qlora_rl.base.quant import QuantSpec
from qlora_rl.base.unsupported_configs import check_positions
from qlora_rl.config.directories import RESOLVED, source_line, source_of
from qlora_rl.config.paths import all_uses, split_reward
from qlora_rl.config.read import resolved_toml
from qlora_rl.config.rewards import digest, tell_program_tests
from qlora_rl.config.schema import TABLES, TEACHERS, RunConfig, applies, options
from qlora_rl.config.text import value
from qlora_rl.config.trl_fields import make_args
from qlora_rl.contracts import IMAGES
from qlora_rl.data.calibration import calibration_rows
from qlora_rl.data.files import is_file, known_columns
from qlora_rl.data.load import TEMPLATE_COLUMN, columns_after, load_data
from qlora_rl.data.rows import TEACHER_COLUMN
from qlora_rl.distributed import join, ranks
from qlora_rl.engine.started import is_here
from qlora_rl.errors import AdapterRejectedError, ConfigConflictError, NotYetSupportedError, collected
from qlora_rl.memory.shape import check_supported, model_and_adapter, read_config, skeleton, stored_spec
from qlora_rl.methods import METHODS
from qlora_rl.rewards.load import load_reward
from qlora_rl.stages import begin
from qlora_rl.train.setup.tools import ENVIRONMENT_COLUMN, check_template, load_tools

logger = logging.getLogger(__name__)

_DIGEST = "# sha256 of "
_OURS = {"kind", "start_from", "dtype"}
_LOOKED_AT = 1000  # rows of a dataset, by `check_rows`
# By which table and field a file says an argument that our trainers add to TRL's; of which methods, the schema says.
_ARGUMENTS = {
    "adapter_dtype": ("adapter", "dtype"),
    "existing_run": ("run", "existing"),
    "gpu_memory": ("run", "gpu_memory"),
    "remove_padding": ("run", "remove_padding"),
    "routing_replay": ("run", "routing_replay"),
    "teacher_adapter": ("teacher", "adapter"),
    "teacher_url": ("teacher", "url"),
    "teacher_top_k": ("teacher", "top_k"),
    "teacher_key_file": ("teacher", "api_key_file"),
    "max_staleness": ("rollout", "max_staleness"),
    "rollout_threads": ("rollout", "rollout_threads"),
    "rollout": ("rollout", "where"),
    "api_key_file": ("rollout", "api_key_file"),
    "share_base": ("rollout", "share_base"),
    "sync": ("sync", "how"),
    "sync_dir": ("sync", "dir"),
    "canary_every": ("sync", "canary_every"),
    "on_mismatch": ("sync", "on_mismatch"),
    "allow_base_mismatch": ("sync", "allow_base_mismatch"),
}


def launch(config: RunConfig, begun: Callable[[Path], None] = lambda directory: None, file: Path | None = None) -> Path:
    """Train; what the rewards and the data hold is looked at before the base is made.

    Args:
        config: checked.
        begun: is given the run directory, on the first process, when the run has begun.
        file: that the run is of, which is recorded; a run that goes on stays that of its first one.

    Returns:
        The run directory, with the resolved configuration in `run.toml`.

    Raises:
        ConfigConflictError: a reward file or a dataset cannot be read.
        RewardFunctionError: a reward cannot be called with what TRL gives it.
        AdapterRejectedError: the adapter to start from is damaged, or was trained on another base.
        MemoryBudgetError: it cannot fit into [run] gpu_memory.
        NotYetSupportedError: this version does not train such models.
    """
    from qlora_rl.train.metrics.rewards import check_signature
    from qlora_rl.train.setup.kto import mixed_completions

    trainer_class = find_trainer(config.method)
    check_model(config)
    rewards = [load_reward(reward.use, reward.arguments) for reward in config.rewards]
    tools = load_tools(config.tools.use or [], config.environment.use)
    args = trl_config(config)
    begin("reading the data")
    has_field = hasattr(args, TEMPLATE_COLUMN)
    train, held_out = load_data(config.data, has_template_field=has_field, teacher=config.teacher)
    if config.method == "kto":
        train, held_out = (mixed_completions(rows, config.run.seed) for rows in (train, held_out))
    if config.data.images is not None:
        check_image_counts(config, train, held_out)
    # Before the base is made: is there a template, and does it know tools and these messages?
    if config.data.format == "chat":
        check_talks(config, load_tokenizer(config), train, held_out)
    for reward in rewards:
        check_signature(reward, None if config.environment.use else train.column_names)
    tell_program_tests(config.rewards, train)
    for rows in (train, held_out):
        if (
            isinstance(config.environment.use, dict)
            and rows is not None
            and ENVIRONMENT_COLUMN not in rows.column_names
        ):
            raise ConfigConflictError(
                f"loading the data: [environment] use names several, and no column {ENVIRONMENT_COLUMN} chooses among "
                "them; there are "
                f"{', '.join(rows.column_names)}. Rename one: [data] columns = {{ {ENVIRONMENT_COLUMN} = '...' }}"
            )
    import torch

    torch.manual_seed(config.run.seed)  # the start of the adapter
    # Under a launcher: what one process has prepared, the others of its machine find.
    model, peft_config = join(args.ddp_timeout).in_turn(lambda: _model(config, args), "preparing the base")
    arguments = {
        "model": model,
        "args": args,
        "train_dataset": train,
        "eval_dataset": None if args.eval_strategy == "no" else held_out,  # otherwise it is for `qlora-rl eval`
        "peft_config": peft_config,
        **({"reward_funcs": rewards} if rewards else {}),
        **tools,
        **trainer_arguments(config),
        **({} if config.teacher.url or not config.teacher.model else {"teacher_model": make_teacher(config).path}),
    }
    out = Path(config.run.dir)
    for each in changed_files(config, out) if config.run.existing == "resume" else []:
        logger.warning(
            "%s has changed since the run began: from here on it is trained with what the file says now", each
        )
    with trainer_class(**arguments) as trainer:
        if ranks().is_first:
            before = source_of(config.run.dir) if config.run.existing in ("resume", "continue") else None
            (out / RESOLVED).write_text(record(config, before or file), encoding="utf-8")
            begun(out)
        resume = args.resume_from_checkpoint
        trainer.train(**({"resume_from_checkpoint": resume} if resume else {}))
    return out


def check_model(config: RunConfig) -> str:
    """Look at the model's config, before anything is loaded.

    Returns:
        Why it could not be looked at; empty where it was.

    Raises:
        ConfigConflictError: there is no such model, it cannot be read, it is no language model, it takes no images and
            [data] has some, or it has no module that the adapter asks for.
        NotYetSupportedError: a mixture of experts or a model for images of an unsupported type, one of which vLLM
            computes another function, or an adapter on experts or a vision tower that an engine would have to serve.
    """
    from qlora_rl.adapter.shape import warn_of_unmatched

    held = config.base
    try:
        found = read_config(held.model, trust_remote_code=held.trust_remote_code)
    except ConfigConflictError:
        if is_local(held.model) or hub_reachable():
            raise
        why = f"there is no directory {held.model}, and no cached hub model of this name; the hub cannot be reached"
        return f"the model ({why})"
    length = config.train.get("vllm_max_model_length") if METHODS[config.method].samples else None
    length = None if length == "none" else length
    check_supported(found, length)
    check_positions(found, length)
    if config.data.images is not None and not takes_images(found):
        raise ConfigConflictError(
            f"reading the config: [data] images = {config.data.images!r}, and {held.model} takes none. Leave it out, "
            "or use a vision-language model."
        )
    targets = config.adapter.target_modules
    if (
        METHODS[config.method].samples
        and config.adapter.start_from is None
        and config.adapter.kind == "lora"
        and (better := adaptable(found, targets)) != targets
        and ((has_experts := isinstance(better, list)) or config.sync.how != "weights")
        and not (has_experts and held.quantize_experts)
    ):
        raise NotYetSupportedError(
            f"reading the config: {held.model} is a "
            f"{'mixture of experts' if has_experts else 'vision-language model'}, and target_modules = {targets!r} "
            f"also adapts {'experts and routers' if has_experts else 'the vision tower'}, whose adapters the engine "
            f"does not apply. Adapt the {'attention' if has_experts else 'language model'} alone: target_modules = "
            f"{value(better)}"
            + (
                ", or hold the experts in 4 bits: [base] quantize_experts = true"
                if has_experts
                else ", or send full weights: [sync] how = 'weights'"
            )
        )
    if held.trust_remote_code and hasattr(found, "auto_map"):
        return "the modules of the model, which its own code makes"
    if (lora := _new_lora(config)) is None:
        skeleton(found)
    else:
        _, shapes = model_and_adapter(found, stored_spec(held.model, quantize_experts=held.quantize_experts), lora)
        warn_of_unmatched(lora, shapes)
    return ""


def check_image_counts(config: RunConfig, *datasets: Any) -> None:
    """Reject rows with more images than the engine takes.

    Raises:
        ConfigConflictError: names the first.
    """
    from qlora_rl.engine.options import images_a_prompt

    most = images_a_prompt(config.rollout.vllm.get("limit_mm_per_prompt"))
    for rows in filter(None, datasets):
        for number, images in enumerate(rows.with_format("arrow")[IMAGES]):
            if len(images) > most:
                raise ConfigConflictError(
                    f"loading the data: [data] images: row {number} has {len(images)} images, and the engine takes "
                    f"{most} a prompt. Remove the row, or set "
                    f"[rollout] vllm = {{ limit_mm_per_prompt = {{ image = {len(images)}, video = 0 }} }}"
                )


def check_talks(config: RunConfig, tokenizer: Any, *datasets: Any) -> None:
    """The chat template takes the messages of the rows.

    Raises:
        ConfigConflictError: names the row.
    """
    from qlora_rl.train.setup.dataset_checks import check_messages, rendered

    if config.data.images is None:  # images become parts of the messages
        is_online = METHODS[config.method].samples
        if config.method == "sft":
            datasets = (*rendered(config.train.get("dataset_kwargs"), *datasets),)
        if config.teacher.has_prompt:  # what the teacher reads is a prompt, too
            read = (rows.select_columns([TEACHER_COLUMN]) for rows in datasets if rows is not None)
            datasets = (*datasets, *(rows.rename_column(TEACHER_COLUMN, "prompt") for rows in read))
        check_messages(tokenizer, *datasets, given=config.data.chat_template_kwargs, is_online=is_online)


def check_rows(config: RunConfig) -> bool:
    """Put the first rows of files through the chat template.

    Returns:
        They were looked at: it is a chat, of files, and the tokenizer is at hand.

    Raises:
        ConfigConflictError: a row cannot be read, or the template does not take it.
    """
    data = config.data
    if data.format != "chat" or data.images is not None or not all(map(is_file, _datasets(config))):
        return False
    try:
        tokenizer = load_tokenizer(config)
    except ConfigConflictError:
        if is_local(config.base.model):
            raise
        return False
    few = data.model_copy(update={"limit": min(data.limit or _LOOKED_AT, _LOOKED_AT)})
    check_talks(config, tokenizer, *load_data(few, has_template_field=True, teacher=config.teacher))
    return True


def unused_template(config: RunConfig) -> str:
    """Said where a model has a chat template and [data] does not use it; empty elsewhere, and where the tokenizer
    cannot be read.

    Rows of whole texts, and of messages, which TRL puts through the template itself, are no case of it.
    """
    data = config.data
    there = columns_after(data, known_columns(data.train) or ())
    if data.format != "plain" or {"text", "messages", "input_ids"} & set(there):
        return ""
    try:
        tokenizer = load_tokenizer(config)
    except ConfigConflictError:  # a run says it
        return ""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    return (
        f"{config.base.model} has a chat template, and [data] format = 'plain' does not apply it: prompts are "
        "continued as bare text. An instruct model "
        "expects format = 'chat'."
    )


def unchecked(config: RunConfig, has_rows: bool = False) -> list[str]:
    """What of a run `check_model`, the check of its file and, where it `has_rows`, `check_rows` have not looked at, for
    people."""
    first = f"first {_LOOKED_AT:,}" if has_rows else "first"
    rows = [
        f"rows of {Path(each).name} after the {first}" if is_file(each) else f"the dataset {each}"
        for each in _datasets(config)
    ]
    rewards = [f"what {Path(path).name} does" for each in config.rewards if (path := split_reward(each.use)[0])]
    fits = f"whether it fits (`qlora-rl plan {shlex.quote(config.base.model)}`)"
    return list(dict.fromkeys([*rows, *rewards, "the weights" if has_rows else "the weights and the tokenizer", fits]))


def _datasets(config: RunConfig) -> list[str]:
    return [*all_uses(config.data.train), *all_uses(config.data.eval)]


def find_trainer(method: str) -> type:
    """The trainer of a method."""
    return getattr(qlora_rl, METHODS[method].trainer)


def trl_config(config: RunConfig) -> Any:
    """TRL's config of the run: `[train]`, and what has its place elsewhere."""
    from qlora_rl.train.setup.settings import config_class

    kind = config_class(config.method)
    known = {each.name for each in fields(kind)}
    own: dict[str, Any] = {"output_dir": config.run.dir, "seed": config.run.seed}
    if config.base.trust_remote_code and "trust_remote_code" in known:
        own["trust_remote_code"] = True
    if config.base.attn_implementation and config.adapter.start_from is None:
        own["model_init_kwargs"] = {"attn_implementation": config.base.attn_implementation}
    if any(reward.weight != 1 for reward in config.rewards):
        own["reward_weights"] = [reward.weight for reward in config.rewards]
    if config.data.chat_template_kwargs and TEMPLATE_COLUMN in known:
        own[TEMPLATE_COLUMN] = config.data.chat_template_kwargs
    return make_args(kind, config.train, **own)


def load_tokenizer(config: RunConfig) -> Any:
    """The model's tokenizer; its processor where the data has images.

    Raises:
        ConfigConflictError: the data is for a chat template, and it has none, or tools are for one that has no place
            for them.
    """
    from transformers import AutoProcessor, AutoTokenizer

    held = config.base
    kind = AutoTokenizer if config.data.images is None else AutoProcessor
    try:
        if not is_local(held.model):
            hub_reachable()
        tokenizer = kind.from_pretrained(held.model, revision=held.revision, trust_remote_code=held.trust_remote_code)
    except Exception as error:
        why = (
            f"{why_missing(held.model)} ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no reason'})"
            if not is_local(held.model)
            else f"{held.model} has none that can be read: {error}"
        )
        raise ConfigConflictError(f"loading the tokenizer: {why}.") from error
    if config.data.format == "chat" and not tokenizer.chat_template:
        raise ConfigConflictError(
            f"reading the run: [data] format = 'chat', and {held.model} has no chat template. Use an instruct model, "
            "or format = 'plain'."
        )
    if config.tools.use or config.environment.use:
        check_template(tokenizer, held.model)
    return tokenizer


def trainer_arguments(config: RunConfig) -> dict[str, Any]:
    """Arguments that our trainers add to TRL's."""
    method, teacher, rollout = METHODS[config.method], config.teacher, config.rollout
    found: dict[str, Any] = {
        name: getattr(getattr(config, table), field)
        for name, (table, field) in _ARGUMENTS.items()
        if applies(options(TABLES[table])[field], config.method)
    }
    if method.is_taught:
        found["teacher_prompt"] = TEACHER_COLUMN if teacher.has_prompt else None
        if teacher.url is not None:
            found["teacher_model"] = teacher.model
    if not method.samples:
        return found
    changed = rollout.changed().items()
    engine = {name: value for name, value in changed if ("rollout", name) not in _ARGUMENTS.values()}
    if is_here(rollout.where) and config.train.get("vllm_enable_sleep_mode") is False:
        engine["enable_sleep"] = (
            False  # the config alone does not tell it from its default, which leaves it to the plan
        )
    return found | {"engine_options": engine | engine.pop("vllm", {})}


def record(config: RunConfig, file: str | Path | None = None) -> str:
    """The resolved configuration, what it was made with, and the file that it is of."""
    lines = [
        f"# Settled by qlora_rl {qlora_rl.__version__}. Runs this run again:",
        "#   qlora-rl train run.toml --set run.dir=ANOTHER",
    ]
    lines += [source_line(os.path.realpath(file))] if file is not None else []
    return "\n".join([*lines, *_digests(config), "", resolved_toml(config)])


def changed_files(config: RunConfig, out: Path) -> list[str]:
    """Files of rewards, tools and environments that are others than when the run in `out` was started."""
    if not (out / RESOLVED).is_file():
        return []
    before = [line for line in (out / RESOLVED).read_text(encoding="utf-8").splitlines() if line.startswith(_DIGEST)]
    known = {line.rpartition(": ")[0] for line in before}
    return [
        line.removeprefix(_DIGEST).rpartition(": ")[0]
        for line in _digests(config)
        if line not in before and line.rpartition(": ")[0] in known
    ]


def _digests(config: RunConfig) -> list[str]:
    named = [*(each.use for each in config.rewards), *all_uses(config.tools.use), *all_uses(config.environment.use)]
    return [f"{_DIGEST}{use}: {found}" for use in dict.fromkeys(named) if (found := digest(use))]


def _new_lora(config: RunConfig) -> Any:
    """The adapter to make; `None` where there is one already, or none is trained."""

    adapter = config.adapter
    if adapter.kind != "lora" or adapter.start_from is not None:
        return None
    return make_lora(adapter.model_dump(exclude=_OURS))


def _spec(config: RunConfig) -> QuantSpec:
    held = config.base
    skipped = tuple(sorted(held.skip_modules))
    return QuantSpec(
        held.quant,
        held.double_quant,
        held.blocksize,
        held.compute_dtype,
        skipped,
        held.quantize_experts,
        held.quantize_tower,
    )


def make_base(config: RunConfig) -> PreparedBase:
    """[base] of a run, prepared where it is not yet."""

    held, spec = config.base, _spec(config)
    return prepare_base(
        held.model,
        spec.quant_type,
        double_quant=spec.double_quant,
        blocksize=spec.blocksize,
        compute_dtype=spec.compute_dtype,
        skip_modules=spec.skip_modules,
        quantize_experts=spec.quantize_experts,
        quantize_tower=spec.quantize_tower,
        revision=held.revision,
        trust_remote_code=held.trust_remote_code,
        calibrate=calibration_rows(held.calibrate) if isinstance(held.calibrate, str) else held.calibrate,
    )


def make_teacher(config: RunConfig) -> PreparedBase:
    """The second model of [teacher], prepared where it is not yet."""

    return prepare_base(
        config.teacher.model,
        config.teacher.quant,
        compute_dtype=config.base.compute_dtype,
        trust_remote_code=config.base.trust_remote_code,
    )


def _of_method(config: RunConfig) -> dict[str, Any]:
    """What the memory estimate is told of a method that is not GRPO's."""
    if not METHODS[config.method].is_taught:
        return {}
    from qlora_rl.memory.plan import teacher_fields

    teacher, top_k = config.teacher, config.teacher.top_k if config.teacher.url else 0
    asked: dict[str, Any] = {"top_k": top_k, "adapter": None if teacher.adapter in TEACHERS else teacher.adapter}
    if teacher.model is not None and not top_k:
        quant = None if teacher.quant == "nf4" else teacher.quant
        asked |= {"model": teacher.model, "spec": stored_spec(teacher.model, quant)}
    return {"method": config.method, **teacher_fields(**asked, trust_remote_code=config.base.trust_remote_code)}


def _model(config: RunConfig, args: Any) -> tuple[Any, Any]:
    """What the trainer takes as model= and peft_config=."""
    from qlora_rl.adapter.initialization import apply_start
    from qlora_rl.adapter.verdict import judge_adapter
    from qlora_rl.train.setup.memory_budget import budget_of

    held, adapter = config.base, config.adapter
    spec, lora, method = _spec(config), _new_lora(config), METHODS[config.method]
    if lora is not None and method.is_planned and config.run.gpu_memory != "auto":
        quantization = spec.transformers_config() if spec.is_4bit else {"load_in_4bit": False}
        quantization |= {"quantize_experts": spec.quantize_experts, "quantize_tower": spec.quantize_tower}
        budget_of(
            held.model,
            args,
            trainer_arguments(config),
            peft_config=apply_start(lora)[0],
            quantization_config=quantization,
            rests=not method.is_ahead,
            of_method=lambda: _of_method(config),
        )
    base = make_base(config)
    if adapter.start_from is None:
        return base, lora
    doing = f"reading [adapter] start_from = {adapter.start_from!r}"
    try:
        verdict = judge_adapter(adapter.start_from, base=base.path)
    except AdapterRejectedError as error:
        raise AdapterRejectedError(f"{doing}: {error}") from error
    if verdict.kind == "reject":
        raise collected(doing, verdict.reasons, AdapterRejectedError)
    options: dict[str, Any] = {
        "trust_remote_code": held.trust_remote_code,
        "attn_implementation": held.attn_implementation,
    }
    return open_adapter(load_base(base, **options), adapter.start_from), None
