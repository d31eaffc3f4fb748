"""Codes of a 4-bit base that are chosen by what its layers see, in the same format; and what a base costs."""
