"""GRPO by two processes under DeepSpeed's ZeRO-3 and ZeRO-2, started with the files of examples/accelerate. Long, but
for one launch."""

import importlib.util
import json

import pytest
import torch
from conftest import ZERO, adapter_of, distance, launch, said
from job import main
from resumed import lines
from test_ddp_methods import DRAW, METHODS, until_step_2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install 'qlora-rl[deepspeed]'",
)

LEARNS = {"learns": True, "max_steps": 30, "save_strategy": "no", "lr_scheduler_type": "constant"}
ONE = {"per_device_train_batch_size": 8, "max_steps": 4}
TWO = {"per_device_train_batch_size": 4, "max_steps": 4, "save_steps": 2}
# By default ZeRO-3: it shards the base too.
BOTH = pytest.mark.parametrize("stage", [pytest.param("zero2", marks=pytest.mark.full), "zero3"])
BOTH_FULL = pytest.mark.parametrize("stage", ["zero2", "zero3"])


def of(stage):
    return {"example": f"{stage}.yaml", **ZERO}


@pytest.fixture(scope="module")
def two(exact_base, recorded, tmp_path_factory):
    """Of a stage: recorded rollouts replayed, what is measured and sent watched; once."""
    done = {}

    def run(stage):
        if stage not in done:
            out = tmp_path_factory.mktemp(stage) / "two"
            call = {"base": exact_base, "kept": recorded[1], "out": str(out), "watches": True, **TWO}
            ended = launch([call | {"parts": stage == "zero3"}], **of(stage))
            assert ended.returncode == 0, ended.stderr[-3000:]
            done[stage] = out
        return done[stage]

    return run


