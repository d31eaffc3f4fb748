"""qlora_rl against what else trains a 4-bit model by RL: the same base, task, seeds and settings, each in a process of
its own.

    python benchmarks/field.py [--seeds 0 1 2] [--steps 50] [--only NAME ...] [--json benchmarks/results/field.json]

Contenders take turns, seed by seed, then the samplers alone. One that cannot train here is written down with the error
that was seen, one whose package or device is missing with what is missing; asked for alone, the exit code is then 1, or
3. Run it on an idle machine; about ten minutes on two cores.

    python benchmarks/field.py --child NAME SEED STEPS BASES OUT      one process: writes its numbers to OUT
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
import inspect
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rounds import described
from step import KV_CACHE_GIB, typical

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_STEPS, DEFAULT_SEEDS = 50, (0, 1, 2)
SAMPLER_SEEDS = 2  # of the seeds: an engine alone varies little
# Steps at the start that no speed is taken from: caches fill, kernels are chosen.
WARM = 3
PACKAGES = ("torchrl", "unsloth")  # whose versions count besides
NOT_RUN = 3  # exit code of a child that lacks something
CHILD_TIMEOUT_S = 900
# Of the samplers alone: prompts at once, tokens of a prompt and of a completion, seconds of drawing.
BATCH, PROMPT, COMPLETION, DRAW_S = 128, 8, 16, 6.0


class NotRunHere(Exception):
    """A package or a device is missing; not a result."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """What takes part.

    Attributes:
        title: in tables.
        run: seed, steps, bases, work directory -> numbers of one training, or of one sampler.
        is_sampler: draws only.
    """

    title: str
    run: Callable[[int, int, Path, Path], dict[str, Any]]
    is_sampler: bool = False


def _bases(home: Path) -> dict[str, Path]:
    """The demo's base in 4 bits, and its weights decoded once into 16."""
    return {"nf4": home / "nf4", "bf16": home / "bf16"}


def make_bases(home: Path) -> None:
    """Make them; the tiny model is pretrained where it is not cached."""
    from qlora_rl import bake_base, prepare_base
    from qlora_rl.demo.tiny_model import make_tiny_model

    bases = _bases(home)
    bake_base(prepare_base(make_tiny_model(), "nf4", out=bases["nf4"]), out=bases["bf16"])


@torch.no_grad()
def _weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """What the frozen linears of a PeftModel stand for, as float32 copies on the CPU."""
    from qlora_rl.base.quant import dequantised_weight

    frozen = (p for name, p in model.named_parameters() if name.endswith("base_layer.weight"))
    return [dequantised_weight(p).cpu().clone() for p in frozen]


def _drift(now: list[torch.Tensor], before: list[torch.Tensor]) -> float:
    """|now - before| / |before| of all linears together."""
    assert before, "the model has no adapted linear"
    off = sum(float((a - b).square().sum()) for a, b in zip(now, before, strict=True))
    return (off / sum(float(b.square().sum()) for b in before)) ** 0.5


def _peak() -> dict[str, float]:
    """GiB of this process so far; on a GPU what torch held there, vLLM in this process included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {"peak_gib": int(fields["VmHWM"].split()[0]) / 2**20}
    if torch.cuda.is_available():
        found["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def _speeds(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the steps behind the warm ones, the distance over all of them; a push with its proof."""

    def values(name: str, of: list[dict[str, Any]]) -> list[float]:
        return [line[name] for line in of if line.get(name) is not None]

    counted = lines[WARM:]
    kl, step = values("mismatch_kl", lines), typical(values("step_seconds", counted))
    pushes = [line["sync_seconds"] + (line.get("canary_seconds") or 0.0) for line in counted]
    return {
        "steps_per_s": 1 / step,
        "step_seconds": step,
        "sync_seconds": typical(pushes),
        "rollout_tokens_per_s": statistics.median(values("rollout_tokens_per_s", counted)),
        "mismatch_kl_median": statistics.median(kl),
        "mismatch_kl_max": max(kl),
        "reward_last": statistics.fmean(values("reward", lines)[-5:]),
    }


