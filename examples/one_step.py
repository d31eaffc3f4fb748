"""GRPO on a 4-bit base without a trainer: load, share, verify, push, check, sample, reward, loss, in the trainers'
order.

python examples/one_step.py                                      # the demo's tiny model, two CPU cores
python examples/one_step.py --model Qwen/Qwen3-0.6B --lr 1e-5    # a hub model; not run yet

Shapes: P prompts, G completions of each, B = P * G rows, T tokens of a row (prompt, completion, padding on the right).
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model

from qlora_rl import AdapterSync, Canary, LocalEngine, borrow_base, judge_adapter, prepare_base, verify_base
from qlora_rl.demo.task import grpo_rows, reward_exact_match
from qlora_rl.demo.tiny_model import make_tiny_model
from qlora_rl.fidelity import measure
from qlora_rl.sync.in_place import InPlaceTransport

P, G = 8, 8
MAX_TOKENS = 8  # of a completion
CLIP = 0.2  # of the policy ratio
TRUST = 2.0  # largest weight of a token that the sampler thought less likely than the trainer does


def pad(rows, value=0):
    """Rows of numbers as one tensor [B, T]."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(row) for row in rows], batch_first=True, padding_value=value
    )


def advantages(rewards_B):
    """Of each completion against the others of its prompt; 0 where all are worth the same."""
    rewards_PG = rewards_B.view(P, G)
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return (centred_PG / (rewards_PG.std(1, keepdim=True) + 1e-4)).view(-1)


def logprobs_of(model, ids_BT, attention_BT):
    """The trainer's logprob of each token but the first, [B, T - 1]."""
    logits_BTV = model(input_ids=ids_BT, attention_mask=attention_BT).logits[:, :-1].float()
    return logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]


def grpo_loss(new_BT, old_BT, sampled_BT, mask_BT, advantages_B):
    """Clipped policy gradient, each token weighed by how far the sampler was from the policy that is trained.

    Args:
        new_BT: logprobs of the trainer, with gradients.
        old_BT: the same when the completions were sampled; here that is now.
        sampled_BT: logprobs of the engine.
        mask_BT: 1 at tokens of completions.
        advantages_B: one for each completion.
    """
    ratio_BT = (new_BT - old_BT).exp()
    gain_BT = torch.minimum(
        ratio_BT * advantages_B[:, None], ratio_BT.clamp(1 - CLIP, 1 + CLIP) * advantages_B[:, None]
    )
    trust_BT = ((old_BT - sampled_BT) * mask_BT).exp().clamp(max=TRUST)
    return -(gain_BT * trust_BT * mask_BT).sum() / mask_BT.sum()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub name or checkpoint directory (default: the demo's tiny model)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-3)
    asked = parser.parse_args()
    torch.manual_seed(0)

    # One 4-bit base on disk, loaded by vLLM. The trainer computes with vLLM's tensors: the base is in memory once.
    base = prepare_base(asked.model or make_tiny_model())
    with LocalEngine(base, max_lora_rank=16, max_model_length=64, max_num_seqs=P * G) as engine:
        model = get_peft_model(borrow_base(engine), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=asked.lr)
        tokenizer = engine.tokenizer

        # Before the first step: both hold the same weights, and the adapter is one that vLLM can apply.
        print(f"base verified: {verify_base(model, engine).is_verified}; adapter: {judge_adapter(model)}")
        canary = Canary(model, engine, every=4)
        canary.calibrate()
        sync = AdapterSync(model, engine, InPlaceTransport(), canary)

        rows = grpo_rows(seed=0, count=P * asked.steps)
        for step in range(asked.steps):
            # Push: only LoRA weights are copied, into the slot that does not serve; then both sides score the canary.
            report = sync.push()

            # Sample G completions of each of P prompts, and reward them.
            batch = [row for row in rows[P * step : P * (step + 1)] for _ in range(G)]
            prompts = [tokenizer.encode(row["prompt"]) for row in batch]
            rollout = engine.generate(prompts, temperature=1.0, max_tokens=MAX_TOKENS, seed=step)
            texts = tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
            rewards_B = torch.tensor(reward_exact_match(texts, [row["answer"] for row in batch]))

            # Score the same tokens with the model that is trained.
            pairs = list(zip(prompts, rollout.completion_ids, rollout.logprobs, strict=True))
            ids_BT = pad([p + list(c) for p, c, _ in pairs], tokenizer.pad_token_id or 0).to(model.device)
            attention_BT = pad([[1] * (len(p) + len(c)) for p, c, _ in pairs]).to(model.device)
            mask_BT = pad([[0] * (len(p) - 1) + [1] * len(c) for p, c, _ in pairs]).to(model.device)
            sampled_BT = pad([[0.0] * (len(p) - 1) + list(values) for p, _, values in pairs]).to(model.device)
            new_BT = logprobs_of(model, ids_BT, attention_BT)

            # Did the sampler use the policy that is trained? Here it did: KL is rounding.
            fidelity = measure(new_BT.detach(), sampled_BT, mask_BT)

            loss = grpo_loss(new_BT, new_BT.detach(), sampled_BT, mask_BT, advantages(rewards_B).to(model.device))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            print(
                f"step {step + 1}: reward {rewards_B.mean():.3f}, KL to the sampler {fidelity.mismatch_kl:.1e}, "
                f"version {report.version}: {report.bytes:,} bytes in {1000 * report.seconds:.1f} ms",
                flush=True,
            )
        sync.close()
        del model, optimizer, canary, sync  # the engine's tensors are given back before it closes


if __name__ == "__main__":
    main()
