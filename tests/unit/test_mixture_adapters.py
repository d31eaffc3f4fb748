"""Where on a mixture of experts an adapter may be, and that every other place gets a verdict with the way out."""

import warnings

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support import MIXTURES, make_model

from qlora_rl import judge_adapter, load_base, prepare_base

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


def _qwen():
    torch.manual_seed(0)
    name, extra = MIXTURES["qwen3_moe"]
    shape = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    config = getattr(transformers, name)(**shape, num_key_value_heads=1, **extra)
    return transformers.AutoModelForCausalLM.from_config(config)


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
