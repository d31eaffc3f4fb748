"""The page: what a run achieved, how faithful its sampler was, where the time went; also of other runs, for
comparison."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from qlora_rl.locks import replace_file

from .curves import draw_curves
from .look import CSS, JS
from .outcomes import draw_evaluation, draw_rollouts
from .parts import Markup, object_in, objects_in, pairs, section, table, tag
from .quantities import ABSENT, finite, octets, plain, seconds, share
from .run import Run, read_run, summarise
from .sentences import Facts, base_sentence, concerns, fidelity_sentence, headline, peak_sentence, unverified_sentence
from .times import draw_time

_SECRET = re.compile(r"(?i)(?:^|[_.-])(?:api[_-]?key|(?:hf|auth|access|bearer)[_-]?token|secret|password)$")
_SECRET_ARGUMENT = re.compile(r"(?i)(--?[\w-]*(?:api[_-]?key|hf[_-]?token|auth[_-]?token|secret|password)[= ]\s*)\S+")


# Seconds after which a browser reads a page again whose run is training.
RENEWED_S = 5


def write_report(run_dir: Path | str, against: Sequence[Path | str] = (), *, is_live: bool = False) -> Path:
    """Write `run_dir/report.html`, one page that needs nothing else, and return its path.

    `against` are other runs, which are added to the charts and tables. The page appears whole or not at all. Where
    `is_live`, a browser reads it again every few seconds as long as the run is training; it is for the caller to write
    it again.

    Raises:
        RunDirectoryError: `run_dir` or one of `against` is not a directory. Whatever is missing inside is no error.
    """
    runs = [read_run(path) for path in (run_dir, *against)]
    target = runs[0].path / "report.html"
    # A sample may hold half a surrogate pair, which UTF-8 cannot carry: it becomes a question mark.
    replace_file(target, render(runs, is_live=is_live).encode("utf-8", errors="replace"))
    return target


def render(runs: Sequence[Run], *, is_live: bool = False) -> str:
    """The page of the first run, compared with the others; see `write_report`."""
    run, names, facts = runs[0], name_runs(runs), [summarise(r) for r in runs]
    renews = is_live and run.status == "running"
    digest = base64.b64encode(hashlib.sha256(JS.encode()).digest()).decode()
    # The policy lets the browser fetch nothing and run no script but ours, even if something slipped through escaping.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", http_equiv="refresh", content=str(RENEWED_S)) if renews else None,
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{run.name} · qlora_rl"),
        tag("style", Markup(CSS)),
    )
    has_steps = any(r.metrics for r in runs)
    body = tag(
        "main",
        tag("p", "This run is training, and the page renews itself.", class_="live") if renews else None,
        _draw_top(run, facts[0]),
        *((*draw_curves(runs, names), draw_time(runs, names)) if has_steps else ()),
        draw_evaluation(run),
        draw_rollouts(run),
        _draw_table(runs, names, facts),
        _draw_details(run),
        tag("footer", f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from the files of {run.name}."),
    )
    page = tag("html", head, tag("body", body, tag("script", Markup(JS))), lang="en")
    return "<!doctype html>\n" + page + "\n"


def name_runs(runs: Sequence[Run]) -> list[str]:
    """A different name for each run: its directory's, with the parent's where two are the same, else numbered."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.path.resolve().parent.name}/{run.name}" for run in runs]
    return [name if name not in names[:i] else f"{name} ({i + 1})" for i, name in enumerate(names)]


WORDS = (
    ("step", "One round of learning: write answers, score them, adjust the model, hand the change over."),
    ("reward", "The score that a program gives to an answer. Learning means that it rises."),
    ("base", "The large model, stored in 4 bits per weight. It never changes."),
    ("adapter", "The small set of extra weights (LoRA) that is trained. Only this is synced."),
    ("trainer, sampler", "Two programs on the same base: one learns, the other writes the answers to learn from."),
    ("rollout", "The answers that the sampler wrote in one step."),
    ("push", "Handing the freshly trained weights to the sampler, once per step."),
    ("mismatch KL", "How far the sampler’s probabilities are from the trainer’s, on the same tokens. 0 is perfect."),
)
# Of a run that learns from written examples: no sampler, no rewards.
WORDS_OF_EXAMPLES = (
    ("step", "One round of learning: read some examples, adjust the model."),
    ("loss", "How far the model is from what the examples show. Learning means that it falls."),
    *(pair for pair in WORDS if pair[0] == "base"),
    ("adapter", "The small set of extra weights (LoRA) that is trained."),
)


