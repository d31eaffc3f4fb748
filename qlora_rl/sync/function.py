"""`FunctionCheck`: trainer and engine hold the same weights; do they compute the same function of them?

A config has fields that one side may not read: a window, a scaling of positions by length, a softcap, an activation. No comparison of weights
sees that, and many of them matter only in long sequences. So both sides score sequences that reach beyond each length at which the config
changes what is computed, once when an engine starts.

How far apart is too far depends on the model: 16-bit rounding of thirty layers is ten times that of two. So the trainer scores each sequence
a second time, in float32. Two ways of rounding one function are about equally far from it (measured: 0.7 to 1.4 times as far); a side that is
more than `FACTOR` times as far as the other computes something else. In a mixture one expert that rounding has chosen otherwise reaches all
later tokens of a text, so several short texts are judged as one, and a longer one by a second.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.base.functions import engine_positions
from qlora_rl.base.kinds import image_tokens_of
from qlora_rl.contracts import ReplicatedEngine, RolloutEngine
from qlora_rl.distributed import ranks
from qlora_rl.errors import PolicyMismatchError, QloraRLError
from qlora_rl.fidelity import scaled_differences
from qlora_rl.pieces import is_sharded, shape_of
from qlora_rl.sync.forward import (
    NoFloat32Error,
    as_trained,
    bare_model,
    evaluating,
    in_dtype,
    in_float32,
    tail_logprobs,
    without_adapter,
)

logger = logging.getLogger(__name__)

FACTOR = 3.0
# Scaled differences (fidelity.scaled_differences) that are rounding whatever was measured, by the dtype in which the engine multiplies.
FLOORS = {"float32": 3e-5}
FLOOR_16_BIT = 1e-3
# Tokens that are compared at the end of each sequence, and of a sequence where nothing depends on its length.
TAIL, PLAIN = 64, 512
# Texts of the shortest length, which are judged as one.
TEXTS = 8
# An engine makes float32 logits of every token that it scores: 512 MiB, and as much for their softmax.
_LOGITS = 1 << 27
# Fields of a config with the length from which on something else is computed.
_LENGTHS = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")


@dataclass(frozen=True)
class Apart:
    """How far both sides are from the trainer's own float32 pass: mean scaled differences over the last tokens of sequences of one length.

    Attributes:
        tokens: of a sequence.
        engine: as far as the engine is.
        trainer: as far as the trainer is, as it trains.
        least: what is rounding in any case: what any model has, or what the trainer's forward in the engine's dtype has.
        is_alike: both sides round to the same dtype, so that the engine's distance says what is normal for the trainer's, too.
    """

    tokens: int
    engine: float
    trainer: float
    least: float
    is_alike: bool = True

    @property
    def odd(self) -> str:
        """The side that computes something else, empty where there is none. NaN is no agreement."""
        if math.isnan(self.trainer):
            return "trainer"
        if not self.engine <= FACTOR * max(self.trainer, self.least):
            return "engine"
        is_right = not self.is_alike or self.trainer <= FACTOR * max(self.engine, self.least)
        return "" if is_right else "trainer"


class FunctionCheck:
    """Compares what a trainer and an engine compute with the bare base.

    Args:
        model: the trainer's, whole; only read.
        engine: the other side; an engine that is started again is the same object.
        autocast: dtype in which the trainer's forward runs while training (`None`: as the weights are).
        on_mismatch: "stop" raises, "warn" logs.

    Attributes:
        found: of the newest comparison, by sequence.
    """

    def __init__(
        self, model: Any, engine: RolloutEngine, *, autocast: torch.dtype | None = None, on_mismatch: str = "stop"
    ):
        self._model, self._engine, self._on_mismatch = model, engine, on_mismatch
        self._autocast = autocast
        self._dtype = getattr(torch, engine.capabilities().adapter_dtype)
        self._is_alike = (autocast or bare_model(model).dtype) == self._dtype
        # By (tokens, number of the text): of its last tokens the trainer's logprobs in float32, and what is rounding.
        self._exact: dict[tuple[int, int], tuple[torch.Tensor, float, float]] = {}
        self.found: list[Apart] = []

    def compare(self) -> list[Apart]:
        """Score texts on both sides; the trainer's are scored once only, as its base does not change.

        Raises:
            PolicyMismatchError: a side computes something else; says which, and from which length on.
        """
        if is_sharded(self._model):
            return []  # its weights are not here; a base is compared before it is sharded
        lengths = lengths_for(self._model, self._engine.capabilities().max_model_length)
        if not lengths:
            return []
        try:
            self.found = self._found(lengths)
        except (NoFloat32Error, NotImplementedError) as why:  # also of an engine that does not score
            logger.warning("trainer and engine are not compared on what they compute: %s", why)
            return []
        if any(apart.odd for apart in self.found):
            said = self._explained()
            if self._on_mismatch != "warn":
                error = PolicyMismatchError(said, reasons=[str(apart) for apart in self.found if apart.odd])
                error.cause = "function"
                raise error
            logger.warning("%s (on_mismatch='warn': going on)", said)
        return self.found

    def _found(self, lengths: Sequence[int]) -> list[Apart]:
        short, *longer = lengths
        found = self._agreed([self._judged([(short, text) for text in range(TEXTS)])])
        found += self._agreed([self._judged([(length, 0)]) for length in longer])
        for i, apart in enumerate(found):
            if i and apart.odd:
                (again,) = self._agreed([self._judged([(apart.tokens, 1)])])
                found[i] = again if again.odd != apart.odd else apart
        return found

    @staticmethod
    def _agreed(found: list[Apart]) -> list[Apart]:
        """Of all ranks what the first has found that found anything: they go on alike."""
        everywhere = ranks().gather(found, "comparing what trainer and engine compute")
        return next((each for each in everywhere if any(apart.odd for apart in each)), found)

    def _judged(self, texts: Sequence[tuple[int, int]]) -> Apart:
        """Texts of one length as one; of all replicas the worst."""
        ids = {text: make_text(self._model, *text) for text in texts}
        self._exact |= {text: self._measured(ids[text]) for text in texts if text not in self._exact}
        asked = list(ids.values())
        with ranks().together("comparing what trainer and engine compute"):
            if isinstance(self._engine, ReplicatedEngine):
                scored = self._engine.score_each(asked, bare=True)
            else:
                scored = [self._engine.score(asked, bare=True)]
        exact = [self._exact[text] for text in texts]
        trainer, least = (statistics.fmean(each[i] for each in exact) for i in (1, 2))
        engines = [
            statistics.fmean(
                distance(torch.tensor(row[-len(exact_T) :]), exact_T)
                for row, (exact_T, *_) in zip(rows, exact, strict=True)
            )
            for rows in scored
        ]
        every = [Apart(texts[0][0], engine, trainer, least, self._is_alike) for engine in engines]
        return max(every, key=lambda apart: (bool(apart.odd), apart.engine))

    def _measured(self, ids: Sequence[int]) -> tuple[torch.Tensor, float, float]:
        count = min(TAIL, len(ids) - 1)
        with without_adapter(self._model), evaluating(self._model):
            with as_trained(self._model, self._autocast):
                ours_T = tail_logprobs(self._model, ids, count)
            with in_float32(self._model, len(ids)):
                exact_T = tail_logprobs(self._model, ids, count)
            least = FLOORS.get(str(self._dtype).removeprefix("torch."), FLOOR_16_BIT)
            if not self._is_alike:  # what the engine's dtype costs is not what the trainer's does
                with in_dtype(self._model, self._dtype):
                    least = max(least, distance(tail_logprobs(self._model, ids, count), exact_T))
        return exact_T, distance(ours_T, exact_T), least

    def _explained(self) -> str:
        config = bare_model(self._model).config
        odd = [apart for apart in self.found if apart.odd]
        first, fine = odd[0], max((apart.tokens for apart in self.found if not apart.odd), default=0)
        side, other = ("engine", "trainer") if first.odd == "engine" else ("trainer", "engine")
        far, near = getattr(first, side), getattr(first, other)
        limits = [f"{name}={value}" for name, value in lengths_of(config) if fine <= value + TAIL <= first.tokens]
        where = f"in sequences of {first.tokens} tokens" + (
            f", not in those of {fine}" if 0 < fine < first.tokens else ""
        )
        where += f" ({', '.join(limits)})" if limits and fine < first.tokens else ""
        return (
            f"comparing what trainer and engine compute: the weights are equal, and the {side}'s logprobs are {far:.2g} (scaled) from the "
            f"trainer's own float32 forward pass {where}, the {other}'s {near:.2g}, which is rounding. "
            f"{self._engine.capabilities().name if side == 'engine' else 'The trainer'} computes model_type={config.model_type!r} in another "
            "way than its config says (positions, a window, a softcap, an activation). "
            + (
                "Use a model that it computes as transformers does, or an engine with a shorter vllm_max_model_length if only long sequences differ"
                if side == "engine"
                else "Load the model with attn_implementation='eager', or find what replaces its layers"
            )
            + "; or pass on_mismatch='warn' to go on."
        )


def distance(some_T: torch.Tensor, exact_T: torch.Tensor) -> float:
    """Mean scaled difference of logprobs."""
    return float(scaled_differences((some_T - exact_T).double(), exact_T.double()).mean())


def lengths_of(config: Any) -> Iterator[tuple[str, int]]:
    """Fields of a transformers config, also within those of its layers' ropes, at whose length something else is computed."""
    text = config.get_text_config()

    def walk(values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                if value.get("rope_type", value.get("type")) == "dynamic" and text.max_position_embeddings:
                    yield "max_position_embeddings", text.max_position_embeddings
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


def lengths_for(model: Any, max_model_length: int) -> list[int]:
    """Tokens of the texts that are compared: short ones, `PLAIN`, and beyond each length of `lengths_of` that the engine reaches.

    Args:
        model: the trainer's.
        max_model_length: of the engine, in tokens.
    """
    base = bare_model(model)
    most = min(max_model_length - 1, _most(_rows(base)))
    if most < 2:
        return []
    wanted = {value + TAIL for _, value in lengths_of(base.config)}
    reached = {length for length in wanted if length < most}
    if any(length >= most for length in wanted):
        reached.add(most)  # as far as it goes
    beyond = [length for length in wanted if most < length < max_model_length]
    if beyond:
        logger.info("trainer and engine are compared on sequences of up to %d tokens, not of %s", most, sorted(beyond))
    return sorted({min(TAIL + 1, most), min(PLAIN, most), *reached})


def _rows(base: Any) -> int:
    return int(shape_of(base.get_input_embeddings().weight)[0])


def make_text(model: Any, count: int, number: int = 0) -> list[int]:
    """Ids of sentences in English, other ones for each number; random ids where the base has no tokenizer that knows them.

    Args:
        model: the trainer's.
        count: of tokens.
        number: of the text.
    """
    from transformers import AutoTokenizer

    base = bare_model(model)
    rows, ids = _rows(base), list[int]()
    prepared = getattr(base, "qlora_base", None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(prepared.path) if prepared is not None else None
    except (OSError, ValueError, QloraRLError):
        tokenizer = None
    first = 10_000 * number
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
        f"{people[number % 5]} had {a} {things[number % 7]} and gave {b} of them to {people[(number + 2) % 5]}, so {a - b} were left. "
        f"On day {number + 1} nobody asked why the {things[(number + 3) % 7]} cost {a * b} cents.\n"
    )
