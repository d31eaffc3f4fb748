"""Pushes into vLLM's own adapter buffers: exact, all or nothing, no stale KV, and recoverable."""

import copy

import pytest
import torch
from kinds import ADAPTER, lora
from pair import OPTIONS, Pair
from peft import get_peft_model
from support import make_model, randomise

from qlora_rl import AdapterSync, Canary, CanaryError, LocalEngine, SyncError, bake_base, prepare_base
from qlora_rl.sync.in_place import InPlaceTransport
from qlora_rl.sync.transports import DirectoryTransport

LONG = [[40 + i % 9 for i in range(150)]]  # more than a KV block of 128


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Both sides on the baked float32 form of a tiny NF4 base, long enough for a whole KV block."""
    baked = bake_base(prepare_base(make_model(tmp_path_factory.mktemp("long") / "model", positions=256)), "float32")
    with LocalEngine(baked, **OPTIONS | {"max_model_length": 256}) as engine:
        yield Pair(engine, baked, tmp_path_factory.mktemp("exact"))


@pytest.fixture
def pushed(exact):
    """A PeftModel and its in-place strategy, nothing pushed yet."""
    exact.engine.drop_adapter()
    model = get_peft_model(copy.deepcopy(exact.base), lora(r=8))
    randomise(model)
    canary = Canary(model, exact.engine)
    canary.calibrate()
    strategy = AdapterSync(model, exact.engine, InPlaceTransport(), canary)
    yield model, exact.engine, strategy
    strategy.close()


@pytest.mark.parametrize("name", ADAPTER)
def test_an_adapter_copied_in_place_is_served_exactly(exact, name):
    model = exact.adapted(ADAPTER[name].config(), ADAPTER[name].prepare)
    strategy = AdapterSync(model, exact.engine, InPlaceTransport(), Canary(model, exact.engine))
    for seed in range(3):  # through the directory, into the other slot, and back into the first
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "lora_B" in n:
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.02)
        report = strategy.push()
        assert report.transport == "in_place"
        assert exact.apart(model) < 1e-5
    strategy.close()


def test_a_second_version_has_the_logprobs_of_a_cold_cache_bit_for_bit(pushed, exact, tmp_path):
    """Same prompt, same adapter name and path, prefix caching on."""
    model, engine, strategy = pushed
    assert engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    for _ in range(4):
        strategy.push()
        engine.generate(LONG, max_tokens=8, temperature=0.0)  # fills the cache under this version
        first = engine.generate(LONG, max_tokens=8, temperature=0.0)
        names = engine._adapters.served.request
        randomise(model, scale=0.08, seed=strategy.engine.version)
    strategy.push()
    strategy.push()
    warm = engine.generate(LONG, max_tokens=8, temperature=0.0)
    assert engine._adapters.served.request == names  # what vLLM knows of the adapter has not changed
    with LocalEngine(exact.engine.base, **OPTIONS | {"max_model_length": 256}) as fresh:
        AdapterSync(model, fresh, DirectoryTransport(tmp_path)).push()
        cold = fresh.generate(LONG, max_tokens=8, temperature=0.0)
    assert warm.completion_ids == cold.completion_ids
    assert warm.logprobs == cold.logprobs
    assert warm.logprobs != first.logprobs


def test_a_push_that_fails_its_proof_leaves_the_version_before_bit_for_bit(pushed):
    model, engine, strategy = pushed
    strategy.push()
    strategy.push()
    scores, held = engine.score(LONG), engine.held_adapter(8)
    randomise(model, seed=5)
    real = strategy._adapter.write_into

    def partly(places):
        nbytes = real(places)
        places["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"].zero_()
        return nbytes

    strategy._adapter.write_into = partly
    with pytest.raises(CanaryError, match=r"layers\.1\.mlp\.up_proj"):
        strategy.push()
    assert (engine.version, engine.score(LONG), engine.held_adapter(8)) == (2, scores, held)
    strategy._adapter.write_into = real
    assert strategy.push().version == 3
    assert engine.score(LONG) != scores


def test_a_broken_engine_comes_back_with_the_version_that_served(pushed):
    model, engine, strategy = pushed
    for seed in range(3):
        randomise(model, seed=seed)
        strategy.push()
    scores = engine.score(LONG)
    engine._is_broken = True
    assert engine.score(LONG) == scores
    assert engine.version == 3
    randomise(model, seed=9)
    assert strategy.push().version == 4  # its slots are gone: they are lent anew
    assert strategy.push().version == 5
    assert engine.score(LONG) != scores


@pytest.mark.parametrize("is_lost", [False, True], ids=["waking keeps it", "waking loses it"])
def test_after_a_nap_the_adapter_is_as_it_was(pushed, monkeypatch, is_lost):
    """vLLM cannot sleep on the CPU: its two calls are stood in for, once by one that loses the adapter (vllm#53888)."""
    model, engine, strategy = pushed
    strategy.push()
    strategy.push()
    slots, scores = strategy.transport._slots, engine.score(LONG)

    def wake_up(*_, **__):
        if is_lost:
            for place in slots.places[strategy.transport._live[-1].slot].values():
                place.zero_()

    monkeypatch.setattr(engine.llm, "sleep", lambda **_: None)
    monkeypatch.setattr(engine.llm, "wake_up", wake_up)
    monkeypatch.setitem(engine._options, "enable_sleep_mode", True)
    engine.sleep()
    engine.wake()
    assert engine.score(LONG) == scores
    assert slots.is_valid() is not is_lost
    randomise(model, seed=4)
    strategy.push()
    assert engine.score(LONG) != scores


def test_slots_are_the_buffers_that_vllm_multiplies_with(pushed):
    _, engine, strategy = pushed
    strategy.push()
    manager = engine.llm.llm_engine.model_executor.driver_worker.model_runner.lora_manager._adapter_manager
    storages = {
        t.untyped_storage().data_ptr()
        for layer in manager.modules.values()
        for t in (*layer.lora_a_stacked, *layer.lora_b_stacked)
    }
    for places in strategy.transport._slots.places:
        assert all(place.untyped_storage().data_ptr() in storages for place in places.values())
    strategy.push()
    strategy.push()
    assert len(list(strategy.transport.store.root.iterdir())) <= 4


def test_500_pushes_in_place_hold_no_more_memory(base, adapted):
    import gc

    import psutil

    with LocalEngine(base, max_lora_rank=8, max_model_length=32, max_num_seqs=4) as engine:
        strategy = AdapterSync(adapted, engine, InPlaceTransport())
        for _ in range(50):
            strategy.push()
        gc.collect()
        before = psutil.Process().memory_info().rss
        for _ in range(500):
            strategy.push()
        gc.collect()
        assert psutil.Process().memory_info().rss - before < 20 * 2**20
        strategy.close()


def test_an_adapter_that_is_rejected_does_not_push_out_the_one_that_serves(pushed, tmp_path):
    """vLLM makes room for it first; a slot that was written and never used is the least recently used one."""
    import shutil

    from safetensors.torch import load_file, save_file

    model, engine, strategy = pushed
    for seed in range(3):
        randomise(model, seed=seed)
        strategy.push()
        if seed < 2:
            engine.score(LONG)
    wanted = engine.held_adapter(8)
    bad = tmp_path / "bad"
    shutil.copytree(strategy.transport._recover(strategy.transport._live[-1]), bad)
    file = bad / "adapter_model.safetensors"
    save_file({n.replace("layers.1.", "layers.7."): t for n, t in load_file(file).items()}, file)
    for _ in range(3):
        with pytest.raises(SyncError, match="goes on serving"):
            engine.load_adapter(bad, 9)
        assert engine.version == 3
        engine.generate(LONG, max_tokens=2)
        assert engine.held_adapter(8) == wanted
    randomise(model, seed=7)
    strategy.push()


def test_a_given_up_engine_is_let_go(base, adapted):
    import gc
    import weakref

    with LocalEngine(base, max_lora_rank=8, max_model_length=32, max_num_seqs=4) as engine:
        strategy = AdapterSync(adapted, engine, InPlaceTransport())
        strategy.push()
        strategy.push()
        old = weakref.ref(engine.llm)
        engine._is_broken = True
        strategy.push()
        gc.collect()
        assert old() is None
        strategy.close()


def test_what_was_cached_before_the_scales_were_repaired_is_not_used_after(tmp_path):
    base = prepare_base(make_model(tmp_path / "model", positions=256))
    options = {"max_lora_rank": 8, "max_model_length": 256, "max_num_seqs": 4}
    with LocalEngine(base, repair_scales=False, **options) as engine:
        engine.generate(LONG, max_tokens=4, temperature=0.0)
        assert engine.repair_base()
        warm = engine.generate(LONG, max_tokens=4, temperature=0.0)
    with LocalEngine(base, **options) as fresh:
        assert fresh.generate(LONG, max_tokens=4, temperature=0.0).logprobs == warm.logprobs
