"""What a plan turns on by itself where a run does not fit without it, and what each of these costs in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Way:
    """One way to need less memory on a GPU for some time.

    Attributes:
        field: of `MemoryRequest`, which `None` leaves to the plan.
        config: field of TRL's config that turns it on, and the value.
        words: what it does.
        cost: how much longer a step takes, as a part of it, with sequences so long that it is needed. Decides which way
            is tried first.
        source: of the cost.
    """

    field: str
    config: tuple[str, Any]
    words: str
    cost: float
    source: str

    @property
    def setting(self) -> str:
        """`config`, as it is written."""
        return f"{self.config[0]}={self.config[1]}"


# Neither has been measured on a GPU here. Tiles cost no time (docs/memory.md#mlps-and-norms), so they are no choice.
SLEEPS = Way(
    "sleeps",
    ("vllm_enable_sleep_mode", True),
    "the KV cache is freed between rollouts",
    0.01,
    "vLLM's blog of 2025-10-26: waking takes 0.1 to 0.8 s with the weights of a small model, which stay where they are "
    "here; about a hundredth of a step of a minute",
)
OFFLOAD = Way(
    "offload",
    ("gradient_checkpointing_kwargs", {"offload": True}),
    "layer inputs wait in host memory",
    0.02,
    "huggingface/accelerate#4175, whose copies are not hidden: 0.6 % of a step at a million tokens, a third of a step "
    "of one second",
)
WAYS = (SLEEPS, OFFLOAD)


def sets_of(ways: Sequence[Way]) -> Iterator[tuple[Way, ...]]:
    """All sets of some ways, the cheapest first: nothing, and at the end all of them."""
    sets = [each for size in range(len(ways) + 1) for each in combinations(ways, size)]
    yield from sorted(sets, key=lambda each: (sum(way.cost for way in each), len(each)))


def describe(chosen: Sequence[Way], *, fits: bool, without: str) -> str:
    """Which ways a plan has turned on and why, in one sentence.

    Args:
        chosen: by the plan.
        fits: with them.
        without: the peak of the run without them, and the limit.
    """
    if not chosen:
        return "fits without freeing the KV cache or moving layer inputs to host memory"
    said = ", and ".join(f"{way.words} ({way.setting}, about {way.cost:.0%} more time per step)" for way in chosen)
    return f"turned on to save memory{'' if fits else ', but not enough'}: {said}; without this: {without}"
