"""What a run amounts to, in sentences: functions of its values alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import pi, sqrt
from statistics import fmean

from .charts import smooth
from .parts import object_in
from .quantities import finite, plain, seconds, share
from .run import Run, end_window

MISMATCH_BAR = 0.015  # prime-rl's merge bar: a new model must stay below this mismatch KL

# Of answers that are cut off, and of prompts whose answers have one reward, what is worth a look.
SHARE_CUT, SHARE_EQUAL = 0.3, 0.8
_NEAR = 0.9  # of the way from the smallest to the largest reward
_NO_FAULT = ("", "noise", "dropout")  # causes of a distance that is none

Facts = dict[str, float | None]


def headline(run: Run, facts: Facts) -> str:
    """The result in one sentence."""
    steps = int(facts["steps"] or 0)
    if not steps:
        return {
            "failed": "This run failed before its first step was recorded.",
            "interrupted": "This run was interrupted before its first step was recorded.",
        }.get(run.status, "Nothing to show yet: this run has not recorded a step.")
    planned = run.planned_steps
    count = f"{steps:,}" if planned is None or planned <= steps else f"{steps:,} of {planned:,.0f}"
    count += " step" if steps == 1 else " steps"
    took = "" if facts["seconds"] is None else f" ({seconds(facts['seconds'])})"
    first, last = facts["reward_first"], facts["reward_last"]
    if facts["eval_before"] is not None and facts["eval_after"] is not None:
        change = _evaluation(facts, facts["eval_before"], facts["eval_after"])
    elif first is not None and last is not None:
        change = f"the reward {_change(first, last, 0.005 * max(abs(first), abs(last)))}"
        if 0 < abs(last - first) < reward_noise(run.values("reward")):
            change = (
                f"the reward went from {plain(first)} to {plain(last)}, which may be chance: single steps differ "
                "as much"
            )
    elif (loss := facts["loss_last"]) is not None:
        first = facts["loss_first"]
        change = f"the loss {_change(first, loss, 0.005 * max(abs(first), abs(loss)))}"
    else:
        change = "no reward was recorded"
    opening = {
        "finished": f"In {count}{took} ",
        "interrupted": f"Interrupted after {count}{took}: ",
        "failed": f"Failed after {count}{took}: ",
    }.get(run.status, f"So far, in {count}{took}, ")
    return f"{opening}{change}."


def _evaluation(facts: Facts, before: float, after: float) -> str:
    """What `qlora-rl eval` has found; a difference within two standard errors may be chance."""
    where = (
        "on held-out prompts" if facts["eval_prompts"] is None else f"on {facts['eval_prompts']:,.0f} held-out prompts"
    )
    if 0 < abs(after - before) < 2 * (facts["eval_error"] or 0.0):
        return f"the reward went from {plain(before)} to {plain(after)} {where}, which may be chance"
    return f"the reward {_change(before, after, 1e-9)} {where}"


def concerns(run: Run) -> list[str]:
    """What to look at first, and what to do about it: a sentence each."""
    said = []
    limit = run.argument("max_completion_length")
    if (cut := _at_the_end(run, "completions/clipped_ratio")) >= SHARE_CUT:
        said.append(
            f"{share(cut)} of the answers at the end were cut "
            f"off{'' if limit is None else f' after {limit:,.0f} tokens'}: they have no end, and a "
            "reward that looks for one finds nothing. Raise max_completion_length, or reward short answers."
        )
    if (equal := _at_the_end(run, "frac_reward_zero_std")) >= SHARE_EQUAL:
        said.append(
            f"{share(equal)} of the prompts at the end teach nothing: all answers to one have the same reward. "
            + (
                "It is the best reward that this run has seen. If there is no better one, the model has learned these "
                "prompts, and more steps on them bring nothing: try it on others, or train on harder ones."
                if _is_at_its_best(run)
                else "Use easier or harder prompts, more num_generations, or a reward that tells answers apart."
            )
        )
    causes = [each.get("mismatch_cause") for each in run.metrics]
    alarms = [
        (step, cause)
        for step, cause in zip(run.steps, causes, strict=True)
        if isinstance(cause, str) and cause not in _NO_FAULT
    ]
    if alarms:
        steps = ", ".join(f"{step:,.0f}" for step, _ in alarms[:5]) + (
            f" and {len(alarms) - 5} more" if alarms[5:] else ""
        )
        likely = ", ".join(dict.fromkeys(cause for _, cause in alarms))
        said.append(
            f"The mismatch alarm was raised in step {steps}: trainer and sampler were further apart than is normal "
            "for them. Likely cause: "
            f"{likely}; log.txt has the sentence, docs/fidelity.md what to do."
        )
    return said


def _is_at_its_best(run: Run) -> bool:
    """The mean reward of the last steps is near the largest reward: of a step, and of a completion that was kept."""
    means = run.values("reward")
    kept = [
        float(value)
        for when in (run.rollouts.get("first"), run.rollouts.get("last"), *(run.rollouts.get("steps") or []))
        if isinstance(when, dict)
        for each in when.get("rollouts", [])
        if len(each.get("rewards", {})) == 1  # of several it is their weighted sum, and the weights are not known
        for value in each["rewards"].values()
        if value is not None
    ]
    if not means:
        return False
    low, top = min(means + kept), max(means + kept)
    return top > low and _at_the_end(run, "reward") - low >= _NEAR * (top - low)


def _at_the_end(run: Run, column: str) -> float:
    values = run.values(column)
    return fmean(values[-end_window(len(values)) :]) if values else 0.0


def reward_noise(rewards: Sequence[float]) -> float:
    """By how much the means of the first and of the last steps may differ by chance: two standard errors, from what
    neighbouring steps differ by."""
    if len(rewards) < 2:
        return 0.0
    # Of two numbers with one normal distribution the mean distance is 2/sqrt(pi) standard deviations.
    deviation = fmean(abs(b - a) for a, b in pairwise(rewards)) * sqrt(pi) / 2
    return 2 * deviation * sqrt(2 / end_window(len(rewards)))


def _change(before: float, after: float, tolerance: float) -> str:
    if abs(after - before) <= tolerance or plain(before) == plain(after):
        return f"stayed at {plain(after)}"
    return f"{'rose' if after > before else 'fell'} from {plain(before)} to {plain(after)}"


def fidelity_sentence(run: Run, facts: Facts) -> str | None:
    """Whether the sampler was faithful to the trainer, in one sentence; `None` where it was not measured."""
    middle, worst = facts["mismatch_kl_median"], facts["mismatch_kl_max"]
    if middle is None:
        return None
    if oldest := max(run.values("staleness_max"), default=0.0):
        return _stale_sentence(run, oldest, middle)
    over, count = sum(v > MISMATCH_BAR for v in run.values("mismatch_kl")), len(run.values("mismatch_kl"))
    if over:
        return (
            f"Trainer and sampler drifted apart: in {over:,} of {count:,} steps the mismatch KL was above "
            f"{MISMATCH_BAR}, the bar that prime-rl, another RL library, sets for a new model."
        )
    if middle == 0 and worst == 0:
        return "Trainer and sampler gave every token exactly the same probability: the mismatch KL was 0 throughout."
    if middle <= 0 or middle > MISMATCH_BAR:
        return f"The median mismatch KL between trainer and sampler was {plain(middle)} (bar: {MISMATCH_BAR})."
    times = plain(MISMATCH_BAR / middle)
    return (
        f"Trainer and sampler stayed together: median mismatch KL {plain(middle)}, {times} times below the "
        f"{MISMATCH_BAR} that prime-rl, another RL library, sets as the bar for a new model."
    )


def base_sentence(run: Run) -> str | None:
    """What 4 bits have cost the base, in one sentence; `None` where it was not measured."""
    measured = object_in(object_in(run.config, "base"), "measured")
    kl, before, after = (finite(measured.get(name)) for name in ("kl", "perplexity_source", "perplexity_base"))
    if kl is None:
        return None
    told = "" if before is None or after is None else f": perplexity {plain(after)} instead of {plain(before)}"
    return f"The base is a KL of {plain(kl)} nats a token away from the model that it was made from{told}."


def _stale_sentence(run: Run, oldest: float, middle: float) -> str:
    again = run.values("rescored_diff")
    apart = f" Scored again after each push, the two were at most {plain(max(again))} apart (scaled)." if again else ""
    return (
        f"Rollouts were up to {oldest:,.0f} {'policy' if oldest == 1 else 'policies'} older than the one that trained "
        f"on them, and the mismatch KL (median {plain(middle)}) holds that too.{apart}"
    )


def unverified_sentence(run: Run) -> str | None:
    """A warning, if the run was allowed to train although trainer and sampler held different bases; else `None`."""
    proof = run.config.get("base_proof")
    if not isinstance(proof, dict) or proof.get("verified") is not False:
        return None
    return (
        "Trainer and sampler held different bases (allow_base_mismatch): every number on this page is marked by that; "
        "fingerprints.json names each weight that differs."
    )


def peak_sentence(run: Run) -> str | None:
    """Where the reward peaked, if it has since lost more than half of its range; else `None`."""
    known = [(s, v) for s, v in zip(run.steps, run.column("reward"), strict=True) if v is not None]
    if len(known) < 10:
        return None
    means = smooth([v for _, v in known], choose_window(len(known)), fmean)
    top, last = max(means), means[-1]
    if top - last <= 0.5 * (top - min(means)) or top - last <= 0.05 * abs(top):
        return None
    step = known[means.index(top)][0]
    return f"Smoothed, the reward peaked at {plain(top)} near step {step:,.0f} and ended at {plain(last)}."


def choose_window(count: int) -> int:
    """An odd number of steps to average over: a twentieth of all, at least 5; none at all in a short run."""
    return 1 if count < 20 else max(5, min(251, count // 20 | 1))
