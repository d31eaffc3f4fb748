"""`FunctionCheck`: trainer and engine hold the same weights; do they compute the same function of them?

A config has fields that one side may not read: a window, a scaling of positions by length, a softcap, an activation.
No comparison of weights sees that, and many of them matter only in long sequences. So both sides score sequences that
reach beyond each length at which the config changes what is computed, once when an engine starts.

How far apart is too far depends on the model: 16-bit rounding of thirty layers is ten times that of two. So the
trainer scores each sequence a second time, in float32. Two ways of rounding one function are about equally far from
it (measured: 0.6 to 1.6 times as far); a side that is more than `FACTOR` times as far as the other computes something
else. In a mixture one expert that rounding has chosen otherwise reaches all later tokens of a text, so several short
texts are judged as one, and a longer one by a second.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.base.model_classes import image_tokens_of
from qlora_rl.base.unsupported_configs import engine_positions
from qlora_rl.contracts import ReplicatedEngine, RolloutEngine, SamplingSpec
from qlora_rl.distributed import ranks
from qlora_rl.errors import PolicyMismatchError
from qlora_rl.fidelity import scaled_differences
from qlora_rl.sharded_tensors import is_sharded, shape_of
from qlora_rl.sync.forward import (
    NotComparedError,
    as_engine,
    as_trained,
    bare_model,
    evaluating,
    in_float32,
    tail_logprobs,
    without_adapter,
)

logger = logging.getLogger(__name__)

FACTOR = 3.0
# Scaled differences (fidelity.scaled_differences) that are rounding whatever was measured, by the dtype in which the
# engine multiplies.
FLOORS = {"float32": 3e-5}
FLOOR_16_BIT = 1e-3
# Tokens that are compared at the end of each sequence, and of a sequence where nothing depends on its length.
TAIL, PLAIN = 64, 512
# Texts of the shortest length, which are judged as one.
TEXTS = 8
# An engine makes float32 logits of every token that it scores: 512 MiB, and as much for their softmax. Of longer
# sequences it samples the tail, up to a length that one text may cost.
_LOGITS = 1 << 27
_LONGEST = 8192 + TAIL
# Fields of a config with the length from which on something else is computed.
_LENGTHS = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")


@dataclass(frozen=True)
class Apart:
    """How far both sides are from the trainer's own float32 pass: mean scaled differences over tokens.

    Attributes:
        tokens: of a sequence.
        engine: as far as the engine is.
        trainer: as far as the trainer is, as it trains.
        least: what is rounding in any case: for any model, or with the trainer's forward in the engine's dtype.
        is_alike: the trainer rounds no more than the engine, whose distance says what is normal for the trainer's.
    """

    tokens: int
    engine: float
    trainer: float
    least: float
    is_alike: bool = True

    @classmethod
    def of(
        cls, tokens: int, engine: torch.Tensor, trainer: torch.Tensor, exact: torch.Tensor, like: torch.Tensor | None,
        name: str, own: torch.dtype | None = None,
    ) -> Apart:  # fmt: skip
        """From logprobs of the same tokens.

        Args:
            tokens: of a sequence.
            engine: the engine's.
            trainer: the trainer's, as it trains.
            exact: the trainer's in float32.
            like: the trainer's in the engine's dtype, where it trains in another one.
            name: of the engine's dtype.
            own: that of the trainer. Where it is the engine's, the trainer is never the one that rounds more: 4-bit
                linears of a float16 base multiply in bfloat16 in the engine alone.
        """
        least = FLOORS.get(name, FLOOR_16_BIT)
        if like is not None:
            least = max(least, distance(like, exact))
        is_alike = like is None or own == getattr(torch, name)
        return cls(tokens, distance(engine, exact), distance(trainer, exact), least, is_alike)

    @property
    def odd(self) -> str:
        """The side that computes something else, empty where there is none. NaN is no agreement."""
        if math.isnan(self.trainer):
            return "trainer"
        if not self.engine <= FACTOR * max(self.trainer, self.least):
            return "engine"
        # What the trainer has in the engine's dtype would excuse its own fault.
        is_right = not self.is_alike or self.trainer <= FACTOR * max(self.engine, min(self.least, FLOOR_16_BIT))
        return "" if is_right else "trainer"


@dataclass(frozen=True)
class Measured:
    """Texts of one length, and the trainer's logprobs of their last tokens: see `Apart.of`."""

    texts: list[list[int]]
    trainer: torch.Tensor
    exact: torch.Tensor
    like: torch.Tensor | None


