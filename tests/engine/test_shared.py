"""One copy of the base: `borrow_base` on real vLLM."""

import dataclasses
import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from support import FULL_MATRIX, MATRIX, make_model, randomise, since_vllm

from qlora_rl import (
    CannotShareError,
    EngineBusyError,
    FakeEngine,
    LocalEngine,
    borrow_base,
    compare,
    fingerprint_base,
    load_base,
    prepare_base,
)
from qlora_rl.base.fingerprint import fingerprint_stored
from qlora_rl.base.quant import plain_name
from qlora_rl.engine.linears.base_compute import packs_away

OPTIONS = {"max_lora_rank": 8, "max_model_length": 32, "max_num_seqs": 8}
IDS = torch.arange(40, 64).reshape(2, 12)


def storages(engine):
    """Where everything lies that vLLM's model holds: its weights, and what belongs to the 4-bit ones."""
    model = engine.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
    tensors = []
    for parameter in model.parameters():
        tensors.append(parameter)
        for state in getattr(parameter, "bnb_quant_state", {}).values():
            tensors += [state.absmax, state.code]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def base_tensors(model):
    """Name and tensor of everything that makes up the base of a transformers model."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        yield name, parameter
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield f"{name}.absmax", state.absmax
            yield f"{name}.code", state.code


def own(model, engine):
    """Names of the base tensors that lie elsewhere."""
    places = storages(engine)
    return {plain_name(n) for n, t in base_tensors(model) if t.untyped_storage().data_ptr() not in places}


def adapted_like(model, **options):
    """A PeftModel whose adapter depends on nothing but the seed."""
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    randomise(model)
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable()
    return model.train()


def outcome(model):
    """Logits, loss and the adapter's gradients of one batch, and of what else got one."""
    out = model(IDS, labels=IDS)
    out.loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **grads}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def check(tmp_path, architecture, tied, kv_heads, quant, double, blocksize, skip):
    source = make_model(tmp_path / "model", architecture=architecture, tied=tied, kv_heads=kv_heads)
    base = prepare_base(source, quant, double_quant=double, blocksize=blocksize, skip_modules=skip)
    with LocalEngine(base, **OPTIONS, repair_scales=False) as engine:
        is_packed = packs_away(torch.bfloat16)
        if quant == "none" and is_packed:
            with pytest.raises(CannotShareError, match=r"packed it away .* and 13 more|packed it away .* more"):
                borrow_base(engine)
            return
        model = borrow_base(engine)
        loan = model.qlora_loan
        assert own(model, engine) == set(loan.copied)
        # What vLLM packs away are unquantised linears; nothing else may be missing.
        assert all(any(s in name for s in skip) for name in loan.copied), loan.copied
        assert bool(loan.copied) == (bool(skip) and is_packed)
        assert len(loan.repaired) > 0 or not double
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight or not tied
        stored = fingerprint_stored(base)
        assert compare(stored, fingerprint_base(model)).state == "equal"
        assert compare(stored, engine.describe_base()).state == "equal"
        rollout = engine.generate([[40, 41, 42]] * 4, max_tokens=8, seed=1)

        ours, theirs = adapted_like(model), adapted_like(load_base(base))
        found = outcome(ours)
        assert_same(found, outcome(theirs))
        assert all(".lora_" in name for name in found if name not in ("logits", "loss"))
        assert sum(name.endswith("lora_B.default.weight") for name in found) == 14  # an unquantised one too
        ours.eval(), theirs.eval()
        with torch.no_grad():
            assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
        assert own(model, engine) == set(loan.copied)
        assert compare(stored, fingerprint_base(ours)).state == "equal"
        again = engine.generate([[40, 41, 42]] * 4, max_tokens=8, seed=1)
        assert (again.completion_ids, again.logprobs) == (rollout.completion_ids, rollout.logprobs)
        del model, ours
        gc.collect()


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: f"{case[0]}-{case[3]}")
def test_the_trainer_computes_on_the_engines_own_tensors(tmp_path, case):
    check(tmp_path, *case)


@pytest.mark.full  # an engine for each of many cases; above six
@pytest.mark.parametrize("case", FULL_MATRIX, ids=lambda case: "-".join(map(str, case)))
def test_the_trainer_computes_on_the_engines_own_tensors_on_the_whole_matrix(tmp_path, case):
    check(tmp_path, *case)


@pytest.fixture
def pair(engine):
    """The module's engine, and a model that borrows its base."""
    made = [borrow_base(engine)]
    yield engine, made
    made.clear()
    gc.collect()


