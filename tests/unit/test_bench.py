"""What a benchmark makes of its rounds."""

import json
import time

from support import program

rounds, profile_step = program("benchmarks/rounds.py"), program("benchmarks/profile_step.py")
LEAST_ROUNDS, add_to, compare, in_turns = rounds.LEAST_ROUNDS, rounds.add_to, rounds.compare, rounds.in_turns
typical = program("benchmarks/step.py").typical


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


def test_a_sample_counts_once_for_the_first_of_the_parts():
    """Names of the functions, outermost first, and microseconds."""
    loop, made = "main;Trainer._inner_training_loop;", "GRPOTrainer._generate_and_score_completions;"
    scores = "GRPOTrainer._get_per_token_logps_and_entropies"
    lines = [
        "main;load 50",  # before the loop
        loop + "EngineBridge.generate;Canary.check 6000",
        loop + made + "EngineBridge.generate 4000",
        loop + made + scores + " 3000",
        loop + "GRPOTrainer.compute_loss;" + scores + " 5000",
        loop + "GRPOTrainer.compute_loss 1000",
        loop + "MismatchDebugger.examine 1000000",  # left out
        loop + "somewhere 2000",
    ]
    found = profile_step.milliseconds("\n".join(lines), steps=2)
    assert found == {
        "canary": 3.0,
        "forward": 2.5,
        "rollout: model and sampling": 2.0,
        "first pass": 1.5,
        profile_step.REST: 1.0,
        "loss": 0.5,
    }


def test_a_sample_has_the_processor_time_since_the_one_before():
    """Sleep is none. Half of the time may be missing, where the system's clock ticks slowly."""

    def compute(until):
        while time.thread_time() < until:
            sum(range(1000))

    sampler = profile_step.Sampler()
    sampler.start()
    began = time.thread_time()
    compute(began + 0.3)
    spent = time.thread_time() - began
    time.sleep(0.2)
    sampler.stop()
    found = sum(seconds for names, seconds in sampler.seconds.items() if any(n.endswith("compute") for n in names))
    assert 0.5 * spent < found < 1.1 * spent
    assert all(len(line.rsplit(" ", 1)) == 2 for line in sampler.lines().splitlines())


def test_what_comes_in_one_step_of_a_cycle_counts_its_part():
    assert typical([10.0, 10.0, 10.0, 50.0] * 3) == 20.0
    assert typical([10.0, 50.0, 10.0, 10.0] * 2 + [90.0] * 4 + [10.0, 50.0, 10.0, 10.0] * 2 + [7.0]) == 20.0
    assert typical([7.0]) == 7.0
