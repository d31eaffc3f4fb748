"""Messages between the processes of a run: signed, because torch's store lets in whoever reaches its port."""

import pytest
import torch

from qlora_rl import letters


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(letters, "_secrets", [b"secret of the run"])
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("size", [0, 1, 5 * 2**20])
def test_what_was_put_is_read(store, size):
    letters.put(store, "a", b"x" * size)
    assert letters.is_there(store, "a")
    assert letters.read(store, "a") == b"x" * size
    letters.drop(store, "a")
    assert not letters.is_there(store, "a")


def test_what_no_process_of_the_run_has_signed_is_not_read(store):
    """Neither a pickle alone, nor one signed with another secret, nor a letter of ours under another key."""
    letters.put(store, "ours", b"a pickle")
    ours = store.get("ours/0")[4:]
    for forged in (b"a pickle", b"", b"\0" * 32 + b"a pickle", ours):
        store.set("asked/0", (1).to_bytes(4, "big") + forged)
        with pytest.raises(RuntimeError, match="no process of this run"):
            letters.read(store, "asked")
    letters.sign_with(b"secret of another run")
    with pytest.raises(RuntimeError, match="no process of this run"):
        letters.read(store, "ours")
