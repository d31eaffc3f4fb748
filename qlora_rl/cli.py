"""The `qlora-rl` command. Parsing imports nothing heavy; each command (`qlora_rl/commands`) brings in what it runs."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from qlora_rl import __version__
from qlora_rl.commands import (
    chat,
    data,
    demo,
    doctor,
    evaluate,
    export,
    judge,
    plan,
    prepare,
    recommend,
    report,
    serve,
    tinker,
    train,
    verify,
)
from qlora_rl.commands.codes import BAD_USAGE, INTERRUPTED, UsageError
from qlora_rl.errors import QloraRLError
from qlora_rl.stages import shown

COMMANDS = (
    demo, train, data, prepare, plan, recommend, verify, serve, tinker, judge, report, export, chat, evaluate, doctor,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 with a message on a known error, 2 on bad usage, 130 on Ctrl-C.

    Some commands have further exit codes (`qlora_rl/commands/codes.py`).
    """
    given = list(sys.argv[1:] if argv is None else argv)
    # argparse takes a positional that may be empty before it has seen the options in front of the --.
    end = given.index("--") if given[:1] == ["serve"] and "--" in given else len(given)
    arguments = _parser().parse_args(given[:end])
    if end < len(given):
        arguments.vllm_options = given[end + 1 :]
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    # It warns, at every start on a CPU, of an optional kernel that is not installed.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Where it is installed TRL imports it, and on a CPU it says so, on stdout; its import sets its level.
    logging.getLogger("DeepSpeed").addFilter(_is_no_remark_on_the_cpu)
    try:
        # By one process of a launcher's.
        with shown() if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext():
            return int(arguments.run(arguments) or 0)
    except QloraRLError as error:
        print(f"qlora-rl: {error}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, UsageError) else 1
    except BrokenPipeError:  # the reader has closed the pipe, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("qlora-rl: interrupted", file=sys.stderr)
        return INTERRUPTED


def _is_no_remark_on_the_cpu(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()


class _Parser(argparse.ArgumentParser):
    """argparse's, which also says what an unknown word may have been meant to be (as Python 3.14's does)."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What a command does not know is said by that command, with its own usage and options."""
        found, left = self.parse_known_args(args, namespace)
        if left:
            named = next((each.choices for each in self._actions if isinstance(each, argparse._SubParsersAction)), {})
            command = named.get(args[0], self) if args else self
            command.error(f"unrecognized arguments: {' '.join(left)}{_as_fields(command, left)}")
        return found

    def error(self, message: str) -> NoReturn:
        from qlora_rl.config.findings import kin

        wrong, known = "", set[str]()
        if choice := re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message):
            wrong, known = choice[1], set(re.findall(r"[^', ]+", choice[2]))
        elif (option := re.search(r"unrecognized arguments:.*?(--[\w-]+)", message)) and "--set" not in message:
            wrong, known = option[1], {each for action in self._actions for each in action.option_strings}
        if message.endswith("required: COMMAND"):
            message += ". `qlora-rl --help` lists them; `qlora-rl demo` is a first one"
        if near := kin(wrong, known):
            message += f". Did you mean {near!r}?"
        super().error(message)


def _as_fields(command: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """How a command that reads a run's file takes fields of that file; empty where the words are none, or it reads
    none."""
    if not any("--set" in action.option_strings for action in command._actions):
        return ""
    from qlora_rl.config.findings import overrides_of
    from qlora_rl.config.trl_fields import LIMITS

    fields = overrides_of(words, LIMITS)
    return f". A field of the file is set with --set: {shlex.join(fields)}" if fields else ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="qlora-rl",
        description="Fine-tuning and reinforcement learning on a 4-bit base: the sampler holds the same base, only the "
        "adapter is synced.",
    )
    parser.add_argument("--version", action="version", version=f"qlora-rl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
