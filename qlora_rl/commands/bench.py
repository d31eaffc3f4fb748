"""`qlora-rl bench`: what it costs here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import COUNT, POSITIVE, UsageError

DEFAULT_MODES = ["nf4"]
AGAINST = {"rollout": "stock", "step": "trl"}


def add(commands: Any) -> None:
    """The command's arguments."""
    bench = commands.add_parser("bench", help="measure speed and memory on this machine, compared with vLLM or TRL")
    bench.add_argument(
        "what",
        choices=list(AGAINST),
        help="tokens per second with an adapter; seconds and peak memory of a training step",
    )
    bench.add_argument(
        "--size",
        choices=["demo", "0.1b", "0.4b", "8b"],
        default="demo",
        help="of a random model; 8b is that of Llama 3.1 8B, for a GPU (default: %(default)s)",
    )
    bench.add_argument(
        "--against",
        choices=["stock", "trl"],
        help="stock: vLLM, its plugin, its own way with LoRA (rollout); trl: its trainer (step)",
    )
    bench.add_argument(
        "--batch",
        type=COUNT,
        nargs="+",
        metavar="B",
        default=[16, 64],
        help="rollout: numbers of prompts per call (default: 16 64)",
    )
    bench.add_argument(
        "--mode",
        choices=["nf4", "auto", "vllm"],
        nargs="+",
        default=DEFAULT_MODES,
        help="values of the engine's base_compute (default: nf4)",
    )
    bench.add_argument(
        "--tokens", type=COUNT, default=32, metavar="T", help="tokens per completion (default: %(default)s)"
    )
    bench.add_argument(
        "--minutes",
        type=POSITIVE,
        default=4.0,
        metavar="M",
        help="time for measuring, without start-up (default: %(default)s)",
    )
    bench.add_argument(
        "--steps", type=COUNT, default=20, metavar="N", help="optimizer steps per training (default: %(default)s)"
    )
    bench.add_argument(
        "--rounds", type=COUNT, default=2, metavar="N", help="trainings of each side (default: %(default)s)"
    )
    bench.add_argument("--json", type=Path, metavar="FILE", help="add the numbers to this file")
    bench.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write the JSON."""
    from qlora_rl.demo.job import quieten

    quieten()
    from qlora_rl.bench.rounds import add_to

    other = AGAINST[arguments.what]
    if arguments.against not in (None, other):
        raise UsageError(
            f"measuring: bench {arguments.what} has no --against {arguments.against}. Use --against {other}."
        )
    if arguments.what == "step":
        from qlora_rl.bench.step import bench_step, table

        options = {} if arguments.mode == DEFAULT_MODES else {"base_compute": arguments.mode[0]}
        results = bench_step(arguments.size, steps=arguments.steps, rounds=arguments.rounds, options=options)
        print(table(results))
    else:
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
