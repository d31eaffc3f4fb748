"""`qlora-rl doctor`: what is installed, what fits together, what this machine can do."""

from __future__ import annotations

import argparse
from typing import Any

from qlora_rl.commands.codes import AS_JSON


def add(commands: Any) -> None:
    """The command's arguments."""
    doctor = commands.add_parser(
        "doctor", parents=[AS_JSON], help="check packages, libraries and this machine; print it for a bug report"
    )
    doctor.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0: a run can start here; 1: something keeps it from that."""
    import json
    import logging

    from qlora_rl.doctor import examine

    logger = logging.getLogger("qlora_rl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what is warned of is on the screen
    try:
        examination = examine()
    finally:
        logger.setLevel(level)
    print(json.dumps(examination.as_dict(), indent=1) if arguments.json else examination)
    return 1 if examination.problems else 0
