"""What the server does where something is missing, late, or too much; in this process, with times and limits cut
short."""

import contextlib
import json
import os
import queue
import threading
import time

import pytest
from tinker_server import pass_body, row_of

from qlora_rl import Adapters
from qlora_rl.errors import ConfigConflictError, RunDirectoryError
from qlora_rl.tinker import messages, routes, service
from qlora_rl.tinker.journal import Journal

ROW = row_of([40, 41, 42, 43, 44])
STEP = json.dumps({"learning_rate": 1e-2}).encode()


@pytest.fixture(scope="module")
def adapters(base):
    with Adapters(base.path, max_adapters=1, max_saved=1, max_rank=8, max_model_length=64, max_num_seqs=8) as adapters:
        yield adapters


@pytest.fixture
def served(adapters, tmp_path):
    """A service with one session and one model of "me"."""
    made = service.Service(adapters, Journal(tmp_path), "tiny")
    session = made.begin_session("me")
    body = json.dumps({"adapter": {"rank": 4, "seed": 1}}).encode()
    model, _ = made.create(session, "me", 0, "create_model", body, None)
    assert result(made, model, 0)["model_id"] == model
    yield made, session, model
    with contextlib.suppress(OSError):  # the test has closed it
        made.close()
    for name in adapters:
        adapters.drop(name)


def result(made, model, seq):
    form, content = made.future(f"{model}#{seq}", "me").result(60)
    return content if form == "proto" else json.loads(content)


def save(made, model, seq, sampler):
    made.submit(model, "me", seq, "sampler_weights", json.dumps({"name": None, "sampler": sampler}).encode())
    return result(made, model, seq)["sampling_session_id"]


def sampled(made, sampler, seq, tokens=4):
    asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [40, 41]}]}}
    asked = routes.SampleBody(**asked, sampling_params={"max_tokens": tokens, "seed": 1})
    form, content = made.future(made.sample(sampler, "me", seq, asked), "me").result(60)
    return json.loads(content) if form == "failed" else content


def test_a_request_that_never_comes_holds_up_those_behind_it_for_a_while_only(served, monkeypatch):
    made, _, model = served
    monkeypatch.setattr(service, "GAP_S", 0.3)
    made.submit(model, "me", 3, "pass", pass_body(model, 3, [ROW]))
    assert "request 1 of this model has not come" in result(made, model, 3)["error"]
    for seq in (2, 4, 5):  # computed without what is missing, they would be another training
        made.submit(model, "me", seq, "optim_step", STEP)
    for seq in (2, 4, 5):
        assert "request 1 of this model has not come" in result(made, model, seq)["error"]
    for seq in (1, 6):
        made.submit(model, "me", seq, "pass", pass_body(model, seq, [ROW]))
    assert isinstance(result(made, model, 1), bytes)
    assert isinstance(result(made, model, 6), bytes)
    made.submit(model, "me", 7, "optim_step", STEP)
    assert result(made, model, 7)["metrics"]["step"] == 1


def test_a_request_that_comes_late_is_noted_with_what_is_said_of_it(served):
    made, _, model = served
    made.journal.change("models", {"id": model}, done=3)
    made._lines[model].done = 3
    made.submit(model, "me", 2, "optim_step", STEP)
    assert "is over already" in result(made, model, 2)["error"]
    row = made.journal.row("requests", model=model, seq=2)
    assert (row["state"], row["form"], row["body"]) == ("void", "failed", b"")  # never applied to weights again
    assert made.journal.noted(model, 0, 3) == [
        {"seq": 0, "kind": "create_model", "state": "done"},
        {"seq": 2, "kind": "optim_step", "state": "void"},
    ]


def test_one_directory_is_one_servers(served):
    made, _, model = served
    with pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"):
        Journal(made.root)
    made.submit(model, "me", 1, "pass", pass_body(model, 1, [ROW]))
    assert isinstance(result(made, model, 1), bytes)


def test_a_journal_that_is_full_delays_a_request_and_ends_no_thread(served, monkeypatch):
    made, _, model = served
    monkeypatch.setattr(service, "_RETRY_S", 0.5)
    with made._changed:  # the trainer waits
        made.submit(model, "me", 1, "pass", pass_body(model, 1, [ROW] * 900))
        future = made.future(f"{model}#1", "me")
        pages = made.journal._db.execute("PRAGMA page_count").fetchone()[0]
        made.journal._db.execute(f"PRAGMA max_page_count={pages}")
    form, said = future.result(60)
    assert (form, b"disk is full" in said) == ("again", True)
    made.journal._db.execute("PRAGMA max_page_count=1000000")
    assert isinstance(result(made, model, 1), bytes)
    assert made.dead() == []
    made.close()
    assert routes._Api(made, "").healthz().status_code == 503


