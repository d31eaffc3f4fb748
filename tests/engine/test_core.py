"""The core does its work without the extras: they are deleted, and it trains on vLLM."""

import json
import os
import shutil
import subprocess
import sys

from core import CORE, EXTRAS, PACKAGE

CHILD = """
import importlib, sys
from pathlib import Path

# An editable installation would find what is deleted here in the checkout.
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig

import qlora_rl

assert Path(qlora_rl.__file__).parent == Path({place!r}), qlora_rl.__file__
base = qlora_rl.prepare_base({model!r}, out={out!r} + "/base")
args = GRPOConfig(
    output_dir={out!r} + "/run", max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
    vllm_max_model_length=64, learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(), bf16=True,
)
trainer = qlora_rl.QLoRAGRPOTrainer(
    model=base, reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))], args=args,
    train_dataset=Dataset.from_list([{{"prompt": "1 + 1 ="}}] * 4),
    peft_config=LoraConfig(r=4, target_modules="all-linear"),
)
trainer.train()
trainer.close()
for name in {core!r}:  # also what these two steps did not need
    importlib.import_module(f"qlora_rl.{{name}}" if name else "qlora_rl")
for extra in {extras!r}:
    try:
        importlib.import_module(f"qlora_rl.{{extra}}")
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{{extra}} is there")
"""


def test_the_core_trains_on_vllm_without_the_extras(model_dir, tmp_path):
    place = tmp_path / "site" / "qlora_rl"
    shutil.copytree(PACKAGE, place, ignore=shutil.ignore_patterns("__pycache__"))
    for extra in EXTRAS:
        path = place.joinpath(*extra.split("."))
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    code = CHILD.format(place=str(place), model=str(model_dir), out=str(tmp_path), core=CORE, extras=EXTRAS)
    environment = {**os.environ, "PYTHONPATH": str(place.parent), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["policy_version"] for step in steps] == [1, 2]
    assert all(step["base_verified"] and step["mismatch_kl"] < 1e-2 for step in steps)
    pushes = [json.loads(line) for line in (tmp_path / "run" / "sync.jsonl").read_text().splitlines()]
    assert [push["transport"] for push in pushes] == ["in_place"] * 2
