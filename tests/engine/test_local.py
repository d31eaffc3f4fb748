"""LocalEngine alone: real vLLM, real bitsandbytes, no trainer."""

import gc
import importlib
import logging
import os
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import make_model, randomise, score

from qlora_rl import (
    ConfigConflictError,
    EngineBrokenError,
    EngineClosedError,
    EngineUnsupportedError,
    LocalEngine,
    PromptTooLongError,
    SamplingSpec,
    SyncError,
    export_adapter,
    load_base,
    prepare_base,
)
from qlora_rl.adapter.store import AdapterStore
from qlora_rl.contracts import AdapterBundle
from qlora_rl.engine import compat
from qlora_rl.engine.options import start_options

# bf16 against bf16 of another library, scales as loaded (not repaired), a random model scaled up threefold. Measured
# mean 0.003 to 0.011, max 0.05; a missing adapter is above 0.1 (see test_an_adapter_is_really_applied).
MEAN_TOLERANCE, MAX_TOLERANCE = 0.02, 0.15


@pytest.fixture
def store():
    store = AdapterStore()
    yield store
    store.close()


def calls_of_the_collector(base, monkeypatch):
    """Of `gc.freeze` and `gc.unfreeze` in the life of an engine, without repetitions. The tests freeze otherwise:
    conftest.py."""
    asked = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: asked[-1:] == [name] or asked.append(name))
    with LocalEngine(base, max_model_length=32, max_num_seqs=4):
        assert asked == ["freeze"]
    return asked


def test_what_vllm_has_frozen_can_be_collected_after_the_end_of_its_engine(base, monkeypatch):
    """Before the engine of this module has started: the last one's end is another than that of one beside others."""
    assert compat._alive == 0
    assert calls_of_the_collector(base, monkeypatch) == ["freeze", "unfreeze"]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_its_logprobs_are_the_trainers_at_every_temperature(engine, base, prompts, temperature):
    rollout = engine.generate(prompts, temperature=temperature, max_tokens=12, seed=1)
    difference = score(load_base(base), prompts, rollout, temperature)
    assert difference.mean() < MEAN_TOLERANCE
    assert difference.max() < MAX_TOLERANCE


def test_a_seed_per_request_gives_the_same_tokens_in_any_company(engine, prompts):
    spec = SamplingSpec(max_tokens=12, seed=3)
    together = engine.generate(prompts, spec)
    again = engine.generate(prompts, spec)
    fewer = engine.generate(prompts[:3], spec)
    assert again.completion_ids == together.completion_ids
    assert again.logprobs == together.logprobs
    assert fewer.completion_ids == together.completion_ids[:3]


def test_it_stops_at_an_end_that_only_the_trainer_knows_and_says_which_completions_have_ended(engine, prompts):
    """As for a base model that is trained with a chat's EOS."""
    spec = SamplingSpec(max_tokens=12, seed=3)
    whole = engine.generate(prompts, spec)
    assert whole.has_ended == [ids[-1] == 1 for ids in whole.completion_ids]
    end = next(token for ids in whole.completion_ids for token in ids[1:-1] if chr(token).isalnum())
    rollout = engine.generate(prompts, replace(spec, stop_token_ids=(end,)))
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in whole.completion_ids]
    assert rollout.completion_ids == expected
    assert rollout.has_ended == [ids[-1] in (1, end) for ids in expected]
    by_text = engine.generate(prompts, replace(spec, extra={"stop": [chr(end)]}))
    assert by_text.has_ended == rollout.has_ended
    ignoring = {"ignore_eos": True}  # a wish
    assert not any(engine.generate(prompts, replace(spec, stop_token_ids=(end,), extra=ignoring)).has_ended)


def test_equal_prompts_of_one_call_get_different_completions(engine, prompts):
    rollout = engine.generate([prompts[0]] * 8, max_tokens=12, seed=3)
    assert len({tuple(ids) for ids in rollout.completion_ids}) > 1


def test_greedy_takes_the_likeliest_token(engine, base, prompts):
    rollout = engine.generate(prompts, temperature=0.0, max_tokens=1)
    model = load_base(base)
    for prompt, ids in zip(prompts, rollout.completion_ids, strict=True):
        logits_V = model(torch.tensor([prompt])).logits[0, -1].float()
        assert logits_V[ids[0]] > logits_V.max() - 0.1  # bf16 may turn a near tie


