"""Every field of a document by itself: pydantic's findings in our words, and what fields name on disk."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from pydantic import ValidationError

from qlora_rl.adapter.methods import CHANGES_WEIGHTS
from qlora_rl.base.hub import missing_path
from qlora_rl.config import data, rewards
from qlora_rl.config.findings import Finding, elsewhere, misfit, nearest, show, words
from qlora_rl.config.paths import all_uses, is_file, split_reward
from qlora_rl.config.schema import ALIASES, KINDS, SAMPLING, TABLES, Reward, RunConfig, Table, options
from qlora_rl.config.trl_fields import LIMITS

# What others call a way to train, and what comes closest to it here.
_OTHER_METHODS = {
    "ppo": "'grpo' or 'rloo', which need no value model",
    "reinforce": "'rloo'",
    "dapo": "'grpo' with [train] loss_type = 'dapo'",
    "dr_grpo": "'grpo' with [train] loss_type = 'dr_grpo'",
    "gspo": "'grpo' with [train] importance_sampling_level = 'sequence'",
    "ipo": "'dpo' with [train] loss_type = ['ipo']",
    "kto": "'dpo', which needs pairs",
    "orpo": "'dpo'",
    "simpo": "'dpo'",
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

# Where a value stands in a document: ("method",), ("adapter", "r"), ("rewards", 0, "use").
_Way = tuple[Any, ...]


def check_document(document: Mapping[str, Any]) -> tuple[RunConfig, list[Finding]]:
    """What is right of a document, and everything that is wrong with single fields; `[train]` is TRL's to judge.

    Returns:
        The run, with defaults in place of what is wrong ("" where a field has none), and the findings.
    """
    whole: dict[str, Any] = {"base": {}, "data": {}, **document}
    wrong: dict[_Way, str] = {}
    try:
        config = RunConfig.model_validate(whole)
    except ValidationError as errors:
        for each in errors.errors(include_url=False, include_context=False):
            wrong.setdefault(_field_of(each["loc"]), each["type"])
        config = _right_of(whole, wrong)
    return config, [_finding(whole, way, kind) for way, kind in wrong.items()] + _look(config, wrong)


def _field_of(loc: _Way) -> _Way:
    """pydantic goes on into a union, a list or a table that is the value of a field."""
    if loc[0] == "rewards":
        return loc[:3] if len(loc) > 2 else loc[:1]
    return loc[:2] if loc[0] in TABLES else loc[:1]


def _at(document: Any, way: _Way) -> Any:
    return reduce(lambda held, key: held[key], way, document)


def _right_of(whole: Mapping[str, Any], wrong: Mapping[_Way, str]) -> RunConfig:
    right = copy.deepcopy(dict(whole))
    for way in sorted(wrong, key=len, reverse=True):
        _at(right, way[:-1]).pop(way[-1], None)
    for name, table in TABLES.items():
        must = {field: "" for field, known in options(table).items() if "default" not in known}
        held = right.get(name, [{}] if (name,) in wrong else [])
        right[name] = [must | each for each in held] if table is Reward else must | right.get(name, {})
    method = right.get("method", "")
    return RunConfig.model_validate({**right, "method": method or SAMPLING[0]}).model_copy(update={"method": method})


def _place(config: Any, way: _Way) -> str:
    """A place for readers: "[adapter] r", "[[rewards]] number 1 use" where there are several."""
    if way[0] != "rewards":
        return f"[{way[0]}] {way[1]}"
    return f"[[rewards]] {f'number {way[1]} ' if len(config) > 1 else ''}{way[2]}"


def _finding(whole: Mapping[str, Any], way: _Way, kind: str) -> Finding:
    """One of pydantic's."""
    name, value = way[-1], None if kind == "missing" else _at(whole, way)
    if len(way) == 1:
        return _finding_at_top(name, value, kind)
    known = options(TABLES[way[0]])
    place = _place(whole.get("rewards"), way)
    if kind == "extra_forbidden":
        return Finding(place, _unknown(name, known, place.removesuffix(f" {name}")))
    if kind == "missing":
        return Finding(place, f"is missing: {known[name]['description']}, such as {show(known[name]['example'])}")
    meant = _way_to(value) if way == ("adapter", "kind") else ""
    return Finding(
        place, f"{show(value)} is not {words(known[name])}. {meant}" if meant else misfit(value, known[name])
    )


def _finding_at_top(name: str, value: Any, kind: str) -> Finding:
    if kind == "extra_forbidden":
        return Finding(f"[{name}]" if isinstance(value, Mapping) else name, _unknown(name, RunConfig.model_fields))
    if name == "rewards":
        return Finding("[[rewards]]", "is a list of tables: write [[rewards]] above each reward function")
    if name != "method":
        return Finding(f"[{name}]", f"{show(value)} is not a table")
    methods = options(RunConfig)["method"]
    if kind == "missing":
        return Finding(name, f"is missing. Choose {words(methods)}")
    if isinstance(value, str) and (closest := _OTHER_METHODS.get(value.lower())):
        return Finding(name, f"{show(value)} is not {words(methods)}. The closest to it is {closest}")
    return Finding(name, misfit(value, methods))


