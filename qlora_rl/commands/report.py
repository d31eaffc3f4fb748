"""`qlora-rl report`: a run as one page."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from qlora_rl.commands.codes import PORT, UsageError, existing
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
        help="serve a page on this machine that refreshes while the run trains, until Ctrl-C",
    )
    report.add_argument("--port", type=PORT, default=0, metavar="N", help="port for --live (default: a free one)")
    report.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and name it; or serve it until Ctrl-C, which is its ordinary end."""
    if arguments.live:
        from qlora_rl.report.live import LiveReport

        with LiveReport(arguments.runs, arguments.port) as report:
            with contextlib.suppress(KeyboardInterrupt):
                print(f"{report.url}  (Ctrl-C ends it)", flush=True)
                report.serve()
        return 0
    if arguments.port:
        raise UsageError("writing a report: --port is for --live only. Add --live, or leave it out.")
    from qlora_rl.report import write_report

    for each in arguments.runs:
        if each.is_dir() and not any((each / name).exists() for name in _OF_A_RUN):
            raise RunDirectoryError(
                f"writing a report: {each} holds none of {', '.join(_OF_A_RUN)}, so it is not a run. Pass a run "
                "directory, such as runs/demo-..."
            )
    print(write_report(arguments.runs[0], arguments.runs[1:]))
    return 0
