"""The lines of a memory estimate: what each thing takes, in bytes, and the formula in words.

Exact: base, adapter, gradients, optimizer state, KV cache. Estimates: activations, working memory, what CUDA and vLLM
keep for themselves. docs/memory.md says how each was checked.

Letters: B sequences of a micro-batch, T tokens of a sequence, V vocabulary, H hidden size, F width of the feed-forward
part, Q query heads x head size, K key heads x head size, R rank, L layers, I and O in- and out-features of a linear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

from qlora_rl.adapter.shape import adapted_inputs
from qlora_rl.base.experts import of_expert
from qlora_rl.base.quant import QuantSpec
from qlora_rl.contracts import rank_class
from qlora_rl.memory.shape import ModelShape, Tower

# CUDA context (0.5 GiB), cuBLAS and attention workspaces, vLLM's CUDA graphs. An assumption, not a measurement.
OVERHEAD_GIB = 1.5
# Of that, without vLLM: context and workspaces.
CONTEXT_GIB = 0.75
# TRL 1.16 multiplies with the output head in tiles (trl/kernels/chunked_logprob.py).
HEAD_TOKENS, HEAD_VOCABULARY = 4096, 32768
# Tiles of that size that its divergence works on in float32 without Triton, besides the two with logits; read off a
# tensor tracker.
DIVERGENCE_TILES = 9
# Without Triton we make them smaller (train/scoring/logprobs.py): tokens of a tile.
SMALL_TILE = 128
# Layer inputs that are on the device at a time, where they wait in host memory (train/setup/layer_inputs.py).
ON_DEVICE = 2
# Tokens that MLPs and norms work on at a time under gradient checkpointing (train/setup/tiled_mlp.py).
TILE = {"cpu": 1024, "cuda": 4096}
# Matrices of softcapped scores that their backward pass holds at once (base/attention/softcap.py), read off a tensor
# tracker.
SCORE_COPIES = 6
# The linears of the MLPs that do, those of Llama, Qwen, Mistral, Gemma and others.
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
# vLLM's default of tokens in one engine step.
BATCHED_TOKENS = 8192
KV_BLOCK = {"cuda": 16, "cpu": 128}
# Numbers per trained parameter that an optimizer keeps: (states of full width, states of 8 bits).
OPTIMIZERS: Mapping[str, tuple[int, int]] = {
    "sgd": (0, 0),
    "adagrad": (1, 0),
    "rmsprop": (1, 0),
    "rmsprop_bnb": (1, 0),
    "rmsprop_bnb_32bit": (1, 0),
    "rmsprop_bnb_8bit": (0, 1),
    "lion_32bit": (1, 0),
    "lion_8bit": (0, 1),
    "adamw_torch": (2, 0),
    "adamw_torch_fused": (2, 0),
    "adamw_bnb_8bit": (0, 2),
    "adamw_8bit": (0, 2),
    "ademamix": (3, 0),
    "ademamix_8bit": (0, 3),
    "paged_lion_32bit": (1, 0),
    "paged_lion_8bit": (0, 1),
    "paged_adamw_32bit": (2, 0),
    "paged_adamw_8bit": (0, 2),
    "paged_ademamix_32bit": (3, 0),
    "paged_ademamix_8bit": (0, 3),
}
# torch's own count their steps in a float32 of every tensor.
_COUNTED = ("adagrad", "rmsprop", "adamw_torch", "adamw_torch_fused")
# bitsandbytes keeps 8 bits for tensors of this many elements and more, with a float32 scale for every 256 of them.
_SMALLEST_8BIT, _BLOCK_8BIT, _TABLE_8BIT = 4096, 256, 1024
# bitsandbytes' QuantState: 16 values; a table of 256 and an offset where the scales are quantised themselves.
_CODE, _NESTED_CODE, _NESTED_BLOCK = 16 * 4, 256 * 4 + 4, 256
# Of the engine in this process: one serves while the other is written.
_SLOTS = 2
# Held for each of several adapters.
_OF_EACH = (
    "adapter",
    "adapter, engine",
    "gradients",
    "adapter, vLLM's copies",
    "adapter, last push",
    "optimizer",
)
OF_THE_ENGINE = (
    "base, engine",
    "base, decoded copies",
    "adapter, engine",
    "adapter, vLLM's copies",
    "adapter, last push",
    "rollout",
    "CUDA and vLLM",
)
WHEN = ("always", "tower", "teacher", "step", "layer", "head", "rollout", "host")
# Image tokens of a sequence where nothing says how many: an image of about 900 x 900 pixels.
ASSUMED_IMAGE_TOKENS = 1024


def counted(parameters: float) -> str:
    """A number of parameters: `8.19e9`, `1.05e6`, `90,624`."""
    if parameters >= 5e7:
        return f"{parameters / 1e9:.3g}e9"
    return f"{parameters / 1e6:.3g}e6" if parameters >= 1e6 else f"{parameters:,.0f}"


@dataclass(frozen=True)
class Line:
    """One thing that takes memory.

    Attributes:
        name: what it is.
        nbytes: how much, in bytes.
        why: the formula in words, with its numbers.
        when: "always"; "tower" (before the layers of a step); "teacher" (before the student's pass); "step" (from
            forward to optimizer step); "layer" or "head" (one after the other within a step, so that only the larger
            counts); "rollout" (while completions are sampled); "host" (in host memory, within a step).
        is_exact: counted from shapes; otherwise an estimate.
    """

    name: str
    nbytes: int
    why: str
    when: str = "always"
    is_exact: bool = True

    @property
    def gib(self) -> float:
        """`nbytes` in GiB."""
        return self.nbytes / 2**30


def is_quantised(name: str, spec: QuantSpec) -> bool:
    """The linear `name`, which is no expert (`expert_bytes`), is held in 4 bits."""
    return spec.is_4bit and not spec.skips(name)


def width(spec: QuantSpec) -> int:
    """Bytes of one number in the compute dtype."""
    return spec.dtype.itemsize


def weight_bytes(shape: tuple[int, ...], spec: QuantSpec, *, nested: bool) -> int:
    """One 4-bit weight: codes, scales and their tables."""
    elements = prod(shape)
    blocks = ceil(elements / spec.blocksize)
    scales = blocks + 4 * ceil(blocks / _NESTED_BLOCK) + _NESTED_CODE if nested else 4 * blocks
    return ceil(elements / 2) + scales + _CODE


def trainer_base(shape: ModelShape, spec: QuantSpec) -> int:
    """Bytes of all tensors of a base as `load_base` holds it."""
    wide = width(spec)
    total = (shape.plain + shape.scales) * wide + shape.buffers + tower_bytes(shape, spec, nested=spec.double_quant)
    for name, weight in shape.linears.items():
        packed = is_quantised(name, spec)
        total += weight_bytes(weight, spec, nested=spec.double_quant) if packed else prod(weight) * wide
    return total + expert_bytes(shape, spec, nested=spec.double_quant)


def tower_bytes(shape: ModelShape, spec: QuantSpec, *, nested: bool) -> int:
    """The vision tower and projector, on one side; 0 for a text model."""
    if shape.tower is None:
        return 0
    packed = _packed_tower(shape.tower, spec)
    plain = width(spec) * (shape.tower.parameters - sum(map(prod, packed)))
    return plain + sum(weight_bytes(weight, spec, nested=nested) for weight in packed)


def _packed_tower(tower: Tower, spec: QuantSpec) -> list[tuple[int, int]]:
    """Its linears that are 4-bit."""
    return [weight for weight in tower.linears if spec.quantize_tower and weight[1] % spec.blocksize == 0]


def expert_bytes(shape: ModelShape, spec: QuantSpec, *, nested: bool) -> int:
    """The experts of all layers, on one side."""
    if not spec.quantize_experts:
        return width(spec) * sum(map(prod, shape.experts.values()))
    sizes = Counter(shape.expert_matrices())
    return sum(number * weight_bytes(matrix, spec, nested=nested) for matrix, number in sizes.items())


def engine_base(shape: ModelShape, spec: QuantSpec) -> int:
    """Bytes of a base as vLLM holds it: scales un-nested, vocabulary padded to 64, a table of rotary angles.

    Every attention layer has four float32 numbers that a quantised KV cache would be scaled with.
    """
    wide = width(spec)
    padding = (-shape.vocabulary % 64) * shape.hidden * shape.embeddings
    total = (shape.plain + padding) * wide + shape.positions * shape.rotary * wide + 16 * len(shape.caches)
    for name, weight in shape.linears.items():
        total += weight_bytes(weight, spec, nested=False) if is_quantised(name, spec) else prod(weight) * wide
    return total + expert_bytes(shape, spec, nested=False) + tower_bytes(shape, spec, nested=False)


def base_lines(
    shape: ModelShape, spec: QuantSpec, shared: bool, baked: bool = False, device: str = "cuda"
) -> list[Line]:
    """The base: one for trainer and engine together, or one each; the engine's may be the baked one."""
    engine = engine_base(shape, spec)
    packed = sum(prod(s) for n, s in shape.linears.items() if is_quantised(n, spec))
    packed += sum(map(prod, shape.experts.values())) if spec.quantize_experts else 0
    packed += sum(map(prod, _packed_tower(shape.tower, spec))) if shape.tower is not None else 0
    held = f"{counted(packed)} of {counted(shape.parameters)} parameters in 4 bits, the rest in {spec.compute_dtype}"
    if not spec.is_4bit:
        held = f"{counted(shape.parameters)} parameters in {spec.compute_dtype}"
    if shared:
        once = Line("base, shared", engine + shape.buffers, f"one copy, the engine's: {held}; scales in float32")
        if shape.tower is not None and device == "cpu":
            plain = sum(map(prod, shape.tower.linears)) - sum(map(prod, _packed_tower(shape.tower, spec)))
            why = f"{counted(plain)} parameters in {spec.compute_dtype}: vLLM packs its own on the CPU"
            return [once, Line("base, trainer's vision tower", width(spec) * plain, why)]
        if not shape.experts:
            return [once]
        # Experts in 4 bits are shared, their routers are not.
        own = shape.mixtures - (sum(map(prod, shape.experts.values())) if spec.quantize_experts else 0)
        what = "routers" if spec.quantize_experts else "experts and routers"
        why = f"{counted(own)} parameters of {what} in {spec.compute_dtype}: those of the engine are not shared"
        return [once, Line(f"base, trainer's {what.partition(' ')[0]}", width(spec) * own, why)]
    scales = "scales quantised" if spec.double_quant else "scales in float32"
    trainer = Line("base, trainer", trainer_base(shape, spec), f"{held}; {scales}" if spec.is_4bit else held)
    if baked and spec.is_4bit:
        dense = engine_base(shape, QuantSpec("none", compute_dtype=spec.compute_dtype))
        return [
            trainer,
            Line("base, engine", dense, f"baked: {counted(shape.parameters)} parameters in {spec.compute_dtype}"),
        ]
    return [
        trainer,
        Line("base, engine", engine, f"{held}; scales in float32" if spec.is_4bit else held),
    ]


