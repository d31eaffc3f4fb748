"""Configs on both sides: tiny random models in float32, and how far apart transformers (the trainer) and vLLM find the
tokens of a sequence.

`python benchmarks/configs.py` writes results/configs.json; three quarters of an hour on two cores. `--only NAME ...`:
these rows alone, printed. The trainer's side and the engine's are processes of their own, as vLLM changes the classes
of transformers that it runs itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.experts import NAMINGS
from qlora_rl.base.unsupported_configs import COMPARED, check_function
from qlora_rl.errors import NotYetSupportedError

RESULTS = Path(__file__).parent / "results" / "configs.json"
LENGTHS = (8, 64, 200, 400)
POSITIONS, ORIGINAL, WINDOW = 512, 128, 48
# Largest mean difference, in nats, of two float32 sides that compute one function: most are 1e-5 apart; a hundredth of
# what bf16 makes of one function.
EQUAL = 5e-4
# Engines of one process.
TOGETHER = 40

_SHAPE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDING = ["sliding_attention", "full_attention"] * 2
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_LATE = ["full_attention"] * 2 + ["sliding_attention"] * 2


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


_YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
_LLAMA3 = _YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [2.0 + i / 2 for i in range(16)],
    "original_max_position_embeddings": ORIGINAL,
}
_MIXTURE = {"targets": None, "head_dim": 32, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}  # fmt: skip
_OLMOE = {"targets": None, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False, "rms_norm_eps": 1e-5}

# (name, config class, fields); `length` is the engine's, `targets` are the modules with an adapter: all linears, or
# `None` where vLLM takes none.
CONFIGS: list[tuple[str, str, dict[str, Any]]] = [
    # --- as models.toml names them
    ("llama", "LlamaConfig", {}),
    ("mistral", "MistralConfig", {"sliding_window": None}),
    ("qwen2", "Qwen2Config", {}),
    ("qwen3", "Qwen3Config", {"head_dim": 64}),
    ("gemma2", "Gemma2Config", {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True}),
    ("gemma3_text", "Gemma3TextConfig", {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True}),
    ("phi3", "Phi3Config", {}),
    ("granite", "GraniteConfig", {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0}),
    ("olmo2", "Olmo2Config", {}),
    ("smollm3", "SmolLM3Config", {}),
    # --- further architectures
    ("olmo", "OlmoConfig", {}),
    ("olmo3", "Olmo3Config", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
    ("gemma", "GemmaConfig", {"head_dim": 64, "tie_word_embeddings": True}),
    ("vaultgemma", "VaultGemmaConfig", {"head_dim": 32, "sliding_window": WINDOW}),
    ("phi", "PhiConfig", {"num_key_value_heads": 4, "intermediate_size": 512}),
    ("glm", "GlmConfig", {"head_dim": 32, "targets": _ATTENTION}),
    ("glm4", "Glm4Config", {"head_dim": 32, "targets": _ATTENTION}),
    ("cohere", "CohereConfig", {"tie_word_embeddings": True}),
    ("cohere2", "Cohere2Config", {"tie_word_embeddings": True, "sliding_window": POSITIONS, "layer_types": _SLIDING}),
    ("exaone4", "Exaone4Config", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
    ("exaone4, no window", "Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    ("nemotron", "NemotronConfig", {"head_dim": 32}),
    ("stablelm", "StableLmConfig", {"targets": None}),
    ("apertus", "ApertusConfig", {}),
    ("arcee", "ArceeConfig", {}),
    ("seed_oss", "SeedOssConfig", {"head_dim": 32}),
    ("ernie4_5", "Ernie4_5Config", {"head_dim": 32}),
    ("starcoder2", "Starcoder2Config", {"sliding_window": None}),
    ("helium", "HeliumConfig", {"head_dim": 32}),
    ("hunyuan_v1_dense", "HunYuanDenseV1Config", {"head_dim": 32}),
    ("ministral3", "Ministral3Config", {"head_dim": 32}),
    ("ministral", "MinistralConfig", {"head_dim": 32, "sliding_window": WINDOW, "layer_types": _SLIDING}),
    ("jais2", "Jais2Config", {"head_dim": 32}),
    ("hyperclovax", "HyperCLOVAXConfig", {}),
    ("cwm", "CwmConfig", {"sliding_window": WINDOW, "layer_types": _SLIDING, "head_dim": 32}),
    ("granite_swa", "GraniteSWAConfig", {"sliding_window": WINDOW}),
    ("gptj", "GPTJConfig", {"targets": None, "rotary_dim": 16}),
    ("bloom", "BloomConfig", {"targets": None, "tie_word_embeddings": True}),
    ("falcon", "FalconConfig", {"targets": None, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("bitnet", "BitNetConfig", {}),
    ("nanochat", "NanoChatConfig", {}),
    # --- heads, biases, norms
    ("llama: biases, head_dim", "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 64, "rms_norm_eps": 1e-3}),
    ("llama: tied, one key head", "LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("llama: pretraining_tp 2", "LlamaConfig", {"pretraining_tp": 2}),
    ("llama: attention_dropout", "LlamaConfig", {"attention_dropout": 0.5}),
    ("llama: gelu", "LlamaConfig", {"hidden_act": "gelu"}),
    ("qwen2: head_dim", "Qwen2Config", {"head_dim": 64}),
    ("qwen3: gelu", "Qwen3Config", {"head_dim": 32, "hidden_act": "gelu"}),
    ("qwen3: biases", "Qwen3Config", {"head_dim": 32, "attention_bias": True, "rms_norm_eps": 1e-3}),
    ("gemma: gelu", "GemmaConfig", {"head_dim": 32, "tie_word_embeddings": True, "hidden_activation": "gelu"}),
    ("gemma: hidden_act gelu", "GemmaConfig", {"head_dim": 32, "tie_word_embeddings": True, "hidden_act": "gelu"}),
    ("gemma: silu", "GemmaConfig", {"head_dim": 32, "tie_word_embeddings": True, "hidden_act": "silu"}),
    ("gemma: untied", "GemmaConfig", {"head_dim": 32, "tie_word_embeddings": False}),
    ("gemma: biases", "GemmaConfig", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
    ("gemma2: silu", "Gemma2Config", {"head_dim": 32, "tie_word_embeddings": True, "hidden_activation": "silu"}),
    ("gemma2: untied", "Gemma2Config", {"head_dim": 32, "tie_word_embeddings": False}),
    ("gemma2: softcaps, scalar, biases", "Gemma2Config", {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True, "attn_logit_softcapping": 5.0,
                               "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, "attention_bias": True}),
    ("gemma2: no softcaps", "Gemma2Config", {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True, "attn_logit_softcapping": None,
                               "final_logit_softcapping": None}),
    ("gemma2: layer types", "Gemma2Config", {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True, "layer_types": _LATE}),
    ("gemma3: silu", "Gemma3TextConfig", {"head_dim": 32, "tie_word_embeddings": True, "hidden_activation": "silu"}),
    ("gemma3: untied", "Gemma3TextConfig", {"head_dim": 32, "tie_word_embeddings": False}),
    ("gemma3: scalar, biases, cap", "Gemma3TextConfig", {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True, "query_pre_attn_scalar": 8,
                               "attention_bias": True, "final_logit_softcapping": 3.0, "layer_types": _SLIDING}),
    ("gemma3: attention softcap", "Gemma3TextConfig", {"head_dim": 32, "tie_word_embeddings": True, "attn_logit_softcapping": 5.0}),
    ("gemma3: both directions", "Gemma3TextConfig", {"head_dim": 32, "tie_word_embeddings": True, "use_bidirectional_attention": True}),
    ("phi3: partial rotary", "Phi3Config", _rope("default", partial_rotary_factor=0.5)),
    ("phi: qk_layernorm", "PhiConfig", {"num_key_value_heads": 4, "intermediate_size": 512, "qk_layernorm": True}),
    ("phi: intermediate_size", "PhiConfig", {"num_key_value_heads": 4}),
    ("phi: fewer key heads", "PhiConfig", {"intermediate_size": 512}),
    ("granite: gelu", "GraniteConfig", {"hidden_act": "gelu"}),
    ("granite: biases", "GraniteConfig", {"attention_bias": True, "mlp_bias": True}),
    ("granite: tied", "GraniteConfig", {"tie_word_embeddings": True, "logits_scaling": 4.0}),
    ("olmo: clip_qkv", "OlmoConfig", {"clip_qkv": 1.0}),
    ("olmo: gelu", "OlmoConfig", {"hidden_act": "gelu"}),
    ("olmo2: gelu, biases", "Olmo2Config", {"hidden_act": "gelu", "attention_bias": True}),
    ("olmo3: no window", "Olmo3Config", {"layer_types": ["full_attention"] * 4}),
    ("smollm3: no_rope_layers", "SmolLM3Config", {"no_rope_layers": [1, 0, 0, 1]}),
    ("smollm3: gelu, biases", "SmolLM3Config", {"hidden_act": "gelu", "attention_bias": True, "mlp_bias": True}),
    ("cohere: logit_scale", "CohereConfig", {"tie_word_embeddings": True, "logit_scale": 0.5}),
    ("cohere: qk norm", "CohereConfig", {"tie_word_embeddings": True, "use_qk_norm": True}),
    ("cohere: biases", "CohereConfig", {"tie_word_embeddings": True, "attention_bias": True}),
    ("cohere: gelu", "CohereConfig", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
    ("cohere: untied", "CohereConfig", {"tie_word_embeddings": False}),
    ("cohere2: window", "Cohere2Config", {"tie_word_embeddings": True, "sliding_window": WINDOW, "layer_types": _SLIDING}),
    ("cohere2: gelu", "Cohere2Config", {"tie_word_embeddings": True, "sliding_window": POSITIONS, "layer_types": _SLIDING, "hidden_act": "gelu"}),
    ("nemotron: gelu", "NemotronConfig", {"head_dim": 32, "hidden_act": "gelu"}),
    ("nemotron: biases", "NemotronConfig", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    ("nemotron: partial rotary", "NemotronConfig", {"head_dim": 32, **_rope("default", partial_rotary_factor=1.0)}),
    ("stablelm: gelu", "StableLmConfig", {"targets": None, "hidden_act": "gelu"}),
    ("stablelm: parallel residual", "StableLmConfig", {"targets": None, "use_parallel_residual": True}),
    ("stablelm: qk norm", "StableLmConfig", {"targets": None, "qk_layernorm": True}),
    ("stablelm: qkv bias", "StableLmConfig", {"targets": None, "use_qkv_bias": True}),
    ("arcee: gelu", "ArceeConfig", {"hidden_act": "gelu"}),
    ("arcee: biases", "ArceeConfig", {"attention_bias": True, "mlp_bias": True}),
    ("seed_oss: no qkv bias", "SeedOssConfig", {"head_dim": 32, "attention_bias": False}),
    ("seed_oss: all biases", "SeedOssConfig", {"head_dim": 32, "attention_out_bias": True, "mlp_bias": True}),
    ("ernie4_5: bias", "Ernie4_5Config", {"head_dim": 32, "use_bias": True}),
    ("glm: biases", "GlmConfig", {"head_dim": 32, "targets": _ATTENTION, "attention_bias": True}),
    ("glm: full rotary", "GlmConfig", {"head_dim": 32, "targets": _ATTENTION, **_rope("default", partial_rotary_factor=1.0)}),
    ("hunyuan: gelu, biases", "HunYuanDenseV1Config", {"head_dim": 32, "hidden_act": "gelu", "attention_bias": True}),
    ("hyperclovax: multipliers, post norm", "HyperCLOVAXConfig", {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                               "logits_scaling": 2.0, "use_post_norm": True}),
    # --- ropes
    ("llama: linear", "LlamaConfig", _rope("linear", factor=4.0)),
    ("llama: dynamic", "LlamaConfig", _rope("dynamic", factor=4.0)),
    ("llama: dynamic, original", "LlamaConfig", _rope("dynamic", factor=4.0, original_max_position_embeddings=ORIGINAL)),
    ("llama: yarn", "LlamaConfig", _rope("yarn", **_YARN)),
    ("llama: yarn, truncate", "LlamaConfig", _rope("yarn", **_YARN, truncate=False)),
    ("llama: yarn, attention_factor", "LlamaConfig", _rope("yarn", **_YARN, attention_factor=0.7)),
    ("llama: yarn, mscale", "LlamaConfig", _rope("yarn", **_YARN, mscale=1.0, mscale_all_dim=0.5)),
    ("llama: yarn, mscale alone", "LlamaConfig", _rope("yarn", **_YARN, mscale=0.7)),
    ("llama: yarn, betas", "LlamaConfig", _rope("yarn", **_YARN, beta_fast=8.0, beta_slow=2.0)),
    ("llama: yarn, other factor", "LlamaConfig", _rope("yarn", factor=2.0, original_max_position_embeddings=ORIGINAL)),
    ("llama: yarn, no original", "LlamaConfig", _rope("yarn", factor=4.0)),
    ("llama: llama3", "LlamaConfig", _rope("llama3", **_LLAMA3)),
    ("llama: longrope within", "LlamaConfig", _rope("longrope", **_LONG) | {"length": ORIGINAL}),
    ("llama: partial rotary", "LlamaConfig", _rope("default", partial_rotary_factor=0.5)),
    ("llama: partial rotary field", "LlamaConfig", {"partial_rotary_factor": 0.5}),
    ("qwen3: yarn", "Qwen3Config", {"head_dim": 32, **_rope("yarn", **_YARN)}),
    ("qwen3: partial rotary", "Qwen3Config", {"head_dim": 32, **_rope("default", partial_rotary_factor=0.5)}),
    ("mistral: partial rotary", "MistralConfig", {"sliding_window": None, **_rope("default", partial_rotary_factor=0.5)}),
    ("phi3: longrope within", "Phi3Config", _rope("longrope", **_LONG) | {"original_max_position_embeddings": ORIGINAL, "length": ORIGINAL}),
    ("phi3: longrope beyond", "Phi3Config", _rope("longrope", **_LONG) | {"original_max_position_embeddings": ORIGINAL}),
    ("phi3: longrope, mscales", "Phi3Config", _rope("longrope", **_LONG, short_mscale=1.1, long_mscale=1.2)
                               | {"original_max_position_embeddings": ORIGINAL, "length": ORIGINAL}),
    ("phi3: longrope, attention_factor", "Phi3Config", _rope("longrope", **_LONG, attention_factor=0.8)
                               | {"original_max_position_embeddings": ORIGINAL, "length": ORIGINAL}),
    ("phi3: longrope, factor", "Phi3Config", _rope("longrope", **_LONG, factor=32.0)
                               | {"original_max_position_embeddings": ORIGINAL, "length": ORIGINAL}),
    ("gemma3: linear on full layers", "Gemma3TextConfig", {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True, "layer_types": _SLIDING,
                               "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                                   "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    ("gemma2: yarn", "Gemma2Config", {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True, **_rope("yarn", **_YARN)}),
    ("exaone4: llama3", "Exaone4Config", {"sliding_window": WINDOW, "layer_types": _SLIDING, **_rope("llama3", **_LLAMA3)}),
    ("ministral3: yarn, llama 4 scaling", "Ministral3Config", {"head_dim": 32, **_rope("yarn", **_YARN, llama_4_scaling_beta=0.1)}),
    ("starcoder2: yarn", "Starcoder2Config", {"sliding_window": None, **_rope("yarn", **_YARN)}),
    ("smollm3: yarn", "SmolLM3Config", _rope("yarn", **_YARN)),
    ("seed_oss: yarn", "SeedOssConfig", {"head_dim": 32, **_rope("yarn", **_YARN)}),
    ("cohere: linear", "CohereConfig", {"tie_word_embeddings": True, **_rope("linear", factor=4.0)}),
    # --- windows and kinds of layers
    ("mistral: window", "MistralConfig", {"sliding_window": WINDOW}),
    ("llama: sliding_window", "LlamaConfig", {"sliding_window": WINDOW}),
    ("llama: layer types", "LlamaConfig", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
    ("phi3: window", "Phi3Config", {"sliding_window": WINDOW}),
    ("qwen2: window", "Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}),
    ("qwen2: max_window_layers", "Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    ("qwen2: window unused", "Qwen2Config", {"use_sliding_window": False, "sliding_window": WINDOW}),
    ("qwen2: window on no layer", "Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4}),
    ("qwen3: window", "Qwen3Config", {"head_dim": 32, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}),
    ("qwen3: layer types", "Qwen3Config", {"head_dim": 32, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4, "layer_types": _SLIDING}),
    ("qwen3: max_window_layers", "Qwen3Config", {"head_dim": 32, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    ("starcoder2: window", "Starcoder2Config", {"sliding_window": WINDOW}),
    ("smollm3: layer types", "SmolLM3Config", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _SLIDING}),
    ("ministral3: window", "Ministral3Config", {"head_dim": 32, "sliding_window": WINDOW}),
    ("hunyuan: window", "HunYuanDenseV1Config", {"head_dim": 32, "sliding_window": WINDOW}),
    ("seed_oss: window", "SeedOssConfig", {"head_dim": 32, "sliding_window": WINDOW}),
    ("granite: window", "GraniteConfig", {"sliding_window": WINDOW}),
    ("apertus: gelu", "ApertusConfig", {"hidden_act": "gelu"}),
    # --- further forms of the same types
    ("falcon: 7b", "FalconConfig", {"targets": None, "alibi": False, "multi_query": True, "parallel_attn": True}),
    ("falcon: 11b", "FalconConfig", {"targets": None, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("falcon: rw", "FalconConfig", {"targets": None, "hidden_size": 512, "num_attention_heads": 16, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("falcon: one after the other", "FalconConfig", {"targets": None, "alibi": False, "multi_query": False, "parallel_attn": False, "bias": True}),
    ("vaultgemma: softcaps, scalar", "VaultGemmaConfig", {"head_dim": 32, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0,
                               "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0}),
    ("phi3: longrope, partial rotary", "Phi3Config", _rope("longrope", **_LONG | {"short_factor": _LONG["short_factor"][:12],
                               "long_factor": _LONG["long_factor"][:12]}, partial_rotary_factor=0.75)
                               | {"original_max_position_embeddings": ORIGINAL, "length": ORIGINAL}),
    ("olmo3: yarn on full layers", "Olmo3Config", {"sliding_window": WINDOW, "layer_types": _SLIDING,
                               "rope_parameters": {"full_attention": _rope("yarn", **_YARN)["rope_parameters"],
                                                   "sliding_attention": _rope("default")["rope_parameters"]}}),
    ("cwm: llama3", "CwmConfig", {"sliding_window": WINDOW, "layer_types": _SLIDING, "head_dim": 32, **_rope("llama3", **_LLAMA3)}),
    ("hunyuan: dynamic, alpha", "HunYuanDenseV1Config", {"head_dim": 32, **_rope("dynamic", factor=1.0, alpha=1000.0)}),
    ("mixtral: window", "MixtralConfig", _MIXTURE | {"sliding_window": WINDOW}),
    ("qwen3_moe: window", "Qwen3MoeConfig", _MIXTURE | {"use_sliding_window": True, "sliding_window": WINDOW}),
    # --- what one side alone reads
    ("falcon: relu", "FalconConfig", {"targets": None, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "activation": "relu"}),
    ("falcon: ffn_hidden_size", "FalconConfig", {"targets": None, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 256}),
    ("gemma: both directions", "GemmaConfig", {"head_dim": 32, "tie_word_embeddings": True, "use_bidirectional_attention": True}),
    ("gemma2: both directions", "Gemma2Config", {"head_dim": 32, "tie_word_embeddings": True, "attn_logit_softcapping": None, "use_bidirectional_attention": True}),
    ("phi: head_dim", "PhiConfig", {"num_key_value_heads": 4, "intermediate_size": 512, "head_dim": 64}),
    ("phi: n_inner", "PhiConfig", {"num_key_value_heads": 4, "intermediate_size": 512, "n_inner": 256}),
    ("olmoe: biases", "OlmoeConfig", _OLMOE | {"attention_bias": True}),
    ("olmoe: window", "OlmoeConfig", _OLMOE | {"sliding_window": WINDOW}),
    ("olmoe: partial rotary", "OlmoeConfig", _OLMOE | _rope("default", partial_rotary_factor=0.5)),
    ("mixtral: partial rotary", "MixtralConfig", _MIXTURE | _rope("default", partial_rotary_factor=0.5)),
    ("qwen3_moe: partial rotary", "Qwen3MoeConfig", _MIXTURE | _rope("default", partial_rotary_factor=0.5)),
    ("qwen2: dual chunk", "Qwen2Config", {"dual_chunk_attention_config": {"chunk_size": 256, "local_size": 64}}),
    ("qwen2: qk_norm", "Qwen2Config", {"qk_norm": True}),
    ("llama: dynamic, alpha", "LlamaConfig", _rope("dynamic", factor=1.0, alpha=1000.0)),
    ("llama: both directions", "LlamaConfig", {"is_causal": False}),
    ("llama: bias", "LlamaConfig", {"bias": True}),
    ("llama: qkv_bias", "LlamaConfig", {"qkv_bias": True}),
    ("mistral: biases", "MistralConfig", {"sliding_window": None, "attention_bias": True, "mlp_bias": True}),
    ("stablelm: norm_eps", "StableLmConfig", {"targets": None, "norm_eps": 0.1}),
    ("cohere: rms_norm_eps", "CohereConfig", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    ("cohere2: qk norm", "Cohere2Config", {"tie_word_embeddings": True, "sliding_window": POSITIONS, "layer_types": _SLIDING, "use_qk_norm": True}),
    ("olmo: final softcap", "OlmoConfig", {"final_logit_softcapping": 3.0}),
    ("nanochat: attention softcap", "NanoChatConfig", {"attn_logit_softcapping": 5.0}),
    ("jais2: interleaved window", "Jais2Config", {"head_dim": 32, "interleaved_sliding_window": WINDOW}),
    ("granite: layer types", "GraniteConfig", {"sliding_window": WINDOW, "layer_types": _SLIDING}),
]  # fmt: skip
# One change of several types.
for _change, _fields, _types in (
    ("layer types", {"sliding_window": WINDOW, "layer_types": _SLIDING},
     "arcee bitnet ernie4_5 glm helium hunyuan_v1_dense nanochat olmo olmo2 phi3 starcoder2"),
    ("logit_scale", {"logit_scale": 0.5},
     "apertus arcee ernie4_5 exaone4 glm granite hyperclovax jais2 llama nemotron olmo"),
):  # fmt: skip
    CONFIGS += [
        (f"{name}: {_change}", kind, fields | _fields) for name, kind, fields in CONFIGS if name in _types.split()
    ]


def make(kind: str, fields: dict[str, Any], out: Path) -> Any:
    """A random model in float32 whose attention is neither flat nor a single token, with norms and biases that are no
    ones and zeros."""
    import transformers

    from qlora_rl.demo.tiny_model import make_tokenizer

    torch.manual_seed(0)
    config = getattr(transformers, kind)(**_SHAPE | fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                sharp = any(part in name for part in ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn"))
                wide = "embed" in name or "wte" in name or "wpe" in name or "head" in name
                parameter.normal_(0, 0.15 if sharp else 0.3 if wide else 0.08)
            else:
                at = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
                plain = 0.0 if "bias" in name else at * parameter.mean().clamp(0, 1)  # Gemma's norms add their one
                parameter.copy_(
                    (plain + torch.randn_like(parameter) * 0.1).bfloat16()
                )  # Apertus' activation is held so
    model.save_pretrained(out)
    make_tokenizer().save_pretrained(out)
    return config


def sequences(length: int, vocabulary: int) -> list[list[int]]:
    """Random ids of all lengths that fit."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS if n <= length]


