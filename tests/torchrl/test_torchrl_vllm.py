"""Real vLLM at the receiver's end: in this process, and behind our server."""

import pytest
from sides import move, policy
from test_torchrl_pairs import apart

from qlora_rl import FakeEngine, LocalEngine, ServerEngine, export_adapter, load_base, start_server
from qlora_rl.adapter.store import write_adapter
from qlora_rl.torchrl import AdapterSyncScheme, DirectoryTransfer

SEQUENCES = [[40, 41, 42, 43, 44, 45, 46, 47], [60, 9, 33, 12, 7, 41, 5, 21]]


def pushed_three_times(model, engine, scheme, base, directory):
    receiver = scheme.create_receiver(engine)
    receiver.init_all_workers_group()
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group()
    assert sender.base_check.is_verified
    bare = engine.score(SEQUENCES)
    beside = FakeEngine(load_base(base))
    for version in (1, 2, 3):
        move(model, version)
        report = sender.update_weights()
        assert receiver.poll_and_apply(0)
        assert report.canary_difference is not None
        assert engine.version == receiver.version == version
        place = directory / str(version)
        place.mkdir()
        write_adapter(export_adapter(model, dtype=beside.model.dtype), place)
        beside.load_adapter(place, version)
        # bfloat16: two engines that round in other places
        assert apart(engine.score(SEQUENCES), beside.score(SEQUENCES)) < 0.15
        assert apart(engine.score(SEQUENCES), bare) > 0.15
    sender.shutdown()
    receiver.shutdown()


def test_vllm_serves_what_was_pushed(base, tmp_path):
    scheme = AdapterSyncScheme(transfer=DirectoryTransfer(tmp_path / "weights"))
    with LocalEngine(base, max_lora_rank=8, max_model_length=32, max_num_seqs=8) as engine:
        pushed_three_times(policy(base), engine, scheme, base, tmp_path)


@pytest.mark.full  # a server; above vLLM in this process
def test_a_server_is_given_the_adapter_in_the_body_of_a_request(base, tmp_path):
    with start_server(base, max_lora_rank=8, max_model_length=32) as server:
        with ServerEngine(server.url, api_key=server.key) as engine:
            pushed_three_times(policy(base), engine, AdapterSyncScheme(), base, tmp_path)
