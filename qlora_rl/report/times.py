"""Where the time of a step and of a push goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median

from .parts import Markup, join, section, table, tag
from .quantities import ABSENT, plain, seconds, share
from .run import Run

PARTS = (
    "sampler writes answers",
    "trainer scores and learns",
    "push to the sampler",
    "check of the push",
    "sampler sleeps and wakes",
)


def draw_time(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """Steps and pushes, in parts; `None` where no answers were sampled."""
    if not any(run.is_online for run in runs):
        return None
    timed = [(n, r, parts) for n, r in zip(names, runs, strict=True) if (parts := _step_parts(r))]
    longest = max((sum(parts) for *_, parts in timed), default=1.0)
    waits = [name for name, run, _ in timed if run.is_async]
    first = PARTS[0] if not waits else "trainer waits for answers"
    if 0 < len(waits) < len(timed):
        first = f"{PARTS[0]} ({', '.join(waits)}: the wait for them)"
    labels, bars, content = (first, *PARTS[1:]), [], []
    for name, _, parts in timed:
        shown = [(i, part, value) for i, (part, value) in enumerate(zip(labels, parts, strict=True)) if value]
        pieces = [tag("i", class_=f"p{i}", style=f"width:{100 * value / longest:.3f}%") for i, _, value in shown]
        label = f"{name}: " + ", ".join(f"{part} {seconds(value)}" for _, part, value in shown)
        bars.append(tag("p", tag("span", name), tag("span", seconds(sum(parts)), class_="num")))
        bars.append(tag("div", *pieces, class_="bar", role="img", aria_label=label))
    if timed:
        rows = [
            (join([tag("i", class_=f"dot p{i}"), part]),
             *(f"{seconds(parts[i])} · {share(parts[i] / sum(parts))}" for *_, parts in timed))
            for i, part in enumerate(labels) if any(parts[i] for *_, parts in timed)
        ]  # fmt: skip
        content = [tag("div", *bars, class_="bars"), table(["Part of a step", *(name for name, *_ in timed)], rows)]
    content += _draw_overlap(runs, names)
    caption = "The median step, taken apart; of each part the median, and what is left of the step is the trainer's."
    return section("Time: where a step goes", caption, *content)


def _step_parts(run: Run) -> list[float] | None:
    """Seconds of a typical step, as `PARTS`. `None` where a part was never measured.

    Where rollouts and training overlap, a step holds the wait for the rollouts and not what sampling them took.
    """
    drawing = "trainer_wait_seconds" if run.is_async else "rollout_seconds"
    columns = [run.column(name) for name in (drawing, "step_seconds", "sync_seconds")]
    others = [run.column(name) for name in ("canary_seconds", "sleep_seconds", "wake_seconds")]
    whole = [
        (*row, check or 0.0, (asleep or 0.0) + (awake or 0.0))
        for *row, check, asleep, awake in zip(*columns, *others, strict=True)
        if None not in row
    ]
    if not whole:
        return None
    drawn, step, push, check, rest = (median(column) for column in zip(*whole, strict=True))
    # The sampler may still write the next answers when a step ends: the rest is never less than nothing.
    parts = [drawn, max(0.0, step - drawn - push - check - rest), push, check, rest]
    return parts if sum(parts) > 0 else None


def _draw_overlap(runs: Sequence[Run], names: Sequence[str]) -> list[Markup]:
    """Of runs that sample and train at the same time: how old, and who waited."""
    shown = [(name, run) for name, run in zip(names, runs, strict=True) if run.is_async]
    if not shown:
        return []

    def over(reduce: Callable[[Sequence[float]], float], column: str, say: Callable[[object], str]) -> list[str]:
        return [say(reduce(values)) if (values := run.values(column)) else ABSENT for _, run in shown]

    rows = [
        ("Policies that answers were behind, mean", *over(fmean, "staleness_mean", plain)),
        ("… and at most", *over(max, "staleness_max", plain)),
        (
            "Steps that found their answers ready",
            *over(lambda found: fmean(n > 0 for n in found), "rollouts_ready", share),
        ),
        (
            "A batch of answers, from its first token to its last reward",
            *over(median, "rollout_sampled_seconds", seconds),
        ),
        ("The sampler had nothing to do before it", *over(median, "rollout_idle_seconds", seconds)),
    ]
    return [tag("h3", "Sampling and training at the same time"), table(["", *(name for name, _ in shown)], rows)]
