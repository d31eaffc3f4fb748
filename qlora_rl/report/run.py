"""What a run left in its directory, read with patience: a file may be missing, cut short, or hold anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from qlora_rl.documents import parse_object
from qlora_rl.locks import is_held
from qlora_rl.methods import METHODS, TAUGHT

from ..errors import RunDirectoryError
from .parts import object_in
from .quantities import finite

_LAST_STEP = 1e12  # a larger "step" is not one, and would stretch the axis beyond reading
STATUSES = ("finished", "interrupted", "failed")


@dataclass(frozen=True)
class Run:
    """One run's records. `problems` says, in words, what could not be read and was skipped.

    `metrics` holds one record per step, in order of steps; where a resumed run wrote a step twice, the later one.
    `evaluations` holds likewise those lines that an evaluation has written while it trained; the first may be at step
    0. `is_held`: a living process has the directory.
    """

    path: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    rollouts: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    is_held: bool = False

    @property
    def status(self) -> str:
        """`finished`, `interrupted`, `failed`; where nothing says how the run ended, `running` or `unfinished`."""
        status = self.summary.get("status")
        return status if status in STATUSES else "running" if self.is_held else "unfinished"

    @property
    def is_online(self) -> bool:
        """Answers were sampled and scored; otherwise it was trained on examples and has only a loss."""
        return not self.values("loss") or any(
            self.values(name) for name in ("reward", "rollout_seconds", "mismatch_kl")
        )

    @property
    def is_taught(self) -> bool:
        """Answers were sampled, and a teacher has said what it would have said; there are no rewards."""
        return any(isinstance(self.config.get(METHODS[name].record), dict) for name in TAUGHT)

    @property
    def is_async(self) -> bool:
        """Answers were sampled while the model was trained on earlier ones."""
        return bool(self.values("trainer_wait_seconds"))

    @property
    def hits(self) -> str | None:
        """The column that says how often the model is right, of a run that learned from examples."""
        names = () if self.is_online else ("rewards/accuracies", "mean_token_accuracy")
        return next((name for name in names if self.values(name)), None)

    @property
    def planned_steps(self) -> float | None:
        """Steps that it was to do, where that was said."""
        said = (finite(self.config.get("steps")), self.argument("max_steps"))
        return next((steps for steps in said if steps is not None and steps > 0), None)

    def argument(self, name: str) -> float | None:
        """A number of TRL's config."""
        of_trl = [self.config.get(method.record) for method in METHODS.values()]
        found = (finite(each.get(name)) for each in of_trl if isinstance(each, dict))
        return next((each for each in found if each is not None), None)

    @property
    def steps(self) -> list[float]:
        """The step of each record, rising."""
        return [record["step"] for record in self.metrics]

    def column(self, name: str) -> list[float | None]:
        """One value per step; `None` where it is absent, null, NaN or beyond reckoning."""
        return [finite(record.get(name)) for record in self.metrics]

    def values(self, name: str) -> list[float]:
        """The finite values of a column."""
        return [value for value in self.column(name) if value is not None]