def _draw_top(run: Run, facts: Facts) -> Markup:
    model = run.config.get("model")
    known = WORDS if run.is_online else WORDS_OF_EXAMPLES
    words = [part for term, meaning in known for part in (tag("dt", term), tag("dd", meaning))]
    notes = [said for said in (unverified_sentence(run), *concerns(run), peak_sentence(run), *run.problems) if said]
    if run.summary.get("error"):
        notes.insert(0, f"The run ended with an error: {run.summary['error']}")
    return tag(
        "header",
        tag("div", tag("span", run.status, class_=f"chip {run.status}"), tag("span", run.name),
            tag("span", model) if model else None, class_="meta"),
        tag("h1", headline(run, facts)),
        *(tag("p", sentence, class_="lead") for sentence in (fidelity_sentence(run, facts), base_sentence(run))
          if sentence),
        tag("div", tag("h3", "What to look at"), tag("ul", *(tag("li", each) for each in notes)), class_="note")
        if notes else None,
        _draw_tiles(run, facts),
        tag("details", tag("summary", f"New to this? {'Eight' if run.is_online else 'Four'} words that the page "
                                      "uses"), tag("dl", *words, class_="words"),
            class_="intro"),
    )  # fmt: skip


def _draw_tiles(run: Run, facts: Facts) -> Markup | None:
    def was(key: str, say: Callable[[object], str]) -> str:
        return "" if facts[key] is None else f"{say(facts[key])} at the start"

    size = "" if facts["sync_bytes_median"] is None else f"{octets(facts['sync_bytes_median'])} per push"
    worst = "" if facts["mismatch_kl_max"] is None else f"median; worst step {plain(facts['mismatch_kl_max'])}"
    mean, middle = seconds(facts["step_seconds_mean"]), seconds(facts["step_seconds_median"])
    pace = "median" if mean in (middle, ABSENT) else f"median; mean {mean}"
    tiles = [
        ("Reward in the evaluation", "eval_after", plain, was("eval_before", plain)),
        ("Reward", "reward_last", plain, was("reward_first", plain)),
        ("Held-out reward", "held_out_last", plain, was("held_out_first", plain)),
        ("Loss", "loss_last", plain, was("loss_first", plain)),
        (_HITS.get(run.hits or "", ""), "hits_last", share, was("hits_first", share)),
        ("Mismatch KL", "mismatch_kl_median", plain, worst),
        ("Time per push", "sync_seconds_median", seconds, size),
        ("Time per step", "step_seconds_median", seconds, pace),
        ("Tokens written per second", "rollout_tokens_per_s", plain, "while sampling"),
    ]
    drawn = [
        tag("div", tag("dt", label), tag("dd", say(facts[key]), class_="big"), tag("dd", note, class_="small"))
        for label, key, say, note in tiles
        if facts[key] is not None
    ]
    return tag("dl", *drawn, class_="tiles two" if len(drawn) in (2, 4) else "tiles") if drawn else None


_HITS = {"rewards/accuracies": "Pairs ranked right", "mean_token_accuracy": "Tokens predicted right"}
TABLE = (  # label, fact, how to say it
    ("Steps", "steps", plain),
    ("Evaluated before", "eval_before", plain),
    ("Evaluated after", "eval_after", plain),
    ("Reward at first", "reward_first", plain),
    ("Reward at last", "reward_last", plain),
    ("Held-out reward at first", "held_out_first", plain),
    ("Held-out reward at last", "held_out_last", plain),
    ("Loss at first", "loss_first", plain),
    ("Loss at last", "loss_last", plain),
    ("Mismatch KL, median", "mismatch_kl_median", plain),
    ("Mismatch KL, 95th percentile", "mismatch_kl_p95", plain),
    ("Mismatch KL, worst step", "mismatch_kl_max", plain),
    ("Effective sample size, median", "ess_median", share),
    ("Size of a push", "sync_bytes_median", octets),
    ("Time per push", "sync_seconds_median", seconds),
    ("Time per step, median", "step_seconds_median", seconds),
    ("Tokens written per second", "rollout_tokens_per_s", plain),
)


