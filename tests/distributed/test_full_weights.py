"""Full weights from two processes: DoRA under DDP, FSDP and ZeRO against one process with the doubled batch, and a push
that breaks."""

import json

import pytest
from conftest import WAYS, distance, launch, said, skip_without_deepspeed
from job import main
from resumed import lines

STEPS = {"max_steps": 3, "per_device_train_batch_size": 4, "save_strategy": "no", "canary_every": 2}
DORA = {"adapter": "dora"}


@pytest.fixture(scope="module")
def alone(exact_base, tmp_path_factory):
    """One process with the doubled batch, and what it has sampled."""
    root = tmp_path_factory.mktemp("alone")
    call = {"base": exact_base, "out": str(root / "one"), "record": str(root / "kept.json"), **DORA, **STEPS}
    main(call | {"per_device_train_batch_size": 8, "proves": True})
    return root / "one", str(root / "kept.json")


# By default ZeRO-3 for DeepSpeed: it shards the base too.
@pytest.fixture(scope="module", params=["ddp", "fsdp2", pytest.param("zero2", marks=pytest.mark.full), "zero3"])
def two(request, alone, exact_base, tmp_path_factory):
    """Recorded rollouts replayed; then the engine of rank 1 breaks in the middle of the second push."""
    skip_without_deepspeed(request.param)
    root = tmp_path_factory.mktemp(request.param)
    common = {"base": exact_base, **DORA, **STEPS, "parts": request.param == "zero3"}
    calls = [
        {**common, "out": str(root / "two"), "kept": alone[1], "proves": True},
        {**common, "out": str(root / "breaks"), "breaks": [1, 2], "ddp_timeout": 120},
    ]
    done = launch(calls, **WAYS[request.param])
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def test_two_processes_train_what_one_trains_on_the_doubled_batch(two, alone):
    bar = 1e-5 if two.name.startswith("fsdp") else 1e-3
    assert distance(two / "two", alone[0], only="lora_B") < bar
    # Lengths of rows, which hardly move from where the base has them.
    assert distance(two / "two", alone[0], only="magnitude") < 1e-6


def test_every_step_pushes_once_and_every_engine_holds_what_was_trained(two, alone):
    pushes = lines(two / "two", "sync.jsonl")
    assert [push["version"] for push in pushes] == [1, 2, 3]
    assert {push["mode"] for push in pushes} == {"weights"}
    assert [push["canary_difference"] is not None for push in pushes] == [True, False, True]
    ends = [said(two / "two", rank) for rank in (0, 1)]
    assert [end["error"] for end in ends] == [None, None]
    assert ends[0]["held"] == ends[1]["held"]
    assert [end["pushes"] for end in ends] == [4, 4]
    held = 0.5 if two.name.startswith(("fsdp", "zero3")) else 1.0
    assert all(end["shares"]["base"] == pytest.approx(held, abs=0.01) for end in ends)
    assert ends[0]["plan"] == said(alone[0], 0)["plan"] == "weights"


def test_a_push_that_breaks_on_rank_1_raises_the_same_on_rank_0(two):
    ends = [said(two / "breaks", rank) for rank in (0, 1)]
    assert (
        ends[0]["error"]
        == ends[1]["error"]
        == ("SyncError: loading weights version=2: the engine is gone. Push again.")
    )
    assert ends[0]["notes"] == ["raised on rank 1"]
    summary = json.loads((two / "breaks" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 1)


@pytest.mark.full  # two processes and two actors; test_ranks.py has it without vLLM
def test_two_processes_send_them_once_to_two_actors(exact_base, tmp_path):
    """Rank 0 alone talks to the actors; each push is checked weight by weight on both, and each rank trains on its own
    half of what they sample."""
    pytest.importorskip("ray")
    steps = {**STEPS, "canary_every": 1, "rollout": "ray", "engine_options": {"replicas": 2}}
    done = launch([{"base": exact_base, "out": str(tmp_path / "ray"), **DORA, **steps}])
    assert done.returncode == 0, done.stderr[-3000:]
    ends = [said(tmp_path / "ray", rank) for rank in (0, 1)]
    assert [(end["error"], end["owns_engine"], end["pushes"]) for end in ends] == [(None, True, 3), (None, False, 3)]
    pushes = lines(tmp_path / "ray", "sync.jsonl")
    assert [(push["version"], push["transport"]) for push in pushes] == [(i, "object_store") for i in (1, 2, 3)]
    assert all(push["canary_difference"] is not None for push in pushes)
    assert max(line["mismatch_kl"] for line in lines(tmp_path / "ray")) < 1e-6
