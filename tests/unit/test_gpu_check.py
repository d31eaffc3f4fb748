"""`make gpu-check` without a GPU: what it plans, and how it runs, stops and goes on, with real processes."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import program

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


check = program("scripts/gpu_check.py")
# Says that it was here, then does as it is told.
SAY = "import sys, pathlib; pathlib.Path(sys.argv[1]).open('a').write('x')\n"


def piece(name, tmp_path, then="", limit_s=120, **options):
    return check.Piece(name, ("{python}", "-c", SAY + then, str(tmp_path / f"{name}.ran"), "{out}"), limit_s, **options)


def ran(tmp_path, name):
    file = tmp_path / f"{name}.ran"
    return len(file.read_text()) if file.exists() else 0


def statuses(pieces, state):
    return {name: outcome["status"] for name, outcome in check.outcomes(pieces, state).items()}


def test_without_a_gpu_it_says_so_with_a_code_of_its_own_and_writes_nothing(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("what is said where there is no GPU; this machine has one")
    options = ["--state", str(tmp_path / "state"), "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True)
    assert done.returncode == check.NO_GPU == 3
    assert "not run: torch" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
    done = subprocess.run([sys.executable, str(SCRIPT), "--only", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no piece is called so" in done.stderr


def test_the_plan_has_every_marked_test_once_and_no_piece_is_longer_than_nine_minutes():
    pieces = check.plan()
    files = [part for p in pieces for part in p.command if part.startswith("tests/")]
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.gpu"
            for node in ast.walk(ast.parse(file.read_text()))
        )
    }
    assert sorted(files) == sorted(marked)
    assert all(0 < p.limit_s <= 540 for p in pieces)
    for p in pieces:
        files = [part for part in p.command if part.endswith(".py") or "::" in part]
        assert all((ROOT / part.partition("::")[0]).exists() for part in files)


def test_every_command_of_the_plan_is_understood_by_what_it_calls(tmp_path):
    """The parsers themselves say so: of our command, and of each script."""
    from qlora_rl.cli import _parser

    said = {}
    for p in [*check.plan(), *check.plan(device="cpu")]:
        command = [part.replace("{out}", str(tmp_path)) for part in p.command]
        if "qlora_rl.cli" in command:
            _parser().parse_args(command[3:])
        elif command[1].startswith(("benchmarks/", "scripts/")):
            script = command[1]
            if script not in said:
                said[script] = subprocess.check_output([sys.executable, str(ROOT / script), "--help"], text=True)
            assert all(part in said[script] for part in command if part.startswith("--")), command
    assert len(said) == 5


FACT = """
import json, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[2])
for ok in (True, False):
    (out / "facts.jsonl").open("a").write(json.dumps({"fact": str(ok), "ok": ok}) + "\\n")
