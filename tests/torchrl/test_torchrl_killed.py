"""Each side is killed (kill -9) at each stage: the other one ends in time, says where, and goes on with a new one."""

import os
import signal
import threading
import time

import pytest
from sides import Side, fake_engine, make_scheme, move, policy, trainer_logprobs
from test_torchrl_pairs import apart

from qlora_rl import PeerLostError

TIMEOUT_S = 20.0  # a loss is seen at once; only a machine that is very busy needs so long for anything

# Where the receiver dies: what the sender says it was doing.
RECEIVER = {
    "join": "prove",
    "begin": "join",  # it looks for a new one before it gives up
    "transfer": "apply",
    "apply": "apply",
    "prove": "prove",
    "commit": "commit",
}
# Where the sender dies: what the receiver says, and whether the version serves.
SENDER = {"join": "join", "begin": "begin", "transfer": "prove", "prove": "prove", "commit": "prove", "end": "commit"}


def settings_of(base, place, transfer="directory", **more):
    return {"base": str(base), "transfer": transfer, "place": str(place), "timeout_s": TIMEOUT_S} | more


@pytest.fixture(scope="module")
def model(base32):
    return policy(base32)


def join_and_push(sender):
    sender.init_all_workers_group()
    sender.update_weights()


def lose_a_receiver(model, base, place, stage, transfer="directory", timeout_s=TIMEOUT_S):
    settings = settings_of(base, place, transfer, timeout_s=timeout_s)
    sender = make_scheme(transfer, place, 2.0 if stage == "begin" else timeout_s).create_sender()
    sender.register_model(model)
    with Side("receiver", **settings, stall_at=stage) as receiver:
        killed = []

        def kill_when_stalled():
            receiver.wait_for("stalled")
            receiver.kill()
            killed.append(time.monotonic())

        killer = threading.Thread(target=kill_when_stalled)
        killer.start()
        with pytest.raises(PeerLostError) as found:
            join_and_push(sender)
        killer.join()
        assert time.monotonic() - killed[0] < timeout_s + 60.0
        assert f"stage {found.value.stage!r}" in str(found.value)
    with Side("receiver", **settings) as receiver:
        move(model, 7)
        report = sender.update_weights()
        applied = receiver.wait_for("applied")
        assert applied["version"] == report.version == sender.version
        assert apart(trainer_logprobs(model), applied["logprobs"]) < 1e-4
    sender.shutdown()
    return found.value.stage


@pytest.mark.parametrize("stage", RECEIVER)
def test_a_receiver_that_is_killed_is_named_and_its_successor_catches_up(model, base32, tmp_path, stage):
    assert lose_a_receiver(model, base32, tmp_path, stage) == RECEIVER[stage]


def test_a_receiver_that_is_killed_in_a_broadcast_is_named(model, base32, tmp_path):
    assert lose_a_receiver(model, base32, tmp_path, "transfer", "broadcast", timeout_s=5.0) in ("transfer", "apply")


@pytest.mark.parametrize("stage", SENDER)
def test_a_sender_that_is_killed_is_named_and_its_successor_is_served(base32, tmp_path, stage):
    lose_a_sender(base32, tmp_path, stage, SENDER[stage])


def test_a_sender_that_is_killed_in_a_broadcast_is_named(base32, tmp_path):
    lose_a_sender(base32, tmp_path, "transfer", "transfer", "broadcast")


def lose_a_sender(base, place, stage, said, transfer="directory"):
    settings = settings_of(base, place, transfer)
    is_served = stage == "end"  # it was verified and committed
    with Side("receiver", **settings, pushes=2 if is_served else 1) as receiver:
        with Side("sender", **settings, stall_at=stage) as sender:
            sender.wait_for("stalled")
            sender.kill()
        error = receiver.wait_for("error")
        assert (error["type"], error["stage"]) == ("PeerLostError", said)
        assert f"stage {said!r}" in error["text"]
        assert error["seconds"] < TIMEOUT_S + 20.0
        assert (error["version"] == 1, bool(error["held"])) == (is_served, is_served)
        if is_served:
            assert receiver.wait_for("applied")["version"] == 1
        with Side("sender", **settings, seed=3) as sender:
            pushed, applied = sender.wait_for("pushed"), receiver.wait_for("applied")
            assert pushed["version"] == applied["version"] == 1 + is_served
            assert apart(pushed["logprobs"], applied["logprobs"]) < 1e-4


def test_a_silent_receiver_is_given_up_in_time(model, base32, tmp_path):
    sender = make_scheme("directory", tmp_path, 10.0).create_sender()
    sender.register_model(model)
    with Side("receiver", **settings_of(base32, tmp_path)) as receiver:
        sender.init_all_workers_group()
        receiver.wait_for("joined")
        sender._asking.timeout_s = 1.0
        os.kill(receiver.process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(PeerLostError, match="1 s") as found:
            sender.update_weights()
        assert found.value.stage == "begin"
        assert time.monotonic() - started < 60.0
    sender.shutdown()


def test_without_a_receiver_the_sender_ends_in_time(model, tmp_path):
    sender = make_scheme("directory", tmp_path, 0.5).create_sender()
    sender.register_model(model)
    with pytest.raises(PeerLostError, match="no receiver listens") as found:
        sender.init_all_workers_group()
    assert found.value.stage == "join"


def test_without_a_sender_the_receiver_ends_in_time(base32, tmp_path):
    receiver = make_scheme("directory", tmp_path, 0.5).create_receiver(fake_engine(base32))
    with pytest.raises(PeerLostError, match="sender") as found:
        receiver.init_all_workers_group()
    assert found.value.stage == "join"
    receiver.shutdown()
