"""What the server does where something is missing, late, or too much; in this process, with times and limits cut
short."""

import json

import pytest
from tinker_server import pass_body, row_of

from qlora_rl import Adapters
from qlora_rl.tinker import routes, service

ROW = row_of([40, 41, 42, 43, 44])


@pytest.fixture(scope="module")
def adapters(base):
    with Adapters(base.path, max_adapters=1, max_saved=1, max_rank=8, max_model_length=64, max_num_seqs=8) as adapters:
        yield adapters


@pytest.fixture
def served(adapters, tmp_path):
    """A service with one session and one model of "me"."""
    made = service.Service(adapters, tmp_path, "tiny")
    session = made.begin_session("me", None)
    body = json.dumps({"adapter": {"rank": 4, "seed": 1}}).encode()
    model, _ = made.create(session, "me", 0, "create_model", body, None)
    assert result(made, model, 0)["model_id"] == model
    yield made, session, model
    made.close()
    for name in adapters:
        adapters.drop(name)


def result(made, model, seq):
    form, content = made.future(f"{model}#{seq}", "me").result(60)
    return content if form == "proto" else json.loads(content)


def save(made, model, seq, sampler):
    made.submit(model, "me", seq, "sampler_weights", json.dumps({"name": None, "sampler": sampler}).encode())
    return result(made, model, seq)["sampling_session_id"]


def sampled(made, sampler, seq):
    asked = {"sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [40, 41]}]}}
    asked = routes.SampleBody(**asked, sampling_params={"max_tokens": 4, "seed": 1})
    form, content = made.future(made.sample(sampler, "me", seq, asked), "me").result(60)
    return json.loads(content) if form == "failed" else content


def test_a_request_that_never_comes_holds_up_those_behind_it_for_a_while_only(served, monkeypatch):
    made, _, model = served
    monkeypatch.setattr(service, "GAP_S", 0.3)
    made.submit(model, "me", 3, "pass", pass_body(model, 3, [ROW]))
    assert "request 1 of this model has not come" in result(made, model, 3)["error"]
    made.submit(model, "me", 2, "pass", pass_body(model, 2, [ROW]))  # too late
    assert "is over already" in result(made, model, 2)["error"]
    made.submit(model, "me", 4, "pass", pass_body(model, 4, [ROW]))
    assert isinstance(result(made, model, 4), bytes)


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