def test_a_rollout_has_torch_compile_nothing(engine, prompts):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()  # what an earlier test has compiled would be compiled again
    before = sum(counters["frames"].values())
    rollout = engine.generate(prompts, max_tokens=4, seed=1)
    engine.score([prompt + ids for prompt, ids in zip(prompts, rollout.completion_ids, strict=True)])
    assert sum(counters["frames"].values()) == before


def test_ranks_of_tokens_are_counted_as_vllm_counts_them(engine):
    from vllm.v1.sample import sampler

    compiled = importlib.reload(importlib.import_module("vllm.v1.sample.ops.logprobs")).batched_count_greater_than
    logprobs = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with ties
    chosen = logprobs.gather(1, torch.tensor([[3], [0], [63], [7], [7]]))
    assert not hasattr(sampler.batched_count_greater_than, "_torchdynamo_orig_callable")
    assert torch.equal(compiled(logprobs, chosen), sampler.batched_count_greater_than(logprobs, chosen))


def test_a_regex_is_obeyed(engine, prompts):
    rollout = engine.generate(prompts, regex="[0-9]{3}", max_tokens=8, seed=1)
    texts = [engine.tokenizer.decode(ids, skip_special_tokens=True) for ids in rollout.completion_ids]
    assert all(len(text) == 3 and text.isdigit() for text in texts)


def test_a_regex_that_no_token_goes_on_in_is_the_callers_error(engine, prompts):
    before = engine.incarnation
    with pytest.raises(ConfigConflictError, match="pattern"):
        engine.generate(prompts, regex="\u0663", max_tokens=8, seed=1, extra={"logit_bias": {5: 1.0}})
    assert len(engine.generate(prompts, max_tokens=2).completion_ids) == len(prompts)
    assert engine.incarnation == before


def test_further_sampling_arguments_reach_vllm(engine, prompts):
    rollout = engine.generate(prompts, max_tokens=12, seed=1, extra={"min_tokens": 12})
    assert {len(ids) for ids in rollout.completion_ids} == {12}


def test_requests_are_handed_to_vllm_as_it_would_make_them_one_by_one(engine, prompts):
    """Rendered together, and with parameters that vLLM does not copy: what is sampled is the same."""
    from qlora_rl.engine.images import engine_inputs
    from qlora_rl.engine.sampling import sampling_params

    renderer, spec = engine._llm.llm_engine.renderer, SamplingSpec(max_tokens=12, seed=3)
    for made, prompt in zip(engine_inputs(renderer, prompts, "salt", ""), prompts, strict=True):
        (alone,) = renderer.render_cmpl([{"prompt_token_ids": list(prompt), "cache_salt": "salt"}])
        assert {**made, "arrival_time": 0} == {**alone, "arrival_time": 0}
    copied = SamplingSpec(max_tokens=12, seed=3, extra={"skip_special_tokens": True})
    assert all(params.skip_clone for params in sampling_params(spec, [0]))
    one, other = sampling_params(SamplingSpec(extra={"logit_bias": {"5": 1.0}}), [0, 1])
    assert one.logit_bias == other.logit_bias == {5: 1.0}
    assert one.logit_bias is not other.logit_bias  # vLLM copies neither
    assert engine.generate(prompts, spec).completion_ids == engine.generate(prompts, copied).completion_ids
    assert engine.generate(prompts, spec).logprobs == engine.generate(prompts, copied).logprobs


def test_prompts_that_do_not_fit_into_one_step_of_vllm_are_sampled_with_their_seeds(engine):
    """60 x 40 tokens, 512 a step: a prompt that is cut in two ended vLLM 0.31 on the CPU."""
    long = [[2 + (7 * row + place) % 90 for place in range(40)] for row in range(60)]
    together = engine.generate(long, SamplingSpec(max_tokens=3, seed=5))
    assert [len(ids) > 0 for ids in together.completion_ids] == [True] * 60
    alone = engine.generate(long[:2], SamplingSpec(max_tokens=3, seed=5))
    assert alone.completion_ids == together.completion_ids[:2]


def test_strings_are_tokenised(engine):
    from_text = engine.generate(["(*,)"], temperature=0.0, max_tokens=4)
    from_ids = engine.generate([engine.tokenizer.encode("(*,)")], temperature=0.0, max_tokens=4)
    assert from_text.completion_ids == from_ids.completion_ids


