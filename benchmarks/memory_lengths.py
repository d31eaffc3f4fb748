"""Every line of the memory estimate against the live tensors of a step, at three shapes and four lengths; and how the
peak grows.

    python benchmarks/memory_lengths.py [--shapes 256 384 --lengths 2048 8192 16384]
                                        [--json benchmarks/results/memory_lengths.json]

Random Qwen2 models with 16,384 words as NF4, one sequence without padding, LoRA of rank 16 on every linear, gradient
checkpointing, bf16 autocast, one thread, on the CPU (`live_memory.py`). Memory inside one operator is not
seen. About fifteen minutes on an idle core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

# By hidden size: width of the MLP, layers, heads, key heads; heads of 64. No size equals that of a tile, by which
# tensors are told apart.
SHAPES = {256: (768, 2, 4, 2), 384: (1152, 2, 6, 2), 512: (1536, 2, 8, 4)}
WORDS = 16_384
# With so many tokens the bytes of one tile, which do not grow with them, are the smaller part, so the straight line
# begins here.
GROWS_FROM = 4096


def linear_fit(lengths: list[int], peaks: list[int]) -> dict[str, float]:
    """The straight line through bytes at several lengths, by least squares, and the largest distance from it as a part
    of them."""
    import numpy

    slope, start = numpy.polyfit(lengths, peaks, 1)
    off = [abs(start + slope * length - peak) / peak for length, peak in zip(lengths, peaks, strict=True)]
    return {"bytes_per_token": slope, "start_bytes": start, "largest_residual": max(off)}


def measure(hidden: int, lengths: list[int]) -> dict:
    """Measured and estimated bytes of one shape by length, and the fit of the measured peaks."""
    from live_memory import Step, line_of
    from shapes import Shape, make_model

    from qlora_rl import prepare_base

    width, layers, heads, key_heads = SHAPES[hidden]
    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        shape = Shape(hidden, width, layers, heads, key_heads, vocabulary=WORDS)
        model = make_model(Path(directory) / "model", shape, positions=max(lengths))
        base = prepare_base(model, out=Path(directory) / "base")
        for length in lengths:
            step = Step(base, 1, length)
            began = time.process_time()
            measured, planned = step.measure(), step.planned()
            seconds = time.process_time() - began  # with the counting
            off = {
                name: planned[name] / nbytes - 1 for name, nbytes in measured.items() if nbytes and planned.get(name)
            }
            rows[str(length)] = {"measured": measured, "planned": planned, "off": off, "seconds": seconds}
            print(hidden, line_of(length, rows[str(length)]), flush=True)
    # What grows with the tokens; the peak of short sequences is that of the output head, which does not.
    grows = {
        length: row["measured"]["activations"] + row["measured"]["one layer's work"]
        for length, row in zip(lengths, rows.values(), strict=True)
        if length >= GROWS_FROM
    }
    fit = linear_fit(list(grows), list(grows.values())) if len(grows) > 2 else None
    return {"width": width, "layers": layers, "lengths": rows, "fit": fit}


def main() -> None:
    """Measure and print; write the JSON, in which shapes that are not measured stay as they are."""
    import torch
    from rounds import described

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16_384, 32_768])
    parser.add_argument("--shapes", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "memory_lengths.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shapes = json.loads(arguments.json.read_text())["shapes"] if arguments.json.exists() else {}
    for hidden in arguments.shapes:
        shapes[str(hidden)] = measure(hidden, arguments.lengths)
        off = [
            abs(off) for shape in shapes.values() for row in shape["lengths"].values() for off in row["off"].values()
        ]
        residuals = [shape["fit"]["largest_residual"] for shape in shapes.values() if shape["fit"]]
        found = {
            "words": WORDS,
            "grows_from": GROWS_FROM,
            "largest_off": max(off),
            "largest_residual": max(residuals, default=None),
            "shapes": shapes,
        }
        arguments.json.write_text(json.dumps(described(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
