"""torchrun and `accelerate launch` with forked ranks; for `support.forked`."""

from __future__ import annotations

import dataclasses
import runpy
import sys
from pathlib import Path
from typing import Any


def torchrun(words: list[str]) -> None:
    """`torchrun`, with ranks that are forked."""
    from torch.distributed import run

    fork_ranks()
    run.main(words)


def accelerate_launch(words: list[str]) -> None:
    """`accelerate launch`, with ranks that are forked."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    fork_ranks()
    launch_command(launch_command_parser().parse_args(words))


def fork_ranks() -> None:
    """torch's launcher forks where it is given a function in place of a program."""
    from torch.distributed import run

    theirs = run.config_from_args

    def with_function(asked: Any) -> Any:
        config, _, words = theirs(asked)
        return dataclasses.replace(config, start_method="fork"), as_program, words[-2:]

    run.config_from_args = with_function


def as_program(file: str, *words: str) -> None:
    """A rank, as `python file words` would run it."""
    sys.argv, sys.path[:0] = [file, *words], [str(Path(file).parent)]
    runpy.run_path(file, run_name="__main__")