def test_a_cache_for_less_than_one_sequence_is_said_in_our_words(base):
    with pytest.raises(EngineUnsupportedError, match="or raise kv_cache_gib"):
        LocalEngine(base, max_model_length=128, max_num_seqs=1, kv_cache_gib=2**-16)


def test_prompts_that_are_too_long_or_empty_are_named_before_anything_runs(engine, prompts):
    with pytest.raises(PromptTooLongError) as caught:
        engine.generate([prompts[0], [40] * 64, []], max_tokens=4)
    assert "prompt 1 has 64 tokens" in str(caught.value)
    assert "prompt 2 is empty" in str(caught.value)
    assert "max_model_length=64" in str(caught.value)
    assert len(engine.generate([[40] * 63], max_tokens=4).completion_ids[0]) == 1


def test_a_bad_sampling_argument_leaves_the_engine_usable(engine, prompts):
    with pytest.raises(ConfigConflictError, match="temperature"):
        engine.generate(prompts, temperature=-1.0, max_tokens=4)
    with pytest.raises(EngineUnsupportedError, match="prompt 1"):
        engine.generate([prompts[0], [10**6]], max_tokens=4)
    assert len(engine.generate(prompts, max_tokens=4).completion_ids) == 8


def test_an_adapter_is_really_applied_and_versions_do_not_mix(engine, adapted, prompts, store):
    bare = engine.generate(prompts, temperature=0.0, max_tokens=8)
    seen = [bare.completion_ids]
    for version, scale in enumerate([0.05, 0.1, 0.2], start=engine.version + 1):
        randomise(adapted, scale, seed=version)
        engine.load_adapter(store.publish(export_adapter(adapted, dtype=torch.bfloat16), version), version)
        rollout = engine.generate(prompts, max_tokens=8, seed=version)
        assert rollout.version == engine.version == version
        difference = score(adapted, prompts, rollout)
        assert difference.mean() < MEAN_TOLERANCE
        assert difference.max() < MAX_TOLERANCE * (1 + scale * 10)
        with adapted.disable_adapter():
            assert score(adapted, prompts, rollout).mean() > 5 * difference.mean()
        seen.append(engine.generate(prompts, temperature=0.0, max_tokens=8).completion_ids)
        store.retire()
    assert len({str(ids) for ids in seen}) == 4


def test_a_bad_adapter_leaves_the_old_version_serving(engine, adapted, prompts, store):
    good = export_adapter(adapted, dtype=torch.bfloat16)
    version = engine.version + 1
    engine.load_adapter(store.publish(good, version), version)
    before = engine.generate(prompts, max_tokens=8, seed=5)

    def broken(kind):
        tensors, config = dict(good.tensors), dict(good.config)
        if kind == "names":
            tensors = {name.replace("model.layers.0", "model.layers.9"): t for name, t in tensors.items()}
        elif kind == "rank":
            config["r"] = 64
        return AdapterBundle(tensors, config)

    for kind, message in [("names", "model.layers.9"), ("rank", "rank")]:
        with pytest.raises(SyncError, match=message):
            engine.load_adapter(store.publish(broken(kind), version + 1), version + 1)
    truncated = store.publish(good, version + 1)
    weights = truncated / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(SyncError, match="goes on serving"):
        engine.load_adapter(truncated, version + 1)
    with pytest.raises(SyncError):
        engine.load_adapter(store.root / "nowhere", version + 1)

    after = engine.generate(prompts, max_tokens=8, seed=5)
    assert after.version == version
    assert after.completion_ids == before.completion_ids
    assert after.logprobs == before.logprobs


def test_nan_of_one_adapter_does_not_reach_the_next(engine, adapted, store, prompts):
    """vLLM's attention reads blocks to their end: what a request left there, too."""
    good = export_adapter(adapted, dtype=torch.bfloat16)
    bad = AdapterBundle({n: t * 1e30 if "lora_B" in n else t for n, t in good.tensors.items()}, good.config)
    version = engine.version
    engine.load_adapter(store.publish(good, version + 1), version + 1)
    before = engine.generate(prompts, max_tokens=40, temperature=0.0)
    engine.load_adapter(store.publish(bad, version + 2), version + 2)
    assert None in engine.generate(prompts, max_tokens=40, temperature=0.0).logprobs[0]
    assert any(value != value for row in engine.score(prompts) for value in row)
    engine.load_adapter(store.publish(good, version + 3), version + 3)
    after = engine.generate(prompts, max_tokens=40, temperature=0.0)
    assert after.completion_ids == before.completion_ids
    assert after.logprobs == before.logprobs


