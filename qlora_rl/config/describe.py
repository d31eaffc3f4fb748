"""The schema for readers: a table of every field, and a file to start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from qlora_rl.config.schema import METHODS, TABLES, TRAIN, Method, Reward, Rules, default, options
from qlora_rl.config.type_hints import words
from qlora_rl.config.write import value
from qlora_rl.contracts import LEARNING_RATES

# What a first run of a method sets in [train], by TRL's names.
_GROUPS: dict[str, tuple[Any, str]] = {
    "num_generations": (8, "completions of a prompt"),
    "max_completion_length": (256, "tokens"),
    "vllm_max_model_length": (1024, "prompt plus completion, in tokens"),
    "temperature": (1.0, "of the rollouts"),
}
_FIRST: dict[str, dict[str, tuple[Any, str]]] = {
    "sft": {"max_length": (1024, "tokens; longer rows are cut")},
    "dpo": {"max_length": (1024, "tokens; longer rows are cut"), "beta": (0.1, "how close to the start")},
    "grpo": _GROUPS,
    "rloo": _GROUPS,
    "async_grpo": _GROUPS,
    "online_dpo": {
        "max_new_tokens": (256, "of a completion"),
        "max_length": (1024, "prompt plus completion, in tokens"),
    },
}
# examples/data/sums.jsonl has prompt, answer and careless.
_RENAMED = {"sft": {"completion": "answer"}, "dpo": {"chosen": "answer", "rejected": "careless"}}


def markdown() -> str:
    """Every field of the file, as Markdown: one section per table."""
    methods = "\n".join(f"| `{name}` | {method.says} | {_columns(method)} |" for name, method in METHODS.items())
    parts = [f"| `method` | what it does | columns of the data |\n|---|---|---|\n{methods}"]
    for name, table in TABLES.items():
        head = f"[[{name}]]" if table is Reward else f"[{name}]"
        rows = [
            f"| `{each.name}` | {_type(options(table)[each.name])} | {_default(each)} | "
            f"{options(table)[each.name][1].says} |"
            for each in fields(table)
        ]
        says = (table.__doc__ or "").strip()
        parts.append(
            f"### `{head}`\n\n{says}\n\n| field | is | default | says |\n|---|---|---|---|\n" + "\n".join(rows)
        )
    return "\n\n".join(parts) + "\n"


def example(method: str) -> str:
    """A commented file for a method: what a first run needs is said, the rest stands there with its default."""
    lines = [
        f"# {method}: {METHODS[method].says}.",
        "# Lines that are commented out show the default, or an example. `qlora-rl train FILE --check` only checks.",
        "",
        f"method = {value(method)}",
    ]
    for name, table in TABLES.items():
        if table is Reward and not METHODS[method].scores:
            continue
        if body := list(_lines(method, table)):
            lines += [
                "",
                f"# {(table.__doc__ or '').strip()}",
                f"[[{name}]]" if table is Reward else f"[{name}]",
                *body,
            ]
        if name == "data":
            lines += [
                "",
                "# Fields of TRL's config of the method, by TRL's names.",
                f"[{TRAIN}]",
                *_train_lines(method),
            ]
    return "\n".join(lines) + "\n"


def _lines(method: str, table: type) -> Iterator[str]:
    for each in fields(table):
        rules: Rules = options(table)[each.name][1]
        if rules.methods and method not in rules.methods:
            continue
        held = default(each)
        shown = rules.example if held is None or (held in ([], {}) and rules.example is not None) else held
        if shown is None:
            shown = "..."
        comment = "" if rules.is_required else "# "
        if each.name == "columns" and method in _RENAMED:
            comment, shown = "", _RENAMED[method]
        yield f"{comment}{each.name} = {value(shown)}  # {rules.says}"


def _train_lines(method: str) -> Iterator[str]:
    first = {
        "max_steps": (100, "optimizer steps"),
        "per_device_train_batch_size": (8, "rows, or completions, of a step"),
        "learning_rate": (LEARNING_RATES.get(method, LEARNING_RATES["grpo"]), "of AdamW"),
        **_FIRST[method],
        "logging_steps": (1, "steps between two lines of the log"),
    }
    for name, (shown, says) in first.items():
        yield f"{name} = {value(shown)}  # {says}"


def _type(known: tuple[Any, Rules]) -> str:
    hint, rules = known
    if rules.choices:
        return " or ".join(f"`{choice}`" for choice in rules.choices)
    is_whole = "a whole number" in words(hint)
    number = "a whole number" if is_whole else "a number"
    return words(hint).replace(number, f"{number} {rules.range}".strip()).replace("'", "`")


def _default(each: Any) -> str:
    rules = each.metadata["rules"]
    if rules.is_required:
        return "must be given"
    held = default(each)
    return "" if held is None else f"`{value(held)}`"


def _columns(method: Method) -> str:
    return " or ".join(" and ".join(f"`{name}`" for name in each) for each in method.columns)
