"""What stands around the package: hooks, types, the files of a release."""

import gc
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support import program

from qlora_rl.cli import main

CPU = "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it."
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["test", "unit", "test-full"])
def test_tests_run_as_on_a_processor_that_is_imitated_and_on_no_other(target):
    def said(name):
        command = ["make", "-n", target, f"PROCESSOR={name}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert "PYTHONPATH=" not in said("").stdout
    assert f"PYTHONPATH={ROOT}/tests/avx2 " in said("avx2").stdout
    # tests/avx512 holds a header, and tests/children is on the path of all.
    for name in ("unknown", "avx512", "children", "avx2 unknown"):
        done = said(name)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].endswith("imitates this processor. Use one of: avx2.  Stop.")
        assert "-m pytest" not in done.stdout


@pytest.mark.parametrize("code", [0, 1])
def test_uv_installs_where_it_can_and_pip_does_the_rest(code, tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    said = tmp_path / "said"
    programs = {"venv/bin/python": f'echo "$@" >> {said}', "uv": f'echo uv "$@" >> {said}; exit {code}'}
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    settings = {"PYTHON": sys.executable, "VENV": tmp_path / "venv", "UV": tmp_path / "uv", "QLORA_RL_STACK": "cuda"}
    environment = os.environ | {name: str(value) for name, value in settings.items()}
    subprocess.run(["bash", "scripts/setup.sh"], cwd=ROOT, env=environment, check=True)
    installs = [line for line in said.read_text().splitlines() if " install " in line]
    by_pip = [line for line in installs if line.startswith("-m pip ")]
    assert len(installs) == 1 + code
    assert len(by_pip) == code


def test_every_diagram_was_drawn_from_the_text_beside_it():
    diagrams = program("scripts/diagrams.py")
    sources = sorted((ROOT / "docs" / "diagrams").glob("*.dot"))
    pictures = sorted((ROOT / "docs" / "diagrams").glob("*.svg"))
    assert len(sources) >= 3
    assert [f.stem for f in sources] == [f.stem for f in pictures]
    stale = [f.name for f in pictures if diagrams.drawn_from(f) != diagrams.digest(f.with_suffix(".dot"))]
    assert not stale, "python scripts/diagrams.py"
    for picture in pictures:  # a browser draws nothing of one that is not well-formed
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["demmo"], "demo"),
        (["demo", "--stepz", "3"], "--steps"),
        (["demo", "--sync", "trl-merg"], "trl-merge"),
        (["xyzzy"], None),
        ([], None),
        (["train", "--example", "ppo"], None),  # no slip of dpo
        (["train", "--chek"], "--check"),
        (["prepare", "MODEL", "OUT", "--temperatur", "3"], None),  # another command's option
    ],
    ids=str,
)
def test_a_slip_of_the_command_is_answered_with_what_was_meant(typed, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        main(typed)
    assert ended.value.code == 2
    guesses = re.findall(r"Did you mean '(.+)'\?", capsys.readouterr().err)
    assert guesses == ([meant] if meant else [])


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--learning_rate", "1e-5"], "--set train.learning_rate=1e-5"),
        (["--run.dir=x"], "--set run.dir=x"),
        (["--lr=1e-5", "--max-steps", "3"], "--set train.learning_rate=1e-5 --set train.max_steps=3"),
        (["--reward_funcs", "rewards.py:short"], "--set rewards.0.use=rewards.py:short"),
        (["--xyzzy", "1"], None),
    ],
)
def test_a_field_of_the_file_as_an_option_is_led_to_set(typed, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "run.toml", *typed])
    assert ended.value.code == 2
    usage, _, message = capsys.readouterr().err.partition("qlora-rl train: error: unrecognized arguments: ")
    assert "--set TABLE.FIELD=VALUE" in usage
    assert message.strip() == " ".join(typed) + (f". A field of the file is set with --set: {said}" if said else "")


def test_what_deepspeed_says_of_the_cpu_stays_off_the_output(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("DeepSpeed"), "filters", [])  # without those of a demo in this process
    assert main(["report", "/"]) == 1
    said = [logging.LogRecord("DeepSpeed", logging.WARNING, "", 0, text, None, None) for text in (CPU, "another thing")]
    assert [bool(logging.getLogger("DeepSpeed").filter(record)) for record in said] == [False, True]


def test_libraries_are_imported_without_the_garbage_collector_which_is_on_again_afterwards():
    from qlora_rl.engine.loading import loading

    with loading("json.tool"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert "json.tool" in sys.modules
    with pytest.raises(ModuleNotFoundError), loading("no_such_module"):
        pass
    assert gc.isenabled()


def test_what_is_installed_is_read_once_while_libraries_are_imported():
    from qlora_rl.engine.loading import loading

    own = importlib.metadata.packages_distributions
    with loading():
        found = importlib.metadata.packages_distributions()
        assert found == own()
        assert importlib.metadata.packages_distributions() is found
    assert importlib.metadata.packages_distributions is own


@pytest.mark.parametrize("blocked", ["vllm", "vllm.entrypoints.llm"])
def test_verify_without_a_vllm_that_works_could_not_tell(base, blocked):
    """1 would mean that the bases differ."""
    code = (
        f"import sys; sys.modules[{blocked!r}] = None\n"
        "from qlora_rl.cli import main\n"
        f"print(main(['verify', {str(base)!r}, '--local']))\n"
    )
    done = _alone(code)
    assert done.stdout.splitlines()[-1] == "2"
    assert "could not tell: " in done.stderr


def test_a_demo_in_a_directory_that_holds_a_run_says_so_before_it_imports(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    code = (
        "import sys; from qlora_rl.cli import main\n"
        f"code = main(['demo', '--out', {str(tmp_path)!r}])\n"
        "sys.exit(code if 'torch' not in sys.modules else 'imported')"
    )
    done = _alone(code, check=False)
    assert done.returncode == 1
    assert "holds another run" in done.stderr
    assert "imported" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_command_that_ends_with_an_error_says_so_and_nothing_else(tmp_path):
    """triton's bindings print forty lines where the interpreter's end does not find what they have made."""
    done = _alone(
        f"import sys; from qlora_rl.cli import main; sys.argv = ['', 'chat', {str(tmp_path)!r}]; sys.exit(main())",
        check=False,
    )
    assert done.returncode == 1
    stages, said = [], []
    for line in done.stderr.splitlines():
        (stages if line.startswith("     ") else said).append(line)
    assert stages[0].strip() == "loading the libraries"
    assert len(said) == 1, done.stderr
    assert said[0].startswith("qlora-rl: ")


def _alone(code: str, *, check: bool = True) -> subprocess.CompletedProcess:
    """A process without the tests' own sitecustomize."""
    path = [part for part in os.environ["PYTHONPATH"].split(os.pathsep) if not part.endswith("tests/children")]
    plain = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=check, text=True, env=plain)
