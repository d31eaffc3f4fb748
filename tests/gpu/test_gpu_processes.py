"""Several trainer processes over NCCL, by the files of examples/accelerate. Written without GPUs; not yet seen to
pass."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from resumed import lines

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

ROOT = Path(__file__).resolve().parents[2]
WAYS = (("ddp", 1), ("fsdp2", 1), ("zero2", 1), ("zero3", 1), ("ddp", 2), ("fsdp2", 2))


@pytest.mark.parametrize(("way", "engine_over"), WAYS)
def test_two_gpus_train_by_the_command_and_push_once_a_step(way, engine_over, model_dir, tmp_path):
    if way.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / "run"
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--main_process_port={port}"]
    command += ["--config_file", str(ROOT / "examples" / "accelerate" / f"{way}.yaml")]
    if way.startswith("fsdp"):
        command += ["--fsdp_transformer_layer_cls_to_wrap", "Qwen2DecoderLayer"]  # the class of the tiny model's layers
    command += ["-m", "qlora_rl.cli", "train", str(ROOT / "examples" / "grpo.toml")]
    settings = {
        "base.model": model_dir,
        "run.dir": out,
        "sync.canary_every": 1,
        "train.max_steps": 3,
        "train.per_device_train_batch_size": 8,
        "train.learning_rate": 1e-2,
        "train.vllm_tensor_parallel_size": engine_over,
    }
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    assert json.loads((out / "fingerprints.json").read_text())["verified"]
    steps, pushes = lines(out), lines(out, "sync.jsonl")
    assert [step["policy_version"] for step in steps] == [push["version"] for push in pushes] == [1, 2, 3]
    assert all(step["mismatch_kl"] < 5e-3 and step["rollout_tokens"] > 0 for step in steps)
    assert all(push["canary_difference"] is not None for push in pushes)
