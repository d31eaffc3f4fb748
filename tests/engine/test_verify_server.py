"""`qlora-rl verify --server` against a real vLLM server."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import support

from qlora_rl import prepare_base


@pytest.fixture(scope="module")
def server(base):
    """Stock vLLM on the tiny NF4 base, with our worker extension."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(base), "--host", "127.0.0.1",
        "--port", str(port), "--max-model-len", "64", "--max-num-seqs", "4", "--enforce-eager",
        "--worker-extension-cls", "qlora_rl.engine.worker.BaseExtension",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    job = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while True:
            assert job.poll() is None, "the server did not start"
            assert time.monotonic() < deadline, "the server did not come up in time"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        job.terminate()
        job.wait(60)


def verify(*arguments):
    done = support.command("verify", *arguments, "--json", environment=os.environ)
    return done.returncode, json.loads(done.stdout)


def test_a_server_is_judged_repaired_and_judged_again(base, model_dir, server):
    code, found = verify(base, "--server", server, "--as-loaded")
    assert (code, found["state"], found["repaired"]) == (1, "repairable", 0)
    code, found = verify(base, "--server", server)
    assert (code, found["state"], found["repaired"]) == (0, "equal", 14)
    assert 0 < found["largest_relative_error"] < 0.1
    code, found = verify(base, "--server", server, "--as-loaded")
    assert (code, found["state"]) == (0, "equal")  # the repair lasts as long as the server
    code, found = verify(prepare_base(model_dir, "fp4"), "--server", server)
    assert (code, found["state"]) == (1, "different")
    assert "type differ (ours fp4, theirs nf4)" in found["differences"][0]


def test_nobody_there_or_somebody_else_is_could_not_tell(base, server):
    code, found = verify(base, "--server", "http://127.0.0.1:9")
    assert code == 2
    assert "Is it running" in found["message"]
    code, found = verify(base, "--server", f"{server}/v1")
    assert code == 2
    assert "--worker-extension-cls" in found["message"]
