"""A Ray actor whose engine has two ranks: verified by parts, pushed to exactly, replaced whole. Long."""

import os
import time

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import randomise, score
from test_tensor_parallel import EXACT, SIZES, ranks_of
from test_training import lines, make

from qlora_rl import AdapterSync, Canary, ConfigConflictError, RayFleet, bake_base, load_base, prepare_base, verify_base
from qlora_rl.base.fingerprint import fingerprint_stored
from qlora_rl.sync.transports import transport_for

pytestmark = pytest.mark.full  # two ranks are in test_tensor_parallel.py, actors of one rank in test_ray.py
TWO = {"tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def exact(model_dir):
    return prepare_base(model_dir, compute_dtype="float32")


@pytest.fixture(scope="module")
def fleet(exact, cluster):
    with RayFleet(exact, **TWO, **SIZES) as fleet:
        yield fleet
        found = ranks_of(os.getpid())
        assert len(found) == 2
    assert not psutil.wait_procs(found, timeout=60)[1]


@pytest.fixture
def trainer(exact):
    torch.manual_seed(0)
    model = get_peft_model(load_base(exact), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    randomise(model)
    return model


@pytest.fixture
def strategy(fleet, trainer):
    canary = Canary(trainer, fleet)
    canary.calibrate()
    strategy = AdapterSync(trainer, fleet, transport_for("object_store"), canary)
    yield strategy
    strategy.close()
    fleet.drop_adapter()


# First, while no other fleet takes the cluster's two CPUs.


def test_a_training_on_an_actor_of_two_ranks(cluster, base, tmp_path):
    with make(base, tmp_path, max_steps=3, rollout="ray", vllm_tensor_parallel_size=2) as trainer:
        trainer.train()
        assert trainer.base_check.is_verified
    assert [push["version"] for push in lines(tmp_path, "sync.jsonl")] == [1, 2, 3]
    assert {push["transport"] for push in lines(tmp_path, "sync.jsonl")} == {"object_store"}
    assert max(m["mismatch_kl"] for m in lines(tmp_path)) < 5e-3


def test_its_base_is_verified_by_parts_and_an_adapter_is_served_exactly(fleet, exact, trainer, strategy, prompts):
    proof = verify_base(trainer, fleet)
    assert proof.is_verified
    assert proof.theirs == fingerprint_stored(bake_base(exact))
    assert not fleet.capabilities().takes_dense
    for seed in range(2):
        randomise(trainer, 0.1, seed=seed)
        report = strategy.push()
        assert report.transport == "object_store"
        assert report.canary_difference < EXACT
        rollout = fleet.generate(prompts, max_tokens=12, seed=seed)
        assert rollout.version == report.version
        assert score(trainer, prompts, rollout).max() < EXACT


def test_a_rank_that_is_killed_is_said_and_the_engine_comes_back_with_its_adapter(
    fleet, trainer, strategy, prompts, caplog
):
    strategy.push()
    before = fleet.generate(prompts, max_tokens=6, seed=1)
    struck = max(ranks_of(os.getpid()), key=lambda rank: rank.pid)
    struck.kill()
    after = fleet.generate(prompts, max_tokens=6, seed=1)
    assert (after.version, after.completion_ids) == (before.version, before.completion_ids)
    assert "vLLM failed in a step" in caplog.text
    assert verify_base(trainer, fleet).is_verified
    strategy.verify()
    strategy.push()


def test_an_actor_that_is_killed_takes_its_ranks_with_it_and_is_replaced(fleet, trainer, strategy, prompts):
    strategy.push()
    before, old = fleet.generate(prompts, max_tokens=6, seed=1), ranks_of(os.getpid())
    psutil.Process(fleet.replicas[0].connection.pid).kill()
    assert not psutil.wait_procs(old, timeout=60)[1]
    after = fleet.generate(prompts, max_tokens=6, seed=1)
    assert (after.version, after.completion_ids) == (before.version, before.completion_ids)
    end = time.monotonic() + 60
    while len(ranks_of(os.getpid())) != 2:
        assert time.monotonic() < end
        time.sleep(0.2)
    strategy.verify()


def test_an_actor_with_fewer_gpus_than_ranks_is_rejected(exact):
    with pytest.raises(ConfigConflictError, match=r"num_gpus=1 < tensor_parallel_size=2.* Leave num_gpus out"):
        RayFleet(exact, ray_options={"num_gpus": 1}, **TWO)
