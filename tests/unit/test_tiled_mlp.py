"""MLPs and norms in tiles: outputs and gradients against whole ones, and which MLPs stay whole."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from support import program
from torch.nn import Linear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from qlora_rl.adapter.inspected import shorten_lora
from qlora_rl.base.checkpoint import prepare_base
from qlora_rl.cpu_features import processor
from qlora_rl.memory.lines import MLP_LINEARS
from qlora_rl.train.setup.linears import Coded, apply_linears, has_kernel
from qlora_rl.train.setup.tiled_mlp import _Tiled, tile_layers

Step = program("benchmarks/live_memory.py").Step
shapes = program("benchmarks/shapes.py")
Shape, make_model = shapes.Shape, shapes.make_model

B, T, LAYERS = 2, 50, 2


def small(kind="qwen2", dtype=torch.float32, **lora):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
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
    assert tile_layers(model.get_base_model(), size) == ""
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
    assert tile_layers(step.bare, 128) == ""
    assert step.run() == loss
    for name, p in step.trained.items():
        if ".mlp." in name:
            assert (p.grad - right[name]).norm() <= 2**-8 * right[name].norm(), name
        else:
            assert torch.equal(p.grad, right[name]), name


def with_counts(step):
    """Gradients of a step, and how often each kind of linear computed its product."""
    counts, forward, multiply = Counter(), Linear4bit.forward, Coded.multiply
    names = {
        module: name.split(".")[-2] for name, module in step.bare.named_modules() if isinstance(module, Linear4bit)
    }
    by_codes = {module.weight.data_ptr(): name for module, name in names.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear4bit, "forward", lambda self, x: counts.update([names[self]]) or forward(self, x))
        own = "multiply", lambda self, x: counts.update([by_codes[self.codes.data_ptr()]]) or multiply(self, x)
        patch.setattr(Coded, *own)
        step.run()
    return {name: p.grad.clone() for name, p in step.trained.items()}, counts


@pytest.mark.parametrize("coded", [False, True])
def test_an_mlp_that_is_computed_again_leaves_its_last_product_out(base, monkeypatch, coded):
    """The gradients keep their bits, as nobody reads what it would give; also with the linears of a trainer on a CPU,
    which keep their forward."""
    step = Step(base, 2, 300, tiles=False)
    if coded:
        apply_linears(step.bare)
    linears = [module for module in step.bare.modules() if has_kernel(module)]
    assert bool(linears) is (coded and bool(processor().codes_kernel))
    assert tile_layers(step.bare, 128) == ""
    found, counts = with_counts(step)
    monkeypatch.setattr(_Tiled, "again", _Tiled.whole)
    right, more = with_counts(step)
    assert all(torch.equal(found[name], right[name]) for name in right)
    tiles = 5 * LAYERS
    assert (counts["gate_proj"], counts["down_proj"]) == (2 * tiles, tiles)
    assert (more["gate_proj"], more["down_proj"]) == (2 * tiles, 2 * tiles)
    assert all(has_kernel(linear) for linear in linears)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("targets", ["all-linear", ["gate_proj"]])
def test_so_it_is_with_linears_in_16_bits_whose_adapter_may_be_elsewhere(targets, autocast, monkeypatch):
    model = small("qwen2", torch.bfloat16, target_modules=targets)
    tile_layers(model.get_base_model(), 32)
    results = []
    for again in (_Tiled.again, _Tiled.whole):
        monkeypatch.setattr(_Tiled, "again", again)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(gradients(model)[1])
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[1])


def test_an_mlp_that_does_more_with_its_last_product_computes_it():
    model = small(target_modules=["gate_proj", "down_proj"])
    for layer in model.get_base_model().model.layers:
        whole = layer.mlp.forward
        layer.mlp.forward = lambda x, whole=whole: torch.tanh(whole(x))
    _, right = gradients(model)
    tile_layers(model.get_base_model(), 32)
    _, found = gradients(model)
    for name in right:
        assert (found[name] - right[name]).norm() <= 1e-5 * right[name].norm(), name


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "olmo2", "mixtral"])
def test_norms_in_tiles_have_the_bits_of_whole_ones(kind):
    """Over the hidden size, over a head, over all heads; before and behind attention and MLP; and where there is no MLP
    to tile.

    In 16 bits: in float32 nothing is converted, and autograd adds up the parts of a gradient in another order.
    """
    model = small(kind, torch.bfloat16, target_modules=["q_proj", "o_proj"])
    loss, right = gradients(model)
    norms = {name: module for name, module in model.named_modules() if type(module).__name__.endswith("Norm")}
    tile_layers(model.get_base_model(), 40)
    for name, module in model.named_modules():
        if name.endswith("mlp") and "forward" in vars(module):
            module.forward.take_off()
    tiles = Counter()
    for name, norm in norms.items():
        whole = norm.forward._whole
        norm.forward._whole = lambda x, name=name, whole=whole: tiles.update([name]) or whole(x)
    found_loss, found = gradients(model)
    assert found_loss == loss
    assert all(torch.equal(found[name], right[name]) for name in right)
    assert tiles.keys() == norms.keys()
    # Forward, computed again by checkpointing, and once more for the gradients: tiles of 40, 40 and 20 tokens.
    assert set(tiles.values()) <= {3 * 2, 3 * 3}, tiles


def test_a_norm_that_is_trained_stays_whole():
    model = small(modules_to_save=["norm"], target_modules=["q_proj"])
    tile_layers(model.get_base_model(), 10)
    tiled = [module for module in model.modules() if "forward" in vars(module)]
    assert tiled, "those that PEFT keeps beside the trained ones"
    assert not any(p.requires_grad for module in tiled for p in module.parameters())


def test_a_norm_that_peft_copies_and_trains_brings_no_layer_with_it_and_stays_whole_from_then_on():
    model = small(target_modules=["q_proj"])
    bare = model.get_base_model()
    tile_layers(bare, 10)
    again = get_peft_model(model.unload(), LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]))
    trained = [
        m
        for m in again.modules()
        if any(p.requires_grad for p in m.parameters(recurse=False)) and "Norm" in type(m).__name__
    ]
    assert len(trained) == 2 * LAYERS + 1
    for norm in trained:
        assert norm.forward._module is norm
        assert norm.forward._layer in bare.modules(), "the layer itself, not a copy of it"
    tile_layers(again.get_base_model(), 10)
    assert not any("forward" in vars(norm) for norm in trained)
    whole = copy.deepcopy(bare)
    assert not any(m.forward._layer in set(bare.modules()) for m in whole.modules() if "forward" in vars(m))


def test_a_tile_is_that_of_the_text_model_whatever_other_norms_there_are():
    model = small()
    bare = model.get_base_model()
    bare.model.layers[0].wide = torch.nn.LayerNorm(4096).requires_grad_(False)
    tile_layers(bare, 10)
    assert bare.model.layers[0].input_layernorm.forward.rows(torch.zeros(1, 1, 64)) == 10
    assert bare.model.layers[0].wide.forward.rows(torch.zeros(1, 1, 4096)) == 1


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_an_mlp_that_hands_a_rate_to_a_function_stays_whole(rate):
    """Seed-OSS drops without a layer of dropout, by a mask that each tile would sample anew."""
    config = AutoConfig.for_model(
        "seed_oss",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        residual_dropout=rate,
        attention_dropout=0.0,
    )
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    assert tile_layers(model, 32) == ("dropout would be sampled again for each tile" if rate else "")


@pytest.mark.parametrize("lora", [{"lora_dropout": 0.1}, {"use_dora": True}])
def test_with_dropout_or_dora_a_linear_lifts_its_input_as_peft_does(lora):
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        inner = torch.nn.Sequential(Linear(64, 64, bias=False, dtype=torch.bfloat16))
        model = get_peft_model(inner, LoraConfig(target_modules=["0"], r=4, **lora))
        if ours:
            shorten_lora(model)
        torch.manual_seed(1)
        for p in model.parameters():
            if p.requires_grad:
                p.data = torch.randn_like(p, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(model(torch.randn(5, 64, dtype=torch.bfloat16)))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "options", [{"lora_alpha": 8}, {"lora_alpha": 3}, {"lora_bias": True, "bias": "none"}], ids=str
)
@pytest.mark.parametrize("kind", [Linear, Linear4bit])
def test_an_adapted_linear_keeps_its_input_itself_under_autocast_with_the_same_bits(kind, options):
    torch.manual_seed(0)
    inner = kind(64, 64, bias=False, **({} if kind is Linear else {"compute_dtype": torch.bfloat16}))
    whole = torch.nn.Sequential(inner.to("cpu", torch.bfloat16))
    whole.is_loaded_in_4bit = kind is Linear4bit  # as transformers says it; PEFT then has a layer of its own
    model = get_peft_model(whole, LoraConfig(target_modules=["0"], r=4, **options))
    for p in model.parameters():
        if p.requires_grad:
            p.data = torch.randn_like(p, dtype=torch.float32)
    x = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)

    def run():
        model.zero_grad()
        x.grad, saved = None, []
        with torch.autocast("cpu", torch.bfloat16):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
                out = model(x)
        out.float().square().sum().backward()
        return [out, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)], x.data_ptr() in saved

    class Passes(TorchDispatchMode):
        """Scales and copies of [5, 64], the linear's output; B is [64, 4]."""

        count = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            out = operator(*args, **kwargs or {})
            is_pass = operator in (torch.ops.aten.mul.Tensor, torch.ops.aten.clone.default)
            self.count += is_pass and out.shape == (5, 64) and out.dtype == torch.bfloat16
            return out

    alone = model(x)
    with Passes() as before:
        right, was_kept = run()
    shorten_lora(model)
    with Passes() as after:
        found, is_kept = run()
    assert (was_kept, is_kept) == (False, True)
    assert before.count == 2 + (kind is Linear4bit)
    assert after.count == (0 if options == {"lora_alpha": 8} else 2)
    assert all(map(torch.equal, found, right))
    assert torch.equal(model(x), alone), "without autocast PEFT converts as it did"
    again = pickle.loads(pickle.dumps(model.base_model.model[0]))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(again(x), found[0])


