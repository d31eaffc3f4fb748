"""Fields that are right alone and wrong together. Only values that differ from their default count as said."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from qlora_rl.config.data import check_subset, columns_after, placeholders, taken_names
from qlora_rl.config.findings import Finding, show
from qlora_rl.config.paths import has_trained, is_file, next_of
from qlora_rl.config.rewards import column_of
from qlora_rl.config.schema import METHODS, TABLES, TRAIN, Reward, default, options

_ENGINE = ("base_compute", "max_num_seqs", "kv_cache_gib", "enforce_eager", "enable_prefix_caching", "vllm")
_LORA_ONLY = ("kind", "start_from", "dtype")


class _Said:
    """The values of a document, field by field, and the defaults; types are checked elsewhere."""

    def __init__(self, document: Mapping[str, Any]):
        self._document = document

    def table(self, name: str) -> Mapping[str, Any]:
        held = self._document.get(name, {})
        return held if isinstance(held, Mapping) else {}

    def get(self, table: str, name: str) -> Any:
        found = next(each for each in fields(TABLES[table]) if each.name == name)
        return self.table(table).get(name, default(found))

    def changed(self, table: str) -> list[str]:
        """Fields that are said and differ from their default."""
        known = {each.name: default(each) for each in fields(TABLES[table])}
        return [name for name, value in self.table(table).items() if name in known and value != known[name]]

    @property
    def method(self) -> str:
        method = self._document.get("method")
        return method if isinstance(method, str) and method in METHODS else ""

    @property
    def rewards(self) -> list[Any]:
        held = self._document.get("rewards", [])
        return held if isinstance(held, list) else []


def check_together(document: Mapping[str, Any]) -> list[Finding]:
    """Everything that contradicts."""
    said = _Said(document)
    return [finding for rule in _RULES for finding in rule(said)]


def check_directory(document: Mapping[str, Any], usual: str) -> list[Finding]:
    """What is in the way of a run in its directory.

    Args:
        document: of the run.
        usual: the directory where [run] dir is not said.
    """
    said = _Said(document)
    out = said.table("run").get("dir", usual)
    if not isinstance(out, str):
        return []
    if os.path.exists(out) and not os.path.isdir(out):
        return [Finding("[run] dir", f"{out} is a file")]
    # Rank 0 writes it; other ranks may be on other machines.
    if os.environ.get("RANK", "0") == "0" and (reason := _why_not_writable(out)):
        return [
            Finding(
                "[run] dir", f"{out} cannot be {'written' if os.path.isdir(out) else 'made'}: {reason}. Choose another"
            )
        ]
    if not has_trained(out) or said.get("run", "existing") not in ("auto", "reject"):
        return []
    return [
        Finding(
            "[run] dir",
            f"{out} holds a run. Choose another (--set run.dir={shlex.quote(next_of(out))}), or set [run] existing = "
            "'resume' (go on from its last checkpoint), "
            "'overwrite', or 'continue' (begin again at step 1, after its lines); on the command line: --set "
            "run.existing=overwrite",
        )
    ]


def _why_not_writable(out: str) -> str:
    """What is wrong with the directory, or with the first above it that there is; empty where nothing is."""
    there = os.path.abspath(out)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        return f"{there} is no directory"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} is not writable"


def _of_other_methods(said: _Said) -> Iterator[Finding]:
    if not said.method:
        return
    method = METHODS[said.method]
    for table, held in TABLES.items():
        if held is Reward:
            continue
        for name in said.changed(table):
            if said.method not in (options(held)[name][1].methods or METHODS):
                yield Finding(
                    f"[{table}] {name}",
                    f"belongs to {', '.join(options(held)[name][1].methods)}, not to method = "
                    f"'{said.method}'. Remove it",
                )
    if said.rewards and not method.scores:
        yield Finding("[[rewards]]", f"method = '{said.method}' scores no completions. Remove this table")
    if method.scores and not said.rewards and said.get("environment", "use") is None:  # which may have get_reward
        yield Finding(
            "[[rewards]]",
            f"is missing: method = '{said.method}' scores completions. Write [[rewards]] and use = 'exact_match'",
        )


def _adapter(said: _Said) -> Iterator[Finding]:
    start, kind = said.get("adapter", "start_from"), said.get("adapter", "kind")
    lora = [name for name in said.changed("adapter") if name not in _LORA_ONLY]
    if start is not None:
        for name in lora:
            yield Finding(
                f"[adapter] {name}", "cannot be combined with start_from, whose adapter has its own. Remove one of them"
            )
    if kind == "none":
        for name in [*lora, *(["start_from"] if start is not None else [])]:
            yield Finding(
                f"[adapter] {name}",
                "cannot be combined with kind = 'none', which trains no adapter. Remove one of them",
            )
        if said.get("base", "quant") != "none":
            yield Finding(
                "[adapter] kind",
                "'none' trains the base itself, and a 4-bit base cannot be trained. Set [base] quant = 'none'",
            )
        if said.get("run", "gpu_memory") != "auto":
            yield Finding(
                "[run] gpu_memory", "the memory of a run with [adapter] kind = 'none' cannot be planned. Remove it"
            )
        if said.method and not METHODS[said.method].samples:
            yield Finding("[adapter] kind", f"method = '{said.method}' trains adapters only. Use kind = 'lora'")
        elif said.get("sync", "how") != "weights":
            yield Finding(
                "[adapter] kind",
                "with 'none' all weights are trained and have to be synced. Set [sync] how = 'weights'",
            )
    if said.get("sync", "how") == "lora_adapter":
        for name in ("use_dora", "modules_to_save"):
            if said.get("adapter", name):
                yield Finding(
                    "[sync] how",
                    f"an adapter with {name} cannot be synced alone, as 'lora_adapter' asks. Use 'weights' or 'auto'",
                )


def _base(said: _Said) -> Iterator[Finding]:
    if said.get("base", "quant") != "none" and said.get("base", "compute_dtype") == "float32":
        yield Finding(
            "[base] compute_dtype",
            f"vLLM's 4-bit kernels (quant = {show(said.get('base', 'quant'))}) do not compute in float32. Use "
            "'bfloat16'",
        )


def _rollout(said: _Said) -> Iterator[Finding]:
    where = said.get("rollout", "where")
    changed = said.changed("rollout")
    is_url = isinstance(where, list) or (isinstance(where, str) and "://" in where)
    if is_url:
        for name in _ENGINE:
            if name in changed:
                yield Finding(
                    f"[rollout] {name}",
                    "a server that runs already (where is a URL) got this when it was started. Remove it here",
                )
    elif "api_key_file" in changed:
        yield Finding("[rollout] api_key_file", f"only a server needs a key, and where = {show(where)}. Remove it")
    if where == "server" and "vllm" in changed:
        yield Finding(
            "[rollout] vllm", "works with where = 'colocate' and where = 'ray' only. Remove it, or change where"
        )
    if where != "ray":
        for name in ("replicas", "ray_address", "ray_options"):
            if name in changed:
                yield Finding(f"[rollout] {name}", f"belongs to where = 'ray', and where = {show(where)}. Remove it")
    if said.method == "async_grpo" and said.table(TRAIN).get("vllm_enable_sleep_mode") is True:
        yield Finding(
            f"[{TRAIN}] vllm_enable_sleep_mode",
            "the engine of method = 'async_grpo' generates all the time and cannot sleep. Remove it",
        )
    if where != "colocate" and said.get("rollout", "share_base") is True:
        yield Finding(
            "[rollout] share_base",
            f"with where = {show(where)} another process holds the engine's base, and nothing can be shared. Remove it",
        )


def _evaluation(said: _Said) -> Iterator[Finding]:
    strategy = said.table(TRAIN).get("eval_strategy", "no")
    if said.get("data", "eval") is None and strategy != "no":
        yield Finding(
            f"[{TRAIN}] eval_strategy", f"{show(strategy)} needs evaluation data. Set [data] eval, or remove it"
        )


def _hub_only(said: _Said) -> Iterator[Finding]:
    for place, names in (("train", ("split", "subset", "revision")), ("eval", ("eval_split",))):
        files = said.get("data", place)
        first = files[0] if isinstance(files, list) and files else files
        if isinstance(first, str) and (is_file(first) or first.startswith("/")):
            for name in names:
                if name in said.changed("data"):
                    yield Finding(
                        f"[data] {name}", f"applies to datasets on the hub, and {place} names a file. Remove it"
                    )
        elif isinstance(first, str) and (wrong := check_subset(first, said.get("data", "subset"))):
            yield Finding("[data] subset", wrong)
    model = said.get("base", "model")
    if isinstance(model, str) and model.startswith("/") and said.get("base", "revision") is not None:
        yield Finding("[base] revision", "applies to models on the hub, and model names a directory. Remove it")


def _columns(said: _Said) -> Iterator[Finding]:
    names, template = said.get("data", "columns"), said.get("data", "prompt_template")
    if not isinstance(names, Mapping) or not isinstance(template, str | None):
        return
    if not all(isinstance(old, str) for old in names.values()):
        return
    if template is not None and "prompt" in names:
        yield Finding("[data] prompt_template", "makes the column prompt, and columns does so, too. Remove one of them")
        return
    for place in ("train", "eval"):
        files = said.get("data", place)
        before = columns_after(files, {})
        if before is None:
            continue
        unknown = [old for old in names.values() if old not in before]
        for old in unknown:
            yield Finding("[data] columns", f"{place} has no column {show(old)}, but {', '.join(before)}")
        for text in taken_names(names, before):
            yield Finding("[data] columns", f"{place}: {text}")
        if template is not None:
            try:
                wanted = placeholders(template)
            except ValueError:
                continue
            for name in wanted:
                if name not in before:
                    yield Finding(
                        "[data] prompt_template", f"{place} has no column {show(name)}, but {', '.join(before)}"
                    )
                    unknown.append(name)
        after = set(columns_after(files, names) or ()) | ({"prompt"} if template is not None else set())
        if said.method and not unknown and not any(set(each) <= after for each in _ways(said)):
            yield _lacks(said, place, after)
        patterns = said.get("data", "extract")
        for name in patterns if isinstance(patterns, Mapping) and not unknown else ():
            if name not in after:
                yield Finding("[data] extract", f"{place} has no column {show(name)}, but {', '.join(sorted(after))}")
        for reward in said.rewards if place == "train" else []:
            if not isinstance(reward, Mapping) or not isinstance(reward.get("use"), str):
                continue
            given = reward.get("arguments", {})
            column = column_of(reward["use"], given if isinstance(given, Mapping) else {})
            if column is not None and not unknown and column not in after:
                yield Finding(
                    "[[rewards]] arguments",
                    f"{show(reward['use'])} compares with the column {show(column)}; there are "
                    f"{', '.join(sorted(after))}. "
                    "Name another: arguments = { column = '...' }",
                )


def _ways(said: _Said) -> list[Sequence[str]]:
    """The columns that a method can learn from, each way by itself; of a whole text, or of tokens, no messages are
    made."""
    is_chat = said.get("data", "format") == "chat"
    return [each for each in METHODS[said.method].columns if not (is_chat and each[0] in ("text", "input_ids"))]


def _lacks(said: _Said, place: str, there: set[str]) -> Finding:
    ways = " or ".join(" and ".join(each) for each in _ways(said))
    text = (
        f"method = '{said.method}' needs the columns {ways}; there are {', '.join(sorted(there))}. Rename them with "
        "[data] columns"
    )
    return Finding(f"[data] {place}", text)


def _chat(said: _Said) -> Iterator[Finding]:
    if said.get("data", "format") == "plain":
        for name in ("system_prompt", "chat_template_kwargs"):
            if name in said.changed("data"):
                yield Finding(
                    f"[data] {name}",
                    "a plain prompt is not rendered by a chat template. Set [data] format = 'chat', or "
                    "remove this field",
                )


def _images(said: _Said) -> Iterator[Finding]:
    name = said.get("data", "images")
    if not isinstance(name, str):
        return
    if said.get("data", "format") != "chat":
        yield Finding("[data] images", "images are parts of chat messages. Set [data] format = 'chat'")
    names = said.get("data", "columns")
    if isinstance(names, Mapping) and name in names.values():
        yield Finding(
            "[data] columns",
            f"{show(name)} is named by [data] images already, and becomes the column images. Remove it here",
        )
    for place in ("train", "eval"):
        there = columns_after(said.get("data", place), {})
        if there is not None and name not in there:
            yield Finding("[data] images", f"{place} has no column {show(name)}, but {', '.join(there)}")


def _tools(said: _Said) -> Iterator[Finding]:
    for table in ("tools", "environment"):
        if said.get(table, "use") is not None and said.get("data", "format") != "chat":
            yield Finding(f"[{table}] use", "tool calls are parts of chat messages. Set [data] format = 'chat'")


_RULES: tuple[Callable[[_Said], Iterator[Finding]], ...] = (
    _of_other_methods,
    _adapter,
    _base,
    _rollout,
    _evaluation,
    _hub_only,
    _columns,
    _chat,
    _images,
    _tools,
)
