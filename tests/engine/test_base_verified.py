"""The base inside real vLLM: read, compared, repaired."""

import json
import os

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import FULL_MATRIX, MATRIX, command, make_model, quantised_in_flight, randomise, score

from qlora_rl import (
    AdapterSync,
    BaseMismatchError,
    Canary,
    EngineUnsupportedError,
    LocalEngine,
    compare,
    fingerprint_base,
    load_base,
    prepare_base,
    verify_base,
)
from qlora_rl.sync.transports import transport_for


def check(tmp_path, architecture, tied, kv_heads, quant, double, blocksize, skip):
    source = make_model(tmp_path / "model", architecture=architecture, tied=tied, kv_heads=kv_heads)
    base = prepare_base(source, quant, double_quant=double, blocksize=blocksize, skip_modules=skip)
    model = load_base(base)
    with LocalEngine(base, max_lora_rank=8, max_model_length=32, max_num_seqs=4, repair_scales=False) as engine:
        as_loaded = compare(fingerprint_base(model), engine.describe_base())
        assert as_loaded.state == ("repairable" if double and quant != "none" else "equal"), as_loaded.entries[:3]
        base_check = verify_base(model, engine)
        assert base_check.is_verified
        assert set(base_check.repaired) == set(as_loaded.modules)
        quantised = [n for n, leaf in base_check.ours.leaves.items() if leaf.kind in ("nf4", "fp4")]
        skipped = [name for name in base_check.ours.leaves if base.spec.skips(name.removesuffix(".weight"))]
        assert len(quantised) == (0 if quant == "none" else 14 - len(skipped))
        if double and quant != "none":
            assert set(base_check.repaired) <= set(quantised)
            # An offset may happen to be a bf16 number: seen for one of fourteen weights.
            assert len(base_check.repaired) >= len(quantised) - 2
        prompts = [[40, 41, 42, 43, 44, 45]] * 4
        rollout = engine.generate(prompts, max_tokens=8, seed=1)
        assert score(model, prompts, rollout).mean() < 0.02


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: f"{case[0]}-{case[3]}")
def test_both_sides_agree_on_what_the_base_is(tmp_path, case):
    check(tmp_path, *case)


@pytest.mark.full  # an engine for each of many cases; by default six
@pytest.mark.parametrize("case", FULL_MATRIX, ids=lambda case: "-".join(map(str, case)))
def test_both_sides_agree_on_the_whole_matrix(tmp_path, case):
    check(tmp_path, *case)


@pytest.mark.parametrize("kind", ["glm4", "glm", "published"])
def test_fused_linears_and_skipped_ones_are_held_and_adapted_alike(tmp_path, kind):
    """GLM's gate_up_proj is one linear in checkpoints too; a published 4-bit checkpoint leaves some MLPs as they
    were."""
    source = make_model(tmp_path / "model", architecture="llama" if kind == "published" else kind, tied=False)
    if kind == "published":
        source = quantised_in_flight(source, tmp_path / "published", "lm_head", "model.layers.1.mlp")
    check_adapted(prepare_base(source, "none" if kind == "glm" else "nf4"))


def test_a_calibrated_base_is_verified_and_pushed_to_like_any_other(model_dir, tmp_path):
    base = prepare_base(
        model_dir, calibrate=["The quick brown fox jumps over the lazy dog. " * 4], out=tmp_path / "base"
    )
    check_adapted(base)


def check_adapted(base):
    """Both sides hold it, and adapters that are pushed in two ways."""
    prompts = [[40, 41, 42, 43, 44, 45]] * 4
    with LocalEngine(base, max_lora_rank=8, max_model_length=32, max_num_seqs=8) as engine:
        model = load_base(base)
        assert verify_base(model, engine).is_verified
        assert score(model, prompts, engine.generate(prompts, max_tokens=8, seed=1)).mean() < 0.02
        adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        for seed, transport in enumerate(("in_place", "directory")):
            randomise(adapted, seed=seed)
            sync = AdapterSync(adapted, engine, transport_for(transport), Canary(adapted, engine))
            sync.push()  # the canary compares what each linear holds, and the logprobs
            assert score(adapted, prompts, engine.generate(prompts, max_tokens=8, seed=1)).mean() < 0.02
            sync.close()


