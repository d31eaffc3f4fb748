"""Full weights by each way that they may come, without vLLM."""

import asyncio
import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from fakes import Direct
from fastapi import FastAPI
from starlette.testclient import TestClient

from qlora_rl.adapter.store import AdapterStore
from qlora_rl.base.fingerprint import digest_plain
from qlora_rl.contracts import BaseFingerprint, EngineCapabilities
from qlora_rl.engine.chunks import Part
from qlora_rl.engine.client import EngineClient, ServerEngine
from qlora_rl.engine.fleet import Fleet
from qlora_rl.engine.server.auth import Visits
from qlora_rl.engine.server.routes import Api, TrainerLock
from qlora_rl.engine.server.served_adapter import ServedPolicy
from qlora_rl.engine.server.served_weights import ServedWeights
from qlora_rl.engine.staging import STAGES
from qlora_rl.engine.worker.extension import BaseExtension
from qlora_rl.errors import QloraRLError, SyncError
from qlora_rl.torchrl.transfer import pack, unpack

WEIGHTS = [
    ("a", torch.randn(3, 5)),
    ("b", torch.randn(7).bfloat16()),
    ("none", torch.empty(0, 4)),
    ("c", torch.randn(2, 3, 2).half()),
]


def test_what_is_packed_comes_out_to_the_last_bit():
    buffer, places = pack(WEIGHTS, torch.device("cpu"))
    for (name, weight), (other, found) in zip(WEIGHTS, unpack(buffer, json.loads(json.dumps(places))), strict=True):
        assert (name, weight.dtype, weight.shape) == (other, found.dtype, found.shape)
        assert torch.equal(weight, found)


@pytest.mark.parametrize(
    ("place", "message"),
    [(("a", "float32", [30, 5]), "ends behind the"), (("a", "Tensor", [3, 5]), "which none can have")],
)
def test_places_that_do_not_fit_what_came_are_rejected(place, message):
    with pytest.raises(SyncError, match=message):
        unpack(pack(WEIGHTS[:1], torch.device("cpu"))[0], [place])


class Worker(BaseExtension):
    """vLLM's worker as far as weights come to it; keeps them."""

    def qlora_load_dense(self, weights):
        self.held = {name: weight.clone() for name, weight in weights}
        return []

    def qlora_load_base(self):
        self.held = None
        return []


class Loop:
    """vLLM's AsyncLLM with one such worker."""

    def __init__(self):
        self.worker = Worker()

    async def collective_rpc(self, call, args=()):
        return [await asyncio.to_thread(getattr(self.worker, call), *args)]

    async def reset_prefix_cache(self):
        return True

    async def reset_encoder_cache(self):
        pass


LEAVES = {name: digest_plain(weight) for name, weight in WEIGHTS}
ABOUT = {"name": "it", "base": "b", "max_lora_rank": 0, "max_model_length": 64, "takes_dense": True,
         "adapter_dtype": "float32", "max_body_bytes": 10**6}  # fmt: skip


@contextlib.contextmanager
def served(tmp_path, way):
    """A client of a server without vLLM, and the worker behind it."""
    engine, store = Loop(), AdapterStore(tmp_path)
    root = store.root.parent
    weights = ServedWeights(engine, root, LEAVES)
    policy = ServedPolicy(engine, {}, store, {}, 0, 64, Visits(), weights)
    app = FastAPI()
    app.include_router(Api(policy, ABOUT | {"adapter_dir": str(root)}, TrainerLock(60.0)).router())
    with TestClient(app) as inner:

        def relay(request):
            answer = inner.request(
                request.method, str(request.url), content=request.content, headers=dict(request.headers)
            )
            return httpx.Response(answer.status_code, content=answer.content, headers=dict(answer.headers))

        transport = httpx.MockTransport(relay)
        client = ServerEngine("http://127.0.0.1", api_key="k", transport=transport)
        with client:
            if way == "http":
                client._near = None
            yield client, engine.worker


class Dense:
    """An engine that keeps the weights that it is given."""

    def __init__(self, _):
        self.version, self.held, self.lost = 0, None, ""

    def capabilities(self):
        return EngineCapabilities("it", False, True, 0, 64, "float32", False)

    def describe_base(self):
        return BaseFingerprint({name: digest_plain(w) for name, w in self.held.items()} if self.held else LEAVES)

    def load_dense(self, weights, version):
        self.held, self.version = {name: weight.clone() for name, weight in weights}, version

    def withdraw_dense(self, reason):
        self.lost = reason

    def drop_adapter(self):
        self.version, self.held = 0, None

    def close(self):
        pass


@contextlib.contextmanager
def acted(tmp_path, way):
    """A client of an actor in this process, and its engine."""
    line = Direct("base", Dense)
    with EngineClient(line, timeout_s=60.0, wait_s=0.0) as client:
        yield client, line.actor._engine


