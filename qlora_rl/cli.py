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
from qlora_rl.errors import QloraRLError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 1 with a message on a known error, 2 on bad usage, 130 on Ctrl-C."""
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

    verify = commands.add_parser("verify", help="does vLLM hold the same base? which weight differs?")
    verify.add_argument("base", type=Path, help="directory made by `prepare`")
    where = verify.add_mutually_exclusive_group(required=True)
    where.add_argument("--local", action="store_true", help="start vLLM in this process")
    where.add_argument("--server", metavar="URL", help="ask a vLLM server that loads our worker extension")
    verify.add_argument("--as-loaded", action="store_true", help="do not repair rounded scales first")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)

    report = commands.add_parser("report", help="a run as one HTML page, others beside it")
    report.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run directories; the page goes into the first"
    )
    report.set_defaults(run=_report)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from qlora_rl.demo.job import DemoSettings, default_out, run_demo, table

    settings = DemoSettings(
        steps=arguments.steps, seed=arguments.seed, sync=arguments.sync, temperature=arguments.temperature
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


def _report(arguments: argparse.Namespace) -> int:
    from qlora_rl.report import write_report

    print(write_report(arguments.runs[0], arguments.runs[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
