"""Overlapping rollouts on several engines: what is sampled by whom, when one dies, stands still, comes back, or is
slow."""

import threading
import time

import pytest
from fakes import Here
from test_async import Counted, Reward, rows, steps_of

from qlora_rl import load_base
from qlora_rl.engine.client import EngineClient
from qlora_rl.engine.fleet import Fleet
from qlora_rl.engine.fleet import replicas as team


@pytest.fixture
def replicas(base):
    lines = [Here(name, load_base(base)) for name in ("one", "two", "three")]
    return [EngineClient(line, timeout_s=60.0, wait_s=0.0) for line in lines]


@pytest.fixture
def fleet(replicas, monkeypatch):
    monkeypatch.setattr(team, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(team, "_LOOK_SELDOM_S", 0.0)
    with Fleet(replicas, wait_s=60.0) as fleet:
        yield fleet


@pytest.fixture
def make_async(base, config, lora):
    """A trainer on the tiny base; arguments replace the usual ones."""
    made = []

    def make(cls, **arguments):
        made.append(cls(**{"model": base, "peft_config": lora} | arguments))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
    assert not [thread for thread in threading.enumerate() if "qlora-rl-rollouts" in thread.name]


def epoch(config, **fields):
    return config(**{"max_steps": -1, "num_train_epochs": 1, **fields})


def check(trainer, reward, staleness, count):
    """Every prompt of the epoch was sampled, rewarded and trained on once, and none was too old."""
    assert trainer.trained == reward.seen == dict.fromkeys(range(count), 2)
    assert len(trainer.staleness) == count // 2
    assert all(age == pushed - drew <= staleness for pushed, drew, age in trainer.staleness)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_one_that_dies_in_a_rollout_and_comes_back_changes_nothing_that_is_trained_on(
    make_async,
    config,
    fleet,
    replicas,
    staleness,
):
    reward = Reward(seconds=0.05)
    replicas[1].connection.dies_at = 4

    def revive():
        while not trainer.state.global_step >= 5:
            time.sleep(0.01)
        replicas[1].connection.start_again()

    arguments = {"reward_funcs": reward, "train_dataset": rows(32), "max_staleness": staleness, "rollout": fleet}
    trainer = make_async(Counted, args=epoch(config), **arguments)
    assert trainer.bridge.holds_two
    thread = threading.Thread(target=revive)
    thread.start()
    trainer.train()
    thread.join()
    check(trainer, reward, staleness, 32)
    # What the dead one had begun was sampled by others, once.
    assert sum(each.connection.sampled for each in replicas) == 64
    fleet.wake()
    assert fleet.live == replicas
    assert replicas[1].incarnation == 2
    assert {each.version for each in replicas} == {fleet.version} == {16}
    assert len({tuple(sorted(each.held_adapter(4).items())) for each in replicas}) == 1
    assert max(line["mismatch_kl"] for line in steps_of(trainer)[:1]) < 1e-3


def test_one_that_stands_still_does_not_stop_the_steps_and_is_not_counted_twice(
    make_async,
    config,
    fleet,
    replicas,
    monkeypatch,
):
    monkeypatch.setattr(team, "_STRAGGLES_AFTER_S", 2.0)  # that none of the others is taken for one on a busy machine
    reward = Reward()
    arguments = {"reward_funcs": reward, "train_dataset": rows(16), "max_staleness": 1, "rollout": fleet}
    trainer = make_async(Counted, args=epoch(config), **arguments)
    replicas[2].connection.may_answer.clear()
    trainer.train()
    check(trainer, reward, 1, 16)
    assert replicas[2] not in fleet.live
    counted = sum(each.connection.sampled for each in replicas[:2])
    assert (counted, replicas[2].connection.sampled) == (32, 0)
    replicas[2].connection.may_answer.set()
    end = time.monotonic() + 60
    while replicas[2] not in fleet.live:
        assert time.monotonic() < end
        fleet.wake()
    assert replicas[2].version == fleet.version


def test_no_batch_is_sampled_further_ahead_than_the_bound(make_async, config, fleet):
    """Back-pressure: engines that are faster than the trainer wait for it."""
    reward, ahead = Reward(), []

    class Slow(Counted):
        def _generate_and_score_completions(self, inputs):
            ahead.append(reward.calls - len(ahead))
            time.sleep(0.1)
            return super()._generate_and_score_completions(inputs)

    arguments = {"reward_funcs": reward, "train_dataset": rows(24), "max_staleness": 2, "rollout": fleet}
    trainer = make_async(Slow, args=epoch(config), **arguments)
    trainer.train()
    check(trainer, reward, 2, 24)
    assert 1 <= max(ahead) <= 3  # the batch of this step, and two more


def test_a_replica_that_is_faster_draws_more_of_the_prompts(make_async, config, replicas):
    one, two, _ = replicas
    one.connection.pause_s, two.connection.pause_s = 0.12, 0.03
    reward = Reward()
    with Fleet([one, two]) as fleet:
        arguments = {"reward_funcs": reward, "train_dataset": rows(96), "max_staleness": 0, "rollout": fleet}
        trainer = make_async(
            Counted, args=epoch(config, per_device_train_batch_size=24, max_completion_length=1), **arguments
        )
        trainer.train()
        assert trainer.trained == reward.seen == dict.fromkeys(range(96), 2)
        assert two.connection.sampled > 1.2 * one.connection.sampled  # a busy machine is slower at both
