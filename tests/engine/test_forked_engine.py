"""The copy of a server's process that becomes vLLM's engine."""

import json
import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch

from qlora_rl.engine.server.forked import EngineCopy


def given(**fields):
    """What vLLM passes to its engine's process."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(numa_bind=False), additional_config=None)
    return {"vllm_config": config, "tensor_queue": None, **fields}


def note(file, descriptor, **_):
    """As vLLM's engine: what this process is."""
    try:
        is_open = bool(os.fstat(descriptor))
    except OSError:
        is_open = False
    found = {
        "name": multiprocessing.current_process().name,
        "title": " ".join(psutil.Process().cmdline()),
        "moment": os.environ.get("MOMENT"),
        "later": os.environ.get("LATER"),
        "threads": torch.get_num_threads(),
        "is_open": is_open,
        "handlers": [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGINT)],
    }
    with open(file, "w") as out:
        json.dump(found, out)


def test_it_begins_as_a_spawned_process_would(tmp_path, monkeypatch):
    from vllm.v1.engine import utils

    theirs = utils.get_mp_context
    monkeypatch.setenv("MOMENT", "when it was forked")
    monkeypatch.delenv("LATER", raising=False)
    lock = os.open(tmp_path, os.O_RDONLY)
    copy = EngineCopy([lock])
    monkeypatch.delenv("MOMENT")
    monkeypatch.setenv("LATER", "when it was started")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with copy.in_place_of_vllms():
        process = utils.get_mp_context().Process(
            target=note, name="EngineCore", kwargs=given(file=str(tmp_path / "found"), descriptor=lock)
        )
        process.start()
    assert utils.get_mp_context is theirs
    process.join(60)
    copy.end()
    os.close(lock)
    assert process.exitcode == 0
    found = json.loads((tmp_path / "found").read_text())
    assert "EngineCore" in found.pop("title")
    assert found == {
        "name": "EngineCore",
        "moment": None,
        "later": "when it was started",
        "threads": 3,
        "is_open": False,
        "handlers": [True, True],
    }


def test_without_work_it_ends(tmp_path):
    copy = EngineCopy([])
    copy.end()
    assert copy.exitcode == 0


@pytest.mark.parametrize("spawned", ["queue", "numa"])
def test_what_only_a_spawned_process_takes_is_left_to_vllm(spawned):
    from vllm.v1.engine import utils

    copy, asked = EngineCopy([]), given()
    if spawned == "queue":
        asked["tensor_queue"] = object()
    else:
        asked["vllm_config"].parallel_config.numa_bind = True
    try:
        with copy.in_place_of_vllms():
            assert utils.get_mp_context().Process(target=note, name="EngineCore", kwargs=asked) is not copy
    finally:
        copy.end()


def wait_with_a_copy(told):
    """A server that has a copy, and is killed."""
    copy = EngineCopy([])
    told.send(copy.pid)
    threading.Event().wait()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the signal at a parent's end is Linux's")
def test_a_copy_that_waits_ends_with_a_server_that_is_killed():
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=wait_with_a_copy, args=(there,))
    server.start()
    waiting = psutil.Process(here.recv())
    os.kill(server.pid, signal.SIGKILL)
    server.join()
    psutil.wait_procs([waiting], timeout=30)
    assert not waiting.is_running() or waiting.status() == psutil.STATUS_ZOMBIE
