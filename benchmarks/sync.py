"""How long a new policy takes to reach vLLM in this process: in place, through a directory, and TRL's merge.

    python benchmarks/sync.py [--layers 24] [--pushes 40] [--merges 2] [--json benchmarks/results/sync.json]

A random Qwen2 shape (0.4 B by default), NF4 with double quantisation, LoRA of rank 16 on all linears, base held once. Alternating,
in one run: a push in place and one through tmpfs, without their proofs; a plain copy of the adapter's bytes; and TRL 1.16's
way, of which only the trainer's side is timed (merge each module into its 4-bit weight, copy it out, unmerge): its push into a
4-bit vLLM is wrong and no work of anybody's. About six minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from qlora_rl import AdapterSync, LocalEngine, load_base, prepare_base
from qlora_rl.demo.job import quieten
from qlora_rl.engine.shared import borrow_base
from qlora_rl.sync.in_place import InPlaceTransport
from qlora_rl.sync.transports import DirectoryTransport
from qlora_rl.train.run import describe_machine, describe_versions

ROOT = Path(__file__).resolve().parent.parent


def make_model(directory: Path, layers: int) -> None:
    """Qwen2.5-0.5B's shape without its vocabulary."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qlora_rl.demo.tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def seconds(action) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1], "count": len(ordered)}


def merge_cycle(model) -> None:
    """The trainer's side of TRL 1.16's `_move_model_to_vllm`: merge, walk all weights, unmerge."""
    model.merge_adapter()
    total = 0
    for _, parameter in model.named_parameters():
        total += parameter.data.numel()
    model.unmerge_adapter()


def push_in_turns(model, engine, pushes: int, dtype: str, times: dict, sizes: dict) -> None:
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
        time.sleep(0.15)  # what was pushed before is written behind meanwhile; a step takes longer
        report = in_place.push()
        found["in_place"].append(report.seconds)
        found["judge"].append(report.canary_seconds)
        time.sleep(0.15)
        for key, (target, source) in copies.items():
            found[key].append(seconds(lambda target=target, source=source: target.copy_(source)))
        if i % 4 == 0:
            other = AdapterSync(model, engine, DirectoryTransport())
            found["directory"].append(other.push().seconds)
            other.close()
            in_place.push()  # its slots were taken back
            in_place.push()
    times |= {f"{key}_{dtype}": values for key, values in found.items()}
    in_place.close()


def measure(work: Path, layers: int, pushes: int, merges: int) -> dict[str, object]:
    make_model(work / "model", layers)
    base = prepare_base(work / "model", out=work / "base")
    engine = LocalEngine(base, max_lora_rank=16, max_model_length=128, max_num_seqs=4, kv_cache_gib=0.25)
    model = get_peft_model(borrow_base(engine), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    times: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for dtype in ("float32", "bfloat16"):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(getattr(torch, dtype))
        push_in_turns(model, engine, pushes, dtype, times, sizes)
    times["trl_merge"] = []
    own = get_peft_model(load_base(base), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    for _ in range(merges):
        times["trl_merge"].append(seconds(lambda: merge_cycle(own)))
    parameters = sum(p.numel() for n, p in own.named_parameters() if "lora_" in n)
    del model
    found = {name: summary(values) for name, values in times.items()}
    median = {name: value["median"] for name, value in found.items()}
    return {
        "layers": layers,
        "bytes": sizes,
        "adapter_parameters": parameters,
        "seconds": found,
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
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--pushes", type=int, default=40)
    parser.add_argument("--merges", type=int, default=2)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "sync.json")
    arguments = parser.parse_args()
    quieten()
    with tempfile.TemporaryDirectory() as work:
        result = measure(Path(work), arguments.layers, arguments.pushes, arguments.merges)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    result = {"commit": commit, "versions": describe_versions(), "machine": describe_machine(), **result}
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"seconds": result["seconds"], "ratio": result["ratio"]}, indent=1))


if __name__ == "__main__":
    main()