@torch.no_grad()
def trained_side(name: str, work: Path) -> None:
    """Make base and adapter, and what the trainer computes with them."""
    from peft import LoraConfig, get_peft_model

    from qlora_rl import load_base, prepare_base
    from qlora_rl.adapter.export import export_adapter
    from qlora_rl.adapter.store import write_adapter

    kind, fields, length, targets = _settings(name)
    config = make(kind, fields, work / "model")
    base = prepare_base(work / "model", "none", compute_dtype="float32", out=work / "base")
    softcapped = getattr(config, "attn_logit_softcapping", None) is not None
    model = load_base(base, attn_implementation="eager" if softcapped else None).eval()
    asked = sequences(length, config.vocab_size)
    found = {"length": length, "sequences": asked, "bare": [_logprobs(model, ids) for ids in asked]}
    if targets is not None:
        torch.manual_seed(2)
        lora = LoraConfig(r=8, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        adapted = get_peft_model(model, lora)
        found["adapted"] = [_logprobs(adapted.eval(), ids) for ids in asked]
        (work / "adapter").mkdir(exist_ok=True)
        write_adapter(export_adapter(adapted), work / "adapter")
    (work / "trainer.json").write_text(json.dumps(found))


def _logprobs(model: Any, ids: list[int]) -> list[float]:
    given = torch.tensor([ids])
    logits_TV = model(given, use_cache=False).logits[0].float()
    return logits_TV.log_softmax(-1)[:-1].gather(1, given[0, 1:, None])[:, 0].tolist()


def engine_side(work: Path) -> None:
    """What vLLM computes with the same base and adapter."""
    from qlora_rl import LocalEngine

    told = json.loads((work / "trainer.json").read_text())
    options = {
        "max_model_length": told["length"],
        "max_num_seqs": 4,
        "kv_cache_gib": 0.25,
        "max_num_batched_tokens": 1024,
    }
    takes = "adapted" in told
    with LocalEngine(work / "base", max_lora_rank=8 if takes else 0, **options) as engine:
        found = {"bare": engine.score(told["sequences"])}
        if takes:
            engine.load_adapter(work / "adapter", 1)
            found["adapted"] = engine.score(told["sequences"])
    (work / "engine.json").write_text(json.dumps(found))


def _each(side: str, names: list[str], root: Path) -> None:
    """One side of several configs in this process; an error is kept, and the next one begins."""
    _without_check()
    if side == "engine":
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda ask: ask()  # a process for each architecture, 20 s of imports
    for name in names:
        work = _place(name, root)
        work.mkdir(exist_ok=True)
        try:
            trained_side(name, work) if side == "trainer" else engine_side(work)
        except BaseException as error:
            (work / f"{side}.error").write_text(f"{type(error).__name__}: {error}")
            traceback.print_exc()
            if not isinstance(error, Exception):
                raise


def _without_check() -> None:
    """What the package would reject is compared here all the same."""
    from qlora_rl.base import checkpoint
    from qlora_rl.engine import options

    for module in (checkpoint, options):
        module.check_function = lambda *_, **__: None


def rejection(kind: str, fields: dict[str, Any], length: int) -> tuple[str, str]:
    """The sentence with which the package rejects a config for an engine of this length, empty where it takes it; and
    the type of model."""
    import transformers

    config = getattr(transformers, kind)(**_SHAPE | fields)
    try:
        check_function(config, length)
    except NotYetSupportedError as error:
        return str(error), config.model_type
    return "", config.model_type


def _settings(name: str) -> tuple[str, dict[str, Any], int, Any]:
    """(config class, its fields, length of the engine, modules with an adapter)."""
    _, kind, told = next(row for row in CONFIGS if row[0] == name)
    fields = dict(told)
    return kind, fields, fields.pop("length", POSITIONS), fields.pop("targets", "all-linear")


def _place(name: str, root: Path) -> Path:
    return root / re.sub(r"[^a-z0-9_]+", "-", name)


def row_of(name: str, root: Path) -> dict[str, Any]:
    """Largest and mean differences by length, and the verdict."""
    kind, fields, length, _ = _settings(name)
    work = _place(name, root)
    row: dict[str, Any] = {"config": kind, "fields": _SHAPE | fields, "length": length}
    answers = [work / f"{side}.json" for side in ("trainer", "engine")]
    if all(answer.is_file() for answer in answers):
        ours, theirs = (json.loads(answer.read_text()) for answer in answers)
        for way in theirs:
            apart = [(torch.tensor(a) - torch.tensor(b)).abs() for a, b in zip(ours[way], theirs[way], strict=True)]
            row[way] = {str(len(ids)): float(each.mean()) for ids, each in zip(ours["sequences"], apart, strict=True)}
            row[f"{way}_max"] = max(float(each.max()) for each in apart)
    else:
        said = [file.read_text() for side in ("trainer", "engine") if (file := work / f"{side}.error").is_file()]
        row["error"] = " ".join((said or ["the process ended"])[0].split())[:300].replace(str(work), "BASE")
    largest = max((mean for way in ("bare", "adapted") for mean in row.get(way, {}).values()), default=None)
    sentence, model_type = rejection(kind, fields, length)
    if sentence:
        row |= {"verdict": "rejected", "sentence": sentence}
    elif model_type not in COMPARED | NAMINGS.keys():
        row["verdict"] = "taken with a warning"
    else:
        row["verdict"] = "error" if largest is None else "equal" if largest <= EQUAL else "different"
    return row


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these rows, printed and not written")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, help="keep models and answers here; what is there is not computed again")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.only or [row[0] for row in CONFIGS]
    with tempfile.TemporaryDirectory() as made:
        root = arguments.work or Path(made)
        root.mkdir(exist_ok=True)
        if arguments.child:
            _each(arguments.child[0], arguments.child[1:], root)
            return
        for side in ("trainer", "engine"):
            missing = [n for n in names if not list((_place(n, root)).glob(f"{side}.*"))]
            if side == "engine":
                missing = [n for n in missing if (_place(n, root) / "trainer.json").is_file()]
            for start in range(0, len(missing), TOGETHER):
                command = [
                    sys.executable,
                    __file__,
                    "--work",
                    str(root),
                    "--child",
                    side,
                    *missing[start : start + TOGETHER],
                ]
                with open(root / "log", "a") as log:
                    subprocess.run(
                        command,
                        stdout=log,
                        stderr=log,
                        env=os.environ | {"VLLM_LOGGING_LEVEL": "WARNING"},
                        timeout=1800,
                    )
                for name in missing[start : start + TOGETHER]:
                    if side == "engine":
                        print(
                            name,
                            json.dumps({k: v for k, v in row_of(name, root).items() if k not in ("config", "fields")}),
                            flush=True,
                        )
        rows = {name: row_of(name, root) for name in names}
    if arguments.only:
        print(json.dumps(rows, indent=1))
        return
    arguments.json.write_text(json.dumps({"equal": EQUAL, "lengths": LENGTHS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
