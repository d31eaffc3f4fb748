"""Where on a mixture of experts an adapter may be, and that every other place gets a verdict with the way out."""

import json
import re
import warnings

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support import MIXTURES, make_model

from qlora_rl import bake_base, export_adapter, judge_adapter, load_base, prepare_base
from qlora_rl.base.experts import experts_as_linears

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
WAY_OUT = "target_modules=['k_proj', 'o_proj', 'q_proj', 'v_proj']"


QUERIES = r"model\.layers\.\d\.self_attn\.q_proj"
OF_ATTENTION = r"model\.layers\.\d\.self_attn\.[qkvo]_proj"
# What is asked of PEFT: a pattern of the names that are adapted; or the verdict, or PEFT's own error.
PLACES = {
    "attention": ({"target_modules": ATTENTION}, OF_ATTENTION),
    "queries": ({"target_modules": ["q_proj"]}, QUERIES),
    "a pattern": ({"target_modules": r".*self_attn\.[qv]_proj"}, r"model\.layers\.\d\.self_attn\.[qv]_proj"),
    "one layer": ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, r"model\.layers\.1\.self_attn\.q_proj"),
    "patterns of ranks": ({"target_modules": ATTENTION, "rank_pattern": {"q_proj": 8}}, OF_ATTENTION),
    "rslora": ({"target_modules": ATTENTION, "use_rslora": True}, OF_ATTENTION),
    "all-linear": ({"target_modules": "all-linear"}, "mixture"),
    "router": ({"target_modules": ["q_proj", "gate"]}, "mixture"),
    "router by parameter": ({"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}, "mixture"),
    "gate and up": ({"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]}, "mixture"),
    "down": ({"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}, "mixture"),
    "saved router": ({"target_modules": ["q_proj"], "modules_to_save": ["gate"]}, "mixture"),
    "saved experts": ({"target_modules": ["q_proj"], "modules_to_save": ["experts"]}, "mixture"),
    "experts as a module": ({"target_modules": ["q_proj", "experts"]}, "is not supported"),
    "dora": ({"target_modules": ATTENTION, "use_dora": True}, "full_weights"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "full_weights"),
}
# PEFT turns names of an expert's matrices into the fused ones, where it knows them.
HALF = {"qwen3_moe": "gate_proj", "olmoe": "gate_proj", "mixtral": "w1"}


@pytest.mark.parametrize("architecture", HALF)
def test_half_of_a_fused_matrix_is_an_error_of_peft(architecture):
    with pytest.raises(ValueError, match="without also targeting"):
        get_peft_model(_model(architecture), LoraConfig(r=4, target_modules=["q_proj", HALF[architecture]]))


@pytest.mark.parametrize("architecture", HALF)
@pytest.mark.parametrize("place", PLACES)
def test_no_placement_of_an_adapter_is_silently_wrong(place, architecture):
    fields, expected = PLACES[place]
    config, model = LoraConfig(r=4, **fields), _model(architecture)
    linears = _linears(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if expected == "is not supported":
            with pytest.raises(ValueError, match=expected):
                get_peft_model(model, config)
            return
        model = get_peft_model(model, config)
    verdict = judge_adapter(model)
    if expected not in ("mixture", "full_weights"):
        assert verdict.kind == "adapter", verdict.reasons
        assert verdict.rank == (8 if config.rank_pattern else 4)
        assert _adapted(model) == _matching(expected, linears)
        return
    assert verdict.kind == "full_weights"
    assert (WAY_OUT in verdict.reasons[0]) == (expected == "mixture")
    assert ("model.layers.0.mlp" in verdict.reasons[0]) == (expected == "mixture")


def _linears(model):
    return {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def _matching(pattern, linears):
    found = {f"base_model.model.{name}" for name in linears if re.fullmatch(pattern, name)}
    assert found
    return found


def _adapted(model):
    return {name.split(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}


MLP = ["gate_proj", "up_proj", "down_proj"]
# How PEFT can be asked for the MLP of layer 0, which has no experts; layer 1 has.
DENSE = {
    "names": dict(target_modules=MLP),
    "with attention": dict(target_modules=["q_proj", *MLP]),
    "one name": dict(target_modules=["down_proj"]),
    "half": dict(target_modules=["gate_proj"]),
    "names of that layer": dict(target_modules=MLP, layers_to_transform=[0]),
    "longer names": dict(target_modules=[f"mlp.{name}" for name in MLP]),
    "whole names": dict(target_modules=[f"model.layers.0.mlp.{name}" for name in MLP]),
    "a pattern": dict(target_modules=r".*layers\.0\.mlp\.(gate|up|down)_proj"),
    "a pattern without the names": dict(target_modules=r".*layers\.0\.mlp\.\w+_proj"),
    "a parameter": dict(target_modules=["q_proj"], target_parameters=["layers.0.mlp.gate_proj.weight"]),
    "all-linear": dict(target_modules="all-linear"),
    "all-linear but experts": dict(target_modules="all-linear", exclude_modules=r".*(experts|mlp\.gate$)"),
}


@pytest.mark.parametrize("form", DENSE)
def test_no_form_puts_an_adapter_silently_elsewhere_than_on_the_mlp_without_experts(form):
    """PEFT 0.21 has none that reaches it. Once it has, docs/mixtures.md is to say so: `test_mixtures.py` has it served
    exactly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, config = _model("qwen3_moe-dense"), LoraConfig(r=4, **DENSE[form])
        try:
            model = get_peft_model(model, config)
        except ValueError:  # PEFT's own: half of a fused matrix, or nothing that it found
            return
    verdict = judge_adapter(model)
    assert verdict.kind == "full_weights"
    assert any(WAY_OUT in reason for reason in verdict.reasons), verdict.reasons


# Where experts are linears (4 bits): a pattern of the names that are adapted; or the verdict, or PEFT's own error.
MATRIX = "(gate_proj|up_proj|down_proj)"
ALL = rf"model\.layers\.\d\.mlp\.(experts\.\d\.)?{MATRIX}"
ON_LINEARS = {
    "attention": (dict(target_modules=ATTENTION), OF_ATTENTION),
    "names": (dict(target_modules=MLP), ALL),
    "with attention": (dict(target_modules=["q_proj", *MLP]), f"{ALL}|{QUERIES}"),
    "all-linear": (dict(target_modules="all-linear"), f"{ALL}|{OF_ATTENTION}"),
    "one name": (dict(target_modules=["down_proj"]), r"model\.layers\.\d\.mlp\..*down_proj"),
    "half": (dict(target_modules=["gate_proj"]), r"model\.layers\.\d\.mlp\..*gate_proj"),
    "a pattern of experts": (
        dict(target_modules=rf".*\.experts\.\d+\.{MATRIX}"),
        rf"model\.layers\.\d\.mlp\.experts\.\d\.{MATRIX}",
    ),
    "one expert": (dict(target_modules=["experts.2.down_proj"]), r"model\.layers\.\d\.mlp\.experts\.2\.down_proj"),
    "one layer": (dict(target_modules=MLP, layers_to_transform=[0]),
    rf"model\.layers\.0\.mlp\.(experts\.\d\.)?{MATRIX}"),
    "without experts": (dict(target_modules=MLP, exclude_modules=r".*\.experts\..*"),
    rf"model\.layers\.0\.mlp\.{MATRIX}"),
    "patterns of ranks": (dict(target_modules=MLP, rank_pattern={"experts.1.up_proj": 8}), ALL),
    "rslora": (dict(target_modules=MLP, use_rslora=True), ALL),
    "dora": (dict(target_modules=MLP, use_dora=True), "full_weights"),
    "bias": (dict(target_modules=MLP, lora_bias=True), "reject"),
    "parameters": (dict(target_modules=["q_proj"], target_parameters=["down_proj.weight"]), "full_weights"),
    "saved experts": (dict(target_modules=["q_proj"], modules_to_save=["experts"]), "full_weights"),
    "saved router": (dict(target_modules=MLP, modules_to_save=["gate"]), "full_weights"),
    "router by parameter": (dict(target_modules=MLP, target_parameters=["mlp.gate.weight"]), "full_weights"),
    "router": (dict(target_modules=[*MLP, "gate"]), ValueError("TopKRouter")),
    "fused names": (dict(target_modules=["experts.gate_up_proj"]), ValueError("not found")),
    "experts as a module": (dict(target_modules=["q_proj", "experts"]), ValueError("is not supported")),
}  # fmt: skip
# Layer 0 of the first has no experts. The order of the names is gate_proj's, up_proj's and down_proj's.
EXPERTS = {"qwen3_moe-dense": 4, "olmoe": 2 * 8, "mixtral": 2 * 4}
NAMES = {"qwen3_moe-dense": MLP, "olmoe": MLP, "mixtral": ["w1", "w3", "w2"]}


@pytest.mark.parametrize("architecture", NAMES)
@pytest.mark.parametrize("place", ON_LINEARS)
def test_adapters_on_experts_that_are_linears_are_where_they_were_asked_for(place, architecture):
    fields, expected = ON_LINEARS[place]
    config = LoraConfig(r=4, **_named(fields, architecture))
    if place == "without experts" and architecture != "qwen3_moe-dense":
        expected = ValueError("No modules were targeted")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with experts_as_linears(_config(architecture)):
            model = _model(architecture)
        linears = _linears(model)
        assert sum(".experts." in name for name in linears) == 3 * EXPERTS[architecture]
        if isinstance(expected, ValueError):
            with pytest.raises(ValueError, match=str(expected)):
                get_peft_model(model, config)
            return
        model = get_peft_model(model, config)
    verdict = judge_adapter(model)
    if expected in ("full_weights", "reject"):
        assert verdict.kind == expected
        return
    assert verdict.kind == "adapter", verdict.reasons
    assert verdict.rank == (8 if config.rank_pattern else 4)
    wanted = _matching(_named(expected, architecture), linears)
    assert _adapted(model) == wanted
    assert verdict.on_experts == any(".experts." in name for name in wanted)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    assert {f"base_model.model.{name}" for name in export_adapter(model).modules} == wanted


def _named(fields, architecture):
    """With the architecture's own names of an expert's matrices."""
    text = json.dumps(fields)
    for name, own in zip(MLP, NAMES[architecture], strict=True):
        text = re.sub(rf"\b{name}\b", own, text)
    return json.loads(text)


def test_a_pattern_of_one_layer_is_taken_by_peft_for_all_and_a_list_is_not():
    for target, expected in ((r".*layers\.1\.self_attn\.q_proj", 2), (["layers.1.self_attn.q_proj"], 1)):
        model = get_peft_model(_model("qwen3_moe"), LoraConfig(r=4, target_modules=target))
        assert sum(".lora_A" in name for name, _ in model.named_parameters()) == expected
        assert judge_adapter(model)


def _config(architecture):
    name, extra = MIXTURES[architecture]
    shape = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    return getattr(transformers, name)(**shape | {"intermediate_size": 48, "num_key_value_heads": 1} | extra)


def _model(architecture):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(_config(architecture))


@pytest.mark.parametrize("architecture", MIXTURES)
def test_an_adapter_directory_is_judged_as_the_live_model(architecture, tmp_path):
    base = prepare_base(make_model(tmp_path / "model", architecture=architecture, tied=False))
    for name, expected in (("attention", "adapter"), ("all-linear", "full_weights")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(load_base(base), LoraConfig(r=4, **PLACES[name][0]))
            model.save_pretrained(tmp_path / name)
        verdict = judge_adapter(tmp_path / name, base=base.path)
        assert verdict.kind == expected, verdict.reasons


@pytest.mark.parametrize("architecture", ["olmoe", "mixtral"])
def test_an_adapter_on_single_experts_is_no_adapter_of_a_base_whose_experts_are_fused(architecture, tmp_path):
    source = make_model(tmp_path / "model", architecture=architecture, tied=False)
    packed = prepare_base(source, quantize_experts=True, out=tmp_path / "packed")
    fused = prepare_base(source, out=tmp_path / "fused")
    baked = bake_base(packed, "float32", out=tmp_path / "baked")
    for place in ("with attention", "a pattern of experts", "half", "one expert"):
        config = LoraConfig(r=4, **_named(ON_LINEARS[place][0], architecture))
        get_peft_model(load_base(packed), config).save_pretrained(tmp_path / "adapter")
        assert judge_adapter(tmp_path / "adapter", base=packed.path).kind == "adapter"
        for base, way_out in ((fused, "with quantize_experts=True"), (baked, "Serve it on the 4-bit base")):
            verdict = judge_adapter(tmp_path / "adapter", base=base.path)
            assert verdict.kind == "full_weights"
            assert way_out in verdict.reasons[0]
