"""`qlora-rl train` without an engine: the SFT, DPO and KTO examples, and one after the other."""

import json
from pathlib import Path

import pytest

from qlora_rl import open_trained
from qlora_rl.cli import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["train.max_steps=2", "train.per_device_train_batch_size=4", "train.gradient_checkpointing=false"]


def train(file, out, *overrides: str) -> list[dict]:
    """Run the command; the lines of metrics.jsonl."""
    command = ["train", str(file)]
    for override in (*overrides, f"run.dir={out}"):
        command += ["--set", override]
    assert main(command) == 0
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    return lines


@pytest.fixture
def tiny(model_dir):
    return [*SMALL, f"base.model={model_dir}"]


@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
def test_the_example_runs_and_its_settled_copy_gives_the_same_numbers(name, tiny, tmp_path):
    first = train(ROOT / "examples" / f"{name}.toml", tmp_path / "run", *tiny)
    second = train(tmp_path / "run" / "run.toml", tmp_path / "again")
    for one, other in zip(first, second, strict=True):
        for value in ("loss", "grad_norm"):
            assert one[value] is not None
            assert one[value] == other[value], value


def test_commands_that_are_printed_can_be_copied_where_a_path_has_spaces(model_dir, tmp_path, capsys):
    model, out = tmp_path / "a model", tmp_path / "a run"
    model.symlink_to(model_dir)
    train(ROOT / "examples" / "sft.toml", out, *SMALL, f"base.model={model}")
    said, told = capsys.readouterr()
    assert (out / "log.txt").is_file()
    assert [line for line in told.splitlines() if line in ("     reading the data", "     loading the base")]
    assert f"qlora-rl report '{out}'\n" in said
    assert f"qlora-rl serve '{out}'\n" in said
    assert f"qlora-rl chat '{out}'\n" in said
    assert main(["train", str(out / "run.toml"), "--check", "--set", "run.existing=overwrite"]) == 0
    assert f"`qlora-rl plan '{model}'`" in capsys.readouterr().err


def test_a_file_that_says_resume_goes_on(tiny, tmp_path):
    command = ["train", str(ROOT / "examples" / "sft.toml")]
    for override in (
        *tiny,
        f"run.dir={tmp_path}",
        "run.existing=resume",
        "train.save_strategy=steps",
        "train.save_steps=1",
    ):
        command += ["--set", override]
    assert main(command) == 0
    assert main([*command, "--set", "train.max_steps=3"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert 'existing = "resume"' in (tmp_path / "run.toml").read_text()


def test_rows_to_evaluate_on_need_no_evaluation_while_it_trains(tiny, tmp_path):
    rows = ROOT / "examples" / "data" / "sums.jsonl"
    train(ROOT / "examples" / "sft.toml", tmp_path / "run", *tiny, f"data.eval={rows}")
    assert open_trained(tmp_path / "run").data.eval == str(rows)  # where `qlora-rl eval` looks


def test_dpo_trains_the_adapter_of_sft_on(tiny, tmp_path):
    from safetensors.torch import load_file

    train(ROOT / "examples" / "sft.toml", tmp_path / "sft", *tiny, "adapter.r=4")
    start = tmp_path / "sft" / "adapter"
    train(
        ROOT / "examples" / "dpo.toml",
        tmp_path / "dpo",
        *tiny,
        f"adapter.start_from={tmp_path / 'sft'}",  # the run, or its adapter/
        "train.learning_rate=1e-6",
    )
    before = load_file(start / "adapter_model.safetensors")
    after = load_file(tmp_path / "dpo" / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)  # trained
    for name in before:  # on, not anew
        assert (before[name] - after[name]).abs().max() < 1e-4


def test_an_adapter_of_another_base_is_rejected(tiny, other_model_dir, tmp_path, capsys):
    train(ROOT / "examples" / "sft.toml", tmp_path / "sft", *tiny)
    start = f"adapter.start_from={tmp_path / 'sft' / 'adapter'}"
    command = ["train", str(ROOT / "examples" / "dpo.toml"), "--set", start, "--set", f"run.dir={tmp_path / 'dpo'}"]
    assert main([*command, "--set", f"base.model={other_model_dir}"]) == 1
    assert "It was trained on the base with identity" in capsys.readouterr().err
    assert not (tmp_path / "dpo").exists()


def test_a_run_that_cannot_fit_is_rejected_before_a_base_is_made(model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("qlora_rl.config.launch.prepare_base", lambda *_, **__: pytest.fail("a base was made"))
    command = [
        "train",
        str(ROOT / "examples" / "grpo.toml"),
        "--set",
        f"base.model={model_dir}",
        "--set",
        f"run.dir={tmp_path}",
    ]
    assert main([*command, "--set", "run.gpu_memory=0.001"]) == 1
    error = capsys.readouterr().err
    assert "GiB" in error
    assert "lower" in error.lower()
