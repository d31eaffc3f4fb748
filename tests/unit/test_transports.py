"""Both ways for an adapter to reach an engine of this process, on the fake engine."""

import copy

import pytest
import torch
from kinds import ADAPTER, lora
from peft import get_peft_model
from support import randomise

from qlora_rl import (
    AdapterRejectedError,
    AdapterSync,
    Canary,
    CanaryError,
    EngineBrokenError,
    FakeEngine,
    SyncError,
    export_adapter,
)
from qlora_rl.adapter.live import LiveAdapter
from qlora_rl.sync.in_place import InPlaceTransport
from qlora_rl.sync.transports import DirectoryTransport

PROMPT = [[40, 41, 42, 43]]


@pytest.fixture(scope="module")
def dense(model_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def pair(dense, transport, canary=False, **fields):
    """A PeftModel, an engine on the same base, and the strategy between them."""
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(dense), lora(**fields))
    randomise(model)
    engine = FakeEngine(copy.deepcopy(dense))
    guard = Canary(model, engine) if canary else None
    if guard:
        guard.calibrate()
    return model, engine, AdapterSync(model, engine, transport, guard)


def agrees(model, engine):
    with torch.no_grad():
        ours = model(torch.tensor(PROMPT)).logits.float().log_softmax(-1)[0, :-1]
    theirs = torch.tensor(engine.score(PROMPT)[0])
    return torch.allclose(ours.gather(1, torch.tensor(PROMPT[0][1:])[:, None])[:, 0], theirs, atol=1e-4)


@pytest.mark.parametrize("transport", [DirectoryTransport, InPlaceTransport])
def test_every_push_is_what_serves(dense, tmp_path, transport):
    model, engine, strategy = pair(dense, transport(tmp_path), rank_pattern={"q_proj": 7}, alpha_pattern={"v_proj": 5})
    for version in range(1, 8):
        randomise(model, seed=version)
        report = strategy.push()
        assert (report.version, engine.version) == (version, version)
        assert report.bytes == export_adapter(model).nbytes or transport is InPlaceTransport
        assert agrees(model, engine)
    strategy.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ADAPTER)
def test_what_is_copied_in_place_is_the_export_byte_for_byte(dense, name):
    kind = ADAPTER[name]
    model = get_peft_model(copy.deepcopy(dense), kind.config())
    if kind.prepare:
        kind.prepare(model)
    randomise(model)
    for dtype in (torch.float32, torch.bfloat16):
        live = LiveAdapter(model, dtype)
        live.look()
        bundle = live.bundle()
        places = {n: torch.zeros_like(t) for n, t in bundle.tensors.items()}
        live.write_into(places)
        assert all(torch.equal(places[n], t) for n, t in bundle.tensors.items())


def test_the_version_before_is_whole_until_the_next_push(dense):
    model, engine, strategy = pair(dense, InPlaceTransport(), canary=True)
    strategy.push()
    strategy.push()
    before, scores = engine.held_adapter(8), engine.score(PROMPT)
    for fault in ("nan", "lost"):
        held = next(p for n, p in model.named_parameters() if "lora_B" in n)
        kept = held.detach().clone()
        with torch.no_grad():
            held[0, 0] = float("nan") if fault == "nan" else 0.5
        if fault == "lost":  # the copy misses one matrix
            real = strategy._adapter.write_into

            def partly(places, real=real):
                nbytes = real(places)
                next(t for n, t in places.items() if "lora_B" in n).zero_()
                return nbytes

            strategy._adapter.write_into = partly
        with pytest.raises(AdapterRejectedError if fault == "nan" else CanaryError):
            strategy.push()
        assert engine.version == 2
        assert engine.held_adapter(8) == before
        assert engine.score(PROMPT) == scores
        with torch.no_grad():
            held.copy_(kept)
    del strategy._adapter.write_into
    assert strategy.push().version == 3
    strategy.close()


