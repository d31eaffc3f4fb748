"""Memory of one GRPO loss step (forward, loss, backward) at growing completion lengths, three ways to score the tokens.

    python benchmarks/memory_step.py [--json benchmarks/results/memory_step.json]

ours        small tiles (qlora_rl/train/scoring/logprobs.py)
trl         TRL 1.16's default: tiles of 4096 tokens x 32768 words
full        all logits at once, B x T x V (as before TRL had a fused head)

A random 4-bit Qwen2 of two layers with a vocabulary of 65,536 words, LoRA on every linear, gradient checkpointing, bf16
autocast. Each point is a process of its own. Two measures: `live`, the most bytes of live tensors, as a dispatch mode of torch
sees them (temporary memory inside one operator is not seen); `resident`, the growth of the process's peak resident memory.
About ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH, PROMPT, VOCABULARY = 2, 32, 65_536
# Freed memory goes back at once: glibc would keep blocks of up to 32 MiB, and the peak would be that of its heap.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
LENGTHS = (256, 512, 1024, 2048)
WAYS = ("ours", "trl", "full")


def high_water(reset: bool = False) -> tuple[int, int]:
    """(resident, peak resident) bytes of this process; `reset` starts the peak anew (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024


def make_base(directory: Path):
    """The base of all points."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from qlora_rl import prepare_base
    from qlora_rl.demo.tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return prepare_base(Qwen2ForCausalLM(config).to(torch.bfloat16), tokenizer=tokenizer, out=directory)


def full_logits(model, temperature):
    """A forward that answers the fused call out of all logits."""
    import types

    from trl.trainer.utils import FusedCausalLMOutput, entropy_from_logits, selective_log_softmax

    inner = model.forward

    def forward(self, *args, fused_lm_head=False, labels=None, **kwargs):
        logits = inner(*args, **kwargs, use_cache=False).logits[:, :-1] / temperature
        logprobs = selective_log_softmax(logits, labels[:, 1:].clamp(min=0))
        return FusedCausalLMOutput(log_probs=logprobs, entropy=entropy_from_logits(logits.detach()))

    model.forward = types.MethodType(forward, model)


def point(way: str, length: int, base: str, measure: str) -> dict:
    """One step in this process."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig

    import qlora_rl.train.online as online
    from qlora_rl import FakeEngine, QLoRAGRPOTrainer, load_base
    from qlora_rl.bench.live import Live

    if way != "ours":
        online.use_small_tiles = lambda *_: False
    with tempfile.TemporaryDirectory() as directory, FakeEngine(load_base(base), max_model_length=4096) as engine:
        trainer = QLoRAGRPOTrainer(
            model=base,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_list([{"prompt": "1+1="}] * 8),
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
            rollout=engine,
            canary_every=0,
            args=GRPOConfig(
                output_dir=directory, per_device_train_batch_size=BATCH, num_generations=2, use_cpu=True, bf16=True,
                report_to=[], seed=0,
            ),
        )  # fmt: skip
        model = trainer.model
        bare = model.get_base_model()
        if way == "full":
            full_logits(bare, trainer.temperature)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        model.train()
        model.gradient_checkpointing_enable()  # transformers does it in train()
        trainer.use_vllm = False
        trainer.current_gradient_accumulation_steps = 1  # transformers sets it in train()

        def step(length: int) -> float:
            ids = torch.randint(0, VOCABULARY, (BATCH, PROMPT + length), generator=generator)
            completion_mask = torch.ones(BATCH, length, dtype=torch.long)
            completion_mask[0, -length // 8 :] = 0
            inputs = {
                "prompt_ids": ids[:, :PROMPT],
                "prompt_mask": torch.ones(BATCH, PROMPT, dtype=torch.long),
                "completion_ids": ids[:, PROMPT:],
                "completion_mask": completion_mask,
                "advantages": torch.tensor([1.0, -1.0]),
                "num_items_in_batch": completion_mask.sum(),
                "old_per_token_logps": torch.full((BATCH, length), -math.log(VOCABULARY)),
            }
            model.zero_grad()
            loss = trainer._compute_loss(model, inputs)
            trainer.accelerator.backward(loss)
            return loss.item()

        step(16)  # threads, workspaces, gradients
        before = high_water(reset=True)[0]
        started = time.perf_counter()
        if measure == "live":
            with Live() as live:
                loss = step(length)
            found = {"live_mib": live.peak / 2**20}
        else:
            loss = step(length)
            found = {"resident_mib": (high_water()[1] - before) / 2**20}
        found |= {"seconds": time.perf_counter() - started, "loss": loss}
        found["gradients"] = (
            sum(p.grad.double().norm().item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
        )
        trainer.close()
        return found


def estimates(base) -> dict[str, float]:
    """The ledger's peak of a step at every length, without the gradients, which are there before."""
    from qlora_rl import plan_memory
    from qlora_rl.ledger.shape import read_config

    found = {}
    for length in LENGTHS:
        options = {"batch_size": BATCH, "max_length": PROMPT + length, "device": "cpu", "has_engine": False}
        ledger = plan_memory(read_config(base), rank=8, spec=base.spec, **options)
        gradients = next(line.nbytes for line in ledger.lines if line.name == "gradients")
        found[str(length)] = (ledger.step_bytes - gradients) / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "memory_step.json")
    parser.add_argument("--point", nargs=4, metavar=("WAY", "LENGTH", "BASE", "MEASURE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        way, length, base, measure = arguments.point
        print(json.dumps(point(way, int(length), base, measure)))
        return
    from qlora_rl.bench.rounds import measured_at
    from qlora_rl.train.run import describe_machine, describe_versions

    points: dict = {way: {} for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        base = make_base(Path(directory) / "base")
        for way in WAYS:
            for length in LENGTHS:
                entry: dict = {}
                for measure in ("live", "resident"):
                    command = [sys.executable, __file__, "--point", way, str(length), str(base), measure]
                    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **MALLOC})
                    if done.returncode:
                        raise RuntimeError(done.stderr[-2000:])
                    entry |= json.loads(done.stdout.splitlines()[-1])
                points[way][str(length)] = entry
                print(way, length, entry, flush=True)
        ledger = estimates(base)
    first, last = str(LENGTHS[0]), str(LENGTHS[-1])
    commit = measured_at()
    result = {
        "command": "python benchmarks/memory_step.py",
        "commit": commit,
        "machine": describe_machine(),
        "versions": describe_versions(),
        "batch": BATCH,
        "prompt": PROMPT,
        "vocabulary": VOCABULARY,
        "growth_at_8x": {
            way: {m: points[way][last][m] / points[way][first][m] for m in ("live_mib", "resident_mib")} for way in WAYS
        },
        "less_than_trl_at_8x": {
            m: points["trl"][last][m] / points["ours"][last][m] for m in ("live_mib", "resident_mib")
        },
        "ledger_mib": ledger,
        "points": points,
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("growth_at_8x", "less_than_trl_at_8x")}, indent=1))


if __name__ == "__main__":
    main()
