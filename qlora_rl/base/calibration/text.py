"""Text as token ids for a calibration: of a user, or that of the package."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from typing import Any

from qlora_rl.errors import ConfigConflictError

# A row: text, the messages of a conversation, or token ids.
Row = str | Sequence[Mapping[str, Any]] | Sequence[int]

# Of one sequence, and of all of a calibration.
TOKENS, ALL_TOKENS = 512, 16_384
_DAY = datetime(2024, 7, 26)


def shipped_text(*, held_out: bool = False) -> list[Row]:
    """The package's own rows, to calibrate on or to measure on."""
    pieces = tomllib.loads((files(__package__) / "text.toml").read_text(encoding="utf-8"))["piece"]
    return [
        piece["text"] if "text" in piece else [{"role": role, "content": piece[role]} for role in ("user", "assistant")]
        for piece in pieces
        if piece.get("held_out", False) == held_out
    ]


def digest_rows(rows: Sequence[Row]) -> str:
    """SHA-256 over rows (hex)."""
    return hashlib.sha256(json.dumps(list(rows), sort_keys=True, default=str).encode()).hexdigest()


def token_sequences(rows: Sequence[Row], tokenizer: Any, model: Any) -> list[list[int]]:
    """The rows as token ids, in their order, until `ALL_TOKENS` are reached; long texts in parts of `TOKENS`, of long
    conversations the beginning.

    Args:
        tokenizer: or a processor with one; a conversation goes through its chat template, if it has one.
        model: of transformers, whose positions and embedding bound them.

    Raises:
        ConfigConflictError: there is no text, or the chat template does not take a conversation.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    longest = min(TOKENS, getattr(model.config.get_text_config(), "max_position_embeddings", None) or TOKENS)
    found: list[list[int]] = []
    total = 0
    for part in _parts(rows, tokenizer, longest):
        if len(part) > 1:
            found.append(part[: ALL_TOKENS - total])
            total += len(found[-1])
        if total >= ALL_TOKENS:
            break
    if not found:
        raise ConfigConflictError("calibrating a base: the rows hold no text. Pass rows with text.")
    if (largest := max(max(part) for part in found)) >= vocabulary:
        raise ConfigConflictError(
            f"calibrating a base: token {largest} has no row in the embedding, which has {vocabulary}. Pass rows "
            "without it."
        )
    return found


def _parts(rows: Sequence[Row], tokenizer: Any, longest: int) -> Iterator[list[int]]:
    for number, row in enumerate(rows):
        if isinstance(row, str):
            ids = list(tokenizer(row, verbose=False)["input_ids"])
            yield from (ids[start : start + longest] for start in range(0, len(ids), longest))
        elif row and isinstance(row[0], int):
            yield [each for each in row[:longest] if isinstance(each, int)]
        elif row:
            yield _conversation(row, tokenizer, number)[:longest]


def _conversation(messages: Any, tokenizer: Any, number: int) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        return list(
            tokenizer("\n\n".join(str(each.get("content") or "") for each in messages), verbose=False)["input_ids"]
        )
    try:
        # Some templates write today's date: the same text is to make the same base tomorrow.
        made = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, strftime_now=_DAY.strftime, date_string=f"{_DAY:%d %b %Y}"
        )
    except Exception as error:  # jinja's, or whatever else a template comes to
        raise ConfigConflictError(
            f"calibrating a base: row {number}: the chat template does not take its messages ({type(error).__name__}: "
            f"{error}). Fix the row, or remove it."
        ) from error
    return list(made["input_ids"])