def test_a_fused_linear_whose_parts_vllm_names_is_said_in_a_sentence(tmp_path, monkeypatch):
    """As in a server that others have started: its worker is not ours."""
    base = prepare_base(make_model(tmp_path / "model", architecture="glm4", tied=False))
    from vllm.model_executor.models.glm4 import Glm4ForCausalLM

    with LocalEngine(base, max_model_length=32, max_num_seqs=4, repair_scales=False) as engine:
        theirs = Glm4ForCausalLM.packed_modules_mapping | {"gate_up_proj": ["gate_proj", "up_proj"]}
        monkeypatch.setattr(Glm4ForCausalLM, "packed_modules_mapping", theirs)
        with pytest.raises(EngineUnsupportedError, match="gate_up_proj"):
            engine.describe_base()


def test_after_the_repair_the_dequantised_weights_are_equal(base, engine):
    import bitsandbytes.functional as functional

    model = load_base(base)
    verify_base(model, engine)
    runner = engine.llm.llm_engine.model_executor.driver_worker.model_runner
    compared = 0
    for name, parameter in runner.get_model().named_parameters():
        states = getattr(parameter, "bnb_quant_state", None)
        if states is None:
            continue
        offsets = parameter.bnb_shard_offsets.tolist()
        path = name.replace(".base_layer.weight", "").removesuffix(".weight")
        parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
        parent, _, own = path.rpartition(".")
        for i, part in enumerate(parts.get(own, [own])):
            ours = model.get_submodule(f"{parent}.{part}").weight
            theirs = functional.dequantize_4bit(parameter.data[offsets[i] : offsets[i + 1]], states[i])
            assert torch.equal(functional.dequantize_4bit(ours.data, ours.quant_state), theirs.to(torch.bfloat16))
            compared += 1
    assert compared == 14


def test_an_engine_that_quantised_in_flight_is_rejected(model_dir):
    model = load_base(prepare_base(model_dir, "fp4", double_quant=False))
    with LocalEngine(
        prepare_base(model_dir, "none"), max_model_length=32, max_num_seqs=4, quantization="bitsandbytes"
    ) as engine:
        with pytest.raises(BaseMismatchError) as caught:
            verify_base(model, engine)
    text = str(caught.value)
    assert "type differ (ours fp4, theirs nf4)" in text
    assert "vLLM's own in-flight quantisation is always NF4 with double quantisation" in text


@pytest.mark.parametrize("what", ["codes", "values"])
def test_one_flipped_bit_inside_vllm_is_named(model_dir, what):
    base = prepare_base(model_dir)
    with LocalEngine(base, max_model_length=32, max_num_seqs=4) as engine:
        assert verify_base(load_base(base), engine).repaired == {}  # alone, the engine repairs itself
        model = engine.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
        wanted = "layers.1.mlp.gate_up_proj" if what == "codes" else "layers.0.input_layernorm"
        parameter = next(p for n, p in model.named_parameters() if wanted in n)
        parameter.data.view(torch.uint8).flatten()[5] ^= 64
        with pytest.raises(BaseMismatchError) as caught:
            verify_base(load_base(base), engine)
    name = "model.layers.1.mlp.gate_proj.weight" if what == "codes" else "model.layers.0.input_layernorm.weight"
    assert caught.value.module == name
    assert f"{what} differ" in str(caught.value)


def verify(*arguments):
    return command("verify", *arguments, environment=os.environ)


def test_verify_repairs_and_says_how_much(base):
    done = verify(base, "--local", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["state"] == "equal"
    assert found["repaired"] == 14
    assert 0 < found["largest_relative_error"] < 0.1
    assert [apart["tokens"] for apart in found["function"]] == [65, 127]
    done = verify(base, "--local", "--json", "--as-loaded")
    assert (done.returncode, json.loads(done.stdout)["state"]) == (1, "repairable")
    assert json.loads(done.stdout)["repaired"] == 0


def test_verify_tells_a_damaged_base_from_one_that_it_cannot_judge(base, tmp_path):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(base.path, broken)
    weights = broken / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-7] ^= 2
    weights.write_bytes(data)
    done = verify(broken, "--local")
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr + done.stdout
    assert verify(tmp_path / "nothing", "--local").returncode == 2
