"""Draws docs/fidelity.svg: what each number of docs/fidelity.md looks like in a run of ours and in one of TRL's merging
way.

    qlora-rl demo --steps 40 --quiet --out OURS
    qlora-rl demo --steps 40 --quiet --sync trl-merge --out MERGE
    python benchmarks/fidelity_plot.py OURS MERGE [--json benchmarks/results/fidelity.json]

What is plotted is kept in the JSON, so that the picture can be made again without the runs:
python benchmarks/fidelity_plot.py.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS, MERGE = "the adapter travels", "TRL: merge and push"
COLOURS = {OURS: "#0b6e8f", MERGE: "#c2571a"}
KEPT = ("mismatch_kl", "scaled_diff", "mismatch_threshold", "ratio_p01", "ratio_p50", "ratio_p99", "ess", "by_position")
KEPT += ("logprob_diff_mean", "logprob_diff_max")
WIDTH, HEIGHT, GAP_X, GAP_Y, LEFT, TOP = 300, 150, 74, 66, 62, 58


def read(run: Path) -> dict[str, list]:
    """What is plotted of a run, step by step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name: [row.get(name) for row in rows] for name in KEPT}


class Panel:
    """Axes in a place of the picture, steps or positions below, one quantity to the left."""

    def __init__(self, place: int, title: str, note: str, low: float, high: float, last: float, *, is_log: bool = True):
        self.x0 = LEFT + (place % 2) * (WIDTH + GAP_X)
        self.y0 = TOP + (place // 2) * (HEIGHT + GAP_Y)
        self.low, self.high, self.last, self.is_log = low, high, last, is_log
        self.parts = [
            f'<text class="title" x="{self.x0}" y="{self.y0 - 20}">{title}</text>',
            f'<text class="note" x="{self.x0}" y="{self.y0 - 7}">{note}</text>',
        ]
        for tick in self._ticks():
            y = self.y(tick)
            self.parts.append(f'<path class="grid" d="M{self.x0} {y:.1f}h{WIDTH}"/>')
            label = f"{tick:.0e}".replace("e-0", "e-") if tick < 0.01 else f"{tick:g}"
            self.parts.append(
                f'<text class="tick" text-anchor="end" x="{self.x0 - 6}" y="{y + 3.5:.1f}">{label}</text>'
            )

    def _ticks(self) -> list[float]:
        if not self.is_log:
            return [self.low + i * (self.high - self.low) / 4 for i in range(5)]
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 4))]

    def x(self, value: float) -> float:
        return self.x0 + WIDTH * (value - 1) / max(1, self.last - 1)

    def y(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.y0 + HEIGHT * (1 - share)

    def names(self, values: dict[float, str]) -> None:
        """Words below the axis."""
        for value, name in values.items():
            anchor = {1: "start", self.last: "end"}.get(value, "middle")
            place = f'x="{self.x(value):.1f}" y="{self.y0 + HEIGHT + 14}"'
            self.parts.append(f'<text class="tick" text-anchor="{anchor}" {place}>{name}</text>')

    def line(self, values: list, colour: str, *, is_dashed: bool = False, width: float = 1.6) -> None:
        """One curve; gaps where there is no value."""
        path, is_down = [], False
        for i, value in enumerate(values):
            if value is None:
                is_down = False
                continue
            path.append(f"{'L' if is_down else 'M'}{self.x(i + 1):.1f} {self.y(value):.1f}")
            is_down = True
        dash = ' stroke-dasharray="5 4"' if is_dashed else ""
        self.parts.append(f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>')

    def band(self, low: list, high: list, colour: str) -> None:
        """The room between two curves."""
        there = [f"{self.x(i + 1):.1f} {self.y(v):.1f}" for i, v in enumerate(high)]
        back = [f"{self.x(i + 1):.1f} {self.y(v):.1f}" for i, v in reversed(list(enumerate(low)))]
        self.parts.append(f'<path d="M{"L".join([*there, *back])}Z" fill="{colour}" opacity="0.3"/>')

    def says(self, x: float, y: float, text: str, colour: str = "#555", anchor: str = "start") -> None:
        """A word in the picture, at values of its axes."""
        place = f'x="{self.x(x):.1f}" y="{self.y(y) - 4:.1f}"'
        self.parts.append(f'<text class="tick" text-anchor="{anchor}" {place} style="fill:{colour}">{text}</text>')


def draw(runs: dict[str, dict[str, list]]) -> str:
    """The whole picture, SVG."""
    steps = len(runs[OURS]["mismatch_kl"])
    below = {1: "step 1", steps: f"step {steps}"}
    panels = []

    panel = Panel(0, "mismatch_kl", "nats; the bar of prime-rl for a new model is 0.015", 1e-8, 10, steps)
    panel.names(below)
    panel.line([0.015] * steps, "#888", is_dashed=True, width=1)
    for name, run in runs.items():
        panel.line(run["mismatch_kl"], COLOURS[name])
    panels.append(panel)

    panel = Panel(
        1,
        "scaled_diff and mismatch_threshold",
        "mean over tokens; dashed: what the alarm calls normal",
        1e-6,
        1,
        steps,
    )
    panel.names(below)
    panel.line(runs[OURS]["mismatch_threshold"], COLOURS[OURS], is_dashed=True, width=1.2)
    for name, run in runs.items():
        panel.line(run["scaled_diff"], COLOURS[name])
    panels.append(panel)

    panel = Panel(
        2, "logprob_diff_mean and logprob_diff_max", "nats; thin: the largest of all tokens", 1e-6, 100, steps
    )
    panel.names(below)
    for name, run in runs.items():
        panel.line(run["logprob_diff_max"], COLOURS[name], width=0.7)
        panel.line(run["logprob_diff_mean"], COLOURS[name])
    panels.append(panel)

    panel = Panel(
        3, "ratio_p01, ratio_p50, ratio_p99", "importance ratio; the band holds 98% of all tokens", 1e-3, 1e3, steps
    )
    panel.names(below)
    for name, run in reversed(runs.items()):
        panel.band(run["ratio_p01"], run["ratio_p99"], COLOURS[name])
        panel.line(run["ratio_p50"], COLOURS[name], width=1)
    panels.append(panel)

    panel = Panel(4, "ess", "share of the sequences that would be left", 0, 1, steps, is_log=False)
    panel.names(below)
    for name, run in runs.items():
        panel.line(run["ess"], COLOURS[name])
    panels.append(panel)

    panel = Panel(5, "by_position", "nats, mean over all steps; eighths of the completion", 1e-6, 10, 8)
    panel.names({1: "first", 8: "last"})
    for name, run in runs.items():
        places = [[row[i] for row in run["by_position"] if row and row[i] is not None] for i in range(8)]
        means = [sum(values) / len(values) if values else None for values in places]
        known = [(i + 1, mean) for i, mean in enumerate(means) if mean is not None]
        panel.parts.append(
            f'<path fill="none" stroke-width="1.6" stroke="{COLOURS[name]}" d="M'
            + "L".join(f"{panel.x(x):.1f} {panel.y(y):.1f}" for x, y in known)
            + '"/>'
        )
        panel.parts += [
            f'<circle cx="{panel.x(x):.1f}" cy="{panel.y(y):.1f}" r="3" fill="{COLOURS[name]}"/>' for x, y in known
        ]
    panels.append(panel)

    width, height = LEFT + 2 * WIDTH + GAP_X + 24, TOP + 3 * HEIGHT + 3 * GAP_Y - 8
    keys, place = [], LEFT
    for name, colour in COLOURS.items():
        keys.append(f'<path d="M{place} {height - 14}h22" stroke="{colour}" stroke-width="3"/>')
        keys.append(f'<text class="note" x="{place + 28}" y="{height - 10}">{name}</text>')
        place += 190
    style = (
        "text{font-family:system-ui,sans-serif;fill:#222}.title{font-size:13px;font-weight:600}.note{font-size:11px;fill:#555}"
        ".tick{font-size:10px;fill:#555}.grid{stroke:#ddd;stroke-width:.7;fill:none}"
    )
    body = "\n".join(["\n".join(panel.parts) for panel in panels] + keys)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" '
        f'aria-label="Distance of trainer and engine over a run"><style>{style}</style>\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _short(value: object) -> object:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_short(each) for each in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="one of ours, one of TRL's way")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "fidelity.json")
    parser.add_argument("--svg", type=Path, default=ROOT / "docs" / "fidelity.svg")
    arguments = parser.parse_args()
    if arguments.runs:
        kept = {}
        for name, run in zip((OURS, MERGE), arguments.runs, strict=True):
            config = json.loads((run / "config.json").read_text())
            kept[name] = {"seed": config["seed"], "versions": config["versions"], "machine": config["machine"]}
            kept[name]["steps"] = _short(read(run))
        arguments.json.write_text(json.dumps(kept, separators=(",", ":")) + "\n")
    kept = json.loads(arguments.json.read_text())
    arguments.svg.write_text(draw({name: run["steps"] for name, run in kept.items()}))
    print(arguments.svg)


if __name__ == "__main__":
    main()
