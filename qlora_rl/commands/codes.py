"""Exit codes other than 0 (success), 1 (a known error, with a message) and 2 (bad usage)."""

import argparse
from collections.abc import Callable
from math import isfinite
from pathlib import Path

from qlora_rl.errors import ConfigConflictError
from qlora_rl.memory.cards import card_size

BAD_USAGE = 2
INTERRUPTED = 130
DOES_NOT_FIT = 3
VERDICTS = {"adapter": 0, "full_weights": 3, "reject": 4}


class UsageError(ConfigConflictError):
    """Options of a command that contradict each other, where argparse cannot see it."""


def ranged(
    kind: type[int] | type[float],
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Callable[[str], float]:
    """A type for argparse: a number in its range; what is outside is bad usage, said before anything is loaded."""

    def read(text: str) -> float:
        value = kind(text)
        wrong = [] if isfinite(value) else ["finite"]
        wrong += [f"at least {at_least:g}"] if at_least is not None and not value >= at_least else []
        wrong += [f"above {above:g}"] if above is not None and not value > above else []
        wrong += [f"at most {at_most:g}"] if at_most is not None and not value <= at_most else []
        if wrong:
            raise argparse.ArgumentTypeError(f"{text} is not {' and '.join(wrong)}")
        return value

    read.__name__ = "whole number" if kind is int else "number"  # in argparse's own message
    return read


def existing(text: str) -> Path:
    """A type for argparse: a file or directory that there is; another path is bad usage, said before anything is
    loaded."""
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no such file or directory: {text} (seen from {Path.cwd()})")
    return Path(text)


def card(text: str) -> float:
    """A type for argparse: `card_size`, and what it says of a text that is none."""
    try:
        return card_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


COUNT = ranged(int, at_least=1)
PORT = ranged(int, at_least=0, at_most=65535)
SHARE = ranged(float, above=0, at_most=1)
POSITIVE = ranged(float, above=0)
NOT_NEGATIVE = ranged(float, at_least=0)
