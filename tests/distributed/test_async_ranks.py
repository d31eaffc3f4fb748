"""Asynchronous GRPO by two processes: recorded rollouts against one process with the doubled batch, what is trained on,
and how they end."""

import collections
import json

import pytest
from conftest import WAYS, distance, launch, said, skip_without_deepspeed
from job import main
from resumed import lines
from test_ddp_methods import VLLM, until_step_2

ASYNC = {"method": "async", "max_staleness": 1, "max_steps": 4, "save_steps": 2}
TWO = {"per_device_train_batch_size": 4}
LEARNS = {"learns": True, "max_steps": 30, "save_strategy": "no", "lr_scheduler_type": "constant"}
# What both ranks must have put together, and what does not depend on when a thread was ready.
GLOBAL = ("reward", "reward_std", "rollout_tokens", "policy_version", "grad_norm", "completion_length")
GLOBAL += ("completions/min_length", "completions/mean_terminated_length", "completions/clipped_ratio")


@pytest.fixture(scope="module")
def alone(exact_base, tmp_path_factory):
    """One process with the doubled batch, and everything that it has sampled."""
    root = tmp_path_factory.mktemp("alone")
    call = {"base": exact_base, "out": str(root / "one"), "record": str(root / "kept.json"), **ASYNC}
    main(call | {"per_device_train_batch_size": 8})
    return root / "one", str(root / "kept.json")


@pytest.fixture(
    scope="module", params=["ddp", *(pytest.param(way, marks=pytest.mark.full) for way in WAYS if way != "ddp")]
)
def two(request, alone, recorded, exact_base, tmp_path_factory):
    """Recorded rollouts replayed, with and without overlap; a checkpoint of one process gone on from; rewards that
    raise on rank 1."""
    skip_without_deepspeed(request.param)
    root = tmp_path_factory.mktemp(request.param)
    common = {"base": exact_base, **ASYNC, **TWO, "parts": request.param == "zero3"}
    back = until_step_2(alone[0], root / "back")
    calls = [
        {**common, "out": str(root / "two"), "kept": alone[1]},
        {**common, "out": str(root / "grpo"), "kept": recorded[1], "max_staleness": 0},
        {**common, "out": str(back), "kept": alone[1], "existing": "resume"},
        {**common, "out": str(root / "shared"), "kept": alone[1], "shared": True},
        {**common, "out": str(root / "turns"), "shared": True, "turns": True},
        {**common, "out": str(root / "fails"), "fails": [1, 2]},
    ]
    done = launch(calls, **WAYS[request.param])
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def trained_on(out):
    """How often each prompt was trained on, by both ranks."""
    batches = [batch for rank in (0, 1) for batch in said(out, rank)["batches"]]
    return collections.Counter(prompt for batch in batches for prompt in batch["prompts"])


def test_two_processes_train_what_one_trains_on_the_doubled_batch(two, alone, recorded):
    assert distance(two / "two", alone[0]) < 1e-3
    assert distance(two / "grpo", recorded[0]) < 1e-3  # without overlap it is GRPO


def test_every_prompt_is_trained_on_once_and_none_is_older_than_it_may_be(two):
    assert set(trained_on(two / "two").values()) == {2}  # two completions of each
    assert len(trained_on(two / "two")) == 16
    for rank in (0, 1):
        ages = {name: [batch["age"] for batch in said(two / name, rank)["batches"]] for name in ("two", "grpo")}
        assert set(ages["two"]) <= {0, 1}
        assert ages["grpo"] == [0] * 4
    steps = lines(two / "two")
    for i, step in enumerate(steps):
        ages = [said(two / "two", rank)["batches"][i]["age"] for rank in (0, 1)]
        assert step["staleness_max"] == max(ages)
        assert step["policy_version"] - step["rollout_version"] == max(ages)


def test_what_is_measured_is_of_all_of_them(two, alone):
    for ours, theirs in zip(lines(two / "two"), lines(alone[0]), strict=True):
        for name in GLOBAL:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


def test_threads_of_both_ranks_ask_an_engine_that_rank_0_owns_each_as_often_as_it_wants(two, alone):
    assert distance(two / "shared", alone[0]) < 1e-3
    for name in ("shared", "turns"):
        ends = [said(two / name, rank) for rank in (0, 1)]
        assert [(end["error"], end["pushes"], end["owns_engine"]) for end in ends] == [
            (None, 4, True),
            (None, 4, False),
        ]
        assert set(trained_on(two / name).values()) == {2}


