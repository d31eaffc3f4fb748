"""Starts of an adapter that PEFT would change the base for: here it stays, and what is trained is what PEFT trains."""

import copy

import pytest
import torch
from kinds import lora
from peft import LoftQConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig, EvaConfig
from starts import BATCHES, IDS, TWICE, started, steps
from transformers import AutoModelForCausalLM

from qlora_rl import AdapterRejectedError, judge_adapter, load_base, start_adapter
from qlora_rl.adapter.initialization import apply_start, copy_adapter
from qlora_rl.adapter.inspected import InspectedAdapter
from qlora_rl.base.quant import dequantised_weight


@pytest.fixture(scope="module")
def loaded(base):
    return load_base(base)


@pytest.fixture(scope="module")
def plain(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def of_base(model):
    return {n.replace(".base_layer", ""): p for n, p in model.get_base_model().named_parameters() if "lora_" not in n}


@pytest.mark.parametrize("name", TWICE)
def test_the_base_stays_bit_for_bit_and_the_start_is_exactly_the_bare_base(loaded, model_dir, name):
    before = {n: p.detach().clone() for n, p in loaded.named_parameters()}
    bare = logits(loaded)
    model = started(copy.deepcopy(loaded), name, model_dir)
    assert torch.equal(logits(model), bare)
    steps(model, 2, decay=0.1)
    assert not torch.equal(logits(model), bare)
    after = of_base(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[n], before[n]) for n in before)
    verdict = judge_adapter(model)
    assert (verdict.kind, verdict.rank) == ("adapter", 8)


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True}], ids=["plain", "rsLoRA"])
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_steps_are_those_of_pefts_own_start_which_changes_the_base(plain, start, fields):
    """On a float32 base, where PEFT's change of it rounds little: gradient norms and logits after five clipped
    steps."""
    config = lora(init_lora_weights=start, **fields)
    theirs, ours = get_peft_model(copy.deepcopy(plain), config), start_adapter(copy.deepcopy(plain), config)
    before = dict(plain.named_parameters())
    assert all(torch.equal(p, before[n]) for n, p in of_base(ours).items())
    assert not all(torch.equal(p, before[n]) for n, p in of_base(theirs).items())
    begun = logits(theirs)
    torch.testing.assert_close(steps(ours, 5), steps(theirs, 5), rtol=1e-3, atol=0)
    moved = (logits(theirs) - begun).abs().max()
    assert (logits(ours) - logits(theirs)).abs().max() < 2e-2 * moved


def test_the_halves_stay_fixed_under_weight_decay(loaded):
    model = start_adapter(copy.deepcopy(loaded), lora(init_lora_weights="olora"))
    layer = next(iter(InspectedAdapter(model, "default").layers.values()))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a0, b0 = a[4:].detach().clone(), b[:, :4].detach().clone()
    steps(model, 3, decay=0.5)
    assert torch.equal(a[4:], a0)
    assert torch.equal(b[:, :4], b0 + b[:, 4:])
    assert a[:4].any()
    assert b[:, 4:].any()


def test_a_checkpoint_of_another_start_brings_its_own_fixed_half(loaded):
    one, other = (start_adapter(copy.deepcopy(loaded), lora(init_lora_weights="pissa_niter_1")) for _ in range(2))
    steps(one, 2)
    other.load_state_dict({n: p for n, p in one.state_dict().items() if "lora_" in n}, strict=False)
    other.qlora_start.take_over()
    before = logits(other)
    other.qlora_start.restore()
    assert torch.allclose(logits(other), before, atol=1e-5)


def test_loftq_brings_the_4_bit_base_nearer_to_the_original(loaded, model_dir, plain):
    model = start_adapter(
        copy.deepcopy(loaded), lora(r=16, init_lora_weights="loftq", loftq_config=LoftQConfig()), original=model_dir
    )
    assert judge_adapter(model).kind == "adapter"
    original = dict(plain.named_modules())
    for name, layer in InspectedAdapter(model, "default").layers.items():
        held = dequantised_weight(layer.get_base_layer().weight)
        weight = original[name].weight.detach()
        assert torch.equal(held, dequantised_weight(dict(loaded.named_modules())[name].weight))
        lost = torch.linalg.svdvals(weight - held)
        now = torch.linalg.norm(weight - held - layer.get_delta_weight("default"))
        assert float(now) == pytest.approx(float(lost[16:].norm()), rel=1e-4)  # no 16 directions hold more


