"""The lines of a training step: what a forward pass keeps, and what one layer and the output head need on top.

Estimates, in the letters of `memory/lines.py`; docs/memory.md says how each was checked.
"""

from __future__ import annotations

from collections.abc import Mapping

from qlora_rl.adapter.shape import adapted_inputs
from qlora_rl.base.attention.softcap import SCORES
from qlora_rl.base.experts import of_expert
from qlora_rl.base.quant import QuantSpec
from qlora_rl.memory.lines import (
    DIVERGENCE_TILES,
    HEAD_TOKENS,
    HEAD_VOCABULARY,
    MLP_LINEARS,
    ON_DEVICE,
    SCORE_COPIES,
    SMALL_TILE,
    TILE,
    Line,
    width,
)
from qlora_rl.memory.shape import ModelShape

# Linears that take what the norm before the MLP gives.
_WIDEN = {*MLP_LINEARS[:2], "gate_up_proj"}


def layer_activations(
    shape: ModelShape, spec: QuantSpec, adapter: Mapping[str, tuple[int, ...]], device: str, *, padded: bool
) -> float:
    """Bytes per token that one layer keeps for its backward pass, the mean over the layers.

    Norms lift to float32 (4 bytes an element). Attention keeps q, k, v and its output; k and v are repeated for every
    query head where a padding mask is given, and without one an adapted output projection keeps a copy on the CPU. The
    feed-forward part keeps gate, silu(gate), up and their product; `mixture_activations` is that of a mixture. Adapted
    linears keep their input, which is what a norm gives or counted already, and A's output.
    """
    wide = width(spec)
    inputs = {name: each for name, each in adapted_inputs(adapter).items() if not of_expert(name)}
    ends = {name.rpartition(".")[2] for name in inputs}
    twice = device == "cpu" and not padded and "o_proj" in ends
    attention = (3 if twice else 2) * shape.attention + 2 * _keys(shape, padded)
    mixture = mixture_activations(shape, spec, adapter)
    kept = 4 * shape.norms + wide * (attention + (0 if mixture else 4 * shape.inner)) + mixture
    own = shape.hidden * (bool(ends - {"o_proj", "down_proj", *_WIDEN}) + bool(ends & _WIDEN))
    return kept + wide * (own + sum(rank for _, rank in inputs.values()) / shape.layers)


def mixture_activations(shape: ModelShape, spec: QuantSpec, adapter: Mapping[str, tuple[int, ...]]) -> float:
    """The part of `layer_activations` that a mixture's experts and its router keep, the mean over the layers; 0 in a
    dense model.

    Gate, silu(gate), up and the output of each chosen expert. An adapted expert keeps a copy of its input, and of what
    its last matrix is given.
    """
    if not (shape.chosen and shape.pool):
        return 0.0
    wide, matrices = width(spec), shape.layers * shape.pool
    inputs = {name: each for name, each in adapted_inputs(adapter).items() if of_expert(name)}
    last = [name for name in inputs if name.endswith((".down_proj", ".w2"))]
    first = {name.rpartition(".")[0] for name in inputs if name not in last}  # gate and up share their input
    kept = (3 + len(last) / matrices) * shape.inner + (1 + len(first) / matrices) * shape.chosen * shape.hidden
    kept += shape.chosen * sum(rank for _, rank in inputs.values()) / matrices
    return wide * kept + 4 * shape.pool + 40 * shape.chosen


