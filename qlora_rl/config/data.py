"""Datasets: files of this machine, or one of the hub; looked at before they are loaded."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_rl.config.paths import DATA_FILES, is_file
from qlora_rl.config.schema import Data
from qlora_rl.errors import ConfigConflictError

_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def check_files(files: Sequence[str]) -> list[str]:
    """What is wrong with local files, as far as names and first rows tell."""
    found = []
    for file in files:
        if Path(file).suffix not in DATA_FILES:
            found.append(f"{file} is none of {', '.join(DATA_FILES)}")
        elif not os.path.isfile(file):
            found.append(
                f"there is no file {file} (a path that is not absolute counts from the directory of the run's file)"
            )
        else:
            found += _check_rows(file)
    if not found and len({_READERS[Path(file).suffix] for file in files}) > 1:
        found.append("holds JSON lines and Parquet; make two runs of one kind, or one kind of them")
    return found


def columns_after(files: Any, names: Mapping[str, str]) -> list[str] | None:
    """Columns of a dataset on disk when they are renamed; `None` where they cannot be known before it is loaded."""
    first = files[0] if isinstance(files, list) and files else files
    if not isinstance(first, str) or not first.endswith(DATA_FILES) or not os.path.isfile(first) or _check_rows(first):
        return None
    back = {old: new for new, old in names.items()}
    return [back.get(name, name) for name in _columns(first)]


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


def load_data(data: Data) -> tuple[Any, Any]:
    """The dataset to train on and the one to evaluate on (`None` where there is none), with the columns as asked.

    Raises:
        ConfigConflictError: a dataset cannot be read; names it.
    """
    train = _shaped(_load(data.train, data, data.split, "train"), data)
    held_out = _shaped(_load(data.eval, data, data.eval_split, "eval"), data) if data.eval is not None else None
    return train, held_out


def _load(files: str | list[str], data: Data, split: str, place: str) -> Any:
    from datasets import load_dataset

    names = [files] if isinstance(files, str) else files
    try:
        if is_file(names[0]):
            return load_dataset(_READERS[Path(names[0]).suffix], data_files=names, split="train")
        return load_dataset(names[0], data.subset, split=split, revision=data.revision)
    except Exception as error:  # whatever the library finds: the file is the user's, and so is the way out
        reason = error.__cause__ or error
        raise ConfigConflictError(
            f"loading the data: [data] {place}: {', '.join(names)} cannot be read ({type(reason).__name__}: {reason}). Mend it, "
            "or name another."
        ) from error


def _shaped(dataset: Any, data: Data) -> Any:
    if data.limit is not None:
        dataset = dataset.select(range(min(data.limit, len(dataset))))
    missing = [old for old in data.columns.values() if old not in dataset.column_names]
    wanted = placeholders(data.prompt_template) if data.prompt_template is not None else []
    missing += [name for name in wanted if name not in dataset.column_names]
    if missing:
        raise ConfigConflictError(
            f"loading the data: it has no column {', '.join(missing)}, but {', '.join(dataset.column_names)}. Mend [data] columns "
            "or prompt_template."
        )
    if data.prompt_template is not None:
        template = data.prompt_template
        dataset = dataset.map(lambda row: {"prompt": template.format(**{name: row[name] for name in wanted})})
    return dataset.rename_columns({old: new for new, old in data.columns.items()}) if data.columns else dataset


def _check_rows(file: str) -> list[str]:
    """What is wrong with its first row, or with its schema."""
    if file.endswith(".parquet"):
        from pyarrow import ArrowException

        try:
            _columns(file)
        except (ArrowException, OSError) as error:
            return [f"{file} is no Parquet file: {str(error).splitlines()[0]}"]
        return []
    try:
        row = _first_row(file)
    except (ValueError, OSError) as error:
        return [f"{file}: its first line is no JSON: {error}"]
    if row is None:
        return [f"{file} is empty"]
    return [] if isinstance(row, dict) else [f"{file}: its first line is no JSON object. Write one row per line"]


def _columns(file: str) -> list[str]:
    if not file.endswith(".parquet"):
        return list(_first_row(file))
    from pyarrow import parquet

    return list(parquet.read_schema(file).names)


def _first_row(file: str) -> Any:
    """The first row of JSON lines; `None` where there is none."""
    with open(file, encoding="utf-8") as handle:
        line = next((line for line in handle if line.strip()), "")
    return json.loads(line) if line else None
