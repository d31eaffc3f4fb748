"""Two-digit addition as plain text: the problems, their splits and the reward.

`37+85=` is a prompt and `122` its answer. The text that the tiny model is pretrained on was written by two pupils. The
careful one adds as one should. The careless one forgets every carry: 7+5 is 12, write the 2; 3+8 is 11, write the 1:
`37+85=12`. The careless one writes more, so a model that imitates the text mostly forgets to carry, and answers right
where nothing carries (about a quarter of all sums). Reinforcement learning with an exact-match reward then makes it
carry.

All pairs of numbers from 10 to 99 are split once, by the unordered pair: if `37+85=` is held out, so is `85+37=`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

from qlora_rl.rewards.match import exact_match

LOWEST, HIGHEST = 10, 99
SPLITS = ("pretraining", "rl", "held_out")
N_RL_PAIRS = 600
N_HELD_OUT_PAIRS = 200
LONGEST_ANSWER = 3
"""Characters of the longest answer, `198`; with the end-of-text token a completion needs one token more."""

_SPLIT_SEED = 2026


@dataclass(frozen=True, order=True)
class Problem:
    """One sum, in the order in which it is written."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The text that the model continues: `37+85=`, always six characters."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """What the careful pupil writes: the sum, two or three digits."""
        return str(self.left + self.right)

    @property
    def careless_answer(self) -> str:
        """What the careless pupil writes: each column's last digit, no carry; always two digits."""
        tens = (self.left // 10 + self.right // 10) % 10
        ones = (self.left + self.right) % 10
        return f"{tens}{ones}"

    @property
    def has_carry(self) -> bool:
        """Whether a column reaches ten, that is, whether the two pupils disagree."""
        return self.answer != self.careless_answer


@cache
def _pairs(split: str) -> tuple[tuple[int, int], ...]:
    pairs = list(combinations_with_replacement(range(LOWEST, HIGHEST + 1), 2))
    random.Random(_SPLIT_SEED).shuffle(pairs)
    n_not_pretraining = N_HELD_OUT_PAIRS + N_RL_PAIRS
    parts = {
        "held_out": pairs[:N_HELD_OUT_PAIRS],
        "rl": pairs[N_HELD_OUT_PAIRS:n_not_pretraining],
        "pretraining": pairs[n_not_pretraining:],
    }
    if split not in parts:
        raise ValueError(
            f"choosing problems: split={split!r} is none of {SPLITS} at qlora_rl.demo.task. Pass one of these names."
        )
    return tuple(parts[split])


def problems(split: str) -> list[Problem]:
    """All problems of a split, sorted; a pair of two different numbers is there in both orders.

    Splits: `pretraining` (what the pupils worked on), `rl` (the prompts of GRPO), `held_out` (never trained on).

    Raises:
        ValueError: there is no such split.
    """
    return sorted({Problem(*order) for a, b in _pairs(split) for order in ((a, b), (b, a))})


def grpo_rows(seed: int, count: int) -> list[dict[str, str]]:
    """`count` rows for a trainer, each with `prompt` and `answer`: the RL split, reshuffled for every pass."""
    pool = problems("rl")
    rng = random.Random(seed)
    chosen: list[Problem] = []
    while len(chosen) < count:
        chosen += rng.sample(pool, min(len(pool), count - len(chosen)))
    return [{"prompt": problem.prompt, "answer": problem.answer} for problem in chosen]


def reward_exact_match(
    completions: list[str] | list[list[dict[str, str]]], answer: list[str], **kwargs: object
) -> list[float]:
    """1.0 where the completion is the answer, else 0.0; whitespace around a completion does not count.

    The signature is that of a TRL reward function: one completion (text, or messages of which the last one counts) and
    one entry of the `answer` column each; `kwargs` takes the other columns and is not read.
    """
    return exact_match(completions, answer=answer)