def differing(one, other, path=""):
    """Attributes of two objects that differ, hooks and tensors left out."""
    found = {}
    for key in {*vars(one), *vars(other)}:
        mine, theirs = vars(one).get(key, "(absent)"), vars(other).get(key, "(absent)")
        if key.endswith(("hooks", "hook")) or key in ("_modules", "_parameters", "_buffers", "quant_state", "module"):
            continue
        same = str(mine) == str(theirs) if type(mine).__repr__ is not object.__repr__ else True
        if type(mine) is not type(theirs) or not same:
            found[f"{path}{key}"] = (mine, theirs)
    return found


def test_a_borrowed_model_looks_like_a_loaded_one_to_peft_and_trl(pair, base):
    model, loaded = pair[1][0], load_base(base)
    assert type(model) is type(loaded)
    assert set(differing(model, loaded)) == {"qlora_loan"}
    for part in ("config", "generation_config", "hf_quantizer"):
        assert not differing(getattr(model, part), getattr(loaded, part)), part
    assert not differing(model.config.quantization_config, loaded.config.quantization_config)
    assert model.is_loaded_in_4bit
    assert model.is_quantized
    for name in ("dtype", "device", "training", "is_gradient_checkpointing"):
        assert getattr(model, name) == getattr(loaded, name), name
    assert model.get_memory_footprint() == pytest.approx(loaded.get_memory_footprint(), rel=0.01)
    for (name, mine), (other, theirs) in zip(model.named_modules(), loaded.named_modules(), strict=True):
        assert (name, type(mine)) == (other, type(theirs))
        assert not name or not differing(mine, theirs), name
        assert len(mine._forward_hooks) == len(theirs._forward_hooks)
    for (name, mine), (other, theirs) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert (name, type(mine), mine.dtype, mine.shape, mine.stride()) == (
            other, type(theirs), theirs.dtype, theirs.shape, theirs.stride()
        )  # fmt: skip
        assert not mine.requires_grad
        # The engine's scales are not nested any more: the same numbers, in one step.
        assert set(differing(mine, theirs)) <= {"compress_statistics"}, name
        if hasattr(mine, "quant_state"):
            assert set(differing(mine.quant_state, theirs.quant_state)) <= {"nested", "offset", "state2", "absmax"}
    for (name, mine), (other, theirs) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(mine, theirs), name


def test_the_attention_is_the_one_that_was_asked_for(engine, base):
    model, loaded = (f(x, attn_implementation="eager") for f, x in ((borrow_base, engine), (load_base, base)))
    assert model.config._attn_implementation == loaded.config._attn_implementation == "eager"
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)
    del model


def test_gradient_checkpointing_gives_the_same_gradients(pair, base):
    model = adapted_like(pair[1][0], checkpointing=True)
    assert model.get_base_model().is_gradient_checkpointing
    found = outcome(model)
    assert_same(found, outcome(adapted_like(load_base(base), checkpointing=True)))
    assert_same(found, outcome(adapted_like(load_base(base))))


def test_bitsandbytes_cannot_repack_what_is_shared(pair):
    engine, (model,) = pair
    codes = {n: p.detach().clone() for n, p in model.named_parameters() if hasattr(p, "quant_state")}
    # What makes it repack on CPUs with AVX512-BF16, in eval mode only.
    linears = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    assert len(linears) == 14
    assert not any(module.support_avx512bf16_for_cpu for module in linears)
    with torch.no_grad():
        model.eval()(IDS)
    assert own(model, engine) == set()
    for name, parameter in model.named_parameters():
        if name in codes:
            assert not getattr(parameter.quant_state, "packing_format_for_cpu", False)
            assert torch.equal(parameter, codes[name])


def test_what_is_saved_is_the_adapter_alone(pair, base, tmp_path):
    from safetensors.torch import load_file

    model = adapted_like(pair[1][0])
    model.save_pretrained(tmp_path)
    weights = {f.name: f for f in tmp_path.iterdir() if f.suffix in (".safetensors", ".bin", ".pt")}
    assert list(weights) == ["adapter_model.safetensors"]
    assert all(".lora_" in name for name in load_file(weights["adapter_model.safetensors"]))


def test_k_bit_preparation_lifts_copies_and_leaves_the_engine_alone(pair):
    engine, (model,) = pair
    before = engine.describe_base()
    prepare_model_for_kbit_training(model)
    assert model.model.norm.weight.dtype == torch.float32
    assert engine.describe_base() == before


def test_an_engine_is_not_closed_under_a_model_that_borrows_its_base(base, prompts):
    engine = LocalEngine(base, **OPTIONS)
    model = adapted_like(borrow_base(engine))
    with pytest.raises(EngineBusyError, match=r"close\(force=True\)"):
        engine.close()
    assert len(engine.generate(prompts, max_tokens=2).completion_ids) == len(prompts)
    del model
    engine.close()


