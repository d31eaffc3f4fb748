"""Configs of which vLLM computes another function than transformers: rejected, or sampled up to a length. No engine."""

import json
import re
from pathlib import Path

import pytest
import transformers
from runfile import GOOD, written
from support import make_model

from qlora_rl import prepare_base
from qlora_rl.base.unsupported_configs import check_function, engine_positions, function_limit
from qlora_rl.cli import main
from qlora_rl.engine.options import start_options
from qlora_rl.errors import NotYetSupportedError

ROWS = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "configs.json").read_text())["rows"]
SHAPE = {"num_hidden_layers": 4, "max_position_embeddings": 4096}
MIXED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": 1024,
    "max_window_layers": 4,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 64,
}


def config_of(name, **fields):
    return getattr(transformers, name)(**SHAPE | fields)


def test_the_compared_configs_are_equal_or_rejected():
    assert len(ROWS) >= 60
    assert {row["verdict"] for row in ROWS.values()} <= {"equal", "rejected", "taken with a warning"}


@pytest.mark.parametrize("name", ROWS)
def test_the_rule_is_what_the_comparison_has_found(name):
    row = ROWS[name]
    config, length = getattr(transformers, row["config"])(**row["fields"]), row["length"]
    if row["verdict"] == "rejected":
        with pytest.raises(NotYetSupportedError, match=re.escape(row["sentence"])):
            check_function(config, length)
    else:
        check_function(config, length)


@pytest.mark.parametrize(
    ("kind", "fields", "length"),
    [
        ("LlamaConfig", {}, None),
        ("LlamaConfig", {"rope_parameters": LONG, "head_dim": 32}, 64),
        ("LlamaConfig", {"sliding_window": 32}, 32),
        ("Qwen3Config", MIXED, 1024),
        ("Qwen3Config", MIXED | {"use_sliding_window": False}, None),
        ("Qwen3Config", MIXED | {"sliding_window": 4096}, None),
        ("Qwen3Config", MIXED | {"layer_types": ["sliding_attention"] * 4}, None),
        ("Qwen2Config", MIXED, 1024),
        ("MistralConfig", {"sliding_window": 32}, None),
        ("MistralConfig", {"sliding_window": 32, "layer_types": MIXED["layer_types"]}, 32),
        ("Gemma2Config", {"sliding_window": 32}, None),
        ("Gemma3TextConfig", {"sliding_window": 32}, None),
        ("Olmo3Config", {"sliding_window": 32}, None),
        ("Cohere2Config", {"sliding_window": 32}, 32),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, 4096),
    ],
)
def test_up_to_which_length_both_sides_are_one_function(kind, fields, length):
    config = config_of(kind, **fields)
    limit = function_limit(config)
    assert (limit and limit.length) == length
    assert engine_positions(config) == (length or 4096)
    check_function(config)
    check_function(config, engine_positions(config))
    if length is not None:
        with pytest.raises(NotYetSupportedError, match=f"Allow {length} tokens at most"):
            check_function(config, length + 1)


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("GemmaConfig", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}},
            "partial_rotary_factor=0.5"),
        ("CohereConfig", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("Qwen3Config", {"attention_bias": True}, "attention_bias=True"),
        ("PhiConfig", {"intermediate_size": 128}, "intermediate_size=128"),
        ("Qwen2Config", {"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}},
            "Take the field out of config.json"),
    ],
)  # fmt: skip
def test_prepare_rejects_what_vllm_would_compute_otherwise(kind, fields, said, tmp_path, capsys):
    config_of(kind, **fields).save_pretrained(tmp_path / "model")
    assert main(["prepare", str(tmp_path / "model"), str(tmp_path / "base")]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "another function" in error
    assert "Traceback" not in error
    assert not (tmp_path / "base").exists()
    for command in ("plan", "recommend"):
        assert main([command, str(tmp_path / "model")]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code"),
    [(["--max-length", "2048"], 1), (["--max-length", "1024"], 0), (["--method", "sft", "--max-length", "2048"], 0)],
    ids=["beyond", "within", "without an engine"],
)
def test_plan_rejects_a_length_beyond_the_common_one(options, code, tmp_path, capsys):
    config_of("Qwen3Config", **MIXED).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), *options]) == code
    assert ("layer_types" in capsys.readouterr().err) == bool(code)


PHI = {"max_position_embeddings": 16384, "rope_parameters": LONG | {"short_factor": [1.0] * 48,
       "long_factor": [1.0] * 48, "original_max_position_embeddings": 4096}}  # fmt: skip
LLAMA = {"max_position_embeddings": 8192}
YARN = LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("kind", "fields", "length", "said"),
    [
        ("Phi3Config", PHI, 8192, "LongRoPE"),
        ("Phi3Config", PHI, 4096, None),
        ("LlamaConfig", LLAMA, 9000, "vllm_max_model_length=9000, and the model has 8192 positions"),
        ("LlamaConfig", LLAMA, 8192, None),
        ("LlamaConfig", YARN, 9000, None),
    ],
)
def test_the_check_of_a_run_rejects_a_length_beyond_the_common_one_and_the_models_own(
    kind, fields, length, said, tmp_path, capsys
):
    config_of(kind, **fields).save_pretrained(tmp_path / "model")
    document = {**GOOD, "base": {"model": str(tmp_path / "model")}, "train": {"vllm_max_model_length": length}}
    assert main(["train", str(written(tmp_path, document)), "--check"]) == bool(said)
    error = capsys.readouterr().err
    assert said in error if said else "LongRoPE" not in error and "positions" not in error


@pytest.mark.parametrize("task", ["grpo", "sft"])
def test_recommend_keeps_a_longrope_model_within_its_original_length(task, capsys):
    assert main(["recommend", "microsoft/Phi-3.5-mini-instruct", "--max-length", "8192", "--task", task]) == 0
    said = capsys.readouterr().out
    assert ("vllm_max_model_length = 4096" in said and "not 8192: beyond, vLLM rotates" in said) == (task == "grpo")
    assert ("max_length = 8192" in said) == (task == "sft")


def test_an_engine_gets_the_common_length_and_no_longer_one(tmp_path):
    base = prepare_base(
        make_model(tmp_path / "model", architecture="llama", rope_parameters=LONG), out=tmp_path / "base"
    )
    assert start_options(base).max_model_length == 64
    assert start_options(base, max_model_length=32).max_model_length == 32
    for name in ("max_model_length", "max_model_len"):
        with pytest.raises(NotYetSupportedError, match="64 tokens"):
            start_options(base, **{name: 100})


def test_a_part_of_heads_that_vllm_alone_would_rotate_is_rejected():
    """vLLM takes these names of GPT-NeoX and Phi for any type; published configs of others have them with 1.0."""
    for field in ("rotary_pct", "rotary_emb_fraction"):
        with pytest.raises(NotYetSupportedError, match=f"{field}=0.5"):
            check_function(transformers.LlamaConfig(**{field: 0.5}))
        check_function(transformers.LlamaConfig(**{field: 1.0}))
