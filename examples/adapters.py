"""Six trainings at once on one 4-bit base, in one process: three seeds and two learning rates, with calls instead of a
trainer.

python examples/adapters.py                        # the demo's tiny model, two CPU cores
python examples/adapters.py --model Qwen/Qwen3-0.6B --lr 1e-4 1e-5     # a hub model; not run yet
"""

import argparse
from itertools import product

from qlora_rl import Adapters, TrainingRow, prepare_base
from qlora_rl.demo.task import grpo_rows, reward_exact_match
from qlora_rl.demo.tiny_model import make_tiny_model

P, G = 8, 8  # prompts of a step, completions of each
MAX_TOKENS = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub name or checkpoint directory (default: the demo's tiny model)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 1e-4])
    asked = parser.parse_args()
    base = prepare_base(asked.model or make_tiny_model())
    runs = {f"seed {seed}, lr {lr:g}": (seed, lr) for seed, lr in product(range(3), asked.lr)}
    with Adapters(base, max_adapters=len(runs), max_rank=16, max_model_length=64) as adapters:
        for name, (seed, _) in runs.items():
            adapters.create(name, rank=16, seed=seed)
        for step in range(asked.steps):
            batches, prompts = {}, {}
            for name, (seed, _) in runs.items():
                adapters.push(name)  # copied into vLLM's buffers, and checked there
                rows = grpo_rows(seed=1000 * seed + step, count=P)
                batches[name] = [row for row in rows for _ in range(G)]
                prompts[name] = [adapters.tokenizer.encode(row["prompt"]) for row in batches[name]]
            # All completions of all adapters, in the same batches of vLLM.
            rollouts = adapters.sample(prompts, temperature=1.0, max_tokens=MAX_TOKENS, seed=step)
            rewards = {}
            for name, (_, lr) in runs.items():
                rollout = rollouts[name]
                texts = adapters.tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
                gains = reward_exact_match(texts, [row["answer"] for row in batches[name]])
                rewards[name] = sum(gains) / len(gains)
                groups = [gains[first : first + G] for first in range(0, P * G, G)]
                advantages = [gain - sum(group) / G for group in groups for gain in group]
                sampled = zip(prompts[name], rollout.completion_ids, rollout.logprobs, advantages, strict=True)
                rows = [TrainingRow.of(*each) for each in sampled]
                adapters.forward_backward(name, rows, "importance_sampling")
                adapters.optim_step(name, learning_rate=lr, grad_clip_norm=1.0)
            print(
                f"step {step + 1}: " + "; ".join(f"{name}: {value:.2f}" for name, value in rewards.items()), flush=True
            )


if __name__ == "__main__":
    main()
