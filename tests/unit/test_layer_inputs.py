"""Layer inputs that wait in host memory; the CPU stands for the device, and copies of what is in it for the host."""

import copy
import weakref

import pytest
import torch
from host_copies import HostCopies
from transformers import Qwen2Config, Qwen2ForCausalLM

from qlora_rl.memory.lines import ON_DEVICE
from qlora_rl.train.setup.layer_inputs import keep_on_host

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
    copies = HostCopies()
    keep_on_host(model, copies)
    model.gradient_checkpointing_enable(kwargs | {"offload": True})
    found = gradients(model, 2)
    assert len(copies.sent) == 2 * LAYERS
    assert all(torch.equal(found[name], right[name]) for name in right)


def test_an_input_is_on_the_device_no_longer_than_the_layer_after_it_begins(model):
    """As the estimate counts: two at a time, the input of a layer and what it makes."""

    class Watched(HostCopies):
        def __init__(self):
            super().__init__()
            self.held, self.alive = [], []

        def _send(self, tensor):
            self.alive.append(1 + sum(each() is not None for each in self.held))
            self.held.append(weakref.ref(tensor))
            return super()._send(tensor)

    copies = Watched()
    keep_on_host(model, copies)
    model.gradient_checkpointing_enable(offload=True)
    gradients(model)
    assert len(copies.alive) == LAYERS
    assert max(copies.alive) <= ON_DEVICE


def test_a_graph_can_be_used_twice(model):
    keep_on_host(model, HostCopies())
    model.gradient_checkpointing_enable(offload=True)
    loss = model(input_ids=model.ids, labels=model.ids, use_cache=False).loss
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * once[name]) for name, p in model.named_parameters())


def test_without_the_setting_and_on_the_cpu_nothing_changes(model):
    copies = HostCopies()
    keep_on_host(model, copies)
    model.gradient_checkpointing_enable({"use_reentrant": False, "every_n_layers": 2, "offload": False})
    gradients(model)
    assert copies.sent == []
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
    copies = HostCopies()
    keep_on_host(model, copies)
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable({"use_reentrant": False, "offload": True})
    gradients(model)
    assert not model.is_gradient_checkpointing
    assert copies.sent == []
    assert other.is_gradient_checkpointing
