"""`check_function`: configs of which vLLM computes another function than transformers, with equal weights; rejected
before a base is made.

Each rule stands on a comparison of both sides in float32 (for dense models `benchmarks/configs.py`, docs/functions.md).
Two sides that differ beyond some length only are served up to that length.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qlora_rl.base.experts import NAMINGS, is_mixture
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError

logger = logging.getLogger(__name__)

# Dense types of which both sides were compared.
COMPARED = frozenset({
    "arcee", "bitnet", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text",
    "glm", "glm4",
    "granite", "helium", "hunyuan_v1_dense", "hyperclovax", "jais2", "llama", "ministral", "ministral3", "mistral",
    "nanochat", "nemotron", "olmo", "olmo2",
    "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2", "vaultgemma",
})  # fmt: skip
_KNOWN = COMPARED | NAMINGS.keys()
# vLLM's layers of Llama, which many types share, know one activation.
_SILU = frozenset({
    "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "glm", "glm4", "granite", "hyperclovax", "llama", "ministral3",
    "mistral", "mixtral", "olmoe", "phi3", "qwen2",
    "qwen3", "qwen3_moe", "seed_oss", "stablelm",
})  # fmt: skip
_ONE_WAY = {"use_bidirectional_attention": (False, None)}
# With which values vLLM 0.31 computes, by type of model, whatever the config says: it does not read the field, or takes
# no other value. The first is the default.
_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "apertus": {"hidden_act": ("xielu",)},
    "arcee": {"hidden_act": ("relu2",)},
    "cohere": {"tie_word_embeddings": (True,), "attention_bias": (False,)},
    "cohere2": {"tie_word_embeddings": (True,), "attention_bias": (False,)},
    # Its two forms of GELU are less apart than two roundings to bf16, and published configs name either.
    "gemma": {"hidden_act": ("gelu_pytorch_tanh", "gelu"), "attention_bias": (False,)} | _ONE_WAY,
    "gemma2": {"hidden_activation": ("gelu_pytorch_tanh",), "tie_word_embeddings": (True,)} | _ONE_WAY,
    "gemma3_text": _ONE_WAY,
    "jais2": {"hidden_act": ("relu2",)},
    "mixtral": {"router_jitter_noise": (0.0,)},
    "olmoe": {"rms_norm_eps": (1e-5,), "clip_qkv": (None,), "norm_topk_prob": (False,), "attention_bias": (False,)},
    "ernie4_5": {"use_bias": (False,)},
    "falcon": {"activation": ("gelu",)},
    "phi": {"qk_layernorm": (False,), "tie_word_embeddings": (False,)},
    "qwen3": {"attention_bias": (False,)},
    "seed_oss": {"attention_bias": (True,), "attention_out_bias": (False,), "mlp_bias": (False,)},
    "stablelm": {"qk_layernorm": (False,), "use_parallel_residual": (False,)},
}

# Types that vLLM runs with its code of Llama, and those that it runs with transformers' code in attention of its own.
_LLAMA = frozenset({"arcee", "cwm", "ernie4_5", "glm", "llama", "ministral3", "mistral", "phi3"})
_BACKEND = frozenset({
    "bitnet", "helium", "hunyuan_v1_dense", "ministral", "nanochat", "olmo", "olmo2", "olmo3", "smollm3", "starcoder2",
    "vaultgemma",
})  # fmt: skip
_LIKE_LLAMA = _LLAMA | {"apertus", "exaone4", "granite", "jais2", "nemotron"}
# The other direction, fields that vLLM reads and transformers does not: of which types, and which values change
# nothing; a name stands for the value of that field.
_READ_BY_VLLM: dict[str, tuple[frozenset[str], tuple[Any, ...]]] = {
    "attention_bias": (frozenset({"cwm", "ernie4_5", "exaone4", "ministral3", "mistral", "phi3"}), (False, None)),
    "attention_sinks": (frozenset({"granite"}), (False,)),
    "attn_logit_softcapping": (_BACKEND - {"vaultgemma"}, (None,)),
    "bias": (_LIKE_LLAMA, (False, None, "attention_bias")),
    "dual_chunk_attention_config": (frozenset({"hyperclovax", "qwen2", "qwen3", "qwen3_moe"}), (None,)),
    "final_logit_softcapping": (_BACKEND - {"nanochat", "vaultgemma"}, (None,)),
    "interleaved_sliding_window": (frozenset({"jais2"}), ()),
    "layer_rope_theta": (frozenset({"granite"}), (None,)),
    "layer_types": (frozenset({"granite"}), (None,)),  # also gives each head a sink
    "logit_scale": (_LIKE_LLAMA | _BACKEND | {"hyperclovax"}, (1.0,)),
    "mlp_bias": (frozenset({"ernie4_5", "exaone4", "glm", "ministral3", "mistral", "phi3"}), (False, None)),
    "n_inner": (frozenset({"phi"}), (None,)),
    "norm_eps": (frozenset({"stablelm"}), ("layer_norm_eps",)),
    "qk_norm": (frozenset({"qwen2"}), (False, None)),
    "qkv_bias": (_LLAMA | {"apertus"}, ("attention_bias",)),
    "rms_norm_eps": (frozenset({"cohere", "cohere2"}), (None,)),
    "use_qk_norm": (frozenset({"cohere2"}), (False, None)),
}
# Fields of which vLLM computes with one value, made of others.
_HEAD_DIM = frozenset({"phi", "qwen2"})
_FOUR_TIMES = {"falcon": "ffn_hidden_size", "phi": "intermediate_size"}

# Types whose layers all have the config's `sliding_window`, and those that choose by `layer_types`; in transformers,
# and in vLLM. All others have no window in transformers, and vLLM gives a window that the config names to all layers,
# where `layer_types` does not say otherwise.
_WINDOW_ON_ALL = frozenset({"mistral", "ministral3", "mixtral", "phi3", "qwen3_moe", "starcoder2"})
_WINDOW_BY_LAYER = frozenset({
    "cohere2", "cwm", "exaone4", "gemma2", "gemma3_text", "granite_swa", "ministral", "olmo3", "qwen2", "qwen3",
    "smollm3", "vaultgemma",
})  # fmt: skip
_VLLM_BY_LAYER = (_WINDOW_BY_LAYER | _LLAMA | _BACKEND | {"apertus"}) - {"qwen2", "qwen3"}
# Types whose attention in transformers rotates a part of each head; the others rotate all of it, whatever the config
# says. vLLM reads the field.
_ROTATES_PART = frozenset({"glm", "glm4", "nemotron", "persimmon", "phi", "phi3", "stablelm"})


@dataclass(frozen=True)
class Limit:
    """Both sides compute one function of sequences up to some length only.

    Attributes:
        length: in tokens.
        why: in words, for people.
        is_last: the model has no more positions of its own, and an engine could be given more all the same.
    """

    length: int
    why: str
    is_last: bool = False


def check_function(config: Any, max_length: int | None = None, *, doing: str = "preparing a base") -> None:
    """Reject a config of which vLLM would compute another function than transformers.

    Args:
        config: of transformers.
        max_length: of the engine, prompt plus completion, where it is known.
        doing: what is being done, for the error.

    Raises:
        NotYetSupportedError: names the field, or the type of a mixture that was not compared.
    """
    if is_mixture(config) and config.model_type not in NAMINGS:
        raise NotYetSupportedError(
            f"{doing}: {config.model_type} is a mixture of experts, and what vLLM makes of it has not been compared "
            f"with transformers. Use one of {', '.join(NAMINGS)}, or a dense model."
        )
    # vLLM 0.31 fuses gate and up of dense layers, and knows their parts only where `mlp_only_layers` lists such layers.
    if getattr(config, "decoder_sparse_step", 1) > 1 and not config.mlp_only_layers:
        raise NotYetSupportedError(
            f"{doing}: decoder_sparse_step={config.decoder_sparse_step}, and vLLM takes no adapters on such a model. "
            "Name its dense layers in mlp_only_layers of its config instead, with decoder_sparse_step=1."
        )
    text = config.get_text_config()
    for field, found, values in _unread(text):
        raise NotYetSupportedError(
            f"{doing}: the config of this {text.model_type} has {field}={found!r}, and vLLM computes such models with "
            f"{' or '.join(map(repr, values))} alone, so it would sample from another function than the trainer's. Use "
            "a model with that value."
        )
    if text.model_type == "falcon" and text.alibi:
        raise NotYetSupportedError(
            f"{doing}: the config of this falcon has alibi=True, and vLLM computes those biases in float32, "
            "transformers rounds them to bf16, so it would sample from another function than the trainer's. Use a "
            "falcon with rotary positions."
        )
    for field, found in _read_by_vllm(text):
        raise NotYetSupportedError(
            f"{doing}: the config of this {text.model_type} has {field}={found!r}, and vLLM reads that field, "
            "transformers does not, so it would sample from another function than the trainer's. Take the field out of "
            "config.json: both sides then compute what the trainer does now."
        )
    limit = function_limit(config)
    if limit is not None and max_length is not None and max_length > limit.length:
        raise NotYetSupportedError(
            f"{doing}: with sequences of up to {max_length} tokens {limit.why}. Allow {limit.length} tokens at most "
            "(vllm_max_model_length, --max-length), or use another model."
        )


def engine_positions(config: Any) -> int:
    """The longest sequence that an engine is given by default: what the model was made for, as far as both sides
    compute one function; 0: unknown."""
    limit = function_limit(config)
    positions = int(getattr(config.get_text_config(), "max_position_embeddings", 0) or 0)
    return positions if limit is None else min(positions or limit.length, limit.length)


def check_positions(config: Any, length: int | None) -> None:
    """Reject a length of the engine that vLLM rejects: beyond the model's positions, as far as its rope is stretched.

    Args:
        config: of transformers.
        length: prompt plus completion, in tokens; `None`: as long as the engine chooses.

    Raises:
        ConfigConflictError: says what to set.
    """
    text = config.get_text_config()
    positions = int(getattr(text, "max_position_embeddings", 0) or 0)
    reach = int(positions * max([1.0, *(float(rope.get("factor") or 1.0) for rope in _ropes(text))]))
    if length is not None and 0 < reach < length and not os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        raise ConfigConflictError(
            f"reading the config: vllm_max_model_length={length}, and the model has {positions} positions "
            f"(max_position_embeddings of this {text.model_type}). Set it to {positions} at most, or leave it out."
        )


def function_limit(config: Any) -> Limit | None:
    """Up to which length both sides compute one function; `None`: as long as the model's positions reach."""
    text = config.get_text_config()
    positions = int(getattr(text, "max_position_embeddings", 0) or 0)
    found = [limit for limit in (*_of_ropes(text), _of_windows(text)) if limit is not None]
    found = [limit for limit in found if limit.length < positions or limit.is_last]
    return min(found, key=lambda limit: limit.length, default=None)


