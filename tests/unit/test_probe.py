"""The probe: an engine that holds every push and multiplies nothing is noticed while the adapter is still tiny."""

import copy

import pytest
import torch
from kinds import lora
from peft import get_peft_model

from qlora_rl import AdapterSync, Canary, CanaryError, EngineBrokenError, FakeEngine, SyncError
from qlora_rl.engine.linears.linear import AdapterProducts
from qlora_rl.sync.in_place import InPlaceTransport
from qlora_rl.sync.transports import DirectoryTransport

SEQUENCES = [[40, 41, 42, 43, 44, 45], [60, 9, 33, 12, 7, 41]]


@pytest.fixture(scope="module")
def dense(model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def after_one_step(model, seed, rate=1e-5):
    """Adam's first step moves each entry of B by the learning rate, whatever the gradient; A is as it was made."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                weight.copy_(rate * (torch.randint(2, weight.shape, generator=generator) * 2 - 1))
    return model


def untrained(model, seed):
    """A random, B zero: an adapter as PEFT makes it."""
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.reset_lora_parameters("default", init_lora_weights=True)
    return model


def strategy_for(model, engine, transport, every=1):
    canary = Canary(model, engine, SEQUENCES, every=every)
    canary.calibrate()
    return AdapterSync(model, engine, transport, canary)


def pair(dense, transport, dtype=torch.float32, every=1, **fields):
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(dense).to(dtype), lora(**fields))
    engine = FakeEngine(copy.deepcopy(dense).to(dtype))
    return model, engine, strategy_for(model, engine, transport, every)


def multiply_nothing(engine, monkeypatch):
    """The buffers hold what was pushed, and the layers do without them; whatever is pushed afterwards."""
    monkeypatch.setattr(engine, "_bare", True)


@pytest.mark.parametrize("transport", [DirectoryTransport, InPlaceTransport])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_adapter_after_one_step_that_is_not_multiplied_is_noticed_within_two_pushes(
    dense, tmp_path, monkeypatch, transport, dtype
):
    model, engine, _ = pair(dense, transport(tmp_path), dtype)
    noticed = 0
    for seed in range(20):
        engine.drop_adapter()
        strategy = strategy_for(untrained(model, seed), engine, transport(tmp_path))
        # An honest beginning, then the fault; what is loaded from directories is probed on the bare base alone.
        for _ in range(2 + seed % 2 if transport is InPlaceTransport else 0):
            strategy.push()
        after_one_step(model, seed)
        with monkeypatch.context() as patch:
            multiply_nothing(engine, patch)
            try:
                strategy.push()
                strategy.push()
            except CanaryError as error:
                noticed += "does not multiply" in str(error)
        strategy.close()
    assert noticed == 20


def test_an_engine_that_never_multiplied_is_noticed_at_the_first_push(dense, tmp_path, monkeypatch):
    _, engine, strategy = pair(dense, InPlaceTransport(tmp_path), every=4)
    multiply_nothing(engine, monkeypatch)
    with pytest.raises(CanaryError, match="does not multiply"):  # with B still zero
        strategy.push()
    assert engine.version == 0
    strategy.close()


def multiply_by(factor, engine, monkeypatch):
    """The buffers hold what was pushed, and the layers apply it so many times as strongly."""
    score = engine.score

    def scaled(*given, **named):
        kept = {name: tensor.clone() for name, tensor in engine._held.items() if ".lora_B." in name}
        for name in kept:
            engine._held[name].mul_(factor)
        try:
            return score(*given, **named)
        finally:
            for name, tensor in kept.items():
                engine._held[name].copy_(tensor)

    monkeypatch.setattr(engine, "score", scaled)


def wide(dense, directory):
    """A pair with the threshold of a deep model in 16 bits."""
    _, engine, strategy = pair(dense, DirectoryTransport(directory))
    strategy.canary.threshold = 0.025
    return engine, strategy


def test_under_a_probe_a_wide_threshold_does_not_hide_a_scale_that_is_wrong(dense, tmp_path, monkeypatch):
    engine, strategy = wide(dense, tmp_path)
    multiply_by(1.05, engine, monkeypatch)
    with pytest.raises(CanaryError, match="multiplies with it in another way"):
        strategy.push()


def test_other_sequences_decide_where_those_of_the_probe_are_further_apart_than_rounding(dense, tmp_path):
    _, strategy = wide(dense, tmp_path)
    difference = strategy.canary._difference
    strategy.canary._difference = (
        lambda ids, **given: 0.01 if ids is strategy.canary.sequences else difference(ids, **given)
    )
    strategy.push()
    assert strategy.engine.version == 1


def test_a_probe_leaves_nothing_where_modules_of_a_smaller_rank_leave_room(dense, tmp_path):
    model, _, strategy = pair(
        dense, InPlaceTransport(tmp_path), rank_pattern={"q_proj": 3}, alpha_pattern={"v_proj": 5}
    )
    for _ in range(6):  # what is held is compared with the policy's adapter, byte for byte
        strategy.push()
        after_one_step(model, 0)
    strategy.close()


def test_an_engine_that_serves_an_adapter_already_keeps_it_where_the_push_fails(dense, tmp_path, monkeypatch):
    """A probe would have to be taken back to something that this transport has never held."""
    model, engine, strategy = pair(dense, DirectoryTransport(tmp_path))
    strategy.push()
    held = dict(engine.held_adapter(8))
    other = strategy_for(after_one_step(model, 1), engine, DirectoryTransport(tmp_path))
    monkeypatch.setattr(engine, "load_adapter", lambda *_: (_ for _ in ()).throw(SyncError("no.")))
    with pytest.raises(SyncError):
        other.push()
    assert (engine.version, dict(engine.held_adapter(8))) == (1, held)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_sizing_that_is_broken_off_is_begun_again(number, dense, tmp_path, monkeypatch):
    _, engine, strategy = pair(dense, InPlaceTransport(tmp_path))
    real, calls = strategy.canary._score, []

    def score(sequences):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(sequences)

    monkeypatch.setattr(strategy.canary, "_score", score)
    with pytest.raises(KeyboardInterrupt):
        strategy.push()
    assert engine.version == 0
    assert [strategy.push().version for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("transport", [DirectoryTransport, InPlaceTransport])
def test_a_probe_that_cannot_be_taken_back_does_not_serve(transport, dense, tmp_path, monkeypatch):
    _, engine, strategy = pair(dense, transport(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "drop_adapter", lambda: (_ for _ in ()).throw(RuntimeError("no.")))
        with pytest.raises(RuntimeError):
            strategy.push()
    with pytest.raises(EngineBrokenError, match="could not be loaded"):
        engine.generate([[40, 41]], max_tokens=1)
    strategy.push()
    assert engine.generate([[40, 41]], max_tokens=1).version == engine.version
    strategy.canary.check(strategy._adapter.bundle(), scored=True)


@pytest.mark.parametrize("place", ["revoke", "serve_slot"])
def test_a_probe_whose_withdrawal_is_interrupted_takes_no_other_version_with_it(place, dense, tmp_path, monkeypatch):
    _, engine, strategy = pair(dense, InPlaceTransport(tmp_path))
    strategy.push()
    scores = engine.score(SEQUENCES)
    monkeypatch.setattr(strategy.canary, "wants_probe", lambda: True)
    owner = engine if place == "serve_slot" else strategy.transport
    real, calls = getattr(owner, place), []

    def struck(*given):
        calls.append(given)
        if len(calls) == (2 if place == "serve_slot" else 1):  # as the probe, version 2 for a moment, gives way
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(owner, place, struck)
    with pytest.raises(KeyboardInterrupt):
        strategy.push()
    assert engine.version == engine.generate([[40, 41]], max_tokens=1).version == 1
    assert engine.score(SEQUENCES) == scores
    for _ in range(2):
        strategy.push()
    assert engine.generate([[40, 41]], max_tokens=1).version == engine.version > 1
    strategy.canary.check(strategy._adapter.bundle(), scored=True)


def test_a_probe_changes_nothing_of_the_trainer(dense, tmp_path):
    model, _, strategy = pair(dense, InPlaceTransport(tmp_path))
    model.train()
    before = {name: (value.clone(), value.requires_grad) for name, value in model.named_parameters()}
    state = torch.random.get_rng_state()
    strategy.push()
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(v, before[n][0]) and v.requires_grad == before[n][1] for n, v in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_of_a_tiny_adapter_are_found_applied(dtype, monkeypatch):
    """One step at a learning rate of 1e-6: in float16 such numbers are multiples of the smallest one."""
    generator = torch.Generator().manual_seed(0)
    a = (torch.randn(1, 1, 16, 1024, generator=generator) / 32).to(dtype)
    b = (1e-6 * (torch.randint(2, (1, 1, 1024, 16), generator=generator) * 2 - 1)).to(dtype)

    products = AdapterProducts(None)
    assert products.is_applied((a,), (b,), 0, [5, 6])
    add = AdapterProducts._add

    def wrong_in_the_second(self, y, *rest):
        add(self, y, *rest)
        y[1:] *= 1.1

    monkeypatch.setattr(AdapterProducts, "_add", wrong_in_the_second)
    assert products.is_applied((a,), (b * 100,), 0, [5])
    assert not products.is_applied((a,), (b * 100,), 0, [5, 6])
    monkeypatch.setattr(AdapterProducts, "_add", lambda *_: None)
    assert not products.is_applied((a,), (b * 100,), 0, [5, 6])


@pytest.mark.parametrize("rank", [4, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_that_are_two_percent_off_are_found_at_any_rank_and_rounding_is_not(rank, dtype, monkeypatch):
    """Of a high rank the factor is less than the rounding of any one sum may be, and not of all of them."""
    generator = torch.Generator().manual_seed(0)
    a = (torch.randn(1, 1, rank, 512, generator=generator) / 512**0.5).to(dtype)
    b = (1e-3 * torch.randn(1, 1, 768, rank, generator=generator)).to(dtype)
    products, columns = AdapterProducts(None), range(32)
    assert products.is_applied((a,), (b,), 0, columns)
    add = AdapterProducts._add
    monkeypatch.setattr(AdapterProducts, "_add", lambda *given: add(*given[:-1], 1.02 * given[-1]))
    assert not products.is_applied((a,), (b,), 0, columns)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_products_that_cancel_are_found_applied(dtype, monkeypatch):
    """As of an adapter that PEFT has made of PiSSA or OLoRA, before its first step."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1, 1, 16, 1024, generator=generator) / 32
    b = torch.randn(1, 1, 768, 16, generator=generator) / 32
    b = torch.cat([b, -b], dim=3).to(dtype)
    products, columns = AdapterProducts(None), range(32)
    assert products.is_applied((torch.cat([a, a], dim=2).to(dtype),), (b,), 0, columns)
    b[..., 0] += 0.1  # and what is left is still looked at
    assert products.is_applied((torch.cat([a, a], dim=2).to(dtype),), (b,), 0, columns)
    add = AdapterProducts._add
    monkeypatch.setattr(AdapterProducts, "_add", lambda *given: add(*given[:-1], 1.05 * given[-1]))
    assert not products.is_applied((torch.cat([a, a], dim=2).to(dtype),), (b,), 0, columns)
