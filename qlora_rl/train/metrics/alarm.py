"""`MismatchAlarm`: every step's distance of trainer and engine against what is normal for this pair; what is not is
examined.

The threshold is calibrated on the first batch: rollouts of this task, at this temperature, on these two engines. A step
above it is examined (`sync/mismatch_debugger.py`). If nothing is wrong, that was noise, and the threshold is raised
above it: the alarm learns what is normal and does not ask twice. If bytes show that something is wrong, the run stops
in that very step; if only the tokens do, in the second step in a row that shows the same. A distance that nothing
explains stops it only if it is large, and there in two steps in a row as well.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from trl.trainer.utils import split_pixel_values_by_grid

from qlora_rl.contracts import SamplingSpec
from qlora_rl.distributed import ranks
from qlora_rl.errors import PolicyMismatchError
from qlora_rl.fidelity import Fidelity
from qlora_rl.sync.mismatch_debugger import Diagnosis, MismatchDebugger, Sampled
from qlora_rl.sync.truncated_sampling import TRUNCATING, TruncatedSampling
from qlora_rl.train.rollouts.engine_link import Link, check_on_mismatch
from qlora_rl.train.setup.settings import autocast_dtype

logger = logging.getLogger(__name__)

# Scaled differences (fidelity.scaled_differences) in the dtype in which the engine multiplies. `usual`: a first batch
# below it needs no examination, and what is below it is rounding where nothing is shown to be wrong. `least`: no
# threshold goes below it. `most`: no noise goes above it.
_BOUNDS = {
    "float32": {"least": 1e-6, "usual": 1e-4, "most": 0.01},
    "16 bit": {"least": 1e-3, "usual": 0.01, "most": 0.1},
}
# Nor does any threshold, whatever is known to differ: the measure is at most 0.5, and an engine that has nothing to do
# with the policy must stand out.
_AUDIBLE = 0.25
# The first batch, times this, is the threshold; noise that was examined, times the other.
_FACTOR, _RAISED = 3.0, 2.0
# Sequences, and tokens of each, that are scored again.
SEQUENCES, TOKENS = 16, 64
# Of TRL's batch: one entry for each image or patch, and one for each token.
_OF_IMAGES, _PER_TOKEN = ("pixel_values", "image_grid_thw"), ("token_type_ids", "mm_token_type_ids")
# At every push: so many, and four times as many tokens as one of them may have.
_AGAIN = 8


class MismatchAlarm:
    """Watches `Fidelity.scaled_diff`.

    Args:
        examine: finds the cause (`MismatchDebugger.examine`).
        rescore: has both sides score completions again (`MismatchDebugger.rescore`); for `observe_again`.
        on_mismatch: "stop" raises `PolicyMismatchError`; "warn" logs it and goes on.
        dtype: in which the engine multiplies adapters.
        expected: why the sides are known to differ, such as "top_p=0.9": then only what is shown to be wrong stops a
            run.
        rounding: of this model, where it was measured (`FunctionCheck.rounding`): three times that is no fault.

    Attributes:
        threshold: of the next step; `None` before the first batch.
        diagnoses: of what was examined, by its number among all that was looked at: batches, and with `observe_again`
            pushes.
    """

    def __init__(
        self,
        examine: Callable[[Sampled, float], Diagnosis],
        rescore: Callable[[Sampled], tuple[Sampled, float]] | None = None,
        *,
        on_mismatch: str = "stop",
        dtype: str = "bfloat16",
        expected: Sequence[str] = (),
        rounding: float = 0.0,
    ):
        check_on_mismatch(on_mismatch)
        self.on_mismatch = on_mismatch
        self.expected = tuple(expected)
        self.threshold: float | None = None
        self.diagnoses: dict[int, Diagnosis] = {}
        self._examine, self._rescore = examine, rescore
        self._bounds = dict(_BOUNDS.get(dtype, _BOUNDS["16 bit"]))
        # Both sides round, and a first batch may round less than others.
        for name in ("usual", "least"):
            self._bounds[name] = min(self._bounds["most"], max(self._bounds[name], _FACTOR * rounding))
        self._looks = self._unexplained = 0
        self._gaps = {"batch": 0, "again": 0}  # in a row
        self._suspected = ""

    def observe(self, fidelity: Fidelity, sampled: Callable[[], Sampled]) -> Diagnosis | None:
        """Look at one batch.

        Args:
            fidelity: of the batch.
            `sampled`: gives some of its completions; called only if it is examined.

        Returns:
            What an examination has found; `None` where there was no need of one.

        Raises:
            PolicyMismatchError: with the likely cause.
        """
        self._looks += 1
        place, distance = f"batch {self._looks}", fidelity.scaled_diff
        gap = self._look_for_gaps(place, fidelity)
        return self._look(place, distance, f"{fidelity.tokens} sampled tokens", sampled) or gap

    def observe_gaps(self, fidelity: Fidelity) -> Diagnosis | None:
        """Look at a batch that an older policy has sampled: its distance says nothing, a logprob that is missing does.

        Raises:
            PolicyMismatchError: some were missing in the batch before, too.
        """
        self._looks += 1
        return self._look_for_gaps(f"batch {self._looks}", fidelity)

    def observe_again(self, sampled: Sampled) -> tuple[float, Diagnosis | None]:
        """Look at completions that an older policy has sampled: scored again by the engine, under what serves now.

        Returns:
            Their distance, and as `observe`.

        Raises:
            PolicyMismatchError: with the likely cause.
        """
        self._looks += 1
        again, distance = self._rescore(sampled)
        tokens = f"{sum(map(len, again.completions))} tokens of the batch before, scored again"
        place = "after the newest push"
        is_gap = math.isnan(distance) and any(map(bool, again.completions))
        gap = self._count_gap(
            "again", place, "of the tokens that were scored again some have no logprob" if is_gap else ""
        )
        return distance, self._look(place, distance, tokens, lambda: again) or gap

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what was learnt, and what is suspected."""
        return {
            "threshold": self.threshold,
            "looks": self._looks,
            "unexplained": self._unexplained,
            "gaps": dict(self._gaps),
            "suspected": self._suspected,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.threshold, self._looks = saved["threshold"], saved["looks"]
        self._unexplained, self._suspected, self._gaps = saved["unexplained"], saved["suspected"], dict(saved["gaps"])

    def _look_for_gaps(self, place: str, fidelity: Fidelity) -> Diagnosis | None:
        said = ""
        if fidelity.masked_share:
            said = f"for {100 * fidelity.masked_share:.3g} % of the sampled tokens a side has no logprob"
        elif fidelity.tokens and math.isnan(fidelity.scaled_diff):
            said = "a logprob of a sampled token is infinite"
        return self._count_gap("batch", place, said)

    def _count_gap(self, kind: str, place: str, said: str) -> Diagnosis | None:
        """`said` is of sampled tokens for which a side has no number, if there are any: no distance tells of them."""
        self._gaps[kind] = self._gaps[kind] + 1 if said else 0
        if not said:
            return None
        found = Diagnosis(
            "nan",
            "its logits are NaN, or the engine reports no logprobs. The adapter's products may overflow (lower the "
            "learning rate, clip gradients), or those of the engine's base do (compute_dtype float16). An engine that "
            "never reports any says so by gives_logprobs=False in its capabilities()",
        )
        self.diagnoses[self._looks] = found
        said = f"{place}: {said}: {found.sentence}"
        if self._gaps[kind] >= 2 and not self.expected:
            self._stop(said, found)
        else:
            logger.warning("%s%s", said, f" (expected: {', '.join(self.expected)})" if self.expected else "")
        return found

    def _look(self, place: str, distance: float, tokens: str, sampled: Callable[[], Sampled]) -> Diagnosis | None:
        if math.isnan(distance):
            return None  # nothing was sampled, or nothing reported
        limit = self._bounds["usual"] if self.threshold is None else self.threshold
        if distance <= limit:
            self._unexplained, self._suspected = 0, ""
            if self.threshold is None:
                wanted = max(self._bounds["least"], _FACTOR * distance)
                self.threshold = min(wanted, max(distance, self._bounds["most"]))
            return None
        found = self._examine(sampled(), limit)
        if found.cause == "function" and self.expected:  # the filters may be why
            found = replace(found, cause="unknown")
        if found.cause in ("dtype", "unknown") and distance <= self._bounds["usual"]:
            found = replace(found, cause="noise", sentence="adapter and base are right, and rounding may be this large")
        self.diagnoses[self._looks] = found
        said = (
            f"{place}: trainer and engine are {distance:.2g} apart (scaled, mean over {tokens}; up to "
            f"{limit:.2g} is normal for them): {found.sentence}"
        )
        is_noise = found.cause in ("noise", "dropout")  # scored again, the sides agree
        is_large = distance > self._bounds["most"] and not is_noise and not self.expected
        self._unexplained = self._unexplained + 1 if is_large else 0
        is_shown = found.is_fault and (found.is_verified or found.cause == self._suspected)
        self._suspected = found.cause if found.is_fault else ""
        if is_shown or self._unexplained >= 2:
            self._stop(said, found)
        elif found.is_fault:
            logger.warning("%s; if the next batch shows it too, this is believed", said)
            return found
        else:
            if is_noise and found.was_announced:
                logger.warning("%s was examined and nothing is wrong: %s", place, found.sentence)
            log = logger.info if is_noise else logger.warning
            log("%s%s", said, f" (expected: {', '.join(self.expected)})" if self.expected else "")
        is_known = bool(self.expected) or found.cause == "dropout" or self.on_mismatch == "warn"
        most = _AUDIBLE if is_known else self._bounds["most"]
        self.threshold = max(limit, min(_RAISED * distance, most))
        return found

    def _stop(self, said: str, found: Diagnosis) -> None:
        if self.on_mismatch == "warn":
            logger.warning("%s (on_mismatch='warn': going on)", said)
            return
        error = PolicyMismatchError(
            f"watching the rollouts: {said}. The policy would learn from what another one has sampled. The run "
            "directory holds the last adapter; fix the cause, or pass on_mismatch='warn' to go on.",
            reasons=[found.sentence],
            module=found.module,
        )
        error.cause = found.cause
        raise error


# Fields of vLLM's SamplingParams that end completions, or choose what is returned.
_SHAPE_NOTHING = {
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "repetition_detection",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "flat_logprobs",
    "skip_reading_prefix_cache",
    "stream_interval",
}


def filters_of(sampling: SamplingSpec, truncated: TruncatedSampling | None = None) -> tuple[str, ...]:
    """What shapes the engine's distribution other than the temperature, and the trainer does not know of.

    Args:
        sampling: of the rollouts.
        truncated: what the trainer's logprobs follow.
    """
    plain = SamplingSpec()
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "regex")
    set_here = {name: getattr(sampling, name) for name in names if getattr(sampling, name) != getattr(plain, name)}
    # Of all others 0 and nothing change nothing. `min_tokens` does: before them no token is sampled that ends.
    set_here |= {name: value for name, value in sampling.extra.items() if value and name not in _SHAPE_NOTHING}
    if set_here.get("top_k") == -1:
        del set_here["top_k"]
    for name in () if truncated is None else TRUNCATING:
        set_here.pop(name, None)
    return tuple(f"{name}={value!r}" for name, value in set_here.items())


