"""Real processes, real kill -9, at random moments: the run goes on every time, no checkpoint is torn, and it ends the same."""

import multiprocessing
import random
import shutil
import signal
import time

import pytest
from resumed import assert_same_run, lines, run

from qlora_rl.train import checkpoints

FIELDS = {"max_steps": 10, "save_steps": 1, "save_total_limit": 3, "pause_s": 0.02}


@pytest.fixture(scope="module")
def start():
    """Starts `run` in a process of its own, out of one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trl", "peft", "resumed", "qlora_rl.train.trainers", "qlora_rl.engine.fake"])

    def start(*arguments, **fields):
        process = context.Process(target=run, args=arguments, kwargs=fields)
        process.start()
        return process

    return start


def wait(process, until, limit_s=300):
    end = time.monotonic() + limit_s
    while process.is_alive() and not until():
        assert time.monotonic() < end
        time.sleep(0.002)


def survives(start, base, tmp_path, kills):
    reference, out = tmp_path / "reference", tmp_path / "run"
    process = start(base, reference, "fake", **FIELDS)
    wait(process, (reference / f"begun-{process.pid}").exists)
    began = time.monotonic()
    process.join()
    assert process.exitcode == 0
    training_s = time.monotonic() - began

    moments = random.Random(time.time_ns())
    killed, finished, seen = 0, 0, []
    while killed < kills:
        process = start(base, out, "fake", **FIELDS)
        if moments.random() < 0.85:  # else while it starts
            begun = out / f"begun-{process.pid}"
            wait(process, begun.exists)
        process.join(moments.uniform(0.0, 0.8 * training_s))
        if process.is_alive():
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL
            killed += 1
        assert process.exitcode in (0, -signal.SIGKILL)
        there = checkpoints.numbered(out)
        assert not any(checkpoints.damage(directory) for directory in there)
        steps = [line["step"] for line in lines(out)] if (out / "metrics.jsonl").exists() else []
        assert steps == list(range(1, len(steps) + 1))
        seen.append((len(steps), len(there), len(list(out.glob(".staging-*")))))
        # At most the steps since the last checkpoint are lost; here every step has one.
        assert not there or checkpoints.step_of(there[-1]) >= len(steps) - 1
        if process.exitcode == 0:
            assert_same_run(out, reference)
            shutil.rmtree(out)
            finished += 1
    process = start(base, out, "fake", **FIELDS)
    process.join()
    assert process.exitcode == 0
    assert_same_run(out, reference)
    assert not list(out.glob(".*"))
    print(f"{killed} kills, {finished + 1} runs ended the same; steps, checkpoints, half-written: {seen}")


def test_a_run_survives_three_kills(start, base, tmp_path):
    survives(start, base, tmp_path, 3)


@pytest.mark.full
def test_a_run_survives_thirty_kills(start, base, tmp_path):
    survives(start, base, tmp_path, 30)
