"""The RPC layer that docs/torchrl.md points to."""

import runpy
import threading
from pathlib import Path

from sides import fake_engine, move, policy
from test_torchrl_scheme import agrees

from qlora_rl.torchrl import AdapterSyncScheme

FILE = Path(__file__).parents[2] / "examples" / "torchrl_file_rpc.py"


def test_the_layer_of_the_documentation_carries_pushes(base32, tmp_path):
    names = runpy.run_path(str(FILE))
    model, engine = policy(base32), fake_engine(base32)
    schemes = [AdapterSyncScheme(names["FileRPC"](tmp_path), timeout_s=60.0) for _ in range(2)]
    receiver, told = schemes[1].create_receiver(engine), []

    def receive():
        receiver.init_all_workers_group()
        while len(told) < 3:
            if receiver.poll_and_apply(0.1):
                told.append(receiver.version)

    thread = threading.Thread(target=receive)
    thread.start()
    sender = schemes[0].create_sender()
    sender.register_model(model)
    sender.init_all_workers_group()
    for version in (1, 2, 3):
        move(model, version)
        assert sender.update_weights().version == version
    thread.join(60.0)
    assert told == [1, 2, 3]
    assert agrees(model, engine)
