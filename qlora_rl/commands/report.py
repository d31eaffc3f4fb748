"""`qlora-rl report`: a run as one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    """The command's arguments."""
    report = commands.add_parser("report", help="a run as one HTML page, others beside it")
    report.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run directories; the page goes into the first"
    )
    report.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and name it."""
    from qlora_rl.report import write_report

    print(write_report(arguments.runs[0], arguments.runs[1:]))
    return 0
