"""What it takes to calibrate a base (`prepare --calibrate`), by the shapes of its model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from qlora_rl.memory.shape import ModelShape

# Of the text that comes with the package, by the tokenizers that were tried.
SHIPPED_TOKENS = 5_500
# Seconds of one CPU core with AVX-512 for a weight (scales are searched, columns rounded, codes packed), and
# floating-point operations of one in a second: fitted to benchmarks/calibrating.py.
_PER_WEIGHT_S, _OPERATIONS = 0.42e-6, 8.8e10
_SHARED_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


@dataclass(frozen=True)
class CalibrationCost:
    """What one calibration takes.

    Attributes:
        tokens: of its text.
        seconds: of one CPU core; more cores, or a GPU, are faster.
        nbytes: where a block is computed, above embeddings and output head.
    """

    tokens: int
    seconds: float
    nbytes: int

    def __str__(self) -> str:
        if self.seconds >= 5400:
            time = f"{self.seconds / 3600:.1f} hours"
        else:
            time = f"{self.seconds / 60:.0f} minutes" if self.seconds >= 100 else f"{self.seconds:.0f} seconds"
        said = f"about {time} of one CPU core, {self.nbytes / 2**30:.1f} GiB"
        return f"{said} above embeddings and head, by a text of {self.tokens:,} tokens"


def calibration_cost(shape: ModelShape, tokens: int = SHIPPED_TOKENS) -> CalibrationCost:
    """Of all linears in a dense model's blocks.

    A block is computed with twice in float32; of each input x of linears the sum of x x^T is made, inverted, and
    multiplied with for each group of columns that is rounded. Held are then the block, its in- and outputs, and four
    times each, the weights of linears with one input, and the matrix of its products.
    """
    weights, operations, largest, held = 0, 0.0, 0, 0
    for groups in _blocks(shape):
        block = sum(rows * width for rows, width in groups)
        weights += block
        largest = max(largest, block)
        operations += 4 * tokens * block
        for rows, width in groups:
            operations += 2 * tokens * width**2 + 4 / 3 * width**3 + rows * width**2
            held = max(held, 4 * (rows * width + width**2))
    nbytes = 4 * (largest + held + 2 * tokens * shape.hidden)
    return CalibrationCost(tokens, weights * _PER_WEIGHT_S + operations / _OPERATIONS, math.ceil(nbytes))


def _blocks(shape: ModelShape) -> Iterator[list[tuple[int, int]]]:
    """Of each block (O, I) of its linears, those with one input together."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, (rows, width) in shape.linears.items():
        place = re.match(r"(.*?\.\d+)\.(.*?)([^.]*)$", name)
        if place is None:  # in no block: it is quantised plainly
            continue
        block, parent, last = place.groups()
        group = parent + _SHARED_INPUT.get(last, last)
        before, _ = found.setdefault(block, {}).get(group, (0, width))
        found[block][group] = (before + rows, width)
    return (list(groups.values()) for groups in found.values())
