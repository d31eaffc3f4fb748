"""How large a KV cache must be."""

from __future__ import annotations

import math
from typing import Any


def kv_cache_needed(config: Any, length: int, sequences: int) -> float:
    """What `sequences` of full `length` need, in GiB (2-byte elements, blocks of 128 tokens), at most 4, at least 1/16."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = 4 if str(config.dtype).endswith("float32") else 2
    per_token = 2 * config.num_hidden_layers * kv_heads * head * width
    blocks = math.ceil(length / 128) + 1
    return min(4.0, max(1 / 16, per_token * 128 * blocks * (sequences + 1) / 2**30))
