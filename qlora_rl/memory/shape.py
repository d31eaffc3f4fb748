"""What a transformers config says about memory: every parameter by shape, without a single weight."""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from qlora_rl.adapter.shape import adapter_shapes
from qlora_rl.base.attention.choice import softcap_of
from qlora_rl.base.checkpoint import MANIFEST, PreparedBase, models_are_whole, open_base
from qlora_rl.base.experts import NAMINGS, experts_as_linears, is_mixture
from qlora_rl.base.hub import hub_reachable, is_local, missing_path, why_missing
from qlora_rl.base.model_classes import VISION_TYPES, adaptable, auto_class, takes_images, vision_parts
from qlora_rl.base.quant import QuantSpec
from qlora_rl.base.unsupported_configs import check_function
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.memory.published import UNSUPPORTED, Published, published, why_unsupported

logger = logging.getLogger(__name__)

_MODELS = "Pass a checkpoint directory, a config.json, or the name of a hub model that can be reached from here."


@dataclass(frozen=True)
class Cache:
    """What one layer keeps of one token for attention.

    Attributes:
        elements: numbers per token (keys and values of all heads).
        window: tokens that are kept at most; `None` for all.
    """

    elements: int
    window: int | None = None


@dataclass(frozen=True)
class Tower:
    """Vision tower and projector of a model that takes images.

    Attributes:
        parameters: all of them.
        linears: (O, I) of its linears.
        hidden: width of its layers.
        inner: width of their MLPs.
        head: size of an attention head; 0 where no positions are rotated.
        patch: numbers of one patch of pixels.
        patches: that become one token.
        is_float: its layers carry float32 numbers on, made of positions that are interpolated.
    """

    parameters: int
    linears: tuple[tuple[int, int], ...]
    hidden: int
    inner: int
    head: int
    patch: int
    patches: int
    is_float: bool


@dataclass(frozen=True)
class ModelShape:
    """The shapes of a model.

    Attributes:
        name: for people.
        linears: (O, I) of every linear but the output head, by module name.
        experts: shapes of the tensors of a mixture of experts ([E, O, I]), by parameter name.
        plain: elements of all other parameters: embeddings, norms, biases, an output head that is not tied.
        buffers: bytes of the buffers (rotary frequencies, float32).
        scales: elements of the buffers that are in the compute dtype (Gemma's scale of embeddings).
        vocabulary: V.
        embeddings: how many [V, H] matrices there are: 1 where the head is tied, otherwise 2.
        hidden: H.
        inner: width of the feed-forward part that one token passes through (all chosen experts together).
        chosen: experts that one token passes through; 0 in a dense model.
        float_weights: outputs of fused experts are weighted in float32.
        softcapped: query heads whose scores are bounded; 0 where none are.
        layers: decoder layers.
        attention: query heads x head size.
        norms: elements per token and layer that norms lift to float32.
        caches: one for every layer that has a KV cache.
        positions: the longest sequence that the model was made for.
        rotary: head size that is rotated.
        kv_heads: of keys and values.
        tower: of a model that takes images; it is in none of the above.
    """

    name: str
    linears: Mapping[str, tuple[int, int]]
    experts: Mapping[str, tuple[int, ...]]
    plain: int
    buffers: int
    scales: int
    vocabulary: int
    embeddings: int
    hidden: int
    inner: int
    chosen: int
    layers: int
    attention: int
    norms: int
    caches: tuple[Cache, ...]
    positions: int
    rotary: int
    kv_heads: int
    tower: Tower | None = None
    float_weights: bool = False
    softcapped: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones once."""
        matrices = [*self.linears.values(), *self.experts.values()]
        seen = self.tower.parameters if self.tower is not None else 0
        return self.plain + seen + sum(prod(shape) for shape in matrices)

    @property
    def pool(self) -> int:
        """Experts of a layer that is a mixture; 0 in a dense model."""
        return max((shape[0] for shape in self.experts.values()), default=0)

    @property
    def mixtures(self) -> int:
        """Number of parameters of all experts and their routers."""
        routers = sum(
            count * hidden for name, (count, hidden, *_) in self.experts.items() if name.endswith(".down_proj")
        )
        return routers + sum(map(prod, self.experts.values()))

    def largest_linear(self, with_experts: bool) -> int:
        """Elements of the largest linear, or matrix of an expert where those are 4-bit too."""
        experts = self.expert_matrices() if with_experts else ()
        return max(map(prod, [*self.linears.values(), *experts]), default=0)

    def expert_matrices(self) -> Iterator[tuple[int, int]]:
        """(O, I) of every matrix of every expert."""
        for name, (count, rows, columns) in self.experts.items():
            parts = 2 if name.endswith("gate_up_proj") else 1
            yield from [(rows // parts, columns)] * (count * parts)

    def needs_masks(self, length: int) -> bool:
        """Sequences of `length` tokens keep their padding: they hold images, or a layer is no attention, or attends to
        a window that is shorter."""
        return (
            self.tower is not None
            or len(self.caches) < self.layers
            or any(c.window is not None and c.window < length for c in self.caches)
        )

    def cache_elements(self, length: int) -> int:
        """Numbers in the KV cache of one sequence of `length` tokens."""
        return sum(c.elements * (length if c.window is None else min(length, c.window)) for c in self.caches)


def read_config(model: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The transformers config of a directory, a hub name, or a config.json.

    Of a hub model that is neither cached nor to be had, but `published`, a config with its shape; a warning says so.

    Raises:
        ConfigConflictError: nothing that transformers can read; says why.
        NotYetSupportedError: it cannot be read, and its name is that of an unsupported mixture of experts or a model
            for images.
    """
    from transformers import AutoConfig

    if why := missing_path(model):
        raise ConfigConflictError(f"reading the config: {why}. {_MODELS}")
    path = Path(model)
    try:
        if path.is_file():
            fields = json.loads(path.read_text())
            if "model_type" not in fields:
                raise ValueError("it names no model_type")
            return AutoConfig.for_model(**fields)
        if not is_local(model):
            hub_reachable()
        return AutoConfig.from_pretrained(os.fspath(model), trust_remote_code=trust_remote_code)
    except Exception as error:
        lines = str(error).strip().splitlines()
        if not is_local(model):
            if (known := published(os.fspath(model))) is not None:
                return _shipped(known)
            if why := why_unsupported(os.fspath(model)):
                raise NotYetSupportedError(f"reading the config: {model} {why}.") from error
            reason = f"{type(error).__name__}: {lines[0] if lines else 'no reason'}"
            raise ConfigConflictError(
                f"reading the config of {model}: {why_missing(os.fspath(model))} ({reason})."
            ) from error
        raise ConfigConflictError(
            f"reading the config of {model}: {lines[0].rstrip('.') if lines else type(error).__name__}. {_MODELS}"
        ) from error