def parted_base(lines: list[Line], shape: ModelShape, spec: QuantSpec, trainer: int, engine: int) -> list[Line]:
    """The lines of the base on one of several GPUs.

    Args:
        lines: of `base_lines`, of a trainer and an engine that hold one each.
        spec: dtype of the embedding and the output head.
        trainer: processes that its base is sharded over; it is gathered layer by layer, and its head for the logits.
        engine: ranks of the engine.
    """
    found = []
    for line in lines:
        parts = {"base, trainer": trainer, "base, engine": engine}.get(line.name, 1)
        whole = f"1/{parts} of {line.nbytes / 2**30:.3f} GiB; {line.why}"
        found.append(line if parts == 1 else Line(line.name, ceil(line.nbytes / parts), whole, is_exact=False))
        if line.name == "base, trainer" and parts > 1:
            layer = ceil(line.nbytes / max(1, shape.layers))
            found.append(Line("base, a gathered layer", layer, f"one of {shape.layers} layers, whole", "layer", False))
            why = f"{shape.vocabulary} x {shape.hidden} in {spec.compute_dtype}, whole"
            head = shape.vocabulary * shape.hidden * width(spec)
            found.append(Line("base, gathered head", head, why, "head", False))
    return found


def adapter_bytes(adapter: Mapping[str, tuple[int, ...]], dtype_width: int) -> int:
    """Bytes of the trained tensors."""
    return sum(prod(shape) for shape in adapter.values()) * dtype_width


