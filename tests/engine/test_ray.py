"""`RayFleet`: real vLLM in two actors of a Ray cluster of this host; kill -9, replacements, trainings."""

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from support import wait_for_all
from test_async_training import make as make_async
from test_config_on_vllm import SMALL, train
from test_server import scaled
from test_training import lines, make, reward_digits

from qlora_rl import (
    AdapterSync,
    BaseIncompleteError,
    Canary,
    ConfigConflictError,
    EngineClosedError,
    MissingDependencyError,
    RayFleet,
    SyncError,
)
from qlora_rl.adapter.store import pack_adapter
from qlora_rl.base.fingerprint import digest_bytes
from qlora_rl.contracts import (
    AdapterBundle,
    BaseFingerprint,
    CancellableEngine,
    EngineCapabilities,
    ReplicatedEngine,
    RolloutEngine,
    SamplingSpec,
)
from qlora_rl.engine.fleet.ray_connection import RayConnection
from qlora_rl.engine.fleet.ray_fleet import _connect
from qlora_rl.sync.transports import transport_for

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"max_lora_rank": 8, "max_model_length": 64, "max_num_seqs": 64}
SAMPLING = SamplingSpec(max_tokens=12, seed=1, temperature=0.9)


@pytest.fixture(scope="module")
def cluster():
    """As a user has one: nothing here may end it."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    yield ray
    assert ray.is_initialized()
    ray.shutdown()


@pytest.fixture(scope="module")
def fleet(base, cluster):
    with RayFleet(base, replicas=2, **OPTIONS) as fleet:
        yield fleet


@pytest.fixture
def both(fleet):
    """The two, whole, on the bare base."""
    wait_for_all(fleet)
    fleet.drop_adapter()
    return fleet


def sampled(engine, prompts):
    rollout = engine.generate(prompts * 4, SAMPLING)
    return rollout.completion_ids, rollout.logprobs, rollout.version


def digests(bundle):
    return {name: digest_bytes(tensor) for name, tensor in bundle.tensors.items()}


class StruckInARollout:
    """The process of a replica stands still, so that its share cannot come to an end, and is killed -9 in the middle of
    it."""

    def __init__(self, replica):
        self.pid = replica.connection.pid

    def __enter__(self):
        os.kill(self.pid, signal.SIGSTOP)
        self.timer = threading.Timer(1.0, os.kill, (self.pid, signal.SIGKILL))
        self.timer.start()

    def __exit__(self, *_):
        self.timer.join()


@pytest.fixture
def patient(monkeypatch):
    """One that was started anew has the usual time again."""
    begin = RayConnection._begin

    def begun(line):
        line.health_check_timeout_s = 60.0
        begin(line)

    monkeypatch.setattr(RayConnection, "_begin", begun)


def stop_in_the_middle(replica, rollout):
    """Its process stands still when it has computed for a while; from then on there is little patience with it."""
    process = psutil.Process(replica.connection.pid)
    before, end = sum(process.cpu_times()[:2]), time.monotonic() + 300
    while sum(process.cpu_times()[:2]) < before + 0.2:
        assert time.monotonic() < end
        time.sleep(0.005)
    os.kill(replica.connection.pid, signal.SIGSTOP)
    assert not rollout.done()
    replica.connection.health_check_timeout_s = 2.0


# First, while no other fleet takes the cluster's two CPUs.


def test_actors_of_a_cluster_that_a_fleet_starts_are_as_important_as_the_training(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_worker_niceness")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert _connect(ray, None, 1, {"num_cpus": 1})
    try:
        assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)
    finally:
        ray.shutdown()


def test_an_error_of_ours_comes_through_ray_as_it_was_raised_and_a_closed_replica_starts_no_cluster(cluster, tmp_path):
    class Rejecting:
        version = 0

        def capabilities(self):
            return EngineCapabilities("it", True, False, 8, 64, "float32", False)

        def describe_base(self):
            return BaseFingerprint({})

        def load_adapter(self, directory, version):
            raise SyncError("it does not fit.", reasons=["one", "two"], module="q_proj")

        def close(self):
            pass

    packed = pack_adapter(AdapterBundle({"a.lora_A.weight": torch.ones(2, 4)}, {"r": 2, "lora_alpha": 2}))
    with RayFleet(tmp_path, replicas=2, make=lambda base: Rejecting(), ray_options={"num_cpus": 0}) as fleet:
        with pytest.raises(SyncError, match=r"it does not fit\..*Said by ray:") as caught:
            fleet.load_packed(packed, 1)
        assert (caught.value.reasons, caught.value.module) == (("one", "two"), "q_proj")
        assert (len(fleet.live), fleet.version) == (2, 0)
    with pytest.raises(EngineClosedError):
        fleet.replicas[0].is_there(2.0)


def test_the_ray_example_runs(cluster, model_dir, tmp_path):
    out = tmp_path / "run"
    found = train(ROOT / "examples" / "ray.toml", out, *SMALL, f"base.model={model_dir}")
    assert all(line["canary_seconds"] > 0 for line in found)
    held = json.loads((out / "config.json").read_text())
    assert (held["rollout"], held["plan"]["transport"]) == ("ray", "object_store")
    assert held["engine"].startswith("2 replicas: vllm")


@pytest.mark.full  # a fleet of its own; an actor that cannot start is in no default test
def test_an_engine_that_cannot_start_says_why_and_leaves_no_actor(base, cluster, tmp_path):
    def actors():
        return {name for name, each in cluster._private.state.actors().items() if each["State"] != "DEAD"}

    before, end = actors(), time.monotonic() + 60
    with pytest.raises(BaseIncompleteError):
        RayFleet(tmp_path, replicas=1, **OPTIONS)
    while actors() - before:  # Ray takes a moment to say so
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.full  # 40 steps; below without a trainer, in train/test_async_fleet.py without vLLM
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_training_goes_on_when_an_actor_is_killed_in_a_rollout(cluster, base, tmp_path, overlaps):
    """The reward rises as without the fault; every step is there once, and every token sampled by the version that it
    names."""
    limits = {"max_steps": 40, "engine_options": {"replicas": 2}, "rollout": "ray"}
    made = (
        make_async(base, tmp_path, reward_digits, max_staleness=2, **limits)
        if overlaps
        else make(base, tmp_path, **limits)
    )
    with made as trainer:
        engine, real, calls = trainer.engine, trainer.engine.generate, []
        victim = engine.live[1]
        killed = victim.connection.pid

        def generate(prompts, *args, **named):
            calls.append(len(prompts))
            if len(calls) == 6:
                with StruckInARollout(victim):
                    return real(prompts, *args, **named)
            return real(prompts, *args, **named)

        engine.generate = generate
        trainer.train()
        found = lines(tmp_path)
        assert [line["step"] for line in found] == list(range(1, 41))
        assert [line["policy_version"] for line in found] == list(range(1, 41))
        assert sum(calls) == 40 * 8
        assert max(line["mismatch_kl"] for line in found if line.get("staleness_max", 0) == 0) < 5e-3
        rewards = [line["reward"] for line in found]
        assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1
        wait_for_all(engine)
        assert victim.connection.pid != killed
        assert victim.version == engine.version == 40
        assert victim.held_adapter(8) == engine.live[0].held_adapter(8) != {}
        trainer.bridge.strategy.verify()


@pytest.mark.full  # 60 steps; test_demo.py learns on one engine
@pytest.mark.parametrize("is_struck", [False, True])
def test_the_demo_learns_on_two_actors_also_when_one_is_killed_in_a_rollout(cluster, tmp_path, monkeypatch, is_struck):
    """Sums: right answers, on ones that were never trained on, from a quarter to four fifths; nothing is counted
    twice."""
    from qlora_rl.demo.job import DemoSettings, run_demo

    real, steps, killed, seen = RayFleet.generate, [], [], {}

    def generate(self, prompts, *args, **named):
        if len(prompts) != 128:  # the sums that it never trains on
            return real(self, prompts, *args, **named)
        if is_struck and len(steps) == 20:
            killed.append(self.live[1].connection.pid)
            with StruckInARollout(self.live[1]):
                rollout = real(self, prompts, *args, **named)
            seen["left"] = len(self.live)
        else:
            if killed and len(steps) == 40:
                wait_for_all(self)  # however long the other one takes to start
            rollout = real(self, prompts, *args, **named)
        assert len(rollout.completion_ids) == len(rollout.logprobs) == 128
        steps.append(sum(len(ids) for ids in rollout.completion_ids))
        seen["pids"] = {each.connection.pid for each in self.replicas}
        return rollout

    monkeypatch.setattr(RayFleet, "generate", generate)
    summary = run_demo(DemoSettings(steps=60, rollout="ray"), tmp_path / "run", say=print, show_progress=False)
    assert summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] > 0.8
    assert summary["reward_last"] > summary["reward_first"] + 0.2
    assert json.loads((tmp_path / "run" / "config.json").read_text())["engine"].startswith("2 replicas: vllm")
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == [line["policy_version"] for line in found] == list(range(1, 61))
    assert [line["rollout_tokens"] for line in found] == steps
    assert summary["mismatch_kl_median"] < 1e-4
    assert len(seen["pids"]) == 2
    if is_struck:
        assert seen["left"] == 1
        assert not seen["pids"] & {*killed}


def test_two_actors_draw_to_the_last_bit_what_one_draws_and_a_push_is_put_once(both, bundle, prompts):
    for protocol in (RolloutEngine, ReplicatedEngine, CancellableEngine):
        assert isinstance(both, protocol)
    assert len({each.connection.pid for each in both.live}) == 2
    assert len({each.describe_base().digest for each in both.live}) == 1
    puts = both.parcels.puts
    both.load_packed(pack_adapter(bundle), 1)
    assert both.parcels.puts == puts + 1
    assert both.held_adapter(8) == digests(bundle)
    one = both.live[0].generate(prompts * 4, SAMPLING)
    assert sampled(both, prompts) == (one.completion_ids, one.logprobs, 1)
    both.load_packed(pack_adapter(scaled(bundle, 2.0)), 2)
    assert both.generate(prompts * 4, SAMPLING, version=1).completion_ids == one.completion_ids
    assert both.generate(prompts * 4, SAMPLING).completion_ids != one.completion_ids
    assert all(speed > 0 for speed in both.speeds.values())


def test_an_actor_killed_in_a_rollout_is_done_without_and_the_one_in_its_place_is_verified(
    both, adapted, prompts, caplog
):
    canary = Canary(adapted, both, every=1)
    canary.calibrate()
    strategy = AdapterSync(adapted, both, transport_for("object_store"), canary)
    report = strategy.push()
    assert (report.transport, both.version) == ("object_store", 1)
    served, victim = sampled(both, prompts), both.live[1]
    killed, starts, incarnation = victim.connection.pid, victim.incarnation, both.incarnation
    with StruckInARollout(victim):
        rollout = both.generate(prompts * 4, SAMPLING)
    assert (rollout.completion_ids, rollout.logprobs, rollout.version) == served  # each of 32 once
    assert [each.url for each in both.live] == [both.replicas[0].url]
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1.5)
    strategy.push()  # to the one that is left
    served = sampled(both, prompts)
    wait_for_all(both)
    assert both.replicas[1] is victim
    assert (victim.connection.pid != killed, victim.incarnation, victim.version) == (True, starts + 1, 2)
    assert both.incarnation > incarnation
    assert victim.describe_base().digest == both.replicas[0].base
    held = victim.held_adapter(8)
    assert held
    assert held == both.replicas[0].held_adapter(8)
    assert "its base is verified and it holds version 2" in caplog.text
    strategy.verify()  # both sides' logprobs, of each of the two
    assert victim.generate(prompts * 4, SAMPLING).completion_ids == served[0]


def test_an_actor_that_stands_still_in_a_rollout_is_ended_and_the_one_in_its_place_is_verified(
    both, bundle, prompts, caplog, patient
):
    """Nobody kills it: it is looked at while it is waited for. Every prompt is answered once, as the whole fleet
    would."""
    both.load_packed(pack_adapter(bundle), 1)
    long = replace(SAMPLING, max_tokens=48, extra={"ignore_eos": True})
    whole = both.generate(prompts * 64, long)
    victim = both.live[1]
    stopped, starts = victim.connection.pid, victim.incarnation
    with ThreadPoolExecutor(1) as thread:
        rollout = thread.submit(both.generate, prompts * 64, long)
        stop_in_the_middle(victim, rollout)
        found = rollout.result()
    assert (found.completion_ids, found.logprobs, found.version) == (whole.completion_ids, whole.logprobs, 1)
    assert "no sign of life within health_check_timeout_s=2 s" in caplog.text
    assert [each.url for each in both.live] == [both.replicas[0].url]
    both.load_packed(pack_adapter(scaled(bundle, 2.0)), 2)
    wait_for_all(both)
    assert not psutil.pid_exists(stopped)
    assert (both.replicas[1], victim.incarnation, victim.version) == (victim, starts + 1, 2)
    assert victim.describe_base().digest == both.replicas[0].base
    assert victim.held_adapter(8) == both.replicas[0].held_adapter(8) == digests(scaled(bundle, 2.0))
    one = both.live[0].generate(prompts, SAMPLING)
    assert victim.generate(prompts, SAMPLING).completion_ids == one.completion_ids


@pytest.mark.full  # above one of two stands still
def test_a_rollout_in_which_all_actors_stand_still_is_sampled_by_those_in_their_place(
    both, bundle, prompts, caplog, patient
):
    both.load_packed(pack_adapter(bundle), 1)
    served = sampled(both, prompts)
    stopped = {each.connection.pid for each in both.replicas}
    for each in both.replicas:
        os.kill(each.connection.pid, signal.SIGSTOP)
        each.connection.health_check_timeout_s = 2.0
    assert sampled(both, prompts) == served
    wait_for_all(both)
    assert not stopped & {each.connection.pid for each in both.replicas}
    assert {each.version for each in both.replicas} == {1}
    assert caplog.text.count("no sign of life within") == 2


def test_what_contradicts_is_said_before_an_actor_is_placed(base, monkeypatch):
    with pytest.raises(ConfigConflictError, match="replicas=0"):
        RayFleet(base, replicas=0)
    with pytest.raises(ConfigConflictError, match="health_check_timeout_s=0"):
        RayFleet(base, health_check_timeout_s=0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'qlora-rl\[ray\]'"):
        RayFleet(base)


def test_options_that_are_ours_are_rejected(base, cluster):
    with pytest.raises(ConfigConflictError, match="max_restarts"):
        RayFleet(base, ray_options={"max_restarts": 3})
