"""The benchmark itself: both sides really sample, in one run."""

import json

from support import program

bench_rollout = program("benchmarks/rollout.py").bench_rollout
add_to = program("benchmarks/rounds.py").add_to


def test_a_rollout_is_measured_on_both_sides(tmp_path):
    said = []
    results = bench_rollout("demo", batches=(2,), modes=("nf4",), tokens=4, minutes=0.0, say=said.append)
    add_to(tmp_path / "rollout.json", results)
    held = json.loads((tmp_path / "rollout.json").read_text())["demo, batch 2"]
    assert all((held["commit"], held["versions"]["torch"], held["machine"]["cpu_cores"]))
    rows = held["modes"]
    assert set(rows) == {"nf4", "bf16"}
    for row in rows.values():
        assert min(row["ours"], row["against"], row["ratio"]) > 0
        assert row["rounds"] == 3
    assert {mode: note["base"] for mode, note in held["engines"].items()} == {"nf4": "nf4"}
    assert all(note["adapter"] == "direct" and not note["left"] for note in held["engines"].values())
    assert "of bf16 without an adapter" in said[-1]
