"""Files of ours that are damaged: one of this package's errors names the file, and nothing is unpickled."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from runfile import reasons, with_field, written

from qlora_rl import judge_adapter, load_base, prepare_base
from qlora_rl.adapter.load import open_adapter
from qlora_rl.adapter.store import write_adapter
from qlora_rl.base.checkpoint import open_base
from qlora_rl.config.schema import Data
from qlora_rl.contracts import AdapterBundle
from qlora_rl.data.load import load_data
from qlora_rl.documents import parse_object
from qlora_rl.errors import (
    AdapterRejectedError,
    BaseIncompleteError,
    ConfigConflictError,
    NotYetSupportedError,
    QloraRLError,
    RunDirectoryError,
)
from qlora_rl.export.gguf import check_gguf
from qlora_rl.inference.trained import open_trained
from qlora_rl.report import write_report
from qlora_rl.report.run import read_run
from qlora_rl.train.run import RunDirectory, checkpoints
from qlora_rl.train.run.resume import STATE, _read

NO_OBJECTS = [b"", b"[]", b"null", b"1", b'{"a": 1', b"\xff\xfe{}", b"\0" * 40, b"[" * 100_000, b'{"a":' * 100_000]
PICKLE = b"\x80\x04cposix\nsystem\n(X\x02\x00\x00\x00id\x85R."


@pytest.mark.parametrize("content", NO_OBJECTS)
def test_what_is_no_json_object_is_one_error(content):
    with pytest.raises(ValueError, match=r"\w"):
        parse_object(content)


def variants(content):
    """No object at all, and objects in which one field is missing or of another type."""
    yield from NO_OBJECTS
    for name in content:
        yield json.dumps({key: value for key, value in content.items() if key != name}).encode()
        for value in (None, [1], 5, "x", {"a": 1}):
            yield json.dumps({**content, name: value}).encode()


def test_a_bases_manifest_that_is_damaged_is_named(base, tmp_path):
    copy = shutil.copytree(base.path, tmp_path / "base")
    manifest, free = copy / "qlora_base.json", ("source", "parent", "identity", "inputs", "versions")
    content = json.loads(manifest.read_text())
    for damaged in variants({name: value for name, value in content.items() if name not in free}):
        manifest.write_bytes(damaged)
        with pytest.raises(BaseIncompleteError, match=r"opening a base: .*repare"):
            open_base(copy, verify=False)
    manifest.unlink()
    manifest.mkdir()
    with pytest.raises(BaseIncompleteError, match="is damaged"):
        open_base(copy)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "config.json"])
def test_a_model_that_cannot_be_read_is_named(model_dir, tmp_path, name):
    copy = shutil.copytree(model_dir, tmp_path / "model")
    if name != "config.json":
        (copy / "model.safetensors").unlink()
    for content in (b"", PICKLE, b"[]", b"[" * 100_000):
        (copy / name).write_bytes(content)
        with pytest.raises(BaseIncompleteError, match="preparing a base: "):
            prepare_base(copy, out=tmp_path / "prepared")


def adapter_at(place):
    place.mkdir(parents=True)
    tensors = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight": torch.ones(1, 1) for part in "AB"
    }
    write_adapter(
        AdapterBundle(tensors, {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}), place
    )
    return place


@pytest.mark.parametrize("content", [b"", PICKLE])
def test_a_pickled_adapter_is_rejected_wherever_it_is_asked_for(base, tmp_path, content):
    place = adapter_at(tmp_path / "adapter")
    (place / "adapter_model.safetensors").unlink()
    (place / "adapter_model.bin").write_bytes(content)
    (found,) = reasons(written(tmp_path, with_field("adapter", "start_from", str(place))))
    assert found.startswith("[adapter] start_from: ")
    assert "its weights are pickled" in found
    assert "pickled" in judge_adapter(place).reasons[0]
    with pytest.raises(AdapterRejectedError, match="pickled"):
        open_adapter(load_base(base), place)


def test_what_an_adapter_says_of_itself_may_be_damaged(tmp_path):
    place = adapter_at(tmp_path / "adapter")
    for name in ("adapter_config.json", "qlora_adapter.json"):
        held = (place / name).read_bytes() if (place / name).exists() else b'{"base_identity": "x"}'
        for damaged in (
            *variants(json.loads(held)),
            json.dumps({**json.loads(held), "trainable_token_indices": 5}).encode(),
        ):
            (place / name).write_bytes(damaged)
            assert judge_adapter(place).kind
        (place / name).write_bytes(held)


def test_a_tokenizer_that_cannot_be_read_or_written_is_named_with_the_reason(model_dir, tmp_path):
    for name, content, says in (
        ("tokenizer.json", b'{"model": 5}', "no tokenizer that can be read .*KeyError"),
        ("tokenizer_config.json", b'{"model_max_length": "x"}', "no tokenizer that can be read .*TypeError"),
        ("chat_template.jinja", b"\xff", "no tokenizer that can be read .*UnicodeDecodeError"),
        ("tokenizer_config.json", None, r"cannot be written \(UnicodeEncodeError.*surrogates"),
    ):
        copy = shutil.copytree(model_dir, tmp_path / str(len(list(tmp_path.iterdir()))))
        if content is None:
            (copy / "chat_template.jinja").unlink()
            held = json.loads((copy / name).read_text())
            content = json.dumps({**held, "chat_template": "\ud800{{ messages }}"}).encode()
        (copy / name).write_bytes(content)
        with pytest.raises(ConfigConflictError, match=says):
            prepare_base(copy, "none", out=tmp_path / "made")
        assert not (tmp_path / "made").exists()


def test_a_tokenizer_that_is_damaged_is_no_gguf_file(base, tmp_path):
    pytest.importorskip("gguf")
    copy = shutil.copytree(base.path, tmp_path / "base")
    for content in (
        *NO_OBJECTS,
        b'{"model": null}',
        b'{"model": {"type": "BPE", "merges": [1]}, "pre_tokenizer": 5}',
        b'{"model": []}',
        b'{"model": {"type": "BPE", "merges": ["a b"], "vocab": {}}, "decoder": {"type": "Replace"}}',
    ):
        (copy / "tokenizer.json").write_bytes(content)
        with pytest.raises(NotYetSupportedError, match="tokenizer"):
            check_gguf(copy)


@pytest.fixture
def run(tmp_path):
    found = RunDirectory(tmp_path / "run")
    found.write_json("config.json", {"base": {"path": str(tmp_path), "identity": "x"}, "grpo": {"learning_rate": 1.0}})
    found.append("metrics.jsonl", {"step": 1, "reward": 0.5})
    found.write_json("summary.json", {"status": "finished", "steps": 1})
    adapter_at(found.path / "adapter")
    return found


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
def test_a_run_whose_files_are_damaged_is_reported_and_rejected_by_name(run, name):
    content = json.loads((run.path / name).read_text())
    for damaged in variants(content):
        (run.path / name).write_bytes(damaged)
        with pytest.raises(QloraRLError):
            open_trained(run.path)
        with pytest.raises(RunDirectoryError, match="left no whole"):
            RunDirectory(run.path, "resume")
        assert write_report(run.path).is_file()


@pytest.mark.parametrize("files", [None, [1], {"\0": "x"}, {"a": None}, {"\ud800": "x"}, {"x" * 5000: "x"}])
def test_a_checkpoints_manifest_that_is_damaged_is_a_torn_checkpoint(tmp_path, files, caplog):
    (tmp_path / "checkpoint-1").mkdir()
    for content in (*NO_OBJECTS, json.dumps({"files": files}).encode()):
        (tmp_path / "checkpoint-1" / "manifest.json").write_bytes(content)
        assert checkpoints.damage(tmp_path / "checkpoint-1")
        assert checkpoints.last_whole(tmp_path) is None
    assert caplog.text.encode()  # a log takes it


def test_a_checkpoints_state_that_is_damaged_is_named(tmp_path):
    for content in (*NO_OBJECTS, b'{"step": "1"}', b'{"step": 1, "identity": []}'):
        (tmp_path / STATE).write_bytes(content)
        with pytest.raises(RunDirectoryError, match="cannot be read"):
            _read(tmp_path)


def asked_of(run, name):
    return [
        lambda: run.append(name, {"step": 2}),
        run.sizes,
        lambda: run.cut_back({}),
        lambda: RunDirectory(run.path, "overwrite").begin(),
    ]


@pytest.mark.parametrize("name", ["metrics.jsonl", "sync.jsonl"])
def test_a_file_of_lines_that_cannot_be_written_is_named(run, name):
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).mkdir()
    for ask in asked_of(run, name):
        with pytest.raises(RunDirectoryError, match=f"writing .*{name}: Is a directory"):
            ask()
    (run.path / name).rmdir()
    if os.path.exists("/dev/full"):
        (run.path / name).symlink_to("/dev/full")
        with pytest.raises(RunDirectoryError, match=f"{name}: No space left"):
            run.append(name, {"step": 2})


def test_a_session_that_is_no_text_is_named(run):
    run.existing = "resume"
    (run.path / "session").write_bytes(b"\xff")
    with pytest.raises(RunDirectoryError, match="session"):
        run.session()


@pytest.mark.parametrize("tear", [b'{"step": 2, "rew', b"\xff\xfe", b'{"step": 2}'])
def test_a_torn_line_swallows_no_other(run, tear, caplog):
    """After a power cut the last line may end anywhere; what follows it is read."""
    metrics = run.path / "metrics.jsonl"
    with metrics.open("ab") as out:
        out.write(tear)
    again = RunDirectory(run.path, "continue")
    for step in (3, 4):
        again.append("metrics.jsonl", {"step": step})
    assert "is torn" in caplog.text
    found = read_run(run.path)
    assert [line["step"] for line in found.metrics] == [1, *([2] if tear.endswith(b"}") else []), 3, 4]
    assert tear.endswith(b"}") or "damaged line in metrics.jsonl skipped" in " ".join(found.problems)


def test_the_damage_of_a_run_reaches_nothing_outside_it(run):
    """The names in a manifest are read, never written."""
    outside = run.path.parent / "outside"
    outside.write_text("x")
    place = run.path / "checkpoint-1"
    place.mkdir()
    (place / "manifest.json").write_text(json.dumps({"files": {"../../outside": "0"}}))
    assert checkpoints.damage(place) == [f"{Path('../../outside')} is not what was written"]
    RunDirectory(run.path, "overwrite").begin()
    assert outside.read_text() == "x"


def test_a_base_can_be_read_by_other_users_and_what_cannot_is_named(base, model_dir, tmp_path, monkeypatch):
    made = prepare_base(model_dir, "none", out=tmp_path / "made")
    for file in made.path.rglob("*"):
        assert file.stat().st_mode & 0o044 == 0o044, file

    def denied(file):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr("qlora_rl.base.source_digest.digest_file", denied)
    for use in (lambda: open_base(base.path), lambda: prepare_base(model_dir, "fp4", out=tmp_path / "other")):
        with pytest.raises(BaseIncompleteError, match=r"Permission denied.*chmod"):
            use()


def test_a_user_without_a_home_is_told_what_to_set(model_dir, monkeypatch):
    from qlora_rl.doctor.machine import check_machine
    from qlora_rl.engine.linears.cpu_kernel import _built

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("QLORA_RL_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ConfigConflictError, match=r"no home directory.*QLORA_RL_CACHE"):
        prepare_base(model_dir)
    assert "no home directory" in _built.__wrapped__("avx512")  # torch multiplies
    assert any("no home directory" in each.advice for each in check_machine())


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_cache_of_datasets_that_cannot_be_written_is_not_the_datas_fault(tmp_path, monkeypatch, code):
    import datasets

    def denied(*_, **__):
        raise OSError(code, os.strerror(code), "/nonexistent")

    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(datasets, "load_dataset", denied)
    with pytest.raises(ConfigConflictError, match=r"/nonexistent.*Set HF_HOME"):
        load_data(Data(train=str(tmp_path / "a.jsonl")))
