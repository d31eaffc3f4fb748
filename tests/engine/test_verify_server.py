"""`qlora-rl verify --server` against a real server."""

import json
import os

import pytest
import support

from qlora_rl import prepare_base, start_server


@pytest.fixture(scope="module")
def server(base):
    with start_server(base, max_model_length=64, max_num_seqs=4, timeout_s=180) as server:
        yield server


def verify(*arguments, key=""):
    environment = {**os.environ, "QLORA_RL_API_KEY": key}
    done = support.command("verify", *arguments, "--json", environment=environment)
    return done.returncode, json.loads(done.stdout)


def test_a_server_is_judged(base, model_dir, server):
    code, found = verify(base, "--server", server.url, "--api-key-file", str(server.directory / "api-key"))
    assert (code, found["state"], found["repaired"]) == (0, "equal", 0)  # it repaired its scales when it started
    code, found = verify(prepare_base(model_dir, "fp4"), "--server", server.url, key=server.key)
    assert (code, found["state"]) == (1, "different")
    assert "type differ (ours fp4, theirs nf4)" in found["differences"][0]


def test_nobody_there_or_somebody_else_is_could_not_tell(base, server):
    for url, key, said in (
        ("http://127.0.0.1:9", "k" * 16, "stayed away"),
        (server.url, "k" * 16, "the key is missing or wrong"),
        (server.url, "", "no key"),
    ):
        code, found = verify(base, "--server", url, key=key)
        assert (code, said in found["message"]) == (2, True), found
