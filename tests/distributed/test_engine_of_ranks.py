"""`rollout="colocate"` with one engine over several trainer processes: a real vLLM whose ranks stand beside the trainer's. Long."""

import json

import psutil
import pytest
from conftest import FSDP2, distance, launch, said
from resumed import lines

pytestmark = pytest.mark.full

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
    """One batch, drawn by one engine over two trainer processes, by two engines over two of four each, and by a server."""
    root = tmp_path_factory.mktemp("ranks")
    common = {"base": exact_base, **TRAINING, **PARTS}
    two = [{**common, "rollout": rollout, "out": str(root / rollout)} for rollout in ("colocate", "server")]
    four = {**common, "rollout": "colocate", "per_device_train_batch_size": 2, "out": str(root / "groups")}
    for calls, processes in ((two, 2), ([four], 4)):
        done = launch(calls, processes=processes, timeout=900)
        assert done.returncode == 0, done.stderr[-5000:]
    return root


@pytest.mark.parametrize("run", ["colocate", "groups"])
def test_an_engine_over_trainer_processes_is_proven_by_parts_and_pushed_to_once_a_step(run, runs):
    out = runs / run
    pushes = lines(out, "sync.jsonl")
    assert [push["version"] for push in pushes] == [1, 2, 3]
    assert {push["transport"] for push in pushes} == {"directory"}
    assert all(push["canary_difference"] is not None for push in pushes)
    assert json.loads((out / "fingerprints.json").read_text())["proven"]
    # What the ranks multiply with is in float32, as in the trainer.
    assert all(step["base_verified"] and step["mismatch_kl"] < 1e-8 for step in lines(out))
    owners = [True, False] if run == "colocate" else [True, False, True, False]
    assert [said(out, rank)["owns_engine"] for rank in range(len(owners))] == owners
    config = json.loads((out / "config.json").read_text())
    assert config["base_held"] == {"copies": 2, "reason": "the engine's ranks are processes of their own"}


@pytest.mark.parametrize("run", ["colocate", "groups"])
def test_what_is_drawn_and_trained_is_what_it_is_with_a_server(run, runs):
    for ours, theirs in zip(lines(runs / run), lines(runs / "server"), strict=True):
        for name in ("reward", "rollout_tokens", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert distance(runs / run, runs / "server") < 1e-3


def test_no_rank_of_the_engine_stays_behind(runs):
    assert not [p for p in psutil.process_iter(["name"]) if p.info["name"].startswith("VLLM::Worker")]


def test_base_and_engine_lie_in_parts_under_fsdp2(base, tmp_path):
    out = tmp_path / "run"
    call = {"base": str(base.path), "rollout": "colocate", **TRAINING, **PARTS, "bf16": True, "out": str(out)}
    done = launch([call], timeout=900, **FSDP2)
    assert done.returncode == 0, done.stderr[-5000:]
    assert [push["version"] for push in lines(out, "sync.jsonl")] == [1, 2, 3]
    assert json.loads((out / "fingerprints.json").read_text())["proven"]
    assert all(step["mismatch_kl"] < 1e-2 for step in lines(out))
    assert said(out, 1)["shares"]["base"] == pytest.approx(0.5, abs=0.02)
