"""`make gpu-check` without a GPU: what it plans, and how it runs, stops and goes on, with real processes."""

import ast
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


def _load(name, file):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


check = _load("gpu_check", SCRIPT)
tables = _load("gpu_tables", ROOT / "benchmarks" / "gpu_tables.py")
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


def test_marks_are_found_on_files_and_on_functions(tmp_path):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_all.py").write_text(
        "import pytest\npytestmark = [pytest.mark.gpu]\ndef test_a(): ...\ndef helper(): ...\n"
    )
    (tests / "test_one.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_b(): ...\ndef test_c(): ...\n")
    (tests / "test_two.py").write_text("import pytest\ndef test_d(): ...  # not pytest.mark.gpu\n")
    assert check.gpu_tests(tests) == ["tests/test_all.py", "tests/test_one.py"]


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


def test_outcomes_are_kept_and_only_what_failed_is_tried_again(tmp_path):
    sleeper = (
        "import subprocess, time; subprocess.Popen(['sleep', '1000']); print('asleep', flush=True); time.sleep(1000)"
    )
    pieces = [
        piece("good", tmp_path, "pathlib.Path(sys.argv[2], 'numbers.json').write_text('{\"a\": 1}')"),
        piece("bad", tmp_path, "print('because'); sys.exit(7)"),
        piece("slow", tmp_path, sleeper, limit_s=8),
        piece("lacking", tmp_path, needs=("no_such_module",)),
    ]
    state = tmp_path / "state"
    code = check.run_all(pieces, state, os.environ, missing=["no_such_module"], cwd=tmp_path)
    wanted = {"good": "passed", "bad": "failed", "slow": "timed out", "lacking": "not run"}
    assert (code, statuses(pieces, state)) == (check.SOME_FAILED, wanted)
    found = check.outcomes(pieces, state)
    assert found["good"]["numbers"] == {"a": 1}
    assert (found["bad"]["code"], found["bad"]["tail"]) == (7, "because\n")
    assert ran(tmp_path, "lacking") == 0
    check.run_all(pieces, state, os.environ, missing=["no_such_module"], cwd=tmp_path)
    assert [ran(tmp_path, p.name) for p in pieces] == [1, 1, 1, 0]
    check.run_all(pieces, state, os.environ, cwd=tmp_path)  # it was installed
    assert [ran(tmp_path, p.name) for p in pieces] == [1, 1, 1, 1]
    assert statuses(pieces, state)["lacking"] == "passed"
    check.run_all(pieces, state, os.environ, retry=True, cwd=tmp_path)
    assert [ran(tmp_path, p.name) for p in pieces] == [1, 2, 2, 1]


FACT = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[2])
for ok in (True, False):
    (out / "facts.jsonl").open("a").write(json.dumps({"fact": str(ok), "ok": ok}) + "\\n")