def test_a_step_that_cannot_be_saved_waits_and_is_made_once(served, adapters, monkeypatch):
    made, _, model = served
    monkeypatch.setattr(service, "_RETRY_S", 0.5)
    made.submit(model, "me", 1, "pass", pass_body(model, 1, [ROW]))
    with monkeypatch.context() as patch:

        def full(name, directory, **options):
            directory.mkdir(parents=True)
            raise OSError(28, "No space left on device")

        patch.setattr(adapters, "save", full)
        made.submit(model, "me", 2, "optim_step", STEP)
        form, said = made.future(f"{model}#2", "me").result(60)
        assert (form, b"No space left" in said) == ("again", True)
        until(lambda: len(list((made.root / "stored").iterdir())) == 1)
    assert result(made, model, 2)["metrics"]["step"] == 1


def test_a_request_that_is_cancelled_because_the_server_ends_is_computed_by_the_next(served, adapters, monkeypatch):
    made, session, model = served
    began = threading.Event()

    def push(name):
        began.set()
        while True:  # as a canary does, open or about to begin
            adapters.engine.generate([[40, 41]], service.SamplingSpec(max_tokens=60, extra={"ignore_eos": True}))

    with monkeypatch.context() as patch:
        patch.setattr(adapters, "push", push)
        made.submit(model, "me", 1, "sampler_weights", json.dumps({"name": None, "sampler": 0}).encode())
        assert began.wait(60)
        made.close()
    for name in adapters:
        adapters.drop(name)
    other = service.Service(adapters, Journal(made.root), "tiny")
    assert result(other, model, 1).get("sampling_session_id") == f"{session}:sample:0"
    other.close()


def until(is_so):
    last = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < last
        time.sleep(0.02)


def forever(adapters, monkeypatch):
    """Samples that last until they are cancelled."""
    generate = type(adapters.engine).generate

    def again(self, prompts, sampling=None, **fields):
        while True:
            generate(self, prompts, sampling, **fields)

    monkeypatch.setattr(type(adapters.engine), "generate", again)


def test_a_session_whose_client_is_silent_leaves_memory_and_goes_on_when_it_is_back(served, adapters, monkeypatch):
    made, _, model = served
    sampler = save(made, model, 1, 0)
    made.submit(model, "me", 2, "pass", pass_body(model, 2, [ROW]))
    assert isinstance(result(made, model, 2), bytes)  # gradients, which are in no saved state
    with monkeypatch.context() as patch:
        forever(adapters, patch)
        asked = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [40]}]}, "sampling_params": {}}
        running = made.sample(sampler, "me", 0, routes.SampleBody(**asked, seq_id=0))
        future = made.future(running, "me")
        until(lambda: adapters.is_sampled(next(iter(adapters))))
        made._lapse_s = 0.1
        assert future.result(60)[0] == "again"
        until(lambda: not list(adapters))
    with pytest.raises(LookupError):  # the client is told 410, and asks again
        made.future(running, "me")
    assert len(made.adapters.engine._lanes) == 1  # that of saved adapters
    made._lapse_s = 60.0
    made.submit(model, "me", 3, "optim_step", STEP)
    assert result(made, model, 3)["metrics"]["step"] == 1
    assert isinstance(sampled(made, sampler, 1), bytes)


def test_what_a_silent_client_has_asked_for_is_computed_and_a_session_that_is_finished_is_gone_at_once(
    served, adapters
):
    made, session, model = served
    with made._changed:  # the trainer waits
        made.submit(model, "me", 1, "pass", pass_body(model, 1, [ROW] * 300))
        made.submit(model, "me", 2, "optim_step", STEP)
        made.end_session(session, "me")
        futures = [made._futures[model, seq] for seq in (1, 2)]
    assert json.loads(futures[1].result(60)[1])["metrics"]["step"] == 1
    until(lambda: not list(adapters))


def test_a_push_does_not_wait_for_a_long_sample_and_neither_does_another_model(served, adapters, monkeypatch):
    """The third version would be written where the first is being sampled; the second model takes the first one's
    place."""
    made, session, model = served
    sampler = save(made, model, 1, 1)
    wanted = sampled(made, sampler, 0)
    driver, late = adapters.engine._driver, []
    note = driver._note

    def note_late(output):  # vLLM goes on stepping for a call whose last token is still to come
        is_long = any(output.request_id in call.names and call.params[0].max_tokens == 60 for call in driver._open)
        late.append(output) if is_long else note(output)

    monkeypatch.setattr(driver, "_note", note_late)
    asked = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [40, 41]}]}}
    asked |= {"sampling_params": {"max_tokens": 60, "seed": 77, "stop": []}}
    future = made.future(made.sample(sampler, "me", 1, routes.SampleBody(**asked, seq_id=1)), "me")
    until(lambda: adapters.is_sampled(next(iter(adapters))))
    for seq in (2, 5):
        made.submit(model, "me", seq, "pass", pass_body(model, seq, [ROW]))
        made.submit(model, "me", seq + 1, "optim_step", STEP)
        newest = save(made, model, seq + 2, seq)
    changed = sampled(made, newest, 0)
    assert changed != wanted
    body = json.dumps({"adapter": {"rank": 4, "seed": 2}}).encode()
    other, _ = made.create(session, "me", 1, "create_model", body, None)
    made.submit(other, "me", 1, "pass", pass_body(other, 1, [ROW]))
    made.submit(other, "me", 2, "optim_step", STEP)
    assert result(made, other, 2)["metrics"]["step"] == 1
    assert not future.done()
    with driver.lock:
        monkeypatch.setattr(driver, "_note", note)
        for output in late:
            note(output)
    assert future.result(60)[0] == "proto"
    assert sampled(made, sampler, 2) == wanted
    assert sampled(made, newest, 1) == changed