def sampled_from(
    output: Mapping[str, Any],
    mask_BT: torch.Tensor,
    temperature: float,
    filters: tuple[str, ...] = (),
    truncated: TruncatedSampling | None = None,
    *,
    sequences: int = SEQUENCES,
) -> Sampled:
    """Some completions of TRL's batch, evenly spread, as far as their first 64 tokens.

    Args:
        output: of TRL's `_generate_and_score_completions`; with "parts", the micro-batches that its rows are of, in
            their order.
        mask_BT: nonzero where the policy sampled.
        temperature: by which the trainer divides its logits.
        filters: see `filters_of`.
        truncated: what the logprobs of both sides are of.
        sequences: at most so many.
    """
    both = zip(output["prompt_ids"].tolist(), output["completion_ids"].tolist(), strict=True)
    texts = {(tuple(p), tuple(c)): i for i, (p, c) in enumerate(both) if bool(mask_BT[i].any())}
    rows = sorted(texts.values())  # each text once
    rows = rows[:: max(1, math.ceil(len(rows) / sequences))]
    prompts, completions, logprobs = [], [], []
    for i in rows:
        prompts.append(output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist())
        length = min(TOKENS, int(mask_BT[i].nonzero().max()) + 1)
        completions.append(output["completion_ids"][i, :length].tolist())
        values = output["sampling_per_token_logps"][i, :length].tolist()
        mask = mask_BT[i, :length].tolist()
        logprobs.append([None if not m or math.isnan(v) else v for v, m in zip(values, mask, strict=True)])
    images = tuple(_images_of(output, i) for i in rows)
    has_images = bool(output.get("has_images")) or output.get("pixel_values") is not None
    found = Sampled(prompts, completions, logprobs, temperature or 1.0, filters, truncated)
    return replace(found, images=images) if any(images) else replace(found, has_images=has_images)


