"""`qlora-rl prepare`: quantise a model once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qlora_rl.commands.codes import QUANTISED
from qlora_rl.contracts import QUANT_TYPES


def add(commands: Any) -> None:
    """The command's arguments."""
    prepare = commands.add_parser("prepare", parents=[QUANTISED], help="quantise a model once, for trainer and engine")
    prepare.add_argument("model", help="hub name or checkpoint directory")
    prepare.add_argument("out", type=Path, help="directory to write")
    prepare.add_argument("--quant", choices=QUANT_TYPES, default="nf4", help="(default: %(default)s)")
    prepare.add_argument(
        "--blocksize", type=int, default=64, metavar="N", help="weights per scale (default: %(default)s)"
    )
    prepare.add_argument(
        "--compute-dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="(default: %(default)s)"
    )
    prepare.add_argument(
        "--skip",
        nargs="*",
        default=[],
        metavar="NAME",
        help="linears that stay unquantised: names, or parts of them, such as layers.1.mlp",
    )
    prepare.add_argument(
        "--calibrate",
        nargs="?",
        const=True,
        default=False,
        metavar="DATA",
        help="choose the codes by what the layers see of a text, in the same format: rows of .jsonl, .json, .csv or "
        ".parquet, or plain text; without DATA a text of ours",
    )
    prepare.add_argument(
        "--measure",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure how far the base is from its source, on some hundred tokens (default: on)",
    )
    prepare.add_argument("--revision", help="revision of a hub model")
    prepare.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")
    prepare.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Quantise, and say what was written."""
    from qlora_rl.base.checkpoint import prepare_base
    from qlora_rl.data.calibration import calibration_rows

    calibrate = arguments.calibrate
    base = prepare_base(
        arguments.model,
        arguments.quant,
        double_quant=arguments.double_quant,
        blocksize=arguments.blocksize,
        compute_dtype=arguments.compute_dtype,
        skip_modules=arguments.skip,
        quantize_experts=arguments.quantize_experts,
        quantize_tower=arguments.quantize_tower,
        out=arguments.out,
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
        calibrate=calibration_rows(calibrate) if isinstance(calibrate, str) else calibrate,
        measure=arguments.measure,
    )
    size = sum(f.stat().st_size for f in base.path.iterdir()) / 2**20
    print(f"{base}: {base.spec.label}, {size:.1f} MiB, identity {base.identity[:16]}")
    if base.measured is not None:
        print(base.measured)
        if base.spec.compute_dtype == "bfloat16" and (nearer := base.measured.rounds_less):
            print(f"{nearer}: --compute-dtype float16 rounds less")
    elif base.spec.is_4bit and arguments.measure:
        print("how far it is from its source was not measured: its source is in 4 bits too, or the log says why")
    return 0
