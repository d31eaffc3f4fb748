r"""A reward that compares formulas: `\frac{1}{2}`, `0.5` and `\sqrt{1/4}` are one answer. Needs math-verify."""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
from collections.abc import Sequence
from typing import Any

from qlora_rl.rewards.match import numeric_match, references, text_of

logger = logging.getLogger(__name__)


def math_match(completions: Sequence[Any], *, column: str = "answer", **columns: Any) -> list[float | None]:
    r"""1 where the completion's answer equals the reference's as mathematics; else 0.

    With math-verify (the extra `math`) both are parsed, as LaTeX or plain text, and compared by a computer algebra
    system: intervals, sets, equations and units too. Where that finds no answer in a text, and without math-verify,
    numbers are compared (`numeric_match`).

    Args:
        completions: B of them, text or messages.
        column: of the dataset, which holds the references: an answer, or a worked solution that ends with one.
        columns: what TRL passes: the dataset's columns and more, B values each.

    Returns:
        B rewards; `None` (TRL leaves the completion out) where the reference holds no answer.
    """
    by_number = numeric_match(completions, column=column, **columns)
    if not _has_math_verify():
        return by_number
    wanted = references(columns, column, len(completions))
    return [
        _verified(text_of(each), str(reference), number)
        for each, reference, number in zip(completions, wanted, by_number, strict=True)
    ]


def _verified(text: str, reference: str, number: float | None) -> float | None:
    from math_verify import parse, verify

    # Its time limits are signals, which only the main thread may set.
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    wanted = _behind_marker(reference)
    gold = parse(wanted, parsing_timeout=seconds) or parse(f"${wanted}$", parsing_timeout=seconds)  # a bare "x^2"
    said = parse(_behind_marker(text), parsing_timeout=seconds)
    return float(verify(gold, said, timeout_seconds=seconds)) if gold and said else number


def _behind_marker(text: str) -> str:
    """What stands behind GSM8K's mark of the answer, or all of it."""
    return text.rpartition("####")[2].strip()


@functools.cache
def _has_math_verify() -> bool:
    found = importlib.util.find_spec("math_verify") is not None
    if not found:
        logger.warning(
            "math_match: math-verify is not installed, so numbers are compared only. pip install 'qlora-rl[math]'"
        )
        return False
    from math_verify import parse, verify

    # The first comparison imports and caches much of sympy: without a time limit, or a busy machine would give a right
    # answer 0.
    verify(parse("$(x+1)^2$", parsing_timeout=None), parse("$x^2+2x+1$", parsing_timeout=None), timeout_seconds=None)
    return True
