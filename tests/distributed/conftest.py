"""Real processes over gloo, started by torchrun."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import launchers
import pytest
from support import forked

# What `accelerate launch --config_file examples/accelerate/fsdp2.yaml` sets, and that the CPU is the accelerator.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "ACCELERATE_TORCH_DEVICE": "cpu",
}
# That DeepSpeed, too, takes the CPU for its accelerator.
ZERO = {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
# How two processes are launched: `launch(calls, **WAYS[way])`.
WAYS = {
    "ddp": {},
    "fsdp2": FSDP2,
    "zero2": {"example": "zero2.yaml", **ZERO},
    "zero3": {"example": "zero3.yaml", **ZERO},
}
HERE = Path(__file__).resolve().parent


def skip_without_deepspeed(way: str) -> None:
    """Of a way of `WAYS` that needs it."""
    if way.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'qlora-rl[deepspeed]'")


def free_port() -> int:
    """Of this host, free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(
    calls: list[dict[str, Any]],
    *,
    processes: int = 2,
    timeout: float = 600,
    example: str | None = None,
    is_forked: bool = True,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Start `job.py` under torchrun, or by `accelerate launch` with a file of examples/accelerate, and wait for its
    end.

    The launchers are theirs; launcher and ranks are forked from a process that has imported everything, unless
    `is_forked` is False.
    """
    words = [f"--nproc_per_node={processes}", f"--master_port={free_port()}"]
    if example is not None:
        words = ["--config_file", str(HERE.parents[1] / "examples" / "accelerate" / example)]
        words += [f"--num_processes={processes}", f"--main_process_port={free_port()}"]
    words += [str(HERE / "job.py"), json.dumps(calls)]
    known = os.environ | {"OMP_NUM_THREADS": "1", **environment}
    if not is_forked:
        module = "torch.distributed.run" if example is None else "accelerate.commands.launch"
        known |= {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path, os.environ["PYTHONPATH"]])}
        command = [sys.executable, "-m", module, *words]
        return subprocess.run(command, env=known, capture_output=True, text=True, timeout=timeout)
    launcher = launchers.torchrun if example is None else launchers.accelerate_launch
    return forked(launcher, words, environment=known, timeout=timeout)


def said(out: Path, rank: int) -> dict[str, Any]:
    """What a rank has left about its end."""
    return json.loads(Path(f"{out}-rank{rank}.json").read_text())


def adapter_of(out: Path, only: str = "", file: str = "") -> Any:
    """The trained tensors of a run, of a checkpoint, or in `file`, as one vector; `only` those whose names hold it."""
    import torch
    from safetensors.torch import load_file

    home = out if (out / "trainer_state.json").exists() else out / "adapter"
    tensors = load_file(out / file if file else home / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten().double() for name in sorted(tensors) if only in name])


def distance(one: Path, other: Path, **which: str) -> float:
    """Relative, of two trained adapters."""
    theirs = adapter_of(other, **which)
    return float((adapter_of(one, **which) - theirs).norm() / theirs.norm())


@pytest.fixture(scope="session")
def exact_base(model_dir):
    """NF4 that is multiplied in float32: what differs between two runs is not rounding to 16 bits."""
    from qlora_rl import prepare_base

    return str(prepare_base(model_dir, compute_dtype="float32").path)


@pytest.fixture(scope="session")
def recorded(exact_base, tmp_path_factory):
    """One process with the doubled batch, and everything that it has sampled."""
    from job import main

    root = tmp_path_factory.mktemp("recorded")
    main(
        {
            "base": exact_base,
            "out": str(root / "one"),
            "record": str(root / "kept.json"),
            "max_steps": 4,
            "per_device_train_batch_size": 8,
            "save_steps": 2,
        }
    )
    return root / "one", str(root / "kept.json")
