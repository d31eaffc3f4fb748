"""What a base is quantised to, and the quantisation of one linear into the tensors of the standard checkpoint."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from qlora_rl.base.experts import LinearExperts
from qlora_rl.contracts import QUANT_TYPES
from qlora_rl.errors import MissingDependencyError, UnsupportedQuantError

# The block sizes of bitsandbytes' 4-bit kernels that its CPU and CUDA builds share.
BLOCK_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
# Weights that are dequantised at once: few, since they are held in several forms; a multiple of every block size.
_SLICE = 2**18
# Scales that share a scale where they are quantised themselves.
_NESTED_BLOCK = 256
FLOAT16_END = torch.finfo(torch.float16).max
# Other texts may reach so many times as far as the one that was looked at.
MARGIN = 2.0
# Fields that say what else is 4-bit.
_MORE = ("quantize_experts", "quantize_tower")


@dataclass(frozen=True)
class Measured:
    """How far a base is from its source, on text, both computed in float32; and from itself by rounding.

    Attributes:
        kl: of the source's next token to the base's, in nats, the mean over tokens.
        perplexity_source: of the text by the source.
        perplexity_base: of the text by the base.
        tokens: that were looked at.
        kl_bfloat16: of the base's next token to that of the base with its blocks in bfloat16, on some of the text;
            `None` where that is no number, or was not computed.
        kl_float16: the same in float16.
        largest: absolute value that a module of these blocks takes or gives in float16; `None` where it is beyond it.
    """

    kl: float
    perplexity_source: float
    perplexity_base: float
    tokens: int
    kl_bfloat16: float | None = None
    kl_float16: float | None = None
    largest: float | None = None

    def __str__(self) -> str:
        return (
            f"KL to its source {self.kl:.4f} nats a token, perplexity {self.perplexity_base:.2f} (source "
            f"{self.perplexity_source:.2f}), on {self.tokens} tokens"
        )

    @property
    def rounds_less(self) -> str:
        """That float16 is nearer to float32 than bfloat16 is, with the figures; empty where it is not, or where its
        range is too small or nearly so."""
        if self.kl_bfloat16 is None or self.kl_float16 is None or self.largest is None:
            return ""
        if self.kl_float16 >= self.kl_bfloat16 or self.largest * MARGIN > FLOAT16_END:
            return ""
        return (
            f"float16 takes it {self.kl_float16:.1e} nats a token from its float32 pass, bfloat16 "
            f"{self.kl_bfloat16:.1e}; values reach {self.largest:.3g} of {FLOAT16_END:.0f}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class QuantSpec:
    """How a base is held.

    Attributes:
        quant_type: "nf4" (QLoRA's normal-float), "fp4", or "none" for a 16- or 32-bit base.
        double_quant: the block scales (absmax) are themselves quantised to 8 bits (QLoRA, arXiv 2305.14314, section 3).
        blocksize: weights that share a scale.
        compute_dtype: torch name of the dtype of activations and of every parameter that is not quantised.
        skip_modules: linears that stay unquantised: names, or parts of them (see `skips`); the output head is always
            one of them.
        quantize_experts: the experts of a mixture are 4-bit too.
        quantize_tower: the vision tower and projector of a vision-language model are 4-bit too.

    Raises:
        UnsupportedQuantError: a value that the trainer and the engine cannot both hold.
    """

    quant_type: str = "nf4"
    double_quant: bool = True
    blocksize: int = 64
    compute_dtype: str = "bfloat16"
    skip_modules: tuple[str, ...] = ()
    quantize_experts: bool = False
    quantize_tower: bool = False

    def __post_init__(self) -> None:
        if self.quant_type == "none":  # one way to say it: the name of the base depends on it
            object.__setattr__(self, "double_quant", False)
            object.__setattr__(self, "blocksize", 64)
            for name in _MORE:
                object.__setattr__(self, name, False)
        if self.quant_type not in QUANT_TYPES:
            hint = (
                "8-bit bases have no bit-exact way into vLLM; use quant='nf4' (half the memory) or quant='none' (16 "
                "bit)"
                if "8" in self.quant_type
                else f"Use one of {', '.join(map(repr, QUANT_TYPES))}"
            )
            raise UnsupportedQuantError(
                f"choosing the quantisation: quant={self.quant_type!r} is not supported. {hint}."
            )
        if self.blocksize not in BLOCK_SIZES:
            raise UnsupportedQuantError(
                f"choosing the quantisation: blocksize={self.blocksize} is not one of {BLOCK_SIZES}. Use 64."
            )
        if self.compute_dtype not in COMPUTE_DTYPES:
            raise UnsupportedQuantError(
                f"choosing the quantisation: compute_dtype={self.compute_dtype!r} is not one of {COMPUTE_DTYPES}. "
                "Use 'bfloat16'."
            )

    @property
    def is_4bit(self) -> bool:
        """Linears are held in 4 bits."""
        return self.quant_type != "none"

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return getattr(torch, self.compute_dtype)

    def skips(self, name: str) -> bool:
        """A linear is named in `skip_modules`, or is in a module that is: "down_proj", "layers.1.mlp",
        "model.layers.1"."""
        return any(f".{entry}." in f".{name}." for entry in self.skip_modules)

    @property
    def label(self) -> str:
        """Short name for a directory, such as "nf4-dq-64"."""
        if not self.is_4bit:
            return self.compute_dtype
        more = "".join(f"-{name.removeprefix('quantize_')}" for name in _MORE if getattr(self, name))
        return f"{self.quant_type}{'-dq' if self.double_quant else ''}-{self.blocksize}{more}"

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        fields = asdict(self) | {"skip_modules": list(self.skip_modules)}
        # Digests of bases are made of this, and most bases have neither.
        return {name: value for name, value in fields.items() if value or name not in _MORE}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> QuantSpec:
        """Inverse of `as_dict`."""
        return cls(**{**fields, "skip_modules": tuple(fields["skip_modules"])})

    @classmethod
    def stored(cls, config: Mapping[str, Any]) -> QuantSpec:
        """Of a checkpoint that is 4-bit already, as far as its `quantization_config` tells."""
        double = bool(config.get("bnb_4bit_use_double_quant", False))
        skipped = {*(config.get("llm_int8_skip_modules") or ())} - {"lm_head"}  # a head is always skipped
        return cls(config.get("bnb_4bit_quant_type", "fp4"), double, skip_modules=tuple(sorted(skipped)))

    def transformers_config(self) -> dict[str, Any]:
        """The `quantization_config` of the checkpoint's config.json (transformers' bitsandbytes format)."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.quant_type,
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": self.compute_dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(self.skip_modules),
            "llm_int8_threshold": 6.0,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
        }


