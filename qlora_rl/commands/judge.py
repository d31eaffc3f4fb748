"""`qlora-rl judge`: can this adapter be synced without the base?"""

from __future__ import annotations

import argparse
from typing import Any

from qlora_rl.commands.codes import AS_JSON, VERDICTS, existing


def add(commands: Any) -> None:
    """The command's arguments."""
    judge = commands.add_parser(
        "judge", parents=[AS_JSON], help="say how an adapter can be synced to an engine, and why"
    )
    judge.add_argument("adapter", type=existing, help="run directory, or one written by PEFT's save_pretrained")
    judge.add_argument("--base", type=existing, help="the model or prepared base that it is meant for")
    judge.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0: adapter; 3: full weights; 4: unsupported."""
    import dataclasses
    import json

    from qlora_rl.adapter.verdict import judge_adapter

    verdict = judge_adapter(arguments.adapter, base=arguments.base)
    if arguments.json:
        print(json.dumps({"adapter": str(arguments.adapter), **dataclasses.asdict(verdict)}, indent=1))
        return VERDICTS[verdict.kind]
    says = {
        "adapter": f"adapter: plain LoRA of rank {verdict.rank}, only the adapter is synced",
        "full_weights": "full weights: no engine can serve it as an adapter; use sync='weights'",
        "reject": "unsupported: no engine can serve it",
    }
    print(f"{arguments.adapter}: {says[verdict.kind]}")
    for reason in verdict.reasons:
        print(f"  - {reason}")
    return VERDICTS[verdict.kind]