def _way_to(kind: Any) -> str:
    """How a method of PEFT that is no kind of adapter here is asked for; empty for any other value."""
    word = kind.lower() if isinstance(kind, str) else ""
    if word in KINDS:
        return f"Write {KINDS[word]}"
    is_known = word.replace("-", "_").upper() in CHANGES_WEIGHTS
    return "A file trains LoRA; pass this method to a trainer in Python: peft_config=" if is_known else ""


def _unknown(name: str, known: Any, place: str = "") -> str:
    # A name that people use for a field is closer to it than any spelling: lr is no r.
    here = "" if name in ALIASES else nearest(name, known)
    if here:
        return f"unknown{here}"
    if there := elsewhere(name, place, LIMITS):
        return f"unknown; did you mean {there}?"
    if name.startswith("vllm_"):  # TRL's own
        return f"unknown; did you mean [train] {name}?"
    return f"unknown; there are {', '.join(known)}"


def _look(config: RunConfig, wrong: Mapping[_Way, str]) -> list[Finding]:
    """What fields name, where their values are of the right type."""
    tables: dict[_Way, Table] = {(name,): getattr(config, name) for name in TABLES if name != "rewards"}
    tables |= {("rewards", number): each for number, each in enumerate(config.rewards)}
    found = []
    for way, table in tables.items():
        if way[:1] in wrong:
            continue
        known = options(type(table))
        said = [each for each in known if each in table.model_fields_set and (*way, each) not in wrong]
        looks = {each: _LOOKS[kind] for each in said if (kind := known[each]["kind"]) in _LOOKS}
        texts = [(each, text) for each, look in looks.items() for text in look(getattr(table, each))]
        if isinstance(table, Reward) and not texts and not any(each[:2] == way for each in wrong):
            texts = [("arguments", text) for text in rewards.check_arguments(table.use, table.arguments)]
        found += [Finding(_place(config.rewards, (*way, each)), text) for each, text in texts]
    return found


# --- what a value names -------------------------------------------------------------------------------------------


def _look_at_model(value: str) -> list[str]:
    if value.startswith("/"):
        return [] if os.path.isdir(value) else [f"there is no directory {value}"]
    if why := missing_path(value):
        return [why]
    return [] if _HUB_NAME.fullmatch(value) else [f"{show(value)} is neither a directory nor a name on the hub"]


def _look_at_data(value: str | list[str]) -> list[str]:
    files = [value] if isinstance(value, str) else value
    if not files:
        return ["names no file"]
    local = [is_file(each) or each.startswith("/") for each in files]
    if not all(local):
        names = [each for each, is_local in zip(files, local, strict=True) if not is_local]
        if len(files) > 1:
            return [f"{show(names[0])} is no file; a dataset of the hub stands alone"]
        known = _HUB_NAME.fullmatch(names[0])
        return (
            []
            if known
            else [f"{show(names[0])} is neither a .jsonl, .json, .csv or .parquet file nor a name on the hub"]
        )
    return data.check_files(files)


def _look_at_key(value: str) -> list[str]:
    return [] if os.path.isfile(value) else [f"there is no file {value}"]


def _look_at_adapter(value: str) -> list[str]:
    from qlora_rl.adapter.directory import adapter_in, why_no_weights

    if os.path.isfile(adapter_in(value) / "adapter_config.json"):
        return [why.rstrip(".")] if (why := why_no_weights(adapter_in(value))) else []
    return [f"{value} holds no adapter_config.json, and no adapter/ of a run"]


def _look_at_where(value: str | list[str]) -> list[str]:
    urls = [value] if isinstance(value, str) else value
    if not urls:
        return ["names no server"]
    if isinstance(value, str) and value in ("colocate", "server", "ray"):
        return []
    wrong = [each for each in urls if not each.startswith(("http://", "https://"))]
    if not wrong:
        return []
    hint = nearest(wrong[0], ["colocate", "server", "ray"])
    return [f"{show(wrong[0])} is neither 'colocate', 'server', 'ray' nor a URL such as 'http://host:8000'{hint}"]


def _look_at_functions(value: Any) -> list[str]:
    found = [] if all_uses(value) else ["names nothing"]
    for use in all_uses(value):
        found += rewards.check_use(use) if split_reward(use)[0] else [f"{show(use)} is not path.py:name"]
    return found


def _look_at_template(value: str) -> list[str]:
    try:
        names = data.placeholders(value)
    except ValueError as error:
        return [f"{show(value)} is no template: {error}. Write braces that are meant twice"]
    return [] if names else [f"{show(value)} names no column; write {{question}} for the column question"]


def _look_at_patterns(value: Mapping[str, str]) -> list[str]:
    found = []
    for name, pattern in value.items():
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            found.append(f"{name} = {show(pattern)} is no regular expression: {error}")
            continue
        if groups > 1:
            found.append(
                f"{name} = {show(pattern)} has {groups} groups. Write (?:...) around those that are not the value"
            )
    return found


_LOOKS: Mapping[str, Callable[[Any], list[str]]] = {
    "model": _look_at_model,
    "data": _look_at_data,
    "reward": rewards.check_use,
    "function": _look_at_functions,
    "template": _look_at_template,
    "patterns": _look_at_patterns,
    "file": _look_at_key,
    "where": _look_at_where,
    "adapter": _look_at_adapter,
}
