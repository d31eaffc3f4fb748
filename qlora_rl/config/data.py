"""Datasets: files of this machine, or one of the hub; looked at before they are loaded."""

from __future__ import annotations

import csv
import errno
import functools
import itertools
import json
import os
import re
import string
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from qlora_rl.base.hub import hub_reachable, why_missing
from qlora_rl.config.paths import DATA_FILES, is_file
from qlora_rl.config.schema import Data
from qlora_rl.errors import ConfigConflictError, collected
from qlora_rl.image_io import read_image

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# ShareGPT's column, and what it calls those who speak.
_SHARED = "conversations"
_SPEAKERS = {"human": "user", "gpt": "assistant"}
# Columns whose text one side of a conversation says.
_SAID_BY = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
# What datasets call the question and its answer, where they do not say prompt and completion.
PROMPTS = ("question", "problem", "instruction", "query", "input")
ANSWERS = ("answer", "final_answer", "ground_truth", "solution", "completion", "response", "output", "target")
# Rows that a base is calibrated on, at most.
_CALIBRATION_ROWS = 1024
# TRL reads the template's arguments of a row there, where its config has no field for them.
TEMPLATE_COLUMN = "chat_template_kwargs"
# Where TRL looks for the images of a row.
IMAGES = "images"
# The place that a template ends with, the blank lines before it, and the ends of lines after it.
_LAST_PLACE = re.compile(r"\n*(\{[^{}]*\})(\n*)\Z")
# How datasets says which configurations there are.
_SUBSETS = re.compile(r"available configs: \[(.+)\]")
# Characters in a cell of CSV; csv's own limit is 131,072.
_LONGEST_CELL = 2**31 - 1


@functools.cache
def _known_datasets() -> Mapping[str, Any]:
    return tomllib.loads((package_files(__package__) / "datasets.toml").read_text(encoding="utf-8"))


def known_dataset(name: str) -> Mapping[str, Any] | None:
    """What `datasets.toml` says of a public dataset; `None` where it is not in there."""
    return _known_datasets().get(name)


def check_files(files: Sequence[str]) -> list[str]:
    """What is wrong with local files, as far as names and first rows tell."""
    found = []
    for file in files:
        if Path(file).suffix not in DATA_FILES:
            found.append(f"{file} is none of {', '.join(DATA_FILES)}, which are read")
        elif not os.path.isfile(file):
            found.append(
                f"there is no file {file} (a path that is not absolute counts from the directory of the run's file)"
            )
        else:
            found += _check_rows(file)
    if not found and len({_READERS[Path(file).suffix] for file in files}) > 1:
        found.append("holds files of several kinds. Convert them to one kind")
    return found


def columns_after(files: Any, names: Mapping[str, str]) -> list[str] | None:
    """Columns of a dataset on disk when they are renamed; `None` where they cannot be known before it is loaded."""
    first = files[0] if isinstance(files, list) and files else files
    if not isinstance(first, str) or not first.endswith(DATA_FILES) or not os.path.isfile(first) or _check_rows(first):
        return None
    back = {old: new for new, old in names.items()}
    return [back.get(name, name) for name in _columns(first)]


def taken_names(names: Mapping[str, str], columns: Sequence[str]) -> list[str]:
    """Which of the new names two columns would have, and which columns would have two; each with the way out."""
    olds = list(names.values())
    twice = [f"{old} gets two names, and a column has one" for old in dict.fromkeys(olds) if olds.count(old) > 1]
    return twice + [
        f"there is a column {new} already, and {old} is to be renamed to it; rename that one too: {new}_before = "
        f"'{new}'"
        for new, old in names.items()
        if new in columns and new not in olds
    ]


def placeholders(template: str) -> list[str]:
    """The columns that a template names.

    Raises:
        ValueError: it is no template.
    """
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"{{{name}}} names no column")
    return names


def filled(template: str, values: Mapping[str, Any]) -> str:
    """The template with these values; where it ends with one that is empty, as Alpaca's input often is, without the
    blank lines before it."""
    last = _LAST_PLACE.search(template)
    if last is None or last[1].format(**values):
        return template.format(**values)
    return filled(template[: last.start()], values) + last[2]


