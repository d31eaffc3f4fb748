"""Two buffers, a version and a marker: a reader gets a version whole, once, or nothing."""

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import time

import pytest
import torch
from sides import Side, move, policy

from qlora_rl import SyncError, export_adapter
from qlora_rl.torchrl import DirectoryTransfer

TENSORS = 6
NUMBERS = 3000


# By default fewer of the same.
MANY = pytest.mark.parametrize(
    "pushes", [200, pytest.param(1000, marks=pytest.mark.full)], ids=["200 pushes", "1,000 pushes"]
)


def parts(version):
    """Tensors that say of which version they are, in every number."""
    return [(f"tensor.{i}", torch.full((NUMBERS + i,), float(version))) for i in range(TENSORS)]


def announce(ticket, body=b""):
    return lambda: ticket


def write(root, pushes):
    transfer = DirectoryTransfer(root, shard_bytes=8 * NUMBERS)  # two tensors in a file
    transfer.offer()
    for version in range(1, pushes + 1):
        transfer.send(version, parts(version), announce)()


@MANY
def test_a_reader_beside_a_writer_gets_no_torn_version_and_none_twice(tmp_path, pushes):
    reader = DirectoryTransfer(tmp_path)
    writer = multiprocessing.get_context("fork" if not torch.cuda.is_initialized() else "spawn").Process(
        target=write, args=(tmp_path, pushes), daemon=True
    )
    writer.start()
    seen, polls = [0], 0
    while seen[-1] < pushes:
        polls += 1
        found = reader.read(after=seen[-1])
        if found is None:
            assert writer.is_alive() or reader.read(after=seen[-1]) is not None, "the writer has failed"
            continue
        assert found.version > seen[-1]
        assert len(found.tensors) == TENSORS
        for tensor in found.tensors.values():
            assert bool((tensor == found.version).all()), f"version {found.version} is torn"
        seen.append(found.version)
    writer.join()
    assert writer.exitcode == 0
    assert len(seen) > 3  # it was read while it was written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["buffer-0", "buffer-1", "ready.json"]


