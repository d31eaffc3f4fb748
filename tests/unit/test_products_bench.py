"""The benchmark of products with 4-bit weights: all but the GPU."""

import subprocess
import sys
from pathlib import Path

import torch
from support import program

from qlora_rl.engine.linears.gpu_compute import key_of

ROOT = Path(__file__).parents[2]
products = program("benchmarks/products.py")
MODELS, Linear, bench_products = products.MODELS, products.Linear, products.bench_products


def test_without_a_gpu_it_rejects():
    if torch.cuda.is_available():
        return
    command = [sys.executable, ROOT / "benchmarks" / "nf4_gemm.py", "--models", "qwen3-0.6b"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "sees no NVIDIA GPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_way_is_timed_and_compared_with_the_right_result():
    lines = []
    asked = []

    def clock(calls):
        for call in calls:
            call()
        asked.append(len(calls))
        return 1e-6 * len(asked)

    shapes = {"one": (Linear("qkv", (64, 32, 32), 128), Linear("o", (64,), 64)), "two": (Linear("o", (64,), 64),)}
    found = bench_products(
        ["one", "two"],
        tokens=(1, 4),
        device="cpu",
        stopwatch=clock,
        with_triton=False,
        linears=shapes.__getitem__,
        say=lines.append,
    )
    assert list(found) == ["128x128 nf4/64 64+32+32", "64x64 nf4/64 64"]
    assert found["64x64 nf4/64 64"]["used_by"] == ["one o", "two o"]
    row = found["128x128 nf4/64 64+32+32"]["tokens"]["4"]
    assert list(row["seconds"]) == ["parts", "joined", "decoded", "bf16"]
    assert row["ratio"]["parts"] == 1.0
    assert row["ratio"]["bf16"] == row["seconds"]["parts"] / row["seconds"]["bf16"]
    assert set(row["errors"]) == {"parts", "joined", "decoded"}
    assert 0 < max(row["errors"].values()) < 2**-8  # rounded once to bf16
    assert len(asked) == 4 * 4
    assert "4 | parts" in lines[0]


def test_the_shapes_are_those_that_bitsandbytes_takes():
    """Whole blocks in every row; as an engine will ask for them."""
    for linears in MODELS.values():
        assert [linear.name for linear in linears] == ["qkv", "o", "gate_up", "down"]
        assert all(linear.inputs % 64 == 0 for linear in linears)
    assert key_of(products.make_weight(MODELS["qwen2.5-0.5b"][0], "cpu")) == "1152x896 nf4/64 896+128+128"
