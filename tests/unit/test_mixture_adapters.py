"""Where on a mixture of experts an adapter may be, and that every other place gets a verdict with the way out."""

import re
import warnings

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support import MIXTURES, make_model

from qlora_rl import export_adapter, judge_adapter, load_base, prepare_base
from qlora_rl.base.experts import experts_as_linears

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
WAY_OUT = "target_modules=['k_proj', 'o_proj', 'q_proj', 'v_proj']"


def placed(**fields):
    return LoraConfig(r=4, **fields)


# What is asked of PEFT: the verdict, or the beginning of PEFT's own error.
PLACES = {
    "attention": (placed(target_modules=ATTENTION), "adapter"),
    "queries": (placed(target_modules=["q_proj"]), "adapter"),
    "a pattern": (placed(target_modules=r".*self_attn\.[qv]_proj"), "adapter"),
    "one layer": (placed(target_modules=["q_proj"], layers_to_transform=[1]), "adapter"),
    "patterns of ranks": (placed(target_modules=ATTENTION, rank_pattern={"q_proj": 8}), "adapter"),
    "rslora": (placed(target_modules=ATTENTION, use_rslora=True), "adapter"),
    "all-linear": (placed(target_modules="all-linear"), "mixture"),
    "router": (placed(target_modules=["q_proj", "gate"]), "mixture"),
    "router by parameter": (placed(target_modules=["q_proj"], target_parameters=["mlp.gate.weight"]), "mixture"),
    "gate and up": (placed(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]), "mixture"),
    "down": (placed(target_modules=[], target_parameters=["mlp.experts.down_proj"]), "mixture"),
    "saved router": (placed(target_modules=["q_proj"], modules_to_save=["gate"]), "mixture"),
    "saved experts": (placed(target_modules=["q_proj"], modules_to_save=["experts"]), "mixture"),
    "experts as a module": (placed(target_modules=["q_proj", "experts"]), "is not supported"),
    "half of an expert": (placed(target_modules=["q_proj", "gate_proj"]), "without also targeting up_proj"),
    "dora": (placed(target_modules=ATTENTION, use_dora=True), "full_weights"),
    "head": (placed(target_modules=["q_proj", "lm_head"]), "full_weights"),
}


@pytest.mark.parametrize("place", PLACES)
def test_no_placement_of_an_adapter_is_silently_wrong(place, tmp_path_factory):
    config, expected = PLACES[place]
    model = _qwen()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if expected not in ("adapter", "mixture", "full_weights"):
            with pytest.raises(ValueError, match=expected):
                get_peft_model(model, config)
            return
        model = get_peft_model(model, config)
    verdict = judge_adapter(model)
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    if expected == "adapter":
        assert verdict.kind == "adapter", verdict.reasons
        assert all(".self_attn." in name for name in adapted)
        return
    assert verdict.kind == "full_weights"
    assert (WAY_OUT in verdict.reasons[0]) == (expected == "mixture")
    assert ("model.layers.0.mlp" in verdict.reasons[0]) == (expected == "mixture")


MLP = ["gate_proj", "up_proj", "down_proj"]
# How PEFT can be asked for the MLP of layer 0, which has no experts; layer 1 has.
DENSE = {
    "names": placed(target_modules=MLP),
    "with attention": placed(target_modules=["q_proj", *MLP]),
    "one name": placed(target_modules=["down_proj"]),
    "half": placed(target_modules=["gate_proj"]),
    "names of that layer": placed(target_modules=MLP, layers_to_transform=[0]),
    "longer names": placed(target_modules=[f"mlp.{name}" for name in MLP]),
    "whole names": placed(target_modules=[f"model.layers.0.mlp.{name}" for name in MLP]),
    "a pattern": placed(target_modules=r".*layers\.0\.mlp\.(gate|up|down)_proj"),
    "a pattern without the names": placed(target_modules=r".*layers\.0\.mlp\.\w+_proj"),
    "a parameter": placed(target_modules=["q_proj"], target_parameters=["layers.0.mlp.gate_proj.weight"]),
    "all-linear": placed(target_modules="all-linear"),
    "all-linear but experts": placed(target_modules="all-linear", exclude_modules=r".*(experts|mlp\.gate$)"),
}