def adapter_lines(
    shape: ModelShape,
    spec: QuantSpec,
    adapter: Mapping[str, tuple[int, ...]],
    dtype_width: int,
    device: str,
    *,
    tiled: bool = False,
) -> list[Line]:
    """The adapter of the trainer, its copy under autocast, its gradients, and the engine's slots.

    Args:
        tiled: MLPs work in tiles, each with copies that are gone after it.
    """
    count = adapter_bytes(adapter, 1)
    ranks = [rank for _, rank in adapted_inputs(adapter).values()]
    rank = rank_class(max(ranks, default=1))
    matrices = list(shape.linears.values())
    if experts := any(map(of_expert, adapter)):
        matrices += shape.expert_matrices()
    slot = rank * sum(o + i for o, i in matrices) * width(spec)
    where = "every linear and matrix of experts" if experts else "every linear"
    lines = [
        Line("adapter", count * dtype_width, f"{count:,} numbers x {dtype_width} bytes"),
        Line("adapter, engine", _SLOTS * slot, f"{_SLOTS} slots of rank {rank} at {where}, {spec.compute_dtype}"),
        Line("gradients", count * dtype_width, "one per trained number", "step"),
    ]
    if device == "cpu":
        lines.append(Line("adapter, vLLM's copies", 2 * count * width(spec), "two versions, kept in host memory"))
        why = "what was pushed last, kept in host memory to check an engine that was rebuilt"
        lines.append(Line("adapter, last push", count * width(spec), why, is_exact=False))
    if dtype_width > width(spec):
        kept = {
            name: each
            for name, each in adapter.items()
            if not (tiled and any(f".{end}." in name for end in MLP_LINEARS))
        }
        why = f"copy in {spec.compute_dtype} during a step{', except for the MLPs' if tiled else ''}"
        lines.append(Line("adapter, autocast", adapter_bytes(kept, width(spec)), why, "step", False))
    return lines


