"""What the adapters' server keeps, forgets and computes again; the adapters are a stand-in that counts."""

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from tinker_server import pass_body, row_of

from qlora_rl import EngineBrokenError
from qlora_rl.contracts import Rollout
from qlora_rl.tinker import journal, routes, service

ROW = row_of([40, 41, 42, 43, 44])
STEP = json.dumps({"learning_rate": 1e-2}).encode()


class Counting:
    """Adapters of steps and gradients that are counted; `failing` is raised once, by what writes or drops."""

    max_adapters, max_model_length = 2, 64

    def __init__(self):
        self.held, self.failing, self.may_sample = {}, None, threading.Event()
        self.engine = SimpleNamespace(cancel=lambda threads=None: None)
        self.may_sample.set()

    def __contains__(self, name):
        return name in self.held

    def _fail(self):
        error, self.failing = self.failing, None
        if error is not None:
            raise error

    def create(self, name, **options):
        self.held[name] = {"steps": 0, "gradients": 0}

    def open(self, name, directory, optimizer=True):
        self.held[name] = json.loads((directory / "state").read_text())

    def drop(self, name, wait=True):
        del self.held[name]
        self._fail()

    def save(self, name, directory, optimizer=True):
        directory.mkdir(parents=True)
        self._fail()
        (directory / "state").write_text(json.dumps(self.held[name] | {"gradients": 0}))
        return directory

    def passes(self, name, rows, loss, backward=True):
        self.held[name]["gradients"] += backward
        yield SimpleNamespace(loss=1.0, logprobs=[[0.0] * len(row.tokens) for row in rows])

    def optim_step(self, name, **settings):
        assert self.held[name]["gradients"] == 1
        self.held[name] = {"steps": self.held[name]["steps"] + 1, "gradients": 0}
        return {"grad_norm": 1.0, "step": float(self.held[name]["steps"])}

    def push_unless_read(self, name):
        return None

    def is_sampled(self, name):
        return False

    def sample(self, prompts, sampling, version=None):
        if sampling.seed == 77:
            self.may_sample.wait()
        return {
            name: Rollout(completion_ids=[[1] * 500], logprobs=[[0.0] * 500], version=1, seconds=0.0)
            for name in prompts
        }


@pytest.fixture
def adapters():
    return Counting()


@pytest.fixture
def served(adapters, tmp_path, monkeypatch):
    """A service with one session and one model of "me"."""
    monkeypatch.setattr(service, "_RETRY_S", 0.1)
    made = service.Service(adapters, journal.Journal(tmp_path / "kept"), "tiny")
    session = made.begin_session("me")
    yield made, session, model_of(made, session, 0)
    adapters.may_sample.set()
    made.close()


def model_of(made, session, number):
    body = json.dumps({"adapter": {"rank": 4, "seed": 1}}).encode()
    model, _ = made.create(session, "me", number, "create_model", body, None)
    assert result(made, model, 0)["model_id"] == model
    return model


def result(made, model, seq):
    """Of a request, as a client that asks again has it."""
    while (found := made.future(f"{model}#{seq}", "me").result(30))[0] == "again":
        time.sleep(0.01)
    return found[1] if found[0] == "proto" else json.loads(found[1])


def save(made, model, seq, name, ttl=None, kind="weights"):
    made.submit(model, "me", seq, kind, json.dumps({"name": name, "ttl_seconds": ttl}).encode())
    path = result(made, model, seq)["path"]
    return path, made.root / "stored" / made.journal.row("saved", path=path)["directory"]


def passed(made, model, seq, loss="cross_entropy"):
    made.submit(model, "me", seq, "pass", pass_body(model, seq, [ROW], loss))
    return result(made, model, seq)


def ask(made, sampler, seq, seed=1):
    asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [40]}]}}
    body = routes.SampleBody(**asked, sampling_params={"seed": seed})
    return made.future(made.sample(sampler, "me", seq, body), "me")


def until(is_so):
    last = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < last
        time.sleep(0.01)


@contextlib.contextmanager
def client_of(made, base_url="http://testserver"):
    app = routes.make_app(made, "the tokenizer")

    async def owned(scope, receive, send):
        await app({**scope, "state": {"owner": "me"}}, receive, send)

    yield TestClient(owned, base_url=base_url)