def _draw_table(runs: Sequence[Run], names: Sequence[str], facts: Sequence[Facts]) -> Markup | None:
    if len(runs) < 2:
        return None
    plans = [str(object_in(run.config, "plan").get("strategy") or run.config.get("sync") or ABSENT) for run in runs]
    rows: list[tuple[object, ...]] = [("State", *(run.status for run in runs))]
    rows += [("What is pushed", *plans)] if set(plans) != {ABSENT} else []
    known = [entry for entry in TABLE if any(f[entry[1]] is not None for f in facts)]
    rows += [(label, *(say(f[key]) for f in facts)) for label, key, say in known]
    caption = "The same numbers for each run; the first column is this page’s run."
    return section("Side by side", caption, table(["", *names], rows, is_first_main=True))


def _flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [pair for key, inner in value.items() for pair in _flatten(inner, f"{name}.{key}" if name else str(key))]
    if value is None or value == {}:
        return []
    if _SECRET.search(name) and value:
        return [(name, "(hidden)")]
    return [(name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))]


def _draw_details(run: Run) -> Markup | None:
    plan, known = object_in(run.config, "plan"), {"plan", "versions", "machine", "git_commit", "command"}
    known |= {"base_proof", "memory"}
    reasons = plan.get("reasons")
    reasons = reasons if isinstance(reasons, list) else [reasons] if reasons else []
    command = run.config.get("command")
    words = " ".join(map(str, command)) if isinstance(command, list) else command
    groups = [
        ("Plan: how weights are synced, and why", [
            pairs(_flatten({k: v for k, v in plan.items() if k != "reasons"})) if plan else None,
            tag("ul", *(tag("li", reason) for reason in reasons)) if reasons else None]),
        ("Base verification: trainer and sampler hold the same base", [pairs(_flatten(object_in(run.config,
            "base_proof")))]),
        ("Memory: what the run was planned to hold", [_draw_memory(run)]),
        ("Configuration", [
            tag("pre", _SECRET_ARGUMENT.sub(r"\1(hidden)", str(words))) if words else None,
            pairs(_flatten({k: v for k, v in run.config.items() if k not in known}))]),
        ("Versions and machine", [pairs([
            *_flatten(object_in(run.config, "versions")), *_flatten(run.config.get("machine", {}), "machine"),
            *_flatten({k: run.config[k] for k in ("git_commit",) if run.config.get(k)})])]),
        ("Every number that was recorded per step", [_draw_every_metric(run)]),
    ]  # fmt: skip
    drawn = [
        tag("details", tag("summary", title), tag("div", *shown))
        for title, parts in groups
        if (shown := [part for part in parts if part is not None])
    ]
    return section("How it was run", None, *drawn) if drawn else None


def _draw_memory(run: Run) -> Markup | None:
    """The memory estimate, line by line, the largest first."""
    memory = object_in(run.config, "memory")
    known = [(finite(line.get("nbytes")) or 0.0, line) for line in objects_in(memory, "lines")]
    rows = [
        (line.get("name", ABSENT), octets(nbytes), line.get("when", ABSENT))
        for nbytes, line in sorted(known, key=lambda pair: -pair[0])
    ]
    cache = finite(memory.get("kv_cache_bytes"))
    if cache is not None:
        rows.append(("KV cache", octets(cache), "rollout"))
    if not rows:
        return None
    told = (
        "Bytes that are held always, or only while a step, a layer or a rollout is computed. Planned before "
        "anything was loaded."
    )
    return tag("div", tag("p", told, class_="caption"), table(["", "Size", "While"], rows))


def _draw_every_metric(run: Run) -> Markup | None:
    names = [name for name in dict.fromkeys(key for record in run.metrics for key in record) if name != "step"]
    columns = [(name, values) for name in names if (values := run.values(name))]
    rows = [(n, *map(plain, (v[0], median(v), v[-1], min(v), max(v))), f"{len(v):,}") for n, v in columns]
    if not rows:
        return None
    return table(["", "First", "Median", "Last", "Lowest", "Highest", "Steps"], rows)