def _asked(model: Any, tokenizer: Any) -> float:
    """Share of the held-out sums that the trainer's policy answers right, greedily."""
    from qlora_rl.demo.task import problems
    from qlora_rl.demo.tiny_model import answer_greedily

    asked = problems("held_out")
    answers = answer_greedily(model, tokenizer, asked)
    return sum(a.strip() == problem.answer for a, problem in zip(answers, asked, strict=True)) / len(asked)


def _trained(sync: str, base: str) -> Callable[[int, int, Path, Path], dict[str, Any]]:
    """The demo's job by TRL's GRPOTrainer: ours, or TRL's own under a stop-watch."""

    def run(seed: int, steps: int, home: Path, work: Path) -> dict[str, Any]:
        from qlora_rl.base.checkpoint import open_base
        from qlora_rl.demo.job import DemoSettings, make_trainer
        from qlora_rl.train.run import METRICS, RunDirectory

        directory = RunDirectory(work / "run")
        settings = DemoSettings(steps=steps, seed=seed, sync=sync)
        # The KV cache of TRL's vLLM has at least so much on a CPU; ours would take what it needs, but memory is
        # compared.
        trainer = make_trainer(settings, open_base(_bases(home)[base]), directory, None, {"kv_cache_gib": KV_CACHE_GIB})
        try:
            before, right_before = _weights(trainer.model), _asked(trainer.model, trainer.processing_class)
            started = time.perf_counter()
            trainer.train()
            seconds, peak = time.perf_counter() - started, _peak()
            right = _asked(trainer.model, trainer.processing_class)
            drift = _drift(_weights(trainer.model), before)
        finally:
            trainer.close()
        lines = [json.loads(line) for line in (directory.path / METRICS).read_text().splitlines()]
        outcome = {"accuracy_before": right_before, "accuracy_after": right, "base_drift": drift}
        return {**outcome, **_speeds(lines), "train_seconds": seconds, **peak}

    return run


def _example() -> Any:
    """examples/torchrl_grpo.py: environment, sampler and actor for TorchRL."""
    if importlib.util.find_spec("torchrl") is None:
        raise NotRunHere("torchrl is not installed")
    spec = importlib.util.spec_from_file_location("torchrl_grpo", ROOT / "examples" / "torchrl_grpo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _policy(base: Path, seed: int) -> Any:
    """The demo's PeftModel, without a trainer."""
    from peft import LoraConfig, get_peft_model

    from qlora_rl import load_base

    torch.manual_seed(seed)
    model = load_base(base, attn_implementation=None if torch.cuda.is_available() else "eager")
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def torchrl_adapters(seed: int, steps: int, home: Path, work: Path) -> dict[str, Any]:
    """TorchRL's collector and GRPOLoss, the adapter by `qlora_rl.torchrl`; settings as GRPOConfig has them."""
    example = _example()
    from torchrl.collectors.llm import LLMCollector
    from torchrl.objectives.llm import GRPOLoss

    from qlora_rl import FidelityMonitor, LocalEngine
    from qlora_rl.torchrl import AdapterSyncScheme

    example.PROMPTS, example.GROUP = 16, 8
    size = example.PROMPTS * example.GROUP

    class Actor(example.Actor):
        """Keeps the distribution that the loss has asked for."""

        def get_dist(self, tensordict: Any, **options: Any) -> Any:
            self.dist = super().get_dist(tensordict, **options)
            return self.dist

    class Sampler(example.Sampler):
        """With a stop-watch."""

        def __call__(self, tensordict: Any) -> Any:
            started = time.perf_counter()
            sampled = super().__call__(tensordict)
            self.tokens_per_s = int(sampled["mask"].sum()) / (time.perf_counter() - started)
            return sampled

    model = _policy(_bases(home)["nf4"], seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))
    before, lines = _weights(model), []
    room = {"max_model_length": 32, "max_num_seqs": size, "kv_cache_gib": KV_CACHE_GIB}
    with LocalEngine(_bases(home)["nf4"], max_lora_rank=16, **room) as engine:
        scheme = AdapterSyncScheme()
        receiver, sender = scheme.create_receiver(engine), scheme.create_sender()
        sender.register_model(model)
        receiver.init_all_workers_group()
        sender.init_all_workers_group()
        sampler, actor = Sampler(engine, engine.tokenizer.pad_token_id), Actor(model)
        collector = LLMCollector(
            example.Sums(engine.tokenizer, steps, seed),
            policy=sampler,
            dialog_turns_per_batch=size,
            total_dialog_turns=size * steps,
            track_policy_version=True,
        )
        sender.register_collector(collector, push_after_batch=False)
        loss_module, monitor = GRPOLoss(actor, entropy_bonus=False), FidelityMonitor()
        right_before = _asked(model, engine.tokenizer)
        started = clock = time.perf_counter()
        for collected in collector:
            batch = collected[:, 0].contiguous()
            reward_PG = batch["next", "reward"].view(example.PROMPTS, example.GROUP)
            advantage_PG = (reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-4)
            width = example.PROMPT + example.RESPONSE
            batch["advantage"] = advantage_PG.view(-1, 1, 1).expand(-1, width, 1)
            with torch.autocast(model.device.type, torch.bfloat16):
                loss = loss_module(batch)
            optimizer.zero_grad()
            loss.loss_objective.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            with torch.no_grad():
                ours_BT = actor.dist.log_prob(batch["tokens", "full"])
            kl = monitor.observe(ours_BT, batch["log_probs", "full"], batch["mask"]).mismatch_kl
            optimizer.step()
            warm_up.step()
            report = sender.update_weights()
            clock, begun = time.perf_counter(), clock
            lines.append(
                {
                    "step_seconds": clock - begun,
                    "sync_seconds": report.seconds,
                    "rollout_tokens_per_s": sampler.tokens_per_s,
                    "mismatch_kl": kl,
                    "reward": float(reward_PG.mean()),
                }
            )
        seconds, peak = time.perf_counter() - started, _peak()
        right = _asked(model, engine.tokenizer)
        for side in (collector, sender, receiver):
            side.shutdown()
    outcome = {
        "accuracy_before": right_before,
        "accuracy_after": right,
        "base_drift": _drift(_weights(model), before),
    }
    return {**outcome, **_speeds(lines), "train_seconds": seconds, **peak}