def test_the_prefix_cache_never_serves_an_older_version(engine, adapted, store):
    long_prompt = [[40 + i % 20 for i in range(48)]]
    spec = SamplingSpec(max_tokens=8, temperature=0.0)
    results = {}
    for version, seed in enumerate([1, 2], start=engine.version + 1):
        randomise(adapted, 0.2, seed=seed)
        engine.load_adapter(store.publish(export_adapter(adapted, dtype=torch.bfloat16), version), version)
        engine.generate(long_prompt, spec)  # fills the cache of this version
        warm = engine.generate(long_prompt, spec)
        assert engine.llm.llm_engine.reset_prefix_cache()
        cold = engine.generate(long_prompt, spec)
        assert warm.logprobs == cold.logprobs
        results[version] = cold.logprobs
    first, second = results.values()
    assert first != second


def _generate_for_ever(engine, prompts):
    while True:
        engine.generate(prompts, max_tokens=56, seed=1, extra={"min_tokens": 50})


def _interrupt_in(seconds):
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_an_interrupted_generate_leaves_a_usable_engine(engine, prompts, interruptible):
    spec = SamplingSpec(max_tokens=8, temperature=0.0)
    expected = engine.generate(prompts, spec)
    many = [list(p) for p in prompts for _ in range(8)]
    for delay in (0.02, 0.1, 0.25):
        timer = _interrupt_in(delay)
        with pytest.raises(KeyboardInterrupt):
            _generate_for_ever(engine, many)
        timer.join()
        assert engine.llm.llm_engine.get_num_unfinished_requests() == 0
        started = time.perf_counter()
        found = engine.generate(prompts, spec)
        assert time.perf_counter() - started < 300  # it once never came back; seconds where the machine is busy
        assert found.completion_ids == expected.completion_ids
        assert found.logprobs == expected.logprobs
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failure_inside_vllm_rebuilds_the_engine_with_its_adapter(base, adapted, prompts, store, monkeypatch):
    with LocalEngine(base, max_lora_rank=8, max_model_length=64, max_num_seqs=8) as engine:
        engine.load_adapter(store.publish(export_adapter(adapted, dtype=torch.bfloat16), 1), 1)
        before = engine.generate(prompts, max_tokens=8, seed=1)
        broken = engine.llm.llm_engine

        def fail():
            raise RuntimeError("the GPU fell off the bus")

        monkeypatch.setattr(broken, "step", fail)
        with pytest.raises(EngineBrokenError, match="fell off the bus"):
            engine.generate(prompts, max_tokens=8, seed=1)
        after = engine.generate(prompts, max_tokens=8, seed=1)
        assert engine.llm.llm_engine is not broken
        assert (after.version, after.completion_ids) == (1, before.completion_ids)


def test_closing_is_final_and_repeatable(base):
    engine = LocalEngine(base, max_lora_rank=0, max_model_length=32, max_num_seqs=4)
    with pytest.raises(EngineUnsupportedError, match="without LoRA"):
        engine.load_adapter("anywhere", 1)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.generate([[40]], max_tokens=1)


def test_building_an_engine_leaves_environment_random_state_and_logs_alone(base, tmp_path, monkeypatch):
    for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE"):  # an engine before may have changed them
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        "vllm.logger._last_configured_logging_config", None, raising=False
    )  # as the first engine of a process
    own = logging.getLogger("of.the.caller")
    own.addHandler(logging.FileHandler(tmp_path / "log", mode="w"))
    before, state = dict(os.environ), torch.get_rng_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    with LocalEngine(base, max_model_length=32, max_num_seqs=4):
        changed = {k for k in {*before, *os.environ} if before.get(k) != os.environ.get(k)}
    assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "LD_PRELOAD", "LOCAL_WORLD_SIZE"} & changed
    own.warning("written after the engine")
    assert "written after the engine" in (tmp_path / "log").read_text()
    own.handlers.pop().close()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert torch.set_num_threads is set_threads  # vLLM puts one in its place that does nothing


def test_a_head_size_that_the_cpu_cannot_serve_is_rejected_with_the_sizes(tmp_path):
    base = prepare_base(make_model(tmp_path / "narrow", head_dim=16))
    with pytest.raises(EngineUnsupportedError, match="head_dim=16"):
        LocalEngine(base)


