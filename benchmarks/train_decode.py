"""What a trainer would gain on the CPU from 16-bit copies of its 4-bit weights: no decoding in its forward and backward
passes.

    python benchmarks/train_decode.py [--json benchmarks/results/train_decode.json]

Two layers of the 0.1b shape with LoRA of rank 16 on every linear, bf16 autocast, forward and backward; with the codes
as bitsandbytes multiplies with them, and with a plain product with decoded copies. One thread and processor time, both
sides in turns, so that another job on the machine disturbs little. The output and the gradients of the adapter are
compared, bit for bit; `repeats` says whether two passes with the codes agree with each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

ROUNDS = 30
BATCH = 16


def main() -> int:
    import torch
    from peft import LoraConfig, get_peft_model
    from rounds import described
    from shapes import Shape, make_model

    from qlora_rl import load_base, prepare_base
    from qlora_rl.base.quant import require_bitsandbytes

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bitsandbytes = require_bitsandbytes()
    with tempfile.TemporaryDirectory() as work:
        base = prepare_base(make_model(Path(work) / "model", Shape(768, 3072, 2, 12, 4)), out=Path(work) / "nf4")
        model = get_peft_model(load_base(base), LoraConfig(r=16, target_modules="all-linear")).train()
        linears = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
        copies = [
            bitsandbytes.functional.dequantize_4bit(m.weight.data, m.weight.quant_state).to(torch.bfloat16)
            for m in linears
        ]

        def with_copies() -> None:
            for module, copy in zip(linears, copies, strict=True):
                module.forward = lambda x, m=module, w=copy: torch.nn.functional.linear(
                    x.to(torch.bfloat16), w, None if m.bias is None else m.bias.to(torch.bfloat16)
                ).to(x.dtype)

        def with_codes() -> None:
            for module in linears:
                module.__dict__.pop("forward", None)

        inner = model.get_base_model().model

        def step(ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = inner(input_ids=ids, use_cache=False).last_hidden_state
            hidden.backward(torch.ones_like(hidden))
            return hidden

        def gradients() -> list[torch.Tensor]:
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            return found

        def equal(one: tuple, other: tuple) -> bool:
            return torch.equal(one[0], other[0]) and all(map(torch.equal, one[1], other[1]))

        rows = []
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
                model.enable_input_require_grads()
            for length in (24, 64):
                ids = torch.randint(5, 50, (BATCH, length), generator=torch.Generator().manual_seed(0))
                with_codes()
                once, again = (step(ids), gradients()), (step(ids), gradients())
                with_copies()
                copied = step(ids), gradients()
                repeats, same = equal(once, again), equal(once, copied)
                seconds: dict[str, list[float]] = {"codes": [], "copies": []}
                for i in range(ROUNDS):
                    for name in ("codes", "copies") if i % 2 else ("copies", "codes"):
                        (with_codes if name == "codes" else with_copies)()
                        started = time.process_time()
                        step(ids)
                        seconds[name].append(time.process_time() - started)
                gains = [1 - copy / code for code, copy in zip(seconds["codes"], seconds["copies"], strict=True)]
                low, middle, high = statistics.quantiles(gains, n=4)
                row = {
                    "batch": BATCH,
                    "length": length,
                    "gradient_checkpointing": checkpointing,
                    "repeats": repeats,
                    "equal": same,
                    "codes_seconds": statistics.median(seconds["codes"]),
                    "copies_seconds": statistics.median(seconds["copies"]),
                    "gain": middle,
                    "gain_quartiles": [low, high],
                }
                rows.append(row)
                print(
                    f"{BATCH} x {length} tokens, checkpointing {checkpointing}: {middle:.1%} ({low:.1%} to "
                    f"{high:.1%}), equal {same}, with itself {repeats}",
                    flush=True,
                )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(described({"rounds": ROUNDS, "rows": rows}), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
