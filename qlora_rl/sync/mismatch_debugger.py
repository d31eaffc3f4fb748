"""`MismatchDebugger`: rollouts are further from the trainer's policy than rounding explains. Which policy sampled them?

First what can be verified: the engine must hold the live adapter, byte for byte, and both bases must be what they were
at the start. Then what can be tried: the same tokens are scored again under what the engine may have multiplied with
instead (alpha wrong by a factor, the version before, no adapter, one layer lost, another temperature). The one under
which the distance falls to noise is the cause. Where none explains it, the trainer scores the tokens in float32, which
tells rounding from another function (`sync/function_check.py`).

Shape letters: T sampled tokens of one completion, V vocabulary, R rank, O out-features.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qlora_rl.adapter.inspected import InspectedAdapter, active_adapter
from qlora_rl.adapter.live import LiveAdapter
from qlora_rl.base.fingerprint import compare, digest_bytes, fingerprint_base
from qlora_rl.contracts import AdapterBundle, RolloutEngine, SyncStrategy, module_of
from qlora_rl.distributed import ranks
from qlora_rl.errors import QloraRLError
from qlora_rl.fidelity import scaled_differences
from qlora_rl.sharded_tensors import is_sharded
from qlora_rl.sync.base_check import BaseCheck
from qlora_rl.sync.forward import (
    NotComparedError,
    as_engine,
    as_trained,
    bare_model,
    completion_logits,
    evaluating,
    in_float32,
    without_adapter,
)
from qlora_rl.sync.function_check import Apart
from qlora_rl.sync.synthetic_adapter import added_to
from qlora_rl.sync.truncated_sampling import TruncatedSampling

logger = logging.getLogger(__name__)

# What a wrong factor usually is; the adapter's own scale comes to these.
_FACTORS = (2.0, 0.5, 4.0, 0.25, 8.0, 0.125, 16.0, 0.0625, 32.0, 0.03125)
_TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
# Modules that are tried one by one; of more, only those of the decoder layer that explains most.
_FEW = 64
# Time for what is tried, each with a pass of its own; what does not fit, layers and modules first, is left out.
_SECONDS = 60.0
# An explanation must leave at most this share of the distance, and be nearer than the policy at so many more of the
# tokens than half that chance would be that many standard deviations off. Every other adapter rounds differently: where
# a few tokens make the distance, one of forty explanations is nearer in the mean by chance.
_EXPLAINED, _DEVIATIONS = 1 / 3, 4.0
# Faults that were shown to be there, and not merely supposed.
FAULTS = ("scale", "stale", "layer", "bare", "adapter", "base", "sampling", "function")


@dataclass(frozen=True)
class Sampled:
    """Some completions that the engine sampled.

    Attributes:
        prompts: token ids.
        completions: token ids.
        logprobs: those that the engine reported, `None` where it did not sample a token or has none.
        temperature: with which they were asked for.
        filters: what else shaped the distribution, and the trainer does not follow, such as "repetition_penalty=1.1".
        truncated: what both sides leave of the vocabulary.
        images: what the model is given for the images of a prompt besides the ids, for each completion; what is [1, T]
            is one value for each of its T tokens. Empty for prompts of text.
        has_images: some prompts hold images, which are not here.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    logprobs: list[list[float | None]]
    temperature: float = 1.0
    filters: tuple[str, ...] = ()
    truncated: TruncatedSampling | None = None
    images: tuple[Mapping[str, torch.Tensor], ...] = ()
    has_images: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """Why rollouts are far from the policy.

    Attributes:
        cause: one of `FAULTS`; "dropout" or "noise" (nothing is wrong), "dtype" or "unknown" (nothing was shown),
            "nan" (nothing can be compared).
        sentence: the cause, in words.
        module: the affected module, if there is one.
        distance: mean scaled difference (fidelity.scaled_differences) of the tokens, scored again without dropout; NaN
            if that was not needed.
        is_verified: verified by bytes or fingerprints; otherwise it was tried, and should be found a second time.
        was_announced: people were told that it is looked for, and wait for what was found.
    """

    cause: str
    sentence: str
    module: str | None = None
    distance: float = float("nan")
    is_verified: bool = False
    was_announced: bool = False

    @property
    def is_fault(self) -> bool:
        """Something was shown to be wrong."""
        return self.cause in FAULTS


