"""Numbers as people read them. `None` (and whatever is not a finite number) is a dash."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

ABSENT = "–"
_EXTREME = 1e100  # no quantity of a run; sums and differences of such values would overflow
_GAP = "\u202f"  # a narrow space that never breaks the line between a number and its unit


def finite(value: object) -> float | None:
    """The value as a float where it is a number to reckon with; else `None`. Booleans and text are not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < _EXTREME else None


def _of_numbers(write: Callable[[float], str]) -> Callable[[object], str]:
    """What is no finite number is absent."""

    @wraps(write)
    def written(value: object) -> str:
        number = finite(value)
        return ABSENT if number is None else write(number)

    return written


@_of_numbers
def plain(number: float) -> str:
    """Three significant digits, two where small, whole where large: `0.312`, `8.2e-05`, `17,856`."""
    size = abs(number)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e9:
        text = f"{number:.1e}"
    elif size >= 999.5 or number == int(number):
        text = f"{number:,.0f}"
    else:
        text = f"{number:.3g}"
    return text.replace("-", "−", 1) if number < 0 else text


def _with_unit(number: float, unit: str) -> str:
    return f"{number:.1f}{_GAP}{unit}" if 0 < abs(number) < 9.95 else f"{number:,.0f}{_GAP}{unit}"


@_of_numbers
def seconds(number: float) -> str:
    """A duration: `2.1 ms`, `104 s`, `12 min`, `3 h 20 min`."""
    if number == 0 or 0.9995 <= abs(number) < 119.5 or number < 0:
        return _with_unit(number, "s")
    if number < 0.9995e-3:
        return _with_unit(number * 1e6, "µs")
    if number < 1:
        return _with_unit(number * 1e3, "ms")
    minutes = round(number / 60)
    if minutes < 120:
        return f"{minutes}{_GAP}min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,}{_GAP}h" + (f" {minutes}{_GAP}min" if minutes else "")


@_of_numbers
def octets(number: float) -> str:
    """A size in decimal units: `512 B`, `1.3 MB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while abs(number) >= 999.5 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.0f}{_GAP}B" if units[0] == "B" else _with_unit(number, units[0])


@_of_numbers
def share(number: float) -> str:
    """A part of one as a percentage: `31 %`, `0.4 %`, `< 0.1 %`."""
    percent = number * 100
    if 0 < percent < 0.05:
        return f"<{_GAP}0.1{_GAP}%"
    is_near_an_end = 0 < percent < 0.95 or 99.05 < percent < 99.95
    return f"{percent:.1f}{_GAP}%" if is_near_an_end else f"{percent:.0f}{_GAP}%"
