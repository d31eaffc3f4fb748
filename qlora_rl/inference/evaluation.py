"""`evaluate`: rewards of the base and of the policy on the same prompts, sampled by one engine.

Shape letters: P prompts, G completions of a prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

from transformers import AutoConfig, TrainerState

from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.base.model_classes import load_processor
from qlora_rl.base.unsupported_configs import engine_positions
from qlora_rl.contracts import SamplingSpec
from qlora_rl.engine.images import token_ids
from qlora_rl.errors import ConfigConflictError, RunDirectoryError, raise_where
from qlora_rl.image_io import as_thumbnails
from qlora_rl.inference.prompts import encode, with_images
from qlora_rl.inference.rows import as_trained
from qlora_rl.inference.sampling import check_sampling
from qlora_rl.inference.trained import TrainedRun
from qlora_rl.locks import replace_file
from qlora_rl.stages import begin, ended

RESULT = "eval.json"  # in the run directory; the report shows it
_SAMPLES_KEPT = 24


@dataclass(frozen=True)
class Mean:
    """A mean over prompts, and its standard error (`None` from one prompt)."""

    value: float
    error: float | None
    prompts: int

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if self.error is None else f" ± {self.error:.3f}")


@dataclass(frozen=True)
class Compared:
    """One reward on both sides; the difference is paired, prompt by prompt."""

    base: Mean
    policy: Mean
    difference: Mean


@dataclass(frozen=True)
class Side:
    """What one policy answers, P·G completions, those of a prompt together.

    Attributes:
        texts: without special tokens.
        rewards: by name of the reward function; `None`: not scored.
        length: mean tokens of a completion.
        cut_off: share of the completions that were cut off at the limit.
    """

    texts: list[str]
    rewards: dict[str, list[float | None]]
    length: float
    cut_off: float


# Asks one policy all prompts: whose answers they are (for people), reward functions by name, completions per prompt.
Ask = Callable[[str, Mapping[str, Callable[..., Any]], int], Side]


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        rewards: by name of the reward function.
        lengths: mean tokens of a completion: of the base, of the policy.
        cut_off: share of the completions that were cut off at the limit: of the base, of the policy.
        prompts: P.
        samples: G.
        sampling: how the completions were sampled.
        rows: some prompts with the completions and rewards of both sides.
    """

    rewards: dict[str, Compared]
    lengths: tuple[float, float]
    cut_off: tuple[float, float]
    prompts: int
    samples: int
    sampling: SamplingSpec
    rows: list[dict[str, Any]]

    def __str__(self) -> str:
        heads = ("", "base", "policy", "difference")
        rows: list[tuple[str, ...]] = [
            (name, str(each.base), str(each.policy), ("+" if each.difference.value >= 0 else "") + str(each.difference))
            for name, each in self.rewards.items()
        ]
        rows.append(("tokens", *(f"{each:.1f}" for each in self.lengths), ""))
        rows.append(("cut off", *(f"{each:.3f}" for each in self.cut_off), ""))
        widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [heads, *rows]
        ]
        each = "one completion" if self.samples == 1 else f"{self.samples} completions"
        lines.append(
            f"{self.prompts} prompts, {each} each, temperature {self.sampling.temperature:g}; ± is one standard error"
        )
        if any(self.cut_off):
            lines.append(
                f"Completions that were cut off after {self.sampling.max_tokens} tokens, or at the model's last "
                "position, were scored without their end. --max-tokens sets the limit."
            )
        return "\n".join(lines)


