"""`qlora-rl report`: a run as one page."""

from __future__ import annotations

import argparse
import time
from typing import Any

from qlora_rl.commands.codes import existing
from qlora_rl.errors import RunDirectoryError

# One of them is written before anything is trained.
_OF_A_RUN = ("config.json", "metrics.jsonl", "summary.json")


def add(commands: Any) -> None:
    """The command's arguments."""
    report = commands.add_parser("report", help="write a run as one HTML page, compared with other runs")
    report.add_argument(
        "runs", type=existing, nargs="+", metavar="RUN", help="run directories; the page goes into the first"
    )
    report.add_argument(
        "--live",
        action="store_true",
        help="write the page again and again while the run trains, until Ctrl-C; a browser that shows it follows",
    )
    report.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and name it; with --live write it until the run or Ctrl-C ends it."""
    from qlora_rl.report import read_run, write_report
    from qlora_rl.report.page import RENEWED_S

    for each in arguments.runs:
        if each.is_dir() and not any((each / name).exists() for name in _OF_A_RUN):
            raise RunDirectoryError(
                f"writing a report: {each} holds none of {', '.join(_OF_A_RUN)}, so it is not a run. Pass a run "
                "directory, such as runs/demo-..."
            )
    first, *others = arguments.runs
    page = write_report(first, others, is_live=arguments.live)
    try:
        print(page, flush=True)
        while arguments.live and read_run(first).status == "running":
            time.sleep(RENEWED_S)
            write_report(first, others, is_live=True)
    except KeyboardInterrupt:
        write_report(first, others)  # which is read once
    return 0
