"""Exit codes other than 0 (success), 1 (a known error, with a message) and 2 (bad usage)."""

INTERRUPTED = 130
DOES_NOT_FIT = 3
VERDICTS = {"adapter": 0, "full_weights": 3, "refuse": 4}