@BOTH
def test_two_processes_train_what_one_trains_on_the_doubled_batch(stage, two, recorded):
    assert distance(two(stage), recorded[0]) < 1e-3
    assert [push["version"] for push in lines(two(stage), "sync.jsonl")] == [1, 2, 3, 4]
    for ours, theirs in zip(lines(two(stage)), lines(recorded[0]), strict=True):
        for name in ("reward", "rollout_tokens", "grad_norm", "mismatch_kl", "ess", "learning_rate"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


@BOTH
def test_a_batch_is_measured_before_the_optimizer_steps_although_deepspeed_steps_in_its_backward(stage, two):
    for rank in (0, 1):
        seen = said(two(stage), rank)
        assert seen["looked"] == seen["pushed"]
        assert len(set(seen["pushed"])) == 4


@BOTH
def test_both_sides_hold_the_same_base_and_what_lies_where(stage, two):
    proof = json.loads((two(stage) / "fingerprints.json").read_text())
    assert proof["verified"]
    assert proof["ours"]["digest"] == proof["theirs"]["digest"]
    held = said(two(stage), 1)["shares"]
    part = 0.5 if stage == "zero3" else 1.0
    assert held == {"base": pytest.approx(part, abs=0.01), "adapter": pytest.approx(part, abs=0.01)}


@BOTH
def test_a_checkpoint_is_as_one_process_writes_it(stage, two, recorded):
    ours, theirs = (
        torch.load(run / "checkpoint-2" / "optimizer.pt", weights_only=True) for run in (two(stage), recorded[0])
    )
    assert [group["params"] for group in ours["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    assert ours["param_groups"][0].keys() == theirs["param_groups"][0].keys()
    assert ours["param_groups"][0]["lr"] == pytest.approx(theirs["param_groups"][0]["lr"])
    assert ours["state"].keys() == theirs["state"].keys()
    assert len({values["step"].data_ptr() for values in ours["state"].values()}) == len(ours["state"])
    for mine, other in zip(ours["state"].values(), theirs["state"].values(), strict=True):
        assert mine.keys() == other.keys()
        assert mine["step"] == other["step"] == 2
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine[name], other[name], rtol=1e-3, atol=1e-8)
    ours, theirs = (
        torch.load(run / "checkpoint-2" / "scheduler.pt", weights_only=True) for run in (two(stage), recorded[0])
    )
    assert {name: ours[name] for name in ("base_lrs", "last_epoch", "lr_lambdas")} == {
        name: theirs[name] for name in ("base_lrs", "last_epoch", "lr_lambdas")
    }
    assert not list((two(stage) / "checkpoint-2").glob("global_step*"))


@pytest.mark.full  # ZeRO-2, see above
def test_under_zero_2_the_base_is_sent_to_nobody(two):
    assert said(two("zero2"), 1)["sent"] == 4 * len(adapter_of(two("zero2")))  # what is trained, once


# --- the long ones --------------------------------------------------------------------------------------------------
# For each stage a launch of nine trainings, and two more. Above is one training under ZeRO-3.


@pytest.fixture(scope="module")
def long(exact_base, base, recorded, tmp_path_factory):
    """Of a stage: one process's checkpoint gone on from; pushes weighed; logprobs spoiled; bf16; live; the other
    methods."""
    done = {}
    one = tmp_path_factory.mktemp("alone")
    for method in METHODS:
        kept = {"record": str(one / f"kept-{method}.json")} if method in DRAW else {}
        main({"base": exact_base, "out": str(one / method), "method": method, **ONE, **kept})

    def run(stage):
        if stage in done:
            return done[stage]
        root = tmp_path_factory.mktemp(stage)
        parts = {"parts": stage == "zero3"}
        common = {"base": exact_base, "kept": recorded[1], **TWO, **parts}
        back = until_step_2(recorded[0], root / "one-two")
        calls = [
            {**common, "out": str(back), "existing": "resume"},
            {**common, "out": str(root / "weighed"), "weighs": True, "save_strategy": "no"},
            {"base": str(base.path), "out": str(root / "bf16"), **TWO, **parts, "bf16": True},
            {"base": exact_base, "out": str(root / "learns"), **TWO, **LEARNS},
        ]
        for method in METHODS:
            kept = {"kept": str(one / f"kept-{method}.json")} if method in DRAW else {}
            calls.append({"base": exact_base, "out": str(root / method), "method": method, **TWO, **kept, **parts})
        # Last: what has ended one rank ends these processes for good.
        calls.append({**common, "out": str(root / "spoiled"), "spoils": 2})
        ended = launch(calls, timeout=1500, **of(stage))
        assert ended.returncode == 0, ended.stderr[-3000:]
        done[stage] = root, one
        return done[stage]

    return run


@pytest.mark.full
@BOTH_FULL
@pytest.mark.parametrize("method", METHODS)
def test_so_do_the_other_methods(method, stage, long):
    root, one = long(stage)
    assert distance(root / method, one / method) < 1e-3


@pytest.mark.full
@BOTH_FULL
def test_what_is_measured_of_pairs_is_of_all_of_them(stage, long):
    root, one = long(stage)
    for ours, theirs in zip(lines(root / "online_dpo"), lines(one / "online_dpo"), strict=True):
        for name in ("reward", "reward_std", "rollout_tokens", "policy_version", "mismatch_kl", "completion_length"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


@pytest.mark.full
@BOTH_FULL
def test_actors_of_ray_draw_for_both_ranks(stage, base, tmp_path):
    out = tmp_path / "run"
    call = {"base": str(base.path), "out": str(out), "rollout": "ray", "engine_options": {"replicas": 2}, "bf16": True}
    call |= {**TWO, "max_steps": 3, "save_strategy": "no", "vllm_max_model_length": 32}
    ended = launch([call | {"parts": stage == "zero3"}], **of(stage))
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert [push["version"] for push in lines(out, "sync.jsonl")] == [1, 2, 3]
    ends = [said(out, rank) for rank in (0, 1)]
    assert [end["pushes"] for end in ends] == [3, 3]
    assert [end["owns_engine"] for end in ends] == [True, False]
    config = json.loads((out / "config.json").read_text())
    assert config["engine"].startswith("2 replicas: vllm")
    assert config["plan"]["transport"] == "object_store"
    assert all(step["mismatch_kl"] < 1e-2 and step["base_verified"] for step in lines(out))
    assert all(step["rollout_tokens"] > 0 for step in lines(out))


@pytest.mark.full
@BOTH_FULL
def test_a_checkpoint_is_gone_on_from_in_another_number_of_processes(stage, two, long, exact_base, recorded, tmp_path):
    one, kept = recorded
    assert distance(long(stage)[0] / "one-two", one) < 1e-3
    alone = until_step_2(two(stage), tmp_path / "two-one")
    call = {"base": exact_base, "kept": kept, **TWO, "per_device_train_batch_size": 8}
    main({**call, "out": str(alone), "existing": "resume"})
    assert distance(alone, one) < 1e-3


@pytest.mark.full
@BOTH_FULL
def test_a_push_takes_no_more_than_two_adapters(stage, long):
    for rank in (0, 1):
        found = said(long(stage)[0] / "weighed", rank)
        assert found["error"] is None
        # At the first push this engine, which is in the same process, makes its own places for adapters.
        _, *growth = found["growth"]
        assert len(growth) == 3
        assert all(each <= 2.01 for each in growth)  # and some scalars


@pytest.mark.full
@BOTH_FULL
def test_what_is_wrong_is_examined_before_the_step_and_ends_both_ranks(stage, long):
    out = long(stage)[0] / "spoiled"
    ends = [said(out, rank) for rank in (0, 1)]
    assert ends[0]["error"] == ends[1]["error"]
    assert ends[0]["error"].startswith("PolicyMismatchError")


@pytest.mark.full
@BOTH_FULL
def test_in_bf16_a_float32_adapter_is_trained_and_kept(stage, long, base, tmp_path):
    run = long(stage)[0] / "bf16"
    assert all(step["mismatch_kl"] < 1e-2 for step in lines(run))
    kept = adapter_of(run).float()
    assert bool((kept != kept.bfloat16().float()).any())
    alone = until_step_2(run, tmp_path / "alone")
    call = {"base": str(base.path), "out": str(alone), **TWO, "per_device_train_batch_size": 8, "bf16": True}
    main({**call, "existing": "resume"})
    assert json.loads((alone / "summary.json").read_text()) == {"status": "finished", "steps": 4}


@pytest.mark.full
@BOTH_FULL
def test_it_learns_from_what_it_draws(stage, long):
    steps = lines(long(stage)[0] / "learns")
    assert [step["policy_version"] for step in steps] == list(range(1, 31))
    first, last = (sum(step["reward"] for step in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.2


@pytest.mark.full
@BOTH_FULL
def test_a_rank_that_is_killed_is_named(stage, exact_base, tmp_path):
    out = tmp_path / "run"
    struck = {"rank": 1, "step": 2, "how": "kill"}
    done = launch([{"base": exact_base, "out": str(out), "strike": struck, "ddp_timeout": 60, **TWO}], **of(stage))
    assert done.returncode != 0
    assert said(out, 0)["error"].startswith("RankLostError: training: rank 1 of 2 is gone")
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert (out / "checkpoint-2").is_dir()
