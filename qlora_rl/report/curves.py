"""What happened over the steps: one chart for each question."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from .charts import Line, Reference, draw_chart, smooth
from .parts import Markup, section, tag
from .quantities import finite, share
from .run import Run, end_window, summarise
from .sentences import MISMATCH_BAR, choose_window


def draw_curves(runs: Sequence[Run], names: Sequence[str]) -> list[Markup]:
    """The charts that these runs have something for: rewards and sampler where answers were sampled, else loss and
    accuracy."""
    if any(run.is_online for run in runs):
        own = [_draw_rewards_apart(runs[0]), _draw_dashboard(runs, names)]
        is_taught = all(run.is_taught for run in runs)
        first = _draw_teacher if is_taught else _draw_reward
        own += [_draw_teacher_by_place(runs[0])] if is_taught else []
        reward, *others = (draw(runs, names) for draw in (first, _draw_mismatch, _draw_ratio))
        own.insert(0, _draw_held_out(runs, names))
        return [reward, *(part for part in own if part is not None), *others]
    return [shown for draw in (_draw_loss, _draw_hits, _draw_held_out) if (shown := draw(runs, names)) is not None]


def _draw_curve(
    runs: Sequence[Run], names: Sequence[str], column: str, title: str, y_label: str, word: str = "mean", **options: Any
) -> Markup | None:
    average: Any = fmean if word == "mean" else median
    lines = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        x, y, window = run.steps, run.column(column), choose_window(len(run.metrics))
        label = name if len(runs) > 1 else y_label
        if window > 1:
            lines.append(Line(label, x, y, i, "thin"))
            lines.append(Line(f"{label}, {word} of {window} steps", x, smooth(y, window, average), i))
        else:
            lines.append(Line(label, x, y, i))
    return draw_chart(title, y_label, lines, legend=_legend(runs, names), **options)


def _section_of(
    runs: Sequence[Run], names: Sequence[str], column: str, title: str, caption: str, y_label: str, word: str = "mean",
    **options: Any,
) -> Markup:  # fmt: skip
    """One curve of each run under a title of its own."""
    window = choose_window(len(runs[0].metrics))
    if window > 1:
        caption += f" The thin line is every step; the bold one is the {word} of the {window} steps around it."
    return section(title, caption, _draw_curve(runs, names, column, title, y_label, word, **options))


def _legend(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[int, str]]:
    return list(enumerate(names)) if len(runs) > 1 else []


def _draw_reward(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    caption = "The average score of the answers written in each step; learning makes it rise."
    title = "Reward: how good the answers were"
    return _section_of(runs, names, "reward", title, caption, "mean reward per answer")


_REWARD = re.compile(r"rewards/(.+)/mean")
# Of an evaluation while it trains, what is drawn: the first that it has, of all runs.
_HELD_OUT = {
    "eval_reward": "mean reward per answer",
    "eval_rewards/accuracies": "share of pairs",
    "eval_mean_token_accuracy": "share of tokens",
    "eval_loss": "loss",
}


def _draw_held_out(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    """Evaluations over the steps; of one run also each reward function by itself."""
    known = {key for run in runs for each in run.evaluations for key in each}
    name = next((each for each in _HELD_OUT if each in known), None)
    if name is None:
        return None
    columns = [(run, name, label, i) for i, (run, label) in enumerate(zip(runs, names, strict=True))]
    if len(runs) == 1:
        parts = [(key, match[1]) for key in sorted(known) if (match := _REWARD.fullmatch(key.removeprefix("eval_")))]
        together = "all together, by weight" if name == "eval_reward" else _HELD_OUT[name]
        columns = [(runs[0], name, together, 0)]
        columns += [(runs[0], key, label, i) for i, (key, label) in enumerate(parts, 1)] if len(parts) > 1 else []
    lines = [
        Line(label, [e["step"] for e in run.evaluations], [e.get(key) for e in run.evaluations], i)
        for run, key, label, i in columns
    ]
    title = "Held out: evaluation while it trained"
    legend = [(i, label) for _, _, label, i in columns] if len(columns) > 1 else []
    caption = "Of eval_dataset, which is not trained on; every eval_steps."
    return section(title, caption, draw_chart(title, _HELD_OUT[name], lines, legend=legend))


# What people watch, by TRL's names: title, axis, what it tells. Drawn where a run has logged it.
_DASHBOARD = {
    "completion_length": ("Length of completions", "tokens, mean", "Growing without reward is a policy that pads."),
    "completions/clipped_ratio": ("Truncated completions", "share",
    "Cut at max_completion_length, so they have no end."),
    "frac_reward_zero_std": ("Prompts that teach nothing", "share",
        "All completions of a group have one reward: no gradient."),
    "tools/call_frequency": ("Tool calls", "calls per completion", "Of all turns; those that failed are among them."),
    "tools/failure_frequency": ("Failed tool calls", "share of the calls",
    "An unknown tool, wrong arguments, or a tool that raised."),
    "reward_std": ("Spread of rewards", "standard deviation", "Within a group; the signal of GRPO."),
    "entropy": ("Entropy", "nats per token", "Near zero, the policy no longer explores."),
    "kl": ("KL to the reference", "nats per token", "How far the policy is from where it started (beta > 0)."),
    "clip_ratio/region_mean": ("Clipped tokens", "share", "Their ratio left the clipping range of the loss."),
    "routing_agreement": ("Routing agreement", "share of the choices",
        "Experts of a mixture that trainer and engine both chose for a token."),
    "routing_weight_diff_mean": ("Routing weights apart", "difference of a weight, mean",
        "Of trainer and engine, for the same experts; rounding where both hold the same policy."),
    "routing_weights_rejected": ("Routing weights rejected", "share",
        "Of the engine's weights; too far from the trainer's to be replayed, so it kept its own."),
    "loss": ("Loss", "loss", "In GRPO it says little; spikes do."),
    "grad_norm": ("Gradient norm", "norm", "Before clipping."),
    "learning_rate": ("Learning rate", "rate", "Of the optimizer."),
    "gpu_memory_gib": ("GPU memory", "GiB, peak", "Of torch in this process; a server's is its own."),
}  # fmt: skip


def _draw_rewards_apart(run: Run) -> Markup | None:
    """Each reward function by itself, of the first run, where there are several."""
    found = [match for key in _keys(run) if (match := _REWARD.fullmatch(key))]
    if len(found) < 2:
        return None
    title = "Each reward function"
    window = choose_window(len(run.metrics))
    lines = [Line(each[1], run.steps, smooth(run.column(each[0]), window, fmean), i) for i, each in enumerate(found)]
    chart = draw_chart(title, "mean reward per answer", lines, legend=[(i, each[1]) for i, each in enumerate(found)])
    caption = "Before weights, the mean of each step." + (f" Mean of {window} steps." if window > 1 else "")
    return section(title, caption, chart)


def _draw_dashboard(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    logged = _keys(runs[0])
    shown = [name for name in _DASHBOARD if name in logged and runs[0].values(name)]
    if not shown:
        return None
    charts = []
    for name in shown:
        title, axis, told = _DASHBOARD[name]
        charts += [
            tag("h3", title),
            tag("p", f"{told} ({name})", class_="caption"),
            _draw_curve(runs, names, name, title, axis),
        ]
    inner = tag(
        "details", tag("summary", f"{len(shown)} charts: {', '.join(_DASHBOARD[n][0].lower() for n in shown)}"), *charts
    )
    return section("Training health", None, inner)


def _keys(run: Run) -> list[str]:
    return list(dict.fromkeys(key for record in run.metrics for key in record))


_DIVERGENCES = {
    0.0: "forward KL (teacher ‖ student)",
    1.0: "reverse KL (student ‖ teacher)",
}


def _draw_teacher(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    """The divergence of each step; of a run that has not recorded it, the loss, which is its mean."""
    column = "teacher_divergence" if all(run.values("teacher_divergence") for run in runs) else "loss"
    kinds = {_DIVERGENCES.get(run.argument("beta"), "Jensen-Shannon divergence") for run in runs}
    label = kinds.pop() if len(kinds) == 1 else "divergence"
    caption = (
        f"{label[:1].upper() + label[1:]} over the tokens of each step, in nats per token: 0 where both expect the "
        "same. Learning makes it fall."
    )
    return _section_of(runs, names, column, "Teacher: how far the student is from it", caption, "nats per token")


def _draw_teacher_by_place(run: Run) -> Markup | None:
    """The divergence in each eighth of the completions, at the first and at the last steps."""
    column = "teacher_divergence_by_position"
    known = [each for record in run.metrics if isinstance(each := record.get(column), list) and each]
    if len(known) < 2 or len({len(each) for each in known}) > 1:
        return None
    window, title = end_window(len(known)), "Teacher, by place in the answer"
    lines = []
    for i, (label, part) in enumerate((("first steps", known[:window]), ("last steps", known[-window:]))):
        places = [
            [value for each in column if (value := finite(each)) is not None] for column in zip(*part, strict=True)
        ]
        lines.append(Line(label, range(1, len(places) + 1), [fmean(each) if each else None for each in places], i))
    chart = draw_chart(
        title, "nats per token", lines, legend=[(i, line.label) for i, line in enumerate(lines)], x_label="eighth"
    )
    caption = "The same, over each eighth of the longest answer, from its beginning to its end."
    return section(title, caption, chart)


def _draw_loss(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    caption = "Of the examples of each step; learning makes it fall."
    return _section_of(runs, names, "loss", "Loss: what training makes small", caption, "loss")


_HITS = {
    "rewards/accuracies": (
        "Preference: how often the chosen answer gained more",
        "Share of the pairs in which training has raised the probability of the chosen answer by more than that of the "
        "rejected one. One half is chance.",
        "share of pairs",
    ),
    "mean_token_accuracy": (
        "Accuracy: how often the next token is right",
        "Share of the tokens that the model holds for the likeliest one, given the right ones before it.",
        "share of tokens",
    ),
}


def _draw_hits(runs: Sequence[Run], names: Sequence[str]) -> Markup | None:
    return _section_of(runs, names, runs[0].hits, *_HITS[runs[0].hits]) if runs[0].hits else None


def _draw_mismatch(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    caption = (
        "Distance between the probabilities the trainer computes and those the sampler used for the very same tokens; "
        "0 = identical. Lower is better; the scale is logarithmic, so equal heights are equal factors."
    )
    if any(run.is_async for run in runs):
        caption += (
            " Where answers are written while the model is trained, it also holds what the model has learned meanwhile."
        )
    bar = Reference(MISMATCH_BAR, f"{MISMATCH_BAR}, prime-rl’s bar for a new model")
    title = "Mismatch KL: how far apart trainer and sampler are"
    options: dict[str, Any] = {"references": [bar], "is_log": True}
    return _section_of(runs, names, "mismatch_kl", title, caption, "mismatch KL, logarithmic", "median", **options)


def _draw_ratio(runs: Sequence[Run], names: Sequence[str]) -> Markup:
    title = "Importance ratio: how much a token had to be corrected"
    shown = (
        ("ratio_p01", "1st percentile", "thin"),
        ("ratio_p50", "median", "bold"),
        ("ratio_p99", "99th percentile", "thin"),
    )
    lines = [
        Line(f"{name}, {label}" if len(runs) > 1 else label, run.steps, run.column(column), i, weight)
        for i, (run, name) in enumerate(zip(runs, names, strict=True))
        for column, label, weight in shown
    ]
    known = [v for line in lines for v in line.y if v is not None]
    is_log = bool(known) and min(known) >= 0 and max(known) > 4 * max(min(known), 1e-12)
    chart = draw_chart(
        title, "trainer’s probability ÷ sampler’s" + (", logarithmic" if is_log else ""), lines,
        references=[Reference(1.0, "")], legend=_legend(runs, names), is_log=is_log,
    )  # fmt: skip
    caption = (
        "The trainer’s probability of a token divided by the sampler’s. 98 % of the tokens are between the thin lines "
        "(1st and 99th percentile). The dotted line at 1 is no correction: the closer they are to it, the less of what "
        "was sampled has to be corrected or thrown away."
    )
    facts, extras = summarise(runs[0]), []
    if facts["ess_median"] is not None:
        extras.append(f"effective sample size {share(facts['ess_median'])} (median)")
    if facts["masked_share_mean"] is not None:
        extras.append(f"{share(facts['masked_share_mean'])} of tokens masked (mean)")
    said = "; ".join(extras)
    said = f"{names[0]}: {said}" if len(runs) > 1 else said[:1].upper() + said[1:]
    return section(title, caption, chart, tag("p", f"{said}.", class_="caption") if extras else None)