class FunctionCheck:
    """Compares what a trainer and an engine compute with the bare base.

    Args:
        model: the trainer's; only read.
        engine: the other side; an engine that is started again is the same object.
        autocast: dtype in which the trainer's forward runs while training (`None`: as the weights are).
        on_mismatch: "stop" raises and names the other choice, "warn" logs; `None` raises where there is no choice.

    Attributes:
        found: of the newest comparison, by length.
        why_not: nothing was compared in it; empty otherwise.
    """

    def __init__(
        self, model: Any, engine: RolloutEngine, *, autocast: torch.dtype | None = None, on_mismatch: str | None = None
    ):
        self._model, self._engine, self._on_mismatch = model, engine, on_mismatch
        self._autocast = autocast
        self._measured: dict[tuple[int, tuple[int, ...]], Measured] = {}
        self.found: list[Apart] = []
        self.why_not = ""

    @property
    def rounding(self) -> float:
        """How far a side is from the trainer's float32 pass by rounding; 0 where nothing was measured."""
        return max((max(apart.engine, apart.trainer) for apart in self.found if not apart.odd), default=0.0)

    def compare(self) -> list[Apart]:
        """Score texts on both sides; the trainer scores them once only, as its base does not change.

        Returns:
            What was found, by length; nothing, with a warning, where the model has no float32 pass or the engine does
            not score.

        Raises:
            PolicyMismatchError: a side computes something else; says which, and from which length on.
        """
        self.found, self.why_not = [], ""
        try:
            self.found = self._compared()
        except NotComparedError as why:
            self.why_not = str(why)
            logger.warning("trainer and engine are not compared on what they compute: %s", why)
        if any(apart.odd for apart in self.found):
            said = self._explained()
            if self._on_mismatch != "warn":
                error = PolicyMismatchError(said, reasons=[str(apart) for apart in self.found if apart.odd])
                error.cause = "function"
                raise error
            logger.warning("%s (on_mismatch='warn': going on)", said)
        return self.found

    def _compared(self) -> list[Apart]:
        short, *longer = lengths_for(self._model, self._engine.capabilities().max_model_length, self._may_sample)
        found = self._agreed([self._judged(short, *range(TEXTS))])
        scored = [length for length in longer if length <= self._most]
        found += self._agreed([self._judged(length, 0) for length in scored])
        for length in longer[len(scored) :] if not any(apart.odd for apart in found) else ():
            found += self._agreed(self._continued(length, 0))
        for i, apart in enumerate(found):
            if i and apart.odd:
                is_scored = apart.tokens <= self._most
                again = self._agreed([self._judged(apart.tokens, 1)] if is_scored else self._continued(apart.tokens, 1))
                found[i] = again[0] if again and again[0].odd != apart.odd else apart
        return found

    @property
    def _most(self) -> int:
        return _most(_rows(bare_model(self._model)))

    @property
    def _may_sample(self) -> bool:
        """What the engine samples is of the bare base, before the first push, and has logprobs."""
        engine = self._engine
        return hasattr(engine, "generate") and engine.version == 0 and engine.capabilities().gives_logprobs

    @staticmethod
    def _agreed(found: list[Apart]) -> list[Apart]:
        """Of all ranks what the first has found that found anything: they go on alike."""
        everywhere = ranks().gather(found, "comparing what trainer and engine compute")
        return next((each for each in everywhere if any(apart.odd for apart in each)), found)

    def _judged(self, length: int, *numbers: int) -> Apart:
        """Texts of one length as one; of all replicas the worst."""
        if (length, numbers) not in self._measured:
            texts = [make_text(bare_model(self._model), self._tokenizer, length, number) for number in numbers]
            self._measured[length, numbers] = self._measure(texts, min(TAIL, length - 1))
        ours = self._measured[length, numbers]
        with ranks().together("comparing what trainer and engine compute"):
            each = self._scored(ours.texts)
        count = len(ours.exact) // len(numbers)
        every = [self._apart(length, [row[-count:] for row in rows], ours) for rows in each]
        return max(every, key=lambda apart: (bool(apart.odd), apart.engine))

    def _continued(self, length: int, number: int) -> list[Apart]:
        """A text of which the engine, of replicas one, samples the last `TAIL` tokens: of a longer prompt it does not
        make all logits. Nothing where that cannot be compared."""
        text = make_text(bare_model(self._model), self._tokenizer, length - TAIL, number)
        spec = SamplingSpec(TAIL, seed=number, extra={"ignore_eos": True})
        try:
            with ranks().together("comparing what trainer and engine compute"):
                rollout = self._engine.generate([text], spec)
            (sampled,), logprobs = rollout.completion_ids, rollout.logprobs
            return [self._apart(length, logprobs, self._measure([text + sampled], len(sampled)))]
        except (NotComparedError, NotImplementedError, torch.OutOfMemoryError) as why:
            logger.warning("trainer and engine are not compared on %d tokens: %s", length, why)
            return []

    def _apart(self, length: int, logprobs: Sequence[Sequence[float | None]], ours: Measured) -> Apart:
        engine = torch.tensor([math.nan if each is None else each for row in logprobs for each in row])
        name = self._engine.capabilities().adapter_dtype
        own = self._autocast or bare_model(self._model).dtype
        return Apart.of(length, engine, ours.trainer, ours.exact, ours.like, name, own)

    def _scored(self, texts: list[list[int]]) -> list[list[list[float]]]:
        try:
            if isinstance(self._engine, ReplicatedEngine):
                return self._engine.score_each(texts, bare=True)
            return [self._engine.score(texts, bare=True)]
        except NotImplementedError as error:
            raise NotComparedError(f"{self._engine.capabilities().name} does not score ({error!r})") from error

    def _measure(self, texts: list[list[int]], count: int) -> Measured:
        model, length = self._model, len(texts[0])
        if is_sharded(model):
            raise NotComparedError("the weights of the model are sharded over processes")
        with without_adapter(model), evaluating(model):
            with as_trained(model, self._autocast):
                trainer = tail_logprobs(model, texts, count)
            with in_float32(model, length):
                exact = tail_logprobs(model, texts, count)
            like, rounds_alike = None, as_engine(model, self._autocast, self._engine.capabilities().adapter_dtype)
            if rounds_alike is not None:
                with rounds_alike:
                    like = tail_logprobs(model, texts, count)
        return Measured(texts, trainer, exact, like)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        """The base's; `None` where it has none that loads without its own code."""
        from transformers import AutoTokenizer

        prepared = getattr(bare_model(self._model), "qlora_base", None)
        try:
            return AutoTokenizer.from_pretrained(prepared.path) if prepared is not None else None
        except (OSError, ValueError):
            return None

    def _explained(self) -> str:
        config = bare_model(self._model).config
        first = next(apart for apart in self.found if apart.odd)
        fine = max((apart.tokens for apart in self.found if not apart.odd), default=0)
        far, near = (first.engine, first.trainer) if first.odd == "engine" else (first.trainer, first.engine)
        where = f"in sequences of {first.tokens} tokens"
        if 0 < fine < first.tokens:
            limits = [f"{name}={value}" for name, value in lengths_of(config) if fine <= value + TAIL <= first.tokens]
            where += f", not in those of {fine}" + (f" ({', '.join(limits)})" if limits else "")
        if math.isnan(first.trainer):
            advice = "They overflow: train in bfloat16, or on another base"
        elif first.odd == "trainer":
            advice = "Load the model with attn_implementation='eager', or find what replaces its layers"
        else:
            advice = (
                "Use a model that it computes as transformers does, or an engine with a shorter vllm_max_model_length "
                "if only long sequences differ"
            )
        side = self._engine.capabilities().name if first.odd == "engine" else "The trainer"
        other = "trainer" if first.odd == "engine" else "engine"
        way_on = "; or pass on_mismatch='warn' to go on" if self._on_mismatch else ""
        return (
            f"comparing what trainer and engine compute: the weights are equal, and the {first.odd}'s logprobs are "
            f"{far:.2g} (scaled) from the trainer's own float32 forward pass {where}, the {other}'s {near:.2g}, which "
            f"is rounding. {side} computes model_type={config.model_type!r} in another way than its config says "
            f"(positions, a window, a softcap, an activation). {advice}{way_on}."
        )


