"""Messages between the processes of a run: signed, because torch's store lets in whoever reaches its port."""

import pickle
import time

import pytest
import torch

from qlora_rl import AccessDeniedError, store_messages
from qlora_rl.distributed import Ranks


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(store_messages, "_secret", b"secret of the run")
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("size", [0, 1, 5 * 2**20])
def test_what_was_put_is_read(store, size):
    store_messages.put(store, "a", b"x" * size)
    assert store_messages.is_there(store, "a")
    assert store_messages.read(store, "a") == b"x" * size
    store_messages.drop(store, "a")
    assert not store_messages.is_there(store, "a")


def test_what_no_process_of_the_run_has_signed_is_not_read(store):
    """Neither a pickle alone, nor one signed with another secret, nor a letter of ours under another key."""
    store_messages.put(store, "ours", b"a pickle")
    ours = store.get("ours/0")[4:]
    for forged in (b"a pickle", b"", b"\0" * 32 + b"a pickle", ours):
        store.set("asked/0", (1).to_bytes(4, "big") + forged)
        with pytest.raises(AccessDeniedError, match="no process of this run"):
            store_messages.read(store, "asked")
    store_messages.sign_with(b"secret of another run")
    with pytest.raises(AccessDeniedError, match="no process of this run"):
        store_messages.read(store, "ours")


def test_a_forged_letter_ends_no_thread_that_waits_for_those_of_the_run(store, caplog):
    """The watcher of a rank drops it, says so, and hears what comes later."""
    store.set("failed/1/0", (1).to_bytes(4, "big") + b"a pickle")
    ranks = Ranks(0, 2, store)
    try:
        until(lambda: not store_messages.is_there(store, "failed/1"))
        store_messages.put(store, "failed/1", pickle.dumps((1, ValueError("of rank 1"))))
        until(lambda: 1 in ranks._failed)
    finally:
        store.set("bye/1", "")  # it waits for no other rank
        ranks.close()
    assert str(ranks._failed[1]) == "of rank 1"
    assert "no process of this run has written it" in caplog.text


def until(is_so):
    started = time.monotonic()
    while not is_so():
        assert time.monotonic() - started < 60
        time.sleep(0.01)
