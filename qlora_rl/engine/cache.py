"""How large a KV cache must be."""

from __future__ import annotations

import math
from typing import Any


def kv_cache_needed(config: Any, length: int, sequences: int) -> float:
    """What `sequences` of full `length` need, in GiB (blocks of 128 tokens): at least 1/16, at most 4 or what one of
    them needs."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = 4 if str(config.dtype).endswith("float32") else 2
    per_token = 2 * config.num_hidden_layers * kv_heads * head * width
    one = per_token * 128 * (math.ceil(length / 128) + 1) / 2**30
    return min(max(4.0, one), max(1 / 16, one * (sequences + 1)))


def advice(error: Exception) -> str:
    """For vLLM's error that the KV cache holds no sequence of full length: our names of what it wants changed."""
    if "gpu_memory_utilization" not in str(error):
        return ""
    return (
        " Here: lower max_model_length (vllm_max_model_length of a trainer's config), or raise kv_cache_gib (in "
        "its engine_options)."
    )
