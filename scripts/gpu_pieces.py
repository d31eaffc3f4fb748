"""Pieces of scripts/gpu_check.py that are neither tests nor commands: facts about the card, an engine with its trainer.

    python scripts/gpu_pieces.py facts|engine-eager|engine-graphs --out DIR [--device cpu]

A line for each fact as soon as it is known, also in DIR/facts.jsonl: a piece that is killed leaves what it had found. A
fact that fails does not keep the next ones from being looked for. Exit code: 0, or 1 where one failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
# Of trainer and engine with kernels of their own, in bf16: mean |difference| of logprobs, and mismatch KL in nats.
FURTHEST, LARGEST_KL = 0.05, 5e-3
KERNEL = """
import torch, vllm._custom_ops as operators
torch.set_default_device("cuda")
x, weight = torch.randn(64, 4096).to(torch.bfloat16), torch.ones(4096).to(torch.bfloat16)
found = torch.empty_like(x)
operators.rms_norm(found, x, weight, 1e-6)
right = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
assert (found.float() - right).norm() < 1e-2 * right.norm()
"""


class Facts:
    """What was found, printed and written at once."""

    def __init__(self, out: Path) -> None:
        self.failed, self._file = 0, out / "facts.jsonl"
        self._file.unlink(missing_ok=True)

    def add(self, name: str, value: Any = None, *, ok: bool = True, seconds: float | None = None) -> None:
        """One of them; `value` is anything that JSON or `str` can show."""
        self.failed += not ok
        row = {"fact": name, "ok": ok, "value": value, "seconds": seconds and round(seconds, 3)}
        with self._file.open("a") as file:
            file.write(json.dumps(row, default=str) + "\n")
        took = "" if seconds is None else f" ({seconds:.2f} s)"
        print(f"{'ok  ' if ok else 'FAIL'} {name}{'' if value is None else f': {value}'}{took}", flush=True)

    def find(self, name: str, look: Callable[[], Any], good: Callable[[Any], bool] = lambda _: True) -> Any:
        """What `look` returns, or None where it raised."""
        started = time.perf_counter()
        try:
            value = look()
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {str(error)[:600]}"
            self.add(name, said, ok=False, seconds=time.perf_counter() - started)
            return None
        shown = value if isinstance(value, dict | str | int | float | bool) else None
        self.add(name, shown, ok=good(value), seconds=time.perf_counter() - started)
        return value


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-600:])
    return done.stdout.strip()


def _gpu_seconds(calls: Sequence[Callable[[], Any]], rounds: int = 15) -> float:
    """Seconds of one call: all of them in one CUDA graph, as vLLM decodes; the median of the rounds."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(found[rounds // 3 :])


def look_at_card(facts: Facts, device: str) -> None:
    """Processor, versions, and what the card can do at most."""
    import torch

    from qlora_rl.train.run import describe_machine, describe_versions

    facts.find("versions", lambda: {**describe_versions(), "cuda": torch.version.cuda})
    facts.find("machine", describe_machine)
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        facts.add("card", {"name": card.name, "gib": card.total_memory / 2**30, "sms": card.multi_processor_count})
        facts.find("a kernel of vLLM runs here", lambda: _run(KERNEL))
        one, other = (torch.empty(2**30, dtype=torch.uint8, device="cuda") for _ in range(2))
        facts.find("copy, TB/s", lambda: round(2 * 2**30 / _gpu_seconds([lambda: other.copy_(one)]) / 1e12, 2))
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        facts.find("bf16 product of 8192, TFLOP/s", lambda: round(2 * 8192**3 / _gpu_seconds([lambda: a @ b]) / 1e12))


def _memory_gib() -> dict[str, float]:
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"used": round((total - free) / 2**30, 3), "by torch": round(torch.cuda.memory_allocated() / 2**30, 3)}


def _chosen_by_vllm(engine: Any) -> dict[str, str]:
    core = engine.llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    compilation = worker.vllm_config.compilation_config
    return {
        "runner": type(worker.model_runner).__module__,
        "compilation": str(compilation.mode),
        "graphs": str(compilation.cudagraph_mode),
        "sizes": str(compilation.cudagraph_capture_sizes),
    }