def check_filling(value: Any, name: str, where: str) -> None:
    """Reject what a template would turn into Python's notation of it.

    Args:
        value: what the template is filled with.
        name: its column.
        where: begins the message: the row.

    Raises:
        ConfigConflictError: it is neither text nor a number.
    """
    if value is None:
        raise ConfigConflictError(f"{where} has nothing in {name}. Fill it in, or remove the row.")
    if isinstance(value, list | tuple | Mapping | bytes):
        raise ConfigConflictError(
            f"{where} has in {name} neither text nor a number, but {str(value)[:80]}. Write it as text, or remove the "
            "row."
        )


def load_data(data: Data, *, has_template_field: bool = False) -> tuple[Any, Any]:
    """The dataset to train on and the one to evaluate on (`None` where there is none), with the columns as asked.

    Args:
        data: the table.
        has_template_field: TRL's config of the method takes `chat_template_kwargs`; otherwise TRL reads them in a
            column.

    Raises:
        ConfigConflictError: a dataset cannot be read; names it.
    """
    return _shaped(read_rows(data), data, has_template_field, data.train), load_eval(data, has_template_field)


def load_eval(data: Data, has_template_field: bool = True) -> Any:
    """The dataset to evaluate on, with the columns as asked; `None` where there is none.

    Raises:
        ConfigConflictError: it cannot be read; names it.
    """
    if data.eval is None:
        return None
    return _shaped(_load(data.eval, data, data.eval_split, "[data] eval"), data, has_template_field, data.eval)


def read_rows(data: Data) -> Any:
    """The dataset to train on as it is stored: columns, names and rows.

    Raises:
        ConfigConflictError: it cannot be read; names it.
    """
    return _load(data.train, data, data.split, "[data] train")


def read_file(file: str, doing: str) -> Any:
    """The rows of a local file as [data] reads it: columns, names and rows, with images as they are stored.

    Raises:
        ConfigConflictError: it cannot be read; says why.
    """
    from datasets import Image, List

    if wrong := check_files([file]):
        raise collected(doing, wrong, ConfigConflictError)
    found = _load(file, Data(train=file), "train", "--data")
    for name, kind in found.features.items():
        if isinstance(kind, Image):
            found = found.cast_column(name, Image(decode=False))
        elif isinstance(getattr(kind, "feature", None), Image):
            found = found.cast_column(name, List(Image(decode=False)))
    return found


def calibration_rows(file: str) -> list[Any]:
    """What a base is calibrated on, as `prepare_base` takes it: of the first rows of a data file what is said in them,
    as messages, else their text; of any other file its text.

    Raises:
        ConfigConflictError: it cannot be read; says why.
    """
    doing = "reading the text to calibrate on"
    if not os.path.isfile(file):
        raise ConfigConflictError(f"{doing}: there is no file {file}. Pass text, or a {', '.join(DATA_FILES)} file.")
    if Path(file).suffix in DATA_FILES:
        rows = read_file(file, doing)
        return [_spoken(row) for row in rows.select(range(min(len(rows), _CALIBRATION_ROWS)))]
    try:
        return [Path(file).read_text(encoding="utf-8")]
    except UnicodeDecodeError as error:
        raise ConfigConflictError(f"{doing}: {_not_utf8(file, error)}.") from error
    except OSError as error:
        raise ConfigConflictError(f"{doing}: {file}: {error.strerror}. Pass another file.") from error


def _spoken(row: Mapping[str, Any]) -> Any:
    said = as_conversation(row)
    if "messages" in said:
        return said["messages"]
    question = next((row[name] for name in PROMPTS if isinstance(row.get(name), str)), None)
    answer = next((row[name] for name in ANSWERS if isinstance(row.get(name), str)), None)
    asked = said.get("prompt") or ([] if question is None else [{"role": "user", "content": question}])
    if asked and "text" not in row:
        told = [] if answer is None else [{"role": "assistant", "content": answer}]
        return [*asked, *(said.get("completion") or said.get("chosen") or told)]
    return row["text"] if "text" in row else "\n\n".join(each for each in row.values() if isinstance(each, str))


def check_subset(name: str, subset: str | None) -> str:
    """What is wrong with the subset of a known dataset; empty where it is none, or nothing."""
    subsets = (known_dataset(name) or {}).get("subsets", [])
    if not subsets or subset in subsets:
        return ""
    there = ", ".join(subsets)
    return f"{name} has {there}" + (f", and no {subset!r}" if subset else f". Name one: subset = '{subsets[0]}'")


