"""Tinker's own client, unmodified, in a process of its own, against our server."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from support import make_model
from tinker_server import TinkerServer, client_python

from qlora_rl import prepare_base

PYTHON = client_python()
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="needs Tinker's client: pip install tinker==0.38.0, here or where QLORA_RL_TINKER_PYTHON is"
)
CLIENT = Path(__file__).parents[1] / "tinker_client.py"


def run(server, kind, *more):
    """A program of tinker_client.py, started; its lines are JSON."""
    name = server.ask("get_server_capabilities")[1]["supported_models"][0]["model_name"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TINKER")}
    command = [PYTHON, str(CLIENT), kind, server.url, server.keys[0], name, *map(str, more)]
    environment.pop("PYTHONPATH", None)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | {"TINKER_TELEMETRY": "0"})


def said(client):
    out, _ = client.communicate(timeout=500)
    assert client.returncode == 0
    return json.loads(out.splitlines()[-1])


def test_a_supervised_and_a_reinforced_loop_of_the_client_learn(with_demo_model, tmp_path, monkeypatch):
    for name, value in with_demo_model.items():
        monkeypatch.setenv(name, value)
    from qlora_rl.demo.tiny_model import make_tiny_model

    base = prepare_base(make_tiny_model())
    server = TinkerServer(base.path, tmp_path, "--max-model-length", "64", "--max-num-seqs", "64", "--max-rank", "16")
    try:
        both = [run(server, "supervised"), run(server, "reinforced")]  # two clients at once
        nats, rewards = said(both[0])["nats"], said(both[1])["rewards"]
    finally:
        server.stop()
    assert sum(nats[-3:]) < 0.7 * sum(nats[:3])
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5


@pytest.mark.full  # the client waits up to half a minute between two tries
def test_the_clients_own_retries_carry_it_over_kills_and_nothing_is_lost_or_applied_twice(tmp_path):
    """Killed with forward_backward, optim_step and a save waiting; the second training is left alone and the same."""
    base = prepare_base(make_model(tmp_path / "model"))
    server = TinkerServer(base.path, tmp_path, "--max-model-length", "64", "--max-num-seqs", "8", "--max-rank", "8")
    client = run(server, "interrupted")
    try:
        model = json.loads(client.stdout.readline())["model"]
        for seq in (1, 4, 9):  # a pass, a step, the save for the sampler
            until = time.monotonic() + 200
            while not server.waits(model, seq):
                assert time.monotonic() < until
                assert client.poll() is None
            server.kill()
            server.start()
        killed, alone = said(client)["found"]
    finally:
        client.kill()
        server.stop()
    assert killed == alone
    assert [steps for _, steps in killed[0]] == [1, 2, 3, 4]
