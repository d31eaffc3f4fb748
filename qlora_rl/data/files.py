"""Data files of this machine: formats, columns and first rows, without a library that takes seconds to import."""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
# What is no dataset of the hub either.
_OTHER_FILES = (".tsv", ".txt", ".xlsx", ".xls", ".ods", ".arrow", ".feather", ".gz", ".zip", ".yaml", ".yml")
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# What datasets call the question and its answer, where they do not say prompt and completion.
PROMPTS = ("question", "problem", "instruction", "query", "input")
ANSWERS = ("answer", "final_answer", "ground_truth", "solution", "completion", "response", "output", "target")
# ShareGPT's column.
SHARED = "conversations"
# Characters in a cell of CSV; csv's own limit is 131,072.
_LONGEST_CELL = 2**31 - 1


def is_file(text: str) -> bool:
    """A dataset on disk, not one on the hub."""
    return text.endswith((*DATA_FILES, *_OTHER_FILES)) or looks_like_path(text)


def looks_like_path(text: str) -> bool:
    """It is no name of the hub, whether or not there is such a file."""
    return text.startswith(("/", ".", "~"))


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
    if not found and len({READERS[Path(file).suffix] for file in files}) > 1:
        found.append("holds files of several kinds. Convert them to one kind")
    return found


def known_columns(files: str | list[str] | None) -> list[str] | None:
    """Columns of a dataset on disk; `None` where they cannot be known before it is loaded."""
    first = files[0] if isinstance(files, list) and files else files
    if not isinstance(first, str) or not first.endswith(DATA_FILES) or not os.path.isfile(first) or _check_rows(first):
        return None
    return _columns(first)


def broken_line(files: Sequence[str]) -> str:
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


def csv_columns(file: str, rows: int | None = None) -> tuple[list[str], int]:
    """The columns of a CSV file, named as pandas does where they have no name, and how many rows were looked at.

    Args:
        file: its path.
        rows: to look at; by default all.

    Raises:
        UnreadableError: it is no CSV in UTF-8, two columns have one name, or a row has more cells than there are
            columns.
    """
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        with open(file, encoding="utf-8-sig", newline="") as handle:
            reader = csv.reader(handle)
            filled_lines = filter(None, reader)
            columns = [name or f"Unnamed: {place}" for place, name in enumerate(next(filled_lines, []))]
            if len(columns) == 1 and (other := [each for each in (";", "\t", "|") if each in columns[0]]):
                raise UnreadableError(
                    f"{file} has one column, {columns[0]!r}: its cells end with {other[0]!r}. Save it with commas"
                )
            if twice := [name for name in dict.fromkeys(columns) if columns.count(name) > 1]:
                raise UnreadableError(f"{file} has two columns {twice[0]}. Rename one of them")
            number = 0
            for number, row in enumerate(itertools.islice(filled_lines, rows), 1):
                if len(row) > len(columns):
                    raise UnreadableError(
                        f"{file}: row {number - 1} (line {reader.line_num}) has {len(row)} cells, and there are "
                        f"{len(columns)} columns: "
                        f"{', '.join(columns)}. Put text with commas in quotes"
                    )
            return columns, number
    except UnicodeDecodeError as error:
        raise UnreadableError(not_utf8(file, error)) from error
    except (csv.Error, OSError) as error:
        raise UnreadableError(f"{file} cannot be read as CSV: {error}") from error
    finally:
        csv.field_size_limit(before)


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
            return [] if csv_columns(file, 1)[1] else [f"{file} holds no rows"]
        row = _first_row(file)
    except UnreadableError as error:
        return [str(error)]
    except UnicodeDecodeError as error:
        return [not_utf8(file, error)]
    except (ValueError, OSError) as error:
        return [f"{file}: its first line is no JSON: {error}"]
    if row is None:
        return [f"{file} is empty. Write one JSON object per line, a row each"]
    return [] if isinstance(row, dict) else [f"{file}: its first line is no JSON object. Write one row per line"]


def _columns(file: str) -> list[str]:
    if file.endswith(".csv"):
        return csv_columns(file, 1)[0]
    if not file.endswith(".parquet"):
        row = _first_row(file)
        said = row.get(SHARED)
        is_shared = (
            isinstance(said, list) and bool(said) and isinstance(said[0], dict) and {"from", "value"} <= set(said[0])
        )
        return ["messages" if each == SHARED and is_shared else each for each in row]
    from pyarrow import parquet

    schema = parquet.read_schema(file)
    return ["messages" if each.name == SHARED and "from: " in str(each.type) else each.name for each in schema]


def _first_row(file: str) -> Any:
    """The first row of JSON lines, or of an array of JSON; `None` where there is none."""
    with open(file, encoding="utf-8-sig") as handle:
        line = next((line for line in handle if line.strip()), "")
        if file.endswith(".json") and line.lstrip().startswith("["):
            rows = json.loads(line + handle.read())
            return rows[0] if rows else None
    return json.loads(line) if line else None


def not_utf8(file: str, error: UnicodeDecodeError) -> str:
    """What is wrong with a file that is in another encoding, and what to do."""
    wrong = f"byte 0x{error.object[error.start]:02x}: {error.reason}"
    return f"{file} is not in UTF-8 ({wrong}). Save it in UTF-8; of Latin-1: iconv -f LATIN1 -t UTF-8"


class UnreadableError(ValueError):
    """A CSV file that is not taken; says why, and the way out."""
