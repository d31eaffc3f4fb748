"""How far trainer and engine are apart by rounding alone, by model and precision, and which rounding that is.

    python benchmarks/noise.py [--steps 3] [--only NAME ...]

writes results/noise.json, row by row: rows that are in it are kept, unless they are named. Each row is a process of its
own: the run of the demo of SmolLM2-135M-Instruct, a few steps long; the model is downloaded. Of the last batch the
trainer's logprobs are also computed in other ways.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rounds import described

from qlora_rl.config.launch import trainer_arguments, trl_config
from qlora_rl.config.read import read_config
from qlora_rl.data.load import load_data
from qlora_rl.demo.real_model import real_model
from qlora_rl.demo.real_run import write_project
from qlora_rl.fidelity import measure
from qlora_rl.rewards import load_reward
from qlora_rl.sync.forward import as_trained, bare_model, completion_logits, evaluating, in_float32
from qlora_rl.train.metrics.alarm import Sampled, sampled_from
from qlora_rl.train.run import METRICS
from qlora_rl.train.setup.settings import autocast_dtype

RESULTS = Path(__file__).parent / "results" / "noise.json"
LORA = dict(r=16, lora_alpha=32, target_modules="all-linear")
# Quantisation, dtype, dtype of the engine's output head.
ROWS = {
    f"{quant}, {dtype}{', ' + head + ' head' if head else ''}": (quant, dtype, head)
    for quant, dtype, head in (
        ("nf4", "bfloat16", ""),
        ("nf4", "bfloat16", "float32"),
        ("nf4", "float16", ""),
        ("nf4", "float16", "float32"),
        ("none", "bfloat16", ""),
        ("none", "bfloat16", "float32"),
        ("none", "float16", ""),
        ("none", "float16", "float32"),
        ("none", "float32", ""),
    )
}


class Warnings(logging.Handler):
    """Keeps what the package warns of from now on."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("qlora_rl").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def forwards(model: Any, kind: str) -> Iterator[None]:
    """Within it a model computes a part in float32: "head", "norms" (rounded once), "residual" (its stream)."""
    base = bare_model(model)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    exchanged: list[Any] = []

    def put(module: Any, forward: Any) -> None:
        exchanged.append(module)
        vars(module)["forward"] = forward

    def headed(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.linear(x.float(), head.weight.float())

    def normed(norm: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            y = x.float()
            y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + norm.variance_epsilon)
            return (y * norm.weight.float()).to(x.dtype)

        return forward

    if "head" in kind:
        put(head, headed)
    if "norms" in kind:
        for module in base.modules():
            if hasattr(module, "variance_epsilon"):
                put(module, normed(module))
    if "residual" in kind:
        put(embedding, lambda ids: torch.nn.functional.embedding(ids, embedding.weight).float())
    try:
        yield
    finally:
        for module in exchanged:
            del vars(module)["forward"]


def logprobs(model: Any, sampled: Sampled) -> torch.Tensor:
    """Of all sampled tokens, one after another."""
    found = []
    with torch.no_grad(), evaluating(model):
        logits = completion_logits(model, sampled.prompts, sampled.completions)
        for logits_TV, ids in zip(logits, sampled.completions, strict=True):
            rows_TV = logits_TV.float().log_softmax(-1)
            found.append(rows_TV.gather(1, torch.tensor(ids)[:, None])[:, 0])
    return torch.cat(found)


def variants(model: Any, sampled: Sampled, autocast: torch.dtype | None) -> dict[str, Any]:
    """Distance of each way to compute the trainer's logprobs from the engine's, and from the float32 pass."""
    engine = torch.tensor([value for row in sampled.logprobs for value in row])
    with in_float32(model, 1024):
        exact = logprobs(model, sampled)

    def apart(one: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
        found = measure(one[None], other[None], torch.ones_like(one)[None])
        return {"kl": found.mismatch_kl, "mean": found.logprob_diff_mean, "scaled": found.scaled_diff}

    found = {"engine": {"from float32": apart(exact, engine)}, "float32": {"from engine": apart(exact, engine)}}
    for kind in ("plain", "head", "head norms", "head residual"):
        try:
            with as_trained(model, autocast), forwards(model, kind):
                ours = logprobs(model, sampled)
        except RuntimeError as error:
            found[kind] = {"error": str(error)[:200]}
            continue
        found[kind] = {"from engine": apart(ours, engine), "from float32": apart(exact, ours)}
    return found


def make_trainer(name: str, steps: int, seed: int, work: Path, engine: Any = None) -> Any:
    """The trainer of a row; with an engine of its own by default."""
    from peft import LoraConfig

    from qlora_rl import QLoRAGRPOTrainer, prepare_base

    quant, dtype, head = ROWS[name]
    path = real_model().resolve()
    write_project(work, path)
    config = read_config(
        work / "run.toml",
        [
            f"run.dir={work / 'run'}",
            f"run.seed={seed}",
            f"train.max_steps={steps}",
            "train.save_strategy=no",
            f"train.bf16={'true' if dtype == 'bfloat16' else 'false'}",
        ],
    )
    train, _ = load_data(config.data)
    args, arguments = trl_config(config), trainer_arguments(config) | {"on_mismatch": "warn"}
    if engine is not None:
        args.vllm_max_model_length = None
        arguments |= {"rollout": engine, "engine_options": None}
    elif head:
        arguments["engine_options"] = (arguments.get("engine_options") or {}) | {"hf_overrides": {"head_dtype": head}}
    torch.manual_seed(seed)
    return QLoRAGRPOTrainer(
        model=prepare_base(path, quant, compute_dtype=dtype),
        args=args,
        train_dataset=train,
        peft_config=LoraConfig(**LORA),
        reward_funcs=[load_reward(config.rewards[0].use, config.rewards[0].arguments)],
        **arguments,
    )


def trained(trainer: Any, warnings: Warnings) -> dict[str, Any]:
    """What a run has measured."""
    canary = trainer.bridge.strategy.canary
    try:
        trainer.train()
    finally:
        trainer.close()
    lines = [json.loads(line) for line in (trainer.run.path / METRICS).read_text().splitlines()]
    lines = [line for line in lines if "step_seconds" in line]
    wanted = ("mismatch_kl", "ess", "scaled_diff", "logprob_diff_mean", "logprob_diff_max", "step_seconds")
    found = {key: [line.get(key) for line in lines] for key in (*wanted, "rollout_seconds", "canary_difference")}
    return found | {
        "function": [{**asdict(each), "odd": each.odd} for each in canary.function.found],
        "canary": {"noise": canary.noise, "threshold": canary.threshold},
        "alarm": {
            "threshold": trainer.alarm.threshold,
            "found": {n: each.cause for n, each in trainer.alarm.diagnoses.items()},
        },
        "warnings": warnings.texts,
    }


def child(name: str, steps: int, seed: int, out: Path) -> None:
    """A short run of one row, and its numbers."""
    warnings = Warnings()
    trainer = make_trainer(name, steps, seed, out.parent / "project")
    ways: dict[str, Any] = {}
    look = trainer._look_at

    def look_at(mode: str, batch: Any, logprobs_BT: torch.Tensor) -> None:
        look(mode, batch, logprobs_BT)
        if trainer.state.global_step == steps - 1:
            some = sampled_from(batch, batch["completion_mask"], trainer.temperature)
            ways.update(variants(trainer.model, some, autocast_dtype(trainer.args)))

    trainer._look_at = look_at
    found = trained(trainer, warnings)
    out.write_text(json.dumps({"kl": statistics.median(found["mismatch_kl"]), **found, "ways": ways}))


def healthy(name: str, steps: int, count: int) -> None:
    """Runs of other seeds on one engine, for what is warned of."""
    from qlora_rl import LocalEngine, prepare_base

    quant, dtype, _ = ROWS[name]
    base = prepare_base(real_model().resolve(), quant, compute_dtype=dtype)
    with LocalEngine(base, max_lora_rank=16, max_model_length=128, max_num_seqs=16) as engine:
        for seed in range(1, 1 + count):
            engine.drop_adapter()
            warnings = Warnings()
            with tempfile.TemporaryDirectory() as home:
                run = trained(make_trainer(name, steps, seed, Path(home) / "project", engine), warnings)
            found = read_results()
            found.setdefault("healthy", {}).setdefault(name, {})[str(seed)] = run
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
            print(name, seed, run["mismatch_kl"], run["warnings"], run["alarm"], flush=True)


def main() -> None:
    """Measure the rows that are missing, or asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[])
    parser.add_argument("--healthy", type=int, default=0, help="runs with other seeds, and only these")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], args.steps, args.seed, Path(args.child[1]))
        return
    if args.healthy:
        for name in args.only:
            healthy(name, args.steps, args.healthy)
        return
    known = read_results()["rows"]
    for name in args.only or [name for name in ROWS if name not in known]:
        with tempfile.TemporaryDirectory() as home:
            out = Path(home) / "result.json"
            words = ["--steps", str(args.steps), "--seed", str(args.seed), "--child", name, str(out)]
            subprocess.run([sys.executable, __file__, *words], check=True)
            found = read_results()
            found["rows"][name] = json.loads(out.read_text())
        RESULTS.write_text(json.dumps(described(found), indent=1) + "\n")


def read_results() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}


if __name__ == "__main__":
    main()
