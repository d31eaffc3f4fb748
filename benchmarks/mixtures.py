"""Mixtures of experts on the demo's task: routing on both sides, and GRPO beside a dense model and TRL's own way;
rollouts with experts in 4 bits.

`python benchmarks/mixtures.py` writes results/mixtures.json; half an hour on two idle cores. Each training, and each
engine that is timed, is a process of its own. `--only rollouts`: one part alone.

Shape letters: T tokens of a sequence, K chosen experts.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rounds import add_to, described

from qlora_rl.base.experts import ATTENTION

RESULTS = Path(__file__).parent / "results" / "mixtures.json"
STEPS = 40
# About 0.4 B parameters, of which a tenth is multiplied for a token.
SHAPE = {"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4,
"head_dim": 64,
         "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 40,
         "num_experts_per_tok": 4}  # fmt: skip
PROMPTS, TOKENS, ROUNDS = 16, 32, 3
# Tiny models with random weights (tests/support.py), the first of them dense; of each as many as there are seeds.
RANDOM, SEEDS = ("qwen3", "qwen3_moe", "olmoe", "mixtral"), (0, 1, 2)
PACKED = ", experts in 4 bits"


def make_mixture(out: Path, steps: int) -> Path:
    """A mixture of the width and active size of the demo's model, and trained like it: 8 experts, of which 2 are
    chosen."""
    import transformers

    from qlora_rl.cpu_matmul import Float32Products
    from qlora_rl.demo.tiny_model import Recipe, make_tokenizer, pretrain

    recipe, tokenizer = Recipe(steps=steps), make_tokenizer()
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        moe_intermediate_size=recipe.intermediate_size // 2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.hidden_size // recipe.num_attention_heads,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        attn_implementation="eager",
    )
    with Float32Products(torch.bfloat16):
        torch.manual_seed(recipe.seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        pretrain(model, tokenizer, recipe, _report)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def _report(step: int, steps: int, loss: float) -> None:
    if step % 10 == 0:
        print(f"pretraining: step {step} of {steps}, loss {loss:.3f}", flush=True)


def compare_sides(base: Any) -> dict[str, Any]:
    """Logprobs of sampled tokens on both sides in bf16, and how often they choose the same experts."""
    from qlora_rl import LocalEngine, load_base, verify_base
    from qlora_rl.demo import task
    from qlora_rl.train.metrics.routing import Routers

    model = load_base(base, attn_implementation="eager").train()
    with LocalEngine(base, max_model_length=32, max_num_seqs=128) as engine:
        verify_base(model, engine)
        prompts = [engine.tokenizer.encode(problem.prompt) for problem in task.problems("held_out")[:128]]
        rollout = engine.generate(prompts, max_tokens=task.LONGEST_ANSWER + 1, seed=0)
        runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
        routers = {
            "ours": [m for n, m in model.named_modules() if n.endswith(".mlp.gate")],
            "theirs": [m for n, m in runner.get_model().named_modules() if n.endswith(".mlp.gate")],
        }
        chosen: dict[str, list[torch.Tensor]] = {side: [] for side in routers}
        weights: list[torch.Tensor] = []

        def keep(side: str, _: Any, __: Any, out: Any) -> None:
            logits = out[0] if isinstance(out, tuple) else out
            chosen[side].append(logits.float().topk(model.config.num_experts_per_tok).indices.sort().values)
            if side == "theirs":  # as vLLM computes them on a CPU
                weights.append(logits.gather(1, chosen[side][-1]).softmax(-1))

        for side, modules in routers.items():
            for module in modules:
                module.register_forward_hook(functools.partial(keep, side))
        replaying = Routers(model, replays=True)
        differences, replayed, same_token, agree, decisions = [], [], [], 0, 0
        for prompt, ids in zip(prompts, rollout.completion_ids, strict=True):
            for each in (*chosen.values(), weights):
                each.clear()
            theirs_T = torch.tensor(engine.score([prompt + ids])[0][len(prompt) - 1 :])
            differences.append(_logprobs(model, prompt, ids) - theirs_T)
            if routers["ours"]:
                ours, theirs = (torch.stack(chosen[side]) for side in ("ours", "theirs"))  # [layers, T, K]
                given = theirs.transpose(0, 1)[:-1], torch.stack(weights, 1)[:-1]
                with replaying.given(torch.ones(1, len(prompt + ids)), *([each] for each in given)):
                    replayed.append(_logprobs(model, prompt, ids) - theirs_T)
                same = (ours == theirs).all(-1)
                agree, decisions = agree + int(same.sum()), decisions + same.numel()
                # A token's logprob hangs on all positions before it.
                same_token.append(same.all(0).cumprod(0)[len(prompt) - 1 : -1].bool())
    apart = torch.cat(differences)
    found = {"tokens": apart.numel(), "logprob_diff_mean": float(apart.abs().mean())}
    found |= {"logprob_diff_max": float(apart.abs().max()), "mismatch_kl": _kl(apart)}
    if decisions:
        same = torch.cat(same_token)
        found |= {
            "decisions": decisions,
            "routing_agreement": agree / decisions,
            "tokens_with_same_routing": int(same.sum()),
            "mismatch_kl_replayed": _kl(torch.cat(replayed)),
        }
        for name, part in (("same_routing", apart[same]), ("other_routing", apart[~same])):
            if part.numel():
                found[f"mismatch_kl_{name}"] = _kl(part)
    return found


def replay_random(kind: str, seed: int, root: Path) -> dict[str, Any]:
    """The trainer's logprobs of what a random model has sampled in bf16: with its own experts, with those that the
    engine chose, and with the engine's weights of them as well. `kind` is an architecture, and whether its experts are
    in 4 bits.
    """
    from support import make_model

    from qlora_rl import LocalEngine, load_base, prepare_base, verify_base
    from qlora_rl.train.metrics.routing import Routers

    architecture = kind.removesuffix(PACKED)
    source = make_model(root / "model", architecture=architecture, tied=False, seed=seed)
    base = prepare_base(source, quantize_experts=kind != architecture, out=root / "base")
    model = load_base(base).eval()
    prompts = torch.randint(3, 60, (64, 8), generator=torch.Generator().manual_seed(seed)).tolist()
    with LocalEngine(base, max_model_length=64, max_num_seqs=64, max_lora_rank=8) as engine:
        verify_base(model, engine)
        rollout = engine.generate(prompts, max_tokens=TOKENS, seed=seed, extra={"ignore_eos": True})
    found: dict[str, Any] = {"tokens": rollout.tokens}
    ways = {"mismatch_kl": (False, False), "mismatch_kl_choices": (True, False), "mismatch_kl_replayed": (True, True)}
    unknown = [None] * len(prompts)
    chosen, weights = rollout.routing or unknown, rollout.routing_weights or unknown
    for name, (replays, weighs) in ways.items():
        routers, apart = Routers(model, replays=replays), []
        for i, (prompt, ids) in enumerate(zip(prompts, rollout.completion_ids, strict=True)):
            given = [chosen[i]], [weights[i] if weighs else None]
            with routers.given(torch.ones(1, len(prompt + ids)), *given):
                apart.append(_logprobs(model, prompt, ids) - torch.tensor(rollout.logprobs[i]))
        routers.close()
        found[name] = _kl(torch.cat(apart))
        if not replays:
            found["routing_agreement"] = routers.agreement
    return found | {"routing_weight_diff_mean": routers.weight_diff_mean}


def _logprobs(model: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + ids])).logits[0].float()
    return logits_TV.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]


def _kl(apart: torch.Tensor) -> float:
    return float((apart.expm1() - apart).mean())


def train(base: Path, sync: str, steps: int, out: Path, seed: int = 0) -> dict[str, Any]:
    """GRPO on the sums with adapters on attention; "experts": on them too; "replay": with the engine's experts and
    their weights."""
    from qlora_rl.base.checkpoint import open_base
    from qlora_rl.demo import task
    from qlora_rl.demo.job import DemoSettings, make_trainer, quieten, summarise_steps
    from qlora_rl.demo.tiny_model import answer_greedily
    from qlora_rl.train.run import METRICS, RunDirectory

    quieten()
    run = RunDirectory(out)
    replays = sync.endswith("replay")
    settings = DemoSettings(
        steps=steps,
        seed=seed,
        sync=sync if sync == "trl-merge" else "lora_adapter",
        target_modules="all-linear" if sync.startswith("experts") else ATTENTION,
        routing_replay=replays,
    )
    trainer = make_trainer(settings, open_base(base), run)

    def accuracy() -> float:
        asked = task.problems("held_out")
        answers = answer_greedily(trainer.model, trainer.processing_class, asked)
        return sum(a.strip() == p.answer for a, p in zip(answers, asked, strict=True)) / len(asked)

    before = accuracy()
    trainer.train()
    rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    found = {"accuracy_before": before, "accuracy_after": accuracy(), **summarise_steps(rows)}
    if agreed := [row["routing_agreement"] for row in rows if "routing_agreement" in row]:
        found["routing_agreement"] = statistics.fmean(agreed)
        found["routing_weight_diff_mean"] = statistics.fmean(row["routing_weight_diff_mean"] for row in rows)
        found["routing_weight_diff_max"] = max(row["routing_weight_diff_max"] for row in rows)
    if replays:
        found["routing_weights_rejected_max"] = max(row["routing_weights_rejected"] for row in rows)
    trainer.close()
    return found


def time_rollouts(root: Path) -> dict[str, Any]:
    """Tokens/s of a random mixture with experts in 4 bits and an adapter, and in 16 bits without; one engine after
    another, in turn."""
    import transformers

    from qlora_rl import prepare_base
    from qlora_rl.demo.tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SHAPE, vocab_size=len(tokenizer), norm_topk_prob=True, max_position_embeddings=512
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parameters = model.num_parameters()
    model.save_pretrained(root / "large")
    tokenizer.save_pretrained(root / "large")
    del model
    bases = {
        "nf4": prepare_base(root / "large", quantize_experts=True, out=root / "large-nf4"),
        "16 bits": prepare_base(root / "large", "none", out=root / "large-16"),
    }
    rates: dict[str, list[float]] = {kind: [] for kind in bases}
    for _ in range(ROUNDS):
        for kind, base in bases.items():
            command = [sys.executable, __file__, "--sampler", str(base.path), kind]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
            rates[kind].append(float(done.stdout.strip().splitlines()[-1]))
    ratios = [a / b for a, b in zip(rates["nf4"], rates["16 bits"], strict=True)]
    return {"parameters": parameters, "prompts": PROMPTS, "tokens_per_s": rates, "ratios": ratios}


def sample(base: Path, kind: str) -> float:
    """Tokens/s of one engine, with an adapter of rank 16 where the base is 4-bit; the median of five rollouts."""
    from peft import LoraConfig, get_peft_model

    from qlora_rl import AdapterSync, LocalEngine, load_base
    from qlora_rl.sync.transports import InPlaceTransport

    with LocalEngine(
        base, max_model_length=128, max_num_seqs=PROMPTS, max_lora_rank=16 if kind == "nf4" else 0
    ) as engine:
        if kind == "nf4":
            adapter = get_peft_model(
                load_base(base), LoraConfig(r=16, target_modules=list(ATTENTION), init_lora_weights=False)
            )
            AdapterSync(adapter, engine, InPlaceTransport()).push()
        prompts = [list(range(10 + i, 26 + i)) for i in range(PROMPTS)]
        found = []
        for seed in range(6):
            rollout = engine.generate(prompts, max_tokens=TOKENS, seed=seed, extra={"ignore_eos": True})
            found.append(sum(map(len, rollout.completion_ids)) / rollout.seconds)
    return statistics.median(found[1:])


def _in_a_process(base: Path, sync: str, steps: int, work: Path) -> dict[str, Any]:
    """`train`, or the error that it ends with."""
    command = [sys.executable, __file__, "--child", str(base), sync, str(steps), str(work)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    answer = work / "answer.json"
    if answer.is_file():
        return json.loads(answer.read_text())
    lines = [line for line in done.stderr.splitlines() if "Error: " in line]
    return {"error": lines[-1].split("]: ")[-1] if lines else f"exit {done.returncode}"}


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--child", nargs=4)
    parser.add_argument("--sampler", nargs=2)
    parser.add_argument(
        "--only",
        choices=["mixture", "mixture, experts in 4 bits", "adapters on experts", "dense", "random", "rollouts"],
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--pretraining", type=int, default=300, help="steps of the mixture; the dense model is the demo's"
    )
    parser.add_argument(
        "--mixture", type=Path, help="keep the pretrained mixture here, or take the one that an earlier run left"
    )
    arguments = parser.parse_args()
    if arguments.child:
        base, sync, steps, out = arguments.child
        found = train(Path(base), sync, int(steps), Path(out) / "run")
        (Path(out) / "answer.json").write_text(json.dumps(found))
        return
    if arguments.sampler:
        base, kind = arguments.sampler
        print(sample(Path(base), kind))
        return
    from qlora_rl import prepare_base
    from qlora_rl.demo.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        only = [arguments.only] if arguments.only else None
        if only is None or "rollouts" in only:
            add_to(arguments.json, {"rollouts": described(time_rollouts(root))})
        if only is None or "random" in only:
            sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
            kinds = [*RANDOM, *(kind + PACKED for kind in RANDOM[1:])]
            found_random = {
                kind: [replay_random(kind, seed, root / f"{kind}-{seed}") for seed in SEEDS] for kind in kinds
            }
            add_to(arguments.json, {"random": described({"of": found_random})})
        made = arguments.mixture or root / "mixture"
        mixture = functools.cache(lambda: made if made.is_dir() else make_mixture(made, arguments.pretraining))
        models = {
            "mixture": (mixture, False, ("lora_adapter", "replay", "trl-merge")),
            "mixture, experts in 4 bits": (mixture, True, ("lora_adapter", "replay")),
            "adapters on experts": (mixture, True, ("experts", "experts replay")),
            "dense": (lambda: make_tiny_model(progress=_report), False, ("lora_adapter",)),
        }
        for kind, (make, packed, syncs) in models.items():
            if only is not None and kind not in only:
                continue
            base = prepare_base(make(), quantize_experts=packed, out=root / f"{kind}-base")
            found: dict[str, Any] = {} if kind == "adapters on experts" else {"sides": compare_sides(base)}
            for sync in syncs:
                work = root / f"{kind}-{sync}".replace(" ", "-")
                work.mkdir()
                found[sync] = _in_a_process(base.path, sync, arguments.steps, work)
            print(kind, json.dumps(found, indent=1), flush=True)
            add_to(
                arguments.json,
                {kind: described(found | {"steps": arguments.steps, "pretraining": arguments.pretraining})},
            )


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
