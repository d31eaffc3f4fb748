"""The demo of a real model (`qlora-rl demo --model smollm2`) beside TRL's own sync and TorchRL's loop: same rows, seed
and settings.

    python benchmarks/real.py [--steps 40] [--only NAME ...] [--keep DIR]

writes results/real.json, row by row; each contender is a process of its own, whose run is kept in DIR. The model is
downloaded. Rewards are of greedy answers to the held-out sums, 1 for the right number: by the trainer's model, and by
the saved adapter on the untouched base. "trl-bf16" stops where vLLM has AVX-512, unless that is
hidden: PYTHONPATH=tests/avx2.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rounds import described

from qlora_rl.config.launch import trainer_arguments, trl_config
from qlora_rl.config.read import read_config
from qlora_rl.data.load import load_data
from qlora_rl.demo.real_model import real_model
from qlora_rl.demo.real_run import write_project
from qlora_rl.rewards import load_reward
from qlora_rl.train.run import METRICS, RunDirectory

RESULTS = Path(__file__).parent / "results" / "real.json"
# How the policy reaches vLLM, and the base of both sides.
CONTENDERS = {
    "qlora_rl": ("adapter", "nf4"),
    "torchrl": ("torchrl", "nf4"),
    "trl-nf4": ("merge", "nf4"),
    "trl-bf16": ("merge", "bf16"),
}
LORA = dict(r=16, lora_alpha=32, target_modules="all-linear")


@torch.no_grad()
def answers(model: Any, tokenizer: Any, prompts: list[Any]) -> list[Any]:
    """Greedy completions of 32 tokens, as messages."""
    was_training = model.training
    model.eval()
    texts = [tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in prompts]
    asked = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    asked = asked.to(model.device)
    ids = model.generate(**asked, max_new_tokens=32, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    model.train(was_training)
    said = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in said]


class Loop:
    """TorchRL's collector and GRPOLoss, by examples/torchrl_grpo.py, with what a trainer of TRL has for `child`: the
    adapter is sent by `qlora_rl.torchrl`, settings are those of the run's file."""

    def __init__(self, base: Any, args: Any, rows: Any, lora: Any, reward: Any, run: RunDirectory):
        from peft import get_peft_model
        from transformers import AutoTokenizer

        from qlora_rl import load_base

        self.args, self.rows, self.reward, self.run, self.base = args, rows, reward, run, base
        self.model = get_peft_model(load_base(base), lora)
        self.processing_class = AutoTokenizer.from_pretrained(base.path)

    def close(self) -> None:
        """Nothing is held behind `train`."""

    def train(self) -> None:
        from torchrl.collectors.llm import LLMCollector
        from torchrl.objectives.llm import GRPOLoss
        from transformers import get_linear_schedule_with_warmup

        from qlora_rl import FidelityMonitor, LocalEngine
        from qlora_rl.torchrl import AdapterSyncScheme

        example, args, model, reward = _example(), self.args, self.model, self.reward
        size, group = args.per_device_train_batch_size, args.num_generations
        told = self.processing_class.apply_chat_template(
            list(self.rows["prompt"]), tokenize=False, add_generation_prompt=True
        )
        rows = [{"prompt": text, "answer": answer} for text, answer in zip(told, self.rows["answer"], strict=True)]
        example.PROMPTS, example.GROUP, example.RESPONSE = size // group, group, args.max_completion_length
        (example.PROMPT,) = {len(self.processing_class.encode(text)) for text in told}  # the example has one length
        example.grpo_rows = lambda seed, count: random.Random(seed).choices(rows, k=count)

        class Sums(example.Sums):
            def _step(self, tensordict: Any) -> Any:
                texts = self.tokenizer.batch_decode(tensordict["action"], skip_special_tokens=True)
                answers = [str(answer) for answer in tensordict["answer"][:, 0].tolist()]
                said = [[{"role": "assistant", "content": text}] for text in texts]
                found = super()._step(tensordict)
                return found.set("reward", torch.tensor(reward(said, answer=answers))[:, None])

        class Actor(example.Actor):
            def get_dist(self, tensordict: Any, **options: Any) -> Any:
                self.dist = super().get_dist(tensordict, **options)
                return self.dist

        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=args.weight_decay)
        schedule = get_linear_schedule_with_warmup(optimizer, int(args.warmup_steps), args.max_steps)
        room = {"max_model_length": args.vllm_max_model_length, "max_num_seqs": size}
        with LocalEngine(self.base, max_lora_rank=16, **room) as engine, (self.run.path / METRICS).open("w") as metrics:
            scheme, actor, monitor = AdapterSyncScheme(), Actor(model), FidelityMonitor()
            receiver, sender = scheme.create_receiver(engine), scheme.create_sender()
            sender.register_model(model)
            receiver.init_all_workers_group()
            sender.init_all_workers_group()
            collector = LLMCollector(
                Sums(engine.tokenizer, args.max_steps, args.seed),
                policy=example.Sampler(engine, engine.tokenizer.pad_token_id),
                dialog_turns_per_batch=size,
                total_dialog_turns=size * args.max_steps,
                track_policy_version=True,
            )
            sender.register_collector(collector, push_after_batch=False)
            loss_module, clock = GRPOLoss(actor, entropy_bonus=False), time.perf_counter()
            for collected in collector:
                batch = collected[:, 0].contiguous()
                reward_PG = batch["next", "reward"].view(-1, group)
                advantage_PG = (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-4)
                batch["advantage"] = advantage_PG.view(-1, 1, 1).expand(-1, example.PROMPT + example.RESPONSE, 1)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_module(batch)
                optimizer.zero_grad()
                loss.loss_objective.backward()
                torch.nn.utils.clip_grad_norm_(trained, args.max_grad_norm)
                with torch.no_grad():
                    ours_BT = actor.dist.log_prob(batch["tokens", "full"])
                kl = monitor.observe(ours_BT, batch["log_probs", "full"], batch["mask"]).mismatch_kl
                optimizer.step()
                schedule.step()
                report = sender.update_weights()
                now = time.perf_counter()
                line = {"step_seconds": now - clock, "sync_seconds": report.seconds, "mismatch_kl": kl}
                line |= {"canary_seconds": report.canary_seconds, "reward": float(reward_PG.mean())}
                metrics.write(json.dumps(line) + "\n")
                metrics.flush()
                clock = now
            for side in (collector, sender, receiver):
                side.shutdown()


