"""`qlora-rl recommend`: settings for a model, a task and a card, with their sources."""

from __future__ import annotations

import argparse
from typing import Any

from qlora_rl.commands.codes import DOES_NOT_FIT
from qlora_rl.ledger.cards import card_size


def add(commands: Any) -> None:
    """The command's arguments."""
    recommend = commands.add_parser(
        "recommend", help="recommend settings for a model, a task and a card, with their sources"
    )
    recommend.add_argument("model", help="checkpoint or base directory, config.json, or hub name")
    recommend.add_argument("--task", choices=["grpo", "sft", "dpo"], default="grpo", help="(default: %(default)s)")
    recommend.add_argument(
        "--gpu-memory",
        type=card_size,
        metavar="SIZE",
        help="size of the card, such as 24 or 24GB; another number is GiB that the run may use (default: no limit)",
    )
    recommend.add_argument(
        "--max-length",
        type=int,
        default=2048,
        metavar="N",
        help="prompt plus completion, in tokens (default: %(default)s)",
    )
    recommend.add_argument("--device", choices=["cuda", "cpu"], help="(default: cuda if available)")
    recommend.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")
    recommend.add_argument("--json", action="store_true", help="print JSON")
    recommend.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit 0 fits (or no limit), 3 nothing fits."""
    import json

    from qlora_rl.advice import recommend

    advice = recommend(
        arguments.model,
        arguments.task,
        arguments.gpu_memory,
        max_length=arguments.max_length,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
    )
    print(json.dumps(advice.as_dict(), indent=1, default=str) if arguments.json else advice)
    return 0 if advice.fits else DOES_NOT_FIT