@ended()
def evaluate(
    trained: TrainedRun,
    rows: Sequence[Mapping[str, Any]],
    rewards: Mapping[str, Callable[..., Any]],
    *,
    samples: int = 1,
    sampling: SamplingSpec | None = None,
    engine_options: Mapping[str, Any] | None = None,
    are_as_trained: bool = False,
) -> Evaluation:
    """Sample from the base, then from the policy, in one vLLM, and score both.

    Args:
        trained: the run.
        rows: of a dataset: "prompt" (text or messages), "image" or "images" (PIL images, of a vision-language model),
            and the columns that the rewards read; or columns out of which [data] of the run's file makes these
            (`as_trained`).
        rewards: reward functions with TRL's signature.
        samples: G.
        sampling: by default greedy, and as many tokens as in the training of the run, 256 where it sampled nothing.
        engine_options: of `LocalEngine`.
        are_as_trained: the rows are what [data] makes of its own (`data.load.load_eval`), and stay as they are.

    Raises:
        ConfigConflictError: there is nothing to ask, a number is out of its range, or G > 1 greedy completions are
            asked for, which would be equal.
        RewardFunctionError: a reward function raised, or returned nonsense.
    """
    from qlora_rl.train.metrics.rewards import check_signature

    sampling = sampling or SamplingSpec(trained.max_tokens, temperature=0.0, seed=0)
    sampling = replace(sampling, stop_token_ids=trained.ends, extra={**trained.stop, **sampling.extra})
    rows = [dict(row) for row in rows] if are_as_trained else as_trained(rows, trained.data)
    if not rows or any(not isinstance(row.get("prompt"), str | list) for row in rows):
        raise ConfigConflictError(
            'evaluating: each row needs a column "prompt" with text or messages, and there must be one.'
        )
    check_sampling("evaluating", sampling.max_tokens, sampling.temperature, sampling.top_p)
    raise_where(
        "evaluating",
        [
            (samples < 1, f"samples={samples} is not at least 1."),
            (
                samples > 1 and sampling.temperature == 0,
                f"samples={samples} at temperature 0 are all equal. Raise the temperature.",
            ),
            (not rewards, "no reward function. Pass one, such as numeric_match, or path.py:function."),
        ],
    )
    for name, reward in rewards.items():
        check_signature(reward, [column for row in rows for column in row], name)
    with both_sides(trained, rows, sampling, engine_options or {}) as (ask, serve_policy):
        base = ask("base", rewards, samples)
        serve_policy()
        policy = ask("policy", rewards, samples)
    return Evaluation(
        rewards={name: compare(base.rewards[name], policy.rewards[name], samples, name) for name in rewards},
        lengths=(base.length, policy.length),
        cut_off=(base.cut_off, policy.cut_off),
        prompts=len(rows),
        samples=samples,
        sampling=sampling,
        rows=_kept(rows, base, policy, samples),
    )


def compare(
    base: Sequence[float | None], policy: Sequence[float | None], samples: int, name: str = "reward"
) -> Compared:
    """Means over prompts of P·G rewards a side, the G of a prompt together; `None` is left out.

    Raises:
        ConfigConflictError: not one reward is a number.
    """
    of_prompts = [_per_prompt(side, samples) for side in (base, policy)]
    pairs = [(a, b) for a, b in zip(*of_prompts, strict=True) if a is not None and b is not None]
    if not pairs:
        raise ConfigConflictError(
            f"evaluating: {name} returned no number for any prompt. Check the columns that it reads."
        )
    return Compared(
        _mean([a for a in of_prompts[0] if a is not None]),
        _mean([b for b in of_prompts[1] if b is not None]),
        _mean([b - a for a, b in pairs]),
    )


def save(evaluation: Evaluation, trained: TrainedRun, asked: Mapping[str, Any]) -> Path:
    """Write eval.json into the run directory, for the report; an older one is replaced.

    Args:
        evaluation: what was measured.
        trained: the run, or a checkpoint in it: eval.json says after which step.
        asked: what else it is to say.
    """
    asked = {**asked, "step": trained.step}
    target = trained.path / RESULT
    content = json.dumps({"asked": dict(asked), **asdict(evaluation)}, indent=1, default=str) + "\n"  # a date, say
    try:
        replace_file(target, content.encode())
    except OSError as error:
        raise RunDirectoryError(
            f"writing {target}: {error.strerror}. Free some space, or leave it out: --no-save."
        ) from error
    return target


@contextmanager
def asking(
    base: PreparedBase,
    rows: Sequence[Mapping[str, Any]],
    sampling: SamplingSpec,
    template: Mapping[str, Any],
    options: Mapping[str, Any],
    tokenizer: Any = None,
) -> Iterator[tuple[Any, Ask]]:
    """An engine on the base, long enough for these rows, and what asks it all of them.

    Args:
        base: prepared.
        rows: each with a "prompt".
        sampling: of all completions.
        template: further arguments of the chat template.
        options: of `LocalEngine`.
        tokenizer: of the rows, or the processor; by default that of the base.
    """
    from qlora_rl.engine.local import LocalEngine
    from qlora_rl.train.metrics.rewards import guard

    tokenizer = load_processor(base.path) if tokenizer is None else tokenizer
    ids = [encode(tokenizer, _with_images(row), **template) for row in rows]
    lengths = [len(token_ids(each)) for each in ids]
    length = min(max(lengths) + sampling.max_tokens, engine_positions(AutoConfig.from_pretrained(base.path)))
    begin("starting vLLM on the base")
    with LocalEngine(base, **{"max_model_length": length, "use_tqdm_on_load": False} | dict(options)) as engine:

        def ask(whose: str, rewards: Mapping[str, Callable[..., Any]], samples: int) -> Side:
            begin(f"sampling from the {whose}: {len(ids) * samples} completions")
            rollout = engine.generate([each for each in ids for _ in range(samples)], sampling)
            found = rollout.completion_ids
            begin("calling the rewards")
            texts = tokenizer.batch_decode(found, skip_special_tokens=True)
            asked = [dict(row) for row in rows for _ in range(samples)]
            scores = {
                name: _score(guard(each, name), asked, texts, found, _of_trl(each)) for name, each in rewards.items()
            }
            cut_off = fmean(not each for each in rollout.has_ended)  # vLLM says it of each
            return Side(texts, scores, fmean(map(len, found)), cut_off)

        yield engine, ask