def test_an_engine_that_fails_while_a_model_leaves_memory_is_logged_and_ends_no_thread(served, adapters, caplog):
    made, session, model = served
    other = made.begin_session("me")
    model_of(made, other, 0)
    adapters.failing = EngineBrokenError("vLLM failed in a step")
    made.end_session(other, "me")
    until(lambda: adapters.failing is None)
    assert isinstance(passed(made, model, 1), bytes)
    assert made.dead() == []
    assert [name.partition(":")[0] for name in adapters.held] == [session]
    until(lambda: "vLLM failed in a step" in caplog.text)


@pytest.mark.parametrize("kind", ["optim_step", "weights"])
def test_what_cannot_be_written_waits_and_is_made_once(served, adapters, kind):
    made, _, model = served
    passed(made, model, 1)
    body = STEP if kind == "optim_step" else json.dumps({"name": "mine"}).encode()
    with made._changed:  # the trainer waits
        adapters.failing = OSError(28, "No space left on device")
        made.submit(model, "me", 2, kind, body)
        first = made.future(f"{model}#2", "me")
    form, said = first.result(30)
    assert (form, b"No space left" in said) == ("again", True)
    assert "error" not in result(made, model, 2)
    is_step = kind == "optim_step"
    assert list(adapters.held.values()) == [{"steps": int(is_step), "gradients": int(not is_step)}]
    assert {place.name for place in (made.root / "stored").iterdir()} == {
        made.journal.row("models", id=model)["state"],
        *(row["directory"] for row in made.journal.rows("saved")),
    }


def test_a_journal_that_fails_behind_a_step_leaves_no_files_and_the_step_is_made_once(served, adapters, monkeypatch):
    made, _, model = served
    passed(made, model, 1)
    finish, failed = made.journal.finish, []

    def full(*args, **fields):
        if not failed:
            failed.append(args)
            raise sqlite3.OperationalError("database or disk is full")
        finish(*args, **fields)

    monkeypatch.setattr(made.journal, "finish", full)
    made.submit(model, "me", 2, "optim_step", STEP)
    assert result(made, model, 2)["metrics"]["step"] == 1
    assert len(failed) == 1
    kept = [place.name for place in (made.root / "stored").iterdir()]
    assert kept == [made.journal.row("models", id=model)["state"]]


def test_a_state_whose_files_are_gone_is_an_error_at_once(served):
    made, _, model = served
    shutil.rmtree(made.root / "stored" / made.journal.row("models", id=model)["state"])
    made._leave_memory(made._lines[model])
    assert "FileNotFoundError" in passed(made, model, 1)["error"]


def test_results_are_forgotten_also_behind_a_sample_that_lasts(served, adapters, monkeypatch):
    made, session, _ = served
    monkeypatch.setattr(service, "_RESULT_BYTES", 20_000)  # five of them
    sampler = made.open_sampler(session, "me", 0, None)
    adapters.may_sample.clear()
    long = ask(made, sampler, 0, seed=77)
    for seq in range(1, 30):
        assert ask(made, sampler, seq).result(30)[0] == "proto"
    one = len(made.future(f"{sampler}#29", "me").result(0)[1])
    assert made._result_bytes <= 20_000 + one  # the newest has come since
    assert made._result_bytes == one * (len(made._sampled) - 1)
    with pytest.raises(LookupError):
        made.future(f"{sampler}#1", "me")
    assert made.future(f"{sampler}#0", "me") is long
    adapters.may_sample.set()
    assert long.result(30)[0] == "proto"


def test_requests_that_wait_do_not_count_as_results(served, adapters, monkeypatch):
    made, session, _ = served
    monkeypatch.setattr(service, "_RESULTS", 2)
    sampler = made.open_sampler(session, "me", 0, None)
    adapters.may_sample.clear()
    long = [ask(made, sampler, seq, seed=77) for seq in range(5)]
    for seq in range(5, 8):
        assert ask(made, sampler, seq).result(30)[0] == "proto"
    assert made.future(f"{sampler}#5", "me").done()
    ask(made, sampler, 8).result(30)
    with pytest.raises(LookupError):
        made.future(f"{sampler}#5", "me")
    assert made.future(f"{sampler}#6", "me").done()
    adapters.may_sample.set()
    assert {each.result(30)[0] for each in long} == {"proto"}


