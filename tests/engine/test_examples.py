"""The examples run as they stand."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_grpo_example_runs(model_dir, tmp_path):
    command = [
        sys.executable,
        ROOT / "examples" / "grpo.py",
        "--model",
        model_dir,
        "--steps",
        "2",
        "--out",
        tmp_path / "run",
    ]
    environment = {**os.environ, "QLORA_RL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def test_one_step_learns_without_a_trainer_and_stays_short(with_demo_model):
    example = ROOT / "examples" / "one_step.py"
    assert len(example.read_text().splitlines()) <= 150
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, env=os.environ | with_demo_model)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "base verified: True; adapter: Verdict(kind='adapter'" in done.stdout
    steps = re.findall(
        r"^step (\d+): reward ([\d.]+), KL to the sampler ([\d.e+-]+), version (\d+)", done.stdout, re.MULTILINE
    )
    assert [(int(step), int(version)) for step, _, _, version in steps] == [(n, n) for n in range(1, 31)]
    rewards, distances = [float(each[1]) for each in steps], [float(each[2]) for each in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    assert max(distances) < 1e-3  # rounding; merged into the 4-bit weights it is 0.1


def test_six_adapters_learn_at_once(with_demo_model):
    example = ROOT / "examples" / "adapters.py"
    assert len(example.read_text().splitlines()) <= 70
    command = [sys.executable, example, "--steps", "12"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | with_demo_model)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [[float(each) for each in re.findall(r": ([\d.]+)", line)] for line in done.stdout.splitlines()]
    assert [len(step) for step in steps] == [6] * 12
    quick = [sum(step[::2]) / 3 for step in steps]  # the higher rate, of three seeds
    assert sum(quick[-3:]) / 3 > sum(quick[:3]) / 3 + 0.1
    assert steps[0][0] == steps[0][1]  # before its first step an adapter changes nothing, whatever it is
