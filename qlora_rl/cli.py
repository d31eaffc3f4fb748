"""The `qlora-rl` command. Parsing imports nothing heavy; each command (`qlora_rl/commands`) brings in what it runs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from qlora_rl import __version__
from qlora_rl.commands import (
    bench,
    chat,
    demo,
    evaluate,
    export,
    judge,
    plan,
    prepare,
    recommend,
    report,
    serve,
    train,
    verify,
)
from qlora_rl.commands.codes import INTERRUPTED
from qlora_rl.errors import QloraRLError

COMMANDS = (demo, train, prepare, plan, recommend, verify, serve, bench, judge, report, export, chat, evaluate)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 with a message on a known error, 2 on bad usage, 130 on Ctrl-C.

    Some commands have codes of their own beside these (`qlora_rl/commands/codes.py`).
    """
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    # It warns, at every start on a CPU, of an optional kernel that is not installed.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        return int(arguments.run(arguments) or 0)
    except QloraRLError as error:
        print(f"qlora-rl: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads has heard enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("qlora-rl: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qlora-rl",
        description="Fine-tuning and reinforcement learning on a 4-bit base: the sampler holds the same base, only the adapter travels.",
    )
    parser.add_argument("--version", action="version", version=f"qlora-rl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
