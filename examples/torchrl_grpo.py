"""GRPO with TorchRL's own parts: its collector and its loss, the demo's task, vLLM on the same 4-bit base. One process,
two CPU cores.

python examples/torchrl_grpo.py

With sampler and trainer in two processes the scheme takes other layers, and nothing else changes: docs/torchrl.md.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.objectives.llm import GRPOLoss

from qlora_rl import LocalEngine, load_base, prepare_base
from qlora_rl.demo.task import grpo_rows, problems
from qlora_rl.demo.tiny_model import make_tiny_model
from qlora_rl.torchrl import AdapterSyncScheme

PROMPT, RESPONSE = 6, 4  # tokens: `37+85=`; `122` and the end-of-text token
PROMPTS, GROUP = 8, 8  # B = 64 completions in a batch


class Sums(EnvBase):
    """B sums, each GROUP times; one step is one answer, rewarded with 1 where it is right."""

    def __init__(self, tokenizer, steps, seed=0):
        super().__init__(batch_size=[PROMPTS * GROUP])
        self.tokenizer = tokenizer
        self.rows = iter(grpo_rows(seed, count=PROMPTS * (steps + 2)))
        batch = self.batch_size
        self.observation_spec = Composite(
            prompt=Unbounded((*batch, PROMPT), dtype=torch.long),
            answer=Unbounded((*batch, 1), dtype=torch.long),
            shape=batch,
        )
        self.action_spec = Unbounded((*batch, RESPONSE), dtype=torch.long)
        self.reward_spec = Unbounded((*batch, 1))
        self.done_spec = Categorical(2, shape=(*batch, 1), dtype=torch.bool)

    def _reset(self, tensordict=None, **_):
        rows = [row for row in (next(self.rows) for _ in range(PROMPTS)) for _ in range(GROUP)]
        prompt_BT = torch.tensor([self.tokenizer.encode(row["prompt"]) for row in rows])
        answer_B1 = torch.tensor([[int(row["answer"])] for row in rows])
        return TensorDict({"prompt": prompt_BT, "answer": answer_B1}, self.batch_size)

    def _step(self, tensordict):
        texts = self.tokenizer.batch_decode(tensordict["action"], skip_special_tokens=True)
        answers = tensordict["answer"][:, 0].tolist()
        reward_B1 = torch.tensor([[float(text == str(answer))] for text, answer in zip(texts, answers, strict=True)])
        done_B1 = torch.ones_like(reward_B1, dtype=torch.bool)
        seen = tensordict.select("prompt", "answer")
        return seen.update({"reward": reward_B1, "done": done_B1, "terminated": done_B1.clone()})

    def _set_seed(self, seed):
        pass


class Sampler:
    """TorchRL's policy while it collects: the engine."""

    def __init__(self, engine, pad):
        self.engine, self.pad = engine, pad

    def __call__(self, tensordict):
        rollout = self.engine.generate(tensordict["prompt"].tolist(), temperature=1.0, max_tokens=RESPONSE)
        size = tensordict.batch_size
        ids_BT = torch.full((*size, RESPONSE), self.pad)
        # TorchRL's loss scores whole sequences, the prompt too, and then masks.
        logprobs_BT = torch.zeros(*size, PROMPT + RESPONSE)
        mask_BT = torch.zeros(*size, PROMPT + RESPONSE, dtype=torch.bool)
        for row, (ids, logprobs) in enumerate(zip(rollout.completion_ids, rollout.logprobs, strict=True)):
            sampled = slice(PROMPT, PROMPT + len(ids))
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            logprobs_BT[row, sampled], mask_BT[row, sampled] = torch.tensor(logprobs), True
        full_BT = torch.cat([tensordict["prompt"], ids_BT], 1)
        return tensordict.update(
            {"action": ids_BT, "tokens": {"full": full_BT}, "log_probs": {"full": logprobs_BT}, "mask": mask_BT}
        )


class Actor(torch.nn.Module):
    """TorchRL's policy while it learns: the PeftModel."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def get_dist(self, tensordict, **_):
        ids_BT = tensordict["tokens", "full"].to(self.model.device)
        logits_BTV = self.model(ids_BT).logits.float().cpu()
        # Each token's distribution comes from the position before it.
        return LLMMaskedCategorical(logits=logits_BTV.roll(1, dims=1), mask=tensordict["mask"])


def accuracy(engine, tokenizer, count):
    """Share of held-out sums that are answered right, greedily."""
    asked = problems("held_out")[:count]
    prompts = [tokenizer.encode(problem.prompt) for problem in asked]
    rollout = engine.generate(prompts, temperature=0.0, max_tokens=RESPONSE)
    texts = tokenizer.batch_decode(rollout.completion_ids, skip_special_tokens=True)
    return sum(text == problem.answer for text, problem in zip(texts, asked, strict=True)) / len(asked)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", help="a checkpoint whose tokenizer writes digits one by one (default: the demo's tiny model)"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--held-out", type=int, default=400, help="sums that are asked before and after")
    arguments = parser.parse_args()
    torch.manual_seed(0)

    base = prepare_base(arguments.model or make_tiny_model())
    model = get_peft_model(load_base(base), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3 if arguments.model is None else 1e-5
    )
    with LocalEngine(base, max_lora_rank=16, max_model_length=64) as engine:
        tokenizer = engine.tokenizer
        scheme = AdapterSyncScheme()
        receiver, sender = scheme.create_receiver(engine), scheme.create_sender()
        sender.register_model(model)
        receiver.init_all_workers_group()
        sender.init_all_workers_group()  # both hold the same base, or nothing goes on

        collector = LLMCollector(
            Sums(tokenizer, arguments.steps),
            policy=Sampler(engine, tokenizer.pad_token_id),
            dialog_turns_per_batch=PROMPTS * GROUP,
            total_dialog_turns=PROMPTS * GROUP * arguments.steps,
            track_policy_version=True,
        )
        sender.register_collector(collector, push_after_batch=False)  # pushed below, behind each optimizer step
        loss_module = GRPOLoss(Actor(model), entropy_bonus=False)
        before = accuracy(engine, tokenizer, arguments.held_out)
        for step, batch in enumerate(collector, 1):
            batch = batch[:, 0].contiguous()
            reward_PG = batch["next", "reward"].view(PROMPTS, GROUP)
            advantage_PG = (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-4)
            batch["advantage"] = advantage_PG.view(-1, 1, 1).expand(-1, PROMPT + RESPONSE, 1)
            loss = loss_module(batch)
            optimizer.zero_grad()
            loss.loss_objective.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            report = sender.update_weights()
            print(
                f"step {step}: reward {reward_PG.mean():.3f}, kl {float(loss.kl_approx):.1e}, version "
                f"{report.version}, policy_version {collector.policy_version}, push {1000 * report.seconds:.1f} ms",
                flush=True,
            )
        print(
            f"right on sums never trained on: {before:.3f} before, "
            f"{accuracy(engine, tokenizer, arguments.held_out):.3f} after"
        )
        collector.shutdown()
        sender.shutdown()
        receiver.shutdown()


if __name__ == "__main__":
    main()
