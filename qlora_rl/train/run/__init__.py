"""A run on disk: its directory, checkpoints, what it is, resuming, progress."""

from qlora_rl.train.run.directory import (
    ADAPTER,
    CONFIG,
    FINGERPRINTS,
    METRICS,
    MODEL,
    ROLLOUTS,
    SUMMARY,
    SYNCS,
    RunDirectory,
    StepRecord,
    claimed,
    describe_machine,
    describe_versions,
)
from qlora_rl.train.run.log import RunLog

__all__ = [
    "ADAPTER",
    "CONFIG",
    "FINGERPRINTS",
    "METRICS",
    "MODEL",
    "ROLLOUTS",
    "SUMMARY",
    "SYNCS",
    "RunDirectory",
    "RunLog",
    "StepRecord",
    "claimed",
    "describe_machine",
    "describe_versions",
]
