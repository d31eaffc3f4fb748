"""Real processes, real kill -9, at random moments and before every file operation in the run directory: the run goes on
every time, no checkpoint is torn, and it ends the same."""

import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from resumed import assert_same_run, lines, run
from support import forking

from qlora_rl.train.run import checkpoints

FIELDS = {"max_steps": 10, "save_steps": 1, "save_total_limit": 3, "pause_s": 0.02}


@pytest.fixture(scope="module")
def start():
    """Starts `run` in a process of its own, out of one that has imported everything."""
    context = forking()

    def start(*arguments, target=run, **fields):
        process = context.Process(target=target, args=arguments, kwargs=fields)
        process.start()
        return process

    return start


CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree")


def dies(base, out, at, noted, **fields):
    """`run`, killed just before its file operation number `at` in the run directory, from 1; 0: never, and they are
    noted."""
    root, changes = str(out), []

    def look(event, arguments):
        if event not in CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        path = str(arguments[0])
        # The name alone, in a directory that is being removed.
        if event in ("os.remove", "os.rmdir") and arguments[1] != -1:
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), path)
        if not path.startswith(root):
            return
        changes.append(f"{event} {path.removeprefix(root)}")
        if len(changes) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    run(base, out, "fake", **fields)
    Path(noted).write_text("\n".join(changes))


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
            killed += process.exitcode == -signal.SIGKILL  # 0: it was ending already
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


@pytest.mark.full  # above three
def test_a_run_survives_thirty_kills(start, base, tmp_path):
    survives(start, base, tmp_path, 30)


def survives_at(start, base, tmp_path, chosen):
    fields = {"max_steps": 3, "save_steps": 1, "save_total_limit": 1}
    reference, out, noted = tmp_path / "reference", tmp_path / "run", tmp_path / "changes"

    def ends(at):
        process = start(base, out if at else reference, at, noted, target=dies, **fields)
        process.join()
        return process.exitcode

    assert ends(0) == 0
    changes = noted.read_text().splitlines()
    for at in chosen(changes):
        shutil.rmtree(out, ignore_errors=True)
        assert ends(at) == -signal.SIGKILL
        assert not any(checkpoints.damage(directory) for directory in checkpoints.numbered(out)), changes[at - 1]
        process = start(base, out, "fake", **fields)
        process.join()
        assert process.exitcode == 0, changes[at - 1]
        assert_same_run(out, reference)
        left = {path.name for path in out.iterdir()} ^ {path.name for path in reference.iterdir()}
        assert not {name for name in left if not name.startswith("begun-")}, changes[at - 1]


def kinds(changes):
    """The last change of each kind, by number."""
    last = {re.sub(r"-\w{8}\b|\d", "", change): at for at, change in enumerate(changes, 1)}
    return sorted(last.values())


def test_a_run_survives_a_kill_before_operations_in_its_directory(start, base, tmp_path):
    def chosen(changes):
        found = kinds(changes)
        assert len(found) > 30
        ending = [at for at in found if "/.adapter-" in changes[at - 1] or "summary" in changes[at - 1]]
        assert ending
        return sorted({*random.Random(0).sample(found, 4), *ending[-4:]})

    survives_at(start, base, tmp_path, chosen)


@pytest.mark.full  # above eight of them at most
def test_a_run_survives_a_kill_before_every_operation_in_its_directory(start, base, tmp_path):
    survives_at(start, base, tmp_path, lambda changes: range(1, len(changes) + 1))
