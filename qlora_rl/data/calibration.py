"""`calibration_rows`: what a base is calibrated on, out of a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_rl.data.files import ANSWERS, DATA_FILES, PROMPTS, not_utf8
from qlora_rl.data.load import read_file
from qlora_rl.data.rows import as_conversation, filled
from qlora_rl.errors import ConfigConflictError

_MOST = 1024  # rows


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
        return [_spoken(row) for row in read_file(file, doing, "calibrate", _MOST)]
    try:
        return [Path(file).read_text(encoding="utf-8")]
    except UnicodeDecodeError as error:
        raise ConfigConflictError(f"{doing}: {not_utf8(file, error)}.") from error
    except OSError as error:
        raise ConfigConflictError(f"{doing}: {file}: {error.strerror}. Pass another file.") from error


def _spoken(row: Mapping[str, Any]) -> Any:
    said = as_conversation(row)
    if "messages" in said:
        return said["messages"]
    question = next((row[name] for name in PROMPTS if isinstance(row.get(name), str)), None)
    if isinstance(row.get("instruction"), str) and isinstance(row.get("input"), str):  # Alpaca's
        question = filled("{instruction}\n\n{input}", row)
    answer = next((row[name] for name in ANSWERS if isinstance(row.get(name), str)), None)
    asked = said.get("prompt") or ([] if question is None else [{"role": "user", "content": question}])
    if asked and "text" not in row:
        told = [] if answer is None else [{"role": "assistant", "content": answer}]
        return [*asked, *(said.get("completion") or said.get("chosen") or told)]
    return row["text"] if "text" in row else "\n\n".join(each for each in row.values() if isinstance(each, str))