def test_the_journal_keeps_bodies_of_what_must_be_made_again_alone(served, adapters, monkeypatch):
    made, _, model = served
    monkeypatch.setattr(journal, "_RESULTS", 4)
    with client_of(made) as client:
        for seq in range(1, 8):
            sent = pass_body(model, seq, [ROW], forward_only=True)
            assert client.post("/api/v1/forward_backward", content=sent).status_code == 200
            result(made, model, seq)
        sent = pass_body(model, 8, [ROW])
        assert client.post("/api/v1/forward_backward", content=sent).status_code == 200
    assert isinstance(result(made, model, 8), bytes)
    assert "not offered" in passed(made, model, 9, loss="gspo")["error"]
    rows = made.journal.rows("requests", model=model)
    assert {row["seq"]: len(row["body"]) for row in rows} == {5: 0, 6: 0, 7: 0, 8: len(sent), 9: 0}
    made._leave_memory(made._lines[model])
    made.submit(model, "me", 10, "optim_step", STEP)  # the gradients are those of request 8 alone
    assert result(made, model, 10)["metrics"]["step"] == 1
    assert {len(row["body"]) for row in made.journal.rows("requests", model=model)} == {0}


def test_a_finished_session_is_not_alive_again_because_its_client_says_that_it_lives(served):
    made, session, _ = served
    made.end_session(session, "me")
    with client_of(made) as client:
        assert client.post("/api/v1/session_heartbeat", json={"session_id": session}).status_code == 410
        assert session not in made._seen
        other = client.post("/api/v1/create_session", json={}).json()["session_id"]
        made._seen.clear()
        assert client.post("/api/v1/session_heartbeat", json={"session_id": other}).status_code == 200
    assert list(made._seen) == [other]


def test_a_directory_that_was_there_is_closed_to_others(tmp_path):
    place = tmp_path / "kept"
    place.mkdir()
    place.chmod(0o755)
    before = os.umask(0o022)
    try:
        journal.Journal(place).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE((place / "journal.sqlite").stat().st_mode) == 0o600


def test_links_lead_to_where_the_client_has_asked_and_are_404_when_the_files_are_gone(served):
    made, _, model = served
    _, directory = save(made, model, 1, "mine", kind="external_weights")
    wanted = f"/api/v1/training_runs/{model}/checkpoints/external_weights/mine/external_weights_urls"
    with client_of(made, "https://trainer.example:8443") as client:
        urls = client.get(wanted).json()["urls"]
        assert urls["state"].startswith("https://trainer.example:8443/files/")
        assert client.get(urls["state"]).json() == {"steps": 0, "gradients": 0}
        shutil.rmtree(directory)
        assert client.get(wanted).status_code == 404
        assert client.get(urls["state"]).status_code == 404


def test_checkpoints_that_have_expired_go_and_so_do_those_that_only_a_silent_session_samples(served, monkeypatch):
    made, _, model = served
    brief, brief_files = save(made, model, 1, "brief", ttl=3600)
    kept, kept_files = save(made, model, 2, "kept", kind="sampler_weights")
    removed, removed_files = save(made, model, 3, "removed", kind="sampler_weights")
    other = made.begin_session("me")
    for number, path in enumerate((kept, removed)):
        made.open_sampler(other, "me", number, path)
    made.forget(made.saved(removed, "me"))
    assert removed_files.is_dir()  # a session that lives samples from it
    made.journal.change("saved", {"path": brief}, expires=time.time() - 1)
    with client_of(made) as client:
        found = client.get(f"/api/v1/training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [each["tinker_path"] for each in found] == [kept]
    assert brief_files.is_dir()
    made.end_session(other, "me")
    monkeypatch.setattr(service, "_SWEEP_S", 0.0)
    until(lambda: not brief_files.exists() and not removed_files.exists())
    assert made.journal.row("saved", path=brief) is None
    assert kept_files.is_dir()


def test_a_gap_that_closes_when_there_is_no_place_for_the_model_does_not_fail_its_request(served, adapters):
    made, session, model = served
    with made._changed:
        adapters.max_adapters = 1
        busy = made._lines[model]
        busy.current = iter([])
        made.journal.put("models", id="late", session=session, owner="me", metadata="{}", state="x", done=0)
        line = made._lines["late"] = service._Line("late", session, "me", done=0, waiting={1: "pass"})
        made.journal.submit("late", 1, "pass", pass_body("late", 1, [ROW]))
        future = made._futures["late", 1] = Future()
        made._advance(line)
        assert not future.done()
        assert not made._is_ready(line)
        del made._lines["late"]
        busy.current = None
