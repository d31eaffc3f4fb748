"""`as_trained`: rows and texts of a user, in the form in which the run had its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_rl.config.schema import Data
from qlora_rl.contracts import IMAGES
from qlora_rl.data.load import checked_images
from qlora_rl.data.rows import as_conversation, check_filling, extracted, filled, placeholders
from qlora_rl.errors import ConfigConflictError
from qlora_rl.image_io import read_image


def as_trained(rows: Sequence[Mapping[str, Any]], data: Data | None) -> list[dict[str, Any]]:
    """Rows of an evaluation with the prompts and references that [data] of the run makes of its own rows.

    The template is applied where a row has all that it names, as in training, also where it has a prompt. A step that a
    row has behind it is left out: messages; a new name that is taken; a pattern of `extract` that is found in no row.

    Args:
        rows: as they were read.
        data: of the run; `None` changes nothing.

    Raises:
        ConfigConflictError: a pattern of `extract` is found in some rows only; a row without a prompt of its own has
            for the template neither text nor numbers.
    """
    found = [dict(row) for row in rows]
    if data is None:
        return found
    for number, row in enumerate(found):
        _add_prompt(row, data.prompt_template, number)
        for new, old in data.columns.items():
            if row.get(old) is not None and row.get(new) is None:  # a file's rows have all of its columns
                row[new] = row.pop(old)
        if data.format == "chat" and isinstance(row.get("prompt"), str | list):
            row["prompt"] = as_conversation({"prompt": row["prompt"]}, data.system_prompt)["prompt"]
    for name, pattern in data.extract.items():
        values = [row.get(name) for row in found]
        if any(value is not None and re.search(pattern, str(value)) for value in values):
            for row, value in zip(found, extracted(values, name, re.compile(pattern)), strict=True):
                row[name] = value
    return found


def open_images(rows: Sequence[Mapping[str, Any]], data: Data | None, root: Path) -> list[dict[str, Any]]:
    """Rows of a file with the images that [data] images of the run names, as PIL images in the column `images`.

    Args:
        rows: as they were read: a path or a stored image, or a list of them.
        data: of the run; `None`, or one without images, changes nothing.
        root: directory that paths count from.

    Raises:
        ConfigConflictError: an image cannot be read; names the row.
    """
    found = [dict(row) for row in rows]
    if data is None or data.images is None:
        return found
    for number, row in enumerate(found):
        kept = checked_images(row.pop(data.images, None), root, number)
        row[IMAGES] = [read_image(each["path"] if each["bytes"] is None else each["bytes"]) for each in kept]
    return found


def turn(text: str, data: Data | None) -> str:
    """What a user says, in the run's `prompt_template` where that has one place for it."""
    names = placeholders(data.prompt_template) if data is not None and data.prompt_template is not None else []
    return data.prompt_template.format(**{names[0]: text}) if data and len(set(names)) == 1 else text


def _add_prompt(row: dict[str, Any], template: str | None, number: int) -> None:
    names = placeholders(template) if template is not None else []
    if template is None or not all(name in row for name in names):
        return
    try:
        for name in names:
            check_filling(row[name], name, f"reading the rows: [data] prompt_template of the run: row {number}")
    except ConfigConflictError:
        if row.get("prompt") is None:
            raise
        return  # the row's own prompt stays, which may be a list of messages
    row["prompt"] = filled(template, {name: row[name] for name in names})
