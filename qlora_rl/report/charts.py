"""A small chart drawer: lines and reference lines over steps, linear or logarithmic.

The curves are SVG stretched to the width of the page; ticks and labels are HTML laid over it in percent. So text keeps
its size on a phone, and every colour comes from the page, in light and in dark, without a line of JavaScript.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .parts import Markup, join, tag
from .quantities import finite, plain

POINTS = 400  # more than a screen can tell apart; above it, each bucket keeps its lowest and its highest point

Values = Sequence[float | None]


@dataclass(frozen=True)
class Line:
    """`series` picks the colour; `weight` is "thin" (raw values) or "bold" (what to look at)."""

    label: str
    x: Sequence[float]
    y: Values
    series: int = 0
    weight: str = "bold"


@dataclass(frozen=True)
class Reference:
    """A horizontal line to compare the curves with; an empty label is not written."""

    y: float
    label: str


@dataclass(frozen=True)
class Axis:
    """The ends of an axis and the values that it names."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Position of a value: 0 at the low end, 1 at the high end. On a log axis zero is at the low end."""
        if self.is_log:
            if value <= self.low:
                return 0.0
            part = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            part = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, part))


def linear_axis(values: Sequence[float], count: int = 5, *, is_whole: bool = False, is_snug: bool = False) -> Axis:
    """Ticks at 1, 2 or 5 times a power of ten; ends on ticks, or (`is_snug`) exactly on the data."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and low < 0.35 * high and not is_snug:
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        margin = 1.0 if is_whole or abs(low) < 1e-9 else abs(low) * 0.1
        low, high = (low - margin if low else 0.0), high + margin  # nothing is negative where all is 0
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    if is_whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1))
    if not is_snug:
        return Axis(first * step, last * step, ticks)
    inside = [t for t in ticks if low <= t <= high]
    if is_whole and low == int(low) and inside and inside[0] - low > 0.5 * step:
        inside.insert(0, low)
    return Axis(low, high, tuple(inside))


def log_axis(values: Sequence[float]) -> Axis:
    """Ticks at powers of ten, or at 1, 2 and 5 times them where the data spans little. Values <= 0 do not widen it."""
    positive = [value for value in values if value > 1e-300]
    low, high = min(positive, default=0.1), max(positive, default=1.0)
    is_narrow = high / low < 100
    marks = (1, 2, 5) if is_narrow else (1,)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    ladder = [m * 10.0**e for e in range(first, last + 1) for m in marks]
    bottom = max(i for i, t in enumerate(ladder) if t <= low * 1.0001)
    top = max(bottom + 1, min(i for i, t in enumerate(ladder) if t >= high * 0.9999))
    ticks = ladder[bottom : top + 1]
    stride = 1 if is_narrow else math.ceil(len(ticks) / 6)
    return Axis(ticks[0], ticks[-1], tuple(ticks[::-1][::stride][::-1]), is_log=True)


def thin_out(x: Sequence[float], y: Values, limit: int = POINTS) -> tuple[list[float], list[float | None]]:
    """At most `limit` points that keep every bucket's lowest and highest, so that no spike is lost."""
    if len(y) <= limit:
        return list(x), list(y)
    kept: list[int] = []
    count = limit // 2
    for bucket in (range(i * len(y) // count, (i + 1) * len(y) // count) for i in range(count)):
        known = [i for i in bucket if y[i] is not None]
        kept += sorted({min(known, key=y.__getitem__), max(known, key=y.__getitem__)}) if known else [bucket[0]]
    return [x[i] for i in kept], [y[i] for i in kept]


def smooth(values: Values, window: int, average: Callable[[list[float]], float]) -> list[float | None]:
    """A running average centred on each step; gaps stay gaps and do not count."""
    half = window // 2
    result: list[float | None] = []
    for i, value in enumerate(values):
        near = [v for v in values[max(0, i - half) : i + half + 1] if v is not None]
        result.append(average(near) if value is not None else None)
    return result


def draw_chart(
    title: str,
    y_label: str,
    lines: Sequence[Line],
    *,
    references: Sequence[Reference] = (),
    legend: Sequence[tuple[int, str]] = (),
    is_log: bool = False,
    x_label: str = "training step",
) -> Markup | None:
    """The chart as HTML; `None` where there is not one value to draw. `legend` is (series, name) pairs."""
    lines = [replace(s, y=[finite(value) for value in s.y]) for s in lines]
    heights = [v for line in lines for v in line.y if v is not None]
    if not heights:
        return None
    across = linear_axis([v for line in lines for v in line.x], 6, is_whole=True, is_snug=True)
    up = (log_axis if is_log else linear_axis)([*heights, *(r.y for r in references)])

    shapes = [_draw_grid(across, up)]
    for line in sorted(lines, key=lambda s: (s.weight == "bold", -s.series)):
        x, y = thin_out(line.x, line.y)
        shapes.append(_path(_line_path(x, y, across, up), f"{line.weight} s{line.series % 4}"))
    readouts = [(s.label, s.series, *thin_out(s.x, s.y)) for s in lines]
    shapes += [_path(f"M0 {_y(up, r.y)}H1000", "reference") for r in references]

    svg = tag(
        "svg", *shapes, viewBox="0 0 1000 1000", preserveAspectRatio="none", role="img",
        aria_label=_describe(title, y_label, lines, references, x_label),
    )  # fmt: skip
    named = [r for r in references if r.label]
    plot = tag(
        "div", svg,
        *(tag("span", _tick(t, up), class_="yt", style=f"top:{100 - 100 * up.place(t):.2f}%") for t in up.ticks),
        *(tag("span", f"{t:,.0f}", class_="xt", style=f"left:{100 * across.place(t):.2f}%") for t in across.ticks),
        *(tag("span", r.label, class_="rt", style=f"top:{100 - 100 * up.place(r.y):.2f}%") for r in named),
        class_="plot", data_hover=_hover(across, x_label, readouts),
    )  # fmt: skip
    keys = [tag("li", tag("i", class_=f"key s{series % 4}"), name) for series, name in legend]
    return tag(
        "div", tag("div", y_label, class_="yl"), plot, tag("div", x_label, class_="xl"),
        tag("ul", *keys, class_="legend") if keys else None, class_="chart",
    )  # fmt: skip


def _y(up: Axis, value: float) -> str:
    return f"{1000 - 1000 * up.place(value):.4g}"


def _draw_grid(across: Axis, up: Axis) -> Markup:
    rows = "".join(f"M0 {_y(up, t)}H1000" for t in up.ticks)
    marks = "".join(f"M{1000 * across.place(t):.4g} 1000v12" for t in across.ticks)
    return _path(rows + marks, "grid")


def _path(d: str, class_: str) -> Markup:
    return tag("path", d=d, class_=class_)


def _line_path(x: Sequence[float], y: Values, across: Axis, up: Axis) -> str:
    points = [None if v is None else f"{1000 * across.place(u):.4g} {_y(up, v)}" for u, v in zip(x, y, strict=True)]
    runs = [list(group) for is_gap, group in groupby(points, key=lambda p: p is None) if not is_gap]
    # A run of one point has no length; "h0" with round caps makes it a dot instead of nothing.
    return "".join("M" + "L".join(run) + ("h0" if len(run) == 1 else "") for run in runs)


def _tick(value: float, up: Axis) -> Markup | str:
    if up.is_log and up.ticks[0] < 1e-3:
        return join(["10", tag("sup", f"{round(math.log10(value))}".replace("-", "−"))])
    decimals = max(0, -math.floor(math.log10(up.ticks[1] - up.ticks[0]) + 1e-9)) if not up.is_log else 0
    if up.is_log or decimals > 5 or abs(value) >= 1e7:
        return plain(value)
    return f"{value:,.{decimals}f}".replace("-", "−")


def _describe(title, y_label, lines, references, x_label) -> str:
    """The chart in words, for screen readers."""
    said = [f"{title}. {y_label} over {x_label}."]
    for line in lines:
        known = [v for v in line.y if v is not None]
        if known:
            first, last, low, high = map(plain, (known[0], known[-1], min(known), max(known)))
            said.append(f"{line.label}: from {first} to {last}, lowest {low}, highest {high}.")
    return " ".join(said + [f"Reference line: {r.label or plain(r.y)}." for r in references])


def _hover(across: Axis, x_label: str, readouts: Sequence[tuple[str, int, Sequence[float], Values]]) -> str:
    def shorten(values: Values) -> list[float | None]:
        return [None if v is None else float(f"{v:.4g}") for v in values]

    series = [{"n": label, "s": s % 4, "x": list(x), "y": shorten(y)} for label, s, x, y in readouts]
    data = {"x": [across.low, across.high], "l": x_label, "s": series}
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