@contextmanager
def both_sides(
    trained: TrainedRun, rows: Sequence[Mapping[str, Any]], sampling: SamplingSpec, options: Mapping[str, Any]
) -> Iterator[tuple[Ask, Callable[[], None]]]:
    """One engine for base and policy: what asks it, at first the base, and what makes it serve the policy."""
    from qlora_rl.adapter.export import read_adapter
    from qlora_rl.adapter.merged_weights import iter_weights
    from qlora_rl.adapter.store import write_adapter
    from qlora_rl.adapter.verdict import judge_adapter
    from qlora_rl.base.bake import bake_base

    base = trained.base
    verdict = judge_adapter(trained.adapter, base=base) if trained.adapter is not None else None
    bundle = read_adapter(trained.adapter, base) if verdict else None
    held = base if bundle is not None or not base.spec.is_4bit else bake_base(base)
    options = {"max_lora_rank": bundle.rank if bundle else 0, **options}
    with (
        tempfile.TemporaryDirectory(prefix="qlora-rl-eval-") as directory,
        asking(held, rows, sampling, trained.template_kwargs, options, trained.processor()) as (engine, ask),
    ):

        def serve_policy() -> None:
            if bundle is not None:
                write_adapter(bundle, Path(directory))
                engine.load_adapter(Path(directory), 1)
            else:
                engine.load_dense(iter_weights(trained.load(), dtype=held.spec.dtype), 1)

        yield ask, serve_policy


def _with_images(row: Mapping[str, Any]) -> Any:
    """The prompt of a row, with its images in the messages."""
    images = row.get("images") or [row.get("image")]
    seen = [each for each in images if hasattr(each, "convert")]  # other rows may have texts there
    return with_images(row["prompt"], seen) if seen and not isinstance(row["prompt"], str) else row["prompt"]


def _of_trl(reward: Callable[..., Any]) -> dict[str, Any]:
    """Of what TRL gives reward functions about a training that which this one cannot be called without."""
    known = {"trainer_state": TrainerState(), "log_extra": lambda *_: None, "log_metric": lambda *_: None}
    needed = [each.name for each in inspect.signature(reward).parameters.values() if each.default is each.empty]
    return {name: value for name, value in known.items() if name in needed}


def _score(
    reward: Callable[..., Any],
    rows: Sequence[Mapping[str, Any]],
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    further: Mapping[str, Any],
) -> list[float | None]:
    """Call a reward function as TRL does: keyword lists, messages for prompts that are messages."""
    prompts = [row["prompt"] for row in rows]
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    columns = {
        name: [row.get(name) for row in rows]
        for name in dict.fromkeys(k for row in rows for k in row)
        if name != "prompt"
    }
    found: Any = reward(
        prompts=prompts, completions=completions, completion_ids=[list(each) for each in ids], **columns, **further
    )
    return asyncio.run(cast(Any, found)) if inspect.isawaitable(found) else found


def _per_prompt(rewards: Sequence[float | None], samples: int) -> list[float | None]:
    groups = [rewards[i : i + samples] for i in range(0, len(rewards), samples)]
    known = [[value for value in group if value is not None and not math.isnan(value)] for group in groups]
    return [fmean(values) if values else None for values in known]


def mean_of(rewards: Sequence[float | None], samples: int) -> Mean | None:
    """Mean over prompts of the P·G rewards of one side; what is not scored is left out, and nothing where all is."""
    found = [each for each in _per_prompt(rewards, samples) if each is not None]
    return _mean(found) if found else None


def _mean(values: Sequence[float]) -> Mean:
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Mean(fmean(values), error, len(values))


def _kept(rows: Sequence[Mapping[str, Any]], base: Side, policy: Side, samples: int) -> list[dict[str, Any]]:
    """The first completion of some prompts, evenly chosen, with the rewards of both sides."""
    step = max(1, len(rows) // _SAMPLES_KEPT)
    kept = []
    for i in list(range(0, len(rows), step))[:_SAMPLES_KEPT]:
        row: dict[str, Any] = {"prompt": as_thumbnails(_with_images(rows[i]))}
        if "answer" in rows[i]:
            row["answer"] = rows[i]["answer"]
        for when, side in (("before", base), ("after", policy)):
            row[when] = side.texts[i * samples]
            row[f"{when}_rewards"] = {name: values[i * samples] for name, values in side.rewards.items()}
        kept.append(row)
    return kept
