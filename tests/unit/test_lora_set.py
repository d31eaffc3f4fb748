"""Several LoRAs on one base: what is left of one after a step that is interrupted, and after a drop that fails."""

import contextlib
import resource
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from qlora_rl import Adapters, TrainingRow
from qlora_rl.adapter.load import make_lora
from qlora_rl.adapter.several import LoraSet
from qlora_rl.adapter.store import WEIGHTS
from qlora_rl.train import adapters
from qlora_rl.train.scoring.losses import TokenLoss

IDS = torch.arange(40, 60)[None]
ADAM = (1e-2, 0.9, 0.95, 1e-12, 0.0, 0.5)


@pytest.fixture
def loras(model_dir):
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).requires_grad_(False)
    made = LoraSet(base)
    made.add("one", make_lora({"r": 4, "lora_alpha": 32.0, "target_modules": "all-linear"}), seed=1)
    return made


def backward(loras):
    loras.activate("one")
    loras.model(input_ids=IDS, labels=IDS).loss.backward()


def held(loras):
    states = loras._optimizers["one"].state
    return [
        each.detach().clone()
        for parameter in loras._parameters["one"].values()
        for each in (parameter, *states.get(parameter, {}).values())
    ]


@pytest.mark.parametrize("steps", [0, 1], ids=["the first step", "a later one"])
def test_an_interrupted_step_leaves_weights_and_optimizer_as_they_were_and_no_gradients(loras, monkeypatch, steps):
    for _ in range(steps):
        backward(loras)
        loras.step("one", *ADAM)
    before = held(loras)
    backward(loras)
    made, addcdiv = [], torch.Tensor.addcdiv_

    def struck(self, *args, **kwargs):
        made.append(self)
        if len(made) == 5:
            raise KeyboardInterrupt
        return addcdiv(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "addcdiv_", struck)
        with pytest.raises(KeyboardInterrupt):
            loras.step("one", *ADAM)
    after = held(loras)
    assert len(after) == len(before)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert set(loras.gradients("one").values()) == {None}
    backward(loras)
    loras.step("one", *ADAM)
    assert not all(torch.equal(old, new) for old, new in zip(before, held(loras), strict=False))


class Model(torch.nn.Module):
    """Whose logprobs are all -1."""

    def get_input_embeddings(self):
        return torch.nn.Embedding(2, 2)

    def forward(self, input_ids, **options):
        return SimpleNamespace(log_probs=torch.full(input_ids.shape, -1.0, dtype=torch.float32))


def test_losses_are_computed_in_float32_whatever_the_processs_default_is(monkeypatch):
    made, given = Adapters.__new__(Adapters), []
    made.why_padded, made._autocast, made._loras = "it is a stand-in", None, SimpleNamespace(base=Model())
    monkeypatch.setattr(adapters, "as_trained", lambda model, autocast: contextlib.nullcontext())
    row = TrainingRow([1, 2], [2, 3], {"weights": [0.1, 1e-3]})

    def custom(rows, logprobs):
        given.extend(logprobs)
        return sum(each.sum() for each in logprobs)

    monkeypatch.setattr(made, "passes", lambda *args, **options: iter([None, adapters.Passed(1.0, [[-0.1, -0.3]])]))
    try:
        torch.set_default_dtype(torch.bfloat16)  # as while an engine is built in another thread
        total, _ = made._pass([row], TokenLoss("cross_entropy"), backward=False)
        made._custom("one", [row], custom)
    finally:
        torch.set_default_dtype(torch.float32)
    assert total == torch.tensor([0.1, 1e-3]).sum().item()
    assert [each.dtype for each in given] == [torch.float32]


def test_a_disk_that_is_full_is_an_error_of_the_system(loras, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=WEIGHTS):
            loras.save("one", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_adapter_leaves_memory_also_where_the_engine_fails_and_its_gradients_can_be_dropped(loras):
    class Lane:
        def close(self, *, force):
            raise RuntimeError("vLLM failed in a step")

    closed = []
    made = Adapters.__new__(Adapters)
    made._training, made._loras, made._shared = threading.RLock(), loras, object()
    sync = SimpleNamespace(transport=SimpleNamespace(close=lambda: closed.append(True)))
    made._held = {"mine": adapters._Held("one", Lane(), sync)}
    backward(loras)
    made.zero_grad("mine")
    assert set(made.gradients("mine").values()) == {None}
    with pytest.raises(RuntimeError, match="vLLM failed"):
        made.drop("mine", wait=False)
    assert (list(made), list(loras), loras.model, made._shared, closed) == ([], [], None, None, [True])
