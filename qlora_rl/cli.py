"""The `qlora-rl` command. Parsing imports nothing heavy; each command brings in what it runs."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qlora_rl import __version__
from qlora_rl.errors import ConfigConflictError, QloraRLError

INTERRUPTED = 130
VERDICTS = {"adapter": 0, "full_weights": 3, "refuse": 4}
DOES_NOT_FIT = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 with a message on a known error, 2 on bad usage, 130 on Ctrl-C.

    `verify` and `plan` have codes of their own beside these.
    """
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        return int(arguments.run(arguments) or 0)
    except QloraRLError as error:
        print(f"qlora-rl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("qlora-rl: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qlora-rl",
        description="Reinforcement learning on a 4-bit base: the sampler holds the same base, only the adapter travels.",
    )
    parser.add_argument("--version", action="version", version=f"qlora-rl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser("demo", help="the whole thing on this machine, no download, a few minutes")
    demo.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of adapter, data order and sampling (default: %(default)s)")
    demo.add_argument("--out", type=Path, metavar="DIR", help="run directory (default: a new one under runs/)")
    demo.add_argument(
        "--sync",
        choices=["lora_adapter", "weights", "trl-merge"],
        default="lora_adapter",
        help="how the policy reaches vLLM; trl-merge is TRL's own way, to compare with (default: %(default)s)",
    )
    demo.add_argument(
        "--rollout",
        default="colocate",
        metavar="WHERE",
        help="colocate, server (one is started beside it), or a URL with the key in QLORA_RL_API_KEY (default: %(default)s)",
    )
    demo.add_argument(
        "--adapter",
        choices=["lora", "dora", "ia3"],
        default="lora",
        help="what is trained; the others need --sync weights (default: %(default)s)",
    )
    demo.add_argument("--temperature", type=float, default=1.0, help="of the rollouts (default: %(default)s)")
    demo.add_argument(
        "--against", type=Path, nargs="*", default=[], metavar="RUN", help="finished runs to draw into the same report"
    )
    demo.add_argument("--quiet", action="store_true", help="no progress bars")
    demo.set_defaults(run=_demo)

    prepare = commands.add_parser("prepare", help="quantise a model once, for trainer and engine")
    prepare.add_argument("model", help="hub name or checkpoint directory")
    prepare.add_argument("out", type=Path, help="directory to write")
    prepare.add_argument("--quant", choices=["nf4", "fp4", "none"], default="nf4", help="(default: %(default)s)")
    prepare.add_argument(
        "--double-quant",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="quantise the scales too (default: on)",
    )
    prepare.add_argument(
        "--blocksize", type=int, default=64, metavar="N", help="weights per scale (default: %(default)s)"
    )
    prepare.add_argument(
        "--compute-dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="(default: %(default)s)"
    )
    prepare.add_argument(
        "--skip", nargs="*", default=[], metavar="NAME", help="name endings of linears that stay unquantised"
    )
    prepare.add_argument("--revision", help="of a hub model")
    prepare.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")
    prepare.set_defaults(run=_prepare)

    _add_plan(commands)

    verify = commands.add_parser("verify", help="does vLLM hold the same base? which weight differs?")
    verify.add_argument("base", type=Path, help="directory made by `prepare`")
    where = verify.add_mutually_exclusive_group(required=True)
    where.add_argument("--local", action="store_true", help="start vLLM in this process")
    where.add_argument(
        "--server",
        metavar="URL",
        help="ask a running server: of `qlora-rl serve`, with --api-key-file, or a vLLM that loads our worker extension",
    )
    verify.add_argument(
        "--api-key-file", type=Path, metavar="F", help="the key of a server started by `qlora-rl serve`"
    )
    verify.add_argument("--as-loaded", action="store_true", help="do not repair rounded scales first")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)

    _add_serve(commands)

    _add_bench(commands)

    judge = commands.add_parser("judge", help="can this adapter travel alone? and why not?")
    judge.add_argument("adapter", type=Path, help="directory that PEFT's save_pretrained has written")
    judge.add_argument("--base", type=Path, help="the model or prepared base that it is meant for")
    judge.add_argument("--json", action="store_true", help="print JSON")
    judge.set_defaults(run=_judge)

    report = commands.add_parser("report", help="a run as one HTML page, others beside it")
    report.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run directories; the page goes into the first"
    )
    report.set_defaults(run=_report)
    return parser


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="what it costs here, against vLLM as it comes; both sides in one run")
    bench.add_argument("what", choices=["rollout", "sync"], help="tokens per second with an adapter; seconds of a push")
    bench.add_argument("--size", choices=["demo", "0.1b", "0.4b"], default="demo", help="(default: %(default)s)")
    bench.add_argument(
        "--against",
        choices=["stock", "trl"],
        help="stock: vLLM, its plugin, its own way with LoRA (rollout); trl: its merge (sync)",
    )
    bench.add_argument(
        "--batch", type=int, nargs="+", default=[16, 64], metavar="B", help="prompts at once (default: 16 64)"
    )
    bench.add_argument(
        "--mode",
        choices=["nf4", "baked", "auto"],
        nargs="+",
        default=["nf4", "baked"],
        help="of the engine (default: nf4 baked)",
    )
    bench.add_argument("--tokens", type=int, default=32, metavar="T", help="of a completion (default: %(default)s)")
    bench.add_argument(
        "--minutes", type=float, default=4.0, metavar="M", help="for measuring, besides start-up (default: %(default)s)"
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, beside those of other sizes")
    bench.set_defaults(run=_bench)


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="a vLLM server on a base, LoRA on, locked down",
        epilog="What follows -- goes to vLLM's own server.",
    )
    serve.add_argument("base", type=Path, help="directory made by `prepare`")
    serve.add_argument("--host", default="127.0.0.1", help="to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="to listen on; 0 takes a free one (default: %(default)s)")
    serve.add_argument(
        "--api-key-file", type=Path, metavar="F", help="holds the key; one is made where there is no such file"
    )
    serve.add_argument("--adapter-dir", type=Path, metavar="D", help="the only place from which adapters are loaded")
    serve.add_argument("--max-lora-rank", type=int, default=16, metavar="R", help="(default: %(default)s)")
    serve.add_argument(
        "--max-loras", type=int, default=2, metavar="N", help="adapters in memory (default: %(default)s)"
    )
    serve.add_argument(
        "--max-model-length", type=int, metavar="N", help="prompt plus completion (default: the model's)"
    )
    serve.add_argument("--max-num-seqs", type=int, default=128, metavar="N", help="in flight (default: %(default)s)")
    serve.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="X", help="(default: %(default)s)")
    serve.add_argument("--kv-cache-gib", type=float, metavar="GIB", help="size of the KV cache")
    serve.add_argument(
        "--max-body-mib", type=float, metavar="MIB", help="largest request (default: by the largest adapter)"
    )
    serve.add_argument("--ready-file", type=Path, metavar="F", help="is written, as JSON, when the server answers")
    serve.add_argument("vllm_options", nargs="*", metavar="-- OPTION", help="of vLLM's own server")
    serve.set_defaults(run=_serve)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser("plan", help="what fits on my card: the memory of a run, without loading the model")
    plan.add_argument("model", help="checkpoint or base directory, config.json, or hub name")
    plan.add_argument("--gpu-memory", type=float, metavar="GIB", help="all that the run may hold (default: no limit)")
    plan.add_argument(
        "--max-length",
        type=int,
        default=2048,
        metavar="N",
        help="prompt plus completion, in tokens (default: %(default)s)",
    )
    plan.add_argument("--quant", choices=["nf4", "fp4", "none"], help="(default: as the base is held, otherwise nf4)")
    plan.add_argument(
        "--double-quant",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="quantise the scales too (default: on)",
    )
    plan.add_argument("--rank", type=int, default=16, metavar="R", help="of the adapter (default: %(default)s)")
    plan.add_argument(
        "--target-modules",
        nargs="+",
        default=["all-linear"],
        metavar="NAME",
        help="of the adapter (default: all-linear)",
    )
    plan.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="per_device_train_batch_size (default: %(default)s)"
    )
    plan.add_argument(
        "--num-generations", type=int, default=8, metavar="N", help="completions of a prompt (default: %(default)s)"
    )
    plan.add_argument(
        "--optim", default="adamw_torch_fused", metavar="NAME", help="transformers' name (default: %(default)s)"
    )
    plan.add_argument(
        "--gradient-checkpointing", action=argparse.BooleanOptionalAction, default=True, help="(default: on)"
    )
    plan.add_argument("--two-copies", action="store_true", help="trainer and engine hold a base each")
    plan.add_argument("--sleep", action="store_true", help="the KV cache is given back between rollouts")
    plan.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    """Exit 0 fits (or no limit), 3 does not fit."""
    import json

    from qlora_rl.ledger.plan import largest_length, plan_memory
    from qlora_rl.ledger.shape import read_config, stored_spec

    spec = stored_spec(arguments.model, arguments.quant, double_quant=arguments.double_quant)
    targets = arguments.target_modules
    ledger = plan_memory(
        read_config(arguments.model, trust_remote_code=arguments.trust_remote_code),
        rank=arguments.rank,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        spec=spec,
        max_length=arguments.max_length,
        batch_size=arguments.batch_size,
        sequences=max(arguments.batch_size, arguments.num_generations),
        optimizer=arguments.optim,
        gradient_checkpointing=arguments.gradient_checkpointing,
        shared=not arguments.two_copies,
        sleeps=arguments.sleep,
        gpu_memory_gib=arguments.gpu_memory,
    )
    longest = largest_length(ledger) if arguments.gpu_memory is not None else None
    if arguments.json:
        ways = [vars(saving) for saving in ledger.savings()]
        print(json.dumps(ledger.as_dict() | {"longest_max_length": longest, "savings": ways}, indent=1))
        return 0 if ledger.fits else DOES_NOT_FIT
    print(ledger)
    cache = f"{ledger.cache_sequences} sequences of {arguments.max_length} tokens"
    print(f"\nKV cache: {cache} at once, {ledger.cache_tokens} tokens in all")
    if longest is not None:
        print(f"longest --max-length that fits: {longest or 'none'}")
    if not ledger.fits:
        print("lower one of these:")
        for saving in ledger.savings():
            enough = ", which is enough" if saving.is_enough else ""
            print(f"  {saving.advice}: saves {saving.nbytes / 2**30:.2f} GiB{enough}")
    return 0 if ledger.fits else DOES_NOT_FIT


