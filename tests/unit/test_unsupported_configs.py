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
    ("command", "code"), [(["plan", "--max-length", "2048"], 1), (["plan", "--max-length", "1024"], 0)]
)
def test_plan_rejects_a_length_beyond_the_common_one(command, code, tmp_path, capsys):
    config_of("Qwen3Config", **MIXED).save_pretrained(tmp_path)
    assert main([command[0], str(tmp_path), *command[1:]]) == code
    assert ("layer_types" in capsys.readouterr().err) == bool(code)


def test_training_without_an_engine_has_no_such_limit(tmp_path, capsys):
    config_of("Qwen3Config", **MIXED).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--method", "sft", "--max-length", "2048"]) == 0


@pytest.mark.parametrize(("length", "code"), [(8192, 1), (4096, 0)])
def test_the_check_of_a_run_rejects_a_length_beyond_the_common_one(length, code, tmp_path, capsys):
    config_of("Phi3Config", max_position_embeddings=16384, rope_parameters=LONG | {"short_factor": [1.0] * 48,
        "long_factor": [1.0] * 48,
              "original_max_position_embeddings": 4096}).save_pretrained(tmp_path / "model")  # fmt: skip
    document = {**GOOD, "base": {"model": str(tmp_path / "model")}}
    document["train"] = {**document.get("train", {}), "vllm_max_model_length": length}
    assert main(["train", str(written(tmp_path, document)), "--check"]) == code
    assert ("LongRoPE" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize(
    ("rope", "length", "code"), [({}, 9000, 1), ({}, 8192, 0), ({"rope_type": "yarn", "factor": 4.0}, 9000, 0)]
)
def test_the_check_of_a_run_rejects_a_length_beyond_the_models_positions(rope, length, code, tmp_path, capsys):
    rope = {"rope_parameters": rope | {"rope_theta": 10000.0}} if rope else {}
    config_of("LlamaConfig", max_position_embeddings=8192, **rope).save_pretrained(tmp_path / "model")
    document = {**GOOD, "base": {"model": str(tmp_path / "model")}, "train": {"vllm_max_model_length": length}}
    assert main(["train", str(written(tmp_path, document)), "--check"]) == code
    said = f"vllm_max_model_length={length}, and the model has 8192 positions"
    assert (said in capsys.readouterr().err) == bool(code)


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
    with pytest.raises(
        NotYetSupportedError, match="starting vLLM: with sequences of up to 100 tokens vLLM rotates all"
    ):
        start_options(base, max_model_length=100)
    with pytest.raises(NotYetSupportedError, match="Allow 64 tokens"):
        start_options(base, max_model_len=100)


def test_a_part_of_heads_that_vllm_alone_would_rotate_is_rejected():
    """vLLM takes these names of GPT-NeoX and Phi for any type; published configs of others have them with 1.0."""
    for field in ("rotary_pct", "rotary_emb_fraction"):
        with pytest.raises(NotYetSupportedError, match=f"{field}=0.5"):
            check_function(transformers.LlamaConfig(**{field: 0.5}))
        check_function(transformers.LlamaConfig(**{field: 1.0}))
