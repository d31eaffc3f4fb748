"""Exit codes other than 0 (success), 1 (a known error, with a message) and 2 (bad usage)."""

from qlora_rl.errors import ConfigConflictError

BAD_USAGE = 2
INTERRUPTED = 130
DOES_NOT_FIT = 3
VERDICTS = {"adapter": 0, "full_weights": 3, "refuse": 4}


class UsageError(ConfigConflictError):
    """Options of a command that contradict each other, where argparse cannot see it."""