def as_conversation(row: Mapping[str, Any], system_prompt: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """The columns of a row that hold what is said, as lists of messages.

    Args:
        row: "prompt" (the user's turn), "completion", "chosen", "rejected" (the assistant's), as text or as messages;
            or "messages".
        system_prompt: first message, where a conversation does not begin with a system message of its own.
    """
    found = {
        name: [{"role": role, "content": row[name]}] if isinstance(row[name], str) else list(row[name])
        for name, role in _SAID_BY.items()
        if row.get(name) is not None
    }
    if row.get("messages") is not None:
        found["messages"] = list(row["messages"])
    if system_prompt is not None:
        # Without a prompt, a preference's two sides are whole conversations.
        for name in ("messages", "prompt") if "prompt" in found or "messages" in found else ("chosen", "rejected"):
            if name in found:
                found[name] = _under(system_prompt, found[name])
    return found


def _load(files: str | list[str], data: Data, split: str, place: str) -> Any:
    from datasets import load_dataset

    names = [files] if isinstance(files, str) else files
    try:
        if is_file(names[0]):
            options = _as_text(names) if names[0].endswith(".csv") else {}
            with _without_log():  # it logs what it raises
                found = load_dataset(_READERS[Path(names[0]).suffix], data_files=names, split="train", **options)
        else:
            hub_reachable()
            found = load_dataset(names[0], data.subset, split=split, revision=data.revision)
        return _with_messages(found)
    except _UnreadableError as error:
        raise ConfigConflictError(f"loading the data: {place}: {error}.") from error
    except Exception as error:  # whatever the library finds: the file is the user's, and so is the way out
        reason = error.__cause__ or error
        denied = (errno.EACCES, errno.EPERM, errno.EROFS)
        # datasets keeps what it has read
        if isinstance(reason, OSError) and reason.errno in denied and str(reason.filename) not in names:
            raise ConfigConflictError(
                f"loading the data: [data] {place}: the cache of datasets cannot be written ({reason}). Set HF_HOME to "
                "a directory that this user can write."
            ) from error
        if "corresponds to no data" in str(reason):
            raise ConfigConflictError(
                f"loading the data: {place}: {', '.join(names)} holds no rows. Pass another one."
            ) from error
        if broken := _broken_line(names):
            raise ConfigConflictError(f"loading the data: {place}: {broken}. Fix the line, or remove it.") from error
        if subsets := _SUBSETS.search(str(reason)):
            raise ConfigConflictError(
                f"loading the data: {place}: {names[0]} has several subsets: {subsets[1]}. Name one: [data] subset."
            ) from error
        if not is_file(names[0]) and not hub_reachable():
            raise ConfigConflictError(
                f"loading the data: {place}: {why_missing(names[0])} ({type(reason).__name__}: {reason})."
            ) from error
        raise ConfigConflictError(
            f"loading the data: {place}: {', '.join(names)} cannot be read ({type(reason).__name__}: {reason}). "
            "Fix it, or pass another one."
        ) from error


def _as_text(files: Sequence[str]) -> dict[str, Any]:
    """Options with which datasets reads CSV as it is written: "007" is no number, "NA" and an empty cell are text.

    Raises:
        _UnreadableError: one of them cannot be read, or the columns differ.
    """
    from datasets import Features, Value

    columns = [_csv_columns(file)[0] for file in files]
    for file, each in zip(files, columns, strict=True):
        if set(each) != set(columns[0]):
            raise _UnreadableError(
                f"{files[0]} has the columns {', '.join(columns[0])}, and {file} {', '.join(each)}. Give them the same"
            )
    features = Features({name: Value("string") for name in columns[0]})
    return {"features": features, "keep_default_na": False, "na_filter": False, "encoding": "utf-8-sig"}


def _with_messages(dataset: Any) -> Any:
    """ShareGPT's conversations as `messages`; any other dataset as it is."""
    kind = getattr(dataset.features, "get", lambda _: None)(_SHARED)
    said = getattr(kind, "feature", None)
    if not isinstance(said, Mapping) or not {"from", "value"} <= set(said) or "messages" in dataset.column_names:
        return dataset
    return dataset.map(
        lambda row: {
            "messages": [
                {"role": _SPEAKERS.get(each["from"], each["from"]), "content": each["value"]} for each in row[_SHARED]
            ]
        },
        remove_columns=[_SHARED],
    )


@contextmanager
def _without_log() -> Iterator[None]:
    """Nothing of datasets is logged while it loads."""
    from datasets.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _broken_line(files: Sequence[str]) -> str:
    """The first line of local .jsonl files that is no JSON, as FILE:LINE, and why; empty where there is none."""
    for file in files:
        if Path(file).suffix != ".jsonl" or not os.access(file, os.R_OK):
            continue
        with open(file, "rb") as handle:
            for number, line in enumerate(handle, 1):
                try:
                    json.loads(line.strip() or b"null")
                except (ValueError, RecursionError) as error:
                    return f"{file}:{number} is no JSON: {error}".replace(": line 1 column", ": column")
    return ""


def _shaped(dataset: Any, data: Data, has_template_field: bool, files: str | list[str]) -> Any:
    if data.limit is not None:
        dataset = dataset.select(range(min(data.limit, len(dataset))))
    images = _images_of(dataset, data, files)
    if images is not None:
        dataset = dataset.remove_columns(images.column_names)
    dataset = _with_columns(dataset, data, has_template_field)
    if images is None:
        return dataset
    if IMAGES in dataset.column_names:
        raise ConfigConflictError(
            f"loading the data: [data] images: {data.images} becomes the column {IMAGES}, and "
            f"there is one. Rename that: columns = {{ more = '{IMAGES}' }}"
        )
    from datasets import concatenate_datasets

    return concatenate_datasets([dataset, images.rename_columns({images.column_names[0]: IMAGES})], axis=1)


def _with_columns(dataset: Any, data: Data, has_template_field: bool) -> Any:
    missing = [old for old in data.columns.values() if old not in dataset.column_names]
    wanted = placeholders(data.prompt_template) if data.prompt_template is not None else []
    missing += [name for name in wanted if name not in dataset.column_names]
    if missing:
        raise ConfigConflictError(
            f"loading the data: it has no column {', '.join(missing)}, but {', '.join(dataset.column_names)}. Fix "
            "[data] columns or prompt_template."
        )
    if taken := taken_names(data.columns, dataset.column_names):
        raise ConfigConflictError(f"loading the data: [data] columns: {', '.join(taken)}.")
    if data.prompt_template is not None:
        template = data.prompt_template
        for name in wanted:
            for row, value in enumerate(dataset[name]):
                check_filling(value, name, f"loading the data: [data] prompt_template: row {row}")
        dataset = dataset.map(lambda row: {"prompt": filled(template, {name: row[name] for name in wanted})})
    if data.columns:
        dataset = dataset.rename_columns({old: new for new, old in data.columns.items()})
    for name, pattern in data.extract.items():
        dataset = _extracted(dataset, name, re.compile(pattern))
    return _as_chat(dataset, data, has_template_field) if data.format == "chat" else dataset


def _images_of(dataset: Any, data: Data, files: str | list[str]) -> Any:
    """A dataset of one column, with a list of images for each row, each of which was decoded once; `None` where no
    images are asked for."""
    from datasets import Features, Image, List, Value

    name = data.images
    if name is None:
        texts = [
            each for each in ("image", IMAGES) if dataset.features.get(each) in (Value("string"), List(Value("string")))
        ]
        if texts:
            raise ConfigConflictError(
                f"loading the data: the column {texts[0]} holds text, and TRL takes it for images. Set [data] images = "
                f"'{texts[0]}', or rename it: "
                f"[data] columns = {{ {texts[0]}_text = '{texts[0]}' }}"
            )
        return None
    if name not in dataset.column_names:
        raise ConfigConflictError(
            f"loading the data: [data] images: it has no column {name}, but {', '.join(dataset.column_names)}."
        )
    held = dataset.select_columns([name])
    kind = held.features[name]
    if isinstance(kind, Image):
        held = held.cast_column(name, Image(decode=False))
    elif isinstance(getattr(kind, "feature", None), Image):
        held = held.cast_column(name, List(Image(decode=False)))
    first = files if isinstance(files, str) else files[0]
    root = Path(first).resolve().parent if is_file(first) else None
    return held.map(
        lambda row, number: {name: _checked_images(row[name], root, number)},
        with_indices=True,
        features=Features({name: List(Image())}),
    )


def _checked_images(value: Any, root: Path | None, number: int) -> list[dict[str, Any]]:
    """Of one row, as datasets stores them."""
    found: list[dict[str, Any]] = []
    for each in [] if value is None else value if isinstance(value, list) else [value]:
        try:
            stored = stored_image(each, root)
            read_image(stored["path"] if stored["bytes"] is None else stored["bytes"])
        except (ValueError, OSError) as error:
            where = each if isinstance(each, str) else each.get("path") if isinstance(each, dict) else None
            raise ConfigConflictError(
                f"loading the data: [data] images: row {number}, image {len(found)}{f' ({where})' if where else ''}: "
                f"{error}. Fix the row, or remove it."
            ) from error
        found.append(stored)
    return found


def stored_image(each: Any, root: Path | None) -> dict[str, Any]:
    """A path, the content of a file, or both as datasets has it, as the latter; a path becomes absolute."""
    path, content = (each, None) if isinstance(each, str) else (None, each)
    if isinstance(each, Mapping):
        path, content = each.get("path"), each.get("bytes")
    if isinstance(content, bytes):
        return {"path": None, "bytes": content}
    if not isinstance(path, str):
        raise ValueError("it is neither a path nor the content of a file")
    if root is None and not os.path.isabs(path):
        raise ValueError("a dataset of the hub must hold its images")
    return {"path": str((root or Path()) / path), "bytes": None}


def _extracted(dataset: Any, name: str, pattern: re.Pattern[str]) -> Any:
    if name not in dataset.column_names:
        raise ConfigConflictError(
            f"loading the data: [data] extract: there is no column {name}, but {', '.join(dataset.column_names)}."
        )
    return dataset.remove_columns(name).add_column(name, extracted(dataset[name], name, pattern))


def extracted(values: Sequence[Any], name: str, pattern: re.Pattern[str]) -> list[str]:
    """What a pattern of `extract` finds in the values of a column.

    Raises:
        ConfigConflictError: it is not found in one of them; quotes the first.
    """
    found = [_found(pattern, value) for value in values]
    if missing := [number for number, each in enumerate(found) if each is None]:
        raise ConfigConflictError(
            f"loading the data: [data] extract: {name} = {pattern.pattern!r} is not found in {len(missing)} of "
            f"{len(found)} rows, first in row {missing[0]}: {str(values[missing[0]])[-80:]!r}. Change the expression, "
            "or remove these rows."
        )
    return [each for each in found if each is not None]


def _found(pattern: re.Pattern[str], value: Any) -> str | None:
    """Its group, or all of it; `None` also where the value is none, or the group took no part."""
    match = None if value is None else pattern.search(str(value))
    found = None if match is None else match[1 if pattern.groups else 0]
    return None if found is None else found.strip()


def _as_chat(dataset: Any, data: Data, has_template_field: bool) -> Any:
    from pyarrow import ArrowException

    try:
        messages: list[dict[str, Any]] = [dict(as_conversation(row, data.system_prompt)) for row in dataset]
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigConflictError(
            "loading the data: [data] format = 'chat': prompt, completion, chosen and rejected hold text or messages, "
            "messages holds messages "
            f'({{"role": ..., "content": ...}}): {error}.'
        ) from error
    names = list(dict.fromkeys(name for row in messages for name in row))
    if not names:
        raise ConfigConflictError(
            "loading the data: [data] format = 'chat' needs a column prompt, completion, messages, chosen or "
            f"rejected; there are {', '.join(dataset.column_names)}. Rename with columns, or use prompt_template."
        )
    for number, row in enumerate(messages):
        if wrong := [name for name in names if not _is_talk(row.get(name))]:
            raise ConfigConflictError(
                f"loading the data: [data] format = 'chat': row {number} has in {', '.join(wrong)} neither text nor "
                "messages "
                f'({{"role": ..., "content": ...}}), but {str(dataset[number][wrong[0]])[:80]}. Fix the row, or '
                "remove it."
            )
    if data.chat_template_kwargs and not has_template_field:
        for row in messages:
            row[TEMPLATE_COLUMN] = data.chat_template_kwargs
        names.append(TEMPLATE_COLUMN)
    try:
        return dataset.map(
            lambda _, index: messages[index],
            with_indices=True,
            remove_columns=[name for name in names if name in dataset.column_names],
        )
    except ArrowException as error:
        raise ConfigConflictError(
            "loading the data: [data] format = 'chat': messages of one column have contents of two kinds, such as "
            f"text and lists of parts: {error}. Use one kind; with parts, leave system_prompt out."
        ) from error


def _is_talk(messages: Any) -> bool:
    return bool(messages) and all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages)