out.joinpath("numbers.json").write_text('{"kl": 1}')
"""


def test_facts_are_kept_of_a_piece_that_is_killed_and_numbers_are_judged(tmp_path):
    judge = {"right": lambda numbers: "", "wrong": lambda numbers: f"KL of {numbers['kl']}"}
    pieces = [piece(name, tmp_path, FACT, judge=function) for name, function in judge.items()]
    pieces.append(piece("killed", tmp_path, FACT + "time.sleep(1000)", limit_s=10, judge=judge["wrong"]))
    assert check.run_all(pieces, tmp_path / "state", os.environ, cwd=tmp_path) == check.SOME_FAILED
    assert statuses(pieces, tmp_path / "state") == {"right": "passed", "wrong": "failed", "killed": "timed out"}
    found = check.outcomes(pieces, tmp_path / "state")
    assert all([fact["ok"] for fact in outcome["facts"]] == [True, False] for outcome in found.values())
    assert "KL of 1" in found["wrong"]["tail"]


def test_a_demo_and_a_memory_estimate_are_judged_by_their_numbers():
    assert check.learned({"accuracy_after": 0.9, "mismatch_kl_median": 1e-3}) == ""
    assert "right" in check.learned({"accuracy_after": 0.8, "mismatch_kl_median": 1e-3})
    assert "KL" in check.learned({"accuracy_after": 0.9, "mismatch_kl_median": 3e-3})
    assert check.learned({})

    def said(planned, **measured):
        return check.well_planned({"8b": {"lengths": {"64": {"planned": {"peak": planned}, "measured": measured}}}})

    assert said(120, peak=1, **{"peak of the allocator": 100}) == ""
    assert "64 tokens" in said(85, peak=1, **{"peak of the allocator": 100})
    assert "64 tokens" in said(160, peak=100)


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


def test_a_piece_that_says_that_something_is_missing_has_not_failed(tmp_path):
    command = ("{python}", "-c", "import sys; sys.exit(3)")
    lacking = check.Piece("lacking", command, 60, lacks_code=3)
    failing = check.Piece("failing", command, 60)
    assert check.run_all([lacking, failing], tmp_path / "state", os.environ, cwd=tmp_path) == check.SOME_FAILED
    assert statuses([lacking, failing], tmp_path / "state") == {"lacking": "not run", "failing": "failed"}


def test_outcomes_of_changed_files_are_not_those_of_the_commit(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert check.commit(tmp_path) == "unknown"
    (tmp_path / "file").write_text("one")
    for command in (["init"], ["add", "."], ["commit", "-m", "one"]):
        git(*command)
    clean = check.commit(tmp_path)
    (tmp_path / "file").write_text("two")
    changed = check.commit(tmp_path)
    (tmp_path / "file").write_text("three")
    assert changed.startswith(clean + "+")
    assert check.commit(tmp_path) not in (clean, changed)
    (tmp_path / "file").write_text("one")
    assert check.commit(tmp_path) == clean


def test_a_skipped_test_is_not_a_passed_one(tmp_path, capsys):
    (tmp_path / "test_x.py").write_text("import pytest\ndef test_x(): pytest.skip('two GPUs')\n")
    skipped = check.Piece("skipped", ("{python}", "-m", "pytest", "-q", "-rs", "test_x.py"), 300)
    assert check.run_all([skipped], tmp_path / "state", os.environ, cwd=tmp_path) == check.OK
    outcome = check.outcomes([skipped], tmp_path / "state")["skipped"]
    assert outcome["status"] == "not run"
    assert "two GPUs" in outcome["tail"]
    assert re.search(r"not run after .*two GPUs$", capsys.readouterr().out, re.MULTILINE)


def test_each_test_of_a_piece_has_its_outcome(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(
        "import pytest\n@pytest.mark.parametrize('word', ['a b', 'c'])\ndef test_x(word): assert word == 'c'\n"
        "def test_y(): pytest.skip('two GPUs')\n"
    )
    several = check.Piece("several", ("{python}", "-m", "pytest", "-v", "tests/test_x.py"), 300)
    check.run_all([several], tmp_path / "state", os.environ, cwd=tmp_path)
    tests = check.outcomes([several], tmp_path / "state")["several"]["tests"]
    assert tests == {"test_x[a b]": "FAILED", "test_x[c]": "PASSED", "test_y": "SKIPPED"}


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


def test_what_is_to_be_brought_back_is_in_the_folder_that_was_named(tmp_path, monkeypatch):
    """The GPU and the pieces are made up; the rest is what runs on a GPU."""
    stack = {"gpu": "H100", "python": "3.12.3", "packages": {"torch": "2.11.0", "vllm": "0.26.0"}, "missing": []}
    monkeypatch.setattr(check, "probe", lambda *_: stack)
    monkeypatch.setattr(check, "plan", lambda device: [piece("one", tmp_path, "print('said')"), piece("two", tmp_path)])
    committed = ROOT / "benchmarks" / "results" / "gpu.json"
    before = committed.read_bytes() if committed.exists() else None
    out = tmp_path / "out"
    assert check.main(["--out", str(out), "--state", str(tmp_path / "state"), "--budget", "300"]) == check.OK
    assert sorted(file.name for file in out.iterdir()) == ["gpu.json", "log.txt"]
    (found,) = json.loads((out / "gpu.json").read_text()).values()
    assert {name: row["status"] for name, row in found["pieces"].items()} == {"one": "passed", "two": "passed"}
    assert (out / "log.txt").read_text() == "===== one\nsaid\n\n===== two\n\n"
    assert (committed.read_bytes() if committed.exists() else None) == before
    # Too little is left for anything: the state is that of before, and the code says so.
    assert check.main(["--out", str(out), "--state", str(tmp_path / "other"), "--budget", "20"]) == check.LEFT


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


def test_packages_come_out_of_a_directory_once(tmp_path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "one_of_ours-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("one_of_ours.py", "VALUE = 1\n")
        wheel.writestr("one_of_ours-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: one-of-ours\nVersion: 1.0\n")
        wheel.writestr(
            "one_of_ours-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("one_of_ours-1.0.dist-info/RECORD", "")
    with tarfile.open(wheels / "slice.tar.xz", "w:xz") as archive:
        content = b"VALUE = 2\n"
        entry = tarfile.TarInfo("another/__init__.py")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    assert check.unpack(wheels, site) == ["one_of_ours-1.0-py3-none-any.whl", "slice.tar.xz"]
    assert check.unpack(wheels, site) == []
    command = [sys.executable, "-c", "import one_of_ours, another; print(one_of_ours.VALUE + another.VALUE)"]
    assert subprocess.check_output(command, env={**os.environ, "PYTHONPATH": str(site)}, text=True) == "3\n"
    with pytest.raises(SystemExit, match="holds no wheel"):
        check.unpack(tmp_path / "nothing", site)


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ({"vllm": "0.26.0"}, ""),
        ({"vllm": "0.27.1", "vllm-bnb-plugin": "0.0.3"}, "collides"),
        ({"vllm": "0.28.0"}, "needs vllm-bnb-plugin"),
        ({"vllm": "0.31.0+cu130", "vllm-bnb-plugin": "0.0.3"}, ""),
        ({}, ""),
    ],
)
def test_bitsandbytes_is_where_this_vllm_looks_for_it(packages, said):
    assert said in check.wrong_plugin(packages)
    assert bool(said) == bool(check.wrong_plugin(packages))


def test_an_outcome_counts_for_its_stack_alone():
    stack = {"gpu": "NVIDIA H100 80GB", "python": "3.12.3", "packages": {"torch": "2.11.0+cu130", "vllm": "0.26.0"}}
    key = check.stack_key(stack, "abc")
    assert key == "NVIDIA-H100-80GB-python3.12.3-torch2.11.0+cu130-vllm0.26.0-abc"
    assert key != check.stack_key({**stack, "packages": {**stack["packages"], "vllm": "0.31.0"}}, "abc")


def test_every_sentence_that_a_gpu_decides_is_in_its_page_and_changes_with_the_outcome():
    names = {p.name for p in check.plan()}
    file = ROOT / "benchmarks" / "results" / "gpu.json"
    result = json.loads(file.read_text()) if file.exists() else {}
    for sentence in tables.sentences():
        text, page, pieces = (ROOT / sentence["page"]).read_text(), sentence["page"], sentence["pieces"]
        assert names >= set(pieces)
        held = sentence[tables.decided(pieces, result) or "now"]
        assert text.count(held) == 1
        for outcome in ("passed", "failed"):
            ends = dict.fromkeys(pieces, "passed") | {pieces[-1]: outcome}
            ended = {"run": {"pieces": {name: {"status": end} for name, end in ends.items()}}}
            said = tables.say(page, text, ended)
            assert sentence[outcome] in said
            assert tables.say(page, said, ended) == said
        unfinished = {"run": {"pieces": {pieces[0]: {"status": "cut off"}}}}
        assert held in tables.say(page, text, unfinished)
    # The newest check that has ended counts, whatever came before it.
    both = {"old": {"pieces": {"demo": {"status": "failed"}}}, "new": {"pieces": {"demo": {"status": "passed"}}}}
    assert tables.decided(["demo"], both) == "passed"
    decided = {name for sentence in tables.sentences() for name in sentence["pieces"]}
    assert not [name for name in names - decided if name.startswith(("test-", "engine-", "memory", "demo"))]


def test_the_tables_say_not_run_yet_and_then_what_was_found():
    """The numbers have the shape that the benches write: they are those of the CPU."""
    assert "not run yet" in tables.stacks({})
    assert "not run yet" in tables.numbers({})
    results = ROOT / "benchmarks" / "results"
    lengths = json.loads((results / "memory_lengths.json").read_text())["shapes"]["256"]["lengths"]
    memory = {"size": "8b", "layers": 4, "lengths": lengths}
    pieces = {
        "demo": {"status": "passed", "numbers": json.loads((results / "demo.json").read_text())["seeds"]["0"]},
        "bench-rollout-0.4b": {"status": "passed", "numbers": json.loads((results / "rollout.json").read_text())},
        "bench-step-0.1b": {"status": "passed", "numbers": json.loads((results / "step.json").read_text())},
        "field-qlora_rl": {"status": "passed", "numbers": json.loads((results / "field.json").read_text())},
        "memory-8b": {"status": "passed", "numbers": {"": memory}},
        "bench-sync-0.4b": {
            "status": "passed",
            "numbers": json.loads((results / "sync.json").read_text()) | {"size": ""},
        },
        "engine-eager": {
            "status": "failed",
            "facts": [
                {"fact": "mismatch at temperature 1.0", "ok": True, "value": {"kl": 1.23e-4}},
                {"fact": "base verified", "ok": False, "value": None},
            ],
            "tests": {"test_a": "FAILED", "test_b": "PASSED"},
        },
        "test-x": {"status": "timed out"},
        "test-y": {"status": "not run"},
    }
    stack = {"gpu": "H100", "python": "3.12.3", "packages": {"torch": "2.11.0", "vllm": "0.26.0"}, "commit": "abc"}
    result = {"key": {**stack, "planned": [*pieces, "test-z"], "pieces": pieces}}
    bad = "engine-eager (failed, base verified, `test_a`), test-x (timed out)"
    assert f"6 of 10 | {bad} | test-y, test-z |" in tables.stacks(result)
    shown = tables.numbers(result)
    marks = pieces["demo"]["numbers"]
    for what in (
        f"demo, right before and after | {marks['accuracy_before']:.1%}, {marks['accuracy_after']:.1%}",
        "rollout, 0.4b, batch 16, `nf4`",
        "a step, 0.1b",
        "qlora_rl",
        "engine-eager, mismatch at temperature 1.0 | kl 0.00012 |",
        "GiB, planned",
        "TRL's merge against it",
    ):
        assert what in shown
