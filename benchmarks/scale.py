"""What several engines are worth: steps per hour, staleness and idle time for 1 to 1,000 engines and bases of 8 B to
400 B.

    python benchmarks/scale.py --measure paced     compare with runs of paced engines (fifteen minutes), then predict
    python benchmarks/scale.py --measure real      the same with vLLM on this machine's cores (about ten minutes)
    python benchmarks/scale.py                     predict again, with what was measured then

`simulate` is a discrete-event model of one trainer and a fleet, made of what `QLoRAAsyncGRPOTrainer`, `StalenessLimit`
and `Fleet` do. All that goes into it is either measured or an entry of ASSUMED, with its source. What it says of 1,000
engines was never run.

Both kinds of runs have the real trainer, the real fleet, 1 to 4 actors of Ray, pushes through its object store,
verified bases. `paced`: each engine sleeps for a fixed time per completion, and so does the environment, so that two
cores do not decide. The overhead of a rollout is taken from one engine without overlap; everything else is predicted,
and compared. `real`: vLLM in each actor, one thread for each engine and one for the trainer, nothing to wait for. The
seconds of an engine and of a step are taken from runs of one engine; what several are worth, and how they share the
cores with the trainer, is predicted, and compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import math
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "scale.json"

# Value and where it is from. What is "assumed" is nobody's measurement.
ASSUMED: dict[str, tuple[float, str]] = {
    "engine_tokens_per_s_7b": (1362, "QeRL (arXiv 2510.11696): rollout of a 7 B model in NF4 with an adapter on one "
                                     "H100, batch not stated; large batches get more"),
    "sequence_tokens_per_s_7b": (60, "assumed: one sequence alone on such a card; the longest completion is no faster "
                                     "than this"),
    "trainer_flops": (4.0e14, "assumed: 40 % of the 989 TFLOP/s that NVIDIA names for bf16 on an H100"),
    "decoding_factor": (1.3, "assumed: decoding 4-bit weights makes a step of the trainer so much longer"),
    "flops_per_token": (6, "per parameter: 2 forward and 2 back to the activations, none for frozen weights; 2 for the "
                           "logprobs before"),
    "completions": (512, "assumed: 64 prompts x 8, as in published GRPO recipes"),
    "tokens": (1000, "assumed: mean length of a completion"),
    "longest": (4, "assumed: the longest completion of a batch against the mean"),
    "wait_s": (5, "assumed: reward and environment of a batch"),
    "lan_bytes_per_s": (1.25e9, "10 Gbit/s"),
    "wan_bytes_per_s": (1.25e7, "100 Mbit/s"),
    "pack_bytes_per_s": (3.2e8, "server.json: deliver_seconds, 17 MB in 52 ms, on two CPU cores"),
    "load_bytes_per_s": (7.7e7, "server.json: load_seconds, 17 MB in 220 ms, sent and loaded over loopback on two CPU "
                                "cores"),
    "proof_s": (0.6, "server.json: canary_seconds_held, median, on two CPU cores"),
    "failures_per_engine_hour": (1e-3, "assumed: one failure of an engine in six weeks"),
    "replace_s": (180, "assumed: process, vLLM and a base from the page cache until an engine is verified"),
}  # fmt: skip

# Of Llama 3.1: hidden, width of the feed-forward part, layers, width of keys and values, parameters.
SHAPES = {
    "8B": (4096, 14336, 32, 1024, 8.0e9),
    "70B": (8192, 28672, 80, 1024, 70.6e9),
    "400B": (16384, 53248, 126, 1024, 405.9e9),
}
RANK, ADAPTER_BYTES = 16, 2
# Seconds that are no time at all: months of running have so many digits that less would be lost.
_MOMENT_S = 1e-5
ENGINES = (1, 2, 4, 8, 16, 64, 256, 1000)


@dataclass(frozen=True)
class Job:
    """What decides how fast steps are made.

    Attributes:
        engines: that take part.
        completions: of a batch; one batch is one policy.
        engine_s: that one engine alone would sample a batch, by its throughput.
        floor_s: a rollout takes no less, however many engines share it.
        overhead_s: of a rollout, besides.
        wait_s: environment and rewards of a batch.
        train_s: the optimizer step, scoring included.
        push_s: a push and its proof.
        max_staleness: as the trainer takes it.
        failures_per_hour: of each engine.
        replace_s: until another takes part in its place.
        fails_at_s: when one fails for certain; for checks.
        cores: that engines and trainer share; each takes one while it is busy.
    """

    engines: int
    completions: int
    engine_s: float
    floor_s: float
    overhead_s: float
    wait_s: float
    train_s: float
    push_s: float
    max_staleness: int
    failures_per_hour: float = 0.0
    replace_s: float = 0.0
    fails_at_s: tuple[float, ...] = ()
    cores: float = math.inf


@dataclass
class _Batch:
    """One that is sampled: how much of it is left (from 1 to 0), and what comes on top in seconds."""

    number: int
    policy: int
    left: float = 1.0
    extra_s: float = 0.0


def simulate(job: Job, steps: int = 200, seed: int = 0) -> dict[str, float]:
    """Run `steps` optimizer steps.

    Batch b is trained on at policy b. It begins as soon as policy b - max_staleness is trained (`StalenessLimit`). All
    engines sample each batch; batches that are sampled at once share them. An engine that fails takes with it what it
    was sampling, which the others sample again when they are done (`Fleet.generate`). A push waits until nothing is
    sampled by a version that it takes out of the engines.

    Returns:
        steps_per_hour, step_s (median), staleness_mean, trainer_idle and engines_idle (shares of the time), failures.
    """
    rng, now = random.Random(seed), 0.0
    live, returns, failures = job.engines, [], 0
    certain = list(job.fails_at_s)
    sampling: list[_Batch] = []
    ready: dict[int, float] = {}  # when a batch is rewarded
    begun_by: dict[int, int] = {}
    policy, idle, busy, ends = 0, 0.0, 0.0, []
    state, work_s = "push", job.push_s  # of the trainer: "push", "wait", "train", "queue" (for a push)
    submitted = 0

    def next_failure() -> float:
        rate = live * job.failures_per_hour / 3600
        moment = now + rng.expovariate(rate) if rate > 0 else math.inf
        return min([moment, *certain[:1]])

    failure = next_failure()
    while len(ends) < steps:
        # With fewer cores than busy processes, each is slower.
        processes = (live if any(batch.left > 0 for batch in sampling) else 0) + (state in ("push", "train"))
        speed = min(1.0, job.cores / max(processes, 1))
        # What each batch advances by in a second: its part of the engines, and no faster than the longest completion.
        rates = {}
        for batch in sampling:
            shared = job.engine_s * len(sampling) / max(live, 1e-9)
            rates[batch.number] = speed / max(shared, job.floor_s, 1e-9) if live else 0.0
        moments = [failure, *(returns[:1])]
        for batch in sampling:
            if batch.left > 0:
                moments.append(now + batch.left / rates[batch.number] if live else math.inf)
            else:
                moments.append(now + batch.extra_s)
        if state in ("push", "train"):
            moments.append(now + work_s / speed)
        elif state == "wait" and policy in ready:
            moments.append(max(now, ready[policy]))
        then = min(moments)
        assert then < math.inf, "nothing can happen any more"
        span = then - now
        for batch in sampling:
            if batch.left > 0:
                busy += job.engine_s * min(batch.left, span * rates[batch.number])
                batch.left = max(0.0, batch.left - span * rates[batch.number])
                if batch.left < _MOMENT_S * rates[batch.number]:
                    batch.left = 0.0
            else:
                batch.extra_s = max(0.0, batch.extra_s - span)
        if state in ("wait", "queue"):
            idle += span
        else:
            work_s -= span * speed
        now = then
        if now >= failure:
            certain = certain[1:] if certain and now >= certain[0] else certain
            if live:
                for batch in sampling:
                    _lose_one(batch, job, live, rng)
                live, failures = live - 1, failures + 1
                heapq.heappush(returns, now + job.replace_s)
            failure = next_failure()
        while returns and returns[0] <= now:
            heapq.heappop(returns)
            live += 1
            failure = next_failure()
        for batch in [b for b in sampling if b.left <= 0 and b.extra_s < _MOMENT_S]:
            sampling.remove(batch)
            ready[batch.number] = now + job.wait_s
        if state == "push" and work_s < _MOMENT_S:
            policy, state = policy + 1, "wait"
            while submitted < policy + job.max_staleness:
                submitted += 1
                sampling.append(_Batch(submitted, policy, extra_s=job.overhead_s))
                begun_by[submitted] = policy
        if state == "wait" and ready.get(policy, math.inf) <= now:
            state, work_s = "train", job.train_s
        if state == "train" and work_s < _MOMENT_S:
            ends.append(now)
            state = "queue"
        if state == "queue" and not any(b.policy < policy for b in sampling):
            state, work_s = "push", job.push_s
    warm = min(len(ends) // 4, 5)
    took = [b - a for a, b in zip(ends[warm:], ends[warm + 1 :], strict=False)]
    ages = [number - begun_by[number] for number in range(1, steps + 1)]
    return {
        "steps_per_hour": 3600 * len(took) / sum(took),
        "step_s": statistics.median(took),
        "staleness_mean": statistics.fmean(ages),
        "trainer_idle": idle / now,
        "engines_idle": 1 - min(1.0, busy / (now * job.engines)),
        "failures": failures,
    }


def _lose_one(batch: _Batch, job: Job, live: int, rng: random.Random) -> None:
    """An engine fails while a batch is sampled: its share is sampled again by the others, in one more round when they
    are done."""
    share = job.completions / min(live, job.completions)  # completions of each that takes part
    is_first_round = batch.left > 0
    sampling = min(live, job.completions if is_first_round else math.ceil(share))
    if rng.random() * live > sampling:
        return  # it had nothing of this batch
    if live == 1:
        batch.left = 1.0
        return
    again = job.engine_s * share / job.completions / min(live - 1, math.ceil(share))
    batch.extra_s = max(batch.extra_s if is_first_round else 0.0, again, job.floor_s)


# --- what was never run ---------------------------------------------------------------------------------------------


def adapter_bytes(size: str) -> float:
    """Of a rank-16 adapter on all linears, in 16 bits."""
    hidden, width, layers, kv, _ = SHAPES[size]
    pairs = [
        (hidden, hidden),
        (hidden, kv),
        (hidden, kv),
        (hidden, hidden),
        (hidden, width),
        (hidden, width),
        (width, hidden),
    ]
    return float(RANK * layers * sum(i + o for i, o in pairs) * ADAPTER_BYTES)


def push_seconds(size: str, engines: int, net: str, way: str) -> float:
    """Packing, sending, loading and proving.

    "http" sends the adapter to each engine over the trainer's line, at the same time. "ray" puts it once; machines that
    have it pass it on, so that the number that have it doubles (assumed: one engine per machine; `http` within it
    otherwise).
    """
    nbytes, line = adapter_bytes(size), _get(f"{net}_bytes_per_s")
    rounds = engines if way == "http" else math.ceil(math.log2(engines + 1))
    return (
        nbytes / _get("pack_bytes_per_s") + rounds * nbytes / line + nbytes / _get("load_bytes_per_s") + _get("proof_s")
    )


def job_of(size: str, engines: int, net: str, way: str, staleness: int, trainers: int = 1) -> Job:
    """A job on a base of this size; throughput falls with its parameters. `trainers`: that share the step evenly
    (assumed)."""
    parameters = SHAPES[size][4]
    slower = parameters / 7e9
    tokens = _get("completions") * _get("tokens")
    flops = _get("flops_per_token") * parameters * tokens
    return Job(
        engines=engines,
        completions=int(_get("completions")),
        engine_s=tokens / _get("engine_tokens_per_s_7b") * slower,
        floor_s=_get("longest") * _get("tokens") / _get("sequence_tokens_per_s_7b") * slower,
        overhead_s=0.0,
        wait_s=_get("wait_s"),
        train_s=flops / _get("trainer_flops") * _get("decoding_factor") / trainers,
        push_s=push_seconds(size, engines, net, way),
        max_staleness=staleness,
        failures_per_hour=_get("failures_per_engine_hour"),
        replace_s=_get("replace_s"),
    )


def predict() -> list[dict[str, Any]]:
    """Every size, number of engines, line, way and staleness."""
    found = []
    for size in SHAPES:
        for engines in ENGINES:
            for net in ("lan", "wan"):
                for way in ("http", "ray"):
                    for staleness in (0, 1, 2):
                        job = job_of(size, engines, net, way, staleness)
                        about = {"base": size, "engines": engines, "net": net, "way": way, "max_staleness": staleness}
                        found.append(about | {"push_s": job.push_s} | simulate(job))
    return found


def _get(name: str) -> float:
    return ASSUMED[name][0]


# --- what is run ----------------------------------------------------------------------------------------------------

COMPLETIONS, PACE_S, WAIT_S, STEPS = 16, 0.4, 1.5, 10
# Of the runs with vLLM: tokens per completion, on a random model of 0.1 B. Of each run the first two steps are not
# counted.
TOKENS, WARM = 32, 2


def paced(base: str, **options: Any) -> Any:
    """An engine that sleeps for PACE_S a completion; in plain torch, on the real base. Runs in an actor."""
    import time

    import torch

    from qlora_rl import load_base
    from qlora_rl.base.checkpoint import open_base
    from qlora_rl.engine.fake import FakeEngine

    torch.set_num_threads(1)
    pace_s = options["pace_s"]

    class Paced(FakeEngine):
        def generate(self, prompts, sampling=None, **named):
            started = time.perf_counter()
            rollout = super().generate(prompts, sampling, **named)
            time.sleep(max(0.0, pace_s * len(prompts) - (time.perf_counter() - started)))
            return rollout

    return Paced(load_base(open_base(base)), max_model_length=64)


def late(completions: list[Any], **_: Any) -> list[float]:
    """A reward that takes WAIT_S."""
    time.sleep(WAIT_S)
    return at_once(completions)


def at_once(completions: list[Any], **_: Any) -> list[float]:
    """A reward that takes no time."""
    return [float(i % 2) for i in range(len(completions))]


def run_once(
    base: Any,
    out: Path,
    rollout: Any,
    staleness: int | None,
    *,
    reward: Any,
    tokens: int,
    completions: int = COMPLETIONS,
) -> dict[str, float]:
    """One training; `staleness` None is `QLoRAGRPOTrainer`."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig

    from qlora_rl import QLoRAAsyncGRPOTrainer, QLoRAGRPOTrainer

    config = GRPOConfig(
        output_dir=str(out), max_steps=STEPS, per_device_train_batch_size=completions, num_generations=4,
        max_completion_length=tokens, vllm_max_model_length=64 if rollout == "colocate" else None, learning_rate=1e-4,
        beta=0.0, bf16=True, use_cpu=True,
        gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    overlap = {} if staleness is None else {"max_staleness": staleness}
    with (QLoRAGRPOTrainer if staleness is None else QLoRAAsyncGRPOTrainer)(
        model=base,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": f"{10 + i}+{11 + i}="} for i in range(64)]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        rollout=rollout,
        **overlap,
    ) as trainer:
        trainer.train()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = rows[WARM:]
    found = {
        "step_s": statistics.median(row["step_seconds"] for row in kept),
        "seconds": sum(row["step_seconds"] for row in kept),
        "steps": len(kept),
    }
    if staleness is None:
        return found
    return found | {
        "waits_s": statistics.median(row["trainer_wait_seconds"] for row in kept),
        "sampling_s": statistics.median(row["rollout_sampled_seconds"] for row in kept),
        "staleness_mean": statistics.fmean(row["staleness_mean"] for row in rows),
    }


def measure_paced(work: Path) -> dict[str, Any]:
    """Each kind of run with paced engines, and what the model says of it."""
    from shapes import SIZES, make_model

    from qlora_rl import RayFleet, prepare_base

    base = prepare_base(make_model(work / "model", SIZES["demo"]), out=work / "nf4")
    kinds = [(1, 0), (2, 0), (4, 0), (1, 1), (2, 1), (4, 1), (4, 2)]
    runs: dict[str, Any] = {}
    overhead_s = 0.0
    for engines, staleness in kinds:
        with RayFleet(base.path, replicas=engines, make=paced, pace_s=PACE_S, ray_options={"num_cpus": 0.5}) as fleet:
            out = work / f"{engines}-{staleness}"
            found = run_once(base, out, fleet, staleness, reward=late, tokens=2)
        own_s = found["step_s"] - found["waits_s"]  # scoring, the step and the push: measured, not predicted
        job = Job(
            engines=engines,
            completions=COMPLETIONS,
            engine_s=COMPLETIONS * PACE_S,
            floor_s=math.ceil(COMPLETIONS / engines) * PACE_S,
            overhead_s=overhead_s,
            wait_s=WAIT_S,
            train_s=own_s,
            push_s=0.0,
            max_staleness=staleness,
        )
        if (engines, staleness) == (1, 0):  # the one that the overhead is taken from
            overhead_s = max(0.0, found["waits_s"] - job.engine_s - WAIT_S)
            job = dataclasses.replace(job, overhead_s=overhead_s)
        runs[_name(engines, staleness)] = found | _predicted(job, found)
        print(engines, staleness, _rounded(runs[_name(engines, staleness)]), flush=True)
    setting = {
        "completions": COMPLETIONS,
        "seconds_per_completion": PACE_S,
        "wait_s": WAIT_S,
        "overhead_s": overhead_s,
    }
    return {"paced": setting, "runs": runs} | _errors(runs, _name(1, 0))


def measure_real(work: Path) -> dict[str, Any]:
    """vLLM in one, two and four actors, a thread each; one engine in the trainer's process with all threads."""
    import torch
    from shapes import SIZES, make_model

    from qlora_rl import RayFleet, prepare_base

    cores = torch.get_num_threads()
    base = prepare_base(make_model(work / "model", SIZES["0.1b"]), out=work / "nf4")
    ways = {"reward": at_once, "tokens": TOKENS}
    colocated = run_once(base, work / "colocated", "colocate", None, **ways)
    print("colocated", _rounded(colocated), flush=True)
    torch.set_num_threads(1)

    def run(engines: int, staleness: int, completions: int = COMPLETIONS) -> dict[str, float]:
        with RayFleet(base.path, replicas=engines, max_model_length=64, kv_cache_gib=1.0) as fleet:
            out = work / f"{engines}-{staleness}-{completions}"
            return run_once(base, out, fleet, staleness, completions=completions, **ways)

    half = run(1, 0, COMPLETIONS // 2)
    runs: dict[str, Any] = {}
    for staleness in (0, 1, 2):
        for engines in (1, 2, 4):
            runs[_name(engines, staleness)] = found = run(engines, staleness)
            print(engines, staleness, _rounded(found), flush=True)
    return {
        "cores": cores,
        "completions": COMPLETIONS,
        "tokens": TOKENS,
        "colocated": colocated,
        "half": half,
        "runs": runs,
    }


def predict_real(found: dict[str, Any]) -> dict[str, Any]:
    """What the model says of the runs of `measure_real`: the runs of one engine without overlap and with that of one
    policy give its seconds.

    With overlap the trainer's own part of a step takes longer than without; the model does not know why, so that is
    taken from a run.
    """
    runs, count = found["runs"], found["completions"]
    whole, ahead = runs[_name(1, 0)], runs[_name(1, 1)]
    # Seconds of sampling: so many for each engine, and so many per completion.
    per_completion_s = 2 * (whole["sampling_s"] - found["half"]["sampling_s"]) / count
    per_engine_s = whole["sampling_s"] - per_completion_s * count
    fitted = {
        "per_engine_s": per_engine_s,
        "per_completion_s": per_completion_s,
        "overhead_s": max(0.0, whole["waits_s"] - whole["sampling_s"]),
        "train_s": whole["step_s"] - whole["waits_s"],
        "train_with_overlap_s": ahead["step_s"] - ahead["waits_s"],
    }
    told = {}
    for staleness in (0, 1, 2):
        for engines in (1, 2, 4):
            job = Job(
                engines=engines,
                completions=count,
                engine_s=engines * per_engine_s + count * per_completion_s,
                floor_s=0.0,
                overhead_s=fitted["overhead_s"],
                wait_s=0.0,
                train_s=fitted["train_with_overlap_s" if staleness else "train_s"],
                push_s=0.0,
                max_staleness=staleness,
                cores=found["cores"],
            )
            run = runs[_name(engines, staleness)]
            told[_name(engines, staleness)] = run | _predicted(job, run)
    return found | {"fitted": fitted, "runs": told} | _errors(told, _name(1, 0), _name(1, 1))


def _name(engines: int, staleness: int) -> str:
    return f"{engines} engines, staleness {staleness}"


def _predicted(job: Job, found: dict[str, float]) -> dict[str, float]:
    said = simulate(job, steps=STEPS + 20)
    return {
        "predicted_step_s": said["step_s"],
        "predicted_staleness": said["staleness_mean"],
        "error": said["step_s"] / found["step_s"] - 1,
    }


def _errors(runs: dict[str, Any], *calibrated: str) -> dict[str, float]:
    errors = [abs(run["error"]) for name, run in runs.items() if name not in calibrated]
    return {"largest_error": max(errors), "mean_error": statistics.fmean(errors)}


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    """Measure if asked to, predict, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", choices=("paced", "real"))
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    result = json.loads(arguments.json.read_text())
    if arguments.measure:
        from rounds import described

        from qlora_rl.cpu_features import processor

        with tempfile.TemporaryDirectory() as work:
            if arguments.measure == "paced":
                result["checked"] = described(measure_paced(Path(work)))
            else:
                kernels = processor().torch_kernels
                result["real"] = result.get("real", {}) | {kernels: described(measure_real(Path(work)))}
    result["real"] = {kernels: predict_real(found) for kernels, found in result.get("real", {}).items()}
    assumed = {name: {"value": value, "source": source} for name, (value, source) in ASSUMED.items()}
    about = {name: result[name] for name in ("checked", "real")}
    head = json.dumps(about | {"assumed": assumed}, indent=1).removesuffix("\n}")
    rows = [{n: float(f"{v:.4g}") if isinstance(v, float) else v for n, v in row.items()} for row in predict()]
    lines = ",\n  ".join(json.dumps(row) for row in rows)  # a line each
    arguments.json.write_text(f'{head},\n "predicted": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
