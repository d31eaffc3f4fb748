"""Losses of tokens, by the names and definitions of Tinker's API: what its documentation writes as sums over tokens.

Letters: N tokens that are scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qlora_rl.errors import ConfigConflictError

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingRow:
    """One sequence. `TrainingRow.of` makes it of a prompt and a completion.

    Arrays and tensors are taken, too, and held as lists.

    Attributes:
        tokens: that the model reads.
        targets: for each of them the token that is scored behind it; as a rule the tokens moved by one.
        inputs: values for each target, by name: `weights` for cross_entropy; `logprobs` (when it was sampled) and
            `advantages` for the others. A loss rejects those that it does not take.

    Raises:
        ConfigConflictError: something is not one number for each token.
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    inputs: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tokens", "targets"):
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        object.__setattr__(self, "inputs", {name: _listed(name, values) for name, values in self.inputs.items()})

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        completion: Sequence[int],
        logprobs: Sequence[float | None] | None = None,
        advantages: float | Sequence[float] | None = None,
        *,
        weights: float | Sequence[float] | None = None,
    ) -> TrainingRow:
        """A completion behind its prompt; nothing is learnt from the prompt itself.

        Args:
            prompt: token ids, at least one.
            completion: token ids.
            logprobs: of the completion, as `Rollout` has them. With `advantages` the row is one for
                importance_sampling, ppo, cispo and dro; without both for cross_entropy.
            advantages: of the whole completion, or of each of its tokens.
            weights: for cross_entropy, of the whole completion, or of each of its tokens; by default 1.

        Raises:
            ConfigConflictError: there is no prompt, a list is not as long as the completion, or there are weights next
                to advantages.
        """
        before, behind = _listed("prompt", prompt), _listed("completion", completion)
        if (logprobs is None) != (advantages is None):
            raise ConfigConflictError(
                "making a row: logprobs and advantages go together. Give both, or neither for cross_entropy."
            )
        if logprobs is not None and weights is not None:
            raise ConfigConflictError(
                "making a row: weights are for cross_entropy, and the losses that take advantages take none. Use an "
                "advantage of 0 for a token from which nothing is learnt."
            )
        given = {"logprobs": logprobs, "advantages": advantages}
        if logprobs is None:
            given = {"weights": 1.0 if weights is None else weights}
        if not before:
            raise ConfigConflictError("making a row: the prompt is empty. Begin it with the tokenizer's first token.")
        inputs = {}
        for name, values in given.items():
            number = as_number(values)
            each = [number] * len(behind) if isinstance(number, int | float) else _listed(name, values)
            if len(each) != len(behind):
                raise ConfigConflictError(
                    f"making a row: there are {len(each)} {name} for a completion of {len(behind)} tokens. Give one "
                    "for each token of the completion, and none for the prompt."
                )
            inputs[name] = [0.0] * (len(before) - 1) + each
        tokens = [*before, *behind]
        return cls(tokens[:-1], tokens[1:], inputs)


_NUMBERS = {int, float, type(None)}


def as_number(value: Any) -> Any:
    """A number of numpy's or torch's as Python's; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _listed(name: str, values: Any) -> list[Any]:
    if type(values) is list and set(map(type, values)) <= _NUMBERS:
        return list(values)  # the usual ones, of which there may be millions
    found = values.tolist() if hasattr(values, "tolist") else values
    listed = list(map(as_number, found)) if isinstance(found, Iterable) else [found, ...]
    if not all(each is None or isinstance(each, int | float) for each in listed):
        raise ConfigConflictError(f"making a row: {name} is no list of numbers. Give one for each token.")
    return listed


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
        object.__setattr__(self, "config", {key: as_number(value) for key, value in self.config.items()})
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
            return f"has {len(row.targets)} target_tokens for {count} tokens; one is needed for each"
        tokens = [*row.tokens, *row.targets]
        if not all(isinstance(token, int) and 0 <= token < vocabulary for token in tokens):
            return f"has a token that is no whole number in the vocabulary of {vocabulary}"
        if unknown := sorted(row.inputs.keys() - set(self.inputs)):
            return f"has {', '.join(unknown)}; this loss takes {' and '.join(self.inputs)}, and nothing else"
        for name in self.inputs:
            values = row.inputs.get(name)
            if values is None or len(values) != count:
                return (
                    f"has {'no' if values is None else len(values)} {name} for {count} target_tokens; this loss takes "
                    f"{' and '.join(self.inputs)}, one for each"
                )
            if not all(map(_is_finite, values)):
                return f"has {name} that are not finite numbers"
        return ""


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
