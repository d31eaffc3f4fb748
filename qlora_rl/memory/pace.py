"""`pace_of`: how long a step of a planned run takes on a card, about: what is read from memory, and what is
multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from qlora_rl.memory.lines import trainer_base
from qlora_rl.memory.plan import WAYS, MemoryEstimate
from qlora_rl.methods import METHODS

# A common card of each size: GB/s of its memory, 1e12 operations a second in bf16 without sparsity, as its maker states
# them.
SPEEDS: dict[float, tuple[str, float, float]] = {
    8: ("an RTX 3070", 448, 40),
    10: ("an RTX 3080", 760, 59),
    12: ("an RTX 3060", 360, 25),
    16: ("a T4", 320, 65),
    24: ("an RTX 3090", 936, 71),
    32: ("an RTX 5090", 1792, 210),
    40: ("an A100", 1555, 312),
    48: ("an RTX A6000", 768, 155),
    80: ("an A100", 2039, 312),
    94: ("an H100 NVL", 3900, 835),
    141: ("an H200", 4800, 989),
    180: ("a B200", 8000, 2250),
}
# Assumptions: of these speeds a program reaches such a part; vLLM needs as long for one token of each sequence, however
# small the model.
REACHED_GB, REACHED_FLOPS, ENGINE_STEP_S = 0.7, 0.4, 0.006
# Bytes of a weight in 4 bits that is dequantised to be multiplied: read, written, read again; and where one token is
# multiplied with the codes.
DEQUANTISED, CODES = 4.5, 0.55


@dataclass(frozen=True)
class Pace:
    """About how long an optimizer step takes.

    Attributes:
        card: for which.
        rollout_s: to sample the completions; 0 without an engine.
        train_s: forward and backward passes.
        tokens_per_s: sampled; 0 without an engine.
        at_once: sequences that are sampled at once.
        sequences: of a step.
    """

    card: str
    rollout_s: float
    train_s: float
    tokens_per_s: float
    at_once: int
    sequences: int

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.rollout_s + self.train_s

    def whole(self, steps: int) -> str:
        """How long a run of so many steps may take, in words."""
        return f"time estimate for {self.card}: {steps} steps, about {_seconds(steps * self.step_s)}"

    def __str__(self) -> str:
        step = f"{_seconds(self.step_s)} per step of {self.sequences} full-length sequences"
        said = f"time estimate for {self.card}: about {step}"
        if not self.rollout_s:
            return said
        return (
            f"{said}: {_seconds(self.rollout_s)} to sample them ({_rounded(self.tokens_per_s)} tokens/s, "
            f"{self.at_once} at a time), "
            f"{_seconds(self.train_s)} to train on them"
        )


def pace_of(estimate: MemoryEstimate, sequences: int | None = None) -> Pace | None:
    """An estimate for sequences of full length, half of it sampled; `None` on a CPU, and without a limit that says
    which card.

    Args:
        `estimate`: of the run.
        sequences: of an optimizer step; by default those that are sampled at once, or of a micro-batch without an
            engine.
    """
    request, shape = estimate.request, estimate.shape
    if request.device != "cuda" or request.gpu_memory_gib is None:
        return None
    size = min((each for each in SPEEDS if each >= request.gpu_memory_gib), default=max(SPEEDS))
    card, gigabytes, operations = SPEEDS[size]
    bytes_per_s, flops = gigabytes * 1e9 * REACHED_GB, operations * 1e12 * REACHED_FLOPS
    held = sum(prod(each) for each in shape.experts.values())
    active = shape.parameters - held * (1 - shape.chosen / shape.pool if held and shape.pool else 0)
    dequantised = shape.parameters * (DEQUANTISED if request.spec.is_4bit else 2)
    count = sequences or (request.sequences if request.has_engine else request.rows)
    tokens = count * request.max_length
    # Forward, forward again under checkpointing, and the gradient of the input; that of the weight is not needed.
    passes: float = 3 if request.gradient_checkpointing else 2
    if (
        METHODS[request.method].is_taught and not request.teacher_top_k
    ):  # and the teacher's, by its size and what it reads
        larger = max(1.0, request.teacher_bytes / trainer_base(shape, request.spec))
        passes += larger * (1 + request.teacher_more / request.max_length)
    train_s = 2 * active * passes * tokens / flops + ceil(count / request.rows) * passes * dequantised / bytes_per_s
    rollout_s, speed, at_once = 0.0, 0.0, 0
    if request.has_engine:
        sampled = max(1, request.max_length // 2)
        at_once = max(1, min(count, estimate.cache_sequences))
        per_token = estimate.cache_bytes / max(1, estimate.cache_tokens)
        weights = dequantised if at_once > 1 or not request.spec.is_4bit else shape.parameters * CODES
        read = weights + at_once * 0.75 * request.max_length * per_token
        one_s = ENGINE_STEP_S + read / bytes_per_s + 2 * active * at_once / flops
        prompts_s = (
            2 * active * count * (request.max_length - sampled) / flops / 8
        )  # of a group the prompt is read once
        rollout_s = count / at_once * sampled * one_s + prompts_s
        speed = count * sampled / rollout_s
    longer = 1 + sum(way.cost for way in WAYS if getattr(request, way.field))
    return Pace(card, rollout_s, train_s * longer, speed, at_once, count)


def _seconds(seconds: float) -> str:
    if seconds >= 7200:
        return f"{_rounded(seconds / 3600)} h"
    return f"{_rounded(seconds / 60)} min" if seconds >= 600 else f"{_rounded(seconds)} s"


def _rounded(number: float) -> str:
    return f"{float(f'{number:.2g}'):g}"
