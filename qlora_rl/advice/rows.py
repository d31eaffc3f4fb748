"""`tables_for`: what a run's file says about a dataset, known by its name or seen in its first rows."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qlora_rl.adapter.directory import adapter_in
from qlora_rl.advice.chat import Chat
from qlora_rl.config.paths import split_reward
from qlora_rl.config.rewards import check_use
from qlora_rl.config.schema import TEACHERS, Data
from qlora_rl.contracts import IMAGES
from qlora_rl.data.files import ANSWERS, PROMPTS, check_files, is_file
from qlora_rl.data.known import known_dataset
from qlora_rl.data.load import read_rows
from qlora_rl.errors import ConfigConflictError, collected
from qlora_rl.methods import METHODS
from qlora_rl.rewards.numbers import final_number

_TALKS = ("messages", "conversations")
_SHARED = " (in ShareGPT's form the column is called conversations)"
_SEEN = 100  # rows
_SHORT = 40  # characters of an answer that a completion can be compared with
_MARKED = re.compile(r"####\s*(.+)")
# Without it a model explains its answer, and no completion is equal to the answer.
_BARE = "Answer with the final answer only, without explanation."
# Without it a model may write numbers as words, and any digit in what it says counts as its answer.
_DIGITS = "End your answer with the final number in digits."
_ALIKE = {"rloo": "grpo", "distill": "grpo", "kto": "dpo"}  # whose data are taken
_OF_THAT_FORM = "openai/gsm8k"  # its instruction and rewards are those of every dataset whose answers have the mark


@dataclass(frozen=True)
class Tables:
    """What is said about a dataset.

    Attributes:
        data: fields of [data].
        rewards: fields of each [[rewards]]; none where the method needs none.
        teacher: fields of [teacher]; none where the method has none.
        comments: why, by the name of the field.
        length: tokens of prompt and answer; `None` where it is unknown.
    """

    data: dict[str, Any]
    rewards: list[dict[str, Any]] = field(default_factory=list)
    comments: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    teacher: dict[str, Any] = field(default_factory=dict)


def tables_for(
    name: str,
    task: str,
    chat: Chat | None = None,
    *,
    subset: str | None = None,
    split: str | None = None,
    reward: str = "",
    takes_images: bool = False,
    teacher: str = "",
) -> Tables:
    """[data] and [[rewards]] for a dataset and a method.

    Args:
        name: of a dataset on the hub, or a .jsonl or .parquet file.
        task: of a run's file, but "online_dpo" and "async_grpo".
        chat: of `chat_of`, for the model; by default a template that takes everything.
        subset: configuration of a hub dataset; by default the first of a known one.
        split: of a hub dataset.
        reward: one of ours, or `path.py:function`, in place of the one that would be chosen.
        takes_images: the model takes images.
        teacher: of "distill" the directory of an adapter or run, or a second model; by default the student itself,
            which reads the answer.

    Raises:
        ConfigConflictError: it cannot be loaded, has no columns for the method (names those that it has), or has images
            and the model takes none.
    """
    if wrong := check_use(reward) if reward else []:
        raise ConfigConflictError(f"choosing the reward: {wrong[0]}.")
    chat = chat or Chat()
    given: dict[str, Any] = {key: value for key, value in (("subset", subset), ("split", split)) if value is not None}
    known, scores = known_dataset(name), METHODS[task].scores
    length = None
    if known is not None:
        length = known.get("length")
        told = _told(name, known, task)
        is_talk, is_whole = "prompt_template" not in told.get("data", {}), False
    else:
        told, is_talk, is_whole = _seen(
            name, task, given, wants_reward=scores and not reward, takes_images=takes_images
        )
        length = told.get("length")
    if is_talk and not chat.is_there:
        raise ConfigConflictError(
            f"choosing the data: {name} holds messages, and the model has no chat template. Use an instruct model."
        )
    data = {"train": name, **told.get("data", {}), **given}
    instruction = told.get("instruction")
    has_messages = chat.is_there and not is_whole
    if has_messages:
        data["format"] = "chat"
    if instruction and has_messages and chat.takes_system:
        data["system_prompt"] = instruction
    elif instruction and not is_talk:
        asked = data.get("prompt_template", "{prompt}")
        data["prompt_template"] = f"{instruction}\n\n{asked}" + ("" if has_messages else "\n")
    rewards = [] if not scores else [{"use": reward}] if reward else told.get("rewards", [])
    tables = Tables(data, [dict(each) for each in rewards], dict(told.get("comments", {})), length)
    return replace(tables, teacher=_teacher(name, teacher, told, data, is_talk)) if METHODS[task].is_taught else tables


def is_adapter(teacher: str) -> bool:
    """It names the directory of an adapter or of a run: no second model."""
    return bool(teacher) and (adapter_in(teacher) / "adapter_config.json").is_file()


def _teacher(
    name: str, teacher: str, told: Mapping[str, Any], data: Mapping[str, Any], is_talk: bool
) -> dict[str, Any]:
    """Who teaches: what was named, or the student itself, which reads the answer of the row."""
    if teacher:
        return {"adapter" if is_adapter(teacher) else "model": teacher}
    column = next((each for each in (told.get("answer"), *data.get("extract", {})) if each), None)
    if column is None or is_talk:
        raise ConfigConflictError(
            f"choosing the teacher: {name} has {'messages' if is_talk else 'no answer'}, so the student itself cannot "
            "be shown the answer. Name a teacher: --teacher RUN, or a second model."
        )
    asked = data.get("prompt_template", "{prompt}")
    return {"adapter": "policy", "prompt_template": f"{asked}\n\n(The answer is {{{column}}}.)"}


def tables_from(directory: Path, model: str, tables: Tables) -> tuple[str, Tables]:
    """Model and tables of a file in that directory: what names a file or a directory is relative to it."""
    data = tables.data | {
        place: _seen_from(directory, tables.data[place]) for place in ("train", "eval") if place in tables.data
    }
    rewards = []
    for each in tables.rewards:
        path, function = split_reward(each["use"])
        rewards.append(each | ({"use": f"{_seen_from(directory, path)}:{function}"} if path else {}))
    teacher = {
        place: _seen_from(directory, each) if place == "model" or each not in TEACHERS else each
        for place, each in tables.teacher.items()
        if place != "prompt_template"
    }
    teacher = tables.teacher | teacher
    moved = _seen_from(directory, model) if os.path.isdir(model) else model
    return moved, replace(tables, data=data, rewards=rewards, teacher=teacher)


def _seen_from(directory: Path, name: str) -> str:
    path = os.path.expanduser(name)
    if os.path.isabs(path) or not os.path.exists(path):
        return name
    # Of a directory that is a link `..` is above what it names. The last name stays as it is, also where it is a link.
    above, last = os.path.split(path.rstrip("/"))
    real = os.path.realpath(path) if last in (".", "..") else os.path.join(os.path.realpath(above), last)
    return os.path.relpath(real, os.path.realpath(directory))


def _told(name: str, known: Mapping[str, Any], task: str) -> Mapping[str, Any]:
    """What `datasets.toml` says of it."""
    told = known.get(_ALIKE.get(task, task))
    if told is None:
        fit = [method for method in METHODS if method in known]
        raise ConfigConflictError(
            f"choosing the data: {name} is for --task {' or '.join(fit)}; it has no columns that {task} learns from. "
            "Pass another dataset."
        )
    return told


def _seen(
    name: str, task: str, given: Mapping[str, Any], *, wants_reward: bool, takes_images: bool
) -> tuple[dict[str, Any], bool, bool]:
    """What its first rows tell; whether they hold messages; whether they hold whole texts."""
    if (is_file(name) or os.path.isfile(name)) and (wrong := check_files([name])):
        raise collected("choosing the data", wrong, ConfigConflictError)
    dataset = read_rows(Data(train=name, **given))
    images = next((each for each in ("image", IMAGES) if each in dataset.column_names), None)
    dataset = dataset if images is None else dataset.remove_columns(images)
    columns, rows = dataset.column_names, dataset[:_SEEN]
    data: dict[str, Any] = {}
    if images is not None:
        if not takes_images:
            raise ConfigConflictError(
                f"choosing the data: {name} holds images ({images}), and the model takes none. Use a vision-language "
                "model (docs/images.md), or data without that column."
            )
        data["images"] = images
    told: dict[str, Any] = {"data": data, "comments": {}}
    is_whole = task == "sft" and "messages" not in columns and bool({"text", "input_ids"} & set(columns))
    is_ready = task == "sft" and any(set(way) <= set(columns) for way in METHODS["sft"].columns)
    is_pair = {"chosen", "rejected"} <= set(columns)
    if task == "kto" and not is_pair and "label" not in columns:
        raise _lacks(name, "chosen and rejected, or label, as kto needs", columns, ("label",))
    if task == "dpo" and not is_pair:
        raise _lacks(name, "chosen and rejected, as dpo needs", columns, ("chosen", "rejected"))
    if not is_ready and "prompt" not in columns:
        asked = next((each for each in PROMPTS if each in columns), None)
        if asked is not None:
            both = asked == "instruction" and "input" in columns
            data["prompt_template"] = "{instruction}\n\n{input}" if both else f"{{{asked}}}"
        elif task != "dpo" and not (task == "kto" and is_pair):  # there the two sides may be whole conversations
            answer = () if {*ANSWERS} & {*columns} else ("completion" if task == "sft" else "answer",)
            raise _lacks(name, f"a prompt (prompt, {', '.join(PROMPTS)})", columns, ("prompt", *answer), task)
    left = [each for each in ANSWERS if each in columns]
    told["answer"] = left[0] if left else None
    if (task == "sft" and not is_ready) or (task == "kto" and not is_pair and "completion" not in columns):
        if not left:
            raise _lacks(name, f"an answer ({', '.join(ANSWERS)})", columns, ("completion",))
        data["columns"] = {"completion": left[0]}
    if wants_reward:
        told["rewards"] = _rewards(name, left, rows, columns, told)
    talks = [each for each in ("prompt", "messages", "chosen") if each in columns]
    return told, any(isinstance(rows[each][0], list) for each in talks), is_whole


def _rewards(
    name: str, answers: Sequence[str], rows: Mapping[str, Sequence[Any]], columns: Sequence[str], told: dict[str, Any]
) -> list[dict[str, Any]]:
    """The reward of ours that compares a completion with the answer; of GSM8K's form also its others, and what asks for
    that form."""
    if not answers:
        raise _lacks(name, f"an answer to compare with ({', '.join(ANSWERS)})", columns, ("answer",))
    column = answers[0]
    values = [str(each) for each in rows[column] if each is not None]
    marked = [_MARKED.search(each) for each in values]
    has_marks = bool(values) and all(marked)
    if has_marks:
        told["data"]["extract"] = {column: _MARKED.pattern}
        told["comments"]["extract"] = "the column holds the whole solution; this takes the final answer"
        values = [each[1].strip() for each in marked if each]
    longest = max(map(len, values), default=0)
    if longest > _SHORT:
        raise ConfigConflictError(
            f"choosing the reward: {column} of {name} has answers of up to {longest} characters, which no completion "
            "repeats. Pass a reward function of your own: --reward path.py:function."
        )
    are_numbers = all(final_number(each) is not None for each in values)
    use = "numeric_match" if are_numbers else "exact_match"
    chosen = [{"use": use, **({} if column == "answer" else {"arguments": {"column": column}})}]
    told["instruction"] = _DIGITS if are_numbers else _BARE
    of_that_form = known_dataset(_OF_THAT_FORM)
    if has_marks and are_numbers and of_that_form is not None:
        told["instruction"], told["length"] = of_that_form["grpo"]["instruction"], of_that_form["length"]
        chosen += [each for each in of_that_form["grpo"]["rewards"] if each["use"] != use]
    return chosen


def _lacks(name: str, what: str, columns: Sequence[str], wanted: Sequence[str], task: str = "") -> ConfigConflictError:
    """The error that names the columns that there are, and how one of them is given the name that is wanted.

    Args:
        wanted: names of [data] columns that would make the dataset fit.
        task: where whole conversations may be meant for another one.
    """
    ways = []
    talks = [each for each in _TALKS if each in columns]
    if talks and task:
        ways.append(
            f"{talks[0]} holds whole conversations{_SHARED if talks[0] == 'messages' else ''}: to imitate them, add "
            f"--task sft; {task} needs a prompt, and a reference for the reward"
        )
    free = [each for each in columns if each not in {*_TALKS, *ANSWERS, *PROMPTS, "prompt"}]
    if pairs := ", ".join(f'{new} = "{old}"' for new, old in zip(wanted, free, strict=False)):
        ways.append(
            f"If columns of other names are meant, rename them in the data, or begin with `qlora-rl train --example "
            f"METHOD` and write, for example, columns = {{ {pairs} }} into its [data]"
        )
    if "answer" in wanted and "prompt" not in wanted:
        ways.append("To score without a reference, pass --reward path.py:function")
    ways = ways or ["Pass another dataset"]
    return ConfigConflictError(
        f"choosing the data: {name} has no column with {what}; there are {', '.join(columns)}. {'. '.join(ways)}."
    )
