"""What the other process of a test does; imported once by the server that forks it."""

from __future__ import annotations

import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import bitsandbytes  # noqa: F401
import peft  # noqa: F401
import sides
import torch
import transformers.integrations.bitsandbytes
import transformers.models.qwen2.modeling_qwen2
import transformers.quantizers.quantizer_bnb_4bit  # noqa: F401

import qlora_rl.base.checkpoint
import qlora_rl.engine.fake
import qlora_rl.sync.transports
import qlora_rl.torchrl.scheme
import qlora_rl.torchrl.transfer  # noqa: F401
from qlora_rl import PeerLostError, QloraRLError

_EVENTS = []


def run(act, settings, events) -> None:
    """The whole of a side's life."""
    torch.set_num_threads(1)
    _EVENTS.append(events)
    ACTS[act](**settings)
    tell("done")


def tell(event: str, **facts) -> None:
    _EVENTS[0].send({"event": event, **facts})


def choose_gpu(rank):
    """Under NCCL each process has a GPU of its own."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())


def stall(stage: str) -> None:
    """Say where, and stay there until killed."""
    tell("stalled", stage=stage)
    time.sleep(600)


def receiver(base, transfer, place, timeout_s=60.0, pushes=1, stall_at="", dense=False, quiet=False, **_) -> None:
    """Serves `pushes` pushes and tells the logprobs after each; `quiet`: only which they were, at the end."""
    place = Path(place)
    engine = sides.dense_engine(base) if dense else sides.fake_engine(base)
    scheme = sides.make_scheme(transfer, place, timeout_s)
    side = scheme.create_receiver(engine)
    if stall_at:
        hold_receiver(side, scheme, stall_at)
    choose_gpu(1)
    tell("listening")
    is_joined, applied, known, idle, seen = False, 0, 0, 0, []
    while applied < pushes:
        started = time.monotonic()
        try:
            if not is_joined:
                side.init_all_workers_group()
                is_joined = True
                tell("joined", version=side.version)
            elif side.poll_and_apply(0.002 if quiet else 0.2):
                assert side.version > known  # never the same one twice
                applied, known = applied + 1, side.version
                seen.append(known)
                if not quiet:
                    tell("applied", version=side.version, logprobs=engine.score(sides.PROBE))
            else:
                assert side.version == engine.version == known  # nothing was applied
                idle += 1
        except QloraRLError as error:
            tell(
                "error",
                type=type(error).__name__,
                stage=getattr(error, "stage", ""),
                text=str(error),
                seconds=time.monotonic() - started,
                version=engine.version,
                held=engine.held_adapter(8),
            )
            if not isinstance(error, PeerLostError):
                break
    if quiet:
        assert not side.poll_and_apply(0.0)  # there is nothing more
        idle += 1
        tell("counted", versions=seen, idle=idle)
    side.shutdown()


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

        def agreed(self, question):
            value = kept["agree"](self, question)
            self._transport.deliver = lambda *_: stall(stage)
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


def sender(
    base, transfer, place, timeout_s=60.0, pushes=1, stall_at="", seed=0, dense=False, quiet=False, every=1, **_
) -> None:
    """Pushes a policy that moves, and tells its logprobs after each push; `quiet`: after the last."""
    place = Path(place)
    model = sides.policy(base, seed, modules_to_save=["norm"] if dense else None)
    with model.disable_adapter():
        bare = sides.trainer_logprobs(model)
    scheme = sides.make_scheme(transfer, place, timeout_s, canary_every=50 if quiet else every)
    side = scheme.create_sender()
    side.register_model(model)
    if stall_at:
        hold_sender(side, scheme, stall_at)
    choose_gpu(0)
    try:
        side.init_all_workers_group()
        tell("joined")
        for push in range(pushes):
            sides.move(model, seed + push)
            report = side.update_weights()
            if not quiet or push + 1 == pushes:
                tell("pushed", version=report.version, logprobs=sides.trainer_logprobs(model), bare=bare)
    except QloraRLError as error:
        tell("error", type=type(error).__name__, stage=getattr(error, "stage", ""), text=str(error))
    side.shutdown()


def hold_sender(side, scheme, stage: str) -> None:
    ask, begin = side._asking.ask, side._asking.begin

    before = {"join": "agree", "prove": "held_adapter", "commit": "commit", "end": "end"}

    def asked(method, *args, **content):
        if before.get(stage) == method and (method != "end" or side._asking.stage == "end"):
            stall(stage)
        answer = ask(method, *args, **content)
        if stage == "begin" and content.get("purpose") == "push":
            stall(stage)
        return answer

    def begun(method, *args, **content):
        waits = begin(method, *args, **content)
        if stage == "transfer" and method == "apply":
            stall(stage)
        return waits

    side._asking.ask, side._asking.begin = asked, begun


ACTS = {"receiver": receiver, "sender": sender}
