"""`qlora-rl serve`: vLLM's server on a base, or on the base of a run with what it has trained."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import Any, get_args

from qlora_rl.commands.codes import COUNT, add_server, ranged
from qlora_rl.contracts import ComputeWish
from qlora_rl.errors import ConfigConflictError

# Of runs, bases and PEFT; the packages that have these names import torch.
CONFIG, MANIFEST, ADAPTER_CONFIG = "config.json", "qlora_base.json", "adapter_config.json"


def add(commands: Any) -> None:
    """The command's arguments."""
    serve = commands.add_parser(
        "serve",
        help="start a vLLM server on a base or a trained run, with LoRA and access control",
        usage="%(prog)s [-h] [OPTION ...] BASE|RUN [-- VLLM_OPTION ...]",
        epilog="What follows -- goes to vLLM's own server.",
    )
    serve.add_argument(
        "base",
        type=Path,
        metavar="BASE|RUN",
        help="directory made by `prepare`; or a run directory or a checkpoint in it, whose policy is then model "
        '"policy"',
    )
    add_server(
        serve,
        port=8000,
        share=0.9,
        says="share of the card (default: %(default)s, as a server has it to itself; 0.3 from Python, where a trainer "
        "may share it)",
        help="largest request (default: from the largest adapter)",
    )
    serve.add_argument("--api-key-file", type=Path, metavar="F", help="file with the API key; created if missing")
    serve.add_argument(
        "--adapter-dir", type=Path, metavar="D", help="directory in which what is pushed is written (default: on tmpfs)"
    )
    serve.add_argument(
        "--max-lora-rank",
        type=ranged(int, at_least=0),
        metavar="R",
        help="0: no adapters, full weights are pushed (default: 16, or more if the run's adapter has more)",
    )
    serve.add_argument(
        "--max-loras", type=COUNT, default=2, metavar="N", help="adapters in memory (default: %(default)s)"
    )
    serve.add_argument(
        "--base-compute",
        choices=get_args(ComputeWish),
        help="what linears multiply with on the CPU: the codes (default), or vLLM's own way",
    )
    serve.add_argument(
        "--tensor-parallel-size",
        type=COUNT,
        metavar="N",
        help="number of GPUs to shard the base over; a 4-bit base is then served in its baked form (default: 1)",
    )
    serve.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped."""
    from qlora_rl.engine.loading import loading

    options = {name: value for name, value in vars(arguments).items() if name != "run" and value is not None}
    given = options.pop("base")
    with loading():
        from qlora_rl.adapter.directory import trained_in
        from qlora_rl.engine.server import serve
    held = trained_in(given)
    if ((given / CONFIG).is_file() and not (given / MANIFEST).is_file()) or (held / ADAPTER_CONFIG).is_file():
        given, of_run = _trained(given)
        options |= of_run
    serve(given, **options)
    return 0


def _trained(run: Path) -> tuple[Path, dict[str, Any]]:
    """The base of a run, checked, and what `serve` is told of the run: the adapter, what ends a completion of it, and
    its chat template.

    Raises:
        ConfigConflictError: there is no adapter.
    """
    from qlora_rl.inference.trained import open_trained
    from qlora_rl.stages import remark

    trained = open_trained(run)
    if trained.adapter is None:
        raise ConfigConflictError(
            f"serving {run}: all weights of the base were trained, so there is no adapter. Export one model, and "
            "serve that: qlora-rl export "
            f"{quote(str(run))} --out DIR; vllm serve DIR"
        )
    if trained.data is not None and (said := trained.data.system_prompt):
        remark(f"the run was trained with a system prompt, which clients have to send as the first message: {said!r}")
    if texts := trained.stop.get("stop"):
        remark(f"completions of the run ended at texts, too, which vLLM takes from clients alone: stop={texts!r}")
    return trained.base.path, {
        "adapter": trained.adapter,
        "ends": trained.ends,
        "chat_template": trained.chat_template,
    }
