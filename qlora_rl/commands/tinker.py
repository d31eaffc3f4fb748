"""`qlora-rl tinker`: Tinker's API on a prepared base, for many LoRA adapters at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import COUNT, POSITIVE, add_server


def add(commands: Any) -> None:
    """The command's arguments."""
    tinker = commands.add_parser(
        "tinker", help="train and sample many adapters on one base, through Tinker's API and its own client"
    )
    tinker.add_argument("base", type=Path, metavar="BASE", help="directory made by `prepare`")
    tinker.add_argument(
        "--dir", type=Path, required=True, dest="directory", metavar="D", help="where weights and requests are kept"
    )
    add_server(
        tinker,
        port=8001,
        share=0.3,
        says="share of the card that vLLM may fill (default: %(default)s)",
        default=64.0,
        help="largest request (default: 64)",
    )
    tinker.add_argument(
        "--api-key-file",
        type=Path,
        action="append",
        default=[],
        dest="api_key_files",
        metavar="F",
        help="file with a client's API key, created if missing; once for each client (default: one in the directory)",
    )
    tinker.add_argument("--model-name", metavar="NAME", help="what clients call the base (default: its directory)")
    tinker.add_argument(
        "--max-adapters", type=COUNT, default=4, metavar="N", help="in memory at once; others wait on disk (default: 4)"
    )
    tinker.add_argument("--max-rank", type=COUNT, default=32, metavar="R", help="of an adapter (default: 32)")
    tinker.add_argument(
        "--tokens", type=COUNT, default=4096, metavar="N", help="tokens of a micro-batch of training (default: 4096)"
    )
    tinker.add_argument("--gradient-checkpointing", action="store_true", help="less memory for a slower backward pass")
    tinker.add_argument(
        "--checkpoint-every",
        type=COUNT,
        default=1,
        metavar="N",
        help="optimizer steps from one saved state of a model to the next (default: 1)",
    )
    tinker.add_argument(
        "--client-timeout",
        type=POSITIVE,
        default=120.0,
        dest="client_timeout_s",
        metavar="S",
        help="without a sign of life, until a client's adapters leave memory (default: 120)",
    )
    tinker.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    from qlora_rl.engine.loading import loading

    options = {name: value for name, value in vars(arguments).items() if name != "run" and value is not None}
    with loading():
        from qlora_rl.engine import compat

        compat.vllm_version()  # which brings what the server imports
        from qlora_rl.tinker import serve_adapters
    serve_adapters(options.pop("base"), **options)
    return 0
