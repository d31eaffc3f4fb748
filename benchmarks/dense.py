"""What a push of full weights costs: seconds against TRL's merge, drift of the trainer's base, memory beside the model.

    python benchmarks/dense.py [--layers 7] [--pushes 10] [--json benchmarks/results/dense.json]

A random Qwen2 shape (0.1 B by default), NF4 with double quantisation, LoRA of rank 16 on all linears with a random B;
vLLM on the baked base. Of TRL 1.16's way only the trainer's side is timed (merge each module into its 4-bit weight,
walk them, unmerge); ours is the whole push, vLLM's part included. Drift: of all dequantised weights together, |now -
before| / |before|, after as many pushes. Memory: live bytes of every tensor that torch makes during a push and that was
not there before, at their peak, seen through a dispatch mode; what vLLM's CPU kernels pack away inside is not seen, nor
the memory of a server. A server on this host is given the weights through tmpfs and in requests, five times each, in
turns with a merge of TRL's. Four minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from live_memory import Live
from peft import LoraConfig, get_peft_model
from rounds import measured_at
from sync import make_model, merge_cycle, seconds, summary

from qlora_rl import DenseSync, LocalEngine, bake_base, iter_weights, load_base, prepare_base
from qlora_rl.base.quant import dequantised_weight
from qlora_rl.demo.job import quieten
from qlora_rl.engine.server import LocalServer
from qlora_rl.train.run import describe_machine, describe_versions

ROOT = Path(__file__).resolve().parent.parent


def adapted(base, *, dora: bool = False):
    """The 4-bit model with LoRA whose B is random."""
    torch.manual_seed(0)
    model = get_peft_model(load_base(base), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", use_dora=dora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return model


@torch.no_grad()
def linears(model) -> list[torch.Tensor]:
    """The weights that the 4-bit linears stand for."""
    return [dequantised_weight(p).clone() for p in model.parameters() if getattr(p, "quant_state", None) is not None]


def make_each(model) -> None:
    """Every weight, and let go of it."""
    for _, weight in iter_weights(model, dtype=torch.bfloat16):
        del weight


def drift(now: list[torch.Tensor], before: list[torch.Tensor]) -> float:
    off = sum(float((a - b).square().sum()) for a, b in zip(now, before, strict=True))
    return (off / sum(float(b.square().sum()) for b in before)) ** 0.5


def measure(work: Path, layers: int, pushes: int) -> dict[str, object]:
    make_model(work / "model", layers)
    base = prepare_base(work / "model", out=work / "base")
    model = adapted(base)
    before, start = {n: p.detach().clone() for n, p in model.named_parameters()}, linears(model)
    largest = max(w.numel() for w in start)
    times: dict[str, list[float]] = {"push": [], "dora_push": [], "making_the_weights": [], "trl_merge": []}
    memory: dict[str, int] = {}
    options = {"max_lora_rank": 0, "max_model_length": 128, "max_num_seqs": 4, "kv_cache_gib": 0.25}
    with LocalEngine(bake_base(base, out=work / "baked"), **options) as engine:
        strategy, other = DenseSync(model, engine), DenseSync(adapted(base, dora=True), engine)
        strategy.push()  # the first one warms up
        merged = adapted(base)
        for i in range(pushes):
            report = strategy.push()
            times["push"].append(report.seconds)
            times["making_the_weights"].append(report.export_seconds)
            if i < 5:
                times["dora_push"].append(other.push().seconds)
            times["trl_merge"].append(seconds(lambda: merge_cycle(merged)))
        for name, walk in {
            "push": strategy.push,
            "making_lora": lambda: make_each(model),
            "making_dora": lambda: make_each(other.model),
        }.items():
            with Live() as tracked:
                walk()
            memory[name] = tracked.peak
    for way in ("directory", "http"):
        with LocalServer(work / "baked", **options) as engine:
            engine._near = way == "directory"
            strategy = DenseSync(model, engine)
            strategy.push()
            for _ in range(5):
                times.setdefault(f"server_{way}", []).append(strategy.push().seconds)
                times.setdefault(f"trl_merge_beside_{way}", []).append(seconds(lambda: merge_cycle(merged)))
            with Live() as tracked:
                strategy.push()
            memory[f"server_{way}"] = tracked.peak
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    delta = sum(
        float((m.scaling["default"] * m.lora_B["default"].weight @ m.lora_A["default"].weight).square().sum())
        for m in model.modules()
        if hasattr(m, "lora_A") and "default" in m.lora_A
    )
    found = {name: summary(values) for name, values in times.items()}
    medians = {name: value["median"] for name, value in found.items()}
    return {
        "layers": layers,
        "pushes": pushes,
        "threads": torch.get_num_threads(),
        "parameters": sum(w.numel() for w in start),
        "adapter_to_base": (delta / sum(float(w.square().sum()) for w in start)) ** 0.5,
        "seconds": found,
        "ratio": {
            "push_to_trl_merge": medians["push"] / medians["trl_merge"],
            "dora_push_to_trl_merge": medians["dora_push"] / medians["trl_merge"],
            "server_directory_to_trl_merge": medians["server_directory"] / medians["trl_merge_beside_directory"],
            "server_http_to_trl_merge": medians["server_http"] / medians["trl_merge_beside_http"],
        },
        "drift": {"ours": drift(linears(model), start), "trl": drift(linears(merged), start)},
        "largest_module_bytes": {"bfloat16": 2 * largest, "float32": 4 * largest},
        "peak_extra_bytes": memory,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "dense.json")
    arguments = parser.parse_args()
    quieten()
    with tempfile.TemporaryDirectory() as work:
        result = measure(Path(work), arguments.layers, arguments.pushes)
    commit = measured_at()
    result = {"commit": commit, "versions": describe_versions(), "machine": describe_machine(), **result}
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("versions", "machine")}, indent=1))


if __name__ == "__main__":
    main()
