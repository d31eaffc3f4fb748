"""`qlora-rl bench`: what it costs here."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import COUNT, POSITIVE, UsageError

DEFAULT_MODES = ["nf4"]
AGAINST = {"rollout": "stock", "sync": "trl", "step": "trl", "memory": "trl"}


def add(commands: Any) -> None:
    """The command's arguments."""
    bench = commands.add_parser("bench", help="measure speed and memory on this machine, compared with vLLM or TRL")
    bench.add_argument(
        "what",
        choices=list(AGAINST),
        help="tokens per second with an adapter; seconds of a push; seconds and peak memory of a training step",
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
        help="stock: vLLM, its plugin, its own way with LoRA (rollout); trl: its merge (sync), its trainer (step, "
        "memory)",
    )
    bench.add_argument(
        "--batch",
        type=COUNT,
        nargs="+",
        metavar="B",
        help="rollout: numbers of prompts per call (default: 16 64); memory with --max-length: sequences (default: 1)",
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
    bench.add_argument(
        "--max-length",
        type=COUNT,
        nargs="+",
        metavar="T",
        help="memory: live tensors of one step at these lengths in tokens, without a sampler, line by line against the "
        "memory estimate",
    )
    bench.add_argument(
        "--layers", type=COUNT, metavar="N", help="with --max-length: another number of layers than the size has"
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
    if arguments.max_length:
        if arguments.what != "memory":
            raise UsageError(f"measuring: --max-length with bench {arguments.what}. Use it with bench memory.")
        from qlora_rl.bench.memory import bench_memory

        results: dict[str, Any] = {}
        for batch in arguments.batch or [1]:
            results |= bench_memory(arguments.size, arguments.max_length, batch=batch, layers=arguments.layers)
        if arguments.json is not None:
            add_to(arguments.json, results)
        return 0
    if arguments.layers is not None:
        raise UsageError(
            "measuring: --layers is for bench memory with --max-length. Add --max-length, or leave it out."
        )
    if arguments.what in ("step", "memory"):
        from qlora_rl.bench.step import bench_step, memory_table, table

        steps = {"steps": arguments.steps, "rounds": arguments.rounds}
        if arguments.what == "memory":
            steps = {"steps": min(arguments.steps, 6), "rounds": 1}
        options = {} if arguments.mode == DEFAULT_MODES else {"base_compute": arguments.mode[0]}
        results = bench_step(arguments.size, **steps, options=options)
        print(memory_table(results) if arguments.what == "memory" else table(results))
        if arguments.json is not None:
            add_to(arguments.json, results)
        return 0
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
        batches=arguments.batch or [16, 64],
        modes=arguments.mode,
        tokens=arguments.tokens,
        minutes=arguments.minutes,
    )
    if arguments.json is not None:
        add_to(arguments.json, results)
    return 0
