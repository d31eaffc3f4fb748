"""Datasets, of files or of the hub, loaded and shaped as [data] of a run's file asks."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_rl.base.hub import hub_reachable, why_missing
from qlora_rl.contracts import IMAGES
from qlora_rl.data.files import (
    READERS,
    SHARED,
    UnreadableError,
    broken_line,
    check_files,
    csv_columns,
    is_file,
)
from qlora_rl.data.rows import (
    TEACHER_COLUMN,
    as_conversation,
    check_filling,
    extracted,
    filled,
    placeholders,
    stored_image,
)
from qlora_rl.errors import ConfigConflictError, collected
from qlora_rl.image_io import read_image

Data = Any  # the table of `config.schema`, which is a layer above

# What ShareGPT calls those who speak.
_SPEAKERS = {"human": "user", "gpt": "assistant"}
# TRL reads the template's arguments of a row there, where its config has no field for them.
TEMPLATE_COLUMN = "chat_template_kwargs"
# How datasets says which configurations there are.
_SUBSETS = re.compile(r"available configs: \[(.+)\]")


def load_data(data: Data, *, has_template_field: bool = False, teacher: Any = None) -> tuple[Any, Any]:
    """The dataset to train on and the one to evaluate on (`None` where there is none), with the columns as asked.

    Args:
        data: the table.
        has_template_field: TRL's config of the method takes `chat_template_kwargs`; otherwise TRL reads them in a
            column.
        teacher: the table [teacher]; a prompt of its own becomes the column `teacher_prompt`.

    Raises:
        ConfigConflictError: a dataset cannot be read; names it.
    """
    train = _shaped(read_rows(data), data, has_template_field, data.train, teacher)
    return train, load_eval(data, has_template_field, teacher)


def load_eval(data: Data, has_template_field: bool = True, teacher: Any = None) -> Any:
    """The dataset to evaluate on, with the columns as asked; `None` where there is none.

    Raises:
        ConfigConflictError: it cannot be read; names it.
    """
    if data.eval is None:
        return None
    return _shaped(
        _load(data.eval, data.eval_split, "[data] eval", data.subset, data.revision),
        data,
        has_template_field,
        data.eval,
        teacher,
    )


def read_rows(data: Data) -> Any:
    """The dataset to train on as it is stored: columns, names and rows.

    Raises:
        ConfigConflictError: it cannot be read; names it.
    """
    return _load(data.train, data.split, "[data] train", data.subset, data.revision)


def read_file(
    file: str | os.PathLike[str], doing: str = "reading the rows", place: str = "--data", limit: int | None = None
) -> Any:
    """The rows of a local file as [data] reads it: columns, names and rows, with images as they are stored.

    Args:
        file: its path.
        doing: begins the message of an error.
        place: the option that names the file.
        limit: rows; by default all.

    Raises:
        ConfigConflictError: it cannot be read; says why.
    """
    if wrong := check_files([os.fspath(file)]):
        raise collected(doing, wrong, ConfigConflictError)
    found = _as_stored(_load(os.fspath(file), "train", place))
    return found.select(range(min(len(found), limit or len(found))))


def _as_stored(dataset: Any) -> Any:
    """With images that are not decoded."""
    from datasets import Image, List

    for name, kind in dataset.features.items():
        if isinstance(kind, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(getattr(kind, "feature", None), Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    return dataset


def columns_after(data: Data, there: Sequence[str]) -> list[str]:
    """The columns when they are renamed and the prompt is built."""
    back = {old: new for new, old in data.columns.items()}
    return [back.get(name, name) for name in there] + (["prompt"] if data.prompt_template is not None else [])


def column_problems(data: Data, there: Sequence[str]) -> list[tuple[str, str]]:
    """What fields of [data] ask of columns that a dataset does not have: field and text, with the way out."""
    olds = list(data.columns.values())
    asked = [("images", data.images), *(("columns", old) for old in olds)]
    with contextlib.suppress(ValueError):  # it is no template, which is said
        asked += [("prompt_template", name) for name in placeholders(data.prompt_template or "")]
    found = [(field, name, there) for field, name in asked if name is not None and name not in there]
    after = columns_after(data, [name for name in there if name != data.images])
    found += [("extract", name, after) for name in data.extract if name not in after and not found]
    return [
        *((field, f"there is no column {name!r}; there are {', '.join(names)}") for field, name, names in found),
        *(
            ("columns", f"{old} gets two names, and a column has one")
            for old in dict.fromkeys(olds)
            if olds.count(old) > 1
        ),
        *(
            (
                "columns",
                f"there is a column {new} already, and {old} is to be renamed to it; rename that one too: "
                f"{new}_before = '{new}'",
            )
            for new, old in data.columns.items()
            if new in there and new not in olds
        ),
    ]


def teacher_problems(teacher: Any, data: Data, there: Sequence[str]) -> list[tuple[str, str]]:
    """What fields of [teacher] ask of columns, after those of [data], that a dataset does not have."""
    after, asked = columns_after(data, there), [("prompt", teacher.prompt)]
    with contextlib.suppress(ValueError):  # it is no template, which is said
        asked += [("prompt_template", name) for name in placeholders(teacher.prompt_template or "")]
    return [
        (field, f"there is no column {name!r}; there are {', '.join(sorted(after))}")
        for field, name in asked
        if name is not None and name not in after
    ]


def _load(
    files: str | list[str], split: str, place: str, subset: str | None = None, revision: str | None = None
) -> Any:
    from datasets import load_dataset

    names = [files] if isinstance(files, str) else files
    try:
        if is_file(names[0]):
            options = _as_text(names) if names[0].endswith(".csv") else {}
            with _without_log():  # it logs what it raises
                found = load_dataset(READERS[Path(names[0]).suffix], data_files=names, split="train", **options)
            if READERS[Path(names[0]).suffix] == "json" and "Value('timestamp" in repr(found.features):
                found = _as_written(names)
        else:
            hub_reachable()
            found = load_dataset(names[0], subset, split=split, revision=revision)
        return _with_messages(found)
    except UnreadableError as error:
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
        if broken := broken_line(names):
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
        UnreadableError: one of them cannot be read, or the columns differ.
    """
    from datasets import Features, Value

    columns = [csv_columns(file)[0] for file in files]
    for file, each in zip(files, columns, strict=True):
        if set(each) != set(columns[0]):
            raise UnreadableError(
                f"{files[0]} has the columns {', '.join(columns[0])}, and {file} {', '.join(each)}. Give them the same"
            )
    features = Features({name: Value("string") for name in columns[0]})
    return {"features": features, "keep_default_na": False, "na_filter": False, "encoding": "utf-8-sig"}


