"""How long a new policy takes to reach vLLM in this process: in place, through a directory, and TRL's merge; and what
other benchmarks use of it.

    python benchmarks/sync.py [--size 0.4b] [--json benchmarks/results/sync.json]

NF4 with double quantisation, LoRA of rank 16 on all linears, base held once. Alternating, in one run: a push in place
and one through tmpfs, without their canary; a plain copy of the adapter's bytes; and TRL 1.16's way, of which only the
trainer's side is timed (merge each module into its 4-bit weight, copy it out, unmerge): its push into a 4-bit vLLM is
wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shapes
import torch
from rounds import described
from shapes import RANK, SIZES

from qlora_rl.base.checkpoint import load_base, prepare_base
from qlora_rl.engine.local import LocalEngine, borrow_base
from qlora_rl.sync.in_place import InPlaceTransport
from qlora_rl.sync.strategies import AdapterSync
from qlora_rl.sync.transports import DirectoryTransport

ROOT = Path(__file__).resolve().parent.parent


def make_model(directory: Path, layers: int) -> None:
    """The 0.4 B shape with fewer or more layers."""
    shapes.make_model(directory, dataclasses.replace(SIZES["0.4b"], layers=layers))


def seconds(action: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def summary(values: list[float]) -> dict[str, float]:
    """Median, extremes and count."""
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1], "count": len(ordered)}


def merge_cycle(model: Any) -> None:
    """The trainer's side of TRL 1.16's `_move_model_to_vllm`: merge, walk all weights, unmerge."""
    model.merge_adapter()
    total = 0
    for _, parameter in model.named_parameters():
        total += parameter.data.numel()
    model.unmerge_adapter()


def push_in_turns(
    model: Any, engine: Any, pushes: int, dtype: str, times: dict[str, Any], sizes: dict[str, int]
) -> None:
    """In place, plain copies, through a directory; with pauses, as a training makes them."""
    b_matrices = [p for n, p in model.named_parameters() if "lora_B" in n]
    sizes[f"live_{dtype}"] = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "lora_" in n)
    in_place = AdapterSync(model, engine, InPlaceTransport())
    in_place.push()
    sizes["engine"] = in_place.push().bytes
    copies = {}
    for key, size in {"memcpy_engine_bytes": sizes["engine"], "memcpy_live_bytes": sizes[f"live_{dtype}"]}.items():
        source = torch.randint(256, (size,), dtype=torch.uint8)
        copies[key] = (torch.empty_like(source), source)
    found: dict[str, list[float]] = {"in_place": [], "judge": [], "directory": [], **{key: [] for key in copies}}
    for i in range(pushes):
        with torch.no_grad():
            torch._foreach_add_(b_matrices, 1e-3)
        time.sleep(0.15)  # a step takes longer
        report = in_place.push()
        found["in_place"].append(report.seconds)
        found["judge"].append(report.canary_seconds)
        time.sleep(0.15)
        for key, (target, source) in copies.items():
            found[key].append(seconds(functools.partial(target.copy_, source)))
        if i % 4 == 0:
            other = AdapterSync(model, engine, DirectoryTransport())
            found["directory"].append(other.push().seconds)
            other.close()
            in_place.push()  # its slots were taken back
            in_place.push()
    times |= {f"{key}_{dtype}": values for key, values in found.items()}
    in_place.close()


def bench_sync(size: str, *, pushes: int = 40, merges: int = 2) -> dict[str, Any]:
    """Seconds of every way, their ratios; under commit, versions and machine.

    Args:
        size: of `SIZES`.
        pushes: of each dtype of the adapter.
        merges: of TRL's way, which takes long.
    """
    with tempfile.TemporaryDirectory() as work:
        return described({"size": size, **_measure(Path(work), size, pushes, merges)})


def _measure(work: Path, size: str, pushes: int, merges: int) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    shapes.make_model(work / "model", SIZES[size])
    base = prepare_base(work / "model", out=work / "base")
    engine = LocalEngine(base, max_lora_rank=RANK, max_model_length=128, max_num_seqs=4, kv_cache_gib=0.25)
    model = get_peft_model(borrow_base(engine), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    times: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for dtype in ("float32", "bfloat16"):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(getattr(torch, dtype))
        push_in_turns(model, engine, pushes, dtype, times, sizes)
    times["trl_merge"] = []
    own = get_peft_model(load_base(base), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    for _ in range(merges):
        times["trl_merge"].append(seconds(lambda: merge_cycle(own)))
    parameters = sum(p.numel() for n, p in own.named_parameters() if "lora_" in n)
    del model
    engine.close(force=True)
    found = {name: summary(values) for name, values in times.items()}
    median = {name: value["median"] for name, value in found.items()}
    return {
        "layers": SIZES[size].layers,
        "bytes": sizes,
        "adapter_parameters": parameters,
        "seconds": found,
        "modes": {
            dtype: {
                "ours": median[f"in_place_{dtype}"],
                "against": median["trl_merge"],
                "ratio": median["trl_merge"] / median[f"in_place_{dtype}"],
                "unit": "s",
            }
            for dtype in ("float32", "bfloat16")
        },
        "ratio": {
            dtype: {
                "in_place_to_memcpy_of_live_bytes": median[f"in_place_{dtype}"] / median[f"memcpy_live_bytes_{dtype}"],
                "in_place_to_memcpy_of_engine_bytes": median[f"in_place_{dtype}"]
                / median[f"memcpy_engine_bytes_{dtype}"],
                "directory_to_in_place": median[f"directory_{dtype}"] / median[f"in_place_{dtype}"],
                "trl_merge_to_in_place": median["trl_merge"] / median[f"in_place_{dtype}"],
            }
            for dtype in ("float32", "bfloat16")
        },
    }


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="0.4b")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "sync.json", metavar="FILE")
    arguments = parser.parse_args()
    found = bench_sync(arguments.size)
    print(json.dumps({"seconds": found["seconds"], "ratio": found["ratio"]}, indent=1))
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