def distance(some_T: torch.Tensor, exact_T: torch.Tensor) -> float:
    """Mean scaled difference of logprobs."""
    return float(scaled_differences((some_T - exact_T).double(), exact_T.double()).mean())


def lengths_of(config: Any) -> Iterator[tuple[str, int]]:
    """Fields of a config of transformers, and of its ropes, at whose length something else is computed."""
    text = config.get_text_config()

    def walk(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                kind = value.get("rope_type", value.get("type"))
                if kind == "dynamic" and text.max_position_embeddings:
                    yield "max_position_embeddings", text.max_position_embeddings
                if kind != "llama3":  # which scales alike at all lengths
                    yield from walk(value)
            elif name in _LENGTHS and isinstance(value, int) and value > 0:
                yield name, value

    yield from dict.fromkeys(walk(text.to_dict()))


def reach_of(config: Any) -> int:
    """Length of an engine, in tokens, that is started only to be compared on all lengths that matter."""
    longest = 1 + max((PLAIN, *(value + TAIL for _, value in lengths_of(config))))
    longest = min(longest, 1 + _most(config.get_text_config().vocab_size))
    return min(longest, engine_positions(config) or longest)


def _most(rows: int) -> int:
    return max(PLAIN, _LOGITS // rows)


def lengths_for(model: Any, max_model_length: int, may_sample: bool = True) -> list[int]:
    """Tokens of the texts that are compared: few, `PLAIN`, and more than each of `lengths_of` that an engine takes.

    Args:
        model: the trainer's.
        max_model_length: of the engine, in tokens.
        may_sample: texts that are too long to be scored are compared by what is sampled behind them.

    Raises:
        NotComparedError: no token would follow another.
    """
    base = bare_model(model)
    scored = min(max_model_length - 1, _most(_rows(base)))
    if scored < 2:
        raise NotComparedError(f"the engine takes {max_model_length} tokens")
    wanted = {value + TAIL for _, value in lengths_of(base.config)}
    most = max(scored, min(_LONGEST, max_model_length - 1)) if may_sample else scored
    reached = {length for length in wanted if length <= most}
    if reached != wanted:
        reached.add(scored)  # as far as it goes
        logger.info("trainer and engine are not compared on sequences of %s tokens", sorted(wanted - reached))
    return sorted({min(TAIL + 1, scored), min(PLAIN, scored), *reached})


def _rows(base: Any) -> int:
    return int(shape_of(base.get_input_embeddings().weight)[0])


def make_text(base: Any, tokenizer: Any, count: int, number: int = 0) -> list[int]:
    """Ids of sentences in English, other ones for each number; random ids where no tokenizer knows them.

    Args:
        base: the transformers model.
        tokenizer: its own, or `None`.
        count: of tokens.
        number: of the text.
    """
    rows, ids, first = _rows(base), list[int](), 10_000 * number
    while tokenizer is not None and len(ids) < count:
        part = "".join(_sentence(first + i) for i in range(8 + count // 8))
        found = [i for i in tokenizer(part, verbose=False)["input_ids"] if i < rows]
        ids, first = ids + found, first + 8 + count // 8
        if len(found) < TAIL:
            break
    if len(ids) < count or len(set(ids[:count])) < min(count, 4 * TAIL) // 8:
        never = set(image_tokens_of(base.config))
        known = torch.tensor([i for i in range(rows) if i not in never])
        picked = torch.randint(len(known), (count,), generator=torch.Generator().manual_seed(number))
        ids = known[picked].tolist()
    return ids[:count]


def _sentence(number: int) -> str:
    people, things = (
        ("Ann", "Omar", "Li", "Eva", "Sam"),
        ("red apples", "old maps", "bus tickets", "letters", "blue stones", "chess books", "lamps"),
    )
    a, b = 17 + 29 * number % 389, 3 + 11 * number % 14
    return (
        f"{people[number % 5]} had {a} {things[number % 7]} and gave {b} of them to {people[(number + 2) % 5]}, "
        f"so {a - b} were left. "
        f"On day {number + 1} nobody asked why the {things[(number + 3) % 7]} cost {a * b} cents.\n"
    )
