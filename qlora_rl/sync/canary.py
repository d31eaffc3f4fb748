"""`Canary`: the check after a push. Two questions, the first asked every time, the second at every n-th push:

1. *Does the engine hold it?* The engine digests what its layers multiply with; it must be the bundle, byte for
   byte. This sees a wrong scaling, a lost layer, an older version, names that match nothing.
2. *Does the engine apply it?* Fixed token sequences are scored by both sides. Their logprobs must agree as well as
   those of the bare base did when the run began (times a factor), and never worse than an upper bound. Where they do
   not, sequences that the policy itself samples now are scored as well, and decide: 16-bit rounding is large at tokens
   that a policy never writes. Of a vision-language model one of the sequences follows an image.

A policy that changes less than the threshold would pass also where it is not applied at all: then a `Probe` is pushed
before it.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qlora_rl.adapter.live import LiveAdapter
from qlora_rl.base.fingerprint import digest_bytes
from qlora_rl.base.model_classes import drops, image_tokens_of
from qlora_rl.contracts import AdapterBundle, Leaf, ReplicatedEngine, RolloutEngine, module_of
from qlora_rl.distributed import ranks
from qlora_rl.errors import CanaryError, ConfigConflictError
from qlora_rl.sharded_tensors import is_sharded
from qlora_rl.sync.forward import (
    NotComparedError,
    as_engine,
    as_trained,
    bare_model,
    in_float32,
    plain_forward,
    without_adapter,
)
from qlora_rl.sync.function_check import FunctionCheck
from qlora_rl.sync.synthetic_adapter import Probe, added_to

logger = logging.getLogger(__name__)

# Mean scaled difference of logprobs (see `_difference`) above which no calibration may let a pair of engines pass. bf16
# pairs measure 0.001 to 0.01.
UPPER_BOUND = 0.1
# Times the rounding of the bare base: a policy moves away from it, and its rounding with it.
FACTOR = 8.0
# The adapter brings rounding of its own, also to a pair whose base agrees to the last bit.
FLOORS = {"float32": 1e-4}
FLOOR_16_BIT = 0.03
# A probe changes logprobs by so many thresholds, and at least by this: an engine that leaves it out is off by all of
# that. A policy that changes them as much needs no probe.
CLEAR = 4.0
LEAST_EFFECT = 0.1
# Standard deviations of a probe's B: tried first, and at most (a server takes no entry above 100).
FIRST_SIZE, LARGEST_SIZE = 2.0**-6, 8.0
# Under a probe: times the trainer's rounding on the same tokens. Two ways to round one model in bf16 were 0.5 to 1.8
# times as far from each other on 14 tokens.
PROBE_FACTOR = 2.0
# Other sequences, which decide where a probe is further than that and below the threshold.
SECOND_LOOK = 32
# Of the pushes that are scored each so-many-th is probed, as long as the policy needs it.
PROBE_EVERY = 2


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt with an image, as each side takes it.

    Attributes:
        prompt: of the engine (`ImagePrompt`: `ids` with the image's tokens, T of them).
        inputs: of the trainer's forward pass besides the ids: pixels and their shape; what is [1, T] is one value for
            each token.
    """

    prompt: Any
    inputs: Mapping[str, torch.Tensor]

    def begins(self, ids: Sequence[int]) -> bool:
        """The sequence follows this prompt."""
        return list(ids[: len(self.prompt.ids)]) == list(self.prompt.ids)

    def inputs_for(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """`inputs` of this prompt and text behind it."""
        known = (1, len(self.prompt.ids))
        rest = len(ids) - known[1]
        return {
            name: torch.nn.functional.pad(value, (0, rest)) if tuple(value.shape) == known else value
            for name, value in self.inputs.items()
        }


class Canary:
    """Compares trainer and engine on fixed sequences.

    Args:
        model: the trainer's PeftModel; only read.
        engine: the other side.
        sequences: token ids that both score; by default two of up to 8 tokens, sampled from the bare base at
            calibration (a forward of so few is all overhead: more would cost little, but a small model's step is
            short), and one after `image`.
        image: prompt of a vision-language model.
        every: score at each n-th push; the digest is compared at every push.
        function: is asked again where the engine is another one.
        autocast: dtype in which the trainer's forward runs while training (`None`: as the weights are).
    """

    def __init__(
        self,
        model: Any,
        engine: RolloutEngine,
        sequences: Sequence[Sequence[int]] | None = None,
        *,
        image: SeenPrompt | None = None,
        every: int = 1,
        function: FunctionCheck | None = None,
        autocast: torch.dtype | None = None,
    ):
        if every < 1:
            raise ConfigConflictError(f"making a canary: every={every} < 1. Score at each n-th push, n at least 1.")
        self.model = model
        self.engine = engine
        self.image = image
        self.every = every
        self.function = function
        self.autocast = autocast
        self.sequences = None if sequences is None else [list(s) for s in sequences]
        self.threshold, self.noise = UPPER_BOUND, 0.0
        self._pushes = 0
        self._must_score = self._must_probe = self._can_probe = True
        self._scores = 0
        # The trainer's logprobs of the sequences on the bare base and under the probe; the size of its B; what the
        # policy changes.
        self._ours_bare: list[list[float]] | None = None
        self._ours_probed: list[list[float]] = []
        self._probe_size = FIRST_SIZE
        self._probe_limit = UPPER_BOUND
        self._probe_shape: Any = None
        self._effect = 0.0
        self._has_dropout = any(drops(module) for module in model.modules())

    def calibrate(self) -> float:
        """Set the threshold from the rounding of the bare base, which both sides must hold; before any push.

        The rounding is what the trainer's own float32 pass differs by, not what the engine does: that would take a
        fault for normal.

        Returns:
            The threshold: mean scaled difference of logprobs.

        Raises:
            CanaryError: the bare base itself is further apart than any threshold may be.
        """
        with without_adapter(self.model):
            if self.sequences is None:
                self.sequences = self._sampled_sequences()
            ours = self._score(self.sequences)
            noise = self._difference(self.sequences, bare=True, ours=ours)
            rounding = noise
            if not is_sharded(self.model):
                try:
                    with in_float32(self.model, max(map(len, self.sequences))):
                        rounding = _distance(ours, self._score(self.sequences))
                except NotComparedError as why:
                    logger.warning("the canary takes the engine's distance for rounding: %s", why)
            rounding = max(ranks().gather(rounding, "measuring rounding"))
        if not noise <= UPPER_BOUND:
            raise CanaryError(
                f"calibrating the canary: trainer and engine differ by {noise:.3g} (scaled) on the bare base, more "
                f"than {UPPER_BOUND}. They hold or compute something else; run `qlora-rl verify BASE --local`."
            )
        self.noise = noise
        self.threshold = min(UPPER_BOUND, max(self._floor, FACTOR * rounding))
        return self.threshold

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what was calibrated, and where the cadence stands."""
        return {"sequences": self.sequences, "noise": self.noise, "threshold": self.threshold, "pushes": self._pushes}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue with the calibration of the run's start; the next push is scored, because the engine is a new one.

        Raises:
            CanaryError: on the bare base this engine is further from the trainer than the threshold of the run allows.
        """
        if not self.noise <= saved["threshold"]:
            raise CanaryError(
                f"resuming: trainer and engine differ by {self.noise:.3g} (scaled) on the bare base, "
                f"{saved['noise']:.3g} when the run began, threshold={saved['threshold']:.3g}. This machine computes "
                "differently: another device, driver, or version of vLLM or bitsandbytes."
            )
        self.sequences, self.threshold, self._pushes = saved["sequences"], saved["threshold"], saved["pushes"]
        self._ours_bare = None  # of other sequences
        self.doubt()

    def check(self, bundle: AdapterBundle, *, scored: bool = False) -> float | None:
        """Check that the engine holds and applies `bundle`.

        Args:
            bundle: what was pushed.
            scored: score, whatever the cadence says.

        Returns:
            The mean scaled difference of logprobs, or `None` at a push that was not scored.

        Raises:
            CanaryError: it does not; says which.
        """
        is_scored = self.is_due() or scored
        try:
            with ranks().together(
                "checking the push"
            ):  # before the forward pass, in which the ranks of a sharded trainer meet
                self._compare_held(bundle)
            return self._scored() if is_scored else None
        except BaseException:
            self.doubt()
            raise

    def check_weights(self, sent: Mapping[str, Leaf]) -> float:
        """Check that the engine holds these dense weights and computes with them.

        Args:
            sent: digests of every weight that was pushed.

        Returns:
            The mean scaled difference of logprobs.

        Raises:
            CanaryError: it does not; says which.
        """
        self.doubt()
        with ranks().together(
            "checking the push"
        ):  # before the forward pass, in which the ranks of a sharded trainer meet
            held = self.engine.describe_base().leaves
            wrong = sorted(name for name in {*sent, *held} if sent.get(name) != held.get(name))
            if wrong:
                raise CanaryError(
                    f"checking the push: {len(wrong)} of {len(sent)} weights in the engine are not what was pushed, "
                    f"first {wrong[0]}. A broken stream or another model would look like this; push again.",
                    reasons=wrong,
                    module=wrong[0].rpartition(".")[0],
                )
        return self._scored()

    def is_due(self) -> bool:
        """Counts a push; true at each n-th one, beginning with the first, and after a doubt until a score has
        passed."""
        self._pushes += 1
        return self._must_score or (self._pushes - 1) % self.every == 0

    def doubt(self) -> None:
        """Something has failed, or was lost: the next push is scored and probed, whatever the cadence says."""
        self._must_score = self._must_probe = True

    def wants_probe(self) -> bool:
        """A probe is due: at the first push, after a doubt, and at each second one that is scored while the policy
        changes little."""
        if self._must_probe:
            return True
        will_score = self._must_score or self._pushes % self.every == 0
        is_turn = will_score and self._scores % PROBE_EVERY == 0
        return is_turn and self._can_probe and self._effect < self._clear_effect

    def probe(self, adapter: LiveAdapter) -> Probe | None:
        """What to push for `check_probe`: of the shape of the live adapter, and as large as its effect has to be.

        `None` where no size has such an effect on the trainer's own model.
        """
        if self._ours_bare is None or self._probe_shape != adapter.shape:
            self._size_probe(adapter)
        return Probe(adapter, self._probe_size) if self._can_probe else None

    def check_probe(self, probe: Probe) -> float:
        """Check that the engine, which serves the probe, holds it and multiplies with it.

        Returns:
            The mean scaled difference of logprobs.

        Raises:
            CanaryError: it does not.
        """
        with ranks().together("checking the push"):
            self._compare_held(probe.bundle())
        difference, limit = self._difference(self.sequences, ours=self._ours_probed), self._probe_limit
        if difference <= limit or (difference <= self.threshold and self._agrees_elsewhere(probe)):
            self._must_probe = False
            return difference
        apart = self._difference(self.sequences, ours=self._ours_bare)
        found = (
            "The engine does not multiply with its adapter at all"
            if apart <= self.threshold
            else f"The engine multiplies with it in another way (it is {apart:.3g} from the bare base)"
        )
        raise CanaryError(
            "checking the push: under a large synthetic adapter, which is pushed to see whether it is multiplied, the "
            f"engine's logprobs differ from the trainer's by {difference:.3g} (scaled) on average > "
            f"threshold={limit:.3g}. {found}, whatever its buffers hold (or the base was changed: `qlora-rl "
            "verify BASE --local`)."
        )

    @property
    def _floor(self) -> float:
        return FLOORS.get(self.engine.capabilities().adapter_dtype, FLOOR_16_BIT)

    def _limit_under(self, probe: Probe, sequences: Sequence[Sequence[int]], ours: Sequence[Sequence[float]]) -> float:
        """How far the engine may be from the trainer under a probe, by the trainer's rounding on these sequences; where
        both round otherwise that says nothing of the engine's."""
        if as_engine(self.model, self.autocast, self.engine.capabilities().adapter_dtype) is not None:
            return self.threshold
        rounding = math.inf
        if not is_sharded(self.model):
            try:
                with without_adapter(self.model), in_float32(self.model, max(map(len, sequences))):
                    with added_to(bare_model(self.model), probe.bundle().tensors):
                        rounding = _distance(ours, self._score(sequences))
            except NotComparedError as why:
                logger.info("the rounding under a probe is not known: %s", why)
        rounding = max(ranks().gather(rounding, "measuring rounding"))
        return min(self.threshold, max(self._floor, PROBE_FACTOR * rounding))

    def _agrees_elsewhere(self, probe: Probe) -> bool:
        """On other sequences trainer and engine are as near under the probe as rounding lets them be."""
        with without_adapter(self.model):
            sequences = self._sampled_sequences(SECOND_LOOK, seed=1)
            with added_to(bare_model(self.model), probe.bundle().tensors):
                ours = self._score(sequences)
        return self._difference(sequences, ours=ours) <= self._limit_under(probe, sequences, ours)

    @property
    def _clear_effect(self) -> float:
        return max(LEAST_EFFECT, CLEAR * self.threshold)

    def _size_probe(self, adapter: LiveAdapter) -> None:
        """Find a size of B, a power of two, at which the probe is clear of the threshold and not much more; once a
        run."""
        if self.sequences is None:
            self.calibrate()
        wanted, size, is_found = self._clear_effect, FIRST_SIZE, False
        probed: list[list[float]] = []
        effects: list[float] = []
        tries = 0
        with without_adapter(self.model):
            bare = self._score(self.sequences)
            while not is_found and size <= LARGEST_SIZE and all(map(math.isfinite, effects)) and tries < 16:
                tries += 1
                with added_to(bare_model(self.model), Probe(adapter, size).bundle().tensors):
                    probed = self._score(self.sequences)
                # Of all ranks, which go on alike.
                effects = ranks().gather(_distance(probed, bare), "sizing the probe")
                is_found = wanted <= min(effects) and max(effects) <= 4 * wanted
                if not is_found and all(map(math.isfinite, effects)):
                    size *= 2.0 ** round(math.log2(2 * wanted / max(min(effects), wanted / 32)))
        if not is_found:
            logger.warning(
                "pushes cannot be probed: no adapter of this shape changes the trainer's logprobs by %.3g to %.3g "
                "(scaled; the last one by %s). Whether the engine multiplies with an adapter is seen when the policy's "
                "has become large",
                wanted,
                4 * wanted,
                effects,
            )
        limit = self._limit_under(Probe(adapter, size), self.sequences, probed) if is_found else self.threshold
        # All at once: what was broken off is begun again.
        self._ours_bare, self._ours_probed, self._probe_size, self._probe_limit = bare, probed, size, limit
        self._probe_shape, self._can_probe = adapter.shape, is_found

    def _scored(self) -> float:
        if self.sequences is None:
            self.calibrate()
        ours = self._score(self.sequences)
        difference = self._difference(self.sequences, ours=ours)
        if self._ours_bare is not None:
            self._effect = min(ranks().gather(_distance(ours, self._ours_bare), "comparing logprobs"))
        self._scores += 1
        if difference <= self.threshold:
            self._must_score = False
            return difference
        # A policy that has moved far no longer writes what the base does: what it writes now decides.
        own = self._difference(self._sampled_sequences()) if math.isfinite(difference) else difference
        if own <= self.threshold:
            logger.warning(
                "the canary's sequences have become unlikely: trainer and engine differ by %.3g (scaled) on them, and "
                "by %.3g on what the policy writes now, threshold %.3g",
                difference,
                own,
                self.threshold,
            )
            self._must_score = False
            return own
        texts = [ids for ids in self.sequences or () if not self._is_seen(ids)]
        if len(texts) < len(self.sequences or ()) and self._difference(texts) <= self.threshold:
            raise CanaryError(
                "checking the push: after an image the engine's logprobs differ from the trainer's by "
                f"{difference:.3g} (scaled) on average > threshold={self.threshold:.3g}, and in plain text they agree. "
                "Its vision tower computes something else, or it has kept what the tower made of the image before (its "
                "encoder cache): start a new engine; `qlora-rl verify BASE --local` compares the tower."
            )
        raise CanaryError(
            f"checking the push: the engine holds what was pushed, but its logprobs differ from the trainer's by "
            f"{difference:.3g} (scaled) on average > threshold={self.threshold:.3g}, and by {own:.3g} on what the "
            "policy writes now. It applies it in another way (or the base was changed: `qlora-rl verify BASE --local`)."
        )

    def _compare_held(self, bundle: AdapterBundle) -> None:
        compare_held(self.engine, bundle)

    def _difference(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        bare: bool = False,
        ours: Sequence[Sequence[float]] | None = None,
    ) -> float:
        """Mean over tokens of |ours - theirs| / max(1, |ours|); of several replicas, and of text and image, the worst.

        A policy that has learned gives some tokens of the fixed sequences very small probabilities, and 16-bit logits
        are rounded in proportion to their size: without the scale, honest runs would raise alarms.
        """
        ours = self._score(sequences) if ours is None else ours
        asked: Sequence[Any] = [
            replace(self.image.prompt, ids=list(ids)) if self.image is not None and self._is_seen(ids) else ids
            for ids in sequences
        ]
        if isinstance(self.engine, ReplicatedEngine):
            each = self.engine.score_each(asked, bare=bare)
        else:
            each = [self.engine.score(asked, bare=bare)]
        each = [self._counted(theirs, sequences) for theirs in each]
        kinds = [[i for i, ids in enumerate(sequences) if self._is_seen(ids) is seen] for seen in (False, True)]
        # Of all ranks: they decide alike whether to ask further.
        parts = ranks().gather(
            [
                _distance([ours[i] for i in rows], [theirs[i] for i in rows])
                for theirs in each
                for rows in kinds
                if rows
            ],
            "comparing logprobs",
        )
        found = [difference for part in parts for difference in part]
        return math.nan if any(map(math.isnan, found)) else max(found)

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The trainer's logprobs of every token that counts, without dropout."""
        logits = self._logits(sequences)
        found = [
            rows_TV.log_softmax(-1)
            .gather(1, torch.tensor(list(ids)[1:], device=rows_TV.device)[:, None])[:, 0]
            .tolist()
            for rows_TV, ids in zip(logits, sequences, strict=True)
        ]
        return self._counted(found, sequences)

    def _counted(self, scores: Sequence[Sequence[float]], sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of logprobs of every token but the first, those of tokens that were sampled: behind an image the prompt's are
        left out."""
        skipped = len(self.image.prompt.ids) - 1 if self.image is not None else 0
        return [
            list(row)[skipped:] if self._is_seen(ids) else list(row) for row, ids in zip(scores, sequences, strict=True)
        ]

    def _is_seen(self, ids: Sequence[int]) -> bool:
        return self.image is not None and self.image.begins(ids)

    def _logits(self, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The trainer's logits [T - 1, V] at every token but the last of each sequence, float32."""
        base = bare_model(self.model)
        device = next(base.parameters()).device
        context = as_trained(self.model, self.autocast)
        # Walking the modules takes a tenth of a small model's forward: only where the mode matters.
        must_switch = self.model.training and self._has_dropout
        if must_switch:
            self.model.eval()
        try:
            with torch.no_grad(), context:
                found: list[torch.Tensor] = []
                for rows in self._batches(sequences):
                    ids_BT = torch.tensor([list(row) for row in rows], device=device)
                    seen = self.image.inputs_for(rows[0]) if self.image is not None and self._is_seen(rows[0]) else {}
                    more = {name: value.to(device) for name, value in seen.items()}
                    # TRL puts a forward of its own on the model, which returns no logits.
                    logits_BTV = plain_forward(self.model, input_ids=ids_BT, use_cache=False, **more).logits
                    found += list(logits_BTV[:, :-1].float())
        finally:
            if must_switch:
                self.model.train()
        return found

    def _batches(self, sequences: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
        """Neighbours of one length together; each that follows an image alone."""
        found: list[list[Sequence[int]]] = []
        for ids in sequences:
            neighbour = found[-1][-1] if found and not self._is_seen(ids) else None
            if neighbour is not None and len(neighbour) == len(ids) and not self._is_seen(neighbour):
                found[-1].append(ids)
            else:
                found.append([ids])
        return found

    def _sampled_sequences(self, count: int = 2, seed: int = 0) -> list[list[int]]:
        """Some sequences, and one after the image, sampled from the model as it is; calibrating switches the adapter
        off.

        Rollouts consist of what a model may write; at tokens that it would never write, 16-bit logits differ widely
        without harm.
        """
        vocabulary = int(bare_model(self.model).config.get_text_config().vocab_size)
        length = max(2, min(8, self.engine.capabilities().max_model_length - 1))
        generator = torch.Generator().manual_seed(seed)
        sampled = torch.randint(vocabulary, (count, 1), generator=generator).tolist()
        never = image_tokens_of(bare_model(self.model).config)
        while len(sampled[0]) < length:
            self._sample_next(sampled, generator, never)
        seen = list(self.image.prompt.ids) if self.image is not None else []
        room = min(8, self.engine.capabilities().max_model_length - 1 - len(seen))
        if seen and room > 0:
            for _ in range(room):
                self._sample_next([seen], generator, never)
            sampled.append(seen)
        elif seen:
            logger.warning(
                "the canary scores text alone: its image takes %d tokens, and the engine's prompts fewer", len(seen)
            )
        return sampled

    def _sample_next(self, rows: Sequence[list[int]], generator: torch.Generator, never: Sequence[int]) -> None:
        # One more token is appended only to be cut off again: logits come for all but the last.
        for row, rows_TV in zip(rows, self._logits([[*row, 0] for row in rows]), strict=True):
            last_V = rows_TV[-1].detach().clone()
            last_V[list(never)] = -math.inf
            row.append(int(torch.multinomial(last_V.softmax(-1).cpu(), 1, generator=generator)))


def compare_held(engine: RolloutEngine, bundle: AdapterBundle) -> None:
    """Check that an engine multiplies with this adapter, byte for byte.

    Raises:
        CanaryError: it does not; names the matrices.
    """
    wanted = {name: digest_bytes(tensor) for name, tensor in bundle.tensors.items() if bool(tensor.any())}
    held = engine.held_adapter(bundle.rank)
    wrong = sorted(name for name in {*wanted, *held} if wanted.get(name) != held.get(name))
    if wrong:
        lost = sum(name not in held for name in wrong)
        raise CanaryError(
            f"checking the push: {len(wrong)} of {len(bundle.tensors)} matrices in the engine are not what was "
            f"pushed ({lost} are missing), first {wrong[0]}. Wrong scaling, a lost layer or an older version would "
            "look like this; push again.",
            reasons=wrong,
            module=module_of(wrong[0]),
        )


def _distance(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return statistics.fmean(abs(a - b) / max(1.0, abs(a)) for a, b in pairs)
