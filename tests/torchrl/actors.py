"""What the other process of a test does: `python actors.py ACT SETTINGS`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def tell(event: str, **facts) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def stall(stage: str) -> None:
    """Say where, and stay there until killed."""
    tell("stalled", stage=stage)
    time.sleep(600)


def receiver(base, rpc, transfer, place, timeout_s=60.0, pushes=1, stall_at="", dense=False, **_) -> None:
    """Serves `pushes` pushes and tells the logprobs after each."""
    import sides
    import torch

    torch.set_num_threads(1)
    place = Path(place)
    engine = dense_engine(base) if dense else sides.fake_engine(base)
    scheme = sides.make_scheme(rpc, transfer, place, timeout_s)
    side = scheme.create_receiver(engine)
    if stall_at:
        hold_receiver(side, scheme, stall_at)
    with sides.torch_world(1, place) if rpc == "torch" else contextlib.nullcontext():
        if rpc == "ray":
            import ray

            ray.init(address="auto", namespace="qlora-rl-tests", log_to_driver=False)
        tell("listening")
        started = time.monotonic()
        try:
            side.init_all_workers_group()
            tell("joined", version=side.version)
            applied = 0
            while applied < pushes:
                started = time.monotonic()
                before = side.version
                is_new = side.poll_and_apply(0.2)
                assert is_new == (side.version != before)
                if is_new:
                    applied += 1
                    tell("applied", version=side.version, logprobs=engine.score(sides.PROBE))
        except Exception as error:
            tell(
                "error",
                type=type(error).__name__,
                stage=getattr(error, "stage", ""),
                text=str(error),
                seconds=time.monotonic() - started,
                version=engine.version,
                logprobs=engine.score(sides.PROBE),
            )
        if rpc == "torch":
            time.sleep(1.0)  # answers of torch's agent are still on their way
        side.shutdown()
    tell("done")


def dense_engine(base):
    """An engine without adapters that takes full weights, in plain torch."""
    import sides

    return sides.DenseFake(base)


def hold_receiver(side, scheme, stage: str) -> None:
    """Stay for ever at a stage, to be killed there."""
    kept = dict(side._METHODS)

    def holding(method):
        def held(self, question):
            stall(stage)
            return kept[method](self, question)

        return held

    def receive(ticket, body):
        stall(stage)
        yield from ()

    if stage == "join":
        side._METHODS = kept | {"describe_base": holding("describe_base")}
    elif stage == "transfer":
        scheme.transfer.receive = receive
    elif stage == "apply":
        deliver = "deliver"

        def agreed(self, question):
            value = kept["agree"](self, question)
            setattr(self._transport, deliver, lambda *_: stall(stage))
            return value

        side._METHODS = kept | {"agree": agreed}
    elif stage == "prove":
        side._METHODS = kept | {"held_adapter": holding("held_adapter")}
    elif stage == "commit":
        side._METHODS = kept | {"commit": holding("commit")}
    elif stage == "begin":

        def admitted(self, question):
            kept["admit"](self, question)
            side._begin = lambda question: stall(stage)

        side._METHODS = kept | {"admit": admitted}


def sender(base, rpc, transfer, place, timeout_s=60.0, pushes=1, stall_at="", seed=0, **_) -> None:
    """Pushes a policy that moves, and tells its logprobs after each push."""
    import sides
    import torch

    torch.set_num_threads(1)
    place = Path(place)
    model = sides.policy(base, seed)
    scheme = sides.make_scheme(rpc, transfer, place, timeout_s)
    side = scheme.create_sender()
    side.register_model(model)
    if stall_at:
        hold_sender(side, scheme, stall_at)
    with sides.torch_world(0, place) if rpc == "torch" else contextlib.nullcontext():
        side.init_all_workers_group()
        tell("joined")
        for push in range(pushes):
            sides.move(model, seed + push)
            report = side.update_weights()
            tell("pushed", version=report.version, logprobs=sides.trainer_logprobs(model))
        side.shutdown()
    tell("done")


def hold_sender(side, scheme, stage: str) -> None:
    ask, begin = side._asking.ask, side._asking.begin

    def asked(method, *args, **content):
        if (stage, method) in {("join", "agree"), ("prove", "held_adapter"), ("commit", "commit"), ("end", "end")} and (
            stage != "end" or side.admission is not None and side._asking.stage == "end"
        ):
            stall(stage)
        answer = ask(method, *args, **content)
        if stage == "begin" and method == "begin" and content["purpose"] == "push":
            stall(stage)
        return answer

    def begun(method, *args, **content):
        waits = begin(method, *args, **content)
        if stage == "transfer" and method == "apply":
            stall(stage)
        return waits

    side._asking.ask, side._asking.begin = asked, begun


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
