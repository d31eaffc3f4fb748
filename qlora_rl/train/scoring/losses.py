"""Losses of tokens, by the names and definitions of Tinker's API: what its documentation writes as sums over tokens.

Letters: N tokens that are scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from qlora_rl.errors import ConfigConflictError

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingRow:
    """One sequence.

    Attributes:
        tokens: that the model reads.
        targets: for each of them the token that is scored behind it; as a rule the tokens moved by one.
        inputs: values for each target, by name: `weights` for cross_entropy; `logprobs` (when it was sampled) and
            `advantages` for the others. A loss rejects those that it does not take.
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    inputs: Mapping[str, Sequence[float]] = field(default_factory=dict)


def _cross_entropy(logprobs_N: torch.Tensor, given: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    return -logprobs_N * given["weights"]


def _ratio(logprobs_N: torch.Tensor, given: Tensors) -> torch.Tensor:
    # Where the advantage is 0 nothing is learnt, whatever the ratio: it may be infinite there.
    return (logprobs_N - given["logprobs"]).masked_fill(given["advantages"] == 0, 0.0).exp()


def _importance_sampling(logprobs_N: torch.Tensor, given: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    return -_ratio(logprobs_N, given) * given["advantages"]


def _clipped(ratio_N: torch.Tensor, config: Mapping[str, float]) -> torch.Tensor:
    return ratio_N.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def _ppo(logprobs_N: torch.Tensor, given: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    ratio_N, advantages_N = _ratio(logprobs_N, given), given["advantages"]
    return -torch.minimum(ratio_N * advantages_N, _clipped(ratio_N, config) * advantages_N)


def _cispo(logprobs_N: torch.Tensor, given: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    return -_clipped(_ratio(logprobs_N, given), config).detach() * logprobs_N * given["advantages"]


def _dro(logprobs_N: torch.Tensor, given: Tensors, config: Mapping[str, float]) -> torch.Tensor:
    apart_N = logprobs_N - given["logprobs"]
    return -(logprobs_N * given["advantages"] - 0.5 * config["beta"] * apart_N**2)


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")
# Function of logprobs, inputs and config; inputs that it takes; its config, with defaults.
_LOSSES: dict[
    str,
    tuple[Callable[[torch.Tensor, Tensors, Mapping[str, float]], torch.Tensor], tuple[str, ...], dict[str, float]],
] = {
    "cross_entropy": (_cross_entropy, ("weights",), {}),
    "importance_sampling": (_importance_sampling, _SAMPLED, {}),
    "ppo": (_ppo, _SAMPLED, _CLIP),
    "cispo": (_cispo, _SAMPLED, _CLIP),
    "dro": (_dro, _SAMPLED, {"beta": 0.05}),
}
LOSSES = tuple(_LOSSES)


@dataclass(frozen=True)
class TokenLoss:
    """A loss and its settings.

    Args:
        name: one of `LOSSES`.
        config: `clip_low_threshold` and `clip_high_threshold` of ppo and cispo (0.8, 1.2), `beta` of dro (0.05).

    Raises:
        ConfigConflictError: there is no such loss, it has no such setting, or not 0 <= low <= high.
    """

    name: str
    config: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in _LOSSES:
            raise ConfigConflictError(f"choosing a loss: {self.name!r} is not offered. Use one of {', '.join(LOSSES)}.")
        known = _LOSSES[self.name][2]
        wrong = [key for key, value in self.config.items() if key not in known or not _is_finite(value)]
        if wrong:
            raise ConfigConflictError(
                f"choosing a loss: {self.name} takes no {wrong[0]}={self.config[wrong[0]]!r}. It takes numbers for: "
                f"{', '.join(known) or 'nothing'}."
            )
        thresholds = [{**known, **self.config}[key] for key in _CLIP if key in known]
        if [0, *thresholds] != sorted([0, *thresholds]):
            raise ConfigConflictError(
                f"choosing a loss: {self.name} clips to {thresholds}. The thresholds are 0 <= low <= high."
            )

    def __call__(self, logprobs_N: torch.Tensor, given: Tensors) -> torch.Tensor:
        """The loss of each token, [N], float32."""
        function, _, defaults = _LOSSES[self.name]
        return function(logprobs_N, given, {**defaults, **self.config})

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that each row brings."""
        return _LOSSES[self.name][1]

    def check(self, rows: Sequence[TrainingRow], vocabulary: int, longest: int) -> None:
        """Look at rows before anything is computed.

        Args:
            vocabulary: tokens that there are.
            longest: tokens of a row at most.

        Raises:
            ConfigConflictError: names the first row that is wrong, and why.
        """
        if not rows:
            raise ConfigConflictError("computing a loss: there are no rows.")
        for number, row in enumerate(rows):
            if why := self._why_not(row, vocabulary, longest):
                raise ConfigConflictError(f"computing {self.name}: row {number} {why}.")

    def _why_not(self, row: TrainingRow, vocabulary: int, longest: int) -> str:
        count = len(row.tokens)
        if not 0 < count <= longest:
            return f"has {count} tokens; at least 1 and at most {longest} fit"
        if len(row.targets) != count:
            return f"has {len(row.targets)} target_tokens for {count} tokens"
        if not all(0 <= token < vocabulary for each in (row.tokens, row.targets) for token in each):
            return f"has a token outside of the vocabulary of {vocabulary}"
        if unknown := sorted(row.inputs.keys() - set(self.inputs)):
            return f"has {', '.join(unknown)}; this loss takes {' and '.join(self.inputs)}, and nothing else"
        for name in self.inputs:
            values = row.inputs.get(name)
            if values is None or len(values) != count:
                return f"has {'no' if values is None else len(values)} {name} for {count} target_tokens"
            if not all(map(_is_finite, values)):
                return f"has {name} that are not finite"
        return ""


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
