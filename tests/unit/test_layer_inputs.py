"""Layer inputs that wait in host memory, with a device of which the copies are made as late as they may be."""

import copy
import gc
import weakref

import pytest
import torch
from copiers import LateCopier
from support import program
from transformers import Qwen2Config, Qwen2ForCausalLM

from qlora_rl.memory import lines as count
from qlora_rl.train.setup.layer_inputs import SMALLEST, LayerInputs, keep_on_host

Live = program("benchmarks/live_memory.py").Live

LAYERS, B, T = 4, 2, 24


@pytest.fixture
def model():
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
    ).train()
    model.ids = torch.randint(3, 60, (B, T))
    return model


def gradients(model, times=1):
    model.zero_grad()
    for _ in range(times):
        out = model(input_ids=model.ids, labels=model.ids, use_cache=False)
        out.loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_have_the_same_bits(model, reentrant):
    kwargs = {"use_reentrant": reentrant}
    model.gradient_checkpointing_enable(kwargs)
    right = gradients(model, 2)
    copier = LateCopier()
    keep_on_host(model, copier)
    model.gradient_checkpointing_enable(kwargs | {"offload": True})
    found = gradients(model, 2)
    assert len(copier.sent) == 2 * LAYERS
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_an_input_comes_back_while_the_layer_after_it_is_computed_again(model):
    copier = LateCopier()
    keep_on_host(model, copier)
    model.gradient_checkpointing_enable(offload=True)
    gradients(model)
    # The last one never left.
    assert copier.log == [("send", 0), ("send", 1), ("send", 2), ("send", 3), ("fetch", 2), ("fetch", 1), ("fetch", 0)]


def test_two_inputs_are_on_the_device_at_most():
    copier = LateCopier()
    inputs = LayerInputs(copier)
    with Live(lambda tensor: "input" if tensor.shape == (SMALLEST + 1,) else "rest") as live:
        held = []
        for i in range(5):
            held.append(inputs.keep(torch.ones(SMALLEST + 1) * i))
        host = sum(each.untyped_storage().nbytes() for each in copier.sent)
        one = host // 5
        assert live.now["input"] - host <= 2 * one
        while held:
            kept = held.pop()
            assert torch.equal(inputs.take(kept), torch.ones(SMALLEST + 1) * len(held))
            del kept
            copier.sent.pop()
            host -= one
            assert live.now["input"] - host <= count.ON_DEVICE * one


def test_what_is_never_used_is_given_back(model):
    copier = LateCopier()
    keep_on_host(model, copier)
    model.gradient_checkpointing_enable(offload=True)
    loss = model(input_ids=model.ids, labels=model.ids, use_cache=False).loss
    hosts = [weakref.ref(each) for each in copier.sent]
    del loss
    copier.sent.clear()
    gc.collect()
    assert [ref() for ref in hosts] == [None] * LAYERS


def test_a_graph_can_be_used_twice(model):
    keep_on_host(model, LateCopier())
    model.gradient_checkpointing_enable(offload=True)
    loss = model(input_ids=model.ids, labels=model.ids, use_cache=False).loss
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * once[name]) for name, p in model.named_parameters())


def test_without_the_setting_and_on_the_cpu_nothing_changes(model):
    copier = LateCopier()
    keep_on_host(model, copier)
    model.gradient_checkpointing_enable({"use_reentrant": False, "every_n_layers": 2, "offload": False})
    gradients(model)
    assert copier.sent == []
    keep_on_host(model)  # without a GPU
    model.gradient_checkpointing_enable({"offload": True})
    assert gradients(model)


def test_transformers_without_every_n_layers_checkpoints_all_the_same(model, monkeypatch):
    of_now = Qwen2ForCausalLM.gradient_checkpointing_enable
    monkeypatch.setattr(Qwen2ForCausalLM, "gradient_checkpointing_enable", lambda self, given=None: of_now(self, given))
    keep_on_host(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.is_gradient_checkpointing


def test_a_deep_copy_has_its_own_setting(model):
    copier = LateCopier()
    keep_on_host(model, copier)
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable({"use_reentrant": False, "offload": True})
    gradients(model)
    assert not model.is_gradient_checkpointing
    assert copier.sent == []
    assert other.is_gradient_checkpointing