def _example() -> Any:
    """examples/torchrl_grpo.py."""
    file = Path(__file__).resolve().parent.parent / "examples" / "torchrl_grpo.py"
    spec = importlib.util.spec_from_file_location("torchrl_grpo", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def child(name: str, steps: int, out: Path) -> None:
    """Train one contender and write its numbers."""
    from peft import LoraConfig, PeftModel

    from qlora_rl import QLoRAGRPOTrainer, bake_base, load_base, prepare_base
    from qlora_rl.demo.merge import MergingTrainer

    how, weights = CONTENDERS[name]
    work = out.parent / name
    write_project(work, real_model().resolve())
    config = read_config(work / "run.toml", [f"run.dir={work / 'run'}", f"train.max_steps={steps}"])
    base = prepare_base(config.base.model, "nf4")
    if weights == "bf16":
        base = bake_base(base)
    train, held_out = load_data(config.data)
    reward = load_reward(config.rewards[0].use, config.rewards[0].arguments)
    args, lora = trl_config(config), LoraConfig(**LORA)
    shared = dict(args=args, train_dataset=train, peft_config=lora, reward_funcs=[reward])
    torch.manual_seed(args.seed)
    if how == "adapter":
        trainer: Any = QLoRAGRPOTrainer(model=base, **shared, **trainer_arguments(config))
        run = trainer.run
    elif how == "torchrl":
        run = RunDirectory(work / "run")
        trainer = Loop(base, args, train, lora, reward, run)
    else:
        args.use_vllm, args.vllm_mode = True, "colocate"
        run = RunDirectory(work / "run")
        trainer = MergingTrainer(run=run, model=load_base(base), **shared)
    prompts, columns = held_out["prompt"], {"answer": held_out["answer"]}

    def score(model: Any) -> float:
        return statistics.fmean(reward(answers(model, trainer.processing_class, prompts), **columns))

    try:
        before = score(trainer.model)
        started = time.perf_counter()
        trainer.train()
        seconds, after = time.perf_counter() - started, score(trainer.model)
        trainer.model.save_pretrained(work / "adapter")
    finally:
        trainer.close()
    del trainer.model
    reloaded = score(PeftModel.from_pretrained(load_base(base), work / "adapter"))
    lines = [json.loads(line) for line in (run.path / METRICS).read_text().splitlines()]
    lines = [line for line in lines if "step_seconds" in line]
    kl = [line["mismatch_kl"] for line in lines if line.get("mismatch_kl") is not None]
    counted = lines[3:] or lines
    result = {
        "steps": steps,
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "reward_before": before,
        "reward_after": after,
        "reward_reloaded": reloaded,
        "mismatch_kl_median": statistics.median(kl),
        "mismatch_kl_max": max(kl),
        "step_seconds": statistics.median(line["step_seconds"] for line in counted),
        "sync_seconds": statistics.median(line["sync_seconds"] for line in counted),
        "verify_seconds": statistics.fmean(line.get("canary_seconds") or 0.0 for line in counted),
        "train_seconds": seconds,
        "rewards": [line.get("reward") for line in lines],
    }
    out.write_text(json.dumps(result))


def main() -> None:
    """Run the contenders that are asked for, and keep the other rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], args.steps, Path(args.child[1]))
        return
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    for name in args.only:
        with tempfile.TemporaryDirectory() as home:
            out = (args.keep or Path(home)) / "result.json"
            out.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, __file__, "--steps", str(args.steps), "--child", name, str(out)]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            print(done.stderr, file=sys.stderr)
            if done.returncode:
                said = re.findall(r"\b(\w+Error: .*)", done.stderr)
                found["rows"][name] = {"failed": said[0] if said else "no error was seen"}
            else:
                found["rows"][name] = json.loads(out.read_text())
        found = described(found)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
