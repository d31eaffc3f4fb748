"""What calibrating a base takes, measured on random blocks of a few widths, and planned (`memory/calibrating.py`).

    python benchmarks/calibrating.py [--only WIDTH ...]

writes results/calibrating.json, row by row; each is measured by processes of its own, with one thread. One or two
blocks are calibrated and multiplied up to the model's; 8 B is planned alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rounds import described
from transformers import LlamaConfig, LlamaForCausalLM

from qlora_rl.base.calibration.blocks import chooser, quantise_by_blocks
from qlora_rl.base.quant import QuantSpec
from qlora_rl.memory.calibrating import calibration_cost
from qlora_rl.memory.shape import read_shape

RESULTS = Path(__file__).parent / "results" / "calibrating.json"
# Width, inner width, heads, heads of keys, layers, blocks that are run (none: planned alone), tokens.
ROWS = {
    "135M": (576, 1536, 9, 3, 30, 2, 5500),
    "0.4B": (1024, 3584, 16, 8, 24, 2, 5500),
    "1.4B": (2048, 6144, 16, 8, 28, 1, 5500),
    "8B": (4096, 12288, 32, 8, 36, 0, 5500),
    "8B, most text": (4096, 12288, 32, 8, 36, 0, 16384),
}


def config(name: str, layers: int) -> LlamaConfig:
    width, inner, heads, kv_heads, *_ = ROWS[name]
    return LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_hidden_layers=layers,
        num_key_value_heads=kv_heads, max_position_embeddings=1024,
    )  # fmt: skip


def peak_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def child(name: str) -> dict[str, Any]:
    *_, layers, blocks, tokens = ROWS[name]
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(name, blocks)).to(torch.bfloat16)
    weights = {n: value for n, value in model.state_dict().items() if n.endswith("_proj.weight")}
    text = torch.randint(512, (tokens // 500, 500)).tolist()
    some = {n: value for n, value in weights.items() if ".0.self_attn.q_proj" in n}  # libraries are loaded by now
    chooser(QuantSpec(), some, {})(list(some), None)
    before, started = peak_bytes(), time.process_time()
    quantise_by_blocks(model, QuantSpec(), weights, chooser(QuantSpec(), weights, {}), text)
    seconds = (time.process_time() - started) * layers / blocks
    return {"seconds": seconds, "bytes": peak_bytes() - before}


def run(name: str, **environment: str) -> dict[str, Any]:
    """`child` in a process of its own, with one thread."""
    told = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    said = subprocess.run([sys.executable, __file__, "--child", name], check=True, stdout=subprocess.PIPE, env=told)
    return json.loads(said.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child)))
        return
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    for name in args.only:
        *_, layers, blocks, tokens = ROWS[name]
        planned = calibration_cost(read_shape(config(name, layers)), tokens)
        row = {"planned": {"seconds": planned.seconds, "bytes": planned.nbytes}, "tokens": tokens}
        if blocks:
            row["measured"] = {"seconds": run(name)["seconds"]}
            # What is freed goes back to the system at once, which takes time: of the peak nothing else is meant.
            row["measured"]["bytes"] = run(name, MALLOC_MMAP_THRESHOLD_="65536")["bytes"]
        found["rows"][name] = row
        print(name, row, flush=True)
        RESULTS.write_text(json.dumps(described(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
