"""`qlora-rl export`: what a run has trained, for others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import AS_JSON, BASE, COUNT, NOT_NEGATIVE, existing


def add(commands: Any) -> None:
    """The command's arguments."""
    export = commands.add_parser(
        "export",
        parents=[BASE, AS_JSON],
        help="export the policy of a run: adapter, merged model or GGUF, loaded again and compared",
    )
    export.add_argument(
        "trained", type=existing, metavar="RUN", help="run directory, or a checkpoint or exported adapter in it"
    )
    export.add_argument(
        "--to",
        choices=["adapter", "merged", "merged-original", "gguf"],
        default="merged",
        help="merged: one model, on the dequantised base (default); merged-original: on the weights from before the "
        "quantisation",
    )
    export.add_argument("--out", type=Path, metavar="DIR", help="directory to write (default: export-<to> in RUN)")
    export.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32", "q8_0"],
        help="dtype of merged weights (default: the base's compute dtype); the last one for gguf",
    )
    export.add_argument(
        "--original", metavar="MODEL", help="original model, for merged-original (default: the base's source)"
    )
    export.add_argument(
        "--data",
        type=existing,
        metavar="F",
        help="file of rows with prompts to compare on (default: those of its rollouts)",
    )
    export.add_argument(
        "--prompts", type=COUNT, default=16, metavar="N", help="number of prompts to compare on (default: %(default)s)"
    )
    export.add_argument(
        "--max-kl",
        type=NOT_NEGATIVE,
        metavar="K",
        help="largest mean KL (default: 1e-3 or four times the rounding of the policy; 1e-9 in float32)",
    )
    export.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        help="do not load it again and compare, which of a large model takes most of the time",
    )
    export.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export, and say how far it is from the policy."""
    import json

    from qlora_rl.engine.loading import loading

    with loading("qlora_rl.adapter.initialization", quietly=True, has_bars=False):
        from qlora_rl.export.job import export_run
    done = export_run(
        arguments.trained,
        arguments.to,
        out=arguments.out,
        dtype=arguments.dtype,
        original=arguments.original,
        base=arguments.base,
        data=arguments.data,
        prompts=arguments.prompts,
        max_kl=arguments.max_kl,
        check=arguments.check,
    )
    if arguments.json:
        found = {
            "path": str(done.path),
            "to": done.kind,
            **(vars(done.distance) if done.distance is not None else {}),
            "prompts": done.prompts,
        }
        found["llama_cpp"] = None if done.llama_cpp is None else vars(done.llama_cpp)
        print(json.dumps(found | {"load": done.load}, indent=1))
        return 0
    told = "not checked" if done.distance is None else f"{done.distance} (prompts: {done.prompts})"
    print(f"{done.path}: written; {told}")
    if done.accepted is not None:
        print(f"  as close as 16-bit rounding allows; a mean KL up to {done.accepted:.1e} per token was accepted")
    if done.llama_cpp is not None:
        print(f"  in llama.cpp: {done.llama_cpp}")
    for name, line in done.load.items():
        print(f"  {name}: {line}")
    return 0
