"""Is the memory estimate right? Measured memory of a random 0.4 B Qwen2 shape against the estimate's lines.

    python benchmarks/memory_estimate.py [--json benchmarks/results/memory_estimate.json]

The trainer's lines: growth of resident memory, in a process of its own for each optimizer, with freed memory given back
before each reading: base loaded and read once, adapter made, one backward pass, one optimizer step; for the gradients,
what they give back at the end. Their total is that of the whole process, with whatever the libraries keep. The engine's
lines: bytes of the tensors that vLLM's model holds (its resident memory has much beside them). About three minutes on
two cores.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
OPTIMIZERS = ("adamw_torch", "adamw_8bit")
RANK, LENGTH = 16, 64


def resident() -> int:
    """Resident bytes of this process, after everything freed was given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def make_base(directory: Path, layers: int = 20, vocabulary: int = 151_936):
    """The base that is measured."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qlora_rl import prepare_base
    from qlora_rl.demo.tiny_model import make_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512,
    )  # fmt: skip
    return prepare_base(Qwen2ForCausalLM(config).to(torch.bfloat16), tokenizer=make_tokenizer(), out=directory)


def train(base: str, small: str, optim: str) -> dict[str, int]:
    """The trainer's lines, measured in this process."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    from qlora_rl import load_base

    ids = torch.randint(5, 60, (1, LENGTH))
    args = TrainingArguments(output_dir=tempfile.gettempdir(), optim=optim, use_cpu=True, report_to=[])
    make_optimizer, options = Trainer.get_optimizer_cls_and_kwargs(args)

    def read(model) -> None:
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.view(torch.uint8).sum() if tensor.ndim else tensor.clone()

    def adapt(model):
        adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return adapted.train()

    def backward(model) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids, labels=ids).loss.backward()

    # Once on a tiny base: libraries, kernels and threads take their memory before anything is measured.
    warm = adapt(load_base(small))
    backward(warm)
    make_optimizer([p for p in warm.parameters() if p.requires_grad], **options).step()
    del warm

    readings = [resident()]
    model = load_base(base)
    read(model)
    readings.append(resident())
    model = adapt(model)
    readings.append(resident())
    backward(model)
    readings.append(resident())
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], **options)
    optimizer.step()
    readings.append(resident())
    model.zero_grad(set_to_none=True)
    names = ("base, trainer", "adapter", "backward pass", "optimizer")
    found = {name: after - before for name, before, after in zip(names, readings, readings[1:], strict=False)}
    # What the first backward pass leaves is more than the gradients: buffers of the libraries. So: what they give back.
    return found | {"gradients": readings[-1] - resident(), "total": readings[-1] - readings[0]}


def held(model) -> dict[str, int]:
    """Bytes of the tensors of vLLM's model: the base, and the adapter's slot."""
    import torch

    seen: dict[int, tuple[str, int]] = {}

    def note(line: str, tensor) -> None:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = (line, storage.nbytes())

    for tensor in [*model.parameters(), *model.buffers()]:
        note("base, engine", tensor)
        for state in (getattr(tensor, "bnb_quant_state", None) or {}).values():
            for value in vars(state).values():
                if isinstance(value, torch.Tensor):
                    note("base, engine", value)
    for module in model.modules():
        for name in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(module, name, None)
            for tensor in stacked if isinstance(stacked, tuple | list) else [] if stacked is None else [stacked]:
                note("adapter, engine", tensor)
    sums: dict[str, int] = {}
    for line, size in seen.values():
        sums[line] = sums.get(line, 0) + size
    return sums


def serve(base: str) -> dict[str, int]:
    """The engine's lines, in this process."""
    from qlora_rl import LocalEngine

    options = {"max_model_length": 64, "max_num_seqs": 4, "max_lora_rank": RANK, "use_tqdm_on_load": False}
    with LocalEngine(base, **options) as engine:
        return engine.llm.apply_model(held)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "memory_estimate.json")
    parser.add_argument("--train", nargs=3, metavar=("BASE", "SMALL", "OPTIM"), help=argparse.SUPPRESS)
    parser.add_argument("--serve", metavar="BASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train or arguments.serve:
        print(json.dumps(train(*arguments.train) if arguments.train else serve(arguments.serve)))
        return
    from rounds import measured_at

    from qlora_rl import plan_memory
    from qlora_rl.memory.shape import read_config
    from qlora_rl.train.run import describe_machine, describe_versions

    def apart(*options: str) -> dict[str, int]:
        environment = {**os.environ, **MALLOC, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        return json.loads(next(x for x in reversed(done.stdout.splitlines()) if x.startswith("{")))

    rows = []
    with tempfile.TemporaryDirectory() as directory:
        base = make_base(Path(directory) / "base")
        small = make_base(Path(directory) / "small", layers=1, vocabulary=1000)
        measured = {optim: apart("--train", str(base), str(small), optim) for optim in OPTIMIZERS}
        engine = apart("--serve", str(base))
        config = read_config(base)
        for optim in OPTIMIZERS:
            estimate = plan_memory(
                config, rank=RANK, spec=base.spec, optimizer=optim, shared=False, device="cpu", max_length=LENGTH
            )
            found = measured[optim] | (engine if optim == OPTIMIZERS[0] else {})
            for line in estimate.lines:
                is_new = optim == OPTIMIZERS[0] or line.name == "optimizer"
                if line.name in found and is_new:
                    name = f"optimizer, {optim}" if line.name == "optimizer" else line.name
                    size = found[line.name]
                    rows.append(
                        {"line": name, "estimate": line.nbytes, "measured": size, "off": line.nbytes / size - 1}
                    )
        parameters = estimate.shape.parameters
    first = [row for row in rows if row["line"] in ("base, trainer", "adapter", "gradients", "optimizer, adamw_torch")]
    total = sum(r["estimate"] for r in first) / measured[OPTIMIZERS[0]]["total"] - 1
    commit = measured_at()
    result = {
        "command": "python benchmarks/memory_estimate.py",
        "commit": commit,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "parameters": parameters,
        "rank": RANK,
        "trainer_total_off": total,
        "rows": rows,
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