def for_several(line: Line, adapters: int) -> Line:
    """What is held for each adapter, for so many of them; other lines as they are.

    The engine has slots for two saved adapters besides (`Adapters(max_saved=2)`).
    """
    if adapters == 1 or line.name not in _OF_EACH:
        return line
    times = adapters + 1 if line.name == "adapter, engine" else adapters
    why = f"{adapters} adapters{' and two saved ones' if times > adapters else ''}; of one: {line.why}"
    return replace(line, nbytes=times * line.nbytes, why=why)


def optimizer_bytes(adapter: Mapping[str, tuple[int, ...]], dtype_width: int, optimizer: str) -> int:
    """Bytes of the optimizer's state after its first step."""
    full, small = OPTIMIZERS.get(optimizer, (2, 0))
    sizes = [prod(shape) for shape in adapter.values()]
    # bitsandbytes keeps float32 states whatever the parameter is.
    state = dtype_width if optimizer in (*_COUNTED, "sgd") else 4
    total = full * state * sum(sizes)
    if optimizer in _COUNTED:
        total += 4 * len(sizes)
    if small:
        total += sum(_state_8bit(size) for size in sizes) * small
        total += _TABLE_8BIT * min(small, 2) * any(size >= _SMALLEST_8BIT for size in sizes)
    return total


