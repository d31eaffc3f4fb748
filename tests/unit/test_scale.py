"""The model of benchmarks/scale.py where the answer is known, and what it said of the runs that it was compared
with."""

import dataclasses
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
JSON = ROOT / "benchmarks" / "results" / "scale.json"


@pytest.fixture
def scale(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import scale

    return scale


def job(scale, **fields):
    usual = {
        "engines": 4, "completions": 64, "engine_s": 40.0, "floor_s": 2.0, "overhead_s": 0.5, "wait_s": 3.0,
        "train_s": 5.0,
        "push_s": 1.0, "max_staleness": 0,
    }  # fmt: skip
    return scale.Job(**usual | fields)


def test_without_overlap_the_parts_of_a_step_add_up(scale):
    for engines, rollout in ((1, 40.0), (4, 10.0), (64, 2.0), (1000, 2.0)):
        found = scale.simulate(job(scale, engines=engines))
        assert found["step_s"] == pytest.approx(rollout + 0.5 + 3.0 + 5.0 + 1.0)
        assert found["staleness_mean"] == 0


@pytest.mark.parametrize(
    ("fields", "step_s"),
    [
        ({"engines": 64, "max_staleness": 1}, 6.0),  # the trainer: step and push
        ({"engines": 4, "max_staleness": 2}, 10.0),  # the engines: their throughput
        ({"engines": 64, "max_staleness": 1, "wait_s": 30.0}, (30.0 + 2.5 + 6.0) / 2),  # two batches in flight, waiting
    ],
)
def test_with_overlap_the_slowest_part_decides(scale, fields, step_s):
    found = scale.simulate(job(scale, **fields), steps=400)
    assert found["steps_per_hour"] == pytest.approx(3600 / step_s, rel=0.03)
    assert found["staleness_mean"] == pytest.approx(fields["max_staleness"], abs=0.05)


def test_idle_time_is_what_is_left(scale):
    busy = scale.simulate(job(scale, engines=64, max_staleness=1), steps=400)
    assert busy["trainer_idle"] < 0.02
    assert busy["engines_idle"] == pytest.approx(1 - 40.0 / 64 / 6.0, abs=0.02)
    bound = scale.simulate(job(scale, engines=1, max_staleness=2), steps=100)
    assert bound["engines_idle"] < 0.05
    assert bound["trainer_idle"] == pytest.approx(1 - 6.0 / 40.0, abs=0.03)


def test_a_lost_engine_costs_one_more_round_and_its_throughput_until_it_is_replaced(scale):
    plain = job(scale, overhead_s=0.0, wait_s=0.0, push_s=0.0)
    assert scale.simulate(plain, steps=20)["step_s"] == pytest.approx(15.0)
    lost = dataclasses.replace(plain, fails_at_s=(20.0,), replace_s=1e9)
    found = scale.simulate(lost, steps=200)
    assert found["failures"] == 1
    assert found["step_s"] == pytest.approx(5.0 + 40.0 / 3)
    often = dataclasses.replace(plain, failures_per_hour=20.0, replace_s=60.0)
    assert scale.simulate(often)["steps_per_hour"] < scale.simulate(plain)["steps_per_hour"]


@pytest.mark.parametrize(
    ("engines", "staleness", "step_s"),
    [
        (1, 0, 12.0 + 4.0),  # one after the other: a core is idle
        (2, 0, 6.0 + 4.0),
        (4, 0, 6.0 + 4.0),  # four engines have two cores
        (1, 1, 12.0),  # the trainer has the other core
        (2, 1, (12.0 + 4.0) / 2),  # both cores are always busy
        (4, 1, 8.5),  # five processes: the trainer is so slow that a core is idle when the engines are done
    ],
)
def test_engines_and_trainer_share_the_cores_that_there_are(scale, engines, staleness, step_s):
    shared = job(
        scale, engines=engines, max_staleness=staleness, cores=2, engine_s=12.0, floor_s=0.0, overhead_s=0.0,
        wait_s=0.0,
        train_s=4.0, push_s=0.0,
    )  # fmt: skip
    assert scale.simulate(shared)["step_s"] == pytest.approx(step_s, rel=0.02)


def test_a_larger_base_and_a_slower_line_make_a_push_longer_and_ray_shortens_it_for_many(scale):
    assert scale.adapter_bytes("8B") == 2 * 41_943_040  # PEFT's own count of Llama 3.1 8B, rank 16, all linears
    assert scale.push_seconds("8B", 1, "lan", "http") == scale.push_seconds("8B", 1, "lan", "ray")
    assert scale.push_seconds("8B", 1000, "wan", "ray") < scale.push_seconds("8B", 1000, "wan", "http") / 50
    for smaller, larger in (("8B", "70B"), ("70B", "400B")):
        assert scale.push_seconds(smaller, 4, "lan", "ray") < scale.push_seconds(larger, 4, "lan", "ray")


def test_the_prediction_was_compared_with_runs_and_every_assumption_has_its_source():
    found = json.loads(JSON.read_text())
    runs = found["checked"]["runs"]
    assert len(runs) >= 7
    for run in runs.values():
        assert run["error"] == pytest.approx(run["predicted_step_s"] / run["step_s"] - 1)
        assert run["predicted_staleness"] == pytest.approx(run["staleness_mean"], abs=0.4)
    assert found["checked"]["largest_error"] < 0.35
    assert all(each["source"] for each in found["assumed"].values())
    for real in found["real"].values():
        assert len(real["runs"]) == 9
        errors = [run["predicted_step_s"] / run["step_s"] - 1 for run in real["runs"].values()]
        assert errors == pytest.approx([run["error"] for run in real["runs"].values()])
        assert real["largest_error"] < 0.35
    assert {(each["base"], each["engines"]) for each in found["predicted"]} >= {("8B", 1), ("400B", 1000)}
