"""`AdapterReceiver`: the sampler's side, with the method names of TorchRL's `VLLMWeightReceiver`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch

from qlora_rl.contracts import AdapterBundle, RolloutEngine
from qlora_rl.errors import ConfigConflictError, PeerLostError, QloraRLError, SyncError
from qlora_rl.sync.transports import transport_for
from qlora_rl.torchrl import metadata as md
from qlora_rl.torchrl.messages import Message, NotJoinedError, Terms, lost, pack_error, unpack_error

logger = logging.getLogger(__name__)


class AdapterReceiver:
    """Answers a sender's requests to an engine, and applies its pushes. Created by `AdapterSyncScheme.create_receiver`.

    A version is on trial until the sender has verified it. If the sender is lost before that, the previous version
    serves again.

    Attributes:
        version: the newest that was verified; 0 before the first.
        weights: its tensors by canonical name, where it was an adapter.
    """

    def __init__(self, scheme: Terms, engine: RolloutEngine):
        self._scheme = scheme
        self._engine: Any = engine  # a DenseEngine, where full weights come
        self._channel: Any = None
        self._serving = threading.RLock()
        self._session = ""  # that was admitted
        self._open = ""  # the session in the middle of a join or a push
        self._stage = "join"
        self._rejection: QloraRLError | None = None
        self._asked_for: md.Metadata | None = None
        self._agreed: md.Metadata = {}
        self._transport: Any = None
        self._trial: tuple[int, str, Mapping[str, torch.Tensor]] | None = None
        self._applied = self._reported = 0
        self.version = 0
        self.weights: Mapping[str, torch.Tensor] = {}

    def init_all_workers_group(self, model_metadata: md.Metadata | None = None) -> None:
        """Join the sender, which must do the same within the time limit.

        With `InProcessRPC` nothing is waited for: the sender's own call does both sides' work.

        Args:
            model_metadata: what this side expects; what the sender has is taken where it is left out.

        Raises:
            BaseMismatchError, ConfigConflictError, ...: what the sender raises too.
            PeerLostError: there was no sender, or it was lost.
        """
        self._asked_for = model_metadata
        if self._channel is None:
            self._channel = self._scheme.rpc.listen()
        serve_in_turn = getattr(self._scheme.rpc, "serve_in_turn", None)
        if serve_in_turn is not None:
            serve_in_turn(self._take_turn)
            return
        deadline = time.monotonic() + self._scheme.timeout_s
        with self._serving:
            while not self._session:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise lost("join", "sender", f"has not come for {self._scheme.timeout_s:g} s")
                self._serve(left)
                self._raise_rejection()

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Wait `timeout` seconds for a push to begin; one that has begun is served to its end.

        Returns:
            True exactly when a version was applied and verified since the last call.

        Raises:
            PeerLostError: the sender was lost in the middle of a push; names the stage. The version before serves, and
                the next sender is waited for by the next call.
        """
        if self._channel is None:
            raise SyncError("polling: there is no channel yet. Call init_all_workers_group() first.")
        with self._serving:
            # What a sender of this process has applied in its own thread is reported at once.
            self._serve(timeout if self._applied == self._reported else 0.0)
            self._raise_rejection()
            is_new, self._reported = self._applied != self._reported, self._applied
            return is_new

    def shutdown(self) -> None:
        """Stop listening; the engine goes on serving."""
        with self._serving:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
                getattr(self._scheme.rpc, "serve_in_turn", lambda _: None)(None)
            if self._transport is not None:
                self._transport.close()
                self._transport = None
            self._scheme.transfer.close()
            self._session = ""

    def _serve(self, timeout: float) -> None:
        """One question, or all those of a join or a push; nothing, if none comes in time."""
        try:
            message = self._channel.receive(timeout)
        except OSError as error:
            logger.info("the sender has left: %s", error)
            return
        while message is not None:
            self._handle(Message.decode(message))
            if not self._open:
                return
            try:
                message = self._channel.receive(self._scheme.timeout_s)
            except OSError as error:
                raise self._abandoned(f"is gone ({error})") from error
        if self._open:
            raise self._abandoned(f"has been silent for {self._scheme.timeout_s:g} s")

    def _take_turn(self) -> None:
        """In the thread of a sender that waits: answer what is there, wait for nothing."""
        if self._channel is None or not self._serving.acquire(blocking=False):
            return  # another thread of this process polls
        try:
            while (message := self._channel.receive(0.0)) is not None:
                self._handle(Message.decode(message))
        finally:
            self._serving.release()

    def _handle(self, question: Message) -> None:
        try:
            if question.method == "begin":
                value = self._begin(question)
            elif question.session != self._open:
                raise NotJoinedError(
                    "answering: this receiver was started after that session had begun. Join it again."
                )
            else:
                value = self._METHODS[question.method](self, question)
            answer: dict[str, Any] = {"value": value}
        except PeerLostError:
            raise  # found while it was being served: no sender to answer
        except Exception as error:  # every failure is sent to the sender, which raises it
            if not isinstance(error, QloraRLError):
                logger.exception("serving %r has failed", question.method)
            answer = {"error": pack_error(error)}
        try:
            reply = Message(question.session, question.number, "", answer)
            self._channel.send(reply.encode(), self._scheme.timeout_s)
        except OSError as error:
            if self._open:
                raise self._abandoned(f"is gone ({error})") from error

    def _begin(self, question: Message) -> dict[str, Any]:
        purpose = question.content["purpose"]
        if self._open:
            logger.warning("another sender joined during stage %r", self._stage)
            self._take_back("its sender was lost")
        if purpose != "join" and question.session != self._session:
            self._open = ""
            raise NotJoinedError("beginning a push: this receiver does not know that session. Join it first.")
        self._open, self._stage = question.session, "join" if purpose == "join" else "begin"
        return {"version": self._engine.version}

    def _agree(self, question: Message) -> None:
        proposed = md.from_json(question.content["metadata"])
        if self._asked_for is not None and (differs := md.difference(self._asked_for, proposed)):
            raise ConfigConflictError(
                f"agreeing on metadata: {differs}, at the sender. Give both sides get_model_metadata of one model and "
                "dtype, or none."
            )
        self._scheme.transfer.accept(question.content["offer"])
        self._agreed = proposed
        wanted = question.content["transport"]  # empty where full weights are sent
        if wanted and self._transport is None:
            self._transport = transport_for(wanted)

    def _admit(self, question: Message) -> None:
        self._session = question.session

    def _reject(self, question: Message) -> None:
        self._session, self._rejection = "", unpack_error(question.content["error"])

    def _apply(self, question: Message) -> dict[str, Any]:
        started = time.perf_counter()
        content, self._stage = question.content, "transfer"
        version, kind = int(content["version"]), content["kind"]
        arriving = self._scheme.transfer.receive(content["ticket"], question.body)
        try:
            if kind == "dense":
                nbytes = self._engine.load_dense(checked(arriving, self._agreed), version)
                self._trial = (version, kind, {})
            else:
                tensors = dict(checked(arriving, self._agreed))
                nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
                self._stage, started = "apply", time.perf_counter()
                bundle = AdapterBundle(tensors, content["config"])
                self._transport.deliver(Received(bundle), version, self._engine)
                self._trial = (version, kind, tensors)
        except ConnectionError as error:
            raise self._abandoned(f"is gone ({error})") from error
        except BaseException:
            _drain(arriving)  # a sender in the middle of a collective waits for all of it to be taken
            raise
        self._stage = "prove"
        return {"nbytes": nbytes, "seconds": time.perf_counter() - started}

    def _commit(self, question: Message) -> None:
        if self._trial is None or self._trial[0] != question.content["version"]:
            raise SyncError(f"committing version={question.content['version']}: it is not on trial here. Push again.")
        version, kind, tensors = self._trial
        self._trial, self._stage = None, "commit"
        if kind == "adapter":
            self._transport.commit()
        self._note(version, tensors)

    def _end(self, question: Message) -> None:
        self._take_back("its push was given up")
        self._open, self._stage = "", "begin"

    def _note(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self.version, self.weights = version, tensors
        self._applied += 1

    def _take_back(self, why: str) -> None:
        """What is on trial must not serve."""
        if self._trial is None:
            return
        (version, kind, _), self._trial = self._trial, None
        reason = f"version={version} was not verified: {why}"
        if kind == "dense":
            self._engine.withdraw_dense(reason)
            return
        try:
            self._transport.revoke(self._engine, version)
        except BaseException:
            logger.exception(
                "version %d could not be taken back; the engine serves nothing until the next push", version
            )
            self._engine.withdraw_adapter(reason)

    def _revoke(self, question: Message) -> None:
        self._take_back("the sender revoked it")

    def _withdraw(self, question: Message) -> None:
        self._trial = None
        getattr(self._engine, question.method)(question.content["reason"])

    def _abandoned(self, why: str) -> PeerLostError:
        stage, self._open, self._stage = self._stage, "", "begin"
        if stage == "join":
            self._session = ""
        self._take_back("its sender was lost")
        return lost(stage, "sender", why)

    def _raise_rejection(self) -> None:
        if self._rejection is not None and not self._open:
            rejection, self._rejection = self._rejection, None
            raise rejection

    _METHODS: Mapping[str, Callable[[AdapterReceiver, Message], Any]] = {
        "capabilities": lambda self, q: asdict(self._engine.capabilities()),
        "describe_base": lambda self, q: self._engine.describe_base().as_dict(),
        "repair_base": lambda self, q: dict(self._engine.repair_base()),
        "incarnation": lambda self, q: self._engine.incarnation,
        "holds_dense": lambda self, q: self._engine.holds_dense,
        "score": lambda self, q: self._engine.score(q.content["sequences"], bare=q.content["bare"]),
        "held_adapter": lambda self, q: dict(self._engine.held_adapter(q.content["rank"])),
        "agree": _agree,
        "admit": _admit,
        "reject": _reject,
        "apply": _apply,
        "commit": _commit,
        "revoke": _revoke,
        "withdraw_adapter": _withdraw,
        "withdraw_dense": _withdraw,
        "end": _end,
    }


def _drain(arriving: Iterator[Any]) -> None:
    try:
        for _ in arriving:
            pass
    except (OSError, QloraRLError) as error:
        logger.info("the rest of a rejected push did not arrive: %s", error)


class Received:
    """An `AdapterSource` that was made elsewhere: all of its numbers are there already."""

    def __init__(self, bundle: AdapterBundle):
        self._bundle = bundle

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """Name and R of every module."""
        return tuple((name, self._bundle.rank) for name in self._bundle.modules)

    def bundle(self) -> AdapterBundle:
        """As it arrived."""
        return self._bundle

    @torch.no_grad()
    def write_into(self, places: Mapping[str, torch.Tensor]) -> int:
        """Copy it into `places`, whose ranks may be larger: the rest stays zero; returns bytes."""
        for name, tensor in self._bundle.tensors.items():
            rows, columns = tensor.shape
            places[name][:rows, :columns].copy_(tensor)
        return self._bundle.nbytes


def checked(parts: Iterator[tuple[str, torch.Tensor]], agreed: md.Metadata) -> Iterator[tuple[str, torch.Tensor]]:
    """`parts`, each compared with what was agreed on.

    Raises:
        SyncError: one is something else, comes twice, or is missing at the end.
    """
    missing = dict(agreed)
    for name, tensor in parts:
        if missing.pop(name, None) != (tensor.dtype, tensor.shape):
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise SyncError(
                f"receiving weights: {name} ({found}) is not what both sides agreed on, or comes twice. Call "
                "init_all_workers_group() again after changing the adapter.",
                module=name.rpartition(".")[0],
            )
        yield name, tensor
    if missing:
        raise SyncError(f"receiving weights: {len(missing)} are missing, first {next(iter(missing))}. Push again.")
