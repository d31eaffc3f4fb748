"""The time of a push of full weights to two engines, beside a push to one: two servers on this host, and two actors of
Ray.

    python benchmarks/dense_fleet.py [--layers 7] [--pushes 7] [--json benchmarks/results/dense_fleet.json]

DoRA of rank 16 on all linears of a random Qwen2 shape (0.1 B by default), NF4 with double quantisation; vLLM in bf16 on
the baked base. Pushes to one and to two take turns, after one of each that is not counted. "One" is the first of the
two servers without a fleet, through tmpfs and in requests, and a fleet of one actor beside that of two. All share this
machine's cores, with the trainer too. Ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch
from dense import adapted
from live_memory import Live
from rounds import measured_at
from sync import make_model, summary

from qlora_rl import DenseSync, RayFleet, ServerEngine, bake_base, connect, prepare_base, start_server
from qlora_rl.demo.job import quieten
from qlora_rl.train.run import describe_machine, describe_versions

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {"max_lora_rank": 0, "max_model_length": 128, "max_num_seqs": 4, "kv_cache_gib": 0.25}


def in_turns(model, one, two, pushes: int) -> dict[str, object]:
    """Seconds of pushes to either, the median of their ratios in pairs, and the most live bytes that one to two adds
    here."""
    strategies = {"one": DenseSync(model, one), "two": DenseSync(model, two)}
    times: dict[str, list[float]] = {"one": [], "two": []}
    for i in range(pushes + 1):
        for name, strategy in strategies.items():
            strategy.engine.claim(force=True)
            seconds = strategy.push().seconds
            if i:
                times[name].append(seconds)
    with Live() as tracked:
        strategies["two"].push()
    ratios = [b / a for a, b in zip(times["one"], times["two"], strict=True)]
    return {
        "seconds": {name: summary(values) for name, values in times.items()},
        "two_to_one": statistics.median(ratios),
        "two_to_one_each": ratios,
        "peak_extra_bytes": tracked.peak,
    }


def measure(work: Path, layers: int, pushes: int) -> dict[str, object]:
    make_model(work / "model", layers)
    base = prepare_base(work / "model", out=work / "base")
    baked = bake_base(base, out=work / "baked")
    model, found = adapted(base, dora=True), {}
    largest = max(
        p.quant_state.shape.numel() for p in model.parameters() if getattr(p, "quant_state", None) is not None
    )
    with start_server(baked, **OPTIONS) as first, start_server(baked, key=first.key, **OPTIONS) as second:
        for way in ("directory", "http"):
            with (
                ServerEngine(first.url, api_key=first.key) as one,
                connect([first.url, second.url], api_key=first.key) as two,
            ):
                if way == "http":
                    for each in (one, *two.replicas):
                        each._near = False
                two.claim(force=True)
                two.drop_adapter()
                found[f"server_{way}"] = in_turns(model, one, two, pushes)
    import ray

    ray.init(address="local", num_cpus=3, include_dashboard=False, object_store_memory=2**29, log_to_driver=False)
    with RayFleet(baked, replicas=1, **OPTIONS) as one, RayFleet(baked, replicas=2, **OPTIONS) as two:
        found["ray"] = in_turns(model, one, two, pushes)
    ray.shutdown()
    return {
        "layers": layers,
        "pushes": pushes,
        "threads": torch.get_num_threads(),
        "largest_matrix": largest,
        "ways": found,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--pushes", type=int, default=7)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "dense_fleet.json")
    arguments = parser.parse_args()
    quieten()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as work:
        result = measure(Path(work), arguments.layers, arguments.pushes)
    commit = measured_at()
    result = {
        "commit": commit,
        "load_before": load,
        "versions": describe_versions(),
        "machine": describe_machine(),
        **result,
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k not in ("versions", "machine")}, indent=1))


if __name__ == "__main__":
    main()