out.joinpath("numbers.json").write_text('{"kl": 1}')
"""
SLEEPER = "subprocess.Popen(['sleep', '1000']); print('asleep', flush=True); time.sleep(1000)"


def test_outcomes_are_kept_and_only_what_failed_is_tried_again(tmp_path):
    pieces = [
        piece("good", tmp_path, FACT, judge=lambda numbers: ""),
        piece("bad", tmp_path, "print('because'); sys.exit(7)"),
        piece("wrong", tmp_path, FACT, judge=lambda numbers: f"KL of {numbers['kl']}"),
        piece("slow", tmp_path, FACT + SLEEPER, limit_s=8),
        piece("lacking", tmp_path, needs=("no_such_module",)),
    ]
    refusing = piece("refusing", tmp_path, "sys.exit(3)", lacks_code=3)
    state = tmp_path / "state"
    code = check.run_all([*pieces, refusing], state, os.environ, missing=["no_such_module"], cwd=tmp_path)
    wanted = {"good": "passed", "bad": "failed", "wrong": "failed", "slow": "timed out", "lacking": "not run"}
    assert (code, statuses(pieces, state)) == (check.SOME_FAILED, wanted)
    assert statuses([refusing], state) == {"refusing": "not run"}
    found = check.outcomes(pieces, state)
    assert found["good"]["numbers"] == {"kl": 1}
    assert (found["bad"]["code"], found["bad"]["tail"]) == (7, "because\n")
    assert "KL of 1" in found["wrong"]["tail"]
    assert [[fact["ok"] for fact in found[name]["facts"]] for name in ("good", "wrong", "slow")] == [[True, False]] * 3
    check.run_all(pieces, state, os.environ, missing=["no_such_module"], cwd=tmp_path)
    assert [ran(tmp_path, p.name) for p in pieces] == [1, 1, 1, 1, 0]
    check.run_all(pieces, state, os.environ, cwd=tmp_path)  # it was installed
    assert [ran(tmp_path, p.name) for p in pieces] == [1, 1, 1, 1, 1]
    assert statuses(pieces, state)["lacking"] == "passed"
    check.run_all(pieces, state, os.environ, retry=True, cwd=tmp_path)
    assert [ran(tmp_path, p.name) for p in pieces] == [1, 2, 2, 2, 1]


def test_a_rehearsal_records_nothing_and_says_what_needs_a_card(tmp_path, monkeypatch, capsys):
    """The pieces are made up: those of the plan take minutes."""
    needing = piece("needing", tmp_path, needs_card=True)
    said = "import os; print(os.environ['DEVICE'], repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    monkeypatch.setattr(check, "plan", lambda device: [piece("one", tmp_path, said), needing])
    results = ROOT / "benchmarks" / "results" / "gpu.json"
    before = results.read_bytes() if results.exists() else None
    options = ["--device", "cpu", "--state", str(tmp_path / "state")]
    assert check.main(options) == check.OK
    assert "needing: not run, it needs a card" in capsys.readouterr().out
    (home,) = (tmp_path / "state").glob("rehearsal-*")
    assert (home / "one" / "log.txt").read_text() == "cpu ''\n"
    assert ran(tmp_path, "needing") == 0
    assert (results.read_bytes() if results.exists() else None) == before
    for option in ("--json", "--out"):
        with pytest.raises(SystemExit):
            check.main([*options, option, str(tmp_path / "x")])


def test_each_test_of_a_piece_has_its_outcome_and_a_skipped_one_is_not_passed(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(
        "import pytest\n@pytest.mark.parametrize('word', ['a b', 'c'])\ndef test_x(word): assert word == 'c'\n"
        "def test_y(): pytest.skip('two GPUs')\n"
    )
    command = ("{python}", "-m", "pytest", "-v", "-rs", "tests/test_x.py")
    several, skipped = check.Piece("several", command, 300), check.Piece("skipped", (*command, "-k", "test_y"), 300)
    check.run_all([several, skipped], tmp_path / "state", os.environ, cwd=tmp_path)
    found = check.outcomes([several, skipped], tmp_path / "state")
    assert found["several"]["tests"] == {"test_x[a b]": "FAILED", "test_x[c]": "PASSED", "test_y": "SKIPPED"}
    assert (found["several"]["status"], found["skipped"]["status"]) == ("failed", "not run")
    assert "two GPUs" in found["skipped"]["tail"]


def test_a_budget_cuts_off_and_names_what_it_leaves_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "LEAST_S", 2)
    monkeypatch.setattr(check, "ENDING_S", 1)
    slow = piece("slow", tmp_path, "import time; time.sleep(1000)", limit_s=400)
    pieces, state = (
        [piece("one", tmp_path, limit_s=300), slow, piece("never", tmp_path, limit_s=300)],
        tmp_path / "state",
    )
    recorded = []

    def run(seconds):
        return check.run_all(
            pieces,
            state,
            os.environ,
            ends_at=time.monotonic() + seconds,
            record=lambda: recorded.append(statuses(pieces, state)),
            cwd=tmp_path,
        )

    began = time.monotonic()
    assert run(12) == check.LEFT  # all limits are longer
    assert time.monotonic() - began < 30
    assert statuses(pieces, state) == {"one": "passed", "slow": "cut off"}
    assert recorded == [{"one": "passed"}, {"one": "passed", "slow": "cut off"}]
    assert "the budget left out 2: slow, never." in capsys.readouterr().out
    # What was cut off does not take all of the next budget too: it begins only with more time than it had.
    had = check.outcomes(pieces, state)["slow"]["limit_s"]
    assert check.needed_s(slow, {"status": "cut off", "limit_s": had}) == had + 2
    assert check.needed_s(slow, {"status": "cut off", "limit_s": 399}) == 400
    assert run(had) == check.LEFT
    assert [ran(tmp_path, p.name) for p in pieces] == [1, 1, 1]
    assert run(2.5) == check.LEFT
    assert statuses(pieces, state) == {"one": "passed", "slow": "cut off", "never": "passed"}


# A child that has a child; both are to be gone.
PARENT = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid} ")
time.sleep(1000)
"""
DRIVER = """
import importlib.util, os, pathlib, sys
spec = importlib.util.spec_from_file_location("gpu_check", sys.argv[1])
check = importlib.util.module_from_spec(spec)
sys.modules["gpu_check"] = check
spec.loader.exec_module(check)
home = pathlib.Path(sys.argv[2])
write = "import sys; open(sys.argv[1], 'a').write('x')"
first = check.Piece("first", ("{python}", "-c", write, str(home / "first.ran")), 120)
second = check.Piece("second", ("{python}", "-c", sys.argv[3], str(home / "pids")), 500)
with check._stopped_by_sigterm():
    check.run_all([first, second], home / "state", os.environ, cwd=home)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_check_leaves_no_process_and_goes_on_where_it_was(tmp_path, number):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(SCRIPT), str(tmp_path), PARENT], stderr=subprocess.DEVNULL
    )
    pids, deadline = tmp_path / "pids", time.monotonic() + 120
    while not (pids.exists() and pids.read_text().endswith(" ")):
        assert time.monotonic() < deadline
        assert driver.poll() is None
        time.sleep(0.05)
    driver.send_signal(number)
    assert driver.wait(120) != 0
    for pid in map(int, pids.read_text().split()):
        status = Path(f"/proc/{pid}/status")
        assert not status.exists() or "\nState:\tZ" in status.read_text()
    pieces = [piece("first", tmp_path), piece("second", tmp_path)]
    assert statuses(pieces, tmp_path / "state") == {"first": "passed"}
    assert check.run_all(pieces, tmp_path / "state", os.environ, cwd=tmp_path) == check.OK
    assert [ran(tmp_path, p.name) for p in pieces] == [1, 1]
