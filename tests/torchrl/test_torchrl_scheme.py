"""The scheme, the sender and the receiver in one process: verdict, proof, canary, hooks, and what TorchRL calls."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
from peft import LoraConfig
from sides import PROBE, dense_engine, fake_engine, move, policy, trainer_logprobs
from test_torchrl_pairs import apart
from torchrl.weight_update import WeightSyncScheme

from qlora_rl import (
    AdapterRejectedError,
    BaseMismatchError,
    CanaryError,
    ConfigConflictError,
    SyncError,
    export_adapter,
)
from qlora_rl.torchrl import AdapterSyncScheme, BroadcastTransfer, DirectoryTransfer, get_model_metadata
from qlora_rl.torchrl.messages import Asking, Message, pack_error, unpack_error
from qlora_rl.torchrl.rpc import InProcessRPC


@pytest.fixture
def engine(base32):
    return fake_engine(base32)


@pytest.fixture
def model(base32):
    return policy(base32)


def joined(model, engine, scheme=None, metadata=None):
    scheme = scheme or AdapterSyncScheme(timeout_s=20.0)
    receiver = scheme.create_receiver(engine)
    receiver.init_all_workers_group(metadata)
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(metadata)
    return sender, receiver


def agrees(model, engine):
    return apart(trainer_logprobs(model), engine.score(PROBE)) < 1e-4


def test_poll_tells_of_each_push_once(model, engine):
    sender, receiver = joined(model, engine)
    assert not receiver.poll_and_apply(0)
    for version in (1, 2, 3):
        move(model, version)
        report = sender.update_weights()
        assert (report.version, report.mode, report.transport) == (version, "lora_adapter", "body")
        assert report.canary_difference is not None
        assert agrees(model, engine)
        assert [receiver.poll_and_apply(600), receiver.poll_and_apply(0)] == [
            True,
            False,
        ]  # the first waits for nothing
        assert receiver.version == engine.version == version
    held = export_adapter(model, dtype=torch.float32).tensors
    assert all(torch.equal(tensor, held[name]) for name, tensor in receiver.weights.items())


def test_a_receiver_may_poll_in_a_thread_of_its_own(model, engine):
    sender, receiver = joined(model, engine)
    told, is_over = [], threading.Event()

    def poll():
        while not is_over.is_set():
            if receiver.poll_and_apply(0.01):
                told.append(receiver.version)

    thread = threading.Thread(target=poll)
    thread.start()
    for version in range(1, 6):
        move(model, version)
        sender.update_weights()
    while len(told) == 0 or told[-1] < 5:
        assert thread.is_alive()
    is_over.set()
    thread.join()
    assert told == sorted(set(told))
    assert agrees(model, engine)


def test_another_base_is_rejected_on_both_sides(model, other_base32):
    scheme = AdapterSyncScheme(timeout_s=20.0)
    receiver = scheme.create_receiver(fake_engine(other_base32))
    receiver.init_all_workers_group()
    sender = scheme.create_sender()
    sender.register_model(model)
    with pytest.raises(BaseMismatchError, match="differ"):
        sender.init_all_workers_group()
    with pytest.raises(BaseMismatchError, match="differ"):
        receiver.poll_and_apply(0)
    with pytest.raises(BaseMismatchError):
        sender.update_weights()


def test_a_version_that_is_not_what_was_pushed_is_taken_back(model, engine):
    sender, receiver = joined(model, engine)
    sender.update_weights()
    assert receiver.poll_and_apply(0)
    verified = engine.score(PROBE)
    serve = engine._serve

    def broken(tensors, version):
        serve({name: t * 1.5 if "lora_B" in name else t for name, t in tensors.items()}, version)

    engine._serve = broken
    move(model, 5)
    with pytest.raises(CanaryError):
        engine_serves_wrong_numbers_once(sender, engine, serve)
    assert not receiver.poll_and_apply(0)
    assert (receiver.version, engine.version) == (1, 1)
    assert engine.score(PROBE) == verified
    sender.update_weights()
    assert receiver.poll_and_apply(0)
    assert agrees(model, engine)


def engine_serves_wrong_numbers_once(sender, engine, serve):
    broken = engine._serve

    def once(tensors, version):
        engine._serve = serve
        broken(tensors, version)

    engine._serve = once
    sender.update_weights()


def test_an_engine_that_rejects_leaves_the_old_version_and_the_reason(model, base32):
    small = fake_engine(base32)
    small.max_lora_rank = 4
    with pytest.raises(ConfigConflictError, match="rank=8 > max_lora_rank=4"):
        joined(model, small)


def test_what_cannot_travel_is_rejected_before_anybody_is_waited_for(base32):
    model = policy(base32)
    sender = AdapterSyncScheme(timeout_s=600.0).create_sender()
    sender.register_model(model)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n).fill_(float("nan"))
    with pytest.raises(AdapterRejectedError, match="NaN"):
        sender.init_all_workers_group()


def test_full_weights_take_the_dense_path_by_the_same_layers(base32, baked32, tmp_path):
    model, engine = policy(base32, modules_to_save=["norm"]), dense_engine(baked32)
    scheme = AdapterSyncScheme(transfer=DirectoryTransfer(tmp_path, shard_bytes=2**16), timeout_s=60.0)
    sender, receiver = joined(model, engine, scheme, get_model_metadata(model, torch.float32))
    assert (sender.plan.strategy, sender.base_check.is_verified) == ("weights", True)
    for version in (1, 2):
        move(model, version)
        report = sender.update_weights()
        assert (report.version, report.mode) == (version, "weights")
        assert receiver.poll_and_apply(0)
        assert agrees(model, engine)


def test_metadata_is_what_both_sides_agree_on(model, engine):
    metadata = get_model_metadata(model)
    tensors = export_adapter(model, dtype=torch.float32).tensors
    assert metadata == {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    joined(model, engine, metadata=metadata)
    name = next(iter(metadata))
    wrong = metadata | {name: (torch.bfloat16, metadata[name][1])}
    with pytest.raises(ConfigConflictError, match="bfloat16"):
        joined(model, engine, metadata=wrong)


def test_an_adapter_that_has_changed_its_shape_is_rejected_until_both_sides_agree_again(model, engine):
    sender, receiver = joined(model, engine)
    sender.update_weights()
    model.add_adapter("smaller", LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    model.set_adapter("smaller")
    with pytest.raises(SyncError, match="agreed"):
        sender.update_weights()
    assert engine.version == 1
    sender.init_all_workers_group()
    assert receiver.version == engine.version == 2
    assert agrees(model, engine)


def test_an_error_crosses_with_its_class_and_nothing_else_is_made_of_a_name():
    crossed = unpack_error(pack_error(AdapterRejectedError("no", reasons=["one", "two"], module="here")))
    assert (type(crossed), crossed.reasons, crossed.module) == (AdapterRejectedError, ("one", "two"), "here")
    for name in ("collected", "Sequence", "no such thing", "ValueError"):
        packed = {"type": name, "text": "text", "reasons": [], "module": None}
        assert type(unpack_error(packed)) is SyncError
    assert "ZeroDivisionError: by zero" in str(unpack_error(pack_error(ZeroDivisionError("by zero"))))


def test_the_model_is_held_weakly(base32, engine):
    model = policy(base32)
    sender, _ = joined(model, engine)
    sender.update_weights()
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
    with pytest.raises(ConfigConflictError, match="it is gone"):
        sender.update_weights()


def test_only_the_registered_model_is_pushed(base32, model, engine):
    sender, receiver = joined(model, engine)

    class Wrapper:  # as TorchRL's TransformersWrapper holds it
        pass

    wrapper = Wrapper()
    wrapper.model = model
    sender.update_weights(wrapper)
    with pytest.raises(ConfigConflictError, match="registered"):
        sender.update_weights(policy(base32))
    with pytest.raises(ConfigConflictError, match="PeftModel"):
        sender.update_weights({})
    assert receiver.version == 1


def test_a_sender_that_was_shut_down_pushes_nothing(model, engine):
    sender, receiver = joined(model, engine)
    sender.update_weights()
    sender.shutdown()
    with pytest.raises(SyncError, match="was shut down"):
        sender.update_weights()
    assert engine.version == 1
    receiver.shutdown()
    with pytest.raises(SyncError, match="no channel"):
        receiver.poll_and_apply()


def test_a_collective_in_one_process_is_rejected():
    with pytest.raises(ConfigConflictError, match="two processes"):
        AdapterSyncScheme(transfer=BroadcastTransfer())


def test_torchrl_drives_the_scheme_itself(model, engine):
    """What a collector calls on its sender, and an inference server on its receiver."""
    scheme = AdapterSyncScheme(timeout_s=20.0)
    assert isinstance(scheme, WeightSyncScheme)

    class Server:
        counted = 0

        def update_policy_weights_(self, model_id=None, policy_or_weights=None):
            self.counted += 1

    server = Server()
    receiving = AdapterSyncScheme(scheme.rpc, scheme.transfer, timeout_s=20.0)
    receiving.context = server
    receiving.init_on_receiver(model_id="policy", model=engine, worker_idx=0)
    receiving.connect(worker_idx=0)
    scheme.init_on_sender(model_id="policy", model=model)
    scheme.connect()
    weights = receiving.receive(timeout=0.0)
    assert set(weights.keys()) == set(get_model_metadata(model))
    assert receiving.receive(timeout=0.0) is None
    move(model, 3)
    scheme.send()
    assert receiving.create_transport().receive_weights(timeout=0.0) is not None
    assert (server.counted, engine.version) == (2, 2)
    assert agrees(model, engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheme.shutdown()
        receiving.shutdown()


@pytest.mark.parametrize("content", [{}, {"error": 5}, {"error": {}}, {"error": {"type": ["x"], "text": ""}}])
def test_garbage_in_an_answer_is_named(content):
    rpc = InProcessRPC()
    asking = Asking(rpc.connect, 5.0)
    rpc.serve_in_turn(lambda: None)
    asking.open()
    answer = asking.begin("capabilities")
    rpc.to_sender.put(Message(asking.session, 1, "", content).encode())
    with pytest.raises(SyncError, match="channel"):
        answer()


@pytest.mark.parametrize(
    "header",
    [b"", b"null", b"{}", b'{"a":1,"b":2,"c":3,"d":4}', b"[1,2,3,4]", b'["s",1,"m",[]]', b"[" * 100_000, b"\xff"],
)
def test_garbage_in_a_channel_is_named(header):
    for message in (header, len(header).to_bytes(8, "little") + header, b"\xff" * 8 + header):
        with pytest.raises(SyncError, match="channel"):
            Message.decode(message)