def _state_8bit(size: int) -> int:
    return size + 4 * ceil(size / _BLOCK_8BIT) if size >= _SMALLEST_8BIT else 4 * size


def optimizer_line(adapter: Mapping[str, tuple[int, ...]], dtype_width: int, optimizer: str) -> Line:
    """The optimizer's state."""
    known = optimizer in OPTIMIZERS
    full, small = OPTIMIZERS.get(optimizer, (2, 0))
    kept = " and ".join(
        f"{count} x {bits} bits" for count, bits in ((full, 8 * dtype_width), (small, 8)) if count
    )  # fmt: skip
    why = f"{optimizer}: {kept or 'nothing'} per trained number"
    if not known:
        why = f"{optimizer} is not known here and counted like adamw_torch"
    elif optimizer.startswith("paged_"):
        why += "; paged, large ones may move to host memory"
    return Line("optimizer", optimizer_bytes(adapter, dtype_width, optimizer), why, is_exact=known)


def tower_activations(tower: Tower, spec: QuantSpec) -> int:
    """Bytes per patch that a pass without gradients holds at its peak.

    That is where q and k are rotated: q, k and v, the residual and its norm in the compute dtype, to which the pixels
    were cast; q and k in float32 three times each; sines and cosines. Where nothing is rotated it is in the MLP: its
    inner width twice.
    """
    wide = width(spec)
    if not tower.head:
        return wide * (4 * tower.hidden + 2 * tower.inner)
    residual = (4 + 2 * wide if tower.is_float else 2 * wide) * tower.hidden
    return (3 * wide + 24) * tower.hidden + residual + 8 * tower.head + (wide * tower.patch if wide < 4 else 0)


def tower_lines(shape: ModelShape, spec: QuantSpec, *, batch: int, sequences: int, image_tokens: int) -> list[Line]:
    """Pixels of a rollout, which TRL keeps as float32 for each completion, and the pass of a micro-batch through the
    vision tower."""
    tower = shape.tower
    if tower is None:
        return []
    each = image_tokens * tower.patches
    size = f"{image_tokens} image tokens x {tower.patches} patches"
    why = f"{sequences} completions x {size} x {tower.patch} numbers x 4 bytes"
    work = tower_activations(tower, spec)
    return [
        Line("pixels", sequences * each * tower.patch * 4, why, "always", False),
        Line("vision tower, one pass", batch * each * work, f"{batch} x {size} x {work:,} bytes", "tower", False),
    ]


def rollout_line(shape: ModelShape, spec: QuantSpec, *, sequences: int, length: int, image_tokens: int = 0) -> Line:
    """What vLLM's own forward pass and sampler need."""
    wide = width(spec)
    tokens = min(BATCHED_TOKENS, max(length, sequences * length))
    forward = tokens * wide * (4 * shape.hidden + 3 * shape.inner + 2 * shape.attention)
    logits = sequences * shape.vocabulary * 4 * 3
    weight = shape.largest_linear(spec.quantize_experts) * wide if spec.is_4bit else 0
    why = f"{tokens} tokens in one engine step, logits of {sequences} sequences"
    seen = 0
    if shape.tower is not None:
        encoded = min(sequences * image_tokens, max(BATCHED_TOKENS, image_tokens))
        seen = encoded * (shape.tower.patches * tower_activations(shape.tower, spec) + wide * shape.hidden)
        why += f", {encoded} image tokens in its vision tower"
    return Line("rollout", forward + logits + weight + seen, why, "rollout", False)


def cache_bytes(shape: ModelShape, *, length: int, sequences: int, element: int, block: int) -> int:
    """KV cache of whole blocks for `sequences` sequences of `length` tokens, and one block that vLLM keeps empty."""
    rounded = ceil(length / block) * block
    return element * (sequences * shape.cache_elements(rounded) + shape.cache_elements(block))
