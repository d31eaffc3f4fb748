"""20 steps are 10 steps, kill -9 and 10 steps, on real vLLM: in the process and in a server."""

import signal
import time

import psutil
import pytest
from resumed import adapter, assert_same_run, lines, run
from support import forking


def start(base, out, engine, **fields):
    process = forking().Process(target=run, args=(base.path, out, engine), kwargs=fields)
    process.start()
    return process


def finish(process):
    process.join(900)
    assert process.exitcode == 0


def kill_at(process, out, step):
    """SIGKILL when the line of that step is there; whatever it had started ends by itself."""
    end = time.monotonic() + 900
    while process.is_alive() and not ((out / "metrics.jsonl").exists() and len(lines(out)) >= step):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert process.is_alive()
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert step <= len(lines(out)) < 20
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_twenty_steps_are_ten_and_a_kill_and_ten(base, tmp_path):
    finish(start(base, tmp_path / "straight", "colocate"))
    process = start(base, tmp_path / "killed", "colocate", pause_s=0.2)
    kill_at(process, tmp_path / "killed", 13)
    finish(start(base, tmp_path / "killed", "colocate"))
    assert_same_run(tmp_path / "killed", tmp_path / "straight")
    assert [line["version"] for line in lines(tmp_path / "killed", "sync.jsonl")] == list(range(1, 21))
    assert any(bool(tensor.any()) for name, tensor in adapter(tmp_path / "killed").items() if "lora_B" in name)
    assert sum(line["mismatch_kl"] > 0 for line in lines(tmp_path / "killed")) > 10


@pytest.mark.full  # three servers; by default in the process, above
def test_twenty_steps_are_ten_and_a_kill_and_ten_through_a_server(base, tmp_path):
    finish(start(base, tmp_path / "straight", "server"))
    process = start(base, tmp_path / "killed", "server", pause_s=0.2)
    kill_at(process, tmp_path / "killed", 13)
    finish(start(base, tmp_path / "killed", "server"))
    assert_same_run(tmp_path / "killed", tmp_path / "straight")
