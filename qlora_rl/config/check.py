"""Every field of a document by itself: pydantic's findings in our words, and what fields name on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qlora_rl.adapter.methods import CHANGES_WEIGHTS
from qlora_rl.base.hub import missing_path
from qlora_rl.config import rewards
from qlora_rl.config.findings import Finding, choices, elsewhere, misfit, nearest, show, words
from qlora_rl.config.paths import all_uses, split_reward
from qlora_rl.config.schema import ALIASES, KINDS, TABLES, TEACHERS, TRAIN, Reward, RunConfig, Table, options
from qlora_rl.config.trl_fields import LIMITS
from qlora_rl.data.files import DATA_FILES, check_files, is_file, not_utf8
from qlora_rl.data.rows import placeholders
from qlora_rl.engine.started import STARTED, is_url

# What others call a way to train, and what comes closest to it here.
_OTHER_METHODS = {
    "ppo": "'grpo' or 'rloo', which need no value model",
    "reinforce": "'rloo'",
    "dapo": "'grpo' with [train] loss_type = 'dapo'",
    "dr_grpo": "'grpo' with [train] loss_type = 'dr_grpo'",
    "gspo": "'grpo' with [train] importance_sampling_level = 'sequence'",
    "ipo": "'dpo' with [train] loss_type = ['ipo']",
    "orpo": "'dpo'",
    "gkd": "'distill', with [teacher]",
    "opd": "'distill', with [teacher]",
    "sdft": "'distill' with [teacher] adapter = 'policy' and what else it reads",
    "sdpo": "'distill' with [teacher] adapter = 'policy' and what else it reads",
    "simpo": "'dpo'",
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check_document(document: Mapping[str, Any]) -> tuple[RunConfig, list[Finding]]:
    """What is right of a document, and everything that is wrong with single fields; `[train]` is TRL's to judge.

    Returns:
        The run, with defaults in place of what is wrong ("" where a field has none), and the findings.
    """
    known, train = tuple(RunConfig.model_fields), document.get(TRAIN, {})
    found = _check_method(document)
    held: dict[str, Any] = {"method": "" if found else document["method"], TRAIN: train}
    for name, value in document.items():
        if name not in known:
            found.append(Finding(f"[{name}]" if isinstance(value, Mapping) else name, _unknown(name, known)))
    if not isinstance(train, Mapping):
        held[TRAIN] = {}
        found.append(Finding(f"[{TRAIN}]", f"{show(train)} is not a table"))
    for name, table in TABLES.items():
        if name == "rewards":
            held[name], wrong = _check_rewards(document.get(name, []))
        else:
            held[name], wrong = _check_table(f"[{name}]", table, document.get(name, {}))
        found += wrong
    return RunConfig.model_construct(**held), found


def _check_method(document: Mapping[str, Any]) -> list[Finding]:
    method, known = document.get("method"), options(RunConfig)["method"]
    if "method" not in document:
        return [Finding("method", f"is missing. Choose {words(known)}")]
    if isinstance(method, str) and (closest := _OTHER_METHODS.get(method.lower())):
        return [Finding("method", f"{show(method)} is not {words(known)}. The closest to it is {closest}")]
    return [] if method in choices(known) else [Finding("method", misfit(method, known))]


def _check_rewards(held: Any) -> tuple[list[Any], list[Finding]]:
    if not isinstance(held, list) or not all(isinstance(each, Mapping) for each in held):
        text = "is a list of tables: write [[rewards]] above each reward function"
        return [Reward(use="")], [Finding("[[rewards]]", text)]
    places = [f"[[rewards]] number {number}" if len(held) > 1 else "[[rewards]]" for number in range(len(held))]
    checked = [_check_table(place, Reward, each) for place, each in zip(places, held, strict=True)]
    return [table for table, _ in checked], [each for _, wrong in checked for each in wrong]


def _check_table(place: str, table: type[Table], held: Any) -> tuple[Any, list[Finding]]:
    """What is right of a table, and what is wrong with its fields and with what they name."""
    known = options(table)
    must = {name: "" for name, field in known.items() if "default" not in field}
    if not isinstance(held, Mapping):
        return table(**must), [Finding(place, f"{show(held)} is not a table")]
    wrong: dict[Any, str] = {}
    try:
        right = table.model_validate(held)
    except ValidationError as errors:
        wrong = {each["loc"][0]: each["type"] for each in errors.errors(include_url=False, include_context=False)}
        right = table(**must | {name: each for name, each in held.items() if name not in wrong})
    texts = [(name, _text(place, known, name, kind, held.get(name))) for name, kind in wrong.items()]
    for name, look in ((name, _LOOKS.get(known[name]["kind"])) for name in held if name not in wrong):
        texts += [(name, text) for text in (look(held[name]) if look else ())]
    if isinstance(right, Reward) and not texts:
        texts = [("arguments", text) for text in rewards.check_arguments(right.use, right.arguments)]
    return right, [Finding(f"{place} {name}", text) for name, text in texts]


def _text(place: str, known: Mapping[str, Any], name: str, kind: str, value: Any) -> str:
    """What pydantic has found, in our words."""
    if kind == "extra_forbidden":
        return _unknown(name, known, place)
    if kind == "missing":
        return f"is missing: {known[name]['description']}, such as {show(known[name]['example'])}"
    if place == "[adapter]" and name == "kind" and (way := _way_to(value)):
        return f"{show(value)} is not {words(known[name])}. {way}"
    return misfit(value, known[name])


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
    return check_files(files)


def _look_at_adapter(value: str) -> list[str]:
    from qlora_rl.adapter.directory import adapter_in, why_no_weights

    if os.path.isfile(adapter_in(value) / "adapter_config.json"):
        return [why.rstrip(".")] if (why := why_no_weights(adapter_in(value))) else []
    return [f"{value} holds no adapter_config.json, and no adapter/ of a run"]


def _look_at_teacher(value: str) -> list[str]:
    if value in TEACHERS:
        return []
    hint = nearest(os.path.basename(value), TEACHERS)
    return [f"{wrong}, and is neither 'none' nor 'policy'{hint}" for wrong in _look_at_adapter(value)]


_SECRET = "names a user or has a query or a fragment. Write 'http://host:8000', and name the key's file: api_key_file"


def _look_at_where(value: str | list[str]) -> list[str]:
    return [] if value in STARTED else _look_at_servers([value] if isinstance(value, str) else value, STARTED)


def _look_at_servers(urls: list[str], words: Sequence[str] = ()) -> list[str]:
    """URLs, where there are words for an engine."""
    if not urls:
        return ["names no server"]
    if any(mark in url for url in urls for mark in "@?#"):
        return [_SECRET]
    if not (wrong := [each for each in urls if not is_url(each)]):
        return []
    other = f"neither {', '.join(map(repr, words))} nor a" if words else "no"
    return [f"{show(wrong[0])} is {other} URL such as 'http://host:8000'{nearest(wrong[0], words)}"]


def _look_at_functions(value: Any) -> list[str]:
    found = [] if all_uses(value) else ["names nothing"]
    for use in all_uses(value):
        found += rewards.check_use(use) if split_reward(use)[0] else [f"{show(use)} is not path.py:name"]
    return found


def _look_at_template(value: str) -> list[str]:
    try:
        names = placeholders(value)
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


def _look_at_text(file: Any) -> list[str]:
    if not isinstance(file, str):
        return []
    if not os.path.isfile(file):
        return [f"there is no file {file} (a path that is not absolute counts from the directory of the run's file)"]
    if file.endswith(DATA_FILES):
        return check_files([file])
    try:
        return [] if Path(file).read_text(encoding="utf-8").strip() else [f"{file} holds no text"]
    except UnicodeDecodeError as error:
        return [not_utf8(file, error)]
    except OSError as error:
        return [f"{file} cannot be read: {error.strerror}"]


_LOOKS: Mapping[str, Callable[[Any], list[str]]] = {
    "model": _look_at_model,
    "data": _look_at_data,
    "reward": rewards.check_use,
    "function": _look_at_functions,
    "template": _look_at_template,
    "patterns": _look_at_patterns,
    "file": lambda file: [] if os.path.isfile(file) else [f"there is no file {file}"],
    "where": _look_at_where,
    "adapter": _look_at_adapter,
    "teacher": _look_at_teacher,
    "url": lambda url: _look_at_servers([url]),
    "text": _look_at_text,
}