@pytest.mark.parametrize("way", ["http", "directory", "object_store"])
def test_full_weights_come_by_each_way_to_the_last_bit_and_what_is_wrong_is_loaded_by_none(tmp_path, monkeypatch, way):
    pytest.importorskip("vllm")
    monkeypatch.setattr("qlora_rl.engine.chunks.PART_BYTES", 16)  # several parts
    monkeypatch.setattr("qlora_rl.engine.client.engine.HttpConnection.piece_bytes", 100)  # several pieces of one
    with (acted if way == "object_store" else served)(tmp_path, way) as (client, behind):
        assert client.capabilities().dense_way == ("object_store" if way == "object_store" else "http")
        assert client.load_dense(iter(WEIGHTS), 1) == 3 * 5 * 4 + 7 * 2 + 12 * 2
        assert (client.version, client.holds_dense) == (1, True)
        for wrong, says in (
            ([(name, weight / 0) for name, weight in WEIGHTS], "NaN or infinity"),
            ([(name, weight[:-1]) for name, weight in WEIGHTS], "another model"),
            ([("z", torch.ones(2)), *WEIGHTS], "no weight z"),
            ([*WEIGHTS, WEIGHTS[1]], "b came twice"),
            (WEIGHTS[:3], "no value came for 1 of 4 weights of the engine, first c"),
        ):
            with pytest.raises(SyncError, match=says):
                client.load_dense(iter(wrong), 2)
        assert {name: digest_plain(weight) for name, weight in behind.held.items()} == LEAVES
        assert client.version == 1
        client.load_dense(((name, weight + 1) for name, weight in WEIGHTS), 2)
        assert client.version == 2
        assert torch.equal(behind.held["a"], WEIGHTS[0][1] + 1)
        with pytest.raises(SyncError, match="version=0"):
            client.load_dense(iter(WEIGHTS), 0)
        push = client.begin_dense(3)
        push.send(Part(WEIGHTS))
        client.drop_adapter()
        with pytest.raises(SyncError, match="not open"):
            push.commit()
        assert client.version == 0
        client.withdraw_dense("so it is wished")
        assert not client.holds_dense
        if way == "object_store":
            assert behind.lost == "so it is wished"
    assert list(tmp_path.rglob(STAGES)) == []


def test_threads_that_send_one_part_at_once_are_given_the_same_object():
    """It is put into Ray's store once, and known there by its identity."""

    class Slow(list):
        def __iter__(self):
            time.sleep(0.05)  # the other threads have asked by then
            return super().__iter__()

    sent = Part.of(b"the bytes of a part")
    sent.pieces = Slow(sent.pieces)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: sent.blob, range(4)))
    assert {bytes(each) for each in found} == {b"the bytes of a part"}
    assert len({id(each) for each in found}) == 1


def test_full_weights_come_again_to_one_of_several_that_was_restarted_unheard(monkeypatch):
    monkeypatch.setattr("qlora_rl.engine.fleet.replicas._LOOK_AGAIN_S", 0.0)
    replicas = [EngineClient(Direct("base", Dense), timeout_s=60.0, wait_s=0.0) for _ in range(2)]
    weights = [(name, weight + 1) for name, weight in WEIGHTS]
    with Fleet(replicas, wait_s=5.0) as fleet:
        assert fleet.load_dense(iter(weights), 1)
        replicas[1].connection.start_again()
        fleet.wake()
        assert fleet.live == replicas[:1]
        fleet.wake()
        assert fleet.live == replicas
        for each in replicas:
            assert (each.version, each.holds_dense) == (1, True)
            assert torch.equal(each.connection.actor._engine.held["a"], weights[0][1])


def test_what_is_said_of_an_actor_names_no_server(caplog):
    """It is neither at an address nor started by `qlora-rl serve`."""
    line, said = Direct("base", Dense), []

    def hear(use, *arguments):
        with pytest.raises(QloraRLError) as caught:
            use(*arguments)
        said.append(str(caught.value))

    with EngineClient(line, timeout_s=60.0, wait_s=0.0) as client:
        for wrong in ([("z", torch.ones(2))], [("a", torch.ones(1))], WEIGHTS[:3]):
            hear(client.load_dense, iter(wrong), 1)
        push = client.begin_dense(1)
        client.drop_adapter()
        hear(push.commit)
        client.load_dense(iter(WEIGHTS), 2)
        line.start_again()
        hear(client.score, [[1, 2]])
    hear(client.wake)
    assert "were lost" in said[-2]
    assert "pushed again" in caplog.text
    assert "server" not in "".join([*said, *caplog.messages]).lower()