class MismatchDebugger:
    """Finds out what the engine multiplies with.

    Args:
        model: the trainer's; its adapter is switched off while other adapters are tried.
        engine: which sampled.
        strategy: which pushed the policy.
        `base_check`: fingerprints of both bases at the start.
        autocast: dtype in which the trainer's forward runs while training (`None`: as the weights are).
    """

    def __init__(
        self,
        model: Any,
        engine: RolloutEngine,
        strategy: SyncStrategy,
        base_check: BaseCheck,
        autocast: torch.dtype | None = None,
    ):
        self.model = model
        self.engine = engine
        self.strategy: Any = strategy  # of one that sends adapters also `before` is asked
        self.base_check = base_check
        self.autocast = autocast
        self._sends_adapter = getattr(strategy, "mode", "") == "lora_adapter"
        self._is_announced = False  # people were told that an examination takes long

    def examine(self, sampled: Sampled, limit: float) -> Diagnosis:
        """Find the cause.

        Args:
            `sampled`: some of the completions.
            limit: scaled difference that rounding explains.
        """
        verified = self._anywhere(self._held) if self._sends_adapter else None
        verified = verified or self._anywhere(self._bases)
        if verified:
            return replace(verified, is_verified=True)
        self._is_announced = False
        found = self._tried(sampled, limit)
        return replace(found, was_announced=self._is_announced)

    def _anywhere(self, look: Callable[[], Diagnosis | None]) -> Diagnosis | None:
        """What any rank finds at its own engine. All ranks run the same checks in the same order, because the next
        steps are collective."""
        try:
            found = look()
        except QloraRLError as error:  # the engine, or the live adapter, cannot even be asked
            found = Diagnosis("adapter", f"what the engine holds cannot be read: {error}", error.module)
        return next((each for each in ranks().gather(found, "examining the engine") if each), None)

    def rescore(self, sampled: Sampled) -> tuple[Sampled, float]:
        """Have both sides score completions as they are now, whoever sampled them: no temperature, no filter, no
        dropout.

        Returns:
            The completions, as far as the engine takes them, with its logprobs of now; and their mean scaled difference
            (NaN of none).
        """
        longest = self.engine.capabilities().max_model_length - 1
        pairs = zip(sampled.prompts, sampled.completions, strict=True)
        kept = [(p, c[: longest - len(p)]) for p, c in pairs if len(p) < longest]
        if not kept:
            return Sampled([], [], []), float("nan")
        theirs = self.engine.score([p + c for p, c in kept])
        scored = [row[len(p) - 1 :] for row, (p, _) in zip(theirs, kept, strict=True)]
        again = Sampled([p for p, _ in kept], [c for _, c in kept], scored)
        return again, float(self._scaled(again, (1.0,))[1.0].mean())

    # --- verified ---------------------------------------------------------------------------------------------------

    def _held(self) -> Diagnosis | None:
        """Compare the engine's adapter with the live adapter, byte for byte."""
        bundle = self._bundle()
        wanted = _digests(bundle.tensors)
        held = self.engine.held_adapter(bundle.rank)
        before = self.strategy.before()  # asked by all ranks, whatever each of them has found
        wrong = sorted(name for name in {*wanted, *held} if wanted.get(name) != held.get(name))
        if not wrong:
            return None
        module = module_of(wrong[0])
        if not held:
            return Diagnosis("bare", "the engine holds no adapter: it samples from the bare base")
        if before is not None and held == _digests(before[1]):
            return Diagnosis(
                "stale", f"the engine holds version {before[0]}, which is not the newest: it was not updated"
            )
        missing = [name for name in wrong if name not in held]
        if missing == wrong:
            layers = sorted({module_of(name) for name in missing})
            more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
            return Diagnosis(
                "layer", f"the engine has lost the adapter of {layers[0]}{more}; all others are right", layers[0]
            )
        if all(".lora_B." in name for name in wrong):
            for factor in self._factors():
                if all(held.get(name) == digest_bytes(bundle.tensors[name] * factor) for name in wrong):
                    return Diagnosis("scale", _of_scale(factor), module)
        return Diagnosis(
            "adapter",
            f"the engine holds another adapter: {len(wrong)} matrices are not what was pushed, first {wrong[0]}",
            module,
        )

    def _bases(self) -> Diagnosis | None:
        """Compare both bases with what they were at the start; not possible where full weights have replaced them."""
        if not self._sends_adapter:
            return None
        sides = [("engine", self.base_check.theirs, self.engine.describe_base())]
        # A sharded base is never gathered, not even to be looked at.
        before, ours = self.base_check.ours.leaves, None if is_sharded(self.model) else fingerprint_base(self.model)
        if ours is not None and all(
            name in before and before[name].kind == leaf.kind for name, leaf in ours.leaves.items()
        ):
            sides.append(("trainer", self.base_check.ours, ours))  # otherwise its baked form was compared
        for side, then, now in sides:
            diff = compare(then, now)
            if diff.entries:
                said = f"the base of the {side} has changed since the start: {diff.entries[0]}"
                return Diagnosis("base", said, diff.modules[0])
        return None

    # --- tried ------------------------------------------------------------------------------------------------------

    def _tried(self, sampled: Sampled, limit: float) -> Diagnosis:
        """Score the tokens under what may have sampled them."""
        if sampled.has_images:
            said = (
                "adapter and base are what they should be, byte for byte; completions of prompts with images are "
                "not scored again"
            )
            return Diagnosis("unknown", said)
        started = time.monotonic()
        by_temperature = self._scaled(sampled, (sampled.temperature, *_TEMPERATURES))
        here = by_temperature.pop(sampled.temperature)
        own = time.monotonic() - started, float(here.mean())
        # Of all ranks, which go on alike.
        seconds, now = map(max, zip(*ranks().gather(own, "scoring rollouts again"), strict=True))
        if now <= limit * _EXPLAINED:
            return Diagnosis("dropout", "without the trainer's dropout both sides agree", distance=now)
        if now <= limit / 2:
            return self._noise(now)
        found = [
            (there, Diagnosis("sampling", _of_temperature(temperature, sampled.temperature), distance=now))
            for temperature, there in by_temperature.items()
        ]
        if self._sends_adapter:
            found += self._under_other_adapters(sampled, now, seconds)
        best, diagnosis = min(found, key=lambda pair: float(pair[0].mean()))
        if float(best.mean()) <= now * _EXPLAINED and _is_nearer(best, here, _first_seen(sampled)):
            return diagnosis
        if now <= limit:
            return self._noise(now)
        if self.autocast is not None:
            plain = self._without_autocast(sampled)
            if plain is not None and float(plain.mean()) <= now * _EXPLAINED:
                return Diagnosis(
                    "dtype",
                    f"without autocast to {str(self.autocast).removeprefix('torch.')} the trainer agrees: the two "
                    "sides compute in different dtypes",
                    distance=now,
                )
        return self._rounded(sampled, limit, now)

    @staticmethod
    def _noise(now: float) -> Diagnosis:
        return Diagnosis("noise", "scored again, the tokens differ no more than rounding explains", distance=now)

    def _rounded(self, sampled: Sampled, limit: float, now: float) -> Diagnosis:
        """Tell rounding from another function."""
        if sampled.filters or is_sharded(self.model):
            return Diagnosis("unknown", self._guess(sampled, limit), distance=now)
        try:
            apart = self._from_float32(sampled)
        except NotComparedError as error:
            return Diagnosis("unknown", f"{self._guess(sampled, limit)}; {error}", distance=now)
        said = (
            f"the engine is {apart.engine:.2g} (scaled) from the trainer's own float32 pass, the trainer "
            f"{apart.trainer:.2g}"
        )
        if not apart.odd:
            return Diagnosis("noise", f"{said}: rounding is as large as that for this model", distance=now)
        return Diagnosis("function", f"{self._guess(sampled, limit)}; {said}", distance=now)

    def _under_other_adapters(
        self, sampled: Sampled, now: float, seconds: float
    ) -> list[tuple[torch.Tensor, Diagnosis]]:
        """What the engine may multiply with instead: another scale, nothing, the version before, all but one layer.

        Args:
            `sampled`: what is scored.
            now: its distance under the policy.
            seconds: that one pass takes.
        """
        temperature = sampled.temperature

        def under(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            with without_adapter(self.model), added_to(bare_model(self.model), {**live, **tensors}):
                return self._scaled(sampled, (temperature,))[temperature]

        live = self._bundle().tensors
        b_names = [name for name in live if ".lora_B." in name]
        nothing = {name: torch.zeros_like(live[name]) for name in b_names}
        said = "the engine applies no adapter: it samples from the bare base"
        suspects = [(nothing, Diagnosis("bare", said, distance=now))]
        if (before := self.strategy.before()) is not None:
            said = (
                f"the tokens were sampled by version {before[0]}, which is not the newest: the engine still uses "
                "an old one"
            )
            suspects.append((before[1], Diagnosis("stale", said, distance=now)))
        suspects += [
            ({name: live[name] * factor for name in b_names}, Diagnosis("scale", _of_scale(factor), distance=now))
            for factor in self._factors()
        ]
        layers: dict[str, list[str]] = {}
        for name in b_names:
            layers.setdefault(_layer_of(name), []).append(name)
        passes = int(_SECONDS / max(seconds, 1e-6))
        most = seconds * min(passes, len(suspects) + len(layers) + len(b_names))
        if most > 2:
            self._is_announced = True
            logger.warning("rollouts are further from the policy than usual: finding out why takes up to %.0f s", most)
        found = [(under(tensors), diagnosis) for tensors, diagnosis in suspects[:passes]]
        passes -= len(suspects)
        if len(layers) > passes:
            logger.warning(
                "%d other scales and which of %d layers is lost were not looked for: each takes %.1f s",
                max(0, -passes),
                len(layers),
                seconds,
            )
            return found
        tried = {layer: under({name: nothing[name] for name in names}) for layer, names in layers.items()}
        nearest = min(tried, key=lambda layer: float(tried[layer].mean()))
        names = b_names if len(b_names) <= _FEW else layers[nearest]
        if len(layers) + len(names) <= passes:
            tried |= {module_of(name): under({name: nothing[name]}) for name in names}
        lost, there = min(tried.items(), key=lambda item: float(item[1].mean()))
        said = f"the engine does not apply the adapter of {lost}"
        return [*found, (there, Diagnosis("layer", said, lost, distance=now))]

    def _guess(self, sampled: Sampled, limit: float) -> str:
        if sampled.filters:
            names = ", ".join(sampled.filters)
            return f"{names}: the engine's probabilities include it, the trainer's do not"
        if not any(sampled.images) and self.rescore(sampled)[1] <= limit:
            return (
                "the engine scores these tokens as the trainer does, and reported other probabilities when it sampled "
                "them: a filter of the sampling (a penalty, a pattern), or a cache of an older version"
            )
        return "adapter and base are right: the two sides compute different functions of them, or in different dtypes"

    # --- the trainer's side -----------------------------------------------------------------------------------------

    def _without_autocast(self, sampled: Sampled) -> torch.Tensor | None:
        """Scaled differences without it; `None` where the model does not run so (IA3's float32 vectors in 16-bit
        attention)."""
        try:
            return self._scaled(sampled, (sampled.temperature,), autocast=False)[sampled.temperature]
        except RuntimeError as error:
            logger.info("the trainer's model does not run without autocast, which is not asked then: %s", error)
            return None

    def _scaled(
        self, sampled: Sampled, temperatures: Sequence[float], *, autocast: bool = True
    ) -> dict[float, torch.Tensor]:
        """Scaled difference of the trainer's logprob of every sampled token, at each temperature, from the one that was
        reported."""
        ours, theirs = self._logprobs(sampled, temperatures, autocast=autocast)
        return {t: scaled_differences(rows - theirs, theirs) for t, rows in ours.items()}

    def _from_float32(self, sampled: Sampled) -> Apart:
        """Of the tokens that the engine has sampled."""
        t, name, like = sampled.temperature, self.engine.capabilities().adapter_dtype, None
        ours, theirs = self._logprobs(sampled, (t,))
        longest = max(map(len, sampled.prompts)) + max(map(len, sampled.completions))
        with in_float32(self.model, longest):
            exact, _ = self._logprobs(sampled, (t,))
        if (rounds_alike := as_engine(self.model, self.autocast, name)) is not None:
            with rounds_alike:
                like = self._logprobs(sampled, (t,), autocast=False)[0][t]
        own = self.autocast or bare_model(self.model).dtype
        return Apart.of(longest, theirs, ours[t], exact[t], like, name, own)

    @torch.no_grad()
    def _logprobs(
        self, sampled: Sampled, temperatures: Sequence[float], *, autocast: bool = True
    ) -> tuple[dict[float, torch.Tensor], torch.Tensor]:
        """Of every sampled token the trainer's logprob, at each temperature, and the one that was reported."""
        found: dict[float, list[torch.Tensor]] = {t: [] for t in temperatures}
        reported: list[torch.Tensor] = []
        # Dropout is not what is looked for.
        with evaluating(self.model), as_trained(self.model, self.autocast if autocast else None):
            logits = completion_logits(self.model, sampled.prompts, sampled.completions, sampled.images)
            for logits_TV, ids, logprobs in zip(logits, sampled.completions, sampled.logprobs, strict=True):
                known = [i for i, value in enumerate(logprobs) if value is not None]
                ids_T = torch.tensor(ids, device=logits_TV.device)[known, None]
                reported.append(torch.tensor([logprobs[i] for i in known], dtype=torch.double))
                logits_TV = logits_TV[known].float()
                for temperature, rows in found.items():
                    scaled_TV = logits_TV / temperature
                    ours_T = scaled_TV.log_softmax(-1).gather(1, ids_T)[:, 0]
                    if sampled.truncated is not None:
                        ours_T = ours_T - sampled.truncated.log_kept(scaled_TV, ids_T[:, 0])
                    rows.append(ours_T.double().cpu())
        return {t: torch.cat(rows) for t, rows in found.items()}, torch.cat(reported)

    def _bundle(self) -> AdapterBundle:
        adapter = LiveAdapter(self.model, getattr(torch, self.engine.capabilities().adapter_dtype))
        adapter.look()
        return adapter.bundle()

    def _factors(self) -> list[float]:
        """Factors by which alpha may be wrong: small powers of two; the scale itself, which is left out or applied
        twice."""
        layers = InspectedAdapter(self.model, active_adapter(self.model)).layers
        scales = {float(s) for layer in layers.values() for s in layer.scaling.values()} - {0.0, 1.0}
        own = [f for s in sorted(scales)[:2] for f in (s, 1 / s)]
        return list(dict.fromkeys([*own, *_FACTORS]))


def _is_nearer(there: torch.Tensor, here: torch.Tensor, counted: torch.Tensor) -> bool:
    """Under the explanation nearly all tokens are nearer, not only the few that make the mean; a sign test.

    Args:
        there: scaled differences under the explanation.
        here: under the policy as it is.
        counted: tokens that are independent of each other.
    """
    wins, losses = (int((one < other)[counted].sum()) for one, other in ((there, here), (here, there)))
    return wins - losses >= _DEVIATIONS * max(1, wins + losses) ** 0.5


def _first_seen(sampled: Sampled) -> torch.Tensor:
    """True where a token and all before it were not seen in an earlier completion: copies are rounded alike."""
    seen: set[tuple[int, ...]] = set()
    first = []
    for prompt, ids, logprobs in zip(sampled.prompts, sampled.completions, sampled.logprobs, strict=True):
        for i, value in enumerate(logprobs):
            if value is not None:
                key = (len(prompt), *prompt, *ids[: i + 1])
                first.append(key not in seen)
                seen.add(key)
    return torch.tensor(first, dtype=torch.bool)


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest_bytes(tensor) for name, tensor in tensors.items() if bool(tensor.any())}


def _layer_of(name: str) -> str:
    """The decoder layer of a canonical name: all up to the first number."""
    parts = module_of(name).split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])


def _of_scale(factor: float) -> str:
    return (
        f"the engine applies the adapter {factor:g} times as strongly as the trainer: lora_alpha, or the scale that is "
        "made of it, is wrong by this factor"
    )


def _of_temperature(found: float, asked: float) -> str:
    if found == 1.0:
        return (
            f"the engine reports raw logprobs, without the temperature={asked:g} (vLLM's logprobs_mode), or "
            "samples at 1"
        )
    return f"the engine samples at temperature={found:g}, and was asked for {asked:g}"
