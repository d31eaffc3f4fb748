"""What needs an NVIDIA GPU: `make gpu`. Written on machines without one; not yet seen to pass."""

import json
import subprocess
import sys

import pytest
import torch

from qlora_rl import LocalEngine, load_base, prove_base

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch built for it"),
]

PROMPTS = [[40 + i, 41, 42, 43 + i] for i in range(8)]


def test_the_demo_learns(tmp_path):
    command = [sys.executable, "-m", "qlora_rl.cli", "demo", "--steps", "60", "--quiet", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_after"] > 0.80
    assert summary["mismatch_kl_median"] <= 2e-4


def test_a_woken_engine_holds_the_base_that_fell_asleep(base):
    model = load_base(base)
    with LocalEngine(base, max_model_length=64, max_num_seqs=8, enable_sleep=True) as engine:
        proof = prove_base(model, engine)
        free_awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > free_awake
        engine.wake()
        assert engine.describe_base() == proof.theirs
        assert engine.generate(PROMPTS, max_tokens=8, seed=1).tokens > 0
