"""`qlora-rl bench`: what it costs here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qlora_rl.errors import ConfigConflictError


def add(commands: Any) -> None:
    """The command's arguments."""
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
    bench.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write the JSON."""
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
