"""QLoRAAsyncGRPOTrainer on real vLLM: what a rollout was sampled with, what overlap is worth, and that it learns the
same."""

import collections
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from support import score
from test_training import config, lines, reward_digits

from qlora_rl import QLoRAAsyncGRPOTrainer

# As in test_local.py.
MEAN_TOLERANCE = 0.02


class Waiting:
    """A reward that waits as an environment does, and counts the prompts that it sees."""

    __name__ = "waiting"

    def __init__(self, seconds, reward):
        self.seconds, self.reward, self.seen = seconds, reward, collections.Counter()
        self._lock = threading.Lock()

    def __call__(self, prompts, completions, **columns):
        time.sleep(self.seconds)
        with self._lock:
            self.seen.update(prompts)
        return self.reward(prompts=prompts, completions=completions, **columns)


def make(base, directory, reward, cls=QLoRAAsyncGRPOTrainer, rollout="colocate", **fields):
    ours = {name: fields.pop(name) for name in ("max_staleness", "rollout_threads", "engine_options") if name in fields}
    return cls(
        model=base,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": f"{a}+{a}="} for a in range(10, 26)]),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        args=config(directory, **{"max_steps": 8} | fields),
        rollout=rollout,
        **ours,
    )


@pytest.mark.parametrize(("rollout", "staleness"), [("colocate", 2), ("server", 1)])
def test_every_rollout_was_sampled_by_the_version_that_it_says_and_is_trained_on_once(
    base, tmp_path, rollout, staleness
):
    reward = Waiting(0.2, reward_digits)
    sampled, policies = [], {}
    options = {"base_compute": "vllm"} if rollout == "server" else None
    with make(base, tmp_path, reward, rollout=rollout, max_staleness=staleness, engine_options=options) as trainer:
        bridge, model = trainer.bridge, trainer.model
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        sample, push = bridge.sample, bridge.strategy.push

        def note_rollout(prompts, *args, **kwargs):
            sampled.append((prompts, sample(prompts, *args, **kwargs)))
            return sampled[-1][1]

        def note_policy():
            report = push()
            policies[report.version] = {n: p.detach().clone() for n, p in trained.items()}
            return report

        bridge.sample, bridge.strategy.push = note_rollout, note_policy
        assert bridge.holds_two
        if rollout == "server":  # which started with what the trainer was told
            assert trainer.engine._about["base_compute"] == "vllm"
        trainer.train()

        assert reward.seen == {f"{a}+{a}=": 4 for a in range(10, 26)}  # an epoch: every prompt, its four completions
        steps = lines(tmp_path)
        assert [step["step"] for step in steps] == list(range(1, 9))
        assert [step["policy_version"] for step in steps] == list(range(1, 9))
        ages = [step["policy_version"] - step["rollout_version"] for step in steps]
        assert ages == [step["staleness_max"] for step in steps]
        assert max(ages) <= staleness
        assert sum(ages) >= 4, "nothing overlaps"
        assert sorted(rollout.version for _, rollout in sampled) == sorted(step["rollout_version"] for step in steps)

        # By the tokens' own probabilities: the version that a rollout names has sampled it, and no other.
        is_told_apart = 0
        for prompts, found in sampled:
            distances = {}
            for version, policy in policies.items():
                with torch.no_grad():
                    for name, parameter in trained.items():
                        parameter.copy_(policy[name])
                distances[version] = float(score(model, prompts, found).mean())
            assert distances[found.version] < MEAN_TOLERANCE
            others = [distance for version, distance in distances.items() if version != found.version]
            is_told_apart += min(others) > 2 * distances[found.version]
        assert is_told_apart >= 6, "versions are too alike for the proof above to mean anything"
    assert not [thread for thread in threading.enumerate() if "qlora-rl-rollouts" in thread.name]


@pytest.mark.parametrize("threads", [1, 2])  # with one, the batch that is waited for is the only one that runs
@pytest.mark.parametrize("rollout", ["colocate", pytest.param("server", marks=pytest.mark.full)])
def test_ctrl_c_ends_a_rollout_in_its_thread(base, tmp_path, rollout, threads, interruptible):
    """The trainer waits for a rollout that would never end. That a server lets go is in test_server.py and
    unit/test_client.py too."""
    fields = {"rollout": rollout, "rollout_threads": threads, "max_completion_length": 20}
    with make(base, tmp_path, reward_digits, **fields) as trainer:
        engine, has_begun, struck = trainer.engine, threading.Event(), []
        real = engine.generate

        def for_ever(*args, **kwargs):
            while True:
                real(*args, **kwargs)
                has_begun.set()

        def strike():
            if has_begun.wait(120):
                time.sleep(0.5)  # the trainer has pushed, and waits for the rollout
                struck.append(time.perf_counter())
                os.kill(os.getpid(), signal.SIGINT)

        trainer.bridge.engine = _Endless(engine, for_ever)
        striker = threading.Thread(target=strike)
        striker.start()
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        striker.join()
        assert time.perf_counter() - struck[0] < 120
        assert not [thread for thread in threading.enumerate() if "qlora-rl-rollouts" in thread.name]
        assert len(engine.generate([[40, 41]], max_tokens=4).completion_ids) == 1  # it is whole


class _Endless:
    """An engine whose `generate` never comes back by itself."""

    def __init__(self, engine, generate):
        self._engine, self.generate = engine, generate

    def cancel(self):
        self._engine.cancel()

    def __getattr__(self, name):
        return getattr(self._engine, name)


@pytest.mark.full  # two trainings of 60 steps, by the clock
def test_it_is_half_as_fast_again_where_the_environment_waits_and_learns_the_same(tmp_path, monkeypatch):
    """The demo's task, every reward half a second late."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    from async_grpo import measure

    found = measure(tmp_path, steps=60, seeds=[1], kinds=["grpo", "async 1"])
    grpo, overlapped = found["grpo"]["1"], found["async 1"]["1"]
    assert overlapped["steps_per_s"] > 1.5 * grpo["steps_per_s"]
    assert overlapped["staleness_max"] == 1
    assert grpo["accuracy_after"] > grpo["accuracy_before"] + 0.2
    assert overlapped["accuracy_after"] > grpo["accuracy_after"] - 0.05
    assert overlapped["reward_last"] > grpo["reward_last"] - 0.05
