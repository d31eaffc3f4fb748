"""The lines of a training step: what a forward pass keeps, and what one layer and the output head need on top.

Estimates, in the letters of `ledger/lines.py`; docs/memory.md says how each was checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from qlora_rl.adapter.shape import adapted_inputs
from qlora_rl.base.experts import of_expert
from qlora_rl.base.quant import QuantSpec
from qlora_rl.ledger.lines import (
    HEAD_TOKENS,
    HEAD_VOCABULARY,
    MLP_LINEARS,
    MLP_TILE,
    ON_DEVICE,
    SMALL_TILE,
    Line,
    width,
)
from qlora_rl.ledger.shape import ModelShape


def layer_activations(
    shape: ModelShape, spec: QuantSpec, adapter: Mapping[str, tuple[int, ...]], device: str, *, padded: bool
) -> float:
    """Bytes per token that one layer keeps for its backward pass, the mean over the layers.

    Norms lift to float32 (4 bytes an element). Attention keeps q, k, v, its output; k and v are repeated for every query
    head where a padding mask is given. The feed-forward part keeps gate, silu(gate), up and their product; that of a mixture keeps the output
    of each chosen expert in place of the product, and the router's probabilities and choices. An adapted linear keeps its input and A's output; on the CPU PEFT makes a copy of the input for each of them, because it asks for
    CUDA's autocast when it decides whether to convert.
    """
    wide = width(spec)
    keys = max((c.elements // 2 for c in shape.caches), default=shape.attention)
    attention = 2 * shape.attention + 2 * (shape.attention if padded else keys)
    feed_forward = 4 * shape.inner
    if shape.chosen:
        feed_forward = 3 * shape.inner + shape.chosen * shape.hidden + ceil((4 * shape.pool + 40 * shape.chosen) / wide)
    kept = 4 * shape.norms + wide * (attention + feed_forward)
    inputs = adapted_inputs(adapter)
    # Of adapted experts a token passes through the chosen ones alone, each of which keeps its own copy of it.
    shares = {name: shape.chosen / shape.pool if of_expert(name) else 1.0 for name in inputs}
    if device == "cpu":
        # The input of the down projection is the product above.
        own = (
            sum(shares[name] * i for name, (i, _) in inputs.items() if shape.chosen or i != shape.inner) / shape.layers
        )
    else:
        own = 2 * shape.hidden if inputs else 0
        own += shape.chosen * shape.hidden if min(shares.values(), default=1.0) < 1 else 0
    return kept + wide * (own + sum(shares[name] * rank for name, (_, rank) in inputs.items()) / shape.layers)


def has_tiles(shape: ModelShape) -> bool:
    """Its MLPs are such that can work in tiles (`train/setup/mlp_tiles.py`)."""
    return not shape.experts and all(any(name.endswith(end) for name in shape.linears) for end in MLP_LINEARS)


def mlp_activations(
    shape: ModelShape, spec: QuantSpec, adapter: Mapping[str, tuple[int, ...]], device: str
) -> float | None:
    """The part of `layer_activations` that the MLP keeps; `None` where there is none that works in tiles (`train/setup/mlp_tiles.py`)."""
    if not has_tiles(shape):
        return None
    inputs = [each for name, each in adapted_inputs(adapter).items() if name.endswith(MLP_LINEARS)]
    if device == "cpu":
        own = sum(i for i, _ in inputs if i != shape.inner) / shape.layers
    else:
        own = shape.hidden if inputs else 0
    return width(spec) * (4 * shape.inner + own + sum(rank for _, rank in inputs) / shape.layers)


def activation_lines(
    shape: ModelShape,
    spec: QuantSpec,
    adapter: Mapping[str, tuple[int, ...]],
    *,
    batch: int,
    length: int,
    checkpointing: bool,
    device: str,
    padded: bool = True,
    offload: bool = False,
    tiles: bool = True,
) -> list[Line]:
    """What a forward pass keeps, and what one layer and the output head need on top."""
    wide, tokens, hidden = width(spec), batch * length, shape.hidden
    layer = layer_activations(shape, spec, adapter, device, padded=padded)
    kept: float
    words = ""
    last = 8 * hidden  # the last norm in float32, its output and that of the embedding
    if checkpointing:
        inputs = min(shape.layers, ON_DEVICE) if offload else shape.layers
        kept, why = inputs * wide * hidden + last, f"{inputs} layer inputs, and the last norm"
    else:
        kept, why = shape.layers * layer + last, f"all of {shape.layers} layers, {layer:,.0f} bytes a token each"
    angles = 2 * length * shape.rotary * wide  # sines and cosines
    # What is lifted to float32 while a layer is computed again, or the gradients of it; read off a tensor tracker. On the CPU it is the
    # largest where PEFT lifts the input of the down projection.
    on_gpu = max(18 * hidden, 7 * hidden + 4 * shape.inner)
    working: float = max(14 * hidden, 2 * hidden + 6 * shape.inner) if device == "cpu" else on_gpu
    mlp = mlp_activations(shape, spec, adapter, device) if checkpointing and tiles else None
    tile = MLP_TILE[device]
    if mlp is not None and tokens > tile:
        # What the norm behind attention lifts in its backward pass, or a tile. The whole gradients of output and input find room in either.
        rest = max(14 * hidden if device == "cpu" else 18 * hidden, (mlp + working) * tile / tokens)
        working, words = layer - mlp + rest, f", {tile} of them at a time in the MLP"
    elif checkpointing:
        working += layer
    working += 2 * wide * shape.chosen * hidden  # of the chosen experts' inputs and outputs, the gradients
    working = max(working, 30 * hidden - last)
    lines = [
        Line("activations", int(tokens * kept) + angles, f"{batch} x {length} tokens x {why}", "step", False),
        Line(
            "one layer's work", int(tokens * working), f"{tokens} tokens x {working:,.0f} bytes{words}", "layer", False
        ),
    ]
    if offload and checkpointing:
        lines.append(host_line(shape, spec, tokens=tokens))
    if padded:
        masks = batch * length * length
        size = f"{batch} x {length}²"
        # Attention adds a mask of numbers, made of that of truth values; a layer that is recomputed makes its own.
        numbers = Line("attention mask of a layer", masks * wide, f"{size} x {wide} bytes", "layer", False)
        if checkpointing:
            lines += [Line("attention masks", masks, f"{size} x 1 byte", "step", False), numbers]
        else:
            why = f"{size} x (1 byte + {wide} bytes x {shape.layers})"
            lines.append(Line("attention masks", masks * (1 + wide * shape.layers), why, "step", False))
    if spec.is_4bit:
        temporary = shape.largest_linear(spec.quantize_experts) * wide
        lines.append(Line("one dequantised weight", temporary, f"the largest, in {spec.compute_dtype}", "layer", False))
    return lines


def host_line(shape: ModelShape, spec: QuantSpec, *, tokens: int) -> Line:
    """Layer inputs in pinned host memory, at most: torch's allocator makes blocks whose sizes are powers of two, and keeps those of each size
    that a micro-batch had; all smaller ones together are as large as the largest.
    """
    each = width(spec) * shape.hidden * tokens
    why = f"{shape.layers} of {each:,} bytes, in pinned blocks of powers of two, of each size for shorter micro-batches"
    return Line("layer inputs", 2 * shape.layers * (1 << max(0, each - 1).bit_length()), why, "host", False)


def head_line(shape: ModelShape, spec: QuantSpec, *, batch: int, length: int, chunked: bool, device: str) -> Line:
    """The peak of the output head: logits in tiles, or all of them."""
    wide, tokens = width(spec), batch * length
    # Hidden states without prompt and padding, their gradient in float32 and in the compute dtype.
    states = tokens * shape.hidden * (4 + 2 * wide)
    if not chunked:
        # Logits, their float32 copy, log-softmax, and the gradient of one of them.
        logits = tokens * shape.vocabulary * (wide + 12)
        return Line("logits", states + logits, f"{tokens} tokens x {shape.vocabulary} x {wide + 12}", "head", False)
    columns = min(shape.vocabulary, HEAD_VOCABULARY)
    if device == "cpu":
        # Worked on in float32 as whole tensors; then the tile and the part of the head that it meets are lifted.
        rows = min(tokens, SMALL_TILE)
        tile = rows * columns * wide + columns * max(rows * (4 * 7 + 1), 4 * (rows + shape.hidden))
        # The states take the place of the last layer's output, and their gradient is put together when the tiles are done.
        gradient = tokens * shape.hidden * wide
        why = f"the larger of a tile of {rows} x {columns}, seven times in float32, and the gradient of {tokens} hidden states"
        return Line("logits", max(tile, gradient), why, "head", False)
    rows = min(tokens, HEAD_TOKENS)
    tile = rows * HEAD_VOCABULARY * wide
    why = f"one tile of {rows} x {HEAD_VOCABULARY} x {wide} bytes"
    return Line("logits", states + tile, f"{why}; {tokens} hidden states", "head", False)
