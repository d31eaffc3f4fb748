"""Engines on an NVIDIA GPU: `make gpu`. Written on machines without one; not yet seen to pass."""

import pytest
import torch
from support import DEVICE, needs_card, on_a_card, since_vllm

from qlora_rl import LocalEngine, borrow_base, load_base, prepare_base, verify_base

pytestmark = [pytest.mark.gpu, on_a_card()]

PROMPTS = [[40 + i, 41, 42, 43 + i] for i in range(8)]


@needs_card
def test_a_woken_engine_holds_the_base_that_fell_asleep(base):
    model = load_base(base)
    with LocalEngine(base, max_model_length=64, max_num_seqs=8, enable_sleep=True) as engine:
        proof = verify_base(model, engine)
        free_awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > free_awake
        engine.wake()
        assert engine.describe_base() == proof.theirs
        assert engine.generate(PROMPTS, max_tokens=8, seed=1).tokens > 0


def logits(model):
    with torch.no_grad():
        return model(torch.tensor(PROMPTS, device=model.device)).logits


def places(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


# vLLM's CPU backend packs 16-bit weights away.
@pytest.mark.parametrize("quant", ["nf4", pytest.param("none", marks=needs_card)])
def test_the_trainer_computes_on_the_engines_own_tensors(model_dir, quant):
    base = prepare_base(model_dir, quant)
    loaded = load_base(base)
    with LocalEngine(base, max_model_length=64, max_num_seqs=8) as engine:
        model = borrow_base(engine)
        assert not model.qlora_loan.copied
        lent = engine.lend_base().weights
        assert all(place == lent[name].values.data_ptr() for name, place in places(model).items())
        assert {p.device for p in model.parameters()} == {p.device for p in loaded.parameters()}
        assert torch.equal(logits(model), logits(loaded))
        assert verify_base(model, engine).is_verified
        del model


@needs_card
@since_vllm("0.31", "release_kv_cache_memory: before it no engine sleeps that lends its base")
def test_lent_weights_stay_in_place_while_the_engine_sleeps(base):
    with LocalEngine(base, max_model_length=64, max_num_seqs=8, enable_sleep=True) as engine:
        model = borrow_base(engine)
        before, where = logits(model), places(model)
        rollout = engine.generate(PROMPTS, max_tokens=8, seed=1)
        free_awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] > free_awake  # the KV cache
        assert torch.equal(logits(model), before)
        engine.wake()
        assert places(model) == where
        assert torch.equal(logits(model), before)
        assert engine.generate(PROMPTS, max_tokens=8, seed=1).completion_ids == rollout.completion_ids
        del model


def test_a_push_in_place_is_seen_by_captured_graphs(base, adapted, tmp_path):
    """The graphs were captured before the first adapter came; in place and through a directory give the same tokens."""
    from support import randomise

    from qlora_rl import AdapterSync, Canary
    from qlora_rl.sync.in_place import InPlaceTransport
    from qlora_rl.sync.transports import DirectoryTransport

    model, with_graphs = adapted.to(DEVICE), {"enforce_eager": False} if DEVICE == "cuda" else {}
    with LocalEngine(base, max_lora_rank=8, max_model_length=64, max_num_seqs=8, **with_graphs) as engine:
        canary = Canary(model, engine)
        canary.calibrate()
        in_place = AdapterSync(model, engine, InPlaceTransport(), canary)
        sampled = []
        for seed in range(4):
            randomise(model.cpu(), seed=seed)
            model.to(DEVICE)
            in_place.push()
            sampled.append(engine.generate(PROMPTS, max_tokens=8, temperature=0.0))
        AdapterSync(model, engine, DirectoryTransport(tmp_path), canary).push()
        again = engine.generate(PROMPTS, max_tokens=8, temperature=0.0)
        in_place.close()
    assert again.completion_ids == sampled[-1].completion_ids
    assert again.logprobs == sampled[-1].logprobs
    assert sampled[0].logprobs != sampled[1].logprobs


def test_what_another_thread_generates_is_behind_a_push_of_this_one(base, adapted):
    """The push is held up on the device; the other thread has a stream of its own there."""
    from concurrent.futures import ThreadPoolExecutor

    from support import randomise

    from qlora_rl import AdapterSync
    from qlora_rl.sync.in_place import InPlaceTransport

    model = adapted.to(DEVICE)
    with (
        LocalEngine(base, max_lora_rank=8, max_model_length=64, max_num_seqs=8) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        sync = AdapterSync(model, engine, InPlaceTransport())
        for seed in range(4):
            randomise(model.cpu(), seed=seed)
            model.to(DEVICE)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
                torch.cuda._sleep(10**9)  # cycles
            sync.push()
            elsewhere = pool.submit(engine.generate, PROMPTS, max_tokens=8, temperature=0.0).result()
            here = engine.generate(PROMPTS, max_tokens=8, temperature=0.0)
            assert elsewhere.completion_ids == here.completion_ids
            assert elsewhere.logprobs == here.logprobs
        sync.close()


@needs_card
def test_an_engine_that_can_sleep_is_rebuilt_though_its_base_is_lent(base, caplog):
    """vLLM's allocator takes one engine a process, and the model holds tensors of the one before."""
    for is_lent in (False, True):
        with LocalEngine(base, max_model_length=64, max_num_seqs=8, enable_sleep=True) as engine:
            model = borrow_base(engine) if is_lent else None
            engine.generate(PROMPTS, max_tokens=8, seed=1)
            engine._is_broken = True
            engine.generate(PROMPTS, max_tokens=8, seed=1)
            assert ("stays awake" in caplog.text) == is_lent
            assert engine.capabilities().can_sleep != is_lent
            del model
