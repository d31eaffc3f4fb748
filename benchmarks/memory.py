"""What one copy of the base saves: resident memory of trainer and engine in one process, sharing the base or not.

    python benchmarks/memory.py [--json benchmarks/results/shared_base.json] [--repeats 3]

A random 0.4 B Qwen2 shape as NF4 with double quantisation. Each number is a process of its own: one that only imports,
one with the engine and no trainer, one with two copies (`load_base` beside the engine), one with one (`borrow_base`).
They generate, and take one backward step through a LoRA, before they are measured: every page of a weight has been
touched. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = ("imports", "engine alone", "two copies", "one copy")
MIB = 2**20


def prepare(directory: Path) -> dict[str, int]:
    """Write the base; parameters of the model, and bytes of all tensors that a loaded base holds."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qlora_rl import prepare_base
    from qlora_rl.base.reader import StoredTensors
    from qlora_rl.demo.tiny_model import make_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=20, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    base = prepare_base(model, tokenizer=make_tokenizer(), out=directory)
    stored = StoredTensors(base.path)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "base_bytes": sum(t.numel() * t.element_size() for t in stored.values()),
    }


def measure(kind: str, directory: Path) -> dict[str, float]:
    """Resident memory of this process, in MiB, when it holds what `kind` says."""
    import psutil
    import torch
    import transformers
    import trl
    import vllm
    from peft import LoraConfig, get_peft_model

    from qlora_rl import LocalEngine, borrow_base, load_base
    from qlora_rl.engine.cleanup import trim_memory

    assert all((transformers.Qwen2ForCausalLM, trl.GRPOTrainer, vllm.LLM))  # lazy modules: now they are loaded
    held: dict[str, float] = {}
    if kind != "imports":
        engine = LocalEngine(
            directory,
            max_lora_rank=16,
            max_model_length=64,
            max_num_seqs=4,
            kv_cache_gib=0.0625,
            use_tqdm_on_load=False,
        )
        ids = torch.arange(100, 116)[None]
        if kind != "engine alone":
            model = borrow_base(engine) if kind == "one copy" else load_base(directory)
            if kind == "one copy":
                held["copied_weights"] = len(model.qlora_loan.copied)
                held["shared_mib"] = model.qlora_loan.shared_bytes / MIB
            torch.manual_seed(0)
            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
            model(ids, labels=ids).loss.backward()
        engine.generate([ids[0].tolist()] * 2, max_tokens=4, seed=0)
    trim_memory()
    info = psutil.Process().memory_info()
    return {"rss_mib": info.rss / MIB, "file_mib": info.shared / MIB, **held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "shared_base.json")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "BASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print("RESULT", json.dumps(measure(arguments.measure[0], Path(arguments.measure[1]))))
        return
    from rounds import measured_at

    from qlora_rl.train.run import describe_machine, describe_versions

    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory) / "base"
        shape = prepare(base)
        for _ in range(arguments.repeats):
            for kind in KINDS:
                command = [sys.executable, __file__, "--measure", kind, str(base)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr[-3000:])
                line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
                runs[kind].append(json.loads(line.removeprefix("RESULT ")))
                print(kind, runs[kind][-1], flush=True)
    median = {kind: sorted(run["rss_mib"] for run in found)[len(found) // 2] for kind, found in runs.items()}
    above = {kind: median[kind] - median["imports"] for kind in KINDS[1:]}
    base_mib = shape["base_bytes"] / MIB
    saved = median["two copies"] - median["one copy"]
    commit = measured_at()
    result = {
        "command": "python benchmarks/memory.py",
        "commit": commit,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "parameters": shape["parameters"],
        "base_mib": base_mib,
        "copied_weights": max(run["copied_weights"] for run in runs["one copy"]),
        "shared_mib": runs["one copy"][0]["shared_mib"],
        "rss_mib": median,
        "above_imports_mib": above,
        "saved_mib": saved,
        "saved_over_base": saved / base_mib,
        "above_imports_over_base": {kind: value / base_mib for kind, value in above.items()},
        "runs": runs,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "runs"}, indent=1))


if __name__ == "__main__":
    main()