def _as_written(files: Sequence[str]) -> Any:
    """Rows of JSON in which a text is text, also one like 2024-05-01, which pyarrow takes for a time."""
    from datasets import Dataset

    rows: list[dict[str, Any]] = []
    for file in files:
        text = Path(file).read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            rows += json.loads(text)
        else:
            rows += [json.loads(line) for line in text.split("\n") if line.strip()]
    names = dict.fromkeys(name for row in rows for name in row)
    return Dataset.from_list([{name: row.get(name) for name in names} for row in rows])


def _with_messages(dataset: Any) -> Any:
    """ShareGPT's conversations as `messages`; any other dataset as it is."""
    kind = getattr(dataset.features, "get", lambda _: None)(SHARED)
    said = getattr(kind, "feature", None)
    if not isinstance(said, Mapping) or not {"from", "value"} <= set(said) or "messages" in dataset.column_names:
        return dataset
    return dataset.map(
        lambda row: {
            "messages": [
                {"role": _SPEAKERS.get(each["from"], each["from"]), "content": each["value"]} for each in row[SHARED]
            ]
        },
        remove_columns=[SHARED],
    )


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    """Nothing of datasets is logged while it loads."""
    from datasets.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _shaped(dataset: Any, data: Data, has_template_field: bool, files: str | list[str], teacher: Any = None) -> Any:
    if problems := column_problems(data, dataset.column_names):
        raise collected(
            "loading the data", [f"[data] {field}: {text}" for field, text in problems], ConfigConflictError
        )
    if data.limit is not None:
        dataset = dataset.select(range(min(data.limit, len(dataset))))
    images = _images_of(dataset, data, files)
    if images is not None:
        dataset = dataset.remove_columns(images.column_names)
    dataset = _with_columns(dataset, data, has_template_field, teacher)
    if images is None:
        return dataset
    if IMAGES in dataset.column_names:
        raise ConfigConflictError(
            f"loading the data: [data] images: {data.images} becomes the column {IMAGES}, and "
            f"there is one. Rename that: columns = {{ more = '{IMAGES}' }}"
        )
    from datasets import concatenate_datasets

    return concatenate_datasets([dataset, images.rename_columns({images.column_names[0]: IMAGES})], axis=1)


def _filled_in(dataset: Any, template: str, column: str, table: str) -> Any:
    """With a column that a template makes of others."""
    wanted = placeholders(template)
    for name in wanted:
        for row, value in enumerate(dataset[name]):
            check_filling(value, name, f"loading the data: [{table}] prompt_template: row {row}")
    return dataset.map(lambda row: {column: filled(template, {name: row[name] for name in wanted})})


def _with_columns(dataset: Any, data: Data, has_template_field: bool, teacher: Any) -> Any:
    if data.prompt_template is not None:
        dataset = _filled_in(dataset, data.prompt_template, "prompt", "data")
    if data.columns:
        dataset = dataset.rename_columns({old: new for new, old in data.columns.items()})
    for name, pattern in data.extract.items():
        values = extracted(dataset[name], name, re.compile(pattern))
        dataset = dataset.remove_columns(name).add_column(name, values)
    if has_teacher := teacher is not None and teacher.has_prompt:
        asked = teacher.prompt or "prompt"
        if teacher.prompt_template is not None:
            dataset = _filled_in(dataset, teacher.prompt_template, TEACHER_COLUMN, "teacher")
        elif asked != TEACHER_COLUMN:
            dataset = dataset.map(lambda row: {TEACHER_COLUMN: row[asked]})
    of_teacher = {"of_teacher": teacher.system_prompt, "has_teacher": True} if has_teacher else {}
    return _as_chat(dataset, data, has_template_field, of_teacher) if data.format == "chat" else dataset


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
    held = _as_stored(dataset.select_columns([name]))
    first = files if isinstance(files, str) else files[0]
    root = Path(first).resolve().parent if is_file(first) else None
    return held.map(
        lambda row, number: {name: checked_images(row[name], root, number)},
        with_indices=True,
        features=Features({name: List(Image())}),
    )


def checked_images(value: Any, root: Path | None, number: int) -> list[dict[str, Any]]:
    """Of one row, as datasets stores them.

    Raises:
        ConfigConflictError: one cannot be read; names the row.
    """
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


def _as_chat(dataset: Any, data: Data, has_template_field: bool, of_teacher: Mapping[str, Any]) -> Any:
    from pyarrow import ArrowException

    try:
        messages: list[dict[str, Any]] = [
            dict(as_conversation(row, data.system_prompt, **of_teacher)) for row in dataset
        ]
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
