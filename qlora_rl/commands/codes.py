"""What several commands have: exit codes other than 0 (success), 1 (a known error, with a message) and 2 (bad usage);
types of arguments; options."""

import argparse
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

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

# Options of several commands: parents of their parsers.
AS_JSON, BASE, MODEL, QUANTISED = (argparse.ArgumentParser(add_help=False) for _ in range(4))
AS_JSON.add_argument("--json", action="store_true", help="print JSON")
BASE.add_argument("--base", type=existing, metavar="DIR", help="the base directory, if it was moved")
MODEL.add_argument("model", help="checkpoint or base directory, config.json, or hub name")
MODEL.add_argument(
    "--gpu-memory",
    type=card,
    metavar="SIZE",
    help="size of the card, such as 24 or 24GB; any other number is a limit in GiB (default: no limit)",
)
MODEL.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")
QUANTISED.add_argument(
    "--double-quant", action=argparse.BooleanOptionalAction, default=True, help="quantise the scales too (default: on)"
)
QUANTISED.add_argument("--quantize-experts", action="store_true", help="of a mixture, experts in 4 bits too")
QUANTISED.add_argument(
    "--quantize-tower",
    action="store_true",
    help="of a vision-language model, vision tower and projector in 4 bits too",
)


def add_overrides(command: argparse.ArgumentParser, says: str = "overrides the file") -> None:
    """`--set`, of a command that reads a run's file."""
    command.add_argument("--set", dest="overrides", action="append", default=[], metavar="TABLE.FIELD=VALUE", help=says)


def add_server(command: argparse.ArgumentParser, *, port: int, share: float, says: str, **body: Any) -> None:
    """What a command is told that serves.

    Args:
        command: its parser.
        port: by default.
        share: of the card, by default.
        says: why that share.
        body: largest request, as `add_argument` has it.
    """
    command.add_argument("--host", default="127.0.0.1", help="to listen on (default: %(default)s)")
    command.add_argument(
        "--port", type=PORT, default=port, help="to listen on; 0 takes a free one (default: %(default)s)"
    )
    command.add_argument(
        "--max-model-length", type=COUNT, metavar="N", help="prompt plus completion, in tokens (default: the model's)"
    )
    command.add_argument(
        "--max-num-seqs", type=COUNT, default=128, metavar="N", help="sequences in flight (default: %(default)s)"
    )
    command.add_argument("--gpu-memory-utilization", type=SHARE, default=share, metavar="X", help=says)
    command.add_argument("--kv-cache-gib", type=POSITIVE, metavar="GIB", help="size of the KV cache")
    command.add_argument("--max-body-mib", type=POSITIVE, metavar="MIB", **body)
    command.add_argument(
        "--ready-file", type=Path, metavar="F", help="file that is written, as JSON, when the server is ready"
    )
