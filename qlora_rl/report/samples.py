"""Is an answer right? Said by the run, or read off the text."""

from __future__ import annotations

import re
from typing import Any

from .quantities import finite

_NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_CLOSING = re.compile(r"(?:</?\w+/?>|[\s.!?;,:)\]}\"'*$`])+$")


def judge_sample(sample: dict[str, Any], when: str) -> bool | None:
    """Whether `sample[when]` ("before" or "after") is right; `None` where it is unknown.

    A field `before_right` or `after_right` decides. Without it a text is right when its last number is the answer, or,
    for an answer that is no number, when the text ends with it.
    """
    said = sample.get(f"{when}_right")
    if isinstance(said, bool):
        return said
    text, answer = sample.get(when), sample.get("answer")
    if text is None or answer is None or not str(answer).strip():
        return None
    text, wanted = str(text), _number(str(answer).strip())
    if wanted is None:
        return _CLOSING.sub("", text).casefold().endswith(_CLOSING.sub("", str(answer).strip()).casefold())
    found = _NUMBER.findall(text)
    return bool(found) and _number(found[-1]) == wanted


def _number(text: str) -> float | None:
    if not _NUMBER.fullmatch(text):
        return None
    return finite(float(text.replace(",", "").replace("−", "-")))
