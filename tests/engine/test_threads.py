"""One vLLM of this process and several threads: who begins with a version ends with it, and nobody waits for long."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import randomise, score, since_vllm

from qlora_rl import (
    AdapterSync,
    EngineBrokenError,
    LocalEngine,
    RolloutCancelledError,
    SamplingSpec,
    VersionGoneError,
)
from qlora_rl.sync.in_place import InPlaceTransport

LONG = SamplingSpec(max_tokens=56, seed=3, extra={"min_tokens": 56})
# As in test_local.py; a version in the place of another is above 0.1.
MEAN_TOLERANCE = 0.02


@pytest.fixture
def pushes(engine, adapted):
    """Pushes a policy of its own for every seed, into the engine's buffers."""
    sync = AdapterSync(adapted, engine, InPlaceTransport())

    def push(seed):
        if seed is not None:
            randomise(adapted, 0.1, seed=seed)
        return sync.push().version

    push.transport = sync.transport

    engine.drop_adapter()
    yield push
    engine.drop_adapter()
    sync.close()


def begin(pool, engine, *args, **fields):
    """A call in another thread that has begun."""
    before = len(engine._driver._open)
    future = pool.submit(engine.generate, *args, **fields)
    while len(engine._driver._open) == before:
        assert not future.done()
        time.sleep(0.001)
    return future


def test_what_began_with_a_version_ends_with_it_though_another_is_pushed_in_between(engine, adapted, prompts, pushes):
    first = pushes(1)
    expected = engine.generate(prompts, LONG)
    with ThreadPoolExecutor(2) as pool:
        old = begin(pool, engine, prompts, LONG)
        second = pushes(2)  # and its score: both go in between
        assert not old.done(), "the push has waited for the rollout"
        new = begin(pool, engine, prompts, LONG)  # two versions in one batch of vLLM
        named = engine.generate(prompts, LONG, version=first)
        old, new = old.result(), new.result()
    assert [old.version, new.version, named.version] == [first, second, first]
    # In other company, and after other pushes: the same tokens with the same probabilities.
    for rollout in (old, named):
        assert rollout.completion_ids == expected.completion_ids
        assert rollout.logprobs == expected.logprobs
    for seed, rollout, other in ((1, old, new), (2, new, old)):
        randomise(adapted, 0.1, seed=seed)
        assert score(adapted, prompts, rollout).mean() < MEAN_TOLERANCE
        assert score(adapted, prompts, other).mean() > 5 * MEAN_TOLERANCE


def test_a_version_whose_slot_was_written_anew_is_gone(engine, prompts, pushes):
    versions = [pushes(seed) for seed in (1, 2, 3)]
    found = [engine.generate(prompts, max_tokens=8, seed=1, version=version).version for version in versions[1:]]
    assert found == versions[1:]
    with pytest.raises(VersionGoneError, match=f"version={versions[0]} is asked for, and the engine holds version="):
        engine.generate(prompts, max_tokens=8, version=versions[0])
    engine.drop_adapter()
    with pytest.raises(VersionGoneError):
        engine.generate(prompts, max_tokens=8, version=versions[1])


def test_another_thread_can_end_a_rollout_and_others_go_on_afterwards(engine, prompts, pushes):
    pushes(1)
    expected = engine.generate(prompts, max_tokens=8, seed=1)
    with ThreadPoolExecutor(1) as pool:
        many = begin(pool, engine, [list(p) for p in prompts for _ in range(8)], LONG)
        engine.cancel()
        with pytest.raises(RolloutCancelledError):
            many.result(60)
    assert engine.llm.llm_engine.get_num_unfinished_requests() == 0
    assert engine.generate(prompts, max_tokens=8, seed=1).logprobs == expected.logprobs


def test_a_failed_step_ends_every_call_that_was_open_and_the_engine_is_built_anew(base, prompts, monkeypatch):
    with LocalEngine(base, max_lora_rank=8, max_model_length=64, max_num_seqs=32) as engine:
        expected = engine.generate(prompts, max_tokens=8, seed=1)
        real, open_calls = engine.llm.llm_engine.step, threading.Event()

        def fail_when_both_are_there():
            if len(engine._driver._open) == 2:
                open_calls.set()
                raise RuntimeError("the GPU fell off the bus")
            return real()

        monkeypatch.setattr(engine.llm.llm_engine, "step", fail_when_both_are_there)
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(engine.generate, prompts, LONG) for _ in range(2)]
            for call in calls:
                with pytest.raises(EngineBrokenError, match="fell off the bus"):
                    call.result(60)
        assert open_calls.is_set()
        assert engine.generate(prompts, max_tokens=8, seed=1).logprobs == expected.logprobs


@pytest.fixture
def slowly(engine, monkeypatch):
    """Steps of vLLM that leave time for pushes in the middle of a rollout, on whatever machine."""
    real = engine.llm.llm_engine.step
    monkeypatch.setattr(engine.llm.llm_engine, "step", lambda: (time.sleep(0.01), real())[1])


def test_a_slot_is_not_written_while_a_rollout_is_sampled_out_of_it(engine, prompts, pushes, slowly):
    versions = [pushes(1), pushes(2)]
    expected = engine.generate(prompts, LONG)
    with ThreadPoolExecutor(1) as pool:
        old = begin(pool, engine, prompts, LONG)
        pushes(3)
        assert not old.done(), "a push into the other slot waits for nobody"
        pushes(4)  # into the one out of which it is sampled
        old = old.result()
    assert old.version == versions[1]
    assert old.completion_ids == expected.completion_ids
    assert old.logprobs == expected.logprobs


def test_from_the_moment_at_which_a_slot_is_written_its_version_is_gone(engine, adapted, prompts, pushes):
    versions = [pushes(1), pushes(2)]
    randomise(adapted, 0.1, seed=3)
    found = []

    class Transport(InPlaceTransport):
        def _serve(self, *args):
            if self._live and self._live[-1].version == versions[1]:  # it is written, and nobody has been told
                with pytest.raises(VersionGoneError):
                    engine.generate(prompts, max_tokens=8, version=versions[0])
                found.append(engine.generate(prompts, max_tokens=8, version=versions[1]).version)
            super()._serve(*args)

    pushes.transport.__class__ = Transport
    pushes(3)
    assert found == [versions[1]]


@since_vllm("0.31", "a CPU sampler that keeps the seeds of a step in which another request, as the score's, has none")
def test_nan_of_a_version_does_not_touch_what_others_are_drawing_with_another(engine, adapted, prompts, pushes, slowly):
    first = pushes(1)
    expected = engine.generate(prompts, LONG)
    with ThreadPoolExecutor(1) as pool:
        old = begin(pool, engine, prompts, LONG)
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.data.mul_(1e30)
        pushes(None)
        assert not old.done()
        assert any(value != value for row in engine.score(prompts) for value in row)
        old = old.result()
    assert old.version == first
    assert old.completion_ids == expected.completion_ids
    assert old.logprobs == expected.logprobs