def test_the_bare_base_serves_again_when_the_first_push_fails(dense):
    model, engine, strategy = pair(dense, InPlaceTransport(), canary=True)
    next(p for n, p in model.named_parameters() if "lora_A" in n).data[0, 0] = float("inf")
    for _ in range(2):
        with pytest.raises(AdapterRejectedError, match="infinite"):
            strategy.push()
        assert engine.version == 0
    strategy.close()


@pytest.mark.parametrize("change", ["merge", "disable", "rescale", "grow"])
def test_what_happened_to_the_live_adapter_since_the_last_push_is_seen(dense, change):
    model, engine, strategy = pair(dense, InPlaceTransport(), canary=True)
    strategy.push()
    strategy.push()
    if change == "rescale":
        for module in model.modules():
            if hasattr(module, "set_scale"):
                module.set_scale("default", 3.0)
        strategy.push()
        assert agrees(model, engine)
    elif change == "grow":  # another adapter of another rank takes over: the slots no longer fit
        model.add_adapter("second", lora(r=6))
        model.set_adapter("second")
        randomise(model)
        strategy.push()
        assert agrees(model, engine)
    else:
        model.merge_adapter() if change == "merge" else model.base_model.disable_adapter_layers()
        with pytest.raises(AdapterRejectedError, match="merged" if change == "merge" else "disabled"):
            strategy.push()
        assert engine.version == 2
    strategy.close()


def test_what_serves_is_kept_and_written_where_it_is_asked_for(dense, tmp_path):
    from safetensors.torch import load_file

    model, _, strategy = pair(dense, InPlaceTransport(tmp_path))
    for version in range(1, 6):
        randomise(model, seed=version)
        strategy.push()
        directory = strategy.transport._recover(strategy.transport._live[-1])
        there, wanted = load_file(directory / "adapter_model.safetensors"), export_adapter(model).tensors
        assert all(torch.equal(there[n], t) for n, t in wanted.items())
        assert len(list(strategy.transport.store.root.iterdir())) <= 4
    strategy.close()


def test_a_full_disk_is_an_error_only_when_the_directory_is_needed(dense, monkeypatch):
    _, engine, strategy = pair(dense, InPlaceTransport())
    strategy.push()

    def full(*_):
        raise SyncError("no space left")

    monkeypatch.setattr(strategy.transport.store, "publish", full)
    for _ in range(4):
        strategy.push()
    assert engine.version == 5
    with pytest.raises(SyncError, match="no space left"):
        strategy.transport._recover(strategy.transport._live[-1])
    strategy.close()


def test_slots_that_were_taken_back_are_asked_for_again(dense):
    model, engine, strategy = pair(dense, InPlaceTransport())
    strategy.push()
    strategy.push()
    engine.drop_adapter()
    randomise(model, seed=3)
    assert strategy.push().version == 3  # not 1 again, which somebody may have seen
    assert agrees(model, engine)
    strategy.close()


def serves_what_it_did(engine, before):
    return (engine.version, engine.held_adapter(8), engine.score(PROMPT)) == before


@pytest.mark.parametrize("fault", ["nan", "canary", "interrupt"])
def test_a_failed_proof_after_the_slots_were_lent_anew_brings_back_the_version_before(dense, tmp_path, fault):
    """Both new slots hold the rejected version then: the one before must come from its directory."""
    model, engine, strategy = pair(dense, InPlaceTransport(tmp_path), canary=True)
    for seed in range(3):
        randomise(model, seed=seed)
        strategy.push()
    before = (engine.version, engine.held_adapter(8), engine.score(PROMPT))
    strategy.transport._recover(strategy.transport._live[-1])
    for _ in range(5):
        engine._slots = None  # as after a rebuild
        randomise(model, seed=9)
        if fault == "nan":
            next(p for n, p in model.named_parameters() if "lora_B" in n).data[0, 0] = float("nan")
        elif fault == "canary":
            strategy.canary.threshold = -1.0
            strategy.canary.every = 1
        else:
            strategy.canary._compare_held = lambda bundle: (_ for _ in ()).throw(KeyboardInterrupt)
        with pytest.raises((AdapterRejectedError, CanaryError, KeyboardInterrupt)):
            strategy.push()
        assert serves_what_it_did(engine, before)
    assert len(list(strategy.transport.store.root.iterdir())) <= 4  # rejected versions do not pile up
    strategy.close()