@MANY
def test_a_receiver_takes_each_of_many_pushes_once_beside_another_reader(base32, tmp_path, pushes):
    settings = {"base": str(base32), "transfer": "directory", "place": str(tmp_path)}
    settings |= {"pushes": pushes, "quiet": True}
    reader, seen = DirectoryTransfer(tmp_path / "weights"), {}
    with Side("receiver", **settings) as receiver, Side("sender", **settings) as sender:
        while pushes not in seen:
            found = reader.read(after=max(seen, default=0))
            if found is not None:
                assert found.version not in seen
                seen[found.version] = found.tensors
            assert sender.process.is_alive() or reader.read(after=max(seen)) is not None
            time.sleep(0.001)
        counted = receiver.wait_for("counted")
        sender.wait_for("pushed")
    # True for each version once, in order, and False (nothing changed) all other times.
    assert counted["versions"] == list(range(1, pushes + 1))
    assert counted["idle"] > 0
    assert len(seen) > 3
    model = policy(base32)
    for version in list(seen)[:: len(seen) // 8]:
        move(model, version - 1)  # as the sender did
        pushed = export_adapter(model, dtype=torch.float32).tensors
        assert seen[version].keys() == pushed.keys()
        assert all(torch.equal(tensor, pushed[name]) for name, tensor in seen[version].items())


def test_two_buffers_take_turns_and_the_marker_is_the_last_to_change(tmp_path):
    transfer = DirectoryTransfer(tmp_path)
    for version in (1, 2, 3):
        transfer.publish(version, parts(version))
        marker = json.loads((tmp_path / "ready.json").read_text())
        assert (marker["version"], marker["buffer"]) == (version, (version - 1) % 2)
    before = transfer.read()

    def breaks_off():
        yield from parts(4)[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer.publish(4, breaks_off())
    assert transfer.read().version == before.version == 3
    assert transfer.read(after=3) is None
    transfer.publish(4, parts(4))
    assert transfer.read(after=3).version == 4


def test_a_reader_of_a_version_that_is_overwritten_gets_the_newest(tmp_path):
    transfer = DirectoryTransfer(tmp_path, shard_bytes=1)
    transfer.publish(1, parts(1))
    begun = transfer._shards(transfer._marker())
    assert float(next(begun)["tensor.0"][0]) == 1.0
    transfer.publish(2, parts(2))
    transfer.publish(3, parts(3))
    with pytest.raises(SyncError, match="written"):
        list(begun)
    assert transfer.read().version == 3


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damage_is_seen(tmp_path, damage):
    transfer = DirectoryTransfer(tmp_path)
    transfer.publish(1, parts(1))
    (file,) = (tmp_path / "buffer-0").iterdir()
    blob = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(blob[:-1] if damage == "cut" else blob[:-1] + bytes([blob[-1] ^ 1]))
    with pytest.raises(SyncError, match="Push again"):
        transfer.read()
    with pytest.raises(SyncError, match="Push again"):
        list(transfer.receive({"version": 1}, b""))
    with pytest.raises(SyncError, match="another one is marked"):
        list(transfer.receive({"version": 2}, b""))


@pytest.mark.parametrize(
    "marker",
    ["", "[]", "{}", '{"version": "1", "buffer": 0, "files": []}', '{"version": 2, "buffer": 0, "files": [5]}',
     '{"version": 2, "buffer": 0, "files": [["a", "b", "c"]]}', '{"version": 2, "buffer": "x", "files": []}'],
)  # fmt: skip
def test_a_marker_that_is_none_is_named(tmp_path, marker):
    transfer = DirectoryTransfer(tmp_path)
    (tmp_path / "ready.json").write_text(marker)
    uses = (transfer.read, lambda: list(transfer.receive({"version": 2}, b"")), lambda: transfer.publish(1, parts(1)))
    for use in uses:
        with pytest.raises(SyncError, match="Something else writes there"):
            use()


def test_a_marked_file_that_holds_no_tensors_is_named(tmp_path):
    """Whoever writes there can make its digest right, and name any file."""
    (tmp_path / "blob").write_bytes(b"\xff" * 40)
    digest = hashlib.blake2b(b"\xff" * 40).hexdigest()
    for file in ("blob", ".", "a\0b"):
        marker = {"version": 2, "buffer": 0, "files": [[file, digest]]}
        (tmp_path / "ready.json").write_text(json.dumps(marker))
        with pytest.raises(SyncError, match="Push again"):
            DirectoryTransfer(tmp_path).read()


def test_a_directory_that_cannot_be_written_keeps_its_version(tmp_path):
    transfer = DirectoryTransfer(tmp_path)
    transfer.publish(1, parts(1))
    (tmp_path / "buffer-1").write_text("in the way")  # rmtree leaves a file alone
    with pytest.raises(SyncError, match="writing version=2"):
        transfer.publish(2, parts(2))
    assert transfer.read().version == 1


def test_a_directory_of_its_own_goes_with_the_sender(tmp_path):
    transfer = DirectoryTransfer()
    transfer.offer()
    twin = DirectoryTransfer(transfer.root)
    twin.accept({})
    twin.close()
    assert os.path.isdir(transfer.root)
    transfer.close()
    assert not os.path.isdir(transfer.root)
    with pytest.raises(SyncError, match="does not exist on this side"):
        twin.accept({})
    shutil.rmtree(transfer.root, ignore_errors=True)


def test_what_a_killed_sender_has_left_goes_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("qlora_rl.torchrl.transfer.default_root", lambda: tmp_path)
    living, killed = DirectoryTransfer(), tmp_path / "qlora-rl-torchrl-killed"
    living.offer()
    killed.mkdir()
    for directory in (living.root, killed):
        os.utime(directory, (0, 0))
    pickle.loads(pickle.dumps(living))  # it travels to the other side
    another = DirectoryTransfer()  # is not opened for long
    assert set(tmp_path.iterdir()) == {living.root, another.root}
    living.close()
    living.offer()  # and is opened again
    for directory in (living.root, another.root):
        os.utime(directory, (0, 0))
    DirectoryTransfer()
    assert living.root.stat().st_mode & 0o777 == 0o700
    assert another.root.is_dir()