@pytest.mark.parametrize("form", DENSE)
def test_no_form_puts_an_adapter_silently_elsewhere_than_on_the_mlp_without_experts(form):
    """PEFT 0.21 has none that reaches it. Once it has, docs/mixtures.md is to say so: `test_mixtures.py` has it served exactly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _qwen("qwen3_moe-dense")
        try:
            model = get_peft_model(model, DENSE[form])
        except ValueError:  # PEFT's own: half of a fused matrix, or nothing that it found
            return
    verdict = judge_adapter(model)
    assert verdict.kind == "full_weights"
    assert any(WAY_OUT in reason for reason in verdict.reasons), verdict.reasons


BOTH = r"model\.layers\.(0\.mlp|1\.mlp\.experts\.\d)\.(gate|up|down)_proj"
FIRST = r"model\.layers\.0\.mlp\.(gate|up|down)_proj"
SECOND = r"model\.layers\.1\.mlp\.experts\.\d\.(gate|up|down)_proj"
DOWN = r"model\.layers\.(0\.mlp|1\.mlp\.experts\.\d)\.down_proj"
QUERIES = r"model\.layers\.\d\.self_attn\.q_proj"
# Where experts are linears (4 bits): of layer 0, without experts, and layer 1, with four, a pattern of the names that are adapted and how many
# these are; or the verdict, or PEFT's own error.
ON_LINEARS = {
    "attention": (placed(target_modules=ATTENTION), r"model\.layers\.\d\.self_attn\.[qkvo]_proj", 8),
    "names": (placed(target_modules=MLP), BOTH, 15),
    "with attention": (placed(target_modules=["q_proj", *MLP]), f"{BOTH}|{QUERIES}", 17),
    "all-linear": (placed(target_modules="all-linear"), rf"{BOTH}|model\.layers\.\d\.self_attn\.[qkvo]_proj", 23),
    "one name": (placed(target_modules=["down_proj"]), DOWN, 5),
    "half": (placed(target_modules=["gate_proj"]), BOTH, 5),
    "a pattern of experts": (placed(target_modules=r".*\.experts\.\d+\.(gate|up|down)_proj"), SECOND, 12),
    "one expert": (placed(target_modules=["experts.2.down_proj"]), r"model\.layers\.1\.mlp\.experts\.2\.down_proj", 1),
    "of the layer without": (placed(target_modules=MLP, layers_to_transform=[0]), FIRST, 3),
    "without experts": (placed(target_modules=MLP, exclude_modules=r".*\.experts\..*"), FIRST, 3),
    "patterns of ranks": (placed(target_modules=MLP, rank_pattern={"experts.1.up_proj": 8}), BOTH, 15),
    "rslora": (placed(target_modules=MLP, use_rslora=True), BOTH, 15),
    "dora": (placed(target_modules=MLP, use_dora=True), "full_weights", 0),
    "bias": (placed(target_modules=MLP, lora_bias=True), "refuse", 0),
    "parameters": (placed(target_modules=["q_proj"], target_parameters=["down_proj.weight"]), "full_weights", 0),
    "saved experts": (placed(target_modules=["q_proj"], modules_to_save=["experts"]), "full_weights", 0),
    "saved router": (placed(target_modules=MLP, modules_to_save=["gate"]), "full_weights", 0),
    "router by parameter": (placed(target_modules=MLP, target_parameters=["mlp.gate.weight"]), "full_weights", 0),
    "router": (placed(target_modules=[*MLP, "gate"]), "Qwen3MoeTopKRouter", 0),
    "fused names": (placed(target_modules=["experts.gate_up_proj"]), "not found", 0),
    "experts as a module": (placed(target_modules=["q_proj", "experts"]), "is not supported", 0),
}


@pytest.mark.parametrize("place", ON_LINEARS)
def test_adapters_on_experts_that_are_linears_are_where_they_were_asked_for(place):
    config, expected, count = ON_LINEARS[place]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with experts_as_linears(_config("qwen3_moe-dense")):
            model = _qwen("qwen3_moe-dense")
        if not count and expected not in ("full_weights", "refuse"):
            with pytest.raises(ValueError, match=expected):
                get_peft_model(model, config)
            return
        model = get_peft_model(model, config)
    verdict = judge_adapter(model)
    if not count:
        assert verdict.kind == expected
        return
    assert verdict.kind == "adapter", verdict.reasons
    adapted = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert len(adapted) == count
    assert all(re.fullmatch(rf"base_model\.model\.({expected})", name) for name in adapted)
    assert verdict.on_experts == any(".experts." in name for name in adapted)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert {f"base_model.model.{name}" for name in export_adapter(model).modules} == adapted


def test_a_pattern_of_one_layer_is_taken_by_peft_for_all_and_a_list_is_not():
    for target, expected in ((r".*layers\.1\.self_attn\.q_proj", 2), (["layers.1.self_attn.q_proj"], 1)):
        model = get_peft_model(_qwen(), placed(target_modules=target))
        assert sum(".lora_A" in name for name, _ in model.named_parameters()) == expected
        assert judge_adapter(model)


def _config(architecture="qwen3_moe"):
    name, extra = MIXTURES[architecture]
    shape = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    return getattr(transformers, name)(**shape, num_key_value_heads=1, **extra)


def _qwen(architecture="qwen3_moe"):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(_config(architecture))


@pytest.mark.parametrize("architecture", MIXTURES)
def test_an_adapter_directory_is_judged_as_the_live_model(architecture, tmp_path):
    base = prepare_base(make_model(tmp_path / "model", architecture=architecture, tied=False))
    for name, expected in (("attention", "adapter"), ("all-linear", "full_weights")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(load_base(base), PLACES[name][0])
            model.save_pretrained(tmp_path / name)
        verdict = judge_adapter(tmp_path / name, base=base.path)
        assert verdict.kind == expected, verdict.reasons