def test_a_client_that_asks_for_more_than_waits_in_memory_is_told_to_ask_later(served, adapters, monkeypatch):
    made, session, _ = served
    monkeypatch.setattr(service, "_MOST_WAITING", 600)
    sampler = made.open_sampler(session, "me", 0, None)
    asked = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [40]}]}, "sampling_params": {}}
    with made._changed:
        for seq in range(3):
            made.sample(sampler, "me", seq, routes.SampleBody(**asked, seq_id=seq))
        with pytest.raises(queue.Full):
            made.sample(sampler, "me", 3, routes.SampleBody(**asked, seq_id=3))
    for seq in range(3):
        assert made.future(f"{sampler}#{seq}", "me").result(60)[0] == "proto"
    assert made._waiting["me"] == 0


def test_a_number_that_is_used_again_for_something_else_is_an_error(served):
    made, session, model = served
    sampler = save(made, model, 1, 7)
    made.submit(model, "me", 2, "sampler_weights", json.dumps({"name": None, "sampler": 7}).encode())
    assert "other weights" in result(made, model, 2)["error"]
    with pytest.raises(ConfigConflictError, match="other weights"):
        made.open_sampler(session, "me", 7, None)
    assert made.open_sampler(session, "me", 8, None) == made.open_sampler(session, "me", 8, None)
    first = sampled(made, sampler, 0)
    assert sampled(made, sampler, 0) == first
    with pytest.raises(ConfigConflictError, match="seq_id=0"):
        sampled(made, sampler, 0, tokens=3)


def test_a_client_with_many_sessions_has_the_turns_of_one(served):
    made, _, _ = served
    with made._changed:
        kept = made._lines
        lines = [
            service._Line(name, name, owner, current=iter(()), served=turn)
            for name, owner, turn in (("a", "many", 9), ("b", "many", 0), ("c", "one", 5))
        ]
        made._lines = {line.id: line for line in lines}
        assert made._next().owner == "one"
        lines[2].served = 10
        assert made._next().id == "b"
        made._lines = kept


def test_a_pass_of_more_than_is_computed_at_once_is_rejected_before_it_is_read():
    many = pass_body("m", 1, [ROW] * 1500)
    assert len(messages.PassRequest.parse(many, 64).rows()) == 1500
    for body in (b"\x1a\x00" * 2**18, b"\x1a\x80\x80\x10" + b"\x0a\x00" * 2**17, b"\x3a\x00" * 2**18):
        with pytest.raises(ValueError, match="at most 8192 rows"):
            messages.PassRequest.parse(body, 64)
    with pytest.raises(ValueError, match="tokens and values"):
        messages.PassRequest.parse(pass_body("m", 1, [{"tokens": [1] * 70000}]), 1)


def test_of_samplers_without_a_name_the_newest_stay_and_results_that_are_gone_are_computed_again(served, monkeypatch):
    made, session, model = served
    monkeypatch.setattr(service, "KEPT_SAMPLERS", 2)
    samplers = [save(made, model, seq, seq) for seq in (1, 2, 3, 4)]
    assert samplers == [f"{session}:sample:{seq}" for seq in (1, 2, 3, 4)]
    for sampler in samplers[:2]:
        assert "the newest 2 of a model are kept" in sampled(made, sampler, 0)["error"]
    first = sampled(made, samplers[3], 0)
    assert sampled(made, samplers[2], 0) == first  # the same weights, out of a directory or a slot
    monkeypatch.setattr(service, "_RESULT_BYTES", 0)
    sampled(made, samplers[3], 1)
    with pytest.raises(LookupError):  # the client is told 410 and asks again
        made.future(f"{samplers[2]}#0", "me")
    assert sampled(made, samplers[2], 0) == first


def test_a_model_that_could_not_be_made_says_so_and_takes_no_place(served, adapters):
    made, session, model = served
    body = json.dumps({"adapter": {"rank": 99, "seed": 1}}).encode()
    other, _ = made.create(session, "me", 1, "create_model", body, None)
    assert "max_rank=8" in result(made, other, 0)["error"]
    made.submit(other, "me", 1, "pass", pass_body(other, 1, [ROW]))
    assert "it was not made" in result(made, other, 1)["error"]
    made.submit(model, "me", 1, "pass", pass_body(model, 1, [ROW]))
    assert isinstance(result(made, model, 1), bytes)
    assert len(list(adapters)) == 1
