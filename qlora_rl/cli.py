"""The `qlora-rl` command. Parsing imports nothing heavy; each command (`qlora_rl/commands`) brings in what it runs."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from qlora_rl import __version__
from qlora_rl.commands import (
    bench,
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
    train,
    verify,
)
from qlora_rl.commands.codes import BAD_USAGE, INTERRUPTED, UsageError
from qlora_rl.engine.loading import as_command, leave_at_once, released
from qlora_rl.errors import QloraRLError
from qlora_rl.stages import shown

COMMANDS = (
    demo, train, data, prepare, plan, recommend, verify, serve, bench, judge, report, export, chat, evaluate, doctor,
)  # fmt: skip
# They run files of the user's: rewards, tools. So do commands with --trust-remote-code: the model's.
RUN_FILES = (train.run, data.run, evaluate.run)


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
    if arguments.run not in RUN_FILES and not getattr(arguments, "trust_remote_code", False):
        leave_at_once()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    # It warns, at every start on a CPU, of an optional kernel that is not installed.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Where it is installed TRL imports it, and on a CPU it says so, on stdout; its import sets its level.
    logging.getLogger("DeepSpeed").addFilter(_is_no_remark_on_the_cpu)
    try:
        with _stages(arguments.run):
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
    finally:
        released()  # triton prints forty lines about what the interpreter's end does not find


def _stages(run: Callable[..., object]) -> contextlib.AbstractContextManager[None]:
    """Stages are shown, by one process of a launcher's; that of a server is forked."""
    return shown(beats=run is not serve.run) if os.environ.get("RANK", "0") == "0" else contextlib.nullcontext()


def program() -> int:
    """The command of a shell: `main`, in a process of its own."""
    return as_command(main)


def _is_no_remark_on_the_cpu(record: logging.LogRecord) -> bool:
    return "Setting accelerator to CPU" not in record.getMessage()


class _Parser(argparse.ArgumentParser):
    """argparse's, which also says what an unknown word may have been meant to be (as Python 3.14's does)."""

    def error(self, message: str) -> NoReturn:
        wrong, known = "", set[str]()
        if choice := re.search(r"invalid choice: '(.+?)' \(choose from (.+)\)", message):
            wrong, known = choice[1], set(re.findall(r"[^', ]+", choice[2]))
        elif option := re.search(r"unrecognized arguments:.*?(--[\w-]+)", message):
            wrong, known = option[1], self._options()
        if message.endswith("required: COMMAND"):
            message += ". `qlora-rl --help` lists them; `qlora-rl demo` is a first one"
        if near := known and difflib.get_close_matches(wrong, known, n=1):
            message += f". Did you mean {near[0]!r}?"
        super().error(message)

    def _options(self) -> set[str]:
        found: set[str] = set()
        for action in self._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                found.update(*(command._options() for command in action.choices.values()))
        return found


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="qlora-rl",
        description="Fine-tuning and reinforcement learning on a 4-bit base: the sampler holds the same base, only the adapter is synced.",
    )
    parser.add_argument("--version", action="version", version=f"qlora-rl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(program())
