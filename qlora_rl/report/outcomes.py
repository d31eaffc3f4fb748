"""What the model wrote and what it was worth: an evaluation, the first and the last rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from .parts import Markup, images_of, object_in, objects_in, section, table, tag, text_of
from .quantities import ABSENT, finite, plain
from .run import Run

_LONGEST = 4000  # characters of a text


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
    titles = (("before", "Before training"), ("after", "After training"))
    cards = [
        _card(row, [tag("div", tag("h4", t, _worth(row.get(f"{w}_rewards"))), _shown(row.get(w))) for w, t in titles])
        for row in objects_in(found, "rows")
    ]
    return section(
        "Evaluation: the base and what became of it",
        caption,
        table(["", "Before", "After", "Difference"], rows),
        *_some(cards),
    )


def draw_rollouts(run: Run) -> Markup | None:
    """The answers to one prompt of the first step, of some between, and of the newest, with their rewards."""
    between = objects_in(run.rollouts, "steps")
    first, last = (object_in(run.rollouts, when) for when in ("first", "last"))
    titled = [("First step", first), *(("Step", each) for each in between if each != last), ("Newest step", last)]
    groups = [(title, group, found) for title, group in titled if (found := objects_in(group, "rollouts"))]
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
        "their differences."
    )
    return section("Rollouts: what it learned from", caption, *shown)


def _mean_reward(answers: Sequence[dict[str, Any]]) -> float | None:
    """Of the only reward function; of several, whose weights are not known here, none."""
    values = [list(object_in(each, "rewards").values()) for each in answers]
    known = [value for each in values if len(each) == 1 and (value := finite(each[0])) is not None]
    return fmean(known) if known and len(known) == len(answers) else None


def _card(row: dict[str, Any], sides: Sequence[Markup]) -> Markup:
    answer = row.get("answer")
    return tag(
        "article", tag("p", _cut(row.get("prompt", ABSENT)), *images_of(row.get("prompt"))),
        tag("p", f"Correct answer: {_cut(answer)}", class_="answer") if answer is not None else None,
        tag("div", *sides, class_="pair"), class_="sample",
    )  # fmt: skip


def _some(cards: Sequence[Markup], shown: int = 3) -> list[Markup | None]:
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