def _images_of(output: Mapping[str, Any], row: int) -> dict[str, torch.Tensor]:
    """What the model is given for the images of one row: of the batch, or of the micro-batch that it is in; empty for a
    row of text."""
    for part in output.get("parts") or [output]:
        if row < len(part["prompt_ids"]):
            break
        row -= len(part["prompt_ids"])
    if part.get("pixel_values") is None or "num_images" not in part or not part["num_images"][row]:
        return {}
    names = [name for name in _OF_IMAGES if part.get(name) is not None]
    split = split_pixel_values_by_grid({name: part[name] for name in (*names, "num_images")})
    if isinstance(split["pixel_values"], torch.Tensor):  # in a form that TRL does not split
        return {}
    mask = part["prompt_mask"][row].bool()
    per_token = {name: part[name][row, : len(mask)][mask][None] for name in _PER_TOKEN if part.get(name) is not None}
    return {name: split[name][row] for name in names} | per_token


def few_of(output: Mapping[str, Any], mask_BT: torch.Tensor) -> Sampled:
    """Of TRL's batch what `observe_again` scores at every push: 256 tokens, of eight completions at most."""
    length = max(1, min(TOKENS, int(mask_BT.sum(1).max())))
    count = max(1, min(_AGAIN, 4 * TOKENS // length))
    # Of each batch, so only few rows are read: some more than needed, as texts may be equal.
    apart = max(1, mask_BT.shape[0] // (4 * count))
    names = ("prompt_ids", "prompt_mask", "completion_ids", "sampling_per_token_logps")
    return sampled_from({name: output[name][::apart] for name in names}, mask_BT[::apart], 1.0, sequences=count)


def merged(parts: Sequence[Sampled]) -> Sampled:
    """What several ranks have sampled, as one; no more of it than one would examine."""
    if len(parts) == 1:
        return parts[0]
    rows = [row for part in parts for row in zip(part.prompts, part.completions, part.logprobs, strict=True)]
    rows = rows[:: max(1, math.ceil(len(rows) / SEQUENCES))]
    prompts, completions = [row[0] for row in rows], [row[1] for row in rows]
    return Sampled(
        prompts,
        completions,
        [row[2] for row in rows],
        parts[0].temperature,
        parts[0].filters,
        parts[0].truncated,
        has_images=any(part.has_images or any(part.images) for part in parts),
    )


def worst(found: Sequence[Diagnosis]) -> Diagnosis:
    """Of what several ranks have found the one that tells most."""
    return min(found, key=lambda d: (not d.is_verified, not d.is_fault, d.cause in ("noise", "dropout")))


def alarm_for(
    link: Link,
    model: Any,
    args: Any,
    on_mismatch: str,
    *,
    rollout_func: Any = None,
    truncated: TruncatedSampling | None = None,
) -> MismatchAlarm | None:
    """The alarm of a trainer; none where nobody gives the logprobs of sampled tokens, which is logged.

    Args:
        link: policy and engine.
        model: the policy.
        args: of TRL: precision.
        on_mismatch: as the trainer takes it.
        rollout_func: TRL's: what it returns was not sampled by the bridge.
        truncated: the trainer's logprobs are of what this keeps, as the engine's are.
    """
    if not link.bridge.knows_logprobs(rollout_func):
        logger.warning(
            "%s gives no logprobs of the tokens that it samples: the mismatch alarm is off, rollouts are trained on "
            "without importance sampling correction (vllm_importance_sampling_correction), and %s",
            link.engine.capabilities().name,
            "the canary alone compares engine and policy"
            if link.strategy.canary
            else "nothing compares engine and policy",
        )
        return None
    autocast = autocast_dtype(args)
    expected = list(filters_of(link.bridge.sampling, truncated))
    expected += ["rollout_func"] if rollout_func is not None else []
    expected += [] if link.base_check.is_verified else ["another base is allowed"]
    examiner = MismatchDebugger(model, link.engine, link.strategy, link.base_check, autocast)

    def examine(sampled: Sampled, limit: float) -> Diagnosis:
        # All ranks look at the same tokens, each with its own engine, and believe the same.
        sampled = merged(ranks().gather(sampled, "examining the rollouts"))
        with link.bridge.alone():  # threads may be sampling
            found = examiner.examine(sampled, limit)
        return worst(ranks().gather(found, "examining the rollouts"))

    def rescore(sampled: Sampled) -> tuple[Sampled, float]:
        again, distance = examiner.rescore(merged(ranks().gather(sampled, "scoring rollouts again")))
        found = ranks().gather(distance, "scoring rollouts again")
        return again, float("nan") if any(map(math.isnan, found)) else max(found)

    return MismatchAlarm(
        examine,
        rescore,
        on_mismatch=on_mismatch,
        dtype=link.engine.capabilities().adapter_dtype,
        expected=expected,
        rounding=link.rounding,
    )
