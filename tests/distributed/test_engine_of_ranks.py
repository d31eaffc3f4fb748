"""`rollout="colocate"` with one engine over several trainer processes: a real vLLM whose ranks stand beside the
trainer's. Long."""

import json
import os

import psutil
import pytest
from conftest import WAYS, distance, launch, said, skip_without_deepspeed
from resumed import lines

pytestmark = pytest.mark.full  # groups of ranks and their engines are in test_ranks.py, without vLLM

TRAINING = {
    "vllm_max_model_length": 32,
    "max_steps": 3,
    "save_strategy": "no",
    "per_device_train_batch_size": 4,
    "canary_every": 1,
}
PARTS = {"vllm_tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def runs(exact_base, tmp_path_factory):
    """One batch, sampled by one engine over two trainer processes, by two engines over two of four each, and by a
    server."""
    root = tmp_path_factory.mktemp("ranks")
    common = {"base": exact_base, **TRAINING, **PARTS}
    two = [{**common, "rollout": rollout, "out": str(root / rollout)} for rollout in ("colocate", "server")]
    four = {**common, "rollout": "colocate", "per_device_train_batch_size": 2, "out": str(root / "groups")}
    for calls, processes in ((two, 2), ([four], 4)):
        done = launch(calls, processes=processes, timeout=900)
        assert done.returncode == 0, done.stderr[-5000:]
    return root


def ranks_of_engines():
    """Of this session: whoever else runs vLLM here has another cache."""
    found = [p for p in psutil.process_iter(["name"]) if p.info["name"].startswith("VLLM::Worker")]
    mine = os.environ["QLORA_RL_CACHE"]
    return [p for p in found if p.is_running() and p.environ().get("QLORA_RL_CACHE") == mine]


@pytest.mark.parametrize("run", ["colocate", "groups"])
def test_an_engine_over_trainer_processes_is_verified_by_parts_and_pushed_to_once_a_step(run, runs):
    out = runs / run
    pushes = lines(out, "sync.jsonl")
    assert [push["version"] for push in pushes] == [1, 2, 3]
    assert {push["transport"] for push in pushes} == {"directory"}
    assert all(push["canary_difference"] is not None for push in pushes)
    assert json.loads((out / "fingerprints.json").read_text())["verified"]
    # What the ranks multiply with is in float32, as in the trainer.
    assert all(step["base_verified"] and step["mismatch_kl"] < 1e-8 for step in lines(out))
    owners = [True, False] if run == "colocate" else [True, False, True, False]
    assert [said(out, rank)["owns_engine"] for rank in range(len(owners))] == owners
    config = json.loads((out / "config.json").read_text())
    assert config["base_held"] == {"copies": 2, "reason": "the engine's ranks are processes of their own"}


@pytest.mark.parametrize("run", ["colocate", "groups"])
def test_what_is_sampled_and_trained_is_what_it_is_with_a_server(run, runs):
    for ours, theirs in zip(lines(runs / run), lines(runs / "server"), strict=True):
        for name in ("reward", "rollout_tokens", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert distance(runs / run, runs / "server") < 1e-3


def test_no_rank_of_the_engine_stays_behind(runs):
    assert not ranks_of_engines()


@pytest.mark.parametrize("way", ["fsdp2", "zero2", "zero3"])
def test_one_engine_over_trainer_processes_that_hold_parts(way, exact_base, tmp_path):
    skip_without_deepspeed(way)
    out = tmp_path / "run"
    call = {"base": exact_base, "rollout": "colocate", **TRAINING, **PARTS, "parts": way == "zero3", "out": str(out)}
    done = launch([call], timeout=900, **WAYS[way])
    assert done.returncode == 0, done.stderr[-5000:]
    pushes = lines(out, "sync.jsonl")
    assert [push["version"] for push in pushes] == [1, 2, 3]
    assert all(push["canary_difference"] < 1e-5 for push in pushes)
    assert json.loads((out / "fingerprints.json").read_text())["verified"]
    assert all(step["base_verified"] and step["mismatch_kl"] < 1e-8 for step in lines(out))
    held = 1.0 if way == "zero2" else 0.5
    assert said(out, 1)["shares"]["base"] == pytest.approx(held, abs=0.02)


@pytest.mark.parametrize("way", ["fsdp2", "zero3"])
def test_a_trainer_process_that_is_killed_is_named_and_its_engine_ends(way, exact_base, tmp_path):
    skip_without_deepspeed(way)
    out = tmp_path / "run"
    struck = {"rank": 1, "step": 2, "how": "kill"}
    call = {"base": exact_base, "rollout": "colocate", **TRAINING, **PARTS, "parts": way == "zero3", "out": str(out)}
    done = launch([{**call, "strike": struck, "ddp_timeout": 300}], timeout=900, **WAYS[way])
    assert done.returncode != 0
    assert said(out, 0)["error"].startswith("RankLostError: training: rank 1 of 2 is gone")
    assert json.loads((out / "summary.json").read_text())["status"] == "failed"
    assert not ranks_of_engines()
