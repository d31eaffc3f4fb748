"""Full weights on their way into a server, without one: parts, their limits, and what a killed process leaves."""

import hashlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load

from qlora_rl import SyncError
from qlora_rl.base.fingerprint import digest_plain
from qlora_rl.engine.client.upload import WeightsPush
from qlora_rl.engine.staging import Stage, encode_part, part_name, read_parts
from qlora_rl.locks import hold, sweep

WEIGHTS = {"a": torch.randn(8, 3).bfloat16(), "b": torch.randn(5), "c": torch.randn(2, 2).half()}


def encoded(names):
    return b"".join(encode_part([(n, WEIGHTS[n]) for n in names]))


@pytest.fixture
def stage(tmp_path):
    stage = Stage(tmp_path, {name: digest_plain(weight) for name, weight in WEIGHTS.items()}, 3, "me")
    yield stage
    stage.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_part_is_a_safetensors_file():
    found = load(encoded(WEIGHTS))
    assert all(
        torch.equal(found[name], weight) and found[name].dtype == weight.dtype for name, weight in WEIGHTS.items()
    )


@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
def test_what_is_sent_in_pieces_comes_out_as_it_was(stage, piece_bytes):
    for index, names in enumerate(("ab", "c")):
        blob = encoded(names)
        for start in range(0, len(blob), piece_bytes):
            for _ in range(2):  # an answer may be lost, and the piece come again
                stage.write(index, start, blob[start : start + piece_bytes])
        digest = hashlib.sha256(blob).hexdigest()
        assert stage.take(index, digest)
        assert not stage.take(index, digest)
        stage.write(index, 0, blob[:1])  # late, and without effect
        if index == 0:
            with pytest.raises(SyncError, match="1 of 3 weights of the engine, first c"):
                stage.require_all()
    stage.require_all()
    assert [name for name, _ in read_parts(stage.parts)] == ["a", "b", "c"]
    assert all(torch.equal(weight, WEIGHTS[name]) for name, weight in read_parts(stage.parts))


def test_what_comes_twice_or_is_more_than_the_model_is_rejected(stage):
    blob = encoded("ab")
    for index in range(2):
        stage.write(index, 0, blob)
        if index == 0:
            stage.take(index, hashlib.sha256(blob).hexdigest())
    with pytest.raises(SyncError, match="came twice"):
        stage.take(1, hashlib.sha256(blob).hexdigest())
    with pytest.raises(SyncError, match="more than the model's"):
        stage.write(1, len(blob), b"x" * 100_000)


def test_what_lies_beside_a_part_counts(stage):
    (stage.incoming / part_name(0)).write_bytes(encoded(WEIGHTS))
    (stage.incoming / "more").write_bytes(b"0" * 100_000)
    with pytest.raises(SyncError, match="more than the 76 of the model"):
        stage.take(0, hashlib.sha256(encoded(WEIGHTS)).hexdigest())


def test_what_a_killed_server_has_left_makes_room_even_when_it_is_young(tmp_path, monkeypatch):
    left = tmp_path / "qlora-rl-weights-0f"
    left.mkdir()
    monkeypatch.setattr(
        "qlora_rl.engine.staging.shutil.disk_usage", lambda _: SimpleNamespace(free=0 if left.exists() else 10**9)
    )
    Stage(tmp_path, {"a": digest_plain(WEIGHTS["a"])}, 1, "me").discard()
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_said_before_anything_is_sent(tmp_path):
    huge = {"a": digest_plain(torch.zeros(1))}
    object.__setattr__(huge["a"], "shape", (2**40, 2**10))
    with pytest.raises(SyncError, match="are free at"):
        Stage(tmp_path, huge, 1, "me")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("near", [True, False])
def test_an_error_in_the_middle_is_said_and_the_push_thrown_away(tmp_path, near):
    asked, name = [], "qlora-rl-weights-0f"
    (tmp_path / name).mkdir()

    def ask(method, path, body=None):
        asked.append((method, path.partition("?")[0]))
        return {"push": "p", "directory": name}

    def begin():
        def commit(push):
            ask("POST", f"/weights/commit?push={push}")

        return WeightsPush(ask, 1, commit, piece_bytes=100, root=tmp_path if near else None)

    def weights():
        yield "a", WEIGHTS["a"]
        raise OSError("no more")

    with pytest.raises(SyncError, match=r"no more \(after 1 tensors\). What served goes on serving"):
        begin().upload(weights())
    assert asked[-1] == ("DELETE", "/weights")
    assert ("POST", "/weights/commit") not in asked
    asked.clear()
    assert begin().upload(WEIGHTS.items()) == 48 + 20 + 8
    assert asked[-1] == ("POST", "/weights/commit")
    if near:
        assert load((tmp_path / name / part_name(0)).read_bytes()).keys() == WEIGHTS.keys()


@pytest.mark.parametrize("name", ["..", "../elsewhere", "/etc", ".", "qlora-rl-weights-0f/..", ""])
def test_a_server_cannot_name_a_directory_that_is_no_stage(tmp_path, name):
    with pytest.raises(SyncError, match="which none of ours does"):
        WeightsPush(lambda *_: {"push": "p", "directory": name}, 1, print, piece_bytes=100, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


HOLD = """
import pathlib, sys, time
sys.path[:0] = [sys.argv[2]]
from qlora_rl.locks import hold
handle = hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_has_left_is_removed_and_nothing_of_a_living_one(tmp_path):
    mine, theirs, young = (tmp_path / f"x-{name}" for name in ("mine", "theirs", "young"))
    other = tmp_path / "y"
    for directory in (mine, theirs, young, other):
        directory.mkdir()
    (tmp_path / "x-link").symlink_to(other)
    handle = hold(mine)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    job = subprocess.Popen([sys.executable, "-c", HOLD, theirs, root], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout.readline() == "held\n"
        for directory in (mine, theirs, other):
            os.utime(directory, (1, 1))
        assert sweep(tmp_path, "x-*") == []
        job.send_signal(signal.SIGKILL)
        job.wait()
        assert sweep(tmp_path, "x-*") == [theirs]
        os.close(handle)
        assert sweep(tmp_path, "x-*") == [mine]
    finally:
        job.kill()
        job.wait()
    assert young.is_dir()
    assert other.is_dir()