def test_a_model_goes_on_when_its_engine_was_closed_by_force(base):
    engine = LocalEngine(base, **OPTIONS)
    model = borrow_base(engine)
    expected = model(IDS).logits
    with pytest.raises(ZeroDivisionError):  # not hidden by ours
        with engine:
            raise ZeroDivisionError
    engine.close()
    assert torch.equal(model(IDS).logits, expected)


def test_a_rebuilt_engine_lends_its_new_tensors(base, prompts):
    engine = LocalEngine(base, **OPTIONS)
    model = adapted_like(borrow_base(engine))
    before, parameters = outcome(model), dict(model.named_parameters())
    cast = model.get_base_model().model.norm.weight
    cast.data = cast.data.float()  # the caller's own from here on
    old = storages(engine)
    engine._is_broken = True
    engine.generate(prompts, max_tokens=2)
    assert own(model, engine) == {"base_model.model.model.norm.weight"}  # PEFT's name of it
    assert cast.dtype == torch.float32
    cast.data = cast.data.bfloat16()
    assert dict(model.named_parameters()) is not parameters
    assert all(p is parameters[n] for n, p in model.named_parameters())  # PEFT and the optimizer hold them
    assert_same(before, outcome(model))
    assert old != storages(engine)
    engine.close(force=True)


RELEASES_KV_CACHE = since_vllm("0.31", "release_kv_cache_memory: before it no engine sleeps that lends its base")


@RELEASES_KV_CACHE
def test_lent_weights_do_not_move_when_the_engine_sleeps(pair, monkeypatch):
    engine, made = pair
    calls = []
    monkeypatch.setitem(engine._options, "enable_sleep_mode", True)
    for name in ("sleep", "release_kv_cache_memory", "wake_up"):
        monkeypatch.setattr(engine._llm, name, lambda *a, _n=name, **k: calls.append((_n, *a, *k.values())))
    engine.sleep()
    engine.wake()
    assert calls == [("sleep", 0), ("release_kv_cache_memory",), ("wake_up",)]
    calls.clear()
    made.clear()
    gc.collect()
    engine.sleep()
    engine.wake()
    assert calls == [("sleep", 1), ("wake_up",)]


def test_before_vllm_0_31_an_engine_that_lends_its_base_stays_awake(pair, monkeypatch, caplog):
    engine, _ = pair
    monkeypatch.setattr("qlora_rl.engine.compat.vllm_version", lambda: "0.30.0")
    monkeypatch.setattr(engine, "_is_cpu", False)
    monkeypatch.setattr(engine, "_enable_sleep", True)
    monkeypatch.setitem(engine._options, "enable_sleep_mode", True)
    monkeypatch.setattr(engine._llm, "sleep", lambda **_: pytest.fail("the weights are lent"))
    assert engine.borrowers.alive()
    assert not engine.capabilities().can_sleep
    engine.sleep()
    assert "cannot keep lent weights and sleep: the engine stays awake" in caplog.text
    assert not engine._is_asleep
    monkeypatch.setattr(engine, "_enable_sleep", True)
    monkeypatch.setattr("qlora_rl.engine.compat.vllm_version", lambda: "0.31.0")
    assert engine.capabilities().can_sleep


@RELEASES_KV_CACHE
def test_vllm_pauses_before_its_kv_cache_goes_and_generates_the_same_when_it_is_back(pair, monkeypatch):
    """vLLM's own checks and bookkeeping; only the memory itself cannot be given back on the CPU."""
    engine, made = pair
    core = engine._llm.llm_engine.engine_core.engine_core
    freed = []
    monkeypatch.setattr(core.model_executor, "discard", freed.append)
    monkeypatch.setitem(engine._options, "enable_sleep_mode", True)
    before, borrowed = engine.generate([[5, 6, 7], [8, 9]], max_tokens=8, seed=1).completion_ids, outcome(made[0])
    engine.sleep()
    assert freed == [("kv_cache",)]
    assert core.is_scheduler_paused()
    assert_same(outcome(made[0]), borrowed)  # trained on while the engine sleeps
    engine.wake()
    assert not core.is_scheduler_paused()
    assert engine.generate([[5, 6, 7], [8, 9]], max_tokens=8, seed=1).completion_ids == before


def test_what_has_no_tensors_here_lends_none(base, engine, monkeypatch):
    with pytest.raises(CannotShareError, match="FakeEngine"):
        borrow_base(FakeEngine(load_base(base)))
    elsewhere = dataclasses.replace(engine.lend_base(), process=1)
    monkeypatch.setattr(engine, "lend_base", lambda: elsewhere)
    with pytest.raises(CannotShareError, match="process 1"):
        borrow_base(engine)


def test_a_base_that_vllm_has_quantised_by_itself_is_not_shared(model_dir):
    with LocalEngine(prepare_base(model_dir, "none"), **OPTIONS, quantization="bitsandbytes") as engine:
        with pytest.raises(CannotShareError, match="4-bit"):
            borrow_base(engine)
