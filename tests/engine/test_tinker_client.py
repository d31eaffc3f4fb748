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


def until(is_so, *clients):
    """Wait; the clients go on meanwhile."""
    last = time.monotonic() + 200
    while not is_so():
        assert time.monotonic() < last
        assert all(client.poll() is None for client in clients)
        time.sleep(0.1)


@pytest.mark.full  # the client waits up to half a minute between two tries
def test_the_clients_own_retries_carry_it_over_kills_and_nothing_is_lost_or_applied_twice(tmp_path):
    """Killed with forward_backward, optim_step and a save waiting; the second training is left alone and the same."""
    base = prepare_base(make_model(tmp_path / "model"))
    server = TinkerServer(base.path, tmp_path, "--max-model-length", "64", "--max-num-seqs", "8", "--max-rank", "8")
    client = run(server, "interrupted")
    try:
        model = json.loads(client.stdout.readline())["model"]
        for seq in (1, 4, 9):  # a pass, a step, the save for the sampler
            until(lambda seq=seq: server.waits(model, seq), client)
            server.kill()
            server.start()
        killed, alone = said(client)["found"]
    finally:
        client.kill()
        server.stop()
    assert killed == alone
    assert [steps for _, steps in killed[0]] == [1, 2, 3, 4]


@pytest.mark.full  # as above
def test_a_server_that_is_killed_in_a_sample_gives_it_again_and_the_training_is_the_same(tmp_path):
    base = prepare_base(make_model(tmp_path / "model", positions=1024))
    options = ("--max-model-length", "1024", "--max-num-seqs", "8", "--max-rank", "8", "--kv-cache-gib", "0.25")
    server = TinkerServer(base.path, tmp_path, *options)
    client = run(server, "sampled")
    try:
        model = json.loads(client.stdout.readline())["model"]
        sampler = f"{model.partition(':')[0]}:sample:0"
        until(lambda: server.samples(sampler), client)
        server.kill()
        server.start()
        killed, alone = said(client)["found"]
    finally:
        client.kill()
        server.stop()
    assert killed == alone
    assert killed[1] == [1, 2]


@pytest.mark.full
def test_of_three_clients_one_that_is_killed_frees_its_place_and_the_others_do_not_notice(tmp_path):
    """In a sample, with gradients that no step has taken; the others end as they do without it."""
    base = prepare_base(make_model(tmp_path / "model", positions=1024))
    options = ("--max-model-length", "1024", "--max-num-seqs", "80", "--max-rank", "8", "--kv-cache-gib", "0.5")
    server = TinkerServer(base.path, tmp_path, *options, "--client-timeout", "30")
    clients = [run(server, "endless"), run(server, "steady", 1, 30), run(server, "steady", 2, 30)]
    try:
        model = json.loads(clients[0].stdout.readline())["model"]
        session = model.partition(":")[0]
        until(lambda: server.samples(f"{session}:sample:0"), *clients)
        for client in clients[1:]:
            client.stdout.readline()
        clients[0].kill()
        left = f"session {session} is silent"
        until(lambda: left in (server.root / "log").read_text())
        with_it = [said(client)["found"] for client in clients[1:]]
        without = [said(client)["found"] for client in [run(server, "steady", seed, 30) for seed in (1, 2)]]
        body = {"model_id": model, "seq_id": 3, "adam_params": {}}  # should the client come back, all is there
        assert server.result(server.ask("optim_step", body))["metrics"]["step"] == 1
    finally:
        for client in clients:
            client.kill()
        server.stop()
    assert with_it == without
