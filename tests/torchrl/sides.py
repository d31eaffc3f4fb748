"""The two sides of a weight sync, for tests: what runs in the other process, and how it is started, watched and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

PROBE = [[40, 41, 42, 43, 44, 45], [60, 9, 33, 12, 7, 41]]
HERE = Path(__file__).parent


def fake_engine(base):
    from qlora_rl import FakeEngine, load_base

    return FakeEngine(load_base(base), max_lora_rank=8)


def policy(base, seed=0, **options):
    """A PeftModel with a random adapter of rank 8 on the base."""
    import torch
    from peft import LoraConfig, get_peft_model
    from support import randomise

    from qlora_rl import load_base

    torch.manual_seed(seed)
    model = get_peft_model(
        load_base(base), LoraConfig(**{"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **options})
    )
    randomise(model, seed=seed)
    return model


def trainer_logprobs(model):
    """Of PROBE under the live policy, as an engine scores."""
    from qlora_rl import FakeEngine

    model.train()
    engine = FakeEngine.__new__(FakeEngine)
    engine.model, engine._hooks, engine._bare = model, [], False
    return engine.score(PROBE)


def move(model, seed):
    """One step of a training that learns nothing."""
    from support import randomise

    randomise(model, seed=seed)


def make_rpc(kind: str, place: Path):
    from qlora_rl import torchrl

    if kind == "multiprocessing":
        return torchrl.MultiprocessingRPC(str(place / "socket"), b"a key of this test")
    if kind == "torch":
        return torchrl.TorchDistributedRPC()
    if kind == "ray":
        return torchrl.RayRPC(f"mailbox-{place.name}", namespace="qlora-rl-tests")
    raise ValueError(kind)


def make_transfer(kind: str, place: Path, timeout_s: float):
    from qlora_rl import torchrl

    if kind == "directory":
        return torchrl.DirectoryTransfer(place / "weights")
    if kind == "broadcast":
        return torchrl.BroadcastTransfer(timeout_s=timeout_s, bucket_bytes=2**16)
    return torchrl.BodyTransfer()


def make_scheme(rpc: str, transfer: str, place: Path, timeout_s: float = 60.0, **options):
    from qlora_rl.torchrl import AdapterSyncScheme

    return AdapterSyncScheme(
        make_rpc(rpc, place), make_transfer(transfer, place, timeout_s), timeout_s=timeout_s, **options
    )


@contextmanager
def torch_world(rank: int, place: Path):
    """The RPC world of torch: rank 0 is the trainer, 1 the sampler."""
    import torch.distributed.rpc as rpc

    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{place}/world", num_worker_threads=4)
    rpc.init_rpc(("trainer", "sampler")[rank], rank=rank, world_size=2, rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown(graceful=False)


class Side:
    """A process that runs a function of `actors.py`, and prints a line of JSON for each thing that happens in it."""

    def __init__(self, act: str, **settings):
        path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        self.events: list[dict] = []
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "actors.py"), act, json.dumps(settings, default=str)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        os.set_blocking(self.process.stdout.fileno(), False)
        self._rest = ""

    def wait_for(self, what: str, timeout_s: float = 120.0) -> dict:
        """The first event of a kind that was not waited for yet."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._read()
            for index, event in enumerate(self.events):
                if event["event"] == what:
                    return self.events.pop(index)
            if self.process.poll() is not None:
                self._read()
                if not any(event["event"] == what for event in self.events):
                    raise AssertionError(f"ended with {self.process.returncode} before {what!r}: {self.events}")
            time.sleep(0.01)
        raise AssertionError(f"no {what!r} within {timeout_s} s: {self.events}")

    def _read(self) -> None:
        try:
            self._rest += self.process.stdout.read() or ""
        except TypeError:  # nothing there
            return
        *lines, self._rest = self._rest.split("\n")
        self.events += [json.loads(line) for line in lines if line.startswith("{")]

    def kill(self) -> None:
        """kill -9."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        self.process.stdout.close()
