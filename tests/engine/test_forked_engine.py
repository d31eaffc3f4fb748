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
import torch._inductor.config as inductor
from torch.compiler import config

from qlora_rl.cpu_features import processor
from qlora_rl.engine.server import launch
from qlora_rl.engine.server.forked_engine import ForkedEngine
from qlora_rl.errors import EngineBrokenError


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
        "inductor": [inductor.compile_threads, inductor.cpp.dynamic_threads],
        "starts": multiprocessing.get_start_method(),
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
    copy = ForkedEngine([lock])
    monkeypatch.delenv("MOMENT")
    monkeypatch.setenv("LATER", "when it was started")
    monkeypatch.setenv("OMP_NUM_THREADS", "999")  # torch would take no more than there are
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CPP_DYNAMIC_THREADS", "1")
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
        "threads": torch.get_num_threads(),
        "inductor": [1, True],
        "starts": "spawn",
        "is_open": False,
        "handlers": [True, True],
    }


def test_it_is_forked_when_all_that_it_takes_over_is_there(base, monkeypatch):
    """torch's cache would give an engine with AVX2 what was compiled for AVX-512."""
    found = []

    def note_tag(unwanted):
        found.append(config.cache_key_tag)
        raise EngineBrokenError("that is enough")

    monkeypatch.setattr(launch, "ForkedEngine", note_tag)
    # Not monkeypatch: what it puts back, torch's config takes for deleted.
    with config.patch(cache_key_tag=""), pytest.raises(EngineBrokenError, match="enough"):
        launch.serve(base.path, port=0, alone=True, max_lora_rank=8, max_model_length=64)
    assert found[0].endswith(processor().torch_kernels)


def test_without_work_it_ends(tmp_path):
    copy = ForkedEngine([])
    copy.end()
    assert copy.exitcode == 0


def test_one_that_was_killed_meanwhile_is_said_to_be_gone():
    copy = ForkedEngine([])
    copy.kill()
    copy.join()
    with pytest.raises(EngineBrokenError, match="ended while it waited"):
        copy.with_work(target=note, kwargs=given()).start()


@pytest.mark.parametrize("spawned", ["queue", "numa", "allocator"])
def test_what_only_a_new_process_takes_is_left_to_vllm(spawned, monkeypatch):
    from vllm.v1.engine import utils

    copy, asked = ForkedEngine([]), given()
    if spawned == "queue":
        asked["tensor_queue"] = object()
    elif spawned == "numa":
        asked["vllm_config"].parallel_config.numa_bind = True
    else:
        monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc_of_nobody.so.4")
    with copy.in_place_of_vllms():
        assert utils.get_mp_context().Process(target=note, name="EngineCore", kwargs=asked) is not copy
    assert copy.exitcode == 0


def test_signals_while_it_is_forked_end_it(monkeypatch):
    """A handler of the server's must not run in it: it would clean up what the server still needs."""
    ran = []
    before = signal.signal(signal.SIGTERM, lambda *_: ran.append(os.getpid()))
    try:
        for _ in range(20):
            copy = ForkedEngine([])
            os.kill(copy.pid, signal.SIGTERM)
            copy.join(30)
            assert copy.exitcode == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ran == []


def wait_with_a_copy(told):
    """A server that has a copy, and is killed."""
    copy = ForkedEngine([])
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
