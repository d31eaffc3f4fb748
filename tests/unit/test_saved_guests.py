"""Whose turn it is with a lane for saved adapters; the lanes are stand-ins that hold nothing."""

import threading
import time
from types import SimpleNamespace

import pytest

from qlora_rl.train import adapters


class Read:
    """Readers of saved adapters on one lane, each until `may_end`; what was loaded, and who is done, in order."""

    def __init__(self, monkeypatch):
        self.loaded, self.done, self.may_end, self.threads = [], [], threading.Event(), []
        monkeypatch.setattr(adapters, "adapter_in", lambda directory: directory)
        monkeypatch.setattr(adapters._Saved, "of", classmethod(lambda cls, directory: cls(directory, ())))
        self.adapters = adapters.Adapters.__new__(adapters.Adapters)
        self.adapters._guests_changed, self.adapters._waiting, self.adapters._used = threading.Condition(), [], 0
        self.adapters._guests = [adapters._Guest(SimpleNamespace())]
        self.adapters._invite = lambda guest, directory: self.loaded.append(str(directory))

    def begin(self, name):
        def read():
            with self.adapters._guest(adapters.Path(name)):
                assert self.may_end.wait(30)
                self.done.append(name)

        thread = threading.Thread(target=read)
        self.threads.append(thread)
        thread.start()
        until = time.monotonic() + 30
        while len(self.adapters._waiting) + self.adapters._guests[0].readers < len(self.threads):
            assert time.monotonic() < until
            time.sleep(0.005)

    def end(self):
        self.may_end.set()
        for thread in self.threads:
            thread.join(30)
        assert self.adapters._waiting == []
        assert [guest.readers for guest in self.adapters._guests] == [0]


def test_those_who_wait_for_one_saved_adapter_read_it_together(monkeypatch):
    read = Read(monkeypatch)
    for name in "abcbcbcb":
        read.begin(name)
    read.end()
    assert read.loaded == ["a", "b", "c"]  # in the order of the first of each
    assert sorted(read.done) == sorted("abcbcbcb")
    assert read.done[0] == "a"
    assert set(read.done[1:5]) == {"b"}


def test_who_comes_later_does_not_overtake(monkeypatch):
    read = Read(monkeypatch)
    for name in "aba":  # the last one would find its adapter loaded
        read.begin(name)
    read.end()
    assert read.loaded == ["a", "b", "a"]
    assert read.done == ["a", "b", "a"]


def test_a_stop_while_one_waits_leaves_the_turns_to_the_others(monkeypatch):
    read = Read(monkeypatch)
    read.begin("a")
    condition = read.adapters._guests_changed

    def struck(is_so):
        assert not is_so()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(condition, "wait_for", struck)
        with pytest.raises(KeyboardInterrupt), read.adapters._guest(adapters.Path("b")):
            pass
    read.begin("c")
    read.end()
    assert read.loaded == ["a", "c"]
