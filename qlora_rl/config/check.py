"""Every field of a document by itself: known, of the right type, within its range, and there if it names a file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from qlora_rl.adapter.methods import CHANGES_WEIGHTS
from qlora_rl.base.hub import missing_path
from qlora_rl.config import data, rewards
from qlora_rl.config.findings import Finding, check_value, elsewhere, nearest, not_among, show
from qlora_rl.config.paths import DATA_FILES, all_uses, is_file, split_reward
from qlora_rl.config.schema import ALIASES, KINDS, METHODS, TABLES, TRAIN, Adapter, Reward, options
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


def check_document(document: Mapping[str, Any]) -> list[Finding]:
    """Everything that is wrong with single fields; what `[train]` holds is TRL's to judge."""
    found = _check_method(document)
    known = ["method", *TABLES, TRAIN]
    for name, held in document.items():
        if name not in known:
            found.append(Finding(name if not isinstance(held, Mapping) else f"[{name}]", _unknown(name, known)))
    if not isinstance(document.get(TRAIN, {}), Mapping):
        found.append(Finding(f"[{TRAIN}]", f"{show(document[TRAIN])} is not a table"))
    for name, table in TABLES.items():
        held = document.get(name)
        if table is Reward:
            found += _check_rewards(name, held)
        elif held is None:
            found += _missing(f"[{name}]", table, {})
        elif isinstance(held, Mapping):
            found += _check_table(f"[{name}]", table, held)
        else:
            found.append(Finding(f"[{name}]", f"{show(held)} is not a table"))
    return found


def check_field(table: type, name: str, place: str, value: Any) -> list[Finding]:
    """One field of our own tables: its type and range, and what it names."""
    hint, rules = options(table)[name]
    if (table, name) == (Adapter, "kind") and (way := _way_to(value)):
        return [Finding(place, f"{show(value)} is none of {', '.join(map(show, rules.choices))}. {way}")]
    found = check_value(place, value, hint, rules)
    if not found and (look := _LOOKS.get((table.__name__, name)) or _LOOKS.get(rules.kind)):
        found = [Finding(place, text) for text in look(value)]
    return found


def _way_to(kind: Any) -> str:
    """How a method of PEFT that is no kind of adapter here is asked for; empty for any other value."""
    word = kind.lower() if isinstance(kind, str) else ""
    if word in KINDS:
        return f"Write {KINDS[word]}"
    is_known = word.replace("-", "_").upper() in CHANGES_WEIGHTS
    return "A file trains LoRA; pass this method to a trainer in Python: peft_config=" if is_known else ""


def _check_method(document: Mapping[str, Any]) -> list[Finding]:
    if "method" not in document:
        return [Finding("method", f"is missing. Choose one of {', '.join(map(show, METHODS))}")]
    method = document["method"]
    if not isinstance(method, str):
        return [Finding("method", f"{show(method)} is not a string in quotes")]
    if method in METHODS:
        return []
    if closest := _OTHER_METHODS.get(method.lower()):
        known = ", ".join(map(show, METHODS))
        return [Finding("method", f"{show(method)} is none of {known}. The closest to it is {closest}")]
    return [Finding("method", not_among(method, METHODS))]


def _check_rewards(name: str, held: Any) -> list[Finding]:
    if held is None:
        return []
    if not isinstance(held, list) or not all(isinstance(each, Mapping) for each in held):
        return [Finding(f"[[{name}]]", "is a list of tables: write [[rewards]] above each reward function")]
    found = []
    for number, each in enumerate(held):
        place = f"[[{name}]]" if len(held) == 1 else f"[[{name}]] number {number}"
        wrong = _check_table(place, Reward, each)
        if not wrong:
            arguments = rewards.check_arguments(each["use"], each.get("arguments", {}))
            wrong = [Finding(f"{place} arguments", text) for text in arguments]
        found += wrong
    return found


def _check_table(place: str, table: type, held: Mapping[str, Any]) -> list[Finding]:
    known = options(table)
    found = _missing(place, table, held)
    for name, value in held.items():
        if name in known:
            found += check_field(table, name, f"{place} {name}", value)
        else:
            found.append(Finding(f"{place} {name}", _unknown(name, known, place)))
    return found


def _missing(place: str, table: type, held: Mapping[str, Any]) -> list[Finding]:
    return [
        Finding(f"{place} {name}", f"is missing: {rules.says}, such as {show(rules.example)}")
        for name, (_, rules) in options(table).items()
        if rules.is_required and name not in held
    ]


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


def _look_at_text(file: Any) -> list[str]:
    if not isinstance(file, str):
        return []
    if not os.path.isfile(file):
        return [f"there is no file {file} (a path that is not absolute counts from the directory of the run's file)"]
    return data.check_files([file]) if file.endswith(DATA_FILES) else []


_LOOKS: Mapping[Any, Callable[[Any], list[str]]] = {
    "model": _look_at_model,
    "data": _look_at_data,
    "reward": rewards.check_use,
    "function": _look_at_functions,
    ("Base", "calibrate"): _look_at_text,
    ("Data", "prompt_template"): _look_at_template,
    ("Data", "extract"): _look_at_patterns,
    ("Rollout", "api_key_file"): _look_at_key,
    ("Rollout", "where"): _look_at_where,
    ("Adapter", "start_from"): _look_at_adapter,
}
