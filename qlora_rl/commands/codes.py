"""Exit codes beside 0 (done), 1 (a known error, said) and 2 (bad usage)."""

INTERRUPTED = 130
DOES_NOT_FIT = 3
VERDICTS = {"adapter": 0, "full_weights": 3, "refuse": 4}
