"""`Progress`: one line for people. Machines read metrics.jsonl, trackers get everything from TRL's log."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TextIO

from tqdm.auto import tqdm
from transformers import ProgressCallback
from transformers.utils.import_utils import is_in_notebook

from qlora_rl.stages import LIVE_S, Beat, begin, count, counted, ended, is_live, shown_to_scripts

# What is shown of a log, where it is there: its name in the log, and how.
_SHOWN = {
    "reward": "reward {:.3f}",
    "rewards/margins": "margin {:.3f}",
    "mean_token_accuracy": "accuracy {:.3f}",
    "loss": "loss {:.4f}",
    "qlora_rl/mismatch_kl": "KL {:.0e}",
    "qlora_rl/rollout_tokens_per_s": "{:,.0f} tok/s",
}
# Steps whose time is shown, and taken for that of the next ones: the first step of a run is often the longest.
_LAST = 5
# Elsewhere than in a terminal, seconds without a line after which one says that a step is being made.
BEAT_S = 15.0


class Progress(ProgressCallback):
    """Reward, loss, mismatch KL, tokens per second and the time that is left; for training and evaluation.

    In a terminal it is a bar that stays on its line. Elsewhere (a file, a batch system) it is a plain line now and
    then, without carriage returns.

    Args:
        label: what stands in front.
        stream: where to; by default stderr.
        every_s: elsewhere than in a terminal, seconds between two lines; the first and the last always come.
    """

    def __init__(self, label: str = "training", stream: TextIO | None = None, every_s: float = 5.0):
        super().__init__()
        self.label, self.every_s = label, every_s
        self._stream = stream
        self._begun_at = self._started = self._said = 0.0
        self._said_step, self._latest, self._parts = -1, "", 0
        self._ends: deque[float] = deque(maxlen=_LAST + 1)
        self._beat: Beat | None = None

    @property
    def stream(self) -> TextIO:
        """Where to; looked up each time, because notebooks and tests replace stderr."""
        return self._stream or sys.stderr

    @property
    def is_live(self) -> bool:
        """It can rewrite its line."""
        return is_live(self.stream)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training begins, or goes on, at `state.global_step`."""
        self._started, self._said, self._begun_at, self._latest = time.monotonic(), -math.inf, state.global_step, ""
        self.current_step, self._said_step, self._parts = state.global_step, -1, 0
        self._ends.clear()
        self._ends.append(self._started)
        self.close()
        if state.is_world_process_zero:
            begin("")
            self._beat = Beat(LIVE_S if self.is_live else BEAT_S, lambda _: self._show_life(state))
        if state.is_world_process_zero and self.is_live:
            self.training_bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc=self.label,
                unit="step",
                dynamic_ncols=True,
                file=self.stream,
            )

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch of a step is done, and it is not the last one."""
        self._parts += 1
        count("training on micro-batch", self._parts + 1, args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done."""
        self._ends.append(time.monotonic())
        self._parts = 0
        count()
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch of an evaluation is done."""
        if self.is_live:
            super().on_prediction_step(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """TRL has logged."""
        if not state.is_world_process_zero or not logs:
            return
        if any(name.startswith("eval_") for name in logs):
            found = {name.removeprefix("eval_"): value for name, value in logs.items()}
            self._say(f"evaluation at step {state.global_step}: {shown(found)}")
        elif "loss" in logs:
            self._latest = shown(logs)
            if self.training_bar is not None:
                self.training_bar.set_postfix_str(self._latest)
            elif time.monotonic() - self._said >= self.every_s:
                self._say_step(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last step is done."""
        self.close()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None
        elif state.is_world_process_zero and state.global_step > max(self._begun_at, self._said_step):
            self._say_step(state)

    def close(self) -> None:
        """No sign of life comes after this; harmless when repeated."""
        if self._beat is not None:
            self._beat.stop()

    def _show_life(self, state: Any) -> None:
        bar, now = self.training_bar, time.monotonic()
        if bar is not None:
            part = counted() if now - self._ends[-1] >= BEAT_S else ""
            bar.set_postfix_str(", ".join(filter(None, (self._latest, part))))
        elif now - max(self._said, self._started, self._ends[-1]) >= BEAT_S:
            self._said = now
            part = f" ({found})" if (found := counted()) else ""
            self._say(
                f"{self.label}: step {state.global_step + 1}/{state.max_steps} has taken "
                f"{now - self._ends[-1]:.0f} s so far{part}"
            )

    def _say_step(self, state: Any) -> None:
        self._said, self._said_step = time.monotonic(), state.global_step
        step = (self._ends[-1] - self._ends[0]) / max(1, len(self._ends) - 1)
        left = (state.max_steps - state.global_step) * step
        latest = f"{self._latest}, " if self._latest else ""  # before the first of logging_steps there is none
        self._say(
            f"{self.label}: step {state.global_step}/{state.max_steps}, {latest}{step:.2f} s/step, "
            f"{_clock(self._said - self._started)} gone, {_clock(left)} left"
        )

    def _say(self, line: str) -> None:
        if self.training_bar is not None:
            self.training_bar.write(line, file=self.stream)
        else:
            print(line, file=self.stream, flush=True)


@contextlib.contextmanager
def told(args: Any) -> Iterator[bool]:
    """Within it the first process shows stages in Python too, unless TRL's config asks for quiet.

    Yields whether they are shown by it.
    """
    quiet = args.disable_tqdm or args.get_process_log_level() > logging.WARNING
    if quiet or os.environ.get("RANK", "0") != "0":
        with ended():
            yield False
        return
    # A notebook paints stderr red.
    with shown_to_scripts(sys.stdout if is_in_notebook() else None) as is_shown, ended():
        yield is_shown


def end_progress(trainer: Any) -> None:
    """A training that fails or is interrupted does not tell its callbacks."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, Progress):
            callback.close()


def show_progress(trainer: Any) -> None:
    """Take the place of transformers' bar, or in a notebook of its table of losses, where there is one."""
    for callback in trainer.callback_handler.callbacks:
        # The notebook's class cannot be imported without IPython. A notebook paints stderr red.
        in_notebook = type(callback).__name__ == "NotebookProgressCallback"
        if in_notebook or type(callback) is ProgressCallback:
            trainer.remove_callback(callback)
            trainer.add_callback(Progress(stream=sys.stdout if in_notebook else None))
            return


def shown(logs: Mapping[str, Any]) -> str:
    """What people want to see of a log, in one line."""
    numbers = {name: value for name, value in logs.items() if isinstance(value, int | float) and math.isfinite(value)}
    return ", ".join(form.format(numbers[name]) for name, form in _SHOWN.items() if name in numbers)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