def test_every_step_pushes_once_and_every_rank_serves_the_same_version(two):
    assert [push["version"] for push in lines(two / "two", "sync.jsonl")] == [1, 2, 3, 4]
    assert [said(two / "two", rank)["pushes"] for rank in (0, 1)] == [4, 4]


def test_a_checkpoint_of_one_process_goes_on_in_two(two, alone):
    assert distance(two / "back", alone[0]) < 1e-3
    ours = [batch["prompts"] for rank in (0, 1) for batch in said(two / "back", rank)["batches"]]
    whole = [batch["prompts"] for rank in (0, 1) for batch in said(two / "two", rank)["batches"] if batch["step"] >= 2]
    assert ours == whole


def test_a_reward_that_raises_in_a_thread_of_rank_1_raises_the_same_on_rank_0(two):
    ends = [said(two / "fails", rank) for rank in (0, 1)]
    assert ends[0]["error"] == ends[1]["error"]
    assert "'slow_reward' raised ZeroDivisionError: only here" in ends[0]["error"]
    assert ends[0]["notes"] == ["raised on rank 1"]
    assert json.loads((two / "fails" / "summary.json").read_text())["status"] == "failed"


def test_a_rank_that_is_killed_is_named_and_the_run_goes_on_where_it_was(exact_base, alone, tmp_path):
    out = tmp_path / "run"
    call = {"base": exact_base, "out": str(out), "kept": alone[1], **ASYNC, **TWO, "ddp_timeout": 60}
    struck = {"rank": 1, "step": 3, "how": "kill"}
    done = launch([call | {"strike": struck}])
    assert done.returncode != 0
    assert said(out, 0)["error"].startswith("RankLostError: training: rank 1 of 2 is gone")
    before = [batch for batch in said(out, 0)["batches"] if batch["step"] < 2]
    done = launch([call | {"existing": "resume"}])
    assert done.returncode == 0, done.stderr[-3000:]
    assert distance(out, alone[0]) < 1e-3
    again = said(out, 0)["batches"]
    assert [batch["step"] for batch in before + again] == [0, 1, 2, 3]
    halves = [prompt for batch in before + again for prompt in batch["prompts"]]
    assert set(collections.Counter(halves).values()) == {2}  # of rank 0's half each once


@pytest.mark.full  # 30 steps; above what is trained on
def test_it_learns_from_what_it_samples(exact_base, tmp_path):
    done = launch([{"base": exact_base, "out": str(tmp_path / "run"), **ASYNC, **TWO, **LEARNS}])
    assert done.returncode == 0, done.stderr[-3000:]
    steps = lines(tmp_path / "run")
    assert [step["policy_version"] for step in steps] == list(range(1, 31))
    first, last = (sum(step["reward"] for step in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.2


@pytest.fixture(scope="module")
def on_vllm(base, tmp_path_factory):
    """The same training with each kind of engine, one after the other in two processes."""
    root = tmp_path_factory.mktemp("vllm")
    common = {"base": str(base.path), "vllm_max_model_length": 32, "bf16": True, **ASYNC, **TWO, "save_strategy": "no"}
    done = launch([{**common, **more, "out": str(root / name), "rollout": name} for name, more in VLLM.items()])
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.full  # two processes with vLLM each; by default FakeEngine
@pytest.mark.parametrize("rollout", VLLM)
def test_vllm_generates_ahead_for_both_ranks(rollout, on_vllm):
    """A server and a fleet are rank 0's, and threads of both ranks ask them."""
    out = on_vllm / rollout
    assert [push["version"] for push in lines(out, "sync.jsonl")] == [1, 2, 3, 4]
    ends = [said(out, rank) for rank in (0, 1)]
    assert [(end["error"], end["pushes"]) for end in ends] == [(None, 4)] * 2
    assert [end["owns_engine"] for end in ends] == [True, rollout == "colocate"]
    assert set(trained_on(out).values()) == {2}
    assert {batch["age"] for end in ends for batch in end["batches"]} <= {0, 1}
    assert all(step["base_verified"] and step["rollout_tokens"] > 0 for step in lines(out))
    assert all(step["rescored_diff"] < 1e-2 for step in lines(out)[1:])