def require_bitsandbytes() -> Any:
    """The bitsandbytes module.

    Raises:
        MissingDependencyError: not installed, or its native library does not load.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise MissingDependencyError(
            f"loading bitsandbytes: {error}. Install it: pip install 'bitsandbytes>=0.50,<0.51'"
        ) from error
    return bitsandbytes


def quantize_linear(weight_OI: torch.Tensor, spec: QuantSpec) -> dict[str, torch.Tensor]:
    """Quantise one weight into the tensors of a bitsandbytes checkpoint: the same bytes on every machine.

    It is computed on the CPU, by operations that round each number alone: neither threads nor the width of vectors
    change the result.

    Args:
        weight_OI: float weight of a linear, on any device.
        spec: a 4-bit spec.

    Returns:
        Keys relative to the module: `weight` (uint8 codes, [O·I/2, 1]), `weight.absmax`, `weight.quant_map`,
        `weight.quant_state.bitsandbytes__<type>`, and with double quantisation the nested pair; all on the CPU.
    """
    functional = require_bitsandbytes().functional
    codes, state = functional.quantize_4bit(
        weight_OI.cpu().contiguous(), blocksize=spec.blocksize, quant_type=spec.quant_type
    )
    if spec.double_quant:
        absmax = state.absmax.flatten()
        grid = ScaleGrid.of(absmax)
        state = with_nested_scales(state, grid.codes(absmax), grid)
    return packed(codes, state)


def packed(codes: torch.Tensor, state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, keys relative to the module.

    Args:
        codes: uint8 [O·I/2, 1].
        state: bitsandbytes' QuantState.
    """
    tensors = {"weight": codes}
    tensors |= {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return {key: value.contiguous() for key, value in tensors.items()}


@dataclass(frozen=True)
class ScaleGrid:
    """The scales that one weight can have in 8 bits (QLoRA's double quantisation, arXiv 2305.14314, section 3).

    bitsandbytes' own double quantisation depends on the machine: the mean is rounded by the number of threads, the 256
    values by the width of vectors, and its kernel's instructions are those of the processor. Here the sum is exact.

    Attributes:
        offset: mean of the scales, float32 [].
        inner: the scale of each scale, float32 [blocks].
        table: the 256 values, float32.
    """

    offset: torch.Tensor
    inner: torch.Tensor
    table: torch.Tensor

    @classmethod
    def of(cls, absmax: torch.Tensor) -> ScaleGrid:
        """That of the scales of a weight, flat [blocks]."""
        count = absmax.numel()
        offset = torch.tensor(math.fsum(absmax.tolist()) / count, dtype=torch.float32, device=absmax.device)
        padded = torch.nn.functional.pad(absmax - offset, (0, -count % _NESTED_BLOCK)).view(-1, _NESTED_BLOCK)
        inner = padded.abs().amax(1).repeat_interleave(_NESTED_BLOCK)[:count]
        return cls(offset, inner, torch.tensor(_eight_bit_values(), dtype=torch.float32, device=absmax.device))

    def codes(self, absmax: torch.Tensor) -> torch.Tensor:
        """The codes of scales, uint8; of the shape of `inner`."""
        tiny = torch.finfo(torch.float32).tiny  # of blocks whose scales are all alike
        scaled = (absmax - self.offset) / self.inner.clamp(min=tiny)
        return torch.bucketize(scaled, (self.table[1:] + self.table[:-1]) / 2).to(torch.uint8)

    def scales(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes stand for, as `exact_absmax` has it."""
        return self.table[codes.long()] * self.inner + self.offset


def with_nested_scales(state: Any, codes: torch.Tensor, grid: ScaleGrid) -> Any:
    """A QuantState with the scales of `state` in 8 bits.

    Args:
        state: bitsandbytes' QuantState.
        codes: of the scales, flat [blocks].
        grid: of which they are.
    """
    kind = type(state)
    inner = kind(absmax=grid.inner[::_NESTED_BLOCK], blocksize=_NESTED_BLOCK, code=grid.table, dtype=torch.float32)
    return kind(
        absmax=codes,
        shape=state.shape,
        dtype=state.dtype,
        blocksize=state.blocksize,
        code=state.code,
        quant_type=state.quant_type,
        offset=grid.offset,
        state2=inner,
    )


@functools.cache
def _eight_bit_values() -> tuple[float, ...]:
    """The 256 values of the signed dynamic 8-bit type (arXiv 1511.04561), in order, each rounded from its exact
    fraction.

    Each of seven powers of ten holds twice as many values as the one below it: the middles of equal parts of 0.1 to 1,
    times the power.
    """
    positive = [
        (2 * parts + 9 * (2 * part + 1)) / (20 * parts * 10 ** (6 - power))
        for power in range(7)
        for parts in (2**power,)
        for part in range(parts)
    ]
    return tuple(sorted([*positive, *(-value for value in positive), 0.0, 1.0]))


def exact_absmax(state: Any) -> torch.Tensor:
    """The scales of a QuantState as the float32 numbers that the dequantisation multiplies with, flat [blocks].

    Double-quantised scales are un-nested: `code2[absmax] * absmax2 + offset`, in float32 like bitsandbytes' own
    kernels.

    Raises:
        UnsupportedQuantError: the weight was repacked for the CPU, which has rounded its scales.
    """
    if getattr(state, "packing_format_for_cpu", False):
        raise UnsupportedQuantError(
            "reading the scales: bitsandbytes has repacked this weight for the CPU (eval mode) and rounded its scales "
            "to bf16. Load the model with qlora_rl.load_base, which forbids it."
        )
    if not state.nested:
        return state.absmax.float().flatten()
    inner = state.state2
    values = inner.code.float()[state.absmax.flatten().long()]
    scales = inner.absmax.float().repeat_interleave(inner.blocksize)[: values.numel()]
    return values * scales + state.offset.float()


def dequantize_exactly(
    codes: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, blocksize: int, shape: Sequence[int]
) -> torch.Tensor:
    """The float32 weights [O, I] that 4-bit codes stand for: `table[code] * absmax`, in plain torch.

    Rounded to bf16 or fp16 they are what bitsandbytes' kernels give, bit for bit, but for the sign of a zero: FP4 has
    two codes for it, and what bitsandbytes makes of the second depends on the processor (-0 without AVX-512, 0 with
    it). A product is the same with either.

    Args:
        codes: packed, two to a byte, the first in the high half; any storage dtype.
        absmax: exact scales, float32 [blocks].
        table: 16 values.
        blocksize: weights per scale.
        shape: of the weight.
    """
    packed, count = codes.contiguous().flatten().view(torch.uint8), math.prod(shape)
    pairs = torch.cartesian_prod(table.float(), table.float())  # what each byte stands for
    # By 32-bit numbers of bytes, and multiplied where they are: of every other way some copies would be held.
    values = pairs.index_select(0, packed.int()).flatten()[:count]
    blocks = count // blocksize
    values[: blocks * blocksize].view(blocks, blocksize).mul_(absmax[:blocks, None])
    if count > blocks * blocksize:
        values[blocks * blocksize :].mul_(absmax[blocks])
    return values.reshape(*shape)


def dequantised_rows(parameter: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Some rows of `dequantised_weight` at a time: number of the first of them, and their float32 values, a copy."""
    state = getattr(parameter, "quant_state", None)
    shape = parameter.shape if state is None else state.shape
    unit = 1 if state is None else 2 * state.blocksize // math.gcd(shape[1], 2 * state.blocksize)
    count = -(-(_SLICE // shape[1] + 1) // unit) * unit  # whole blocks of scales
    if state is None:
        yield from (
            (i, parameter.detach()[i : i + count].to(torch.float32, copy=True)) for i in range(0, shape[0], count)
        )
        return
    absmax, codes = exact_absmax(state), parameter.detach().contiguous().flatten().view(torch.uint8)
    for i in range(0, shape[0], count):
        rows = min(count, shape[0] - i)
        start, end = i * shape[1], (i + rows) * shape[1]
        scales = absmax[start // state.blocksize : -(-end // state.blocksize)]
        part = codes[start // 2 : (end + 1) // 2]
        yield i, dequantize_exactly(part, scales, state.code, state.blocksize, (rows, shape[1]))


def dequantised_weight(parameter: torch.Tensor) -> torch.Tensor:
    """The float32 weight that a live parameter stands for; a float32 one is given out as it is.

    Four-bit weights are dequantised in parts, so that little more than the result is held.
    """
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach().float()
    weight_OI = torch.empty(*state.shape, dtype=torch.float32, device=parameter.device)
    for first, rows in dequantised_rows(parameter):
        weight_OI[first : first + len(rows)] = rows
    return weight_OI


def keep_packing(model: torch.nn.Module) -> None:
    """Forbid bitsandbytes to repack 4-bit weights in eval mode on CPUs with AVX512-BF16.

    The repacking changes the stored bytes and rounds the scales to bf16, so that the base would no longer be the one
    that the engine holds.
    """
    bnb = require_bitsandbytes()
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def store_as(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let 4-bit codes be seen as `dtype`, for FSDP2, which shards nothing but floats; the same bytes, and no copy of
    them."""
    bnb = require_bitsandbytes()
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            state = module.weight.quant_state
            module.weight.data = module.weight.data.flatten().view(dtype)[:, None]
            module.weight.quant_storage = module.quant_storage = dtype
            # Of the layer, too: a sharded parameter has no room for it.
            module.weight.quant_state = module.quant_state = state


def spec_of(model: torch.nn.Module) -> QuantSpec:
    """The spec of a model object, read from its live 4-bit layers (not from its config).

    Raises:
        UnsupportedQuantError: 8-bit layers, a 4-bit output head, or 4-bit layers that differ from each other.
    """
    bnb = require_bitsandbytes()
    found: dict[tuple[str, bool, int], str] = {}
    skipped: list[str] = []
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear8bitLt):
            raise UnsupportedQuantError(
                f"reading the model's quantisation: {name} is 8-bit. vLLM cannot hold 8-bit bases bit for bit; load "
                "the model in 4 bits (BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')).",
                module=name,
            )
        if isinstance(module, bnb.nn.Linear4bit):
            if module is head:  # transformers quantises it wherever llm_int8_skip_modules is given and does not name it
                raise UnsupportedQuantError(
                    f"reading the model's quantisation: the output head {name} is 4-bit, and vLLM holds it "
                    f"unquantised. Name it too where the model is quantised (llm_int8_skip_modules=[{name!r}, ...]), "
                    "or start from the 16-bit original.",
                    module=name,
                )
            state = module.weight.quant_state
            if state is None:
                raise UnsupportedQuantError(
                    f"reading the model's quantisation: {name} is not quantised yet. Move the model to its device "
                    "first.",
                    module=name,
                )
            # Also where this device's kernel is right: the base may be served, and is compared, on a CPU whose kernel
            # is not.
            if module.in_features % state.blocksize:
                raise UnsupportedQuantError(
                    f"reading the model's quantisation: in_features={module.in_features} is no multiple of "
                    f"blocksize={state.blocksize} at {name}: blocks span rows, and bitsandbytes' CPU kernel with "
                    "AVX-512 takes the wrong scales for them. Leave the module out of the quantisation "
                    "(llm_int8_skip_modules).",
                    module=name,
                )
            found.setdefault((state.quant_type, state.nested, state.blocksize), name)
        elif isinstance(module, torch.nn.Linear) and ".lora_" not in name:
            skipped.append(plain_name(name))
    config = getattr(model, "config", None)
    dtype = str(getattr(config, "dtype", None) or torch.bfloat16).removeprefix("torch.")
    if not found:
        return QuantSpec("none", False, 64, dtype)
    if len(found) > 1:
        raise UnsupportedQuantError(
            f"reading the model's quantisation: its layers differ: {found}. Quantise it once with "
            "qlora_rl.prepare_base."
        )
    quant_type, nested, blocksize = next(iter(found))
    experts = any(isinstance(module, LinearExperts) for module in model.modules())
    return QuantSpec(quant_type, nested, blocksize, dtype, tuple(sorted(skipped)), experts)


def plain_name(name: str) -> str:
    """The name that a tensor or module has in the bare base, with PEFT's wrappers taken out."""
    bare = name.replace("base_layer.", "").removesuffix(".base_layer").replace("original_module.", "")
    return bare.replace("token_adapter.", "")
