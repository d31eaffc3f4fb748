"""Full weights into a real server's worker past HTTP, by the ways that the CPU has: exact, and all or nothing."""

import contextlib

import pytest
import torch
from kinds import FULL_WEIGHTS
from pair import SEQUENCES, Pair, trained
from support import make_model

from qlora_rl import (
    Canary,
    ConfigConflictError,
    DenseSync,
    ServerEngine,
    SyncError,
    bake_base,
    connect,
    prepare_base,
    start_server,
    verify_base,
)
from qlora_rl.engine import weight_channels
from qlora_rl.engine.client import channel_push

EXACT = 1e-5
OPTIONS = {"max_lora_rank": 0, "max_model_length": 32, "max_num_seqs": 8, "timeout_s": 180}
WAYS = ("gloo",)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """An NF4 base whose head and embedding are apart."""
    return prepare_base(make_model(tmp_path_factory.mktemp("untied") / "model", tied=False))


@pytest.fixture(scope="module")
def server(untied):
    with start_server(bake_base(untied, "float32"), **OPTIONS) as server:
        yield server


@contextlib.contextmanager
def connected(server, way):
    with ServerEngine(server.url, api_key=server.key, wait_s=2.0, weights_by=way) as engine:
        engine.claim(force=True)
        engine.drop_adapter()
        yield engine


@pytest.fixture(params=WAYS)
def pair(request, server, untied, tmp_path):
    with connected(server, request.param) as engine:
        yield Pair(engine, bake_base(untied, "float32"), tmp_path)


def test_pushes_are_served_exactly_and_verified_by_the_canary(pair):
    model = trained(pair.base, FULL_WEIGHTS["dora"])
    assert verify_base(model, pair.engine).is_verified
    canary = Canary(model, pair.engine)
    canary.calibrate()
    strategy = DenseSync(model, pair.engine, canary)
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.02)
        report = strategy.push()
        assert report.transport == pair.engine.weights_by
        assert report.canary_difference < canary.threshold
        assert pair.apart(model) < EXACT
    strategy.verify()


def test_a_push_that_breaks_off_leaves_the_old_version_serving_and_can_be_repeated(pair):
    old, new = (trained(pair.base, FULL_WEIGHTS["dora"], seed=seed) for seed in (1, 2))
    DenseSync(old, pair.engine).push()
    version, served = pair.engine.version, pair.engine.score(SEQUENCES)

    def cut(strategy):
        real = pair.engine.load_dense

        def load(weights, version):
            def some():
                for i, pair_of in enumerate(weights):
                    if i == 20:
                        raise OSError("the cable is out")
                    yield pair_of

            return real(some(), version)

        pair.engine.load_dense = load
        try:
            with pytest.raises(SyncError, match="the cable is out"):
                strategy.push()
        finally:
            pair.engine.load_dense = real

    strategy = DenseSync(new, pair.engine)
    cut(strategy)
    assert (pair.engine.version, pair.engine.score(SEQUENCES)) == (version, served)
    strategy.push()
    assert pair.apart(new) < EXACT


def test_a_part_that_is_damaged_on_the_way_is_loaded_by_nobody(pair, monkeypatch):
    old = trained(pair.base, FULL_WEIGHTS["dora"], seed=1)
    DenseSync(old, pair.engine).push()
    version, served = pair.engine.version, pair.engine.score(SEQUENCES)

    def packed(weights, device):
        buffer, places = weight_channels.pack(weights, device)
        monkeypatch.setattr(channel_push, "checksum", lambda b: weight_channels.checksum(b) ^ 1)
        return buffer, places

    monkeypatch.setattr(channel_push, "pack", packed)
    with pytest.raises(SyncError, match="It was damaged on the way"):
        DenseSync(trained(pair.base, FULL_WEIGHTS["dora"], seed=2), pair.engine).push()
    monkeypatch.undo()
    assert (pair.engine.version, pair.engine.score(SEQUENCES)) == (version, served)
    DenseSync(old, pair.engine).push()
    assert pair.apart(old) < EXACT


def test_weights_that_are_missing_are_named_before_vllm_is_touched(pair):
    DenseSync(trained(pair.base, FULL_WEIGHTS["dora"]), pair.engine).push()
    version, served = pair.engine.version, pair.engine.score(SEQUENCES)
    with pytest.raises(SyncError, match="no value came for 26 of 27 weights"):
        pair.engine.load_dense([("model.norm.weight", torch.ones(128))], version + 1)
    assert (pair.engine.version, pair.engine.score(SEQUENCES)) == (version, served)


def test_several_servers_are_sent_files(server):
    with pytest.raises(ConfigConflictError, match="weights_by='gloo' with 2 URLs"):
        connect([server.url, server.url + "/other"], api_key=server.key, weights_by="gloo")