def read_run(run_dir: Path | str) -> Run:
    """The run in this directory, as far as it can be read.

    Raises:
        RunDirectoryError: there is no such directory. Missing or damaged files inside it only add to `problems`.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise RunDirectoryError(
            f"reading a run: run_dir={str(path)!r} is not a directory. Pass the directory that the run wrote."
        )
    problems: list[str] = []
    config = _read_json(path / "config.json", problems)
    lines = _read_lines(path / "metrics.jsonl", problems)
    metrics = _number_steps([line for line in lines if not _is_evaluation(line)])
    evaluations = _number_steps([line for line in lines if _is_evaluation(line)])
    summary = _read_json(path / "summary.json", problems)
    rollouts, evaluation = (_read_json(path / name, problems) for name in ("rollouts.json", "eval.json"))
    name = path.resolve().name
    return Run(
        path,
        name,
        config,
        metrics,
        evaluations,
        summary,
        rollouts,
        evaluation,
        tuple(problems),
        is_held(path),
    )


def _read_text(path: Path, problems: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        problems.append(f"{path.name} could not be read ({error.strerror or type(error).__name__}).")
        return ""


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    text = _read_text(path, problems)
    try:
        return parse_object(text) if text.strip() else {}
    except ValueError as error:
        problems.append(f"{path.name} could not be read ({error}); it was left out.")
        return {}


def _read_lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    records, damaged, is_last_damaged = [], 0, False
    for line in _read_text(path, problems).split("\n"):
        if not line.strip():
            continue
        is_last_damaged = False
        try:
            records.append(parse_object(line))
        except ValueError:
            damaged, is_last_damaged = damaged + 1, True
    if is_last_damaged:
        damaged -= 1
        problems.append(f"The last line of {path.name} is cut off; it was skipped.")
    if damaged:
        problems.append(f"{damaged} damaged line{'s' if damaged > 1 else ''} in {path.name} skipped.")
    return records


def _is_evaluation(line: dict[str, Any]) -> bool:
    return line.keys() > {"step"} and all(name == "step" or name.startswith("eval_") for name in line)


def _number_steps(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_step: dict[float, dict[str, Any]] = {}
    last = 0.0
    for record in records:
        step = finite(record.get("step"))
        last = last + 1 if step is None or abs(step) > _LAST_STEP else step
        by_step[last] = {**record, "step": last}
    return [by_step[step] for step in sorted(by_step)]


def summarise(run: Run) -> dict[str, float | None]:
    """The run in numbers: what `summary.json` says and, where it is silent, what the steps say.

    `reward_first` and `reward_last` (`loss_…` and `hits_…` of a run without rewards) are then means over a tenth of the
    steps (ten at most), because one step is noise.
    """
    rewards = run.values("reward")
    losses = run.values("loss") if run.is_taught or not run.is_online else []
    hits = run.values(run.hits) if run.hits else []
    kl = run.values("mismatch_kl")
    held_out = [value for each in run.evaluations if (value := finite(each.get("eval_reward"))) is not None]
    step_seconds = run.values("step_seconds")
    done = len(run.metrics)
    measured: dict[str, float | None] = {
        **_ends("reward", rewards),
        **_ends("loss", losses),
        **_ends("hits", hits),
        **_evaluated(run),
        "held_out_first": held_out[0] if held_out else None,
        "held_out_last": held_out[-1] if held_out else None,
        "mismatch_kl_median": _over(median, kl),
        "mismatch_kl_p95": _over(_p95, kl),
        "mismatch_kl_max": _over(max, kl),
        "sync_seconds_median": _over(median, run.values("sync_seconds")),
        "sync_bytes_median": _over(median, run.values("sync_bytes")),
        "step_seconds_median": _over(median, step_seconds),
        "rollout_tokens_per_s": _over(median, run.values("rollout_tokens_per_s")),
        "step_seconds_mean": _over(fmean, step_seconds),
        "ess_median": _over(median, run.values("ess")),
        "masked_share_mean": _over(fmean, run.values("masked_share")),
        "steps": float(done),
        "seconds": _over(sum, step_seconds),
    }
    said = {key: finite(run.summary.get(key)) for key in measured}
    said["seconds"] = finite(run.summary.get("train_seconds")) or said["seconds"]  # without start and evaluations
    return {key: value if said[key] is None else said[key] for key, value in measured.items()}


def _evaluated(run: Run) -> dict[str, float | None]:
    """Of `qlora-rl eval`, with one reward function: before, after, the standard error of their difference, prompts."""
    rewards = [each for each in object_in(run.evaluation, "rewards").values() if isinstance(each, dict)]
    known = rewards[0] if len(rewards) == 1 else {}
    found = {
        "eval_before": object_in(known, "base").get("value"),
        "eval_after": object_in(known, "policy").get("value"),
        "eval_error": object_in(known, "difference").get("error"),
        "eval_prompts": run.evaluation.get("prompts") if known else None,
    }
    return {name: finite(value) for name, value in found.items()}


def _p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def end_window(count: int) -> int:
    """How many steps at either end of `count` are taken together: a tenth, ten at most."""
    return min(10, max(1, count // 10))


def _ends(name: str, values: Sequence[float]) -> dict[str, float | None]:
    window = end_window(len(values))
    return {f"{name}_first": _over(fmean, values[:window]), f"{name}_last": _over(fmean, values[-window:])}


def _over(reduce: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    return reduce(values) if values else None
