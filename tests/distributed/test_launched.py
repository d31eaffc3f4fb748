"""`accelerate launch` with the files of examples/accelerate, as it is typed: `qlora-rl train` in two processes, each
with real vLLM. Long."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ZERO, free_port
from resumed import lines
from safetensors.torch import load_file

pytestmark = pytest.mark.full  # each launch imports all in two processes; test_ddp.py types the command once

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SMALL = {
    "adapter.r": 8,
    "sync.canary_every": 1,
    "train.max_steps": 3,
    "train.per_device_train_batch_size": 8,
    "train.gradient_checkpointing": "false",
    "train.learning_rate": 1e-2,
}


WAYS = [
    ("ddp", "colocate"),
    ("fsdp2", "colocate"),
    ("fsdp2", "server"),
    ("zero2", "colocate"),
    ("zero3", "colocate"),
    ("zero3", "server"),
]


@pytest.mark.parametrize(("way", "rollout"), WAYS)
def test_the_command_trains_in_two_processes_on_vllm(way, rollout, model_dir, tmp_path):
    out = tmp_path / "run"
    # As the files say, but for the class of the tiny model's layers.
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--main_process_port={free_port()}"]
    command += ["--config_file", str(ROOT / "examples" / "accelerate" / f"{way}.yaml")]
    if way.startswith("fsdp"):
        command += ["--fsdp_transformer_layer_cls_to_wrap", "Qwen2DecoderLayer"]
    command += ["-m", "qlora_rl.cli", "train", str(ROOT / "examples" / "grpo.toml")]
    settings = {**SMALL, "base.model": model_dir, "run.dir": out, "rollout.where": rollout}
    if way != "ddp":
        settings |= {"train.use_cpu": "false", "train.bf16": "true"}  # as on a GPU
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(HERE / "launched"), str(HERE), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "HELD": str(tmp_path / "held"),
        **({} if way == "ddp" else ZERO),
    }
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-5000:]

    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    config = json.loads((out / "config.json").read_text())
    assert config["rollout"] == rollout
    if way in ("fsdp2", "zero3"):
        assert config["base_held"] == {"copies": 2, "reason": "the trainer's is sharded over the processes"}
    else:
        assert config["base_held"]["copies"] == 1
    assert json.loads((out / "fingerprints.json").read_text())["verified"]
    steps, pushes = lines(out), lines(out, "sync.jsonl")
    assert [step["step"] for step in steps] == [push["version"] for push in pushes] == [1, 2, 3]
    assert [step["policy_version"] for step in steps] == [1, 2, 3]
    assert all(step["mismatch_kl"] < 5e-3 and step["rollout_tokens"] > 0 for step in steps)
    assert all(push["canary_difference"] is not None for push in pushes)
    # One push a step on both ranks, and both engines hold the same; another one each time.
    held = [json.loads((tmp_path / f"held-{rank}.json").read_text()) for rank in (0, 1)]
    assert held[0] == held[1]
    assert len(held[0]) == 3
    assert len({json.dumps(each, sort_keys=True) for each in held[0]}) == 3
    written = load_file(out / "adapter" / "adapter_model.safetensors")
    trained = [tensor for name, tensor in written.items() if "lora_B" in name]
    assert trained
    assert all(tensor.isfinite().all() and tensor.any() for tensor in trained)
