"""Full weights past files and HTTP: what both ends do with a part."""

import functools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from qlora_rl.base.fingerprint import digest_plain
from qlora_rl.engine import weight_channels
from qlora_rl.engine.client.channel_push import ChannelPush
from qlora_rl.engine.weight_channels import (
    check_way,
    checksum,
    open_carrier,
    open_receiver,
    pack,
    unpack,
)
from qlora_rl.engine.worker import received_weights
from qlora_rl.engine.worker.received_weights import ReceivedWeights
from qlora_rl.errors import ConfigConflictError, SyncError

CPU = torch.device("cpu")
WEIGHTS = [
    ("a", torch.randn(3, 5)),
    ("b", torch.randn(7).bfloat16()),
    ("none", torch.empty(0, 4)),
    ("c", torch.randn(2, 3, 2).half()),
]


def kinds(weights):
    return {name: [str(w.dtype).removeprefix("torch."), list(w.shape)] for name, w in weights}


def part(weights, ticket=None):
    buffer, places = pack(weights, CPU)
    return buffer, {"nbytes": buffer.numel(), "checksum": str(checksum(buffer)), "places": places, "ticket": ticket}


@pytest.fixture
def ends():
    """Both, in one process."""
    ours = open_carrier("gloo", "127.0.0.1")
    theirs = open_receiver(json.loads(json.dumps(ours.describe())), CPU)
    ours.join()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_what_is_packed_comes_out_to_the_last_bit():
    buffer, places = pack(WEIGHTS, CPU)
    for (name, weight), (other, found) in zip(WEIGHTS, unpack(buffer, json.loads(json.dumps(places))), strict=True):
        assert (name, weight.dtype, weight.shape) == (other, found.dtype, found.shape)
        assert torch.equal(weight, found)


def receive(end, nbytes, came, ticket):
    came.append(end.receive(json.loads(json.dumps(ticket)), nbytes))


def test_bytes_go_by_each_way_as_they_are(ends):
    ours, theirs = ends
    for seed in range(3):
        buffer, _ = pack([("a", torch.randn(1000 + seed, generator=torch.Generator().manual_seed(seed)))], CPU)
        came = []
        ours.carry(buffer, functools.partial(receive, theirs, buffer.numel(), came))
        assert torch.equal(came[0], buffer)
        assert came[0].data_ptr() != buffer.data_ptr()


def test_what_the_other_end_says_is_raised_and_nobody_waits_for_it(ends):
    ours, _ = ends

    def ask(ticket):
        raise SyncError("the engine has no weight z")

    with pytest.raises(SyncError, match="no weight z"):
        ours.carry(pack(WEIGHTS, CPU)[0], ask)
    began = time.monotonic()
    ours.close()
    assert time.monotonic() - began < 5


def test_a_checksum_notices_every_changed_word_and_an_exchange():
    words = torch.randint(-(2**62), 2**62, (400,), generator=torch.Generator().manual_seed(0))
    before = checksum(words.view(torch.uint8))
    for place in range(400):
        other = words.clone()
        other[place] ^= 1 << (place % 64 if place % 64 < 63 else 62)
        assert checksum(other.view(torch.uint8)) != before
    assert checksum(words.flip(0).view(torch.uint8)) != before
    assert checksum(words.view(torch.uint8).clone()) == before
    assert 0 <= before < 2**64


@pytest.mark.parametrize("towards", ["127.0.0.1", "localhost", "::1"])
def test_a_group_meets_at_the_address_by_which_the_engine_sees_this_machine(towards, monkeypatch):
    """Whatever the name of this machine means."""
    if towards == "::1" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("this machine has no IPv6")
    asked = []
    make = torch.distributed.ProcessGroupGloo.create_device
    monkeypatch.setattr(
        torch.distributed.ProcessGroupGloo, "create_device", lambda **named: asked.append(named) or make(**named)
    )
    ours = open_carrier("gloo", towards)
    theirs = open_receiver(ours.describe(), CPU)
    ours.join()
    buffer = torch.arange(64, dtype=torch.uint8)
    ours.carry(buffer, lambda ticket: torch.testing.assert_close(theirs.receive(ticket, 64), buffer))
    assert asked == [{"hostname": "::1" if towards == "::1" else "127.0.0.1"}] * 2
    ours.close()
    theirs.close()


