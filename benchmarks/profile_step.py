"""Where the processor's time of a training step goes, by samples of the stack: ours, and TRL 1.16 with its own vLLM and
its merge.

    python benchmarks/profile_step.py [--sizes demo 0.1b 0.4b] [--steps 40] [--rounds 2] [--json
    benchmarks/results/profile_step.json] [--flame DIR]

While `step.py` trains, a timer of processor time looks at the main thread; each sample counts as much as
this thread has computed since the one before, and belongs to the first of the parts below that is on the stack. Waiting
and other processes do not count, so the shares also hold on a shared machine; run it with OMP_NUM_THREADS=1, as the
time of other threads is not seen. `--flame DIR` keeps the stacks, one line each with its microseconds, as flamegraph.pl
and speedscope read them. Shares are of the samples inside the training loop, without the first steps; examinations by
the alarm are left out, as a run has one or two, whatever its length.

    python benchmarks/profile_step.py --child SIDE SIZE BASE STEPS STACKS      one process: writes its stacks
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from rounds import add_to, described
from step import JOBS, SIDES, WARM, _make_base, measure

# A sample inside several counts for the first. "a>b" is b inside a.
PARTS = {
    "alarm": ("MismatchDebugger.examine",),
    "canary": ("Canary.check",),
    "push": ("EngineBridge.sync_weights", "VLLMGeneration.sync_weights"),
    "rollout: requests handed in": ("Driver.begin",),  # by us; those of TRL are within the next part but one
    "rollout: vLLM's scheduler and outputs": (
        "EngineBridge.generate>Scheduler.schedule",
        "EngineBridge.generate>Scheduler.update_from_output",
        "EngineBridge.generate>OutputProcessor.process_outputs",
        "VLLMGeneration.generate>Scheduler.schedule",
        "VLLMGeneration.generate>Scheduler.update_from_output",
        "VLLMGeneration.generate>OutputProcessor.process_outputs",
    ),
    "rollout: model and sampling": ("EngineBridge.generate", "VLLMGeneration.generate"),
    "first pass": ("GRPOTrainer._generate_and_score_completions>GRPOTrainer._get_per_token_logps_and_entropies",),
    "forward": ("GRPOTrainer._get_per_token_logps_and_entropies",),
    "loss": ("GRPOTrainer.compute_loss",),
    "comparison with the engine": ("SingleForward._look_at_parts", "MeasuredSteps._look_at"),
    "backward": ("Accelerator.backward",),
    "optimizer and clipping": ("AcceleratedOptimizer.step", "Accelerator.clip_grad_norm_", "Module.zero_grad"),
    "is there dropout": ("SingleForward._scores_once",),
    "train mode": ("Module.train",),
    "records": ("MeasuredSteps._note_rollouts", "Trainer._maybe_log_save_evaluate"),
    "prompts tokenised, completions decoded": ("GRPOTrainer._tokenize_prompts", "PreTrainedTokenizerBase.batch_decode"),
    "rewards": ("GRPOTrainer._calculate_rewards",),
    "padding, advantages, metrics": ("GRPOTrainer._generate_and_score_completions",),
    "batches of prompts": ("Trainer.get_batch_samples",),
}
REST = "the rest of TRL and transformers"
LOOP = "Trainer._inner_training_loop"
EVERY_S = 0.004


class Sampler:
    """Stacks of the main thread, each with the seconds of processor time since the one before.

    Python hands a signal over between two bytecodes, so a long product is one sample, with all of its time. What the
    sampler itself takes is not counted.
    """

    def __init__(self) -> None:
        self.seconds: Counter[tuple[str, ...]] = Counter()
        self._last = 0.0

    def start(self) -> None:
        """Forget what was, and look from now on."""
        self.seconds.clear()
        signal.signal(signal.SIGPROF, self._look)
        self._last = time.thread_time()
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)

    def stop(self) -> None:
        """Look no more."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)

    def _look(self, number: int, frame: FrameType | None) -> None:
        passed = time.thread_time() - self._last
        names = []
        while frame is not None:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        self.seconds[tuple(reversed(names))] += passed
        self._last = time.thread_time()

    def lines(self) -> str:
        """`frame;frame;... microseconds`, outermost first."""
        return "".join(f"{';'.join(names)} {round(1e6 * spent)}\n" for names, spent in self.seconds.items())