def watch(model, rows):
    """Note the tokens that the first MLP works on at a time."""
    function = model.get_base_model().model.layers[0].mlp.act_fn
    own = function.forward
    function.forward = lambda x: rows.append(x.shape[:-1].numel()) or own(x)


def test_a_hook_of_a_weight_is_called_once_with_the_gradient_of_all_tiles():
    model, seen = small(), []
    parts = model.get_base_model().model.layers[0].mlp
    halved, after, other = (getattr(parts, name).lora_B.default.weight for name in MLP_LINEARS)
    right = gradients(model)[1]
    names = {p: n for n, p in model.named_parameters()}
    tile_layers(model.get_base_model(), 40)
    handle = halved.register_hook(lambda gradient: seen.append(gradient) or gradient / 2)

    def halve(p):
        p.grad /= 2

    after.register_post_accumulate_grad_hook(halve)
    found = gradients(model)[1]
    assert len(seen) == 1
    for weight, part in ((halved, 0.5), (after, 0.5), (other, 1)):
        wanted = part * right[names[weight]]
        assert (found[names[weight]] - wanted).norm() <= 1e-5 * wanted.norm()
    handle.remove()
    assert (gradients(model)[1][names[halved]] - right[names[halved]]).norm() <= 1e-5 * right[names[halved]].norm()
    assert len(seen) == 1


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_an_mlp_with_hooks_within_stays_whole_and_one_with_hooks_of_its_own_does_not(kind):
    model, rows, seen = small(), [], []
    tile_layers(model.get_base_model(), 40)
    watch(model, rows)
    mlp = model.get_base_model().model.layers[0].mlp
    getattr(mlp, f"register_{kind}")(lambda module, *given: seen.append(given[-1]))
    gradients(model)
    assert max(rows) == 40
    handle = getattr(mlp.up_proj, f"register_{kind}")(lambda *_: None)
    rows.clear()
    gradients(model)
    assert set(rows) == {100}
    handle.remove()
    rows.clear()
    gradients(model)
    assert max(rows) == 40
    whole = [each[0] if isinstance(each, tuple) else each for each in seen]
    assert {each.shape[:-1].numel() for each in whole} == {100}