def _under(system_prompt: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not messages:  # a system message alone is no conversation
        return []
    has_own = messages[0].get("role") == "system"
    return [*([] if has_own else [{"role": "system", "content": system_prompt}]), *map(dict, messages)]


def _check_rows(file: str) -> list[str]:
    """What is wrong with its first row, or with its schema."""
    if file.endswith(".parquet"):
        from pyarrow import ArrowException, parquet

        try:
            _columns(file)
            return [] if parquet.read_metadata(file).num_rows else [f"{file} holds no rows"]
        except (ArrowException, OSError) as error:
            return [f"{file} is no Parquet file: {str(error).splitlines()[0]}"]
    try:
        if file.endswith(".csv"):
            return [] if _csv_columns(file, 1)[1] else [f"{file} holds no rows"]
        row = _first_row(file)
    except _UnreadableError as error:
        return [str(error)]
    except UnicodeDecodeError as error:
        return [_not_utf8(file, error)]
    except (ValueError, OSError) as error:
        return [f"{file}: its first line is no JSON: {error}"]
    if row is None:
        return [f"{file} is empty. Write one JSON object per line, a row each"]
    return [] if isinstance(row, dict) else [f"{file}: its first line is no JSON object. Write one row per line"]


def _columns(file: str) -> list[str]:
    if file.endswith(".csv"):
        return _csv_columns(file, 1)[0]
    if not file.endswith(".parquet"):
        row = _first_row(file)
        said = row.get(_SHARED)
        is_shared = (
            isinstance(said, list) and bool(said) and isinstance(said[0], dict) and {"from", "value"} <= set(said[0])
        )
        return ["messages" if each == _SHARED and is_shared else each for each in row]
    from pyarrow import parquet

    schema = parquet.read_schema(file)
    return ["messages" if each.name == _SHARED and "from: " in str(each.type) else each.name for each in schema]


def _first_row(file: str) -> Any:
    """The first row of JSON lines, or of an array of JSON; `None` where there is none."""
    with open(file, encoding="utf-8-sig") as handle:
        line = next((line for line in handle if line.strip()), "")
        if file.endswith(".json") and line.lstrip().startswith("["):
            rows = json.loads(line + handle.read())
            return rows[0] if rows else None
    return json.loads(line) if line else None


def _csv_columns(file: str, rows: int | None = None) -> tuple[list[str], int]:
    """The columns of a CSV file, named as pandas does where they have no name, and how many rows were looked at.

    Args:
        file: its path.
        rows: to look at; by default all.

    Raises:
        _UnreadableError: it is no CSV in UTF-8, two columns have one name, or a row has more cells than there are
            columns.
    """
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        with open(file, encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle)
            filled_lines = filter(None, reader)
            columns = [name or f"Unnamed: {place}" for place, name in enumerate(next(filled_lines, []))]
            if twice := [name for name in dict.fromkeys(columns) if columns.count(name) > 1]:
                raise _UnreadableError(f"{file} has two columns {twice[0]}. Rename one of them")
            number = 0
            for number, row in enumerate(itertools.islice(filled_lines, rows), 1):
                if len(row) > len(columns):
                    raise _UnreadableError(
                        f"{file}: row {number - 1} (line {reader.line_num}) has {len(row)} cells, and there are "
                        f"{len(columns)} columns: "
                        f"{', '.join(columns)}. Put text with commas in quotes"
                    )
            return columns, number
    except UnicodeDecodeError as error:
        raise _UnreadableError(_not_utf8(file, error)) from error
    except (csv.Error, OSError) as error:
        raise _UnreadableError(f"{file} cannot be read as CSV: {error}") from error
    finally:
        csv.field_size_limit(before)


def _not_utf8(file: str, error: UnicodeDecodeError) -> str:
    wrong = f"byte 0x{error.object[error.start]:02x}: {error.reason}"
    return f"{file} is not in UTF-8 ({wrong}). Save it in UTF-8; of Latin-1: iconv -f LATIN1 -t UTF-8"


class _UnreadableError(ValueError):
    """A CSV file that is not taken; says why, and the way out."""