def test_a_host_that_nobody_knows_is_said():
    with pytest.raises(SyncError, match=r"weights_by='gloo'.* Use weights_by='http'"):
        open_carrier("gloo", "no-such-host.invalid")


def test_an_end_that_does_not_come_is_said_and_leaves_no_push(monkeypatch):
    monkeypatch.setattr(weight_channels, "_TIMEOUT", timedelta(seconds=1))
    carrier, asked = open_carrier("gloo", "127.0.0.1"), []

    def ask(method, path, body=None):
        asked.append((method, path))
        return {"push": "p", "nbytes": 8}

    with pytest.raises(SyncError, match=r"does not come to 127\.0\.0\.1 port \d+ for weights_by='gloo'"):
        ChannelPush(ask, 3, carrier=carrier, commit=print)
    assert asked == [("POST", "/weights?version=3"), ("DELETE", "/weights?push=p")]


@pytest.mark.parametrize("way", ["pigeon", "nccl"])
def test_a_way_that_this_machine_lacks_is_rejected_before_anything_is_made(way):
    if way != "pigeon" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigConflictError, match=rf"weights_by='{way}'.* Use 'http'"):
        check_way(way)


class Carried:
    """The worker's side of a push; parts are there already."""

    def __init__(self, weights=WEIGHTS):
        self.buffer = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(received_weights, "open_receiver", lambda *_: self)
            self.held = ReceivedWeights("push", {}, kinds(weights), CPU)

    def receive(self, ticket, nbytes):
        return self.buffer.clone()

    def take(self, weights, **changed):
        self.buffer, about = part(weights)
        self.held.take(about | changed)


def test_the_worker_keeps_what_has_come_until_it_is_read():
    carried = Carried()
    carried.take(WEIGHTS[:2])
    assert carried.held.missing() == ["c", "none"]
    carried.take(WEIGHTS[2:])
    assert carried.held.missing() == []
    assert {name: digest_plain(weight) for name, weight in carried.held.weights()} == {
        name: digest_plain(weight) for name, weight in WEIGHTS
    }
    assert list(carried.held.weights()) == []


@pytest.mark.parametrize(
    ("weights", "changed", "message"),
    [
        ([("z", torch.ones(2))], {}, "no weight z"),
        ([("a", torch.ones(5, 3))], {}, r"a has shape=\[5, 3\], dtype=float32; the engine's is \[3, 5\]"),
        ([("a", torch.ones(3, 5).half())], {}, "dtype=float16"),
        ([("a", torch.ones(3, 5)), ("a", torch.ones(3, 5))], {}, "a came twice"),
        ([("a", torch.full((3, 5), float("inf")))], {}, "NaN or infinity"),
        ([("a", torch.ones(3, 5))], {"checksum": "17"}, "damaged on the way"),
        ([("a", torch.ones(3, 5))], {"places": [("a", "float32", [30, 5])]}, "ends behind the 64 bytes"),
        ([("a", torch.ones(3, 5))], {"places": [("a", "Tensor", [3, 5])]}, "which none can have"),
    ],
)
def test_a_part_that_is_not_the_models_is_rejected(weights, changed, message):
    with pytest.raises(SyncError, match=message):
        Carried().take(weights, **changed)


def test_an_end_that_is_late_is_waited_for():
    ours = open_carrier("gloo", "localhost")
    with ThreadPoolExecutor(1) as thread:
        theirs = thread.submit(open_receiver, ours.describe(), CPU)
        ours.join()
        buffer = torch.arange(64, dtype=torch.uint8)
        ours.carry(buffer, lambda ticket: torch.testing.assert_close(theirs.result().receive({}, 64), buffer))
    ours.close()
