"""MLPs in tiles: outputs and gradients against whole ones, and which models stay whole."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from qlora_rl.base.checkpoint import prepare_base
from qlora_rl.bench.memory import Step
from qlora_rl.bench.shapes import Shape, make_model
from qlora_rl.train.setup.mlp_tiles import tile_mlps

B, T, LAYERS = 2, 50, 2


def small(dtype=torch.float32, **lora):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).to(dtype)
    lora = {"r": 4, "target_modules": "all-linear"} | lora
    model = get_peft_model(model, LoraConfig(**lora))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, 0, 0.05)
    model.gradient_checkpointing_enable()
    return model.train()


def gradients(model):
    torch.manual_seed(1)
    ids = torch.randint(3, 60, (B, T))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    work = tmp_path_factory.mktemp("tiles")
    return prepare_base(make_model(work / "model", Shape(256, 1024, 2, 4, 2), positions=2200), out=work / "base")


@pytest.mark.parametrize("size", [1, 7, 32, 99])
def test_gradients_are_those_of_whole_mlps_up_to_the_order_of_a_sum(size):
    model = small()
    loss, right = gradients(model)
    assert tile_mlps(model.get_base_model(), size) == ""
    tiled_loss, found = gradients(model)
    assert tiled_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == right.keys()
    for name in right:
        assert (found[name] - right[name]).norm() <= 1e-5 * right[name].norm(), name


def test_on_a_4bit_base_under_autocast_only_the_gradients_that_are_sums_of_tiles_differ(base):
    """By the rounding of a product in bfloat16, 2^-8, as each tile has its own."""
    step = Step(base, 2, 300, tiles=False)
    loss = step.run()
    right = {name: p.grad.clone() for name, p in step.trained.items()}
    assert tile_mlps(step.bare, 128) == ""
    assert step.run() == loss
    for name, p in step.trained.items():
        if ".mlp." in name:
            assert (p.grad - right[name]).norm() <= 2**-8 * right[name].norm(), name
        else:
            assert torch.equal(p.grad, right[name]), name


def test_each_tile_is_computed_in_the_forward_pass_and_once_in_the_backward_pass():
    model, calls = small(), []
    tile_mlps(model.get_base_model(), 40)  # tiles of 40, 40 and 20
    model.get_base_model().model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
    gradients(model)
    assert len(calls) == 6


def test_without_gradients_tiles_are_used_too_and_without_checkpointing_only_then():
    model, rows = small(), []
    whole = model(input_ids=torch.ones(B, T, dtype=torch.long)).logits
    tile_mlps(model.get_base_model(), 40)
    model.get_base_model().model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, given, out: rows.append(out.shape[:-1].numel())
    )
    with torch.no_grad():
        assert torch.allclose(model(input_ids=torch.ones(B, T, dtype=torch.long)).logits, whole, atol=1e-5)
    assert rows == [40, 40, 20]
    rows.clear()
    model.gradient_checkpointing_disable()
    gradients(model)
    assert rows == [100]


@pytest.mark.parametrize(
    ("lora", "reason"),
    [
        ({"lora_dropout": 0.1}, "dropout"),
        ({"use_dora": True}, "not plain LoRA"),
        ({"modules_to_save": ["down_proj"], "target_modules": ["q_proj"]}, "more than an adapter"),
    ],
)
def test_what_would_not_be_the_same_stays_whole_and_says_why(lora, reason):
    model = small(**lora)
    before = gradients(model)[1] if "lora_dropout" not in lora else None
    assert reason in tile_mlps(model.get_base_model(), 10)
    if before is not None:
        assert all(torch.equal(before[name], grad) for name, grad in gradients(model)[1].items())


def test_tiles_of_an_earlier_trainer_are_taken_off_first():
    """With dropout, forward and backward of a tile would use other masks."""
    model = small()
    assert tile_mlps(model.get_base_model(), 8) == ""
    bare = model.unload()
    again = get_peft_model(bare, LoraConfig(r=4, target_modules=["down_proj"], lora_dropout=0.5))
    assert "dropout" in tile_mlps(again.get_base_model(), 8)
    assert not any("forward" in vars(layer.mlp) for layer in bare.model.layers)
    assert tile_mlps(small().get_base_model(), 8) == ""


@pytest.mark.parametrize("offload", [False, True])
def test_the_estimate_knows_tiles_and_layer_inputs(base, offload):
    step = Step(base, 1, 2100, offload=offload)
    step.run()
    measured, planned = step.measure(), step.planned()
    for line in ("activations", "one layer's work"):
        assert planned[line] == pytest.approx(measured[line], rel=0.05), line
    assert measured["peak"] <= planned["peak"] <= 1.1 * measured["peak"]
