"""`Service`: requests of many clients, in order for each model and in turns between clients.

One thread trains: a micro-batch of whoever was served least recently, so that neither a long request nor a client with
many of them holds up another's step. A few threads sample; what they ask shares vLLM's batches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import secrets
import shutil
import sqlite3
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from qlora_rl.contracts import Rollout, SamplingSpec
from qlora_rl.errors import (
    ConfigConflictError,
    EngineBrokenError,
    EngineClosedError,
    QloraRLError,
    RolloutCancelledError,
    SyncError,
    VersionGoneError,
)
from qlora_rl.tinker.journal import Journal, Row, metadata_of
from qlora_rl.tinker.messages import PassRequest, pack_passed, pack_sampled
from qlora_rl.train.adapters import Adapters
from qlora_rl.train.scoring.losses import TokenLoss

logger = logging.getLogger(__name__)

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
# Samplers of one model that nobody has named; older ones go.
KEPT_SAMPLERS = 8
# Results of sampling that are kept: how many, and bytes. What is gone is sampled again when a client asks.
_RESULTS, _RESULT_BYTES = 4096, 2**28
# Tokens of prompts of one client that wait to be sampled, and what a request counts on top of its prompt.
_MOST_WAITING, _REQUEST_TOKENS = 2**21, 256
# Characters of an error.
_MOST_SAID = 4000
# Until a request is given up because one with a smaller number has not come.
GAP_S = 60.0
# Without a sign of life of its client, until a session's models leave memory; the client sends one every 10 s.
LAPSE_S = 120.0
# Until a request whose result could not be noted is computed again.
_RETRY_S = 5.0
# From one look at checkpoints that may have expired to the next, in turns in which nothing else is to be done.
_SWEEP_S = 60.0
_SAMPLING_THREADS = 16
# What changes weights or gradients, with its states: it is made again after a model was read from disk.
_MADE_AGAIN = {("pass", "done"), ("optim_step", "done"), ("optim_step", "failed")}
# Requests after whose failure a model is read from disk again: they may have changed what is in memory.
_CHANGES = ("create_model", "open_model", "optim_step", "load_weights")

Result = tuple[str, bytes]
"""A form ("json", "proto", "failed"; "again" is no result, and the client asks again) and what is sent."""


@dataclass(eq=False)
class _Line:
    """The requests of one model that wait.

    Attributes:
        name: of its adapter while that is in memory; another one each time, so that nothing takes it for the one
            before.
        done: number of the last request that is over, and all before it.
        void: numbers behind that which have failed because one before them is missing.
        current: the one that is computed, micro-batch by micro-batch.
        served: when it had its last turn, in turns.
        not_before: time of its next turn, after the journal has failed.
    """

    id: str
    session: str
    owner: str
    done: int = -1
    void: set[int] = field(default_factory=set)
    name: str = ""
    waiting: dict[int, str] = field(default_factory=dict)
    current: Iterator[Result | None] | None = None
    served: int = 0
    gap_since: float = 0.0
    not_before: float = 0.0


class Service:
    """What the routes ask.

    Args:
        adapters: on the base.
        journal: in whose directory everything is saved, too; it is closed with this.
        model_name: that clients call the base.
        every: optimizer steps from one saved state to the next; those behind the last one are computed again after the
            server was killed.
        lapse_s: without a sign of life of its client, until what a session holds in memory and in the engine is freed.
    """

    def __init__(
        self, adapters: Adapters, journal: Journal, model_name: str, every: int = 1, lapse_s: float = LAPSE_S
    ) -> None:
        self.adapters, self.journal, self.model_name, self.every = adapters, journal, model_name, every
        self.root, self._lapse_s = journal.directory, lapse_s
        self._changed = threading.Condition(threading.RLock())
        self._lines: dict[str, _Line] = {}
        self._futures: dict[tuple[str, int], Future[Result]] = {}
        self._sampled: OrderedDict[str, tuple[str, Future[Result], bytes]] = OrderedDict()
        self._to_sample: dict[tuple[str, str], list[tuple[str, Row, Any]]] = {}
        self._waiting = Counter[str]()  # tokens that wait to be sampled, by client
        self._sampling: dict[int, str] = {}  # threads that sample, and for which session
        self._seen: dict[str, float] = {}  # sessions, and when their clients gave a sign of life; others are gone
        self._asked = Counter[str]()  # when a client, or a session, had its last turn
        self._live: dict[str, tuple[str, int]] = {}  # what a directory holds: name of its adapter, and version
        self._turns, self._results, self._result_bytes, self._is_closed = 0, 0, 0, False
        self._swept = time.monotonic()
        self._recall()
        self._threads = [threading.Thread(target=self._train, name="tinker-train", daemon=True)]
        self._threads += [
            threading.Thread(target=self._sample_all, name=f"tinker-sample-{i}", daemon=True)
            for i in range(_SAMPLING_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def _recall(self) -> None:
        """Take up what a server before has left."""
        self._seen = {row["id"]: time.monotonic() for row in self.journal.rows("sessions", ended=0)}
        for model in self.journal.rows("models"):
            line = self._lines[model["id"]] = _Line(model["id"], model["session"], model["owner"], model["done"])
            for row in self.journal.noted(line.id, line.done + 1, 2**31):
                if row["state"] == "void":
                    line.void.add(row["seq"])
                else:
                    line.waiting[row["seq"]] = row["kind"]
                    self._futures[line.id, row["seq"]] = Future()
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Remove what was written and is nowhere noted; nothing else is being written meanwhile."""
        known = {row["directory"] for table in ("saved", "samplers") for row in self.journal.rows(table)}
        known |= {model["state"] for model in self.journal.rows("models")}
        for place in (self.root / "stored").glob("*"):
            if place.name not in known:
                shutil.rmtree(place, ignore_errors=True)

    def dead(self) -> list[str]:
        """Threads that have ended, which none does while the server is open."""
        return [thread.name for thread in self._threads if not thread.is_alive()]

    # What clients ask, in threads of the server.

    def begin_session(self, owner: str) -> str:
        """A new session of the client that has this key."""
        session = secrets.token_hex(8)
        self.journal.put("sessions", id=session, owner=owner)
        self._note_life(session)
        return session

    def session(self, session: str, owner: str) -> Row:
        """A session of this client, which lives unless it is finished.

        Raises:
            LookupError: it has none of that name.
        """
        found = self._known("sessions", "session", id=session, owner=owner)
        if not found["ended"]:
            self._note_life(session)
        return found

    def end_session(self, session: str, owner: str) -> None:
        """The client needs nothing more of it in memory."""
        self.session(session, owner)
        self.journal.change("sessions", {"id": session}, ended=1)
        with self._changed:
            self._seen.pop(session, None)

    def _note_life(self, session: str) -> None:
        with self._changed:
            self._seen[session] = time.monotonic()

    def model(self, model: str, owner: str) -> Row:
        """A model of this client, whose session lives.

        Raises:
            LookupError: it has none of that name.
        """
        found = self._known("models", "model", id=model, owner=owner)
        self._note_life(found["session"])
        return found

    def sampler(self, sampler: str, owner: str) -> Row:
        """A sampling session of this client, whose session lives.

        Raises:
            LookupError: it has none of that name.
        """
        found = self._known("samplers", "sampling session", id=sampler, owner=owner)
        self._note_life(found["session"])
        return found

    def saved(self, path: str, owner: str) -> Row:
        """Saved weights of this client, by their tinker path, which is compared as a whole and never a file's.

        Raises:
            LookupError: it has none of that path, or they have expired.
        """
        found = self._known("saved", "checkpoint", path=path, owner=owner)
        if _has_expired(found):
            self.forget(found)
            raise LookupError(f"there is no checkpoint {path!r} of yours any more: it has expired")
        return found

    def checkpoints(self, model: str, owner: str) -> list[Row]:
        """Saved weights of a model of this client that have not expired, the oldest first.

        Raises:
            LookupError: there is no such model.
        """
        self.model(model, owner)
        found = self.journal.rows("saved", order="made", model=model, owner=owner)
        return [row for row in found if not _has_expired(row)]

    def _known(self, table: str, noun: str, **where: Any) -> Row:
        if (found := self.journal.row(table, **where)) is None:
            raise LookupError(f"there is no {noun} {next(iter(where.values()))!r} of yours")
        return found

    def forget(self, saved: Row) -> None:
        """Remove saved weights."""
        self.journal.remove("saved", path=saved["path"])
        self._live.pop(saved["directory"], None)
        self._remove_unread(saved["directory"])

    def _remove_unread(self, directory: str) -> None:
        """Remove the files of weights that are saved no longer, unless a living session has a sampler of them."""
        if not any(row["session"] in self._seen for row in self.journal.rows("samplers", directory=directory)):
            shutil.rmtree(self.root / "stored" / directory, ignore_errors=True)

    def create(self, session: str, owner: str, number: int, kind: str, body: bytes, metadata: Any) -> tuple[str, int]:
        """Note a new model, as its request 0 says; its name, which is known before it is made."""
        self.session(session, owner)
        model = f"{session}:train:{number}"
        self.journal.put("models", id=model, session=session, owner=owner, metadata=metadata_of(metadata))
        return self.submit(model, owner, 0, kind, body)

    def submit(
        self, model: str, owner: str, seq: int, kind: str, body: bytes, same: bytes | None = None
    ) -> tuple[str, int]:
        """Note a request of a model, as `Journal.submit` does; it is on disk when this returns.

        Raises:
            LookupError: there is no such model of this client.
            ConfigConflictError: its number is none, or another one's.
        """
        if not 0 <= seq < 2**31 or (seq == 0) != (kind in ("create_model", "open_model")):
            raise ConfigConflictError(f"taking a request: seq_id={seq} is no number of a {kind}.")
        found = self.model(model, owner)
        with self._changed:
            line = self._lines.setdefault(model, _Line(model, found["session"], owner))
            late = _failed(f"taking a request: request {line.done} of this model is over already.", "user")[1]
            is_new = self.journal.submit(model, seq, kind, body, same, late if seq <= line.done else None)
            if is_new and seq > line.done:
                self._futures[model, seq] = Future()
                line.waiting[seq] = kind
                self._changed.notify_all()
        return model, seq

    def future(self, request: str, owner: str) -> Future[Result]:
        """What comes of a request, by the number that was given to it.

        Raises:
            LookupError: there is no such request of this client; sampling is forgotten when the server ends.
        """
        if request in self._sampled:
            whose, future, _ = self._sampled[request]
            if whose == owner:
                self._note_life(request.partition(":")[0])
                return future
        model, _, seq = request.rpartition("#")
        if not seq.isdecimal() or len(seq) > 10:
            raise LookupError(f"there is no request {request!r} of yours")
        self.model(model, owner)
        with self._changed:
            if (future := self._futures.get((model, int(seq)))) is not None:
                return future
        row = self._known("requests", "request", model=model, seq=int(seq))
        found: Future[Result] = Future()
        found.set_result((row["form"], row["result"]))
        return found

    def open_sampler(self, session: str, owner: str, number: int, path: str | None) -> str:
        """A sampling session of saved weights, or of the base.

        Raises:
            LookupError: there is no such session, or path, of this client.
            ConfigConflictError: its number is that of one with other weights.
        """
        self.session(session, owner)
        saved = {"model": "", "directory": ""} if path is None else self.saved(path, owner)
        return self._add_sampler(session, owner, number, saved["model"], saved["directory"], path or "", -1)

    def _add_sampler(
        self, session: str, owner: str, number: int, model: str, directory: str, path: str, seq: int
    ) -> str:
        sampler = f"{session}:sample:{number}"
        fields: Row = {"id": sampler, "session": session, "owner": owner, "model": model}
        fields |= {"directory": directory, "path": path, "seq": seq}
        if not self.journal.put("samplers", **fields) and self.journal.row("samplers", **fields) is None:
            raise ConfigConflictError(
                f"opening a sampler: sampling_session_seq_id={number} is that of one with other weights. Count on."
            )
        return sampler

    def sample(self, sampler: str, owner: str, seq: int, asked: Any) -> str:
        """Have something sampled; asked again with the same number, it is the same.

        Raises:
            LookupError: there is no such sampler of this client.
            ConfigConflictError: something else was asked with this number, or the prompt is too long.
            queue.Full: too much of this client waits.
        """
        found = self.sampler(sampler, owner)
        if (count := len(asked.prompt_ids())) > (most := self.adapters.max_model_length):
            raise ConfigConflictError(f"sampling: the prompt has {count} tokens, and a model takes {most}.")
        request = f"{sampler}#{seq}"
        digest = hashlib.sha256(asked.model_dump_json().encode()).digest()
        with self._changed:
            if request not in self._sampled:
                if (waiting := self._waiting[owner]) > _MOST_WAITING:
                    raise queue.Full(f"sampling: {waiting} tokens of prompts wait already. Ask again later.")
                self._waiting[owner] += _REQUEST_TOKENS + count
                future: Future[Result] = Future()
                self._sampled[request] = owner, future, digest
                self._forget_results()
                self._to_sample.setdefault((owner, found["session"]), []).append((request, found, asked))
                self._changed.notify_all()
            elif self._sampled[request][2] != digest:
                raise ConfigConflictError(f"sampling: something else was asked with seq_id={seq}. Count on.")
        return request

    def _forget_results(self) -> None:
        def are_too_many() -> bool:
            return self._results > _RESULTS or self._result_bytes > _RESULT_BYTES

        if are_too_many():
            for request, (_, future, _) in list(self._sampled.items()):  # the oldest first
                if future.done() and are_too_many():
                    self._results, self._result_bytes = self._results - 1, self._result_bytes - len(future.result()[1])
                    del self._sampled[request]

    # Sampling.

    def _sample_all(self) -> None:
        while True:
            with self._changed:
                while not (self._to_sample or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                turn = min(self._to_sample, key=lambda each: [self._asked[of] for of in each])
                self._turns += 1
                self._asked |= dict.fromkeys(turn, self._turns)
                request, sampler, asked = self._to_sample[turn].pop(0)
                if not self._to_sample[turn]:
                    del self._to_sample[turn]
                self._count_out(turn[0], asked)
                self._sampling[threading.get_ident()] = sampler["session"]
            result = self._result_of(lambda s=sampler, a=asked: self._sample(s, a))
            with self._changed:
                del self._sampling[threading.get_ident()]
                self._note_sampled(request, result)

    def _count_out(self, owner: str, asked: Any) -> None:
        self._waiting[owner] -= _REQUEST_TOKENS + len(asked.prompt_ids())

    def _note_sampled(self, request: str, result: Result) -> None:
        _, future, _ = self._sampled[request]
        if result[0] == "again":  # whoever still wants it asks again
            del self._sampled[request]
        else:
            self._results, self._result_bytes = self._results + 1, self._result_bytes + len(result[1])
        future.set_result(result)

    def _sample(self, sampler: Row, asked: Any) -> Result:
        prompt, sampling = asked.prompt_ids(), asked.spec(self.adapters.max_model_length)
        rollout = self._from(sampler, lambda **of: self._rollout([prompt] * asked.num_samples, sampling, **of))
        scored = None
        if asked.prompt_logprobs:
            scores = self._from(sampler, lambda **of: self.adapters.score([prompt], **of))[0]
            first = max(0, len(scores) - (asked.prompt_logprobs_last_n or len(scores)))
            scored = [float("nan")] * (first + 1) + scores[first:]
        return "proto", pack_sampled(rollout, scored)

    def _rollout(self, prompts: Sequence[Any], sampling: SamplingSpec, **of: Any) -> Rollout:
        if "directory" in of:
            return self.adapters.sample_saved(of["directory"], prompts, sampling)
        name = of.get("name")
        return self.adapters.sample({name: prompts}, sampling, version=of.get("version"))[name]

    def _from(self, sampler: Row, ask: Any) -> Any:
        """Ask with the sampler's adapter where the engine holds that version, else out of its directory."""
        if not sampler["directory"]:
            return ask()
        name, version = self._live.get(sampler["directory"], ("", 0))
        if name in self.adapters:
            try:
                return ask(name=name, version=version)
            except RolloutCancelledError:
                if self._is_closed or sampler["session"] not in self._seen:
                    raise
                # Its model has left memory for another one.
            except (VersionGoneError, ConfigConflictError, EngineBrokenError, EngineClosedError):
                pass
        directory = self.root / "stored" / sampler["directory"]
        if not directory.is_dir():
            raise ConfigConflictError(
                f"sampling: the weights of {sampler['id']} are gone: they were removed or have expired, and of "
                f"samplers without a name the newest {KEPT_SAMPLERS} of a model are kept. Use "
                "save_weights_for_sampler(name)."
            )
        return ask(directory=directory)

    def _result_of(self, work: Any, later: tuple[type[Exception], ...] = ()) -> Result:
        """What comes of it; `later` are raised: the disk may be full, and the same will do at another time."""
        try:
            return work()
        except RolloutCancelledError as error:  # the server ends
            return "again", _failed(str(error), "server")[1]
        except (QloraRLError, LookupError, ValueError) as error:
            is_ours = isinstance(error, EngineBrokenError | SyncError)
            return _failed(str(error), "server" if is_ours else "user")
        except Exception as error:
            if isinstance(error, later) and not isinstance(error, FileNotFoundError):
                raise
            logger.exception("a request failed")
            return _failed(f"{type(error).__name__}: {error}", "server")

    # Training, in its thread.

    def _train(self) -> None:
        while (line := self._next()) is not None:
            self._turns += 1
            line.served = self._turns
            try:
                self._advance(line)
            except Exception as error:  # neither journal nor weights can be written
                logger.exception("a request is computed again")
                self._put_off(line, error)

    def _put_off(self, line: _Line, error: Exception) -> None:
        """Compute a request again later, from what is on disk; until then it waits, as after a kill."""
        with self._changed:
            line.current, line.not_before = None, time.monotonic() + _RETRY_S
            seq = min(line.waiting)
            said = f"computing a request: {type(error).__name__}: {error}. It is computed again."
            self._futures[line.id, seq].set_result(("again", _failed(said, "server")[1]))
            self._futures[line.id, seq] = Future()
        with contextlib.suppress(Exception):  # of an engine that is broken too
            self._leave_memory(line)
        with contextlib.suppress(sqlite3.Error):
            self._remove_unfinished()

    def _leave_memory(self, line: _Line) -> None:
        """All that it is, is on disk. What is sampled from it begins again, out of its directory."""
        name, line.name = line.name, ""
        if name in self.adapters:
            self.adapters.drop(name, wait=False)

    def _forget_the_gone(self) -> None:
        """End what is sampled for sessions without a sign of life; their models leave memory when they have nothing
        more to compute, which is what was asked before. Should a client come back, it finds all as it was."""
        with self._changed:
            until = time.monotonic() - self._lapse_s
            self._seen = {session: seen for session, seen in self._seen.items() if seen > until}
            for turn in [turn for turn in self._to_sample if turn[1] not in self._seen]:
                for request, _, asked in self._to_sample.pop(turn):
                    self._count_out(turn[0], asked)
                    self._note_sampled(request, ("again", b""))
            lost = [thread for thread, session in self._sampling.items() if session not in self._seen]
            gone = [line for line in self._lines.values() if line.name and line.session not in self._seen]
            idle = [line for line in gone if line.current is None and line.done + 1 not in line.waiting]
            if lost:
                self.adapters.engine.cancel(lost)
        for line in idle:
            logger.warning("session %s is silent or finished: %s leaves memory", line.session, line.id)
            try:
                self._leave_memory(line)
            except Exception:  # of an engine that is broken: whoever asks it next is told
                logger.exception("%s has left memory, and the engine may hold more of it", line.id)

    def _next(self) -> _Line | None:
        """The line whose turn it is: of the client, then the session, then the model that was served least recently."""
        while not self._is_closed:
            self._forget_the_gone()
            with self._changed:
                ready = [line for line in self._lines.values() if self._is_ready(line)]
                if ready:
                    last = Counter[str]()
                    for line in self._lines.values():
                        last |= {line.owner: line.served, line.session: line.served}
                    return min(ready, key=lambda line: (last[line.owner], last[line.session], line.served))
                self._changed.wait(1.0)
            if time.monotonic() - self._swept > _SWEEP_S:
                self._swept = time.monotonic()
                try:
                    self._sweep()
                except sqlite3.Error:
                    logger.exception("checkpoints that have expired are looked for again later")
        return None

    def _sweep(self) -> None:
        """Remove checkpoints that have expired, and what of removed ones only silent sessions could sample."""
        for saved in self.journal.rows("saved"):
            if _has_expired(saved):
                self.forget(saved)
        kept = {row["directory"] for row in self.journal.rows("saved")}
        for directory in {row["directory"] for row in self.journal.rows("samplers") if row["path"]} - kept:
            self._remove_unread(directory)

    def _is_ready(self, line: _Line) -> bool:
        if line.current is not None:
            return True
        while line.done + 1 in line.void:
            line.done += 1
            line.void.remove(line.done)
        if not line.waiting or time.monotonic() < line.not_before:
            return False
        if line.done + 1 not in line.waiting:
            line.gap_since = line.gap_since or time.monotonic()
            return time.monotonic() - line.gap_since > GAP_S
        line.gap_since = 0.0
        return bool(line.name) or self._has_room()

    def _has_room(self) -> bool:
        held = [line for line in self._lines.values() if line.name]
        return len(held) < self.adapters.max_adapters or any(line.current is None for line in held)

    def _advance(self, line: _Line) -> None:
        with self._changed:
            seq = line.done + 1
            if seq not in line.waiting:
                return self._fail_behind(line, seq)
            if line.current is None:
                if not (line.name or self._has_room()):
                    return None  # it was chosen for a gap, which has closed meanwhile
                line.current = self._work(line, seq, line.waiting[seq])
        found = self._result_of(lambda: next(line.current), later=(OSError, sqlite3.Error))
        # One that fails because the server ends stays in the journal for the next server.
        if found is not None and not (self._is_closed and found[0] in ("failed", "again")):
            self._end(line, seq, found)

    def _fail_behind(self, line: _Line, missing: int) -> None:
        """All that wait fail, because each was asked for behind a request that is missing."""
        lost = f"request {missing} of this model has not come for {GAP_S:.0f} s"
        form, content = _failed(f"taking a request: {lost}, and this one follows it.", "user")
        for seq in sorted(line.waiting):
            fields = {"state": "void", "form": form, "result": content, "body": b""}
            self.journal.change("requests", {"model": line.id, "seq": seq}, **fields)
            line.void.add(seq)
            del line.waiting[seq]
            self._futures.pop((line.id, seq)).set_result((form, content))

    def _end(self, line: _Line, seq: int, result: Result) -> None:
        form, content = result
        state = "done"
        if form == "failed":
            state = "failed" if json.loads(content)["category"] == "user" else "void"
        if state == "void" and line.waiting[seq] in _CHANGES:
            self._leave_memory(line)
        if line.done < seq:  # `_keep` has not written it together with the state
            is_needed = (line.waiting[seq], state) in _MADE_AGAIN
            self.journal.finish(line.id, seq, state, form, content, is_needed=is_needed)
        with self._changed:
            line.done, line.current, line.gap_since = seq, None, 0.0
            if line.name not in self.adapters:  # it could not be made
                line.name = ""
            line.waiting.pop(seq, None)
            self._futures.pop((line.id, seq)).set_result(result)

    def _work(self, line: _Line, seq: int, kind: str) -> Iterator[Result | None]:
        """A request, with `None` where others may have a turn, and its result."""
        row = self._known("requests", "request", model=line.id, seq=seq)
        body = row["body"]
        if kind == "create_model":
            asked = json.loads(body)
            self._admit(line)
            self.adapters.create(line.name, **asked["adapter"])
            yield self._keep(line, seq, {"model_id": line.id, "type": kind}, rank=asked["adapter"]["rank"])
            return
        if kind == "open_model":
            yield self._open(line, seq, json.loads(body))
            return
        yield from self._in_memory(line)
        if kind in ("pass", "forward"):
            yield from self._pass(line, PassRequest.parse(body))
        elif kind == "optim_step":
            made = self.adapters.optim_step(line.name, **json.loads(body))
            result = {"metrics": {"grad_norm": made["grad_norm"], "step": made["step"]}}
            is_due = made["step"] % self.every == 0
            yield self._keep(line, seq, result) if is_due else _as_json(result)
        elif kind == "load_weights":
            asked = json.loads(body)
            saved = self.saved(asked["path"], self._owner(line))
            self.adapters.load(line.name, self.root / "stored" / saved["directory"], optimizer=asked["optimizer"])
            yield self._keep(line, seq, {"path": asked["path"], "model_id": line.id, "type": kind})
        else:
            yield _as_json(self._save(line, seq, kind, json.loads(body)))

    def _pass(self, line: _Line, asked: PassRequest) -> Iterator[Result | None]:
        loss = TokenLoss(asked.loss, asked.config)
        for found in self.adapters.passes(line.name, asked.rows(), loss, backward=not asked.forward_only):
            if found is None:
                yield None
            else:
                yield "proto", pack_passed(found.logprobs, {"loss:sum": found.loss})

    def _open(self, line: _Line, seq: int, asked: Row) -> Result:
        saved = self.saved(asked["path"], self._owner(line))
        self._admit(line)
        directory = self.root / "stored" / saved["directory"]
        self.adapters.open(line.name, directory, optimizer=asked["optimizer"])
        rank = self.journal.rows("models", id=saved["model"])[0]["rank"]
        return self._keep(line, seq, {"path": asked["path"], "model_id": line.id, "type": "load_weights"}, rank=rank)

    def _owner(self, line: _Line) -> str:
        return str(self.journal.rows("models", id=line.id)[0]["owner"])

    def _save(self, line: _Line, seq: int, kind: str, asked: Row) -> Row:
        model = self.journal.rows("models", id=line.id)[0]
        name = asked["name"] or f"unnamed-{seq}"
        path = f"tinker://{line.id}/{kind}/{name}"
        known = self.journal.row("saved", path=path)
        if known is not None and known["seq"] != seq and not asked.get("overwrite"):
            raise ConfigConflictError(f"saving: there is a {path} already. Use another name, or overwrite=True.")
        number = asked.get("sampler")
        if number is not None:
            sampler = f"{line.session}:sample:{number}"
            if self.journal.row("samplers", id=sampler, model=line.id, seq=seq):  # before the server was killed
                self.journal.remove("saved", path=path)
                return {"path": path, "type": "save_weights_for_sampler", "sampling_session_id": sampler}
        # While what the push would overwrite is still being sampled, the new version is sampled out of its directory.
        pushed = self.adapters.push_unless_read(line.name) if kind == "sampler_weights" else None
        directory, size = self._store(line, optimizer=kind == "weights")
        if known is not None:  # of this request, before the server was killed, or to be overwritten
            self.forget(known)
        ttl = asked.get("ttl_seconds")
        about = {"kind": kind, "seq": seq, "directory": directory, "size": size, "made": time.time()}
        about |= {"expires": time.time() + ttl if ttl else 0.0, "metadata": metadata_of(asked.get("user_metadata"))}
        self.journal.put("saved", path=path, owner=model["owner"], model=line.id, **about)
        if kind != "sampler_weights":
            return {"path": path, "type": f"save_{kind}".replace("external_weights", "weights_external")}
        if pushed is not None:
            self._live[directory] = line.name, pushed.version
        if number is None:
            return {"path": path, "type": "save_weights_for_sampler"}
        try:
            self._add_sampler(line.session, model["owner"], number, line.id, directory, "", seq)
        except ConfigConflictError:
            self.forget({"path": path, "directory": directory})
            raise
        self.journal.remove("saved", path=path)  # it has no path that a client knows
        self._retire(line)
        return {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}

    def _retire(self, line: _Line) -> None:
        unnamed = [row for row in self.journal.rows("samplers", model=line.id) if not row["path"]]
        for row in unnamed[:-KEPT_SAMPLERS]:
            shutil.rmtree(self.root / "stored" / row["directory"], ignore_errors=True)
            self._live.pop(row["directory"], None)

    def _store(self, line: _Line, *, optimizer: bool) -> tuple[str, int]:
        """Write an adapter into a directory of its own: its name, and bytes."""
        name = secrets.token_hex(8)
        path = self.adapters.save(line.name, self.root / "stored" / name, optimizer=optimizer)
        for file in path.iterdir():
            with file.open("rb") as written:
                os.fsync(written)
        return name, sum(file.stat().st_size for file in path.iterdir())

    def _keep(self, line: _Line, seq: int, result: Row, rank: int | None = None) -> Result:
        """Save the model's state, and note it together with the result of the request that has made it."""
        before = self.journal.rows("models", id=line.id)[0]["state"]
        directory, _ = self._store(line, optimizer=True)
        if rank is not None:
            self.journal.change("models", {"id": line.id}, rank=rank)
        form, content = _as_json(result)
        self.journal.finish(line.id, seq, "done", form, content, saved=directory)
        line.done = seq
        if before:
            shutil.rmtree(self.root / "stored" / before, ignore_errors=True)
        return form, content

    def _admit(self, line: _Line) -> None:
        """Make room for a model in memory, and name its adapter."""
        held = [each for each in self._lines.values() if each.name]
        if len(held) >= self.adapters.max_adapters:
            idle = [each for each in held if each.current is None]
            self._leave_memory(min(idle, key=lambda each: (self.adapters.is_sampled(each.name), each.served)))
        line.name = f"{line.id}@{secrets.token_hex(4)}"

    def _in_memory(self, line: _Line) -> Iterator[None]:
        """Have a model in memory, as it was after its last request."""
        if line.name:
            return
        model = self.journal.rows("models", id=line.id)[0]
        if not model["state"]:
            raise ConfigConflictError(f"using the model {line.id}: it was not made, see its first request.")
        self._admit(line)
        try:
            self.adapters.open(line.name, self.root / "stored" / model["state"])
            for row in self.journal.noted(line.id, model["applied"] + 1, model["done"]):
                if (row["kind"], row["state"]) in _MADE_AGAIN:
                    yield from self._again(line, self._known("requests", "request", model=line.id, seq=row["seq"]))
        except BaseException:
            self._leave_memory(line)
            raise

    def _again(self, line: _Line, row: Row) -> Iterator[None]:
        """What a request has done to the weights and gradients, which are in no saved state."""
        if row["kind"] == "optim_step":
            # One that has failed has dropped gradients that were not finite.
            with contextlib.suppress(*(ConfigConflictError,) if row["state"] == "failed" else ()):
                self.adapters.optim_step(line.name, **json.loads(row["body"]))
        else:
            yield from (None for _ in self._pass(line, PassRequest.parse(row["body"])))

    def close(self) -> None:
        """End the threads; what has not been computed is, when the server is started again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            while thread.is_alive():  # one of them may just be about to begin
                self.adapters.engine.cancel()
                thread.join(0.1)
        self.journal.close()


def _has_expired(saved: Row) -> bool:
    return 0 < saved["expires"] < time.time()


def _as_json(content: Row) -> Result:
    return "json", json.dumps(content).encode()


def _failed(message: str, category: str) -> Result:
    return "failed", json.dumps({"error": message[:_MOST_SAID], "category": category}).encode()
