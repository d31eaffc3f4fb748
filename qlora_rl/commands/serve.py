"""`qlora-rl serve`: vLLM's server on a base."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import COUNT, PORT, POSITIVE, SHARE, ranged


def add(commands: Any) -> None:
    """The command's arguments."""
    serve = commands.add_parser(
        "serve",
        help="start a vLLM server on a base, with LoRA and access control",
        usage="%(prog)s [-h] [OPTION ...] BASE [-- VLLM_OPTION ...]",
        epilog="What follows -- goes to vLLM's own server.",
    )
    serve.add_argument("base", type=Path, metavar="BASE", help="directory made by `prepare`")
    serve.add_argument("--host", default="127.0.0.1", help="to listen on (default: %(default)s)")
    serve.add_argument(
        "--port", type=PORT, default=8000, help="to listen on; 0 takes a free one (default: %(default)s)"
    )
    serve.add_argument("--api-key-file", type=Path, metavar="F", help="file with the API key; created if missing")
    serve.add_argument(
        "--adapter-dir", type=Path, metavar="D", help="the only directory from which adapters are loaded"
    )
    serve.add_argument(
        "--max-lora-rank",
        type=ranged(int, at_least=0),
        default=16,
        metavar="R",
        help="0: no adapters, full weights are pushed (default: %(default)s)",
    )
    serve.add_argument(
        "--max-loras", type=COUNT, default=2, metavar="N", help="adapters in memory (default: %(default)s)"
    )
    serve.add_argument(
        "--max-model-length", type=COUNT, metavar="N", help="prompt plus completion, in tokens (default: the model's)"
    )
    serve.add_argument(
        "--max-num-seqs", type=COUNT, default=128, metavar="N", help="sequences in flight (default: %(default)s)"
    )
    serve.add_argument(
        "--gpu-memory-utilization",
        type=SHARE,
        default=0.9,
        metavar="X",
        help="share of the card (default: %(default)s, as a server has it to itself; 0.3 from Python, where a trainer may share it)",
    )
    serve.add_argument(
        "--base-compute",
        choices=["nf4", "baked", "auto", "vllm"],
        help="what linears multiply with on the CPU: the codes (default), additional decoded copies, or what is fastest; on a GPU only 'auto' changes anything",
    )
    serve.add_argument(
        "--tensor-parallel-size",
        type=COUNT,
        metavar="N",
        help="number of GPUs to shard the base over; a 4-bit base is then served in its baked form (default: 1)",
    )
    serve.add_argument("--kv-cache-gib", type=POSITIVE, metavar="GIB", help="size of the KV cache")
    serve.add_argument(
        "--max-body-mib", type=POSITIVE, metavar="MIB", help="largest request (default: from the largest adapter)"
    )
    serve.add_argument(
        "--ready-file", type=Path, metavar="F", help="file that is written, as JSON, when the server is ready"
    )
    serve.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    from qlora_rl.engine.loading import loading

    with loading():
        from qlora_rl.engine.server import serve

    options = {name: value for name, value in vars(arguments).items() if name != "run" and value is not None}
    serve(options.pop("base"), alone=True, **options)
    return 0