def note_function(config: Any) -> None:
    """Say in the log what `check_function` does not reject: a limit of the length, or a type that was not compared;
    once a process."""
    text = config.get_text_config()
    if (limit := function_limit(config)) is not None:
        _say(
            f"this {text.model_type} is sampled up to {limit.length} tokens, prompt plus completion: beyond, "
            f"{limit.why}"
        )
    if text.model_type not in COMPARED and not is_mixture(config):
        _say(
            f"what vLLM makes of a {text.model_type} was not compared with transformers when this version was made; "
            "both sides are compared when an engine has started"
        )


@functools.cache
def _say(text: str) -> None:
    logger.warning("%s", text)


def _unread(text: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """(field, its value, those with which vLLM computes) of every field whose value vLLM does not take over."""
    assumed = {"is_causal": (True,)} | ({"hidden_act": ("silu",)} if text.model_type in _SILU else {})
    for field, values in (assumed | _FIELDS.get(text.model_type, {})).items():
        found = getattr(text, field, values[0])
        if found not in values:
            yield field, found, values
    heads = getattr(text, "num_attention_heads", None)
    if text.model_type in _HEAD_DIM and getattr(text, "head_dim", None) not in (None, text.hidden_size // heads):
        yield "head_dim", text.head_dim, (text.hidden_size // heads,)
    if (wide := _FOUR_TIMES.get(text.model_type)) and getattr(text, wide) != 4 * text.hidden_size:
        yield wide, getattr(text, wide), (4 * text.hidden_size,)
    is_mixed = len(set(getattr(text, "layer_types", None) or ())) > 1
    if text.model_type in ("qwen2", "qwen3") and is_mixed and text.max_window_layers != text.num_hidden_layers:
        yield "max_window_layers", text.max_window_layers, (text.num_hidden_layers,)  # vLLM does not start
    if text.model_type == "phi" and text.num_key_value_heads != heads:
        yield "num_key_value_heads", text.num_key_value_heads, (heads,)
    for rope in _ropes(text):
        part = rope.get("partial_rotary_factor")
        if part not in (None, 1.0) and text.model_type in _KNOWN - _ROTATES_PART:
            yield "partial_rotary_factor", part, (1.0,)
        if rope.get("rope_type") == "longrope" and (original := rope.get("original_max_position_embeddings")):
            # vLLM reads neither factor nor attention_factor, transformers no mscale; both make them of the lengths, if
            # they are not named.
            factor = text.max_position_embeddings / original
            scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            plain = {"factor": factor, "attention_factor": scale, "short_mscale": scale, "long_mscale": scale}
            for field, value in plain.items():
                if (found := rope.get(field)) is not None and not math.isclose(found, value, rel_tol=1e-4):
                    yield field, found, (round(value, 4),)
        if text.model_type == "glm" and part != 0.5:
            yield "partial_rotary_factor", part, (0.5,)


def _read_by_vllm(text: Any) -> Iterator[tuple[str, Any]]:
    """(field, its value) of every field that vLLM reads and transformers does not, if the value changes something."""
    for field, (types, neutral) in _READ_BY_VLLM.items():
        if text.model_type in types and hasattr(text, field):
            found = getattr(text, field)
            if found not in [getattr(text, each, False) if isinstance(each, str) else each for each in neutral]:
                yield field, found
    for field in ("rotary_pct", "rotary_emb_fraction") if text.model_type in _KNOWN - _ROTATES_PART else ():
        if getattr(text, field, None) not in (None, 1.0):
            yield field, getattr(text, field)
    for rope in _ropes(text):
        if rope.get("rope_type") == "dynamic" and "alpha" in rope and text.model_type in _KNOWN - {"hunyuan_v1_dense"}:
            yield "alpha", rope["alpha"]


def _ropes(text: Any) -> Iterator[dict[str, Any]]:
    """The parameters of a config's ropes: one, or one for each kind of layer."""
    held = getattr(text, "rope_parameters", None) or {}
    for rope in [held] if "rope_type" in held else held.values():
        if isinstance(rope, dict):
            yield rope


def _of_ropes(text: Any) -> Iterator[Limit]:
    for rope in _ropes(text):
        original = int(rope.get("original_max_position_embeddings") or 0)
        if rope.get("rope_type") == "dynamic":
            positions = int(text.max_position_embeddings)
            why = (
                f"transformers stretches the rope of each that has more than {positions} by its own length "
                "(dynamic), and vLLM stretches none"
            )
            yield Limit(positions, why, is_last=True)
        if original and rope.get("llama_4_scaling_beta"):
            why = f"transformers scales queries from position {original} on (llama_4_scaling_beta), and vLLM does not"
            yield Limit(original, why)
        if rope.get("rope_type") == "longrope" and original:
            yield Limit(
                original,
                "vLLM rotates all sequences by the long factors of this model's LongRoPE, transformers those alone "
                f"that have more than {original} tokens (original_max_position_embeddings)",
            )


def _of_windows(text: Any) -> Limit | None:
    window = getattr(text, "sliding_window", None)
    if not window:
        return None
    kinds = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    sliding = [kind == "sliding_attention" for kind in kinds]
    by_layer, on_all = text.model_type in _WINDOW_BY_LAYER, text.model_type in _WINDOW_ON_ALL
    ours = [on_all or (by_layer and slides) for slides in sliding]
    whole = all(sliding) or not any(kinds)
    theirs = [whole or (text.model_type in _VLLM_BY_LAYER and slides) for slides in sliding]
    if text.model_type == "cohere2" and any(ours):
        return Limit(
            window, f"vLLM's windows have {window + 1} tokens, those of transformers {window} (sliding_window)"
        )
    if ours == theirs or text.model_type not in _KNOWN:
        return None
    return Limit(
        window,
        f"vLLM has a window of {window} tokens (sliding_window) on {sum(theirs)} of {len(kinds)} layers, transformers "
        f"on {sum(ours)} (layer_types)",
    )
