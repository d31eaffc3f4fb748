"""Short runs of every kind, with what they gave written down; to show that a change of structure changed nothing.

In the old checkout, then in the new one, on the same machine; the exit code is 1 where they differ:

python scripts/golden_runs.py before.json [--only NAME ...]
python scripts/golden_runs.py after.json --compare before.json

Each run is a run's file given to `qlora-rl train`, so that nothing here depends on how the package is laid out. The
models are random, and stay in `--models` for the second time. Compared bit for bit: what stands in metrics.jsonl,
sync.jsonl, fingerprints.json and rollouts.json, times and memory left out; the tensors of the adapter; the names of all
files. A run whose rollouts depend on timing says in `_STEADY` what is compared of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

# Depends on the machine's speed: seconds, speeds, memory, and what is measured of another process.
_TIMED = re.compile(
    r"seconds|per_s$|_s$|gib|memory|runtime|_per_second|num_tokens_per|waited|share_busy|date|commit|time"
)
_GRPO = """method = "{method}"
[base]
model = "{model}"
[data]
train = "{data}"
[[rewards]]
use = "even.py:even_digits"
[adapter]
r = 4
[run]
dir = "{directory}"
[train]
max_steps = 3
per_device_train_batch_size = 8
num_generations = 4
max_completion_length = 8
vllm_max_model_length = 64
learning_rate = 1e-3
logging_steps = 1
save_strategy = "steps"
save_steps = 2
"""
_REWARD = """def even_digits(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(letter in "02468" for letter in text) / 8 for text in texts]
"""
_OFFLINE = """method = "{method}"
[base]
model = "{model}"
[data]
train = "{data}"
[adapter]
r = 4
[run]
dir = "{directory}"
[train]
max_steps = 3
per_device_train_batch_size = 4
max_length = 64
learning_rate = 1e-3
logging_steps = 1
"""
# name -> (method, model, data, further `--set`)
_RUNS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "grpo": ("grpo", "qwen3", "sums", ()),
    "grpo-accumulated": ("grpo", "qwen2", "sums", ("train.gradient_accumulation_steps=2", "train.num_iterations=2")),
    "grpo-copies": ("grpo", "qwen3", "sums", ("rollout.share_base=false",)),
    "rloo": ("rloo", "llama", "sums", ()),
    "online-dpo": ("online_dpo", "qwen2", "sums", ()),
    "sft": ("sft", "qwen3", "texts", ()),
    "dpo": ("dpo", "qwen2", "pairs", ()),
    "kto": ("kto", "qwen2", "pairs", ()),
    "distill": (
        "distill",
        "qwen3",
        "sums",
        ("teacher.adapter=policy", "teacher.prompt_template={prompt}{answer}, {prompt}"),
    ),
    "async": ("async_grpo", "qwen3", "sums", ("rollout.rollout_threads=1",)),
    "server": ("grpo", "qwen3", "sums", ("rollout.where=server",)),
    "mixture": (
        "grpo",
        "qwen3_moe",
        "sums",
        ("run.routing_replay=true", 'adapter.target_modules=["q_proj","k_proj","v_proj","o_proj"]'),
    ),
    "full-weights": ("grpo", "qwen2", "sums", ("adapter.use_dora=true",)),
    "all-weights": ("grpo", "qwen2", "sums", ("base.quant=none", "adapter.kind=none", "sync.how=weights")),
    "gemma2": ("grpo", "gemma2", "sums", ()),
    "images": (
        "grpo",
        "qwen2_5_vl",
        "pictures",
        (
            r"adapter.target_modules=model\.language_model\..*_proj",
            "data.format=chat",
            "data.images=image",
            "train.vllm_max_model_length=256",
        ),
    ),
    "two-processes": ("grpo", "qwen3", "sums", ()),
    "resumed": ("grpo", "qwen3", "sums", ("train.max_steps=6",)),
}
# What is compared where the order of requests, and so the rounding of a batch, depends on timing; of others all is.
_STEADY = {"async": ("files", "steps"), "server": ("files", "steps", "fingerprints.json")}


def _make_models(where: Path) -> None:
    from support import make_model
    from vision import make_vision_model

    for name in ("qwen2", "qwen3", "llama", "qwen3_moe", "gemma2"):
        if not (where / name / "config.json").is_file():
            make_model(where / name, architecture=name, positions=4096 if name == "gemma2" else 128)
    if not (where / "qwen2_5_vl" / "config.json").is_file():
        make_vision_model(where / "qwen2_5_vl")


def _write_data(where: Path) -> None:
    from PIL import Image

    sums = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 18) for b in range(20, 24)]
    rows = {
        "sums": sums,
        "texts": [{"text": row["prompt"] + row["answer"]} for row in sums],
        "pairs": [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "7"} for row in sums],
        "pictures": [{"prompt": row["prompt"], "image": f"{i % 4}.png"} for i, row in enumerate(sums)],
    }
    (where / "even.py").write_text(_REWARD)
    for name, lines in rows.items():
        (where / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for i in range(4):
        Image.new("RGB", (56, 56), (60 * i, 200 - 40 * i, 90)).save(where / f"{i}.png")


def _command(name: str, file: Path, settings: tuple[str, ...]) -> list[str]:
    run = [sys.executable, "-m", "qlora_rl", "train", str(file)]
    if name == "two-processes":
        run = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--master_port",
            "29741",
            *run[1:],
        ]
    return run + [word for setting in settings for word in ("--set", setting)]


def _run_one(name: str, where: Path, models: Path) -> dict[str, Any]:
    method, model, data, settings = _RUNS[name]
    directory, file = where / "runs" / name, where / f"{name}.toml"
    text = _OFFLINE if method in ("sft", "dpo", "kto") else _GRPO
    text = text.format(method=method, model=models / model, data=where / f"{data}.jsonl", directory=directory)
    if "adapter.kind=none" in settings:
        text = text.replace("[adapter]\nr = 4\n", "")
    if method == "online_dpo":
        text = text.replace("max_completion_length = 8", "max_new_tokens = 8").replace("num_generations = 4\n", "")
        text = text.replace("vllm_max_model_length = 64", "max_length = 64")
    if method == "distill":
        text = text.replace('[[rewards]]\nuse = "even.py:even_digits"\n', "").replace("num_generations = 4\n", "")
    file.write_text(text)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "QLORA_RL_CACHE": str(where / "cache"),
    }  # fmt: skip
    command = _command(name, file, settings)
    started = time.monotonic()
    with (where / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=where, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        if name == "resumed":
            _kill_after_checkpoint(process, directory)
            command += ["--set", "run.existing=resume"]
            process = subprocess.Popen(
                command, cwd=where, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        code = process.wait(timeout=1200)
    print(f"{name}: exit code {code}, {time.monotonic() - started:.0f} s", flush=True)
    return {"exit code": code, **_written(directory, models, where)}


def _kill_after_checkpoint(process: subprocess.Popen[bytes], directory: Path) -> None:
    """SIGKILL between the first checkpoint and the end."""
    until = time.monotonic() + 600
    while not (directory / "checkpoint-2" / "manifest.json").is_file():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"resumed: no checkpoint came, see {directory.parent}")
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _written(directory: Path, models: Path, where: Path) -> dict[str, Any]:
    def lines(name: str) -> list[Any]:
        path = directory / name
        return [_steady(json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []

    def document(name: str) -> Any:
        text = (directory / name).read_text() if (directory / name).is_file() else "null"
        return _steady(json.loads(text.replace(str(models), "MODELS").replace(str(where), "HERE")))

    metrics = lines("metrics.jsonl")
    files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    return {
        "files": files,
        "steps": [line.get("step") for line in metrics],
        "metrics.jsonl": metrics,
        "sync.jsonl": lines("sync.jsonl"),
        "rollouts.json": document("rollouts.json"),
        "fingerprints.json": document("fingerprints.json"),
        "adapter": _digest(directory / "adapter" / "adapter_model.safetensors"),
    }


def _digest(file: Path) -> dict[str, str] | None:
    import torch
    from safetensors.torch import load_file

    if not file.is_file():
        return None
    tensors = load_file(file)
    return {
        k: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for k, t in tensors.items()
    }


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _steady(item) for key, item in value.items() if not _TIMED.search(key)}
    return [_steady(item) for item in value] if isinstance(value, list) else value


def _differences(old: dict[str, Any], new: dict[str, Any], names: tuple[str, ...] | None) -> list[str]:
    return [key for key in names or sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]


def main() -> int:
    """Run what was asked for, write it down, and compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compare", type=Path, help="what an earlier call has written")
    parser.add_argument("--only", nargs="+", choices=sorted(_RUNS), default=list(_RUNS))
    parser.add_argument("--models", type=Path, default=Path.home() / ".cache" / "qlora-rl-golden")
    asked = parser.parse_args()
    where = asked.out.resolve().with_suffix("")
    where.mkdir(parents=True)
    _make_models(asked.models)
    _write_data(where)
    seen = {name: _run_one(name, where, asked.models) for name in asked.only}
    asked.out.write_text(json.dumps(seen, indent=1))
    failed = [name for name, run in seen.items() if run["exit code"]]
    if asked.compare:
        before = json.loads(asked.compare.read_text())
        for name in asked.only:
            wrong = _differences(before.get(name, {}), seen[name], _STEADY.get(name))
            print(f"{name}: {'equal' if not wrong else 'differs in ' + ', '.join(wrong)}")
            failed += [name] if wrong else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