def part_of(names: list[str]) -> str:
    """Of a stack, outermost frame first."""
    for part, marks in PARTS.items():
        for mark in marks:
            outer, _, inner = mark.rpartition(">")
            if inner in names and (not outer or (outer in names and names.index(outer) < names.index(inner))):
                return part
    return REST


def milliseconds(stacks: str, steps: int) -> dict[str, float]:
    """Of each part in a step, from lines of `frame;frame;... microseconds`."""
    counts: Counter[str] = Counter()
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        names = stack.split(";")
        if LOOP in names:
            counts[part_of(names)] += int(count)
    counts.pop("alarm", None)
    return {part: count / 1e3 / steps for part, count in counts.most_common()}


def train(side: str, size: str, base: Path, steps: int, stacks: Path) -> None:
    """One side in this process."""
    from transformers import TrainerCallback

    from qlora_rl.demo import job

    sampler = Sampler()

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM:
                sampler.start()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            sampler.stop()

    made = job.make_trainer

    def make(*args: Any, **kwargs: Any) -> Any:
        trainer = made(*args, **kwargs)
        trainer.add_callback(Watch())
        return trainer

    job.quieten()
    job.make_trainer = make
    measure(side, size, base, steps, {})
    stacks.write_text(sampler.lines())


def main() -> int:
    """Both sides take turns."""
    if sys.argv[1:2] == ["--child"]:
        side, size, base, steps, stacks = sys.argv[2:]
        train(side, size, Path(base), int(steps), Path(stacks))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=JOBS, default=["demo", "0.1b"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="add the shares to this file")
    parser.add_argument("--flame", type=Path)
    arguments = parser.parse_args()
    counted = arguments.steps - WARM
    if counted < 1:
        parser.error(f"--steps {arguments.steps}: the first {WARM} are not counted; take more.")
    if arguments.json and set(arguments.sides) != set(SIDES):
        parser.error("--json keeps both sides; leave --sides out.")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        flames = arguments.flame or Path(work)
        flames.mkdir(parents=True, exist_ok=True)
        for size in arguments.sizes:
            (Path(work) / size).mkdir()
            base = _make_base(size, Path(work) / size)
            rounds: dict[str, list[dict[str, float]]] = {side: [] for side in arguments.sides}
            for number in range(arguments.rounds):
                for side in arguments.sides:
                    raw = flames / f"{size}-{side}-{number}.txt"
                    job = [sys.executable, __file__, "--child", side, size, str(base), str(arguments.steps), str(raw)]
                    subprocess.run(job, check=True, capture_output=True, text=True)
                    rounds[side].append(milliseconds(raw.read_text(), counted))
            found[size] = {"steps": counted, "rounds": arguments.rounds, "threads": os.environ.get("OMP_NUM_THREADS")}
            for side, rows in rounds.items():
                parts = {part: statistics.median(row.get(part, 0.0) for row in rows) for row in rows for part in row}
                total = sum(parts.values())
                found[size][side] = {
                    "milliseconds": total,
                    "of_rounds": [sum(row.values()) for row in rows],
                    "shares": {p: spent / total for p, spent in sorted(parts.items(), key=lambda each: -each[1])},
                }
                line = "\n  ".join(f"{share:6.1%}  {part}" for part, share in found[size][side]["shares"].items())
                print(f"{size}, {side}: {total:.0f} ms of the processor a step\n  {line}", flush=True)
    if arguments.json:
        add_to(arguments.json, {size: described(facts) for size, facts in found.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
