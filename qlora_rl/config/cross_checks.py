"""Fields that are right alone and wrong together. Only values that differ from their default count as said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from qlora_rl.config.findings import Finding, show
from qlora_rl.config.rewards import column_of
from qlora_rl.config.schema import TABLES, Adapter, RunConfig, Table, applies, options
from qlora_rl.data.files import is_file, known_columns
from qlora_rl.data.known import check_subset
from qlora_rl.data.load import column_problems, columns_after, teacher_problems
from qlora_rl.engine.started import STARTED, is_here, is_url
from qlora_rl.methods import AHEAD, METHODS, TAUGHT, select

_ENGINE = ("base_compute", "max_num_seqs", "kv_cache_gib", "enforce_eager", "enable_prefix_caching", "vllm")
_TABLES = tuple(name for name in TABLES if name != "rewards")
_ADAPTERS_ONLY = select(lambda method: not method.trains_all)
_LORA = tuple(name for name in options(Adapter) if name not in ("kind", "start_from", "dtype"))


class _Rule(NamedTuple):
    """What cannot be said together.

    Attributes:
        table: of the fields.
        fields: each of which is wrong where it is said, and
        when: this is so.
        text: why, and the way out; `{c}` is the run.
    """

    table: str
    fields: tuple[str, ...]
    when: Callable[[RunConfig], Any]
    text: str


_RULES = (
    _Rule(
        "base",
        ("compute_dtype",),
        lambda c: c.base.quant != "none" and c.base.compute_dtype == "float32",
        "vLLM's 4-bit kernels (quant = {c.base.quant!r}) do not compute in float32. Use 'bfloat16'",
    ),
    _Rule(
        "base",
        ("calibrate",),
        lambda c: c.base.quant == "none" and c.base.calibrate is not False,
        "chooses 4-bit codes, and quant = 'none' has none. Remove it",
    ),
    _Rule(
        "base",
        ("revision",),
        lambda c: c.base.model.startswith("/"),
        "applies to models on the hub, and model names a directory. Remove it",
    ),
    _Rule(
        "adapter",
        _LORA,
        lambda c: c.adapter.start_from is not None,
        "cannot be combined with start_from, whose adapter has its own. Remove one of them",
    ),
    _Rule(
        "adapter",
        (*_LORA, "start_from"),
        lambda c: c.adapter.kind == "none",
        "cannot be combined with kind = 'none', which trains no adapter. Remove one of them",
    ),
    _Rule(
        "adapter",
        ("kind",),
        lambda c: c.adapter.kind == "none" and c.base.quant != "none",
        "'none' trains the base itself, and a 4-bit base cannot be trained. Set [base] quant = 'none'",
    ),
    _Rule(
        "adapter",
        ("kind",),
        lambda c: c.adapter.kind == "none" and c.method in _ADAPTERS_ONLY,
        "method = {c.method!r} trains adapters only. Use kind = 'lora'",
    ),
    _Rule(
        "adapter",
        ("kind",),
        lambda c: c.adapter.kind == "none" and c.method not in _ADAPTERS_ONLY and c.sync.how != "weights",
        "with 'none' all weights are trained and have to be synced. Set [sync] how = 'weights'",
    ),
    _Rule(
        "teacher",
        ("adapter",),
        lambda c: c.teacher.model is not None or c.teacher.url is not None,
        "is on the student's base, and model or url names another teacher. Remove one of them",
    ),
    _Rule(
        "teacher",
        ("adapter",),
        lambda c: (c.teacher.adapter == "policy" or (c.teacher.adapter == "none" and c.adapter.start_from is None))
        and not c.teacher.has_prompt,
        "{c.teacher.adapter!r} says what the student says, and nothing can be learned. Give it more to read: prompt, "
        "prompt_template or system_prompt",
    ),
    _Rule(
        "teacher",
        ("quant",),
        lambda c: c.teacher.model is None or c.teacher.url is not None,
        "is that of a model in this process, and there is none. Remove it",
    ),
    _Rule(
        "teacher",
        ("top_k", "api_key_file"),
        lambda c: c.teacher.url is None,
        "is asked of a server, and there is no url. Remove it",
    ),
    _Rule(
        "train",
        ("temperature",),
        lambda c: c.teacher.url is not None and c.train["temperature"] != 1,
        "a teacher at a server says what it finds likeliest at temperature 1. Remove it",
    ),
    _Rule(
        "teacher",
        ("prompt_template",),
        lambda c: c.teacher.prompt is not None,
        "makes what the teacher reads, and prompt names it, too. Remove one of them",
    ),
    _Rule(
        "teacher",
        ("system_prompt",),
        lambda c: c.data.format == "plain",
        "a plain prompt is not rendered by a chat template. Set [data] format = 'chat', or use prompt_template",
    ),
    _Rule(
        "run",
        ("gpu_memory",),
        lambda c: c.adapter.kind == "none",
        "the memory of a run with [adapter] kind = 'none' cannot be planned. Remove it",
    ),
    _Rule(
        "sync",
        ("how",),
        lambda c: c.sync.how == "lora_adapter" and (c.adapter.use_dora or c.adapter.modules_to_save),
        "an adapter with use_dora or modules_to_save cannot be synced alone, as 'lora_adapter' asks. Use 'weights' or "
        "'auto'",
    ),
    _Rule(
        "rollout",
        _ENGINE,
        lambda c: is_url(c.rollout.where),
        "a server that runs already (where is a URL) got this when it was started. Remove it here",
    ),
    _Rule(
        "rollout",
        ("api_key_file",),
        lambda c: c.rollout.where in STARTED,
        "only a server needs a key, and where = {c.rollout.where!r}. Remove it",
    ),
    _Rule(
        "rollout",
        ("vllm",),
        lambda c: c.rollout.where == "server",
        "works with where = 'colocate' and where = 'ray' only. Remove it, or change where",
    ),
    _Rule(
        "rollout",
        ("replicas", "ray_address", "ray_options"),
        lambda c: c.rollout.where != "ray",
        "belongs to where = 'ray', and where = {c.rollout.where!r}. Remove it",
    ),
    _Rule(
        "rollout",
        ("share_base",),
        lambda c: not is_here(c.rollout.where) and c.rollout.share_base is True,
        "with where = {c.rollout.where!r} another process holds the engine's base, and nothing can be shared. "
        "Remove it",
    ),
    _Rule(
        "sync",
        ("dir",),
        lambda c: not is_here(c.rollout.where) and c.sync.dir is not None,
        "with where = {c.rollout.where!r} adapters are sent, and written into no directory of yours. Remove it",
    ),
    _Rule(
        "train",
        ("vllm_enable_sleep_mode",),
        lambda c: c.method in AHEAD and c.train["vllm_enable_sleep_mode"] is True,
        "the engine of method = {c.method!r} generates all the time and cannot sleep. Remove it",
    ),
    _Rule(
        "train",
        ("eval_strategy",),
        lambda c: c.data.eval is None and c.train["eval_strategy"] != "no",
        "{c.train[eval_strategy]!r} needs evaluation data. Set [data] eval, or remove it",
    ),
    _Rule(
        "data",
        ("split", "subset", "revision"),
        lambda c: _is_local(c.data.train),
        "applies to datasets on the hub, and train names a file. Remove it",
    ),
    _Rule(
        "data",
        ("eval_split",),
        lambda c: _is_local(c.data.eval),
        "applies to datasets on the hub, and eval names a file. Remove it",
    ),
    _Rule(
        "data",
        ("prompt_template",),
        lambda c: "prompt" in c.data.columns,
        "makes the column prompt, and columns does so, too. Remove one of them",
    ),
    _Rule(
        "data",
        ("columns",),
        lambda c: c.data.images in c.data.columns.values(),
        "{c.data.images!r} is named by [data] images already, and becomes the column images. Remove it here",
    ),
    _Rule(
        "data",
        ("system_prompt", "chat_template_kwargs"),
        lambda c: c.data.format == "plain",
        "a plain prompt is not rendered by a chat template. Set [data] format = 'chat', or remove this field",
    ),
    _Rule(
        "data",
        ("images",),
        lambda c: c.data.format == "plain",
        "images are parts of chat messages. Set [data] format = 'chat'",
    ),
    *(
        _Rule(
            table,
            ("use",),
            lambda c: c.data.format == "plain",
            "tool calls are parts of chat messages. Set [data] format = 'chat'",
        )
        for table in ("tools", "environment")
    ),
)


def check_together(config: RunConfig) -> list[Finding]:
    """Everything that contradicts, of what is right alone."""
    said = {name: getattr(config, name).changed() for name in _TABLES} | {"train": config.train}
    found = [
        Finding(f"[{rule.table}] {name}", rule.text.format(c=config))
        for rule in _RULES
        for name in rule.fields
        if name in said[rule.table] and rule.when(config)
    ]
    return [*_of_method(config), *found, *_columns(config)]


def _is_local(files: str | list[str] | None) -> bool:
    """It names files: not a dataset of the hub, and not nothing."""
    return any(is_file(each) or each.startswith("/") for each in _first(files))


def _first(files: str | list[str] | None) -> list[str]:
    return (files[:1] if isinstance(files, list) else [files]) if files else []


def _of_method(config: RunConfig) -> Iterator[Finding]:
    """What the method does not know, or cannot do without."""
    if not config.method:
        return
    for table in _TABLES:
        held: Table = getattr(config, table)
        known = options(type(held))
        for name in held.changed():
            if not applies(known[name], config.method):
                methods = ", ".join(known[name]["methods"])
                text = f"belongs to {methods}, not to method = '{config.method}'. Remove it"
                yield Finding(f"[{table}] {name}", text)
    if config.method in TAUGHT and config.teacher.adapter is config.teacher.model is config.teacher.url is None:
        yield Finding(
            "[teacher]",
            f"is missing: method = '{config.method}' learns from a teacher. Write [teacher] and adapter (a run, 'none' "
            "or 'policy'), model or url",
        )
    scores = METHODS[config.method].scores
    if config.rewards and not scores:
        yield Finding("[[rewards]]", f"method = '{config.method}' scores no completions. Remove this table")
    if scores and not config.rewards and config.environment.use is None:  # which may have get_reward
        yield Finding(
            "[[rewards]]",
            f"is missing: method = '{config.method}' scores completions. Write [[rewards]] and use = 'exact_match'",
        )


def _columns(config: RunConfig) -> Iterator[Finding]:
    """What the fields of [data], the method and the rewards ask of columns that a dataset does not have."""
    data = config.data
    for place, files in (("train", data.train), ("eval", data.eval)):
        for each in _first(files) if not _is_local(files) else ():
            if wrong := check_subset(each, data.subset):
                yield Finding("[data] subset", wrong)
        there = known_columns(files)
        if there is None:
            continue
        problems = [(f"[data] {field}", text) for field, text in column_problems(data, there)]
        problems += [(f"[teacher] {field}", text) for field, text in teacher_problems(config.teacher, data, there)]
        yield from (Finding(field, f"{place}: {text}") for field, text in problems)
        if problems:
            continue
        after = sorted(columns_after(data, there))
        # Of a whole text, or of tokens, no messages are made.
        whole = ("text", "input_ids") if data.format == "chat" else ()
        ways = [way for way in (METHODS[config.method].columns if config.method else ()) if way[0] not in whole]
        if ways and not any(set(way) <= set(after) for way in ways):
            yield Finding(
                f"[data] {place}",
                f"method = '{config.method}' needs the columns {' or '.join(map(' and '.join, ways))}; there are "
                f"{', '.join(after)}. Rename them with [data] columns",
            )
        for reward in config.rewards if place == "train" else ():
            column = column_of(reward.use, reward.arguments)
            if column is not None and column not in after:
                yield Finding(
                    "[[rewards]] arguments",
                    f"{show(reward.use)} compares with the column {show(column)}; there are {', '.join(after)}. "
                    "Name another: arguments = { column = '...' }",
                )