def _demo(arguments: argparse.Namespace) -> int:
    from qlora_rl.demo.job import DemoSettings, default_out, run_demo, table

    settings = DemoSettings(
        steps=arguments.steps,
        seed=arguments.seed,
        sync=arguments.sync,
        temperature=arguments.temperature,
        rollout=arguments.rollout,
        adapter=arguments.adapter,
    )
    out = arguments.out or default_out(settings)
    try:
        summary = run_demo(settings, out, against=arguments.against, show_progress=not arguments.quiet)
    except KeyboardInterrupt:
        kept = (
            "the run so far and the last adapter are"
            if (out / "adapter").is_dir()
            else "no step was done; what there is lies"
        )
        print(f"\nqlora-rl: interrupted; {kept} in {out}", file=sys.stderr)
        return INTERRUPTED
    print(f"\n{table(summary)}\n\n  run directory: {out}")
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    from qlora_rl.base.checkpoint import prepare_base

    base = prepare_base(
        arguments.model,
        arguments.quant,
        double_quant=arguments.double_quant,
        blocksize=arguments.blocksize,
        compute_dtype=arguments.compute_dtype,
        skip_modules=arguments.skip,
        out=arguments.out,
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
    )
    size = sum(f.stat().st_size for f in base.path.iterdir()) / 2**20
    print(f"{base}: {base.spec.label}, {size:.1f} MiB, digest {base.digest[:16]}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Exit 0 equal (repaired or not), 1 different, 2 could not tell."""
    from qlora_rl.base.checkpoint import MANIFEST, open_base
    from qlora_rl.errors import BaseIncompleteError

    found: dict[str, object] = {"base": str(arguments.base), "file": "unknown", "state": "unknown", "repaired": 0}
    if not (arguments.base / MANIFEST).is_file():
        return _tell(arguments, found, f"could not tell: {arguments.base} is no prepared base (no {MANIFEST})", 2)
    try:
        base = open_base(arguments.base)
        found["file"] = "equal"
    except BaseIncompleteError as error:
        found |= {"file": "different", "differences": list(error.reasons)}
        return _tell(arguments, found, str(error), 1)
    from qlora_rl.base.fingerprint import fingerprint_stored
    from qlora_rl.sync.admission import prove_base

    try:
        with _holder(arguments, base) as holder:
            proof = prove_base(
                fingerprint_stored(base), holder, allow_base_mismatch=True, repair=not arguments.as_loaded
            )
    except Exception as error:  # whatever stopped it: 1 would mean that the bases differ
        return _tell(arguments, found, f"could not tell: {error}", 2)
    found |= {
        "state": proof.diff.state,
        "weights": len(proof.ours.leaves),
        "repaired": len(proof.repaired),
        "largest_relative_error": max(proof.repaired.values(), default=0.0),
        "differences": [str(entry) for entry in proof.diff.entries],
        "digest": proof.ours.digest,
    }
    if not proof.is_proven:
        lines = "\n".join(f"  {entry}" for entry in proof.diff.entries)
        return _tell(arguments, found, f"{arguments.base}: {proof.diff.state}\n{lines}", 1)
    how = f" after {len(proof.repaired)} weights got their exact scales back" if proof.repaired else ""
    return _tell(arguments, found, f"{arguments.base}: all {len(proof.ours.leaves)} weights are equal in vLLM{how}", 0)


@contextlib.contextmanager
def _holder(arguments: argparse.Namespace, base: Any) -> Iterator[Any]:
    """What is asked: a server, or an engine that is started for the question."""
    if arguments.server:
        if arguments.api_key_file is not None:
            from qlora_rl.engine.client import ServerEngine

            with ServerEngine(arguments.server, api_key_file=arguments.api_key_file, wait_s=0) as engine:
                yield engine
            return
        from qlora_rl.engine.server import ServerProbe

        yield ServerProbe(arguments.server)
        return
    from qlora_rl.demo.job import quieten

    quieten()
    from qlora_rl.engine.local import LocalEngine

    options = {"max_model_length": 64, "max_num_seqs": 4, "repair_scales": False, "use_tqdm_on_load": False}
    with LocalEngine(base, **options) as engine:
        yield engine


def _tell(arguments: argparse.Namespace, found: dict[str, object], text: str, code: int) -> int:
    import json

    if arguments.json:
        print(json.dumps(found | ({} if code == 0 else {"message": text}), indent=1))
    else:
        print(text, file=sys.stderr if code == 2 else sys.stdout)
    return code


def _bench(arguments: argparse.Namespace) -> int:
    from qlora_rl.demo.job import quieten

    quieten()
    from qlora_rl.bench.rounds import add_to

    other = {"rollout": "stock", "sync": "trl"}[arguments.what]
    if arguments.against not in (None, other):
        raise ConfigConflictError(
            f"measuring: bench {arguments.what} --against {arguments.against} is not there. Use --against {other}."
        )
    if arguments.what == "sync":
        import json

        from qlora_rl.bench.sync import bench_sync

        found = bench_sync(arguments.size)
        print(json.dumps({"seconds": found["seconds"], "ratio": found["ratio"]}, indent=1))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    from qlora_rl.bench.rollout import bench_rollout

    results = bench_rollout(
        arguments.size,
        batches=arguments.batch,
        modes=arguments.mode,
        tokens=arguments.tokens,
        minutes=arguments.minutes,
    )
    if arguments.json is not None:
        add_to(arguments.json, results)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from qlora_rl.engine.serve import serve

    options = {name: value for name, value in vars(arguments).items() if name != "run" and value is not None}
    serve(options.pop("base"), **options)
    return 0


def _judge(arguments: argparse.Namespace) -> int:
    """Exit 0 adapter, 3 full weights, 4 refuse."""
    import dataclasses
    import json

    from qlora_rl.adapter.verdict import judge_adapter

    verdict = judge_adapter(arguments.adapter, base=arguments.base)
    if arguments.json:
        print(json.dumps({"adapter": str(arguments.adapter), **dataclasses.asdict(verdict)}, indent=1))
        return VERDICTS[verdict.kind]
    says = {
        "adapter": f"adapter: plain LoRA of rank {verdict.rank}, it travels alone",
        "full_weights": "full weights: no engine can serve it beside its base; sync='weights' carries it",
        "refuse": "refuse: no engine can serve it",
    }
    print(f"{arguments.adapter}: {says[verdict.kind]}")
    for reason in verdict.reasons:
        print(f"  - {reason}")
    return VERDICTS[verdict.kind]


def _report(arguments: argparse.Namespace) -> int:
    from qlora_rl.report import write_report

    print(write_report(arguments.runs[0], arguments.runs[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
