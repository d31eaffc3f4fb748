"""Sender and receiver in two processes, with every RPC layer and every transfer layer that a CPU allows."""

import contextlib
import os
import pickle
import socket
import threading
import time

import pytest
import torch
from sides import PROBE, Side, fake_engine, make_scheme, policy, trainer_logprobs

from qlora_rl import AccessDeniedError, BaseMismatchError
from qlora_rl.torchrl import AdapterSyncScheme, BroadcastTransfer, MultiprocessingRPC

TRANSFERS = ["directory", "body", "broadcast"]
PUSHES = 3


def apart(ours, theirs):
    return float((torch.tensor(ours) - torch.tensor(theirs)).abs().max())


def follow(sender, receiver, pushes=PUSHES):
    """Each push of one process is what the other one serves."""
    for version in range(1, pushes + 1):
        pushed, applied = sender.wait_for("pushed"), receiver.wait_for("applied")
        assert pushed["version"] == applied["version"] == version
        # The receiver adds B @ A @ x to an output, PEFT does so in another order: float32, a few of its last bits.
        assert apart(pushed["logprobs"], applied["logprobs"]) < 1e-4
        assert apart(pushed["logprobs"], pushed["bare"]) > 0.01
    sender.wait_for("done")
    receiver.wait_for("done")


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_what_is_pushed_is_what_the_other_process_serves(base32, tmp_path, transfer):
    settings = {
        "base": str(base32),
        "transfer": transfer,
        "place": str(tmp_path),
        "pushes": PUSHES,
    }
    with Side("receiver", **settings) as receiver, Side("sender", **settings) as sender:
        follow(sender, receiver)


def test_without_a_canary_what_is_pushed_arrives_too(base32, tmp_path):
    settings = {"base": str(base32), "transfer": "body", "place": str(tmp_path)}
    with Side("receiver", **settings, pushes=2) as receiver, Side("sender", **settings, pushes=2, every=0) as sender:
        follow(sender, receiver, pushes=2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each side")
def test_nccl_carries_a_push_between_two_gpus(base32, tmp_path):
    settings = {
        "base": str(base32),
        "transfer": "nccl",
        "place": str(tmp_path),
        "pushes": PUSHES,
    }
    with Side("receiver", **settings) as receiver, Side("sender", **settings) as sender:
        follow(sender, receiver)


@pytest.mark.full  # in one process in test_torchrl_scheme.py; above adapters
def test_full_weights_travel_by_each_transfer(base32, baked32, tmp_path):
    for transfer in TRANSFERS:
        place = tmp_path / transfer
        place.mkdir()
        settings = {"transfer": transfer, "place": str(place), "pushes": 2, "dense": True}
        with Side("receiver", base=str(baked32), **settings) as receiver:
            with Side("sender", base=str(base32), **settings) as sender:
                follow(sender, receiver, pushes=2)


def test_a_receiver_on_another_base_rejects_at_init_and_so_does_the_sender(base32, other_base32, tmp_path):
    settings = {"transfer": "directory", "place": str(tmp_path)}
    with Side("receiver", base=str(other_base32), **settings) as receiver:
        model = policy(base32)
        sender = make_scheme("directory", tmp_path).create_sender()
        sender.register_model(model)
        with pytest.raises(BaseMismatchError, match="differ"):
            sender.init_all_workers_group()
        error = receiver.wait_for("error")
        assert (error["type"], error["version"]) == ("BaseMismatchError", 0)


def test_layers_cross_to_another_process_as_settings(tmp_path):
    scheme = make_scheme("broadcast", tmp_path)
    twin = pickle.loads(pickle.dumps(scheme))
    assert (twin.rpc.address, twin.rpc.authkey) == (scheme.rpc.address, scheme.rpc.authkey)
    assert twin.transfer.name == "broadcast"


def test_a_connection_wants_the_key_and_leaves_nothing_behind(base32):
    layer = MultiprocessingRPC()
    channel = layer.listen()
    stranger = AdapterSyncScheme(MultiprocessingRPC(layer.address, b"a wrong key"), timeout_s=5.0).create_sender()
    model = policy(base32)
    stranger.register_model(model)
    with pytest.raises(AccessDeniedError, match="another authkey"):
        stranger.init_all_workers_group()
    assert channel.receive(0.05) is None
    sender = layer.connect(5.0)
    sender.send(b"message", 5.0)
    assert channel.receive(5.0) == b"message"
    sender.close()
    with pytest.raises(ConnectionError):
        channel.receive(5.0)
    channel.close()
    assert not os.path.exists(os.path.dirname(layer.address))


STRANGERS = {
    "a scanner's HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "a message of two gigabytes": (2**31 - 1).to_bytes(4, "big") + b"x",
    "an empty message": bytes(4),
    "a pickle": (lambda blob: len(blob).to_bytes(4, "big") + blob)(pickle.dumps(print)),
    "nothing, and leaves": b"",
}


@pytest.mark.parametrize("address", [None, ("127.0.0.1", 0)], ids=["path", "port"])
def test_what_strangers_send_to_a_receiver_ends_nothing(address):
    """Each of them, at once with as many that are connected and silent."""
    if address:
        with socket.create_server(address) as free:
            address = free.getsockname()
    layer = MultiprocessingRPC(address)
    channel = layer.listen()
    silent = [dial(layer.address) for _ in range(3)]
    try:
        for said in STRANGERS.values():
            with dial(layer.address) as stranger:
                stranger.sendall(said)
        sender = layer.connect(5.0)
        sender.send(b"message", 5.0)
        assert channel.receive(5.0) == b"message"
        sender.close()
        began = time.monotonic()
        channel.close()
        assert time.monotonic() - began < 5.0
    finally:
        for each in silent:
            each.close()


@pytest.mark.parametrize("said", [b"", b"\0\0\0\4what", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_sender_gives_up_what_is_no_receiver(said):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    kept[-1].sendall(said)

        kept = []
        threading.Thread(target=answer, daemon=True).start()
        layer, began = MultiprocessingRPC(server.getsockname(), b"key"), time.monotonic()
        with pytest.raises((TimeoutError, AccessDeniedError), match="no receiver"):
            layer.connect(1.0)
        assert time.monotonic() - began < 5.0
        for each in kept:
            each.close()


def test_the_rendezvous_of_a_broadcast_listens_on_its_address_alone():
    transfer = BroadcastTransfer(timeout_s=5.0)
    port = transfer.offer()["port"]
    with pytest.raises(ConnectionRefusedError):
        dial(("127.0.0.2", port))
    dial(("127.0.0.1", port)).close()
    transfer.close()


def dial(address):
    handle = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    handle.connect(address)
    return handle


def test_the_measure_sees_an_adapter(base32):
    model = policy(base32)
    assert apart(trainer_logprobs(model), fake_engine(base32).score(PROBE)) > 0.01