@functools.cache
def _say_shipped(name: str) -> None:
    """Once a process."""
    logger.warning("%s is not cached and cannot be fetched: its shape is the one shipped with qlora_rl", name)


def _shipped(known: Published) -> Any:
    from transformers import AutoConfig

    _say_shipped(known.name)
    fields = dict(known.config)
    if original := fields.get("original_max_position_embeddings"):  # LongRoPE; its factors say nothing about memory
        heads = fields["hidden_size"] // fields["num_attention_heads"]
        ones = [1.0] * (int(heads * fields.get("partial_rotary_factor", 1.0)) // 2)
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": original}
        rope["factor"] = fields["max_position_embeddings"] / original
        fields["rope_parameters"] = rope | {"short_factor": ones, "long_factor": ones}
    config = AutoConfig.for_model(**fields)
    config.name_or_path = known.name
    return config


def check_supported(config: Any, max_length: int | None = None) -> None:
    """Raise where a base of such a model cannot be prepared, or not be sampled from.

    Args:
        config: of transformers.
        max_length: of the engine, where one is planned whose length is known.

    Raises:
        NotYetSupportedError: a mixture of experts, or a model for more than text, of an unsupported type; or vLLM
            computes another function of it.
    """
    reads_more = any(getattr(config, name, None) is not None for name in ("vision_config", "audio_config"))
    has = {
        "experts": is_mixture(config) and config.model_type not in NAMINGS,
        "images": reads_more and config.model_type not in VISION_TYPES,
    }
    for part, is_there in has.items():
        if is_there:
            name = config.name_or_path or type(config).__name__
            raise NotYetSupportedError(f"reading the config: {name} {UNSUPPORTED[part]}.")
    check_function(config, max_length, doing="reading the config")


def stored_spec(
    model: str | os.PathLike[str],
    quant: str | None = None,
    *,
    double_quant: bool = True,
    quantize_experts: bool = False,
    quantize_tower: bool = False,
) -> QuantSpec:
    """How a prepared base is held; for anything else, or where `quant` says so, the spec that it would be prepared
    with."""
    if quant is None and (base := stored_base(model)) is not None:
        return base.spec
    return QuantSpec(quant or "nf4", double_quant, quantize_experts=quantize_experts, quantize_tower=quantize_tower)


def stored_base(model: str | os.PathLike[str]) -> PreparedBase | None:
    """A prepared base, of which only the manifest is read; `None` for anything else."""
    return open_base(model, verify=False) if (Path(model) / MANIFEST).is_file() else None


def skeleton(config: Any) -> torch.nn.Module:
    """The model of a config on torch's meta device: shapes, no memory.

    Raises:
        ConfigConflictError: transformers makes no language model of it.
        NotYetSupportedError: it takes images, and is of an unsupported type.
    """
    if takes_images(config):
        check_supported(config)
    try:
        with models_are_whole(), torch.device("meta"):
            # A copy: transformers writes into the config that it is given.
            return auto_class(config).from_config(copy.deepcopy(config), dtype=torch.bfloat16, trust_remote_code=False)
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise ConfigConflictError(
            f"reading the config: transformers makes no language model of {type(config).__name__} "
            f"({type(error).__name__}: {lines[0][:200] if lines else ''}). Pass the config of a model that writes text."
        ) from error


def planned_adapter(
    config: Any,
    model: torch.nn.Module,
    spec: QuantSpec,
    lora: Any = None,
    *,
    rank: int = 16,
    target_modules: str | Sequence[str] = "all-linear",
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that an adapter will train, by name.

    Args:
        config: of transformers.
        model: its skeleton; of no further use.
        spec: of the base: experts that are 4-bit can be adapted, too.
        lora, rank, target_modules: of `plan_memory`.
    """
    if spec.quantize_experts and is_mixture(config):
        with experts_as_linears(config):
            model = skeleton(config)
    else:
        target_modules = adaptable(config, target_modules)
    return adapter_shapes(model, lora, rank=rank, target_modules=target_modules)


def read_shape(config: Any, model: torch.nn.Module | None = None) -> ModelShape:
    """The shapes of a config.

    Args:
        config: of transformers.
        model: its skeleton, if there is one already.
    """
    model = skeleton(config) if model is None else model
    text = config.get_text_config()
    head = model.get_output_embeddings()
    seen = tuple(f"{part}." for part in vision_parts(model))
    all_linears = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    linears = {name: size for name, size in all_linears.items() if not (seen and name.startswith(seen))}
    parameters = {name: p for name, p in model.named_parameters() if not (seen and name.startswith(seen))}
    experts = {name: tuple(p.shape) for name, p in parameters.items() if p.ndim == 3}
    taken = {f"{name}.weight" for name in linears} | set(experts)
    first = next((n.split(".layers.")[0] for n in parameters if ".layers." in n), "")
    norms = sum(
        _norm_width(name, p.shape[0], text)
        for name, p in parameters.items()
        if name.startswith(f"{first}.layers.0.") and p.ndim == 1 and "norm" in name
    )
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    head_size = _head_size(text)
    vocabulary = int(text.vocab_size)
    naming = NAMINGS.get(text.model_type)
    return ModelShape(
        name=_name(config),
        linears=linears,
        experts=experts,
        plain=sum(p.numel() for name, p in parameters.items() if name not in taken),
        buffers=sum(b.numel() * b.element_size() for b in model.buffers() if b.dtype != torch.bfloat16),
        scales=sum(b.numel() for b in model.buffers() if b.dtype == torch.bfloat16),
        vocabulary=vocabulary,
        embeddings=sum(p.ndim == 2 and p.shape[0] == vocabulary for n, p in parameters.items() if n not in taken),
        hidden=int(text.hidden_size),
        inner=_inner(text),
        chosen=_chosen(text),
        layers=int(text.num_hidden_layers),
        attention=heads * head_size,
        norms=norms or 2 * int(text.hidden_size),
        caches=_caches(text, head_size),
        positions=int(getattr(text, "max_position_embeddings", 0) or 0),
        rotary=head_size,
        kv_heads=_kv_heads(text),
        tower=_tower(config, model, all_linears.keys() - linears.keys()) if seen else None,
        float_weights=naming is not None and not naming.rounds_weights,
        softcapped=heads if softcap_of(config) else 0,
    )


def _tower(config: Any, model: torch.nn.Module, linears: Collection[str]) -> Tower:
    held, parts = config.vision_config, [model.get_submodule(name) for name in vision_parts(model)]
    hidden = int(getattr(held, "embed_dim", None) or held.hidden_size)
    inner = int(getattr(held, "intermediate_size", None) or held.mlp_ratio * hidden)
    if config.model_type == "gemma3":  # SigLIP: pixels of fixed size, positions in a table
        head, merged = 0, (held.image_size // held.patch_size) ** 2 // config.mm_tokens_per_image
        patch = held.num_channels * held.patch_size**2
    else:
        head, merged = hidden // held.num_heads, held.spatial_merge_size**2
        patch = held.in_channels * held.temporal_patch_size * held.patch_size**2
    return Tower(
        parameters=sum(p.numel() for part in parts for p in part.parameters()),
        linears=tuple((w.shape[0], w.shape[1]) for w in (model.get_parameter(f"{name}.weight") for name in linears)),
        hidden=hidden,
        inner=inner,
        head=int(head),
        patch=int(patch),
        patches=int(merged),
        is_float=getattr(held, "num_position_embeddings", None) is not None,
    )


def _name(config: Any) -> str:
    path = getattr(config, "_name_or_path", "")
    return Path(path).name if path else config.model_type


def _head_size(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _kv_heads(text: Any) -> int:
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def _norm_width(name: str, size: int, text: Any) -> int:
    """Elements per token that a norm works on: those of q and k are applied to every head."""
    if size == _head_size(text) != text.hidden_size:
        return size * (_kv_heads(text) if "k_norm" in name else int(text.num_attention_heads))
    return size


def _chosen(text: Any) -> int:
    return int(getattr(text, "num_experts_per_tok", None) or 1) if is_mixture(text) else 0


def _inner(text: Any) -> int:
    if is_mixture(text):
        expert = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
        shared = getattr(text, "shared_expert_intermediate_size", None) or 0
        return _chosen(text) * int(expert) + int(shared)
    return int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size)


def _caches(text: Any, head_size: int) -> tuple[Cache, ...]:
    """By layer; layers with a state of fixed size (linear attention, convolutions) have none."""
    latent = getattr(text, "kv_lora_rank", None)
    # Multi-head latent attention keeps one compressed vector.
    compressed = int(latent or 0) + int(getattr(text, "qk_rope_head_dim", 0) or 0)
    elements = compressed if latent else 2 * _kv_heads(text) * head_size
    window = layer_window(text)
    return tuple(
        Cache(elements, window if kind == "sliding_attention" else None)
        for kind in layer_kinds(text)
        if kind in ("full_attention", "sliding_attention", "chunked_attention")
    )


def layer_window(config: Any) -> int | None:
    """Tokens that a layer with a sliding window attends to; `None` for all."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    is_used = getattr(text, "use_sliding_window", True) is not False and "sliding_attention" in layer_kinds(text)
    return int(window) if window and is_used else None


def layer_kinds(config: Any) -> list[str]:
    """Of each decoder layer what transformers calls its type."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return list(kinds)
    slides = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True) is not False
    return ["sliding_attention" if slides else "full_attention"] * int(text.num_hidden_layers)


# Of the last models and adapters, what was counted. Making them on the meta device is nearly all the time of a plan,
# and `recommend`, a notebook or a sweep plans one model many times.
_KNOWN: dict[str, tuple[ModelShape, dict[str, tuple[int, ...]]]] = {}
_MOST_KNOWN = 16


def model_and_adapter(
    config: Any, spec: QuantSpec, lora: Any, rank: int = 16, target_modules: str | Sequence[str] = "all-linear"
) -> tuple[ModelShape, dict[str, tuple[int, ...]]]:
    """The shapes of a model, and by name those of the tensors that an adapter on it trains; arguments as of
    `plan_memory`.

    Raises:
        ConfigConflictError: transformers makes no language model of the config, or PEFT finds nothing to adapt.
    """
    told = [
        config.name_or_path,
        type(config).__name__,
        config.to_json_string(use_diff=False),
        spec,
        None if lora is None else (type(lora).__name__, lora.to_dict()),
        rank,
        target_modules,
    ]
    key = repr(told)
    found = _KNOWN.pop(key, None)
    if found is None:
        model = skeleton(config)
        shape = read_shape(config, model)
        found = shape, planned_adapter(config, model, spec, lora, rank=rank, target_modules=target_modules)
    _KNOWN[key] = found  # the newest is the last
    for oldest in list(_KNOWN)[:-_MOST_KNOWN]:
        _KNOWN.pop(oldest, None)
    return found
