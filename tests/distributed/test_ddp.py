"""GRPO by two processes under DDP, against one with the doubled batch; and how they end when one of them fails."""

import json

import pytest
import torch
from conftest import distance, launch, said
from resumed import lines

STEPS = {"max_steps": 4, "per_device_train_batch_size": 4, "save_steps": 2}
# Of what is measured, what both ranks must have put together.
GLOBAL = ("reward", "reward_std", "rollout_tokens", "policy_version", "grad_norm", "mismatch_kl", "ess", "masked_share")


@pytest.fixture(scope="module")
def two(exact_base, recorded, tmp_path_factory):
    """Recorded rollouts replayed; then rewards that raise on rank 1, and more turns there, in the same processes."""
    root = tmp_path_factory.mktemp("two")
    calls = [
        {"base": exact_base, "out": str(root / "two"), "kept": recorded[1], **STEPS},
        {"base": exact_base, "out": str(root / "fails"), "fails": [1, 2], **STEPS},
        {"base": exact_base, "out": str(root / "turns"), "turns": True, **STEPS},
    ]
    done = launch(calls)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def test_two_processes_train_what_one_trains_on_the_doubled_batch(two, recorded):
    assert distance(two / "two", recorded[0]) < 1e-3


def test_what_is_measured_is_of_all_of_them(two, recorded):
    for ours, theirs in zip(lines(two / "two"), lines(recorded[0]), strict=True):
        for name in GLOBAL:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


def test_live_they_draw_what_one_process_draws(two, recorded):
    live, alone = lines(two / "fails")[0], lines(recorded[0])[0]
    assert live["reward"] == pytest.approx(alone["reward"])
    assert live["rollout_tokens"] == alone["rollout_tokens"]
    first = [json.loads((run / "rollouts.json").read_text())["first"] for run in (two / "fails", recorded[0])]
    assert first[0] == first[1]


def test_every_step_pushes_once_and_every_rank_serves_the_same_version(two):
    assert [push["version"] for push in lines(two / "two", "sync.jsonl")] == [1, 2, 3, 4]
    assert said(two / "two", 0)["pushes"] == said(two / "two", 1)["pushes"] == 4


def test_each_rank_asks_its_own_engine_as_often_as_its_conversations_need(two):
    """Rank 1 three times in each step, rank 0 once: nobody may wait for the other between two turns."""
    assert [(said(two / "turns", rank)["error"], said(two / "turns", rank)["pushes"]) for rank in (0, 1)] == [
        (None, 4)
    ] * 2
    assert [step["policy_version"] for step in lines(two / "turns")] == [1, 2, 3, 4]


def test_one_rank_writes_and_the_others_leave_their_random_numbers(two):
    checkpoint = two / "two" / "checkpoint-4"
    assert {file.name for file in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert set(json.loads((checkpoint / "manifest.json").read_text())["files"]) >= {"rng_state_1.pth", "optimizer.pt"}
    assert not [file for file in (two / "two").iterdir() if file.name.startswith(".")]


def test_a_reward_that_raises_on_rank_1_raises_the_same_on_rank_0(two):
    ends = [said(two / "fails", rank) for rank in (0, 1)]
    assert ends[0]["error"] == ends[1]["error"]
    assert "'slow_reward' raised ZeroDivisionError: only here" in ends[0]["error"]
    assert ends[0]["notes"] == ["raised on rank 1"]
    summary = json.loads((two / "fails" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 1)


def test_processes_that_accelerate_does_not_join_are_rejected_before_anything_is_loaded(exact_base, tmp_path):
    """As `accelerate launch` with fsdp2.yaml or ddp.yaml starts them on a machine without a GPU: two for torch, one
    each for accelerate."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU accelerate joins them")
    calls = [
        {"base": exact_base, "out": str(tmp_path / method), "method": method, "use_cpu": False, "max_steps": 1}
        for method in ("grpo", "sft")
    ]
    launch(calls)
    for method in ("grpo", "sft"):
        for rank in (0, 1):
            error = said(tmp_path / method, rank)["error"]
            assert error.startswith("ConfigConflictError")
            assert "torch.distributed has 2 processes, and accelerate trains in 1" in error
            assert "use_cpu=True" in error
        assert not (tmp_path / method).exists()


@pytest.mark.full  # above a reward that raises, below a rank that is killed
def test_an_error_in_the_middle_of_a_step_ends_both_ranks_with_it(exact_base, tmp_path):
    out = tmp_path / "run"
    struck = {"rank": 1, "step": 1, "how": "raise"}
    launch([{"base": exact_base, "out": str(out), "strike": struck, "ddp_timeout": 60, **STEPS}])
    ends = [said(out, rank) for rank in (0, 1)]
    assert ends[0]["error"] == ends[1]["error"] == "ValueError: in the middle of a step"
    assert ends[0]["notes"] == ["raised on rank 1"]


def test_a_rank_that_is_killed_in_a_collective_ends_the_job_and_is_named(exact_base, tmp_path):
    out = tmp_path / "run"
    struck = {"rank": 1, "step": 2, "how": "kill"}
    call = {"base": exact_base, "out": str(out), "strike": struck, "ddp_timeout": 60, **STEPS}
    done = launch([call], is_forked=False)  # by the command that a user types
    assert done.returncode != 0
    assert said(out, 0)["error"].startswith("RankLostError: training: rank 1 of 2 is gone")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert (out / "checkpoint-2").is_dir()
