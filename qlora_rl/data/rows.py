"""What the fields of [data] make of a row: templates, patterns, messages, images."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qlora_rl.errors import ConfigConflictError

# What a teacher reads in place of the prompt.
TEACHER_COLUMN = "teacher_prompt"
# Columns whose text one side of a conversation says.
_SAID_BY = {"prompt": "user", "completion": "assistant", "chosen": "assistant", "rejected": "assistant"}
# The place that a template ends with, the blank lines before it, and the ends of lines after it.
_LAST_PLACE = re.compile(r"\n*(\{[^{}]*\})(\n*)\Z")


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


def as_conversation(
    row: Mapping[str, Any],
    system_prompt: str | None = None,
    of_teacher: str | None = None,
    *,
    has_teacher: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """The columns of a row that hold what is said, as lists of messages.

    Args:
        row: "prompt" (the user's turn), "completion", "chosen", "rejected" (the assistant's), as text or as messages;
            or "messages".
        system_prompt: first message, where a conversation does not begin with a system message of its own.
        of_teacher: in place of it before what the teacher reads.
        has_teacher: "teacher_prompt" is what a teacher reads (a user's turn); otherwise a column as any other.
    """
    said_by = _SAID_BY | ({TEACHER_COLUMN: "user"} if has_teacher else {})
    found = {
        name: [{"role": role, "content": row[name]}] if isinstance(row[name], str) else list(row[name])
        for name, role in said_by.items()
        if row.get(name) is not None
    }
    if row.get("messages") is not None:
        found["messages"] = list(row["messages"])
    if system_prompt is not None:
        # Without a prompt, a preference's two sides are whole conversations.
        for name in ("messages", "prompt") if "prompt" in found or "messages" in found else ("chosen", "rejected"):
            if name in found:
                found[name] = _under(system_prompt, found[name])
    if TEACHER_COLUMN in found and (system := system_prompt if of_teacher is None else of_teacher) is not None:
        found[TEACHER_COLUMN] = _under(system, found[TEACHER_COLUMN], replace=of_teacher is not None)
    return found


def reading(prompts: Sequence[Any], read: Sequence[Any]) -> dict[str, Any] | None:
    """What a teacher reads in place of each prompt, where it is made of the prompt in one way in all rows: `before`,
    messages in place of those before the last one, and `text`, the pieces that the prompt's last text joins. `None`
    where rows differ otherwise, as with an answer, or there is one row only.

    Args:
        prompts: text or messages.
        read: likewise, in the same order.
    """
    ways = []
    for prompt, other in zip(prompts, read, strict=True):
        before: list[Any] = []
        if isinstance(prompt, list) and isinstance(other, list) and prompt and other:
            before, prompt, other = other[:-1], prompt[-1].get("content"), other[-1].get("content")
        if not (isinstance(prompt, str) and isinstance(other, str) and prompt in other and prompt):
            return None
        ways.append({"before": before, "text": other.split(prompt)})
    return ways[0] if len(ways) > 1 and all(way == ways[0] for way in ways) else None


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


def _found(pattern: re.Pattern[str], value: Any) -> str | None:
    """Its group, or all of it; `None` also where the value is none, or the group took no part."""
    match = None if value is None else pattern.search(str(value))
    found = None if match is None else match[1 if pattern.groups else 0]
    return None if found is None else found.strip()


def _under(system_prompt: str, messages: Sequence[Mapping[str, Any]], *, replace: bool = False) -> list[dict[str, Any]]:
    if not messages:  # a system message alone is no conversation
        return []
    own = [dict(each) for each in messages[:1] if each.get("role") == "system"]
    system = [{"role": "system", "content": system_prompt}] if replace or not own else own
    return [*system, *map(dict, messages[len(own) :])]
