"""What a benchmark makes of its rounds."""

import json

from qlora_rl.bench.rounds import LEAST_ROUNDS, add_to, compare, in_turns


def test_sides_take_turns_and_the_first_round_is_not_counted():
    calls = []

    def side(name):
        def run():
            calls.append(name)
            return float(len(calls))

        return run

    found = in_turns({"a": side("a"), "b": side("b")}, seconds=0.0)
    assert calls == ["a", "b"] * (LEAST_ROUNDS + 1)
    assert found == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}


def test_there_are_no_more_rounds_than_wanted():
    assert len(in_turns({"a": lambda: 1.0}, seconds=60.0, most=4)["a"]) == 4


def test_the_ratio_is_that_of_the_rounds():
    """The machine was three times slower in the second round, for both."""
    row = compare([90.0, 30.0, 93.0], [30.0, 10.0, 31.0])
    assert row == {"ours": 90.0, "against": 30.0, "ratio": 3.0, "rounds": 3}


def test_results_of_other_sizes_stay_in_the_file(tmp_path):
    file = tmp_path / "results" / "rollout.json"
    add_to(file, {"demo": {"ratio": 1}})
    add_to(file, {"0.4b": {"ratio": 2}})
    add_to(file, {"demo": {"ratio": 3}})
    assert json.loads(file.read_text()) == {"demo": {"ratio": 3}, "0.4b": {"ratio": 2}}