def torchrl_own(seed: int, steps: int, home: Path, work: Path) -> dict[str, Any]:
    """TorchRL's own scheme for vLLM, as far as it comes."""
    if importlib.util.find_spec("torchrl") is None:
        raise NotRunHere("torchrl is not installed")
    from torchrl.weight_update.llm import vllm_nccl
    from torchrl.weight_update.llm.vllm_nccl import VLLMWeightSyncScheme, get_model_metadata

    # Its own imports, which it makes when it sends: looked at first, because a machine without CUDA does not come so
    # far.
    for node in ast.walk(ast.parse(inspect.getsource(vllm_nccl))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            home_module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(home_module, alias.name) and node.module != "vllm.utils":  # that one has a way around it
                    raise ImportError(f"cannot import name {alias.name!r} from {node.module!r}")
    if not torch.cuda.is_available():
        raise NotRunHere("it needs NCCL, and so NVIDIA GPUs")
    model = _policy(_bases(home)["nf4"], seed)
    sender = VLLMWeightSyncScheme(master_port=29511).create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model))
    raise NotRunHere("its engine is vLLM in Ray actors on a second GPU, which this script does not start")


def unsloth(seed: int, steps: int, home: Path, work: Path) -> dict[str, Any]:
    """Unsloth's model and its vLLM under TRL's GRPOTrainer. Written without a GPU; nobody has seen it run."""
    if not torch.cuda.is_available():
        raise NotRunHere("Unsloth needs an NVIDIA GPU")
    if importlib.util.find_spec("unsloth") is None:
        raise NotRunHere("unsloth is not installed")
    FastLanguageModel = importlib.import_module(
        "unsloth"
    ).FastLanguageModel  # first: it changes what is imported after it
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from qlora_rl.demo import task

    model, tokenizer = FastLanguageModel.from_pretrained(
        str(_bases(home)["nf4"]), max_seq_length=32, load_in_4bit=True, fast_inference=True, max_lora_rank=16
    )
    model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32, random_state=seed)
    before, lines = _weights(model), []

    class Watched(GRPOTrainer):
        def log(self, logs: dict[str, float], *rest: Any) -> None:
            if "reward" in logs:
                lines.append({"reward": logs["reward"], "step_seconds": logs["step_time"]})
            super().log(logs, *rest)

    trainer = Watched(
        model=model,
        processing_class=tokenizer,
        reward_funcs=task.reward_exact_match,
        train_dataset=Dataset.from_list(task.grpo_rows(seed, 600)),
        args=GRPOConfig(
            output_dir=str(work / "run"), max_steps=steps, per_device_train_batch_size=128, num_generations=8,
            max_completion_length=task.LONGEST_ANSWER + 1, learning_rate=1e-3, warmup_steps=5, beta=0.0, seed=seed,
            lr_scheduler_type="constant_with_warmup", logging_steps=1, save_strategy="no", report_to=[], use_vllm=True,
        ),
    )  # fmt: skip
    right_before, started = _asked(model, tokenizer), time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    step = statistics.median(line["step_seconds"] for line in lines[WARM:])
    return {
        "accuracy_before": right_before,
        "accuracy_after": _asked(model, tokenizer),
        "base_drift": _drift(_weights(model), before),
        "steps_per_s": 1 / step,
        "step_seconds": step,
        "reward_last": statistics.fmean(line["reward"] for line in lines[-5:]),
        "train_seconds": seconds,
        **_peak(),
    }


