"""How long a push to a server takes; and what the server's own gauges say of it.

    python benchmarks/server.py [--layers 24] [--pushes 20] [--json benchmarks/results/server.json]

The random Qwen2 shape of `sync.py` (0.4 B by default), NF4 with double quantisation, LoRA of rank 16 on all linears in
float32, a server in a process of its own on the same machine. The adapter is sent in the body of a request, and each
push is verified by the canary, whose seconds are given too. About two minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import httpx
import torch
from peft import LoraConfig, get_peft_model
from rounds import measured_at
from sync import ROOT, make_model, summary

from qlora_rl import AdapterSync, Canary, ServerEngine, load_base, prepare_base, start_server
from qlora_rl.adapter.store import default_root
from qlora_rl.demo.job import quieten
from qlora_rl.sync.transports import BytesTransport
from qlora_rl.train.run import describe_machine, describe_versions

PARTS = ("seconds", "export_seconds", "deliver_seconds", "load_seconds")
# vLLM's worker looks for work without rest for a second after each request, on cores that the trainer needs; a step
# takes longer.
PAUSE_S = 1.5


def read_gauges(server) -> dict[str, float]:
    """The server's own figures of its policy."""
    text = httpx.get(f"{server.url}/metrics", headers={"authorization": f"Bearer {server.key}"}, timeout=60).text
    return {
        name: float(value)
        for name, _, value in (line.partition(" ") for line in text.splitlines())
        if name.startswith("qlora_rl_")
    }


def measure(work: Path, layers: int, pushes: int) -> dict[str, object]:
    make_model(work / "model", layers)
    base = prepare_base(work / "model", out=work / "base")
    options = {"max_lora_rank": 16, "max_model_length": 128, "max_num_seqs": 4, "kv_cache_gib": 0.25}
    model = get_peft_model(load_base(base), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    b_matrices = [p for n, p in model.named_parameters() if "lora_B" in n]
    with (
        start_server(base, **options) as server,
        ServerEngine(server.url, api_key=server.key) as engine,
    ):
        engine.drop_adapter()
        transports = {"http": BytesTransport()}
        ways = {name: AdapterSync(model, engine, each, Canary(model, engine)) for name, each in transports.items()}
        for strategy in ways.values():
            strategy.canary.calibrate()
            strategy.canary.every = 2
        reports = {name: [] for name in ways}
        gauges: dict[str, dict[str, float]] = {}
        for _ in range(pushes + 1):
            for name, strategy in ways.items():
                with torch.no_grad():
                    torch._foreach_add_(b_matrices, 1e-4)
                time.sleep(PAUSE_S)
                reports[name].append(strategy.push())
                gauges[name] = read_gauges(server)
        versions = [report.version for each in zip(*reports.values(), strict=True) for report in each]
        if versions != list(range(1, pushes + 2)):
            raise RuntimeError(f"the versions are {versions}. Every push must count one.")
        for strategy in ways.values():
            strategy.close()
    kept = {name: found[1:] for name, found in reports.items()}  # the first of each is no median's business
    return {
        "layers": layers,
        "adapter_parameters": sum(p.numel() for n, p in model.named_parameters() if "lora_" in n),
        "bytes": {name: found[-1].bytes for name, found in kept.items()},
        "sync_report": {
            name: {
                **{part: summary([getattr(report, part) for report in found]) for part in PARTS},
                "canary_seconds_held": summary([r.canary_seconds for r in found if r.canary_difference is None]),
                "canary_seconds_scored": summary([r.canary_seconds for r in found if r.canary_difference is not None]),
            }
            for name, found in kept.items()
        },
        "gauges_after_the_last_push": gauges,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--pushes", type=int, default=20)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "server.json")
    arguments = parser.parse_args()
    quieten()
    with tempfile.TemporaryDirectory(dir=default_root()) as work:
        result = measure(Path(work), arguments.layers, arguments.pushes)
    commit = measured_at()
    result = {"commit": commit, "versions": describe_versions(), "machine": describe_machine(), **result}
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["sync_report"], indent=1))


if __name__ == "__main__":
    main()
