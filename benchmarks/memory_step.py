"""Memory of one GRPO loss step (forward, loss, backward) at growing completion lengths, three ways to score the tokens.

    python benchmarks/memory_step.py [--json benchmarks/results/memory_step.json]

ours        small tiles (qlora_rl/train/scoring/logprobs.py)
trl         TRL 1.16's default: tiles of 4096 tokens x 32768 words
full        all logits at once, B x T x V (as before TRL had a fused head)

A random 4-bit Qwen2 of two layers with a vocabulary of 65,536 words, LoRA on every linear, gradient checkpointing, bf16
autocast, one thread. The head alone differs: all three run in the same trainer, and what else it saves is measured by
padding.py. Counted are live tensors, as a dispatch mode of torch sees them: temporary memory inside one operator is not
seen. About two minutes on an idle core.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from unittest import mock

BATCH, PROMPT, VOCABULARY = 2, 32, 65_536
LENGTHS = (256, 512, 1024, 2048)
WAYS = ("ours", "trl", "full")


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


def measure(way: str, base) -> dict[str, dict]:
    """A step of each length."""
    import torch
    from datasets import Dataset
    from live_memory import Live
    from peft import LoraConfig
    from trl import GRPOConfig

    import qlora_rl.train.online as online
    from qlora_rl import FakeEngine, QLoRAGRPOTrainer, load_base

    with tempfile.TemporaryDirectory() as directory, FakeEngine(load_base(base), max_model_length=4096) as engine:
        tiles = online.use_small_tiles if way == "ours" else lambda *_: False
        with mock.patch.object(online, "use_small_tiles", tiles):
            trainer = QLoRAGRPOTrainer(
                model=str(base.path),
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
        bare = trainer.model.get_base_model()
        if way == "full":
            full_logits(bare, trainer.temperature)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        trainer.model.train()
        trainer.model.gradient_checkpointing_enable()  # transformers does it in train()
        model = trainer.accelerator.prepare_model(trainer.model)  # its forward gets autocast
        trainer.use_vllm = False
        trainer.current_gradient_accumulation_steps = 1  # transformers sets it in train()

        def step(length: int) -> float:
            ids = torch.randint(0, VOCABULARY, (BATCH, PROMPT + length), generator=generator.manual_seed(length))
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

        step(16)
        points = {}
        for length in LENGTHS:
            started = time.process_time()
            with Live() as live:
                loss = step(length)
            squares = [p.grad.double().norm().item() ** 2 for p in model.parameters() if p.grad is not None]
            points[str(length)] = {
                "live_mib": live.peak / 2**20,
                "cpu_seconds": time.process_time() - started,
                "loss": loss,
                "gradients": sum(squares) ** 0.5,
            }
            print(way, length, points[str(length)], flush=True)
        trainer.close()
        return points


def estimates(base) -> dict[str, float]:
    """The estimate's peak of a step at every length."""
    from qlora_rl import plan_memory
    from qlora_rl.memory.shape import read_config

    found = {}
    for length in LENGTHS:
        options = {"batch_size": BATCH, "max_length": PROMPT + length, "device": "cpu", "has_engine": False}
        estimate = plan_memory(read_config(base.path), rank=8, spec=base.spec, **options)
        found[str(length)] = estimate.step_bytes / 2**20
    return found


def main() -> None:
    import torch
    from rounds import described

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "memory_step.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        base = make_base(Path(directory) / "base")
        points = {way: measure(way, base) for way in WAYS}
        estimate = estimates(base)
    first, last = str(LENGTHS[0]), str(LENGTHS[-1])
    result = {
        "command": "python benchmarks/memory_step.py",
        "batch": BATCH,
        "prompt": PROMPT,
        "vocabulary": VOCABULARY,
        "growth_at_8x": {way: points[way][last]["live_mib"] / points[way][first]["live_mib"] for way in WAYS},
        "less_than_trl_at_8x": points["trl"][last]["live_mib"] / points["ours"][last]["live_mib"],
        "estimate_mib": estimate,
        "points": points,
    }
    arguments.json.write_text(json.dumps(described(result), indent=1) + "\n")
    print(json.dumps({k: result[k] for k in ("growth_at_8x", "less_than_trl_at_8x")}, indent=1))


if __name__ == "__main__":
    main()