def try_engine(facts: Facts, device: str, *, eager: bool) -> None:
    """Base verified and lent, adapters pushed in place and through files, and how far both sides are apart."""
    import torch
    from peft import LoraConfig, get_peft_model
    from support import make_model, randomise

    from qlora_rl import AdapterSync, Canary, LocalEngine, borrow_base, load_base, prepare_base, verify_base
    from qlora_rl.fidelity import measure
    from qlora_rl.sync.in_place import InPlaceTransport
    from qlora_rl.sync.transports import DirectoryTransport

    work = Path(tempfile.mkdtemp())
    # Heads of 64, as real models have, and wide enough that rounding is like theirs.
    shape = {"head_dim": 64, "kv_heads": 2, "positions": 512, "num_hidden_layers": 4, "intermediate_size": 512}
    base = prepare_base(make_model(work / "model", **shape), out=work / "base")
    prompts = [[40 + i, 41, 42, 43 + i] for i in range(8)]
    options = {"max_lora_rank": 16, "max_model_length": 256, "max_num_seqs": 32, "kv_cache_gib": 0.5}
    if device == "cuda":
        options["enforce_eager"] = eager
    facts.add("memory before, GiB", _memory_gib())
    engine = facts.find("engine starts", lambda: LocalEngine(base, **options))
    if engine is None:
        return
    facts.add("memory with it, GiB", _memory_gib())
    facts.find("what vLLM chose", lambda: _chosen_by_vllm(engine))
    loaded = load_base(base)
    facts.find("base verified", lambda: verify_base(loaded, engine).is_verified, good=bool)
    model = facts.find("base lent, and nothing copied", lambda: borrow_base(engine), lambda m: not m.qlora_loan.copied)
    if model is None:
        model = loaded
    ids = torch.tensor(prompts, device=model.device)
    with torch.no_grad():
        logits = [side(ids).logits for side in (model, loaded)]
    facts.add("lent computes as loaded, bit for bit", ok=torch.equal(*logits))
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")).eval()

    def apart(temperature: float) -> dict[str, float]:
        options = {"max_tokens": 32, "temperature": temperature, "seed": 3, "extra": {"ignore_eos": True}}
        rollout = engine.generate(prompts * 4, **options)
        rows = torch.tensor([p + list(c) for p, c in zip(prompts * 4, rollout.completion_ids, strict=True)])
        theirs = torch.tensor(rollout.logprobs)
        with torch.no_grad():
            logits = model(rows.to(model.device)).logits[:, :-1].float() / temperature
        ours = logits.log_softmax(-1).cpu().gather(2, rows[:, 1:, None])[..., 0][:, -theirs.shape[1] :]
        found = measure(ours, theirs, torch.ones_like(ours))
        return {"kl": found.mismatch_kl, "mean |d|": found.logprob_diff_mean, "largest |d|": found.logprob_diff_max}

    def is_near(found: dict[str, float]) -> bool:
        return found["kl"] < LARGEST_KL and found["mean |d|"] < FURTHEST

    facts.find("mismatch of the bare base", lambda: apart(1.0), is_near)
    canary = Canary(model, engine)
    facts.find("canary calibrated", lambda: {"threshold": canary.calibrate(), "noise": canary.noise})
    in_place, seen = AdapterSync(model, engine, InPlaceTransport(), canary), []
    for seed in range(4):
        randomise(model, seed=seed)
        report = facts.find(f"push {seed} in place", in_place.push)
        if report is None:
            return
        check_ms = 1e3 * (report.canary_seconds or 0)
        figures = {"ms": 1e3 * report.seconds, "of the canary": check_ms, "difference": report.canary_difference}
        facts.add(f"push {seed} by {report.transport}", figures, ok=report.transport == "in_place")
        seen.append(engine.generate(prompts, max_tokens=16, temperature=0.0))
    facts.find("each push changes what is sampled", lambda: len({str(s.logprobs) for s in seen}) == len(seen), bool)

    def through_files() -> dict[str, bool]:
        AdapterSync(model, engine, DirectoryTransport(work / "versions"), canary).push()
        again = engine.generate(prompts, max_tokens=16, temperature=0.0)
        return {
            "same tokens": again.completion_ids == seen[-1].completion_ids,
            "same bits": again.logprobs == seen[-1].logprobs,
        }

    facts.find("through files as in place", through_files, lambda found: found["same tokens"])
    for temperature in (1.0, 0.7):
        facts.find(f"mismatch at temperature {temperature}", lambda t=temperature: apart(t), is_near)

    def seeded(**company: Any) -> list[Sequence[int]]:
        some = prompts[4:] if company else prompts
        return engine.generate(some, max_tokens=16, temperature=1.0, seed=5, **company).completion_ids

    facts.find("a seed gives the same tokens again", lambda: seeded() == seeded(), bool)
    # On a GPU kernels may sum in another order there: a fact, not a fault.
    facts.find("and in a smaller batch", lambda: seeded()[4:] == seeded(places=range(4, 8)))
    in_place.close()
    facts.find("engine closes", lambda: engine.close(force=True))
    facts.add("memory after it, GiB", _memory_gib())


def main(argv: Sequence[str] | None = None) -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piece", choices=["facts", "engine-eager", "engine-graphs"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    asked = parser.parse_args(argv)
    facts = Facts(asked.out)
    if asked.piece == "facts":
        look_at_card(facts, asked.device)
    else:
        try_engine(facts, asked.device, eager=asked.piece == "engine-eager")
    return int(facts.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
