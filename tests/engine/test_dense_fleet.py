"""Full weights to several real engines: made once, all or none, and brought to one that was killed and comes back.

float32, two layers, random weights, head and embedding apart: an error shows a thousandfold above the noise of 1e-6.
"""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from kinds import ADAPTER, FULL_WEIGHTS
from pair import SEQUENCES, Pair, trained
from support import wait_for_all
from test_training import lines, make

from qlora_rl import (
    Canary,
    CanaryError,
    DenseSync,
    EngineBrokenError,
    RayFleet,
    SyncError,
    bake_base,
    connect,
    start_server,
    verify_base,
)
from qlora_rl.adapter.merged_weights import iter_weights
from qlora_rl.base.fingerprint import digest_plain
from qlora_rl.contracts import DenseEngine, SamplingSpec
from qlora_rl.engine.compat import release, vllm_version
from qlora_rl.engine.fleet import replicas as team
from qlora_rl.engine.staging import STAGES

EXACT = 1e-5
OPTIONS = {"max_lora_rank": 0, "max_model_length": 32, "max_num_seqs": 8}
PROMPTS = [[40 + i, 41, 42] for i in range(8)]
SAMPLING = SamplingSpec(max_tokens=12, seed=1, temperature=0.9)


@pytest.fixture(autouse=True)
def several_parts(monkeypatch):
    """Of which some were sent when something happens in the middle."""
    monkeypatch.setattr("qlora_rl.engine.chunks.PART_BYTES", 2**16)


@pytest.fixture(scope="module")
def baked(untied):
    return bake_base(untied, "float32")


class Servers:
    """Two servers of their own, which can be killed and started again."""

    def __init__(self, baked):
        self.baked = baked
        self.running = [start_server(baked, timeout_s=600, **OPTIONS)]
        self.running.append(start_server(baked, key=self.running[0].key, timeout_s=600, **OPTIONS))
        self.urls = [each.url for each in self.running]

    def kill(self, i):
        os.kill(self.running[i].process.pid, signal.SIGKILL)
        self.running[i].process.wait()

    def restart(self, i):
        """Where it was; it is waited for until it answers."""
        old = self.running[i]
        old.stop()
        port = int(self.urls[i].rsplit(":", 1)[1])
        self.running[i] = start_server(self.baked, port=port, key=old.key, timeout_s=600, **OPTIONS)

    def connect(self, **options):
        return connect(self.urls, api_key=self.running[0].key, **{"wait_s": 60.0, **options})


@pytest.fixture(scope="module")
def servers(baked):
    servers = Servers(baked)
    yield servers
    for each in servers.running:
        each.stop()