def test_each_tile_is_computed_in_the_forward_pass_and_once_in_the_backward_pass():
    model, calls = small(), []
    tile_layers(model.get_base_model(), 40)  # tiles of 40, 40 and 20
    watch(model, calls)
    gradients(model)
    assert calls == [40, 40, 20, 40, 40, 20]


def test_without_gradients_tiles_are_used_too_and_without_checkpointing_only_then():
    model, rows = small(), []
    whole = model(input_ids=torch.ones(B, T, dtype=torch.long)).logits
    tile_layers(model.get_base_model(), 40)
    watch(model, rows)
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
    assert reason in tile_layers(model.get_base_model(), 10)
    assert not any("forward" in vars(layer.mlp) for layer in model.get_base_model().model.layers)
    if before is not None:  # norms still work in tiles, which in float32 changes the order of a sum of three
        for name, gradient in gradients(model)[1].items():
            assert (gradient - before[name]).norm() <= 1e-5 * before[name].norm(), name


def test_tiles_of_an_earlier_trainer_are_taken_off_first():
    """With dropout, forward and backward of a tile would use other masks."""
    model = small()
    assert tile_layers(model.get_base_model(), 8) == ""
    bare = model.unload()
    again = get_peft_model(bare, LoraConfig(r=4, target_modules=["down_proj"], lora_dropout=0.5))
    assert "dropout" in tile_layers(again.get_base_model(), 8)
    assert not any("forward" in vars(layer.mlp) for layer in bare.model.layers)
    assert tile_layers(small().get_base_model(), 8) == ""