def test_settings_that_cannot_work_are_rejected_before_vllm_starts(base, model_dir):
    with pytest.raises(EngineUnsupportedError, match="rank=513 > max_lora_rank=512"):
        LocalEngine(base, max_lora_rank=513)
    with pytest.raises(EngineUnsupportedError, match="tensor_parallel_size=2 with fully_sharded_loras"):
        LocalEngine(base, tensor_parallel_size=2, fully_sharded_loras=True)
    with pytest.raises(EngineUnsupportedError, match="compute_dtype=float32"):
        LocalEngine(prepare_base(model_dir, compute_dtype="float32"))


def test_a_version_loaded_again_is_really_loaded_again(engine, adapted, prompts, store):
    version = engine.version + 1
    found = []
    for seed in (1, 2):
        randomise(adapted, 0.2, seed=seed)
        engine.load_adapter(store.publish(export_adapter(adapted, dtype=torch.bfloat16), version), version)
        rollout = engine.generate(prompts, max_tokens=8, seed=0)
        assert score(adapted, prompts, rollout).mean() < MEAN_TOLERANCE
        found.append(rollout.logprobs)
    assert found[0] != found[1]


def test_a_rebuilt_engine_without_its_adapter_says_so_and_does_not_serve_the_bare_base(base, adapted, prompts, store):
    with LocalEngine(base, max_lora_rank=8, max_model_length=64, max_num_seqs=8) as engine:
        engine.load_adapter(store.publish(export_adapter(adapted, dtype=torch.bfloat16), 1), 1)
        store.close()
        engine._is_broken = True
        for _ in range(2):  # not only the first time
            with pytest.raises(EngineBrokenError):
                engine.generate(prompts, max_tokens=4)
        engine.drop_adapter()
        assert engine.version == 0
        assert len(engine.generate(prompts, max_tokens=4).completion_ids) == 8


def test_closing_one_engine_leaves_another_alone(engine, base, prompts):
    from vllm.lora.ops.triton_ops import utils

    before = engine.generate(prompts, max_tokens=4, temperature=0.0)
    utils._LORA_A_PTR_DICT[0,] = utils._LORA_B_PTR_DICT[0,] = ()  # on a GPU captured graphs read what is in these
    with LocalEngine(base, max_model_length=32, max_num_seqs=8) as second:
        second.generate(prompts, max_tokens=4)
        engine.generate(prompts, max_tokens=4)
        if finalizer := vars(second.llm.llm_engine.engine_core).pop("_finalizer", None):  # vLLM before 0.31 has none
            finalizer.detach()
    assert engine.generate(prompts, max_tokens=4, temperature=0.0).completion_ids == before.completion_ids
    assert (0,) in utils._LORA_A_PTR_DICT
    compat.forget_adapter_places()  # what the last engine of a process does
    assert not utils._LORA_A_PTR_DICT
    assert not utils._LORA_B_PTR_DICT


def test_with_a_cache_of_a_given_size_an_engine_starts_on_a_card_that_is_nearly_full(base, monkeypatch):
    """vLLM's own check, as of an engine that is rebuilt while the trainer holds the rest."""
    from vllm.config import CacheConfig
    from vllm.v1.worker.utils import request_memory

    monkeypatch.setattr(compat, "platform_is_cpu", lambda: False)
    card = SimpleNamespace(total_memory=80 * 2**30, free_memory=2**30, device_="cuda")

    def asked(**options):
        arguments = start_options(base.path, gpu_memory_utilization=0.3, **options).arguments
        names = {"gpu_memory_utilization", "kv_cache_memory_bytes"} & set(arguments)
        return request_memory(card, CacheConfig(**{name: arguments[name] for name in names}))

    assert asked(kv_cache_gib=0.25) < card.free_memory
    assert asked(kv_cache_memory_bytes=2**28) < card.free_memory
    with pytest.raises(ValueError, match="Free memory on device"):
        asked()


def test_what_vllms_sleep_mode_still_holds_is_counted(monkeypatch):
    from vllm.device_allocator import cumem

    assert compat.held_for_sleep() == 0
    pool = cumem.CuMemAllocator()
    pool._python_malloc_callback((0, 4096, 1, 0))  # device, bytes, address, chunks
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", pool)
    assert compat.held_for_sleep() == 4096


def test_so_is_what_an_engine_beside_it_has_frozen(engine, base, monkeypatch):
    assert calls_of_the_collector(base, monkeypatch) == ["freeze", "unfreeze"]
