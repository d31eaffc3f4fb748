"""The examples run as they stand."""

import json
import os
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