@pytest.fixture
def fleet(servers, monkeypatch):
    monkeypatch.setattr(team, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(team, "_LOOK_SELDOM_S", 1.0)
    with servers.connect() as fleet:
        fleet.claim(force=True)
        fleet.drop_adapter()
        yield fleet
    assert kept() == []


def kept():
    """Directories with the parts of a version; only the newest is there, and none after the end."""
    return [d for d in Path(tempfile.gettempdir()).glob("qlora-rl-kept-*") if str(d) in _ours()]


def _ours():
    from qlora_rl.locks import _claimed

    return _claimed


def whole(fleet, baked, tmp_path, model):
    """Both take part, serve the fleet's version, and each computes and holds what the trainer does."""
    wait_for_all(fleet)
    sent = {name: digest_plain(weight) for name, weight in iter_weights(model, dtype=torch.float32)}
    for each in fleet.live:
        assert each.version == fleet.version
        assert each.describe_base().leaves == sent
        assert Pair(each, baked, tmp_path).apart(model) < EXACT
    return True


def sampled(engine):
    """Before 0.31 logprobs have equal bits only in batches of equal size, and one actor in the place of two has another
    one."""
    found = engine.generate(PROMPTS, SAMPLING)
    has_equal_bits = release(vllm_version()) >= (0, 31)
    return found.completion_ids, found.logprobs if has_equal_bits else None, found.version


def policies(baked, tmp_path, fleet):
    base = Pair(fleet, baked, tmp_path).base
    return trained(base, ADAPTER["plain"], seed=1), trained(base, FULL_WEIGHTS["dora"], seed=2)


class StruckAt:
    """Weights of a model; something is done before the one at a place is made."""

    def __init__(self, model, place, act):
        self.model, self.place, self.act, self.made = model, place, act, 0

    def __iter__(self):
        for i, pair in enumerate(iter_weights(self.model)):
            if i == self.place:
                self.act()
            self.made += 1
            yield pair


# --- servers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["directory", "http"])
def test_dora_is_made_once_and_held_exactly_by_both_servers(servers, fleet, baked, tmp_path, way):
    if way == "http":
        for each in fleet.replicas:
            each._near = None
    assert isinstance(fleet, DenseEngine)
    assert (fleet.capabilities().takes_dense, fleet.capabilities().dense_way) == (True, "http")
    _, model = policies(baked, tmp_path, fleet)
    assert verify_base(model, fleet).is_verified
    canary = Canary(model, fleet)
    canary.calibrate()
    report = DenseSync(model, fleet, canary).push()
    assert (report.mode, report.transport, report.tensors) == ("weights", "http", 27)
    assert report.canary_difference < canary.threshold
    assert whole(fleet, baked, tmp_path, model)
    assert len(kept()) == 1
    assert len(fleet._kept._digests) > 3
    weights = StruckAt(model, 0, lambda: None)
    fleet.load_dense(weights, fleet.version + 1)
    assert weights.made == 27
    one = fleet.live[0].generate(PROMPTS, SAMPLING)
    assert sampled(fleet) == (one.completion_ids, one.logprobs, fleet.version)
    fleet.drop_adapter()
    assert (fleet.version, kept()) == (0, [])


def test_what_one_of_them_rejects_is_served_by_neither(fleet, baked, tmp_path, monkeypatch):
    """A part that arrives damaged, weights that no engine takes, a stream that breaks off: nothing was loaded
    anywhere."""
    old, new = policies(baked, tmp_path, fleet)
    DenseSync(old, fleet).push()
    version, served = fleet.version, sampled(fleet)
    second = fleet.replicas[1]
    second._near, ask = None, second._ask

    def lossy(method, path, body=None):
        return ask(method, path, body[:-1] + b"?" if method == "PUT" else body)

    monkeypatch.setattr(second, "_ask", lossy)
    with pytest.raises(SyncError, match=rf"damaged on the way.*Said by {second.url}.*What served goes on serving"):
        fleet.load_dense(iter_weights(new), version + 1)
    monkeypatch.undo()
    with pytest.raises(SyncError, match="NaN or infinity"):
        fleet.load_dense(((n, w / 0) for n, w in iter_weights(new)), version + 1)

    def break_off():
        raise OSError("the line is dead")

    with pytest.raises(SyncError, match=r"the line is dead \(after 13 tensors\)"):
        fleet.load_dense(StruckAt(new, 13, break_off), version + 1)
    assert (fleet.version, len(fleet.live), sampled(fleet)) == (version, 2, served)
    assert whole(fleet, baked, tmp_path, old)
    for each in fleet.replicas:
        assert list(Path(each._about["adapter_dir"]).glob(STAGES)) == []
    DenseSync(new, fleet).push()
    assert whole(fleet, baked, tmp_path, new)


@pytest.mark.parametrize("is_first", [True, False])
def test_where_one_cannot_load_what_it_holds_all_of_them_serve_the_version_before(
    fleet, baked, tmp_path, monkeypatch, is_first
):
    old, new = policies(baked, tmp_path, fleet)
    if not is_first:
        DenseSync(old, fleet).push()
    version, served = fleet.version, sampled(fleet)
    second = fleet.replicas[1]
    begin = second.begin_dense

    def failing(number):
        push = begin(number)

        def commit():
            end = time.monotonic() + 60
            while fleet.replicas[0].version != number:  # the other one has loaded them
                assert time.monotonic() < end
                time.sleep(0.01)
            raise SyncError("vLLM broke off")

        if number > version:
            push.commit = commit
        return push

    monkeypatch.setattr(second, "begin_dense", failing)
    with pytest.raises(SyncError, match=f"vLLM broke off.*Said by {second.url}"):
        fleet.load_dense(iter_weights(new), version + 1)
    monkeypatch.undo()
    assert (fleet.version, [each.version for each in fleet.live]) == (version, [version] * 2)
    assert sampled(fleet) == served
    if is_first:
        assert {each.describe_base().digest for each in fleet.live} == {fleet.replicas[0].base}
    else:
        assert whole(fleet, baked, tmp_path, old)


def test_weights_that_the_canary_rejects_are_served_by_none_until_the_next_push(fleet, baked, tmp_path, monkeypatch):
    _, model = policies(baked, tmp_path, fleet)
    canary = Canary(model, fleet)
    canary.calibrate()
    strategy = DenseSync(model, fleet, canary)
    strategy.push()
    second = fleet.replicas[1]
    begin = second.begin_dense

    def of_another(version):
        """What it holds is whole, and not what was sent."""
        push = begin(version)
        push.upload((n, w * 1.01 if "o_proj" in n else w) for n, w in iter_weights(model))
        push.send, push.commit = lambda part: None, lambda: None
        return push

    monkeypatch.setattr(second, "begin_dense", of_another)
    with pytest.raises(CanaryError, match=f"{second.url} holds other weights than"):
        strategy.push()
    monkeypatch.undo()
    assert not fleet.holds_dense
    for engine in (fleet, *fleet.replicas):
        with pytest.raises(EngineBrokenError, match="the canary failed"):
            engine.score(SEQUENCES)
    strategy.push()
    assert whole(fleet, baked, tmp_path, model)


# Each kills a server and starts another; by default in the stream.
@pytest.mark.parametrize("place", ["stream", pytest.param("commit", marks=pytest.mark.full)])
def test_a_server_killed_in_the_middle_of_a_push_is_done_without_and_brought_to_the_version(
    servers, fleet, baked, tmp_path, caplog, place
):
    """kill -9 when half of the weights were made, or when all are there and none was loaded. Every prompt is answered
    once, as by two."""
    old, new = policies(baked, tmp_path, fleet)
    DenseSync(new, fleet).push()
    expected = sampled(fleet)
    DenseSync(old, fleet).push()
    version, incarnation = fleet.version, fleet.incarnation
    second = fleet.replicas[1]
    weights = iter_weights(new)
    if place == "stream":
        weights = StruckAt(new, 13, lambda: servers.kill(1))
    else:
        ask = second._change

        def dying(method, path, body=None):
            if "/weights/commit" in path:
                second._change = ask
                servers.kill(1)
            return ask(method, path, body)

        second._change = dying
    fleet.load_dense(weights, version + 1)
    assert (fleet.version, [each.url for each in fleet.live]) == (version + 1, servers.urls[:1])
    assert sampled(fleet) == (*expected[:2], version + 1)
    servers.restart(1)
    assert whole(fleet, baked, tmp_path, new)
    assert fleet.incarnation > incarnation
    assert f"its base is verified and it holds version {version + 1}" in caplog.text
    assert sampled(fleet) == (*expected[:2], version + 1)
    assert second.generate(PROMPTS, SAMPLING).completion_ids == expected[0]


@pytest.mark.full  # with adapters in test_server_faults.py; above one that is killed
def test_a_server_that_stands_still_in_a_push_is_done_without_and_brought_to_the_version(
    servers, fleet, baked, tmp_path, monkeypatch
):
    """Both are waited for while one of them may only be slow; what it was sent before must not arrive behind what takes
    it back."""
    monkeypatch.setattr(team, "_STRAGGLES_AFTER_S", 5.0)
    old, new = policies(baked, tmp_path, fleet)
    DenseSync(old, fleet).push()
    version, pid = fleet.version, servers.running[1].process.pid
    try:
        fleet.load_dense(StruckAt(new, 13, lambda: os.kill(pid, signal.SIGSTOP)), version + 1)
        assert (fleet.version, [each.url for each in fleet.live]) == (version + 1, servers.urls[:1])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert whole(fleet, baked, tmp_path, new)


@pytest.mark.full  # above one of two
def test_when_both_are_killed_in_a_push_it_is_sent_again_to_the_one_that_comes_back(
    servers, fleet, baked, tmp_path, monkeypatch
):
    old, new = policies(baked, tmp_path, fleet)
    strategy = DenseSync(old, fleet)
    strategy.push()
    true, struck = fleet.load_dense, []

    def load(weights, version):
        def dying():
            for i, pair in enumerate(weights):
                if i == 13 and not struck:
                    struck.append(i)
                    servers.kill(0)
                    servers.kill(1)
                    servers.restart(1)
                yield pair

        return true(dying(), version)

    monkeypatch.setattr(fleet, "load_dense", load)
    strategy.model = new
    strategy.push()
    assert struck
    servers.restart(0)
    assert whole(fleet, baked, tmp_path, new)


def test_without_room_for_them_nothing_is_sent_and_the_error_names_the_directory(fleet, baked, tmp_path, monkeypatch):
    old, new = policies(baked, tmp_path, fleet)
    DenseSync(old, fleet).push()
    monkeypatch.setattr("qlora_rl.engine.fleet.dense.Kept.has_room", lambda nbytes: False)
    with pytest.raises(SyncError, match=r"MiB are needed at .* Set TMPDIR"):
        DenseSync(new, fleet).push()
    assert Pair(fleet, baked, tmp_path).apart(old) < EXACT
    monkeypatch.undo()
    DenseSync(new, fleet).push()
    assert whole(fleet, baked, tmp_path, new)


# --- actors of Ray --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.full  # the next test kills an actor in a push, without a trainer
def test_a_training_of_dora_on_two_actors_goes_on_when_one_is_killed_in_a_push(cluster, base, tmp_path):
    """Each step is there once, each push is checked weight by weight, and every token was sampled by the version that
    its step names."""
    limits = {"max_steps": 4, "canary_every": 1, "rollout": "ray", "engine_options": {"replicas": 2}}
    with make(base, tmp_path, peft_config=FULL_WEIGHTS["dora"].config(), **limits) as trainer:
        engine, true, calls = trainer.engine, trainer.engine.load_dense, []
        victim = engine.live[1]
        killed = victim.connection.pid

        def load(weights, version):
            def dying():
                for i, pair in enumerate(weights):
                    if len(calls) == 3 and i == 13:
                        os.kill(killed, signal.SIGKILL)
                    yield pair

            calls.append(version)
            return true(dying(), version)

        engine.load_dense = load
        trainer.train()
        wait_for_all(engine)
        assert (victim.connection.pid != killed, victim.version) == (True, engine.version)
        assert victim.describe_base().digest == engine.live[0].describe_base().digest
        trainer.bridge.strategy.verify()
    found, pushes = lines(tmp_path), lines(tmp_path, "sync.jsonl")
    assert calls[:4] == [1, 2, 3, 4]
    assert [line["step"] for line in found] == [line["policy_version"] for line in found] == [1, 2, 3, 4]
    assert max(line["mismatch_kl"] for line in found) < 5e-3
    assert {(push["transport"], push["canary_difference"] is not None) for push in pushes} == {("object_store", True)}
    assert json.loads((tmp_path / "config.json").read_text())["engine"].startswith("2 replicas: vllm")


@pytest.fixture(scope="module")
def actors(cluster, baked):
    with RayFleet(baked, replicas=2, **OPTIONS) as fleet:
        yield fleet
    assert kept() == []


def test_dora_is_held_exactly_by_both_actors_and_one_killed_in_a_push_is_replaced(actors, baked, tmp_path, caplog):
    old, new = policies(baked, tmp_path, actors)
    canary = Canary(new, actors)
    canary.calibrate()
    report = DenseSync(new, actors, canary).push()
    assert (report.transport, report.tensors) == ("object_store", 27)
    assert report.canary_difference < canary.threshold
    assert whole(actors, baked, tmp_path, new)
    expected = sampled(actors)
    DenseSync(old, actors).push()
    version, victim = actors.version, actors.live[1]
    killed, puts = victim.connection.pid, actors.parcels.puts

    def kill():
        os.kill(killed, signal.SIGKILL)

    weights = StruckAt(new, 13, kill)
    actors.load_dense(weights, version + 1)
    assert weights.made == 27
    assert actors.parcels.puts - puts == len(actors._kept._digests) > 3  # each part once
    assert (actors.version, actors.live) == (version + 1, actors.replicas[:1])
    assert sampled(actors) == (*expected[:2], version + 1)
    assert whole(actors, baked, tmp_path, new)
    assert victim.connection.pid != killed
    assert f"its base is verified and it holds version {version + 1}" in caplog.text
    assert sampled(actors) == (*expected[:2], version + 1)
    assert victim.generate(PROMPTS, SAMPLING).completion_ids == expected[0]
