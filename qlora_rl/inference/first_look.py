"""`look_at_base`: what a base answers before a run, and what the run's rewards say of it.

Shape letters: P prompts, G completions of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.contracts import SamplingSpec
from qlora_rl.image_io import as_thumbnails
from qlora_rl.inference.evaluation import Mean, asking, mean_of
from qlora_rl.report.parts import text_of
from qlora_rl.rewards.match import weighted_sum
from qlora_rl.stages import ended

_SHOWN = 2  # prompts in the text, with their best and their worst completion
_CHARACTERS = 300  # of a prompt or a completion there


@dataclass(frozen=True)
class FirstLook:
    """What the base answers, and how it is scored.

    Attributes:
        rewards: by name of the reward function, over prompts; `None`: it has scored none of these.
        teaching: prompts whose G completions do not all have the same sum of rewards; GRPO and RLOO learn from these
            alone.
        length: mean tokens of a completion.
        cut_off: share of the completions that were cut off at the limit.
        prompts: P.
        samples: G.
        sampling: how the completions were sampled.
        rows: of each prompt its scored completions and their sums of rewards, the best first.
    """

    rewards: dict[str, Mean | None]
    teaching: int
    length: float
    cut_off: float
    prompts: int
    samples: int
    sampling: SamplingSpec
    rows: list[dict[str, Any]]

    def __str__(self) -> str:
        names = [*self.rewards, "tokens", "cut off"]
        means = [str(each or "not scored") for each in self.rewards.values()]
        values = [*means, f"{self.length:.1f}", f"{self.cut_off:.3f}"]
        width = max(map(len, names))
        lines = [f"{name.ljust(width)}  {value}" for name, value in zip(names, values, strict=True)]
        lines += [
            f"{self.prompts} prompts, {self.samples} completions each, temperature {self.sampling.temperature:g}; ± is "
            "one standard error",
            self.advice,
        ]
        for row in self.rows[:_SHOWN]:
            lines += ["", f"prompt: {_short(row['prompt'])}"]
            best, worst = row["completions"][0], row["completions"][-1]
            shown = [best] if best["reward"] == worst["reward"] else [best, worst]
            lines += [f"  reward {each['reward']:g}: {_short(each['text'])}" for each in shown]
        return "\n".join(lines)

    @property
    def advice(self) -> str:
        """Whether there is something to learn from, and what to do where there is not."""
        if self.teaching:
            return (
                f"{self.teaching} of {self.prompts} prompts have completions with different rewards; the first steps "
                "learn from such prompts."
            )
        found = {each["reward"] for row in self.rows for each in row["completions"]}
        if not found:
            return "No reward has scored any of these completions. Check the columns that they read."
        if len(found) > 1:
            return (
                "Each prompt's completions all have the same reward, so a step has nothing to learn from. Raise the "
                "temperature or the number of completions, or use prompts that the base answers sometimes."
            )
        cut = " Most are cut off: raise the longest completion." if self.cut_off > 0.5 else ""
        return (
            f"Every completion has the reward {found.pop():g}, so there is nothing to learn from. Compare the answers "
            "below with what the reward looks for, ask for that form in [data] system_prompt, or give part of the "
            f"reward for part of the answer.{cut}"
        )


@ended()
def look_at_base(
    base: PreparedBase,
    rows: Sequence[Mapping[str, Any]],
    rewards: Mapping[str, Callable[..., Any]],
    sampling: SamplingSpec,
    *,
    samples: int = 8,
    template: Mapping[str, Any] | None = None,
    weights: Sequence[float] | None = None,
    max_model_length: int | None = None,
) -> FirstLook:
    """Sample G completions of each prompt from the base, and score them.

    Args:
        base: prepared.
        rows: as the run has them: "prompt", images, and the columns that the rewards read.
        rewards: reward functions with TRL's signature, by name.
        sampling: as in the run.
        samples: G.
        template: further arguments of the chat template.
        weights: of the rewards in their sum; all 1 by default.
        max_model_length: of prompt and completion; by default what these need.

    Raises:
        RewardFunctionError: a reward function raised, or returned nonsense.
    """
    options = {"max_lora_rank": 0} | ({} if max_model_length is None else {"max_model_length": max_model_length})
    with asking(base, rows, sampling, template or {}, options) as (_, ask):
        side = ask("base", rewards, samples)
    factors = list(weights or [1.0] * len(rewards))
    shown = []
    for number, row in enumerate(rows):
        completions: list[dict[str, Any]] = [
            {"text": side.texts[i], "reward": weighted_sum([values[i] for values in side.rewards.values()], factors)}
            for i in range(number * samples, (number + 1) * samples)
        ]
        scored = [each for each in completions if each["reward"] is not None]
        scored.sort(key=lambda each: -each["reward"])
        shown.append({"prompt": as_thumbnails(row["prompt"]), "completions": scored})
    shown = [row for row in shown if row["completions"]]
    return FirstLook(
        rewards={name: mean_of(values, samples) for name, values in side.rewards.items()},
        teaching=sum(row["completions"][0]["reward"] != row["completions"][-1]["reward"] for row in shown),
        length=side.length,
        cut_off=side.cut_off,
        prompts=len(rows),
        samples=samples,
        sampling=sampling,
        rows=sorted(shown, key=lambda row: -row["completions"][0]["reward"]),
    )


def _short(text: Any) -> str:
    """Of messages the last one."""
    text = " ".join(text_of(text[-1:] if isinstance(text, list) else text).split())
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} ..."