def _sampler(way: str) -> Callable[[int, int, Path, Path], dict[str, Any]]:
    """Tokens per second of an engine alone, with an adapter that serves."""

    def run(seed: int, steps: int, home: Path, work: Path) -> dict[str, Any]:
        from shapes import RANK, make_adapter
        from vanilla_vllm import VanillaEngine

        from qlora_rl import LocalEngine
        from qlora_rl.base.checkpoint import open_base
        from qlora_rl.contracts import SamplingSpec

        base = open_base(_bases(home)["nf4"])
        adapter = make_adapter(base, work / "adapter")
        options: dict[str, Any] = {"max_lora_rank": RANK, "max_model_length": 32, "max_num_seqs": BATCH}
        if way == "stock":
            engine: Any = VanillaEngine(base.path, adapter=adapter, **options)
        else:
            engine = LocalEngine(base, base_compute=way, **options)
            engine.load_adapter(adapter, 1)
        spec, speeds = SamplingSpec(max_tokens=COMPLETION, temperature=1.0, seed=0, extra={"ignore_eos": True}), []
        with engine:
            begun = time.perf_counter()
            while len(speeds) < 4 or time.perf_counter() - begun < DRAW_S:
                # Prompts of their own in every round: nothing comes out of the prefix cache.
                prompts = [
                    [40 + (i * 7 + j * (len(speeds) + seed + 3)) % 50 for j in range(PROMPT)] for i in range(BATCH)
                ]
                started = time.perf_counter()
                rollout = engine.generate(prompts, spec)
                speeds.append(sum(map(len, rollout.completion_ids)) / (time.perf_counter() - started))
            return {"tokens_per_s": statistics.median(speeds[1:]), **_peak()}

    return run


CONTENDERS = {
    "qlora_rl": Contender("**qlora_rl**, only the adapter is synced", _trained("lora_adapter", "nf4")),
    "trl-4bit": Contender("TRL 1.16 on the 4-bit base: merge, push, unmerge", _trained("trl-merge", "nf4")),
    "trl-16bit": Contender(
        "TRL 1.16 on the same weights in 16 bits: merge, push, unmerge", _trained("trl-merge", "bf16")
    ),
    "torchrl": Contender("TorchRL's collector and loss, the adapter by `qlora_rl.torchrl`", torchrl_adapters),
    "torchrl-own": Contender("TorchRL's own `VLLMWeightSyncScheme`", torchrl_own),
    "unsloth": Contender("Unsloth", unsloth),
    "draw-nf4": Contender('**qlora_rl**, `base_compute="nf4"`', _sampler("nf4"), is_sampler=True),
    "draw-stock": Contender("vLLM as it comes, with its bitsandbytes plugin", _sampler("stock"), is_sampler=True),
}


