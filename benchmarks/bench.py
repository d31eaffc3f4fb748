"""Speed of rollouts and steps on this machine, compared with vLLM or TRL.

python benchmarks/bench.py rollout --size 0.4b [--json rollout.json]
python benchmarks/bench.py step --size 0.1b [--json step.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from qlora_rl.commands.codes import COUNT, POSITIVE

DEFAULT_MODES = ["nf4"]


def main() -> int:
    """Measure, print, write the JSON."""
    bench = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    bench.add_argument(
        "what",
        choices=["rollout", "step"],
        help="tokens per second with an adapter; seconds and peak memory of a training step",
    )
    bench.add_argument(
        "--size",
        choices=["demo", "0.1b", "0.4b", "8b"],
        default="demo",
        help="of a random model; 8b is that of Llama 3.1 8B, for a GPU (default: %(default)s)",
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
        choices=["nf4", "vllm"],
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
    arguments = bench.parse_args()
    from qlora_rl.demo.job import quieten

    quieten()
    from rounds import add_to

    if arguments.what == "step":
        from step import WARM, bench_step, table

        if arguments.steps <= WARM:
            bench.error(f"--steps {arguments.steps}: the first {WARM} are not counted. Use more")
        options = {} if arguments.mode == DEFAULT_MODES else {"base_compute": arguments.mode[0]}
        results = bench_step(arguments.size, steps=arguments.steps, rounds=arguments.rounds, options=options)
        print(table(results))
    else:
        from rollout import bench_rollout

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


if __name__ == "__main__":
    raise SystemExit(main())
