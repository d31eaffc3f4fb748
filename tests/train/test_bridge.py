"""The bridge alone: one engine, one strategy, no trainer."""

import pytest

from qlora_rl import (
    AdapterSync,
    Canary,
    CanaryError,
    EngineBrokenError,
    FakeEngine,
    NotYetSupportedError,
    PromptTooLongError,
    SamplingSpec,
    load_base,
)
from qlora_rl.base.unsupported_configs import Limit
from qlora_rl.sync.transports import DirectoryTransport
from qlora_rl.train.rollouts.bridge import EngineBridge

PROMPTS = [[40, 41, 42], [43, 44]]


@pytest.fixture
def parts(base, adapted):
    engine = FakeEngine(load_base(base), max_model_length=32)
    canary = Canary(adapted, engine)
    canary.calibrate()
    strategy = AdapterSync(adapted, engine, DirectoryTransport(), canary)
    yield engine, strategy
    strategy.close()
    engine.close()


def bridge(engine, strategy, **fields):
    return EngineBridge(engine, strategy, SamplingSpec(max_tokens=3), seed=7, **fields)


def test_generate_gives_trl_what_it_unpacks(parts):
    prompts, ids, logprobs, tokens = bridge(*parts).generate(PROMPTS, None, 2)
    assert prompts == PROMPTS
    assert [len(i) for i in ids] == [len(x) for x in logprobs] == [len(t) for t in tokens]
    assert all(len(value) == 1 for row in logprobs for value in row)
    assert [[t[0] for t in row] for row in tokens] == ids


def test_what_is_sampled_depends_on_the_step_and_not_on_evaluations_or_on_what_came_before(parts):
    straight, resumed = bridge(*parts), bridge(*parts)
    sampled = {}
    for step in range(3):
        straight.begin(step, is_evaluation=True)
        evaluated = straight.generate(PROMPTS)[1]
        straight.begin(step)
        sampled[step] = [straight.generate(PROMPTS)[1] for _ in range(2)]
    resumed.begin(2)
    assert [resumed.generate(PROMPTS)[1] for _ in range(2)] == sampled[2]
    assert len({str(ids) for pair in [*sampled.values(), [evaluated]] for ids in pair}) == 7


def test_every_call_draws_anew_and_every_run_the_same(parts):
    first, second = bridge(*parts), bridge(*parts)
    calls = [first.generate(PROMPTS)[1] for _ in range(6)]
    assert calls == [second.generate(PROMPTS)[1] for _ in range(6)]
    assert len({str(ids) for ids in calls}) > 1


def test_it_sleeps_between_rollouts_and_proves_the_adapter_after_the_wake(parts, monkeypatch):
    engine, strategy = parts
    used = bridge(engine, strategy, sleeps=True)
    used.sync_weights()
    checks = []
    real = strategy.canary.check
    monkeypatch.setattr(strategy.canary, "check", lambda *a, **k: checks.append(k) or real(*a, **k))
    for _ in range(2):  # two turns: awake in between
        used.generate(PROMPTS)
        assert (engine.naps, checks) == (0, [])  # nothing happened since the push
    used.rest()
    used.generate(PROMPTS)  # the same step again: woken without a push
    used.rest()
    assert (engine.naps, checks) == (2, [{"scored": True}])
    used.sync_weights()
    used.generate(PROMPTS)
    used.rest()
    assert engine.naps == 3
    assert checks[1:] == [{}, {"scored": True}]  # the push's own proof, which need not score, and that of the wake


def test_an_adapter_lost_in_sleep_is_noticed_before_a_token_is_sampled(parts, monkeypatch):
    engine, strategy = parts
    used = bridge(engine, strategy, sleeps=True)
    used.sync_weights()
    used.generate(PROMPTS)
    used.rest()
    real = engine.wake

    def wake_without_it():
        real()
        for hook in engine._hooks:
            hook.remove()
        engine._held = {}

    monkeypatch.setattr(engine, "wake", wake_without_it)
    with pytest.raises(CanaryError, match="are missing"):
        used.generate(PROMPTS)


def test_what_happened_is_drained_once(parts):
    used = bridge(*parts)
    used.sync_weights()
    used.generate(PROMPTS)
    reports, tokens, seconds, naps = used.drain()
    assert [r.version for r in reports] == [1]
    assert tokens > 0
    assert seconds > 0
    assert naps == {}
    assert used.drain() == ([], 0, 0.0, {})


def test_the_kv_cache_is_away_while_the_policy_is_trained_and_back_for_each_push(parts, monkeypatch):
    """In this order, with the seconds of both; base and adapter stay, as the canary finds."""
    engine, strategy = parts
    used = bridge(engine, strategy, sleeps=True)
    calls = []
    for where, name in (
        (engine, "wake"),
        (engine, "sleep"),
        (engine, "generate"),
        (strategy, "push"),
        (strategy, "verify"),
    ):
        real = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, _name=name, _real=real, **k: calls.append(_name) or _real(*a, **k))
    for step in range(2):
        used.begin(step)
        used.sync_weights()
        used.generate(PROMPTS)
        used.rest()
        assert engine._is_asleep  # from here on the policy is trained
    first, second = calls[: calls.index("sleep") + 1], calls[calls.index("sleep") + 1 :]
    assert first == ["wake", "push", "wake", "generate", "sleep"]
    assert second == ["wake", "push", "verify", "wake", "generate", "sleep"]
    naps = used.drain()[3]
    assert naps.keys() == {"wake_seconds", "sleep_seconds"}
    assert min(naps.values()) > 0


def test_images_are_rejected(parts):
    with pytest.raises(NotYetSupportedError, match="images"):
        bridge(*parts).generate(PROMPTS, images=[["picture"], None])


@pytest.mark.parametrize("is_new", [True, False])
def test_an_engine_that_was_started_anew_in_a_rollout_is_given_the_policy_and_asked_again(parts, monkeypatch, is_new):
    engine, strategy = parts
    used = bridge(engine, strategy)
    used.sync_weights()
    real, verified = engine.generate, []

    def lost(*arguments):
        monkeypatch.setattr(engine, "generate", real)
        engine.incarnation += is_new
        raise EngineBrokenError("generating: weights version=1 were lost.")

    monkeypatch.setattr(engine, "generate", lost)
    monkeypatch.setattr(strategy, "verify", lambda: verified.append(engine.incarnation))
    if not is_new:
        with pytest.raises(EngineBrokenError):
            used.generate(PROMPTS)
        assert not verified
        return
    assert len(used.generate(PROMPTS)[1]) == 2
    assert verified == [engine.incarnation]


def test_a_prompt_beyond_what_the_config_allows_is_told_why_no_engine_takes_it(parts):
    limit = Limit(32, "vLLM rotates by the long factors of rope_scaling")
    for given in (limit, None):
        with pytest.raises(PromptTooLongError, match="max_model_length=32") as caught:
            bridge(*parts, limit=given).generate([[40] * 32])
        assert ("allows no more: beyond 32 tokens, vLLM rotates" in str(caught.value)) == (given is limit)