def reason(stderr: str) -> str:
    """The error in what a process has said: the last line that begins as Python's errors do, without paths of this
    machine."""
    lines = [line.strip().removeprefix("[rank0]: ") for line in stderr.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|NotRunHere)\b", line)]
    said = (errors or [line for line in lines if line] or ["it said nothing"])[-1]
    return re.sub(r"\s*\((?:/[^()\s]+)+\)|/(?:[\w.+-]+/)+", "", said)[:300]


def child(name: str, seed: int, steps: int, home: Path) -> dict[str, Any]:
    """One contender in a process of its own: its numbers under "run", or "error", or "lacks"."""
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "numbers.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name, str(seed), str(steps), str(home)]
        started = time.perf_counter()
        try:
            done = subprocess.run(
                [*command, str(out)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=CHILD_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {CHILD_TIMEOUT_S} seconds"}
        if done.returncode == NOT_RUN:
            return {"lacks": reason(done.stderr).partition("NotRunHere: ")[2]}
        if done.returncode:
            return {"error": reason(done.stderr)}
        return {"run": {**json.loads(out.read_text()), "process_seconds": time.perf_counter() - started}}


def compete(names: list[str], seeds: list[int], steps: int, home: Path) -> dict[str, Any]:
    """Seed by seed, contender by contender; who has failed once is not asked again."""
    found: dict[str, Any] = {name: {"title": CONTENDERS[name].title, "status": "ran", "runs": {}} for name in names}
    for seed in seeds:
        for name in names:
            if found[name]["status"] != "ran":
                continue
            result = child(name, seed, steps, home)
            if "run" in result:
                found[name]["runs"][str(seed)] = result["run"]
                shown = {k: round(v, 5) for k, v in result["run"].items()}
                print(f"{name}, seed {seed}: {json.dumps(shown)}", flush=True)
            else:
                found[name]["status"], found[name]["why"] = (
                    ("failed", result["error"]) if "error" in result else ("not run", result["lacks"])
                )
                print(f"{name}: {found[name]['status']}: {found[name]['why']}", flush=True)
    return found


@contextmanager
def _made_bases() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="qlora-rl-field-") as home:
        make_bases(Path(home))
        yield Path(home)


def main() -> None:
    """Run them all, or be one of them."""
    from qlora_rl.engine.loading import quieten

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is made here
    quieten()
    if sys.argv[1:2] == ["--child"]:
        name, seed, steps, home, out = sys.argv[2:]
        with tempfile.TemporaryDirectory() as work:
            try:
                numbers = CONTENDERS[name].run(int(seed), int(steps), Path(home), Path(work))
            except NotRunHere as lack:
                print(f"NotRunHere: {lack}", file=sys.stderr)
                sys.exit(NOT_RUN)
            Path(out).write_text(json.dumps(numbers))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(DEFAULT_SEEDS))
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help=f"of each training; more than {WARM}")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "field.json")
    arguments = parser.parse_args()
    if arguments.steps <= WARM:
        parser.error(f"--steps {arguments.steps}: the first {WARM} are not counted; take more.")
    started = time.perf_counter()
    with _made_bases() as home:
        found = {}
        for is_sampler in (False, True):
            names = [name for name in arguments.only if CONTENDERS[name].is_sampler == is_sampler]
            seeds = arguments.seeds[:SAMPLER_SEEDS] if is_sampler else arguments.seeds
            found |= compete(names, seeds, arguments.steps, home)
    result = {
        "command": f"python benchmarks/field.py --steps {arguments.steps} --seeds "
        f"{' '.join(map(str, arguments.seeds))}",
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "is_short": arguments.steps < DEFAULT_STEPS or len(arguments.seeds) < len(DEFAULT_SEEDS),
        "warm": WARM,
        "sampler": {"batch": BATCH, "prompt_tokens": PROMPT, "completion_tokens": COMPLETION},
        "seconds": time.perf_counter() - started,
        "contender_versions": {name: metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)},
        "contenders": found,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(described(result), indent=1) + "\n")
    print(f"{arguments.json} after {result['seconds']:.0f} s")
    if len(arguments.only) == 1:  # asked for alone, its end is the end of this
        sys.exit({"failed": 1, "not run": NOT_RUN}.get(found[arguments.only[0]]["status"], 0))


if __name__ == "__main__":
    main()