def test_eva_starts_with_the_main_directions_of_the_inputs(loaded):
    before = {n: p.detach().clone() for n, p in loaded.named_parameters()}
    model = started(copy.deepcopy(loaded), "eva", None)
    assert judge_adapter(model).kind == "adapter"
    assert torch.equal(logits(model), logits(loaded))
    assert all(torch.equal(p, before[n]) for n, p in of_base(model).items())
    for layer in InspectedAdapter(model, "default").layers.values():
        a = layer.lora_A["default"].weight
        assert torch.allclose(a @ a.T, torch.eye(4), atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"init_lora_weights": "corda"}, "batches"),
        ({"init_lora_weights": "eva"}, "batches"),
        ({"init_lora_weights": "loftq"}, "original=DIRECTORY"),
        ({"init_lora_weights": "lora_ga"}, "gradients"),
        ({"init_lora_weights": "pissa", "use_dora": True}, "use_dora"),
    ],
    ids=str,
)
def test_a_start_that_lacks_something_is_rejected_with_the_reason(loaded, fields, said):
    config = lora()
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(AdapterRejectedError, match=said):
        apply_start(config)
    with pytest.raises(AdapterRejectedError, match=said):
        start_adapter(loaded, config)


def loftq(**fields):
    return lora(init_lora_weights="loftq", loftq_config=LoftQConfig(), **fields)


def eva(rho):
    return lora(init_lora_weights="eva", eva_config=EvaConfig(rho=rho))


FEW = [{**BATCHES[0], "labels": IDS.where(IDS > 50, -100)}]


@pytest.mark.parametrize(
    ("config", "batches", "original", "said"),
    [
        (lambda: lora(r=200, init_lora_weights="pissa"), None, None, "Lower r"),
        (loftq, None, "/nonexistent", "holds no"),
        (lambda: loftq(r=200), None, "the model", "r=200 > 128"),
        (lambda: loftq(use_dora=True), BATCHES, "the model", "use_dora"),
        (
            lambda: lora(init_lora_weights="corda", use_dora=True, corda_config=CordaConfig()),
            BATCHES,
            "the model",
            "use_dora",
        ),
        (lambda: eva(17.0), BATCHES, None, "64 tokens"),  # otherwise it would run for ever
        (lambda: eva(16.0), FEW, None, "rho"),
        (lambda: eva(1.0), [], None, "empty"),
    ],
)
def test_a_start_that_the_weights_or_batches_do_not_allow_is_rejected(
    loaded, model_dir, config, batches, original, said
):
    given = {"batches": batches, "original": model_dir if original == "the model" else original}
    with pytest.raises(AdapterRejectedError, match=said):
        start_adapter(copy.deepcopy(loaded), config(), **{k: v for k, v in given.items() if v is not None})


def test_a_deep_copy_of_a_started_model_trains_as_the_model_does(loaded):
    model = start_adapter(copy.deepcopy(loaded), lora(init_lora_weights="olora"))
    twin = copy.deepcopy(model)
    assert steps(twin, 3) == steps(model, 3)
    assert torch.equal(logits(twin), logits(model))


@pytest.mark.parametrize("name", ["lora", "model", "self_attn", "default"])
def test_an_adapter_is_copied_whatever_its_name(loaded, name):
    model = get_peft_model(copy.deepcopy(loaded), lora(init_lora_weights=False), adapter_name=name)
    copy_adapter(model, name)
    for layer in InspectedAdapter(model, name).layers.values():
        for matrices in (layer.lora_A, layer.lora_B):
            assert torch.equal(matrices["ref"].weight, matrices[name].weight)
            assert (matrices["ref"].weight.requires_grad, matrices[name].weight.requires_grad) == (False, True)
