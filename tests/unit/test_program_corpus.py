"""`program_match` on the programs of `programs/`."""

import subprocess

import pytest
from corpus import RIGHT, programs

from qlora_rl.rewards import program_match
from qlora_rl.rewards import programs as judging
from qlora_rl.rewards.judging.modes import objects_needed

# Right, and judged wrong: containers are copied for each call. docs/rewards.md says so.
MISJUDGED = {"a list that the program keeps", "a mutable default"}
# They pass, in the interpreter that they share with tests which need their objects.
PASSING = {
    "a manager swallows an exit",
    "the tests' object gets a method",
    "globals through a method's function",
    "an assertion in a loop before the line that raises",
    "if and raise in a with of the program",
    "a Mock of the tests is asked to forget",
}
ADD = "def add(a, b):\n    return a + b\n"
ADDS = "assert add(1, 2) == 3"


def passing(found, **options):
    """What passes, in one call: the judge starts two at a time."""
    rewards = program_match(
        [p for p, _ in found.values()], tests=[t for _, t in found.values()], timeout_s=60.0, **options
    )
    return {name for name, reward in zip(found, rewards, strict=True) if reward == 1.0}


@pytest.mark.parametrize("kind", RIGHT)
def test_odd_programs_that_are_right_pass(kind):
    found = programs(kind)
    assert set(found) - passing(found) <= MISJUDGED


def test_programs_that_cheat_get_nothing_where_tests_compare_values():
    found = {
        name: (p, t) for name, (p, t) in programs("cheats").items() if not (isinstance(t, str) and objects_needed(t))
    }
    assert len(found) > 70
    assert passing(found) == set()


def test_programs_that_cheat_tests_which_need_their_objects_are_known_by_name():
    found = {name: (p, t) for name, (p, t) in programs("cheats").items() if isinstance(t, str) and objects_needed(t)}
    assert passing(found) == PASSING


def test_a_machine_that_starts_no_more_processes_for_a_while_is_waited_for(monkeypatch):
    real, left = subprocess.Popen, [3]

    def start(*arguments, **keywords):
        if left[0]:
            left[0] -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(*arguments, **keywords)

    monkeypatch.setattr(judging.subprocess, "Popen", start)
    assert program_match([ADD], tests=[ADDS], timeout_s=60.0) == [1.0]
    assert left == [0]


def test_where_no_process_starts_only_that_program_fails(monkeypatch, caplog):
    def start(*arguments, **keywords):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    judging._SAID.clear()
    monkeypatch.setattr(judging.subprocess, "Popen", start)
    monkeypatch.setattr(judging, "_GRACE_S", 0.1)
    assert program_match([ADD], tests=[ADDS], timeout_s=0.1) == [0.0]
    assert "starts no more processes" in caplog.text
