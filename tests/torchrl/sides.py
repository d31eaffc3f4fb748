"""The two sides of a weight sync, for tests: what runs in the other process, and how it is started, watched and
killed."""

from __future__ import annotations

import os
import time
from pathlib import Path

PROBE = [[40, 41, 42, 43, 44, 45], [60, 9, 33, 12, 7, 41]]
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # or Ray would leave a key in the home directory
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


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


def make_transfer(kind: str, place: Path, timeout_s: float):
    from qlora_rl import torchrl

    if kind == "directory":
        return torchrl.DirectoryTransfer(place / "weights")
    if kind == "broadcast":
        return torchrl.BroadcastTransfer(timeout_s=timeout_s, bucket_bytes=2**16)
    if kind == "nccl":
        return torchrl.BroadcastTransfer(backend="nccl", timeout_s=timeout_s)
    return torchrl.BodyTransfer()


def make_scheme(transfer: str, place: Path, timeout_s: float = 60.0, **options):
    from qlora_rl.torchrl import AdapterSyncScheme, MultiprocessingRPC

    rpc = MultiprocessingRPC(str(place / "socket"), b"a key of this test")
    return AdapterSyncScheme(rpc, make_transfer(transfer, place, timeout_s), timeout_s=timeout_s, **options)


def dense_engine(base):
    """`FakeEngine` that takes full weights instead of adapters."""
    import dataclasses

    import torch

    from qlora_rl import FakeEngine, SyncError, load_base
    from qlora_rl.base.fingerprint import base_parameters

    class DenseFake(FakeEngine):
        holds_dense = False

        def capabilities(self):
            return dataclasses.replace(
                super().capabilities(), takes_adapters=False, takes_dense=True, max_lora_rank=0, takes_in_place=False
            )

        @torch.no_grad()
        def load_dense(self, weights, version):
            places, nbytes = dict(base_parameters(self.model)), 0
            self.holds_dense, self._lost = False, "full weights are on their way"
            for name, weight in weights:
                if name not in places:
                    raise SyncError(f"loading weights: no {name} here.")
                places[name].copy_(weight)
                nbytes += weight.numel() * weight.element_size()
            self.holds_dense, self._lost, self.version = True, "", version
            return nbytes

        def withdraw_dense(self, reason):
            self.holds_dense, self._lost = False, reason

    return DenseFake(load_base(base))


class Side:
    """A process that runs a function of `actors.py` and reports what happens in it."""

    def __init__(self, act: str, **settings):
        import actors
        from support import forking

        context = forking()
        self._events, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=actors.run, args=(act, settings, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.events: list[dict] = []

    def wait_for(self, what: str, timeout_s: float = 120.0) -> dict:
        """The first event of a kind that was not waited for yet."""
        deadline = time.monotonic() + timeout_s
        while True:
            for index, event in enumerate(self.events):
                if event["event"] == what:
                    return self.events.pop(index)
            left = deadline - time.monotonic()
            assert left > 0, f"no {what!r} within {timeout_s} s: {self.events}"
            try:
                if self._events.poll(left):
                    self.events.append(self._events.recv())
            except EOFError:
                raise AssertionError(f"ended before {what!r}: {self.events}") from None

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_) -> None:
        self.kill()
        self._events.close()
