"""What the model wrote and what it was worth: samples before and after, an evaluation, the first and the last
rollouts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from .parts import Markup, download, images_of, mark, object_in, section, table, tag, text_of
from .quantities import ABSENT, finite, plain, share
from .run import Run

_NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_CLOSING = re.compile(r"(?:</?\w+/?>|[\s.!?;,:)\]}\"'*$`])+$")

SHOWN = 6
_CONTEXT = 80  # characters before a token
_LONGEST = 4000  # characters of a text


def draw_samples(run: Run) -> Markup | None:
    """Held-out problems, answered before and after; `None` where there are none."""
    if not run.samples:
        return None
    cards, marks = [], []
    for sample in run.samples:
        verdict = {when: judge_sample(sample, when) for when in ("before", "after")}
        marks.append(verdict)
        sides = []
        for when, title in (("before", "Before training"), ("after", "After training")):
            sides.append(tag("div", tag("h4", title, mark(verdict[when])), _shown(sample.get(when))))
        cards.append(_card(sample, sides))
    right = {when: sum(mark[when] is True for mark in marks) for when in ("before", "after")}
    caption = (
        f"Problems that were kept out of training, answered greedily (always the likeliest token). Of these "
        f"{len(cards)}, {right['before']} were right before and {right['after']} after."
    )
    return section("Samples: the same problem before and after", caption, *_some(cards))


def draw_evaluation(run: Run) -> Markup | None:
    """What `qlora-rl eval` has left: rewards of base and policy, and some of their answers."""
    found = run.evaluation
    rewards = [(str(name), each) for name, each in object_in(found, "rewards").items() if isinstance(each, dict)]
    rows = [
        (name, *(_with_error(object_in(each, side)) for side in ("base", "policy", "difference")))
        for name, each in rewards
    ]
    if not rows:
        return None
    for title, name in (("Tokens of an answer", "lengths"), ("Share cut off at the limit", "cut_off")):
        if isinstance(pair := found.get(name), list) and len(pair) == 2:
            rows.append((title, *map(plain, pair), ""))
    asked = object_in(found, "asked")
    said = [f"{plain(found.get('prompts'))} prompts" + (f" of {asked['data']}" if asked.get("data") else "")]
    if finite(asked.get("step")) is not None:
        said.append(f"“after” is after step {plain(asked['step'])}")
    if (finite(found.get("samples")) or 1) > 1:
        said.append(f"{plain(found.get('samples'))} answers to each")
    said.append(f"temperature {plain(object_in(found, 'sampling').get('temperature'))}")
    caption = (
        f"{', '.join(said)}. Both come from the same sampler. Behind ± is the standard error; the difference is "
        "taken prompt by prompt."
    )
    cards = []
    kept = found.get("rows")
    for row in kept if isinstance(kept, list) else []:
        if isinstance(row, dict):
            titles = (("before", "Before training"), ("after", "After training"))
            cards.append(
                _card(
                    row,
                    [tag("div", tag("h4", t, _worth(row.get(f"{w}_rewards"))), _shown(row.get(w))) for w, t in titles],
                )
            )
    return section(
        "Evaluation: the base and what became of it",
        caption,
        table(["", "Before", "After", "Difference"], rows),
        *_some(cards, 3),
    )


def draw_rollouts(run: Run) -> Markup | None:
    """The answers to one prompt of the first step, of some between, and of the newest, with their rewards, and all of
    it as CSV."""
    between = run.rollouts.get("steps")
    between = [each for each in between if isinstance(each, dict)] if isinstance(between, list) else []
    first, last = (object_in(run.rollouts, when) for when in ("first", "last"))
    titled = [("First step", first), *(("Step", each) for each in between if each != last), ("Newest step", last)]
    groups = [(title, group, found) for title, group in titled if (found := _rollouts_of(group))]
    if not groups:
        return None
    shown = []
    for i, (title, group, answers) in enumerate(groups):
        written = [
            tag("div", tag("h4", _worth(each.get("rewards")), class_="alone"), _shown(each.get("completion")))
            for each in answers
        ]
        prompt = tag("p", _cut(group.get("prompt", ABSENT)), *images_of(group.get("prompt")))
        name = f"{title} ({plain(group.get('step'))})"
        said = "" if (mean := _mean_reward(answers)) is None else f": mean reward {plain(mean)}"
        article = tag("article", prompt, tag("div", *written, class_="pair"), class_="sample")
        is_open = "open" if i in (0, len(groups) - 1) else None
        shown.append(tag("details", tag("summary", f"{name}{said}"), tag("div", article), open=is_open))
    caption = (
        "What the sampler wrote to one prompt in training, and the reward of each answer: the model learns from "
        "their differences. "
    )
    link = download("rollouts.csv", _rows_of(groups))
    return section("Rollouts: what it learned from", None, tag("p", caption, link, class_="caption"), *shown)


def draw_disagreements(run: Run) -> Markup | None:
    """The tokens of the first and of the newest step at which student and teacher are furthest apart."""
    shown: list[Markup] = []
    for title, when in (("First step", "first"), ("Newest step", "last")):
        group = object_in(run.teaching, when)
        tokens = group.get("tokens")
        tokens = [each for each in tokens if isinstance(each, dict)] if isinstance(tokens, list) else []
        if not tokens or (when == "last" and shown and group == object_in(run.teaching, "first")):
            continue
        rows = [
            (
                tag("span", f"…{str(each.get('before', ''))[-_CONTEXT:]}", tag("b", str(each.get("token", "")))),
                plain(each.get("divergence")),
                *(_wishes(each.get(side)) for side in ("student", "teacher")),
            )
            for each in tokens
        ]
        heads = ["What was written, and the token in question", "Nats", "The student expects", "The teacher expects"]
        name = f"{title} ({plain(group.get('step'))})"
        shown.append(tag("details", tag("summary", name), table(heads, rows), open="open"))
    caption = (
        "The tokens of a step at which the two differ most; both see what stands before, the teacher its own prompt."
    )
    return section("Where student and teacher disagree most", caption, *shown) if shown else None


def _wishes(side: Any) -> str:
    """The likeliest tokens with their probabilities."""
    pairs = [each for each in side if isinstance(each, list) and len(each) == 2] if isinstance(side, list) else []
    return ", ".join(f"“{token}” {share(chance)}" for token, chance in pairs if finite(chance) is not None) or ABSENT


def _rollouts_of(group: dict[str, Any]) -> list[dict[str, Any]]:
    answers = group.get("rollouts")
    return [each for each in answers if isinstance(each, dict)] if isinstance(answers, list) else []


def _mean_reward(answers: Sequence[dict[str, Any]]) -> float | None:
    """Of the only reward function; of several, whose weights are not known here, none."""
    values = [list(object_in(each, "rewards").values()) for each in answers]
    known = [value for each in values if len(each) == 1 and (value := finite(each[0])) is not None]
    return fmean(known) if known and len(known) == len(answers) else None


def _rows_of(groups: Sequence[tuple[str, dict[str, Any], list[dict[str, Any]]]]) -> list[list[Any]]:
    """As a table: the step, the prompt, the completion, and a column for each reward function."""
    names = list(dict.fromkeys(str(n) for _, _, answers in groups for e in answers for n in object_in(e, "rewards")))
    rows: list[list[Any]] = [["step", "prompt", "completion", *names]]
    for _, group, answers in groups:
        for each in answers:
            rewards = object_in(each, "rewards")
            texts = [text_of(group.get("prompt", "")), text_of(each.get("completion", ""))]
            rows.append([group.get("step"), *texts, *(rewards.get(name) for name in names)])
    return rows


def _card(row: dict[str, Any], sides: Sequence[Markup]) -> Markup:
    answer = row.get("answer")
    return tag(
        "article", tag("p", _cut(row.get("prompt", ABSENT)), *images_of(row.get("prompt"))),
        tag("p", f"Correct answer: {_cut(answer)}", class_="answer") if answer is not None else None,
        tag("div", *sides, class_="pair"), class_="sample",
    )  # fmt: skip


def _some(cards: Sequence[Markup], shown: int = SHOWN) -> list[Markup | None]:
    rest = cards[shown:]
    more = tag("details", tag("summary", f"{len(rest)} more"), tag("div", *rest), class_="intro") if rest else None
    return [*cards[:shown], more]


def _shown(text: Any) -> Markup:
    return tag("pre", _cut(text), tabindex=0) if text not in (None, "") else tag("p", "(nothing)", class_="soft")


def _cut(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _worth(rewards: Any) -> Markup | None:
    """Rewards by name; one alone without it."""
    known = {str(name): plain(value) for name, value in rewards.items()} if isinstance(rewards, dict) else {}
    said = ", ".join(f"{name} {value}" for name, value in known.items()) if len(known) > 1 else "".join(known.values())
    return tag("span", f"reward {said}", class_="mark") if said else None


def _with_error(mean: dict[str, Any]) -> Markup:
    value, error = plain(mean.get("value")), finite(mean.get("error"))
    return tag("span", value, None if error is None else tag("span", f" ± {error:.2g}", class_="error"))


def judge_sample(sample: dict[str, Any], when: str) -> bool | None:
    """Whether `sample[when]` ("before" or "after") is right; `None` where it is unknown.

    A field `before_right` or `after_right` decides. Without it a text is right when its last number is the answer, or,
    for an answer that is no number, when the text ends with it.
    """
    said = sample.get(f"{when}_right")
    if isinstance(said, bool):
        return said
    text, answer = sample.get(when), sample.get("answer")
    if text is None or answer is None or not str(answer).strip():
        return None
    text, wanted = str(text), _number(str(answer).strip())
    if wanted is None:
        return _CLOSING.sub("", text).casefold().endswith(_CLOSING.sub("", str(answer).strip()).casefold())
    found = _NUMBER.findall(text)
    return bool(found) and _number(found[-1]) == wanted


def _number(text: str) -> float | None:
    if not _NUMBER.fullmatch(text):
        return None
    return finite(float(text.replace(",", "").replace("−", "-")))
