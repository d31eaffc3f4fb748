"""A disk that fills up in the middle of a run."""

import errno
import json
import os
import subprocess

import pytest
import torch
from transformers import AutoModelForCausalLM

from qlora_rl import RunDirectoryError
from qlora_rl.train.run import RunDirectory
from qlora_rl.train.run.checkpoints import way_out


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this machine does not let root mount a tmpfs: {mounted.stderr.strip()}")
    yield place
    # At once for whoever looks, and in fact when the last trainer has let go of its run's lock.
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(directory):
    handle = os.open(directory / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(handle, b"x" * 512)
    except OSError:
        os.close(handle)


def test_a_full_disk_ends_the_run_with_its_name_and_what_was_written_is_whole(make_trainer, config, small_disk):
    output = small_disk / "run"
    calls = []

    def reward(completions, **_):
        calls.append(1)
        if len(calls) == 3:
            fill(small_disk)
        return [float(i % 2) for i in range(len(completions))]

    trainer = make_trainer(args=config(output_dir=str(output), max_steps=40), reward_funcs=reward)
    with pytest.raises(RunDirectoryError, match=r"(metrics|sync)\.jsonl: No space left on device"):
        trainer.train()
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert 2 <= len(lines) < 40  # the last page of a file takes a few more lines
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    json.loads((output / "config.json").read_text())
    (small_disk / "filler").unlink()
    assert not list(output.glob(".*"))  # no half-written file is left


def test_only_an_error_about_space_asks_for_space(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        RunDirectoryError, match=r"Not a directory\. Choose another output_dir \(\[run\] dir in a run's file\)"
    ):
        RunDirectory(tmp_path / "file" / "run")
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert way_out(OSError(number, "")).startswith("Free some space or choose another output_dir")


def test_an_adapter_that_could_not_be_saved_is_a_failed_run(make_trainer, config, tmp_path, monkeypatch):
    def reject(*_):
        raise RunDirectoryError("writing adapter: No space left on device.")

    trainer = make_trainer(args=config(save_strategy="no"))
    monkeypatch.setattr(RunDirectory, "save_adapter", reject)
    with pytest.raises(RunDirectoryError, match="writing adapter"):
        trainer.train()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {
        "status": "failed",
        "steps": 1,
        "error": "RunDirectoryError: writing adapter: No space left on device.",
    }
    with pytest.raises(RunDirectoryError, match=r"has failed at step 1 and left no whole checkpoint .*existing_run"):
        make_trainer(args=config(), existing_run="resume")


@pytest.mark.parametrize("fails", ["in save_pretrained", "before the rename"])
def test_a_model_that_cannot_be_written_leaves_the_one_before_it(fails, model_dir, tmp_path, monkeypatch):
    """As on a full disk: the newest state is lost, the saved one is not."""
    run = RunDirectory(tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    before = {p.name: p.read_bytes() for p in run.save_model(model, model_dir).iterdir()}

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    with monkeypatch.context() as patch:
        if fails == "in save_pretrained":
            patch.setattr(model, "save_pretrained", full)
        else:
            patch.setattr("qlora_rl.train.run.checkpoints.flush_all", full)
        with pytest.raises(RunDirectoryError, match="No space left"):
            run.save_model(model, model_dir)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "model").iterdir()} == before
    run.save_model(model, model_dir)
    after = {p.name: p.read_bytes() for p in (tmp_path / "run" / "model").iterdir()}
    assert after.keys() == before.keys()
    assert after["model.safetensors"] != before["model.safetensors"]
    assert not [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".") and "model" in p.name]


def test_a_model_whose_replacement_was_killed_between_two_renames_gets_its_name_back(model_dir, tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.save_model(AutoModelForCausalLM.from_pretrained(model_dir), model_dir)
    held = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    (tmp_path / "run" / "model").rename(tmp_path / "run" / ".model-old")
    (tmp_path / "run" / ".model-new").mkdir()
    del run
    RunDirectory(tmp_path / "run", "continue")
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == held
    assert sorted(p.name for p in (tmp_path / "run").glob(".model*")) == []
