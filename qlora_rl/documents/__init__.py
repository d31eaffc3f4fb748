"""JSON objects of others: a file that may be damaged, a body from outside. Whatever is wrong is one `ValueError`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text.

    Raises:
        ValueError: it holds none; says why.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a JSON {type(found).__name__} instead of an object")
    return found


def read_object(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: it holds none; says why.
        OSError: it cannot be read.
    """
    return parse_object(Path(file).read_bytes())


def printable(text: str) -> str:
    """What a stream or a log can be given: half characters, which JSON may hold, are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()
