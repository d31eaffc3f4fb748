"""Products with 4-bit weights on this GPU, for the linears of models from 0.5 to 8 B, with 1 to 256 tokens.

    python benchmarks/nf4_gemm.py [--models qwen2.5-7b ...] [--json benchmarks/results/nf4_gemm.json] [--keep]

parts      bitsandbytes' product for each part of a fused linear, as vLLM's plugin makes it; the ratios are to this
joined     one of them for all parts
decoded    the whole weight decoded, then a 16-bit product
triton …   our kernel, with the sizes of its tiles
bf16       a product with 16-bit weights, for comparison

All calls of a measurement are one CUDA graph, and the weights take turns so that none is in the cache. Each result is
compared with the float32 product. `--keep` puts the times into the table that engines with base_compute="auto" read, so
that they need not measure these shapes. Needs an NVIDIA GPU; not run on one yet.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from qlora_rl.errors import QloraRLError


def main() -> int:
    from products import MODELS, SIXTEEN, bench_products, require_gpu
    from rounds import add_to, described

    from qlora_rl.engine.linears.gpu_compute import TOKENS, table_of_this_gpu

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="(default: all)")
    parser.add_argument("--tokens", nargs="+", type=int, choices=list(TOKENS), default=list(TOKENS))
    parser.add_argument("--json", type=Path, help="write the numbers there, beside those of other GPUs")
    parser.add_argument("--keep", action="store_true", help="also into the table that engines read")
    arguments = parser.parse_args()
    try:
        require_gpu()
    except QloraRLError as error:
        print(error, file=sys.stderr)
        return 2
    table = table_of_this_gpu()
    shapes = bench_products(arguments.models, tokens=arguments.tokens)
    if arguments.keep:
        for key, found in shapes.items():
            held = table.seconds.setdefault(key, {})
            for tokens, row in found["tokens"].items():
                held[tokens] = {way: value for way, value in row["seconds"].items() if way != SIXTEEN}
        table.save()
        print(f"kept in {table.file}")
    if arguments.json is not None:
        add_to(
            arguments.json, {table.gpu: described({"gpu": table.gpu, "gpu_versions": table.versions, "shapes": shapes})}
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
