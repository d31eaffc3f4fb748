"""A run's directory, read and shown: `read_run` for programs, `write_report` for people. Standard library only."""

from .page import write_report
from .run import Run, read_run, summarise

__all__ = ["Run", "read_run", "summarise", "write_report"]
