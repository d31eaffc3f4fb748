"""`as_trained`: rows and texts of a user, in the form in which the run had its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qlora_rl.config.data import as_conversation, extracted, placeholders
from qlora_rl.config.schema import Data


def as_trained(rows: Sequence[Mapping[str, Any]], data: Data | None) -> list[dict[str, Any]]:
    """Rows of an evaluation with the prompts and references that [data] of the run makes of its own rows.

    The template is applied where a row has all that it names, as in training, also where it has a prompt. A step that a row has behind it
    is left out: messages; a new name that is taken; a pattern of `extract` that is found in no row.

    Args:
        rows: as they were read.
        data: of the run; `None` changes nothing.

    Raises:
        ConfigConflictError: a pattern of `extract` is found in some rows only.
    """
    found = [dict(row) for row in rows]
    if data is None:
        return found
    for row in found:
        _add_prompt(row, data.prompt_template)
        for new, old in data.columns.items():
            if old in row and new not in row:
                row[new] = row.pop(old)
        if data.format == "chat" and isinstance(row.get("prompt"), str | list):
            row["prompt"] = as_conversation({"prompt": row["prompt"]}, data.system_prompt)["prompt"]
    for name, pattern in data.extract.items():
        values = [row.get(name) for row in found]
        if any(value is not None and re.search(pattern, str(value)) for value in values):
            for row, value in zip(found, extracted(values, name, re.compile(pattern)), strict=True):
                row[name] = value
    return found


def turn(text: str, data: Data | None) -> str:
    """What a user says, in the run's `prompt_template` where that has one place for it."""
    names = placeholders(data.prompt_template) if data is not None and data.prompt_template is not None else []
    return data.prompt_template.format(**{names[0]: text}) if data and len(set(names)) == 1 else text


def _add_prompt(row: dict[str, Any], template: str | None) -> None:
    names = placeholders(template) if template is not None else []
    # A list of messages is no text to be put into a template.
    if template is not None and all(row.get(name) is not None and not isinstance(row[name], list) for name in names):
        row["prompt"] = template.format(**{name: row[name] for name in names})
