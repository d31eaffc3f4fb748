"""The other methods, a checkpoint of another number of processes, and vLLM itself, under DDP. Long."""

import json
import shutil

import pytest
from conftest import distance, launch, said
from job import main
from resumed import lines

pytestmark = pytest.mark.full  # GRPO under DDP is in test_ddp.py; vLLM in several processes is in no default test

ONE, TWO = {"per_device_train_batch_size": 8}, {"per_device_train_batch_size": 4}
LEARNS = {"learns": True, "max_steps": 30, "save_strategy": "no", "lr_scheduler_type": "constant"}
METHODS = ("rloo", "online_dpo", "sft", "dpo")
DRAW = ("rloo", "online_dpo")
VLLM = {"server": {}, "ray": {"engine_options": {"replicas": 2}}, "colocate": {}}


@pytest.fixture(scope="module")
def methods(exact_base, tmp_path_factory):
    """Each method by one process, and by two of them in one launch."""
    root = tmp_path_factory.mktemp("methods")
    kept = {method: {"kept": str(root / f"kept-{method}.json")} for method in DRAW}
    common = {"base": exact_base, "max_steps": 3}
    for method in METHODS:
        record = {"record": kept[method]["kept"]} if method in DRAW else {}
        main({**common, **ONE, **record, "out": str(root / f"one-{method}"), "method": method})
    calls = [{**common, **TWO, "out": str(root / f"two-{m}"), "method": m, **kept.get(m, {})} for m in METHODS]
    calls.append({"base": exact_base, "out": str(root / "learns"), **TWO, **LEARNS})
    calls.append({**common, **TWO, "out": str(root / "fails"), "method": "online_dpo", "fails": [1, 2]})
    done = launch(calls)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_what_one_trains_on_the_doubled_batch(method, methods):
    assert distance(methods / f"two-{method}", methods / f"one-{method}") < 1e-3


def test_what_is_measured_of_pairs_is_of_all_of_them(methods):
    for ours, theirs in zip(lines(methods / "two-online_dpo"), lines(methods / "one-online_dpo"), strict=True):
        for name in ("reward", "reward_std", "rollout_tokens", "policy_version", "mismatch_kl", "completion_length"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name


def test_a_reward_of_pairs_that_raises_on_rank_1_raises_the_same_on_rank_0(methods):
    ends = [said(methods / "fails", rank) for rank in (0, 1)]
    assert ends[0]["error"] == ends[1]["error"]
    assert "'slow_reward' raised ZeroDivisionError: only here" in ends[0]["error"]
    assert ends[0]["notes"] == ["raised on rank 1"]


def until_step_2(run, copy):
    """A copy of a run that ended at its checkpoint of step 2."""
    shutil.copytree(run, copy)
    for directory in ("checkpoint-4", "adapter"):
        shutil.rmtree(copy / directory)
    (copy / "summary.json").unlink()
    return copy


def test_the_last_checkpoint_goes_on_in_another_number_of_processes(exact_base, recorded, tmp_path):
    one, kept = recorded
    common = {"base": exact_base, "kept": kept, "max_steps": 4, "save_steps": 2, "existing": "resume"}
    two = until_step_2(one, tmp_path / "one-two")
    full = {**common, **TWO, "out": str(tmp_path / "two"), "existing": "reject"}
    done = launch([{**common, **TWO, "out": str(two)}, full])
    assert done.returncode == 0, done.stderr[-3000:]
    assert distance(two, one) < 1e-3
    back = until_step_2(tmp_path / "two", tmp_path / "two-one")
    main({**common, **ONE, "out": str(back)})
    assert distance(back, one) < 1e-3
    for run in (two, back):
        assert [push["version"] for push in lines(run, "sync.jsonl")] == [1, 2, 3, 4]


def test_another_batch_of_a_step_is_another_run(exact_base, recorded, tmp_path):
    copy = until_step_2(recorded[0], tmp_path / "run")
    done = launch(
        [{"base": exact_base, "out": str(copy), "max_steps": 4, "save_steps": 2, "existing": "resume", **ONE}]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ends = [said(copy, rank)["error"] for rank in (0, 1)]
    assert ends[0] == ends[1]
    assert "completions of a step was 8 and is 16" in ends[0]


@pytest.fixture(scope="module")
def on_vllm(base, tmp_path_factory):
    """The same training with each kind of engine, one after the other in two processes."""
    root = tmp_path_factory.mktemp("vllm")
    common = {"base": str(base.path), "vllm_max_model_length": 32, "bf16": True, "max_steps": 3, "save_strategy": "no"}
    done = launch([{**common, **TWO, **more, "out": str(root / name), "rollout": name} for name, more in VLLM.items()])
    assert done.returncode == 0, done.stderr[-3000:]
    return root


@pytest.mark.parametrize("rollout", VLLM)
def test_vllm_serves_both_ranks_and_is_pushed_to_once_per_step(rollout, on_vllm):
    out = on_vllm / rollout
    assert [push["version"] for push in lines(out, "sync.jsonl")] == [1, 2, 3]
    assert [said(out, rank)["pushes"] for rank in (0, 1)] == [3, 3]
    config = json.loads((out / "config.json").read_text())
    assert config["base_held"]["copies"] == (1 if rollout == "colocate" else 2)
    assert all(step["mismatch_kl"] < 1e-2 and step["base_verified"] for step in lines(out))
    assert all(step["rollout_tokens"] > 0 for step in lines(out))
    # A server and a fleet are rank 0's; the prompts of all are sampled by it.
    assert [said(out, rank)["owns_engine"] for rank in (0, 1)] == [True, rollout == "colocate"]


def test_actors_of_ray_draw_for_all_ranks_what_a_server_draws(on_vllm):
    held = json.loads((on_vllm / "ray" / "config.json").read_text())
    assert held["engine"].startswith("2 replicas: vllm")
    assert held["plan"]["transport"] == "object_store"
    first = [json.loads((on_vllm / kind / "rollouts.json").read_text())["first"] for kind in ("ray", "server")]
    assert first[0] == first[1]
    ours, theirs = lines(on_vllm / "ray")[0], lines(on_vllm / "server")[0]
    assert [ours[name] for name in ("reward", "rollout_tokens")] == [
        theirs[name] for name in ("reward", "rollout_tokens")
    ]


def test_it_learns_from_what_it_draws(methods):
    steps = lines(methods / "learns")
    assert [step["policy_version"] for step in steps] == list(range(1, 31))
    first, last = (sum(step["reward"] for step in part) / 5 for part in (steps[:5], steps[-5:]))
    assert last > first + 0.2
