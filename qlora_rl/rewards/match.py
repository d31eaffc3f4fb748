"""Rewards that compare text: exactly, by its final number, by its form, by its length; and several as one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from qlora_rl.errors import ConfigConflictError
from qlora_rl.rewards.numbers import final_number


def exact_match(completions: Sequence[Any], *, column: str = "answer", **columns: Any) -> list[float]:
    """1 where the completion is the reference, white space at both ends aside; else 0.

    Args:
        completions: B of them, text or messages.
        column: of the dataset, which holds the references.
        columns: what TRL passes: the dataset's columns and more, B values each.
    """
    wanted = references(columns, column, len(completions))
    return [float(text_of(c).strip() == str(w).strip()) for c, w in zip(completions, wanted, strict=True)]


def numeric_match(
    completions: Sequence[Any], *, column: str = "answer", tolerance: float = 0.0, **columns: Any
) -> list[float | None]:
    r"""1 where the final number of the completion is that of the reference; else 0.

    The final number is what stands in the last `\boxed{}`, or behind the last `####`, or behind the last "answer is",
    or else the last number of the text. `1,200`, `$1200.00`, `\frac{2400}{2}` and `1.2e3` are one number. A percent
    sign is a unit: 50% is 50. The references may be numbers or worked solutions (GSM8K's). Formulas: `math_match`.

    Args:
        completions: B of them, text or messages.
        column: of the dataset, which holds the references.
        tolerance: largest difference that still counts, absolute.
        columns: what TRL passes: the dataset's columns and more, B values each.

    Returns:
        B rewards; `None` (TRL leaves the completion out) where the reference holds no number.
    """
    wanted = [final_number(str(each)) for each in references(columns, column, len(completions))]
    return [
        None if number is None else float(_is_near(final_number(text_of(each)), number, tolerance))
        for each, number in zip(completions, wanted, strict=True)
    ]


def format_match(completions: Sequence[Any], *, pattern: str, **_: Any) -> list[float]:
    """1 where the whole completion matches a regular expression (a dot matches newlines too); else 0.

    Args:
        completions: B of them, text or messages.
        pattern: as `re` reads it. `partial(format_match, pattern="<think>.+</think>.+")`.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text_of(each).strip()) is not None) for each in completions]


def length_match(completion_ids: Sequence[Sequence[int]], *, at_most: int, at_least: int = 1, **_: Any) -> list[float]:
    """1 where the completion has between `at_least` and `at_most` tokens; else 0.

    For a penalty that grows with the length: `trl.rewards.get_soft_overlong_punishment`.

    Args:
        completion_ids: token ids, B lists.
        at_most: tokens.
        at_least: tokens.
    """
    return [float(at_least <= len(ids) <= at_most) for ids in completion_ids]


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the content of its last message; empty where that is a tool's."""
    if isinstance(completion, str):
        return completion
    is_said = bool(completion) and completion[-1].get("role") != "tool"  # a conversation may end with a tool's result
    content = completion[-1].get("content") if is_said else ""
    if isinstance(content, list):  # parts: text, and what is no text
        return "".join(part.get("text", "") for part in content)
    return content or ""


def references(columns: dict[str, Any], column: str, count: int) -> Sequence[Any]:
    """The B references of a batch.

    Raises:
        ConfigConflictError: the dataset has no such column.
    """
    found = columns.get(column)
    if found is None or callable(found) or len(found) != count:
        names = sorted(name for name, value in columns.items() if isinstance(value, list) and len(value) == count)
        raise ConfigConflictError(
            f"scoring completions: the dataset has no column {column!r} with the references, but {names}. Name it: "
            "functools.partial(reward, column='...')."
        )
    return found


def _is_near(found: Fraction | None, wanted: Fraction, tolerance: float) -> bool:
    return found is not None and abs(found - wanted) <= Fraction(tolerance)


class weighted:
    """A reward that is the weighted sum of others.

    ::

        reward_funcs = weighted((numeric_match, 1.0), (partial(format_match, pattern="<think>.+</think>.+"), 0.2))

    TRL sums a list of rewards by `GRPOConfig(reward_weights=...)` too, and logs each of them; this is for what takes
    one: an evaluation, a part of another sum. A part that says `None` of a completion is left out of its sum; where all
    do, so does the sum.

    Args:
        parts: pairs of a reward and its weight.

    Raises:
        ConfigConflictError: no parts, or one that is no such pair.
    """

    def __init__(self, *parts: tuple[Any, float]):
        wrong = [p for p in parts if not (isinstance(p, tuple) and len(p) == 2 and callable(p[0]))]
        if wrong or not parts:
            raise ConfigConflictError(
                f"combining rewards: {wrong[0]!r} is not a pair of a reward and its weight. Write "
                "weighted((numeric_match, 1.0), ...)."
                if wrong
                else "combining rewards: there are none. Write weighted((numeric_match, 1.0), ...)."
            )
        self.parts = tuple((reward, float(weight)) for reward, weight in parts)
        self.__name__ = "weighted"

    def __call__(self, *args: Any, **columns: Any) -> list[float | None]:
        """As TRL calls a reward: keyword lists in, B rewards out."""
        weights = [weight for _, weight in self.parts]
        rows = zip(*(reward(*args, **columns) for reward, _ in self.parts), strict=True)
        return [weighted_sum(values, weights) for values in rows]


def weighted_sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """As TRL weighs rewards: what is not scored is left out, and nothing is said of what no reward has scored."""
    known = [value * weight for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(known) if known else None