def test_an_engine_whose_last_version_cannot_be_brought_back_serves_nothing(dense, monkeypatch):
    model, engine, strategy = pair(dense, InPlaceTransport(), canary=True)
    strategy.push()
    real = strategy.transport.store.publish
    monkeypatch.setattr(strategy.transport.store, "publish", lambda *_: (_ for _ in ()).throw(SyncError("disk full")))
    strategy.push()
    monkeypatch.setattr(strategy.transport.store, "publish", real)
    engine._slots = None
    monkeypatch.setattr(strategy.transport, "_recover", lambda placed: (_ for _ in ()).throw(SyncError("never kept")))
    held = next(p for n, p in model.named_parameters() if "lora_B" in n)
    kept = held.detach().clone()
    held.data[0, 0] = float("nan")
    with pytest.raises(AdapterRejectedError):
        strategy.push()
    with pytest.raises(EngineBrokenError, match="could not be loaded"):
        engine.generate(PROMPT, max_tokens=2)
    held.data.copy_(kept)
    strategy.push()
    assert engine.generate(PROMPT, max_tokens=2).completion_ids
    strategy.close()


def test_an_interrupt_when_the_new_version_serves_already_takes_it_back(dense):
    model, engine, strategy = pair(dense, InPlaceTransport(), canary=True)
    for seed in range(3):
        randomise(model, seed=seed)
        strategy.push()
    before = (engine.version, engine.held_adapter(8), engine.score(PROMPT))
    real, calls = engine.serve_slot, []

    def interrupted(*arguments):
        real(*arguments)
        if not calls:
            calls.append(1)
            raise KeyboardInterrupt

    engine.serve_slot = interrupted
    randomise(model, seed=9)
    with pytest.raises(KeyboardInterrupt):
        strategy.push()
    assert serves_what_it_did(engine, before)
    assert strategy.push().version == 4
    assert agrees(model, engine)
    strategy.close()


@pytest.mark.parametrize("live", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("there", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [8, 6])
def test_every_pair_of_dtypes_gives_the_bytes_of_the_export(dense, live, there, alpha):
    model = get_peft_model(copy.deepcopy(dense), lora(r=4, lora_alpha=alpha, rank_pattern={"q_proj": 7}))
    randomise(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(live)
    adapter = LiveAdapter(model, there)
    adapter.look()
    wanted = adapter.bundle().tensors
    places = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    adapter.write_into(places)
    assert all(torch.equal(places[name], tensor) for name, tensor in wanted.items())


def test_a_version_that_could_not_be_taken_back_never_serves_again(dense, tmp_path, monkeypatch):
    _, engine, strategy = pair(dense, DirectoryTransport(tmp_path), canary=True)
    for _ in range(2):
        strategy.push()
    loaded, real = [], engine.load_adapter

    def load(directory, version):
        loaded.append(version)
        if loaded == [3, 2]:  # the way back from version 3
            raise SyncError("no answer")
        real(directory, version)

    def reject(bundle):
        raise CanaryError("not what was pushed")

    monkeypatch.setattr(engine, "load_adapter", load)
    monkeypatch.setattr(strategy.canary, "check", reject)
    monkeypatch.setattr(strategy.canary, "wants_probe", lambda: False)
    for _ in range(2):
        with pytest.raises(CanaryError):
            strategy.push()
    assert loaded[-1] == engine.version == 2
    strategy.close()
