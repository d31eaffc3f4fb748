"""GRPO by two processes under FSDP2: the base and the adapter lie in parts, and the adapter alone is gathered. Long."""

import json

import pytest
from conftest import WAYS, distance, launch, said
from job import main
from resumed import lines
from test_ddp_methods import DRAW, METHODS, until_step_2

pytestmark = pytest.mark.full  # by default test_full_weights.py and test_bf16.py

LEARNS = {"learns": True, "max_steps": 30, "save_strategy": "no", "lr_scheduler_type": "constant"}
ONE = {"per_device_train_batch_size": 8, "max_steps": 4}
BEST = {
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "greater_is_better": True,
}
TWO = {"per_device_train_batch_size": 4, "max_steps": 4, "save_steps": 2}
# Of float32 sums in another order; online DPO's small gradients leave Adam more of it.
CLOSE, APART = 1e-5, {"online_dpo": 1e-4}


@pytest.fixture(scope="module")
def alone(exact_base, tmp_path_factory):
    """The other methods by one process, and what they have sampled."""
    root = tmp_path_factory.mktemp("alone")
    for method in METHODS:
        kept = {"record": str(root / f"kept-{method}.json")} if method in DRAW else {}
        main({"base": exact_base, "out": str(root / method), "method": method, **ONE, **kept})
    return root


@pytest.fixture(scope="module")
def sharded(exact_base, recorded, alone, tmp_path_factory):
    """Recorded rollouts replayed; one process's checkpoint gone on from; pushes weighed."""
    root = tmp_path_factory.mktemp("sharded")
    common = {"base": exact_base, "kept": recorded[1], **TWO}
    back = until_step_2(recorded[0], root / "one-two")
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    calls = [
        {**common, "out": str(root / "two")},
        {**common, "out": str(root / "parts"), **parts},
        {**common, "out": str(back), "existing": "resume"},
        {**common, "out": str(root / "weighed"), "weighs": True, "save_strategy": "no"},
        {"base": exact_base, "out": str(root / "learns"), **TWO, **LEARNS},
        {"base": exact_base, "out": str(root / "best"), "method": "sft", **TWO, **BEST},
    ]
    for method in METHODS:
        kept = {"kept": str(alone / f"kept-{method}.json")} if method in DRAW else {}
        calls.append({"base": exact_base, "out": str(root / f"two-{method}"), "method": method, **TWO, **kept})
    # Last, as its ranks end with an error. Asked for the probe and for the first push; the second one is scored by all
    # together.
    forgets = {"forgets": [1, 3], "canary_every": 1, "ddp_timeout": 120}
    calls.append({**common, "out": str(root / "forgets"), **forgets})
    ended = launch(calls, timeout=1200, **WAYS["fsdp2"])
    assert ended.returncode == 0, ended.stderr[-3000:]
    return root


