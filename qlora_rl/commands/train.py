"""`qlora-rl train`: one TOML file, one run."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlora_rl.commands.codes import INTERRUPTED, UsageError, add_overrides
from qlora_rl.engine.loading import loading
from qlora_rl.methods import METHODS

if TYPE_CHECKING:
    from qlora_rl.config.schema import RunConfig
    from qlora_rl.train.run import RunLog


def add(commands: Any) -> None:
    """The command's arguments."""
    train = commands.add_parser("train", help="train from a TOML file; every field is checked first")
    train.add_argument("file", type=Path, nargs="?", metavar="run.toml", help="see --example and docs/config.md")
    add_overrides(train, "overrides the file: --set adapter.r=32 --set rewards.0.weight=0.5")
    train.add_argument(
        "--check", action="store_true", help="check the file without loading anything, and print it in full"
    )
    train.add_argument(
        "--example",
        nargs="?",
        const="",
        choices=[*METHODS, ""],
        metavar="METHOD",
        help=f"print a file to start from: {', '.join(METHODS)}",
    )
    train.add_argument("--print-schema", action="store_true", help="print every field: type, default, meaning")
    train.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, then train; an interrupted run says what it left."""
    if arguments.example == "":
        raise UsageError(f"printing an example: --example takes one of {', '.join(METHODS)}.")
    if arguments.example or arguments.print_schema:
        from qlora_rl.config.text import example, markdown

        print(example(arguments.example) if arguments.example else markdown(), end="")
        return 0
    if arguments.file is None:
        raise UsageError(
            "reading the run: no file was given. `qlora-rl train --example grpo > run.toml` makes one to start from."
        )
    with loading(quietly=True):  # and TRL's config classes
        import transformers

        from qlora_rl.config.directories import next_of, usual_directory
        from qlora_rl.config.read import chooses_directory, read_config
        from qlora_rl.train.run import claimed

        transformers.logging.set_verbosity_warning()  # at "error" transformers takes the progress line away, too
        config = read_config(arguments.file, arguments.overrides, trains=True)
    with contextlib.ExitStack() as stack:
        if chooses_directory(arguments.file, arguments.overrides):
            if not arguments.check:  # two that are started together take two names
                usual = usual_directory(arguments.file)
                directory = stack.enter_context(claimed(lambda: next_of(usual)))
                config = config.model_copy(update={"run": config.run.model_copy(update={"dir": directory})})
            if said := _said_of_directory(arguments.file, config.run.dir):
                print(said, file=sys.stderr)
        return _checked_or_trained(arguments, config)


def _checked_or_trained(arguments: argparse.Namespace, config: RunConfig) -> int:
    import torch

    from qlora_rl.config.launch import check_model, check_rows, find_trainer, launch, unchecked, unused_template
    from qlora_rl.config.read import resolved_toml
    from qlora_rl.cpu_features import processor
    from qlora_rl.train.run import RunLog

    if int(os.environ.get("RANK", "0")) == 0 and (said := unused_template(config)):
        print(f"qlora-rl: warning: {said}", file=sys.stderr)

    if arguments.check:
        import datasets

        datasets.disable_progress_bars()
        left = [each for each in (check_model(config), *unchecked(config, check_rows(config))) if each]
        print(resolved_toml(config), end="")
        print(f"qlora-rl: {arguments.file}: no errors found. Not checked: {', '.join(left)}", file=sys.stderr)
        return 0

    try:
        with RunLog() as log, _ended_by_hangup(log):
            with loading(stage="loading the trainer"):  # and TRL and vLLM with it
                find_trainer(config.method)
            log.take_over()
            if not torch.cuda.is_available() and int(os.environ.get("RANK", "0")) == 0:
                print(f"     {processor()}", flush=True)
            out = launch(config, log.write_to, arguments.file)
    except KeyboardInterrupt:
        print(f"\nqlora-rl: interrupted; {_what_now(arguments, config)}", file=sys.stderr)
        return INTERRUPTED
    if int(os.environ.get("RANK", "0")) == 0:  # the others of `accelerate launch` say nothing
        named = shlex.quote(str(out))
        print(
            f"\n  run directory: {out}\n  to look at it: qlora-rl report {named}\n"
            f"  talk to it:    qlora-rl chat {named}"
            f"\n  compare it:    qlora-rl eval {named}\n  export it:     qlora-rl export {named}"
            f"\n  serve it:      qlora-rl serve {named}"
        )
    return 0


def _what_now(arguments: argparse.Namespace, config: RunConfig) -> str:
    """Where an interrupted run is, and what can be done with it."""
    out = Path(config.run.dir)
    kept = [each for each in arguments.overrides if not each.startswith(("run.dir=", "run.existing="))]
    options = [word for each in kept for word in ("--set", each)]
    again = shlex.join(["qlora-rl", "train", str(arguments.file), *options])
    said = f"the run so far is in {out}. "
    if any(out.glob("checkpoint-*")):
        return f"{said}It goes on from its last checkpoint with: {again} {_resuming(config.run.dir)}"
    if (out / "adapter").is_dir():
        said += f"What it has learned so far can be used: qlora-rl chat {shlex.quote(str(out))}. "
    each = "--set train.save_steps=1"
    if config.train.get("save_strategy", "steps") != "steps":
        each += " --set train.save_strategy=steps"
    return (
        f"{said}It has no checkpoint to go on from: the same command begins again, in another directory. A checkpoint "
        f"is written every [train] save_steps steps; for one after each step: {again} {each}"
    )


@contextlib.contextmanager
def _ended_by_hangup(log: RunLog) -> Iterator[None]:
    """A terminal that is closed (SIGHUP) ends the run as Ctrl-C does, and log.txt says so; with nohup it goes on."""

    terminals = [stream for stream in (1, 2) if os.isatty(stream)]  # once it is closed it is none any more
    owner = os.getpid()

    def end(*_: Any) -> None:
        if os.getpid() != owner:  # forked for something else: it ends as it would
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGHUP)
            return
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a shell sends one, too
        for stream in terminals:  # whatever is written there fails from here on
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        log.note("the terminal was closed (SIGHUP): the run ends here, as with Ctrl-C")
        os.kill(os.getpid(), signal.SIGINT)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL
        or signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # in the background of a script: it ends as it would
    ):
        yield
        return
    signal.signal(signal.SIGHUP, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _said_of_directory(file: Path, chosen: str) -> str:
    """Why a run is not in the usual directory of its file; empty where it is."""
    from qlora_rl.config.directories import possible_runs, usual_directory

    usual = usual_directory(file)
    if chosen == usual:
        return ""
    runs = possible_runs(usual, file)
    if not runs:
        return f"qlora-rl: another process trains in {usual}, so this one goes to {chosen}."
    last = runs[-1]
    return f"qlora-rl: {last} holds a run, so this one goes to {chosen}. To go on with the former: {_resuming(last)}"


def _resuming(directory: str) -> str:
    return f"--set run.dir={shlex.quote(directory)} --set run.existing=resume"