def _keys(shape: ModelShape, padded: bool) -> int:
    """Numbers per token of k, or of v, in attention."""
    return shape.attention if padded else max((c.elements // 2 for c in shape.caches), default=shape.attention)


def has_tiles(shape: ModelShape) -> bool:
    """Its MLPs are such that can work in tiles (`train/setup/tiled_mlp.py`)."""
    return not shape.experts and all(any(name.endswith(end) for name in shape.linears) for end in MLP_LINEARS)


def mlp_activations(shape: ModelShape, spec: QuantSpec, adapter: Mapping[str, tuple[int, ...]]) -> float:
    """The part of `layer_activations` that an MLP which works in tiles does not keep: all but its input. 0 where none
    does."""
    if not has_tiles(shape):
        return 0.0
    ranks = sum(rank for name, (_, rank) in adapted_inputs(adapter).items() if name.endswith(MLP_LINEARS))
    return width(spec) * (4 * shape.inner + ranks / shape.layers)


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
    tiled: bool = False,
) -> list[Line]:
    """What a forward pass keeps, and what one layer needs on top; `tiled`: norms and MLPs work in tiles, under gradient
    checkpointing."""
    wide, tokens, hidden = width(spec), batch * length, shape.hidden
    layer = layer_activations(shape, spec, adapter, device, padded=padded)
    kept: float
    words = ""
    # The last norm in float32, its output and that of the embedding; in tiles its input and output.
    last = 4 * hidden if tiled else 8 * hidden
    if checkpointing:
        inputs = min(shape.layers, ON_DEVICE) if offload else shape.layers
        kept, why = inputs * wide * hidden + last, f"{inputs} layer inputs, and the last norm"
    else:
        kept, why = shape.layers * layer + last, f"all of {shape.layers} layers, {layer:,.0f} bytes a token each"
    angles = 2 * length * shape.rotary * wide + 32 * tokens  # sines and cosines; ids, labels, positions, a mask
    # Gradients while a layer is computed again; these and the numbers below were read off a tensor tracker.
    gradients: float = max(4 * hidden, 4 * shape.inner - 6 * hidden)
    mixture = mixture_activations(shape, spec, adapter)
    if mixture and spec.quantize_experts:
        # One expert after another; the largest is assumed to have four times an even share of the tokens.
        gradients = wide * (min(1.0, 4 * shape.chosen / shape.pool) * shape.inner // shape.chosen + hidden)
    elif mixture:  # transformers multiplies fused ones all at once: of inputs, of outputs, and these weighted
        gradients = 3 * (4 if shape.float_weights else wide) * shape.chosen * hidden
    working: float = layer + gradients if checkpointing else gradients
    if tiled:
        # Norms keep their input, which for the first one is counted above, and an MLP its own.
        mlp = mlp_activations(shape, spec, adapter)
        rest = layer - mlp - 4 * shape.norms
        if mlp and not any(name.endswith(tuple(_WIDEN)) for name in adapted_inputs(adapter)):
            rest += wide * hidden
        tile = max(mlp + 4 * shape.inner + 2 * hidden, 26 * hidden) if mlp else 26 * hidden
        tiles = tile * TILE[device] / tokens
        working = rest + wide * (shape.norms - hidden) + 2 * hidden
        # While a norm works in tiles, nothing of a mixture is there.
        working += max(gradients, tiles - mixture) if mixture else tiles + (0 if mlp else gradients)
        # Or the backward pass of attention, where heads are wider than hidden states.
        working = max(working, rest + wide * (2 * shape.attention - hidden))
        words = f", {TILE[device]} of them at a time in norms{' and MLP' if mlp else ''}"
    if not tiled:
        working = max(working, 30 * hidden - last)  # the last norm's
    lines = [
        Line("activations", int(tokens * kept) + angles, f"{batch} x {length} tokens x {why}", "step", False),
        Line(
            "one layer's work", int(tokens * working), f"{tokens} tokens x {working:,.0f} bytes{words}", "layer", False
        ),
    ]
    if shape.softcapped:
        scores = min(SCORES[device], shape.softcapped * length * length)
        why = f"{scores} x 4 bytes x {SCORE_COPIES}"
        lines.append(Line("softcapped scores", scores * 4 * SCORE_COPIES, why, "layer", False))
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
    """Layer inputs in pinned host memory, at most: torch's allocator makes blocks whose sizes are powers of two, and
    keeps those of each size that a micro-batch had; all smaller ones together are as large as the largest.
    """
    each = width(spec) * shape.hidden * tokens
    why = f"{shape.layers} of {each:,} bytes, in pinned blocks of powers of two, of each size for shorter micro-batches"
    return Line("layer inputs", 2 * shape.layers * (1 << max(0, each - 1).bit_length()), why, "host", False)


def head_line(shape: ModelShape, spec: QuantSpec, *, batch: int, length: int, device: str, tiled: bool = False) -> Line:
    """The peak of the output head, which works in tiles.

    Args:
        tiled: norms work in tiles, and the last one keeps its input.
    """
    wide, tokens = width(spec), batch * length
    # Hidden states without prompt and padding, their gradient in float32 and in the compute dtype.
    states = tokens * shape.hidden * (4 + 2 * wide)
    columns = min(shape.vocabulary, HEAD_VOCABULARY)
    if device == "cpu":
        # Worked on in float32 as whole tensors; then the tile and the part of the head that it meets are lifted.
        rows = min(tokens, SMALL_TILE)
        tile = rows * columns * wide + columns * max(rows * (4 * 7 + 1), 4 * (rows + shape.hidden))
        # The states take the place of the last layer's output where the last norm does not keep it, and their gradient
        # is put together when the tiles are done.
        gradient = tokens * shape.hidden * wide
        why = (
            f"the larger of a tile of {rows} x {columns}, seven times in float32, and the gradient of {tokens} "
            "hidden states"
        )
        if tiled:
            why += "; these"
        return Line("logits", max(tile, gradient) + tiled * gradient, why, "head", False)
    rows = min(tokens, HEAD_TOKENS)
    tile = rows * HEAD_VOCABULARY * wide
    why = f"one tile of {rows} x {HEAD_VOCABULARY} x {wide} bytes"
    return Line("logits", states + tile, f"{why}; {tokens} hidden states", "head", False)


def teacher_lines(
    shape: ModelShape,
    spec: QuantSpec,
    *,
    batch: int,
    length: int,
    device: str,
    weights: int,
    teacher: ModelShape | None,
    more: int,
    gradients: int,
) -> list[Line]:
    """What distillation needs in place of `head_line`: a second model or an adapter of the teacher's own, its pass,
    which is over before the student's begins, what it says, and the tiles of both sides' logits, in float32
    (trl/kernels/chunked_divergence.py).

    Args:
        weights: bytes of the second model, or of the adapter; 0 for none.
        teacher: shape of the second model; `None` where it is the student's base.
        more: tokens of a sequence that the teacher reads besides the student's.
        gradients: bytes that micro-batches before this one have left.
    """
    wide, tokens, of_teacher = width(spec), batch * length, teacher or shape
    rows = min(tokens, (SMALL_TILE if device == "cpu" else HEAD_TOKENS) // 4)
    tile = rows * HEAD_VOCABULARY * 8
    states = tokens * shape.hidden * (4 + 2 * wide)
    if device == "cpu":
        columns = min(shape.vocabulary, HEAD_VOCABULARY)
        tile += columns * 4 * max(rows * DIVERGENCE_TILES, rows + shape.hidden)  # or the part of the head, lifted
        states = tokens * shape.hidden * 2 * wide
    else:
        tile += rows * HEAD_VOCABULARY * wide
    why = f"{tokens} tokens x {of_teacher.hidden} x {wide} bytes"
    read = f"{batch} x {length + more} tokens, without gradients; what micro-batches before have left"
    working = gradients + _pass(of_teacher, spec, batch, length + more, device)
    held = Line("base, teacher", weights, "a second model, held whole")
    if teacher is None:
        held = Line("adapter, teacher", weights, "of its own, in float32")
    return [
        *([held] if weights else []),
        Line("teacher's pass", working, read, "teacher", False),
        Line("teacher's hidden states", tokens * of_teacher.hidden * wide, why, "step", False),
        Line("logits", states + tile, f"tiles of {rows} x {HEAD_VOCABULARY} of both sides, in float32", "head", False),
    ]


def _pass(shape: ModelShape, spec: QuantSpec, batch: int, length: int, device: str) -> int:
    """The peak of a forward pass that keeps nothing: in the attention or in the MLP of a layer. Read off a tensor
    tracker."""
    wide, tokens, masks = width(spec), batch * length, batch * length * length
    rows = min(tokens, TILE[device]) if has_tiles(shape) else tokens
    # Three hidden states; q, k and v, these for every query head, and what comes out.
    attention = tokens * wide * (3 * shape.hidden + 4 * shape.attention + 2 * _keys(shape, False)) + masks * wide
    mlp = tokens * wide * 4 * shape.hidden + rows * wide * (3 * shape.inner + 2 * shape.hidden * (rows < tokens))
    temporary = shape.largest_linear(spec.quantize_experts) * wide if spec.is_4bit and device == "cuda" else 0
    return max(attention, mlp) + masks + 2 * length * shape.rotary * wide + 32 * tokens + temporary


def candidate_lines(
    shape: ModelShape, spec: QuantSpec, *, batch: int, length: int, device: str, top_k: int
) -> list[Line]:
    """What distillation from a server needs in place of `head_line`: what it says, and the student's logits in float32:
    of the whole vocabulary with a part of the head lifted, or of candidates, whose rows of the head are copied
    (`train/scoring/divergence.py`)."""
    tokens, named = batch * length, top_k + 1
    rows = min(tokens, (SMALL_TILE if device == "cpu" else HEAD_TOKENS) // 4)
    columns = min(shape.vocabulary, HEAD_VOCABULARY)
    lifted, tile = columns * shape.hidden * 4, rows * columns * 4
    before = lifted + tile if shape.vocabulary > HEAD_VOCABULARY else 0  # the part before it goes when this one is made
    whole = lifted + max(before, tile * (DIVERGENCE_TILES if device == "cpu" else 1))
    copied = min(rows * HEAD_VOCABULARY, tokens * named * shape.hidden) * (4 + width(spec))
    why = f"the larger of {rows} x {columns} with {columns} rows of the head, and of {named} candidates, in float32"
    states = tokens * shape.hidden * 8
    return [
        Line("teacher's candidates", tokens * named * 12, f"{tokens} tokens x {named} x 12 bytes", "step", False),
        Line("logits", states + max(whole, copied), f"{why}; {tokens} hidden states", "head", False),
    ]