def test_two_processes_train_what_one_trains_on_the_doubled_batch(sharded, recorded):
    assert distance(sharded / "two", recorded[0]) < CLOSE
    assert [push["version"] for push in lines(sharded / "two", "sync.jsonl")] == [1, 2, 3, 4]
    for ours, theirs in zip(lines(sharded / "two"), lines(recorded[0]), strict=True):
        for name in ("reward", "rollout_tokens", "grad_norm", "mismatch_kl", "ess", "learning_rate"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


def test_a_step_in_two_parts_is_the_same_step(sharded, recorded):
    assert distance(sharded / "parts", recorded[0]) < CLOSE


@pytest.mark.parametrize("method", METHODS)
def test_so_do_the_other_methods(method, sharded, alone):
    assert distance(sharded / f"two-{method}", alone / method) < APART.get(method, CLOSE)


def test_the_base_lies_in_parts_and_under_fsdp2_the_adapter(sharded):
    shares = [said(sharded / "two", rank)["shares"] for rank in (0, 1)]
    assert all(each["base"] == pytest.approx(0.5, abs=0.01) for each in shares)
    assert all(each["adapter"] == pytest.approx(0.5, abs=0.01) for each in shares)


def test_both_sides_hold_the_same_function_although_the_trainer_stores_floats(sharded):
    proof = json.loads((sharded / "two" / "fingerprints.json").read_text())
    assert proof["verified"]
    assert proof["ours"]["digest"] == proof["theirs"]["digest"]
    held = json.loads((sharded / "two" / "config.json").read_text())["base_held"]
    assert held == {"copies": 2, "reason": "the trainer's is sharded over the processes"}


def test_a_push_takes_no_more_than_two_adapters(sharded):
    for rank in (0, 1):
        found = said(sharded / "weighed", rank)
        assert found["error"] is None
        # At the first push this engine, which is in the same process, makes its own places for adapters.
        _, *growth = found["growth"]
        assert len(growth) == 3
        assert all(each <= 2.01 for each in growth)  # and some scalars


def test_a_checkpoint_is_one_processs_whoever_writes_or_reads_it(sharded, exact_base, recorded, tmp_path):
    one, kept = recorded
    assert distance(sharded / "one-two", one) < CLOSE
    alone = until_step_2(sharded / "two", tmp_path / "two-one")
    call = {"base": exact_base, "kept": kept, **TWO, "per_device_train_batch_size": 8}
    main({**call, "out": str(alone), "existing": "resume"})
    assert distance(alone, one) < CLOSE
    parts = until_step_2(sharded / "two", tmp_path / "two-parts")  # the same step in two parts
    main(
        {
            **call,
            "out": str(parts),
            "existing": "resume",
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
        }
    )
    assert distance(parts, one) < CLOSE


def test_a_checkpoint_goes_on_under_another_way_and_back(sharded, exact_base, recorded, tmp_path):
    one, kept = recorded
    call = {"base": exact_base, "kept": kept, **TWO}
    there = until_step_2(sharded / "two", tmp_path / "there")
    done = launch([{**call, "out": str(there), "existing": "resume"}, {**call, "out": str(tmp_path / "two")}])
    assert done.returncode == 0, done.stderr[-3000:]
    assert distance(there, one) < CLOSE
    back = until_step_2(tmp_path / "two", tmp_path / "back")
    done = launch([{**call, "out": str(back), "existing": "resume"}], **WAYS["fsdp2"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert distance(back, one) < CLOSE


def test_what_one_ranks_engine_has_lost_ends_both_at_once(sharded):
    ends = [said(sharded / "forgets", rank) for rank in (0, 1)]
    assert ends[0]["error"] == ends[1]["error"]
    assert ends[0]["error"].startswith("CanaryError: checking the push: ")
    assert ends[0]["notes"] == ["raised on rank 1"]
    assert json.loads((sharded / "forgets" / "summary.json").read_text())["steps"] == 1
    assert not (sharded / "forgets" / "adapter").is_dir()  # the ranks no longer meet, to put it together


def test_the_best_model_is_loaded_at_the_end(sharded):
    run = sharded / "best"
    best = json.loads((run / "checkpoint-4" / "trainer_state.json").read_text())["best_model_checkpoint"]
    assert best.endswith("checkpoint-2")  # of the higher loss, so that it is not the last
    assert distance(run, run / "checkpoint-2") == 0.0 < distance(run, run / "checkpoint-4")


def test_it_learns_from_what_it_draws(sharded):
    steps = lines(sharded / "learns")
    assert [step["policy_version"] for step in steps] == list(range(1, 31))
    first, last = (sum(step["reward"] for step in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.2


def test_an_error_in_the_middle_of_a_step_ends_both_ranks_with_it(exact_base, tmp_path):
    out = tmp_path / "run"
    struck = {"rank": 1, "step": 1, "how": "raise"}
    launch([{"base": exact_base, "out": str(out), "strike": struck, "ddp_timeout": 60, **TWO}], **WAYS["fsdp2"])
    ends = [said(out, rank) for rank in (0, 1)]
    assert ends[0]["error"] == ends[1]["error"] == "ValueError: in the middle of a step"
    assert ends[0]["notes"] == ["raised on rank 1"]


def test_a_rank_that_is_killed_is_named(exact_base, tmp_path):
    out = tmp_path / "run"
    struck = {"rank": 1, "step": 2, "how": "kill"}
    done = launch([{"base": exact_base, "out": str(out), "strike": struck, "ddp_timeout": 60, **TWO}], **WAYS["fsdp2"])
    assert done.returncode != 0
    assert said(out, 0)["error"].startswith("RankLostError: training: rank 1 of 2 is gone")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert (out / "checkpoint-2").is_dir()
