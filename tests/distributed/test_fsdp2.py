"""GRPO by two processes under FSDP2: base and adapter lie in parts, and the adapter alone is gathered. Long."""

import json

import pytest
from conftest import FSDP2, distance, launch, said
from job import main
from resumed import lines
from test_ddp_methods import DRAW, METHODS, until_step_2

pytestmark = pytest.mark.full

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


@pytest.fixture(scope="module")
def sharded(exact_base, recorded, tmp_path_factory):
    """Recorded rollouts replayed; one process's checkpoint gone on from; pushes weighed."""
    root = tmp_path_factory.mktemp("sharded")
    common = {"base": exact_base, "kept": recorded[1], **TWO}
    back = until_step_2(recorded[0], root / "one-two")
    calls = [
        {**common, "out": str(root / "two")},
        {**common, "out": str(back), "existing": "resume"},
        {**common, "out": str(root / "weighed"), "weighs": True, "save_strategy": "no"},
        {"base": exact_base, "out": str(root / "learns"), **TWO, **LEARNS},
        {"base": exact_base, "out": str(root / "best"), "method": "sft", **TWO, **BEST},
    ]
    for method in METHODS:
        kept = {"record": str(root / f"kept-{method}.json")} if method in DRAW else {}
        main({"base": exact_base, "out": str(root / f"one-{method}"), "method": method, **ONE, **kept})
        kept = {"kept": str(root / f"kept-{method}.json")} if method in DRAW else {}
        calls.append({"base": exact_base, "out": str(root / f"two-{method}"), "method": method, **TWO, **kept})
    # Last, as its ranks end with an error. Scored at the second push, in whose forward all ranks would meet.
    forgets = {"forgets": [1, 2], "canary_every": 1, "ddp_timeout": 120}
    calls.append({**common, "out": str(root / "forgets"), **forgets})
    done = launch(calls, **FSDP2)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def test_two_processes_train_what_one_trains_on_the_doubled_batch(sharded, recorded):
    assert distance(sharded / "two", recorded[0]) < 1e-3
    assert [push["version"] for push in lines(sharded / "two", "sync.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize("method", METHODS)
def test_so_do_the_other_methods(method, sharded):
    assert distance(sharded / f"two-{method}", sharded / f"one-{method}") < 1e-3


def test_base_and_adapter_lie_in_parts(sharded):
    for rank in (0, 1):
        held = said(sharded / "two", rank)["shares"]
        assert held["base"] == pytest.approx(0.5, abs=0.01)
        assert held["adapter"] == pytest.approx(0.5, abs=0.01)


def test_both_sides_hold_the_same_function_although_the_trainer_stores_floats(sharded):
    proof = json.loads((sharded / "two" / "fingerprints.json").read_text())
    assert proof["proven"]
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
        assert all(0.9 < each <= 2.01 for each in growth)  # and some scalars


def test_a_checkpoint_is_one_processs_whoever_writes_or_reads_it(sharded, exact_base, recorded, tmp_path):
    one, kept = recorded
    assert distance(sharded / "one-two", one) < 1e-3
    alone = until_step_2(sharded / "two", tmp_path / "two-one")
    call = {"base": exact_base, "kept": kept, **TWO, "per_device_train_batch_size": 8}
    main({**call, "out": str(alone), "existing": "resume"})
    assert distance(alone, one) < 1e-3
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
    assert distance(parts, one) < 1e-3


def test_what_one_ranks_engine_has_lost_ends_both_at_once(sharded):
    ends = [said(sharded / "forgets", rank) for rank in (0, 1)]
    assert ends[0]["error"] == ends[1]["error"]
    assert ends[0]["error"].startswith("CanaryError: checking the push: ")
    assert ends[0]["notes"] == ["raised on rank 1"]
    assert json.loads((sharded / "forgets" / "summary.json").read_text())["steps"] == 1


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
