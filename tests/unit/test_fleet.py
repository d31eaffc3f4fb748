"""`Fleet` over replicas that answer, break, come back and lie; real servers are in
tests/engine/test_server_faults.py."""

import json
import os
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
import torch
from fakes import Direct

import qlora_rl
from qlora_rl import errors, export_adapter, load_base
from qlora_rl.adapter.store import pack_adapter
from qlora_rl.contracts import AdapterBundle, BaseFingerprint, RolloutEngine
from qlora_rl.engine.client import EngineClient
from qlora_rl.engine.client.engine import PREFIX, START, VERSION, ServerEngine
from qlora_rl.engine.fake import FakeEngine
from qlora_rl.engine.fleet import Fleet, ray_connection
from qlora_rl.engine.fleet import engine as module
from qlora_rl.engine.fleet import replicas as team
from qlora_rl.engine.fleet.replicas import LoadBalancer

KEY = "a-key-of-some-length"
BASE = BaseFingerprint({}).digest
PROMPTS = [[40 + i, 41] for i in range(7)]


def blob(value=1.0):
    name = "base_model.model.model.q_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.full((2, 4), value), name.format("B"): torch.ones(6, 2)}
    return pack_adapter(AdapterBundle(tensors, {"r": 2, "lora_alpha": 2}))


class Replica:
    """A server as the client sees it; what it samples depends on seed, place and adapter alone."""

    def __init__(self, name):
        self.name, self.starts, self.asked, self.base, self.dtype = name, 0, [], BASE, "bfloat16"
        self.rejects, self.breaks_at, self.lies, self.is_away = "", "", False, False
        self.lock, self.has_other_key = threading.Lock(), False
        self.holds_two, self.before, self.rate, self.may_answer = False, ("", -1), 0.0, threading.Event()
        self.may_answer.set()
        self.start_again()

    def start_again(self):
        self.starts += 1
        self.start, self.version, self.digest, self.is_away, self.breaks_at = (
            f"{self.name}-{self.starts}",
            0,
            "",
            False,
            "",
        )

    def __call__(self, request):
        if request.url.path.endswith("/generate"):
            assert self.may_answer.wait(60)
            time.sleep(len(json.loads(request.content)["prompts"]) * self.rate)
        with self.lock:
            return self.answer(request)

    def answer(self, request):
        path = request.url.path.removeprefix(PREFIX)
        if self.is_away or path == self.breaks_at:
            self.is_away = True
            raise httpx.ConnectError("nobody there", request=request)
        if self.has_other_key:
            return httpx.Response(401, text="another key")
        if path == "/score" and START not in request.headers:
            return httpx.Response(200)
        self.asked.append((request.method, path))
        if request.headers.get(START, self.start) != self.start:
            return httpx.Response(412, headers=self.marks())
        if path == self.rejects:
            body = {"error": {"kind": "SyncError", "message": "no.", "reasons": ["one", "two"]}}
            return httpx.Response(422, json=body, headers=self.marks())
        return httpx.Response(200, json=self.content(request, path), headers=self.marks())

    def content(self, request, path):
        if request.method == "PUT":
            self.before = self.digest, self.version
            self.version, self.digest = int(request.url.params["version"]), request.url.params["digest"]
            return {"digest": self.digest}
        if request.method == "DELETE" and path == "/adapter":
            self.version, self.digest = 0, ""
        asked = json.loads(request.content) if request.content and request.method == "POST" else {}
        if path == "/generate":
            wanted = asked["digest"] or "", asked["version"]
            assert wanted == (self.digest, self.version) or (asked.get("held") and wanted == self.before)
            sampled = [f"{asked['sampling']['seed']}{p}{wanted[0]}" for p in asked["places"]]
            return {"completion_ids": [list(d.encode()) for d in sampled], "logprobs": [[-1.0] for _ in sampled],
                    "version": wanted[1], "has_ended": [place % 2 == 0 for place in asked["places"]]}  # fmt: skip
        if path == "/score":
            return {"logprobs": [[-1.0 - self.lies] for _ in asked["sequences"]]}
        if path == "/held":
            return {"held": {"A": "lie" if self.lies else self.digest}}
        if path == "/base":
            return {"leaves": {}, "facts": {} if self.base == BASE else {"dtype": "another"}}
        return {"name": self.name, "base": self.base, "max_lora_rank": 8, "max_model_length": 64,
        "max_body_bytes": 10**6,
                "adapter_dtype": self.dtype, "adapter_dir": "/nowhere", "holds_two": self.holds_two}  # fmt: skip

    def marks(self):
        return {START: self.start, VERSION: str(self.version)}


@pytest.fixture
def replicas():
    return {name: Replica(name) for name in "abc"}


@pytest.fixture
def connect(replicas, monkeypatch):
    monkeypatch.setattr(team, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(team, "_LOOK_SELDOM_S", 0.0)
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    made = []

    def connect(names="abc", wait_s=0.2, version=0):
        transport = httpx.MockTransport(lambda request: replicas[request.url.host](request))
        options = {"api_key": KEY, "wait_s": wait_s, "transport": transport}
        urls = [f"http://{n}" for n in names]
        # One server is no fleet for `connect`.
        made.append(
            qlora_rl.connect(urls, **options)
            if len(urls) > 1
            else Fleet([ServerEngine(urls[0], **options)], wait_s=wait_s)
        )
        if version:
            made[-1].load_packed(blob(), version)
        return made[-1]

    yield connect
    for each in made:
        each.close()


def names(fleet):
    return [each.url.removeprefix("http://") for each in fleet.live]


def sampled(fleet, prompts=PROMPTS, seed=5):
    return fleet.generate(prompts, seed=seed).completion_ids


def test_what_is_sampled_does_not_depend_on_the_number_of_replicas(connect, replicas):
    one, three = sampled(connect("a")), sampled(connect("abc"))
    assert one == three
    assert len({tuple(row) for row in one}) == len(PROMPTS)
    assert connect("abc").generate(PROMPTS, seed=5).has_ended == [place % 2 == 0 for place in range(len(PROMPTS))]
    assert all(("POST", "/generate") in each.asked for each in replicas.values())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_every_prompt_is_sampled_once_whatever_their_number(connect, count):
    assert sampled(connect(), PROMPTS[:count]) == sampled(connect("b"), PROMPTS[:count])


@pytest.mark.parametrize("before", [None, 1])
def test_a_push_that_one_rejects_is_taken_back_from_all(connect, replicas, before):
    fleet = connect()
    if before:
        fleet.load_packed(blob(), before)
    expected, held = sampled(fleet), [each.digest for each in replicas.values()]
    replicas["b"].rejects = "/adapter"
    with pytest.raises(errors.SyncError, match="http://b") as caught:
        fleet.load_packed(blob(2.0), 2)
    assert caught.value.reasons == ("one", "two")
    replicas["b"].rejects = ""
    assert fleet.version == (before or 0)
    assert [each.digest for each in replicas.values()] == held
    assert sampled(fleet) == expected
    fleet.load_packed(blob(2.0), 2)
    assert fleet.version == 2


def test_a_replica_that_dies_in_a_push_is_dropped_and_the_others_serve_the_version(connect, replicas, caplog):
    fleet = connect()
    replicas["b"].breaks_at = "/adapter"
    fleet.load_packed(blob(), 1)
    assert (fleet.version, names(fleet)) == (1, ["a", "c"])
    assert "http://b is dropped, 2 replicas are left" in caplog.text


def test_a_replica_that_dies_in_a_rollout_is_dropped_and_its_share_sampled_by_the_others(connect, replicas):
    fleet = connect(version=1)
    many = PROMPTS * 8  # some for each, however slow it was the first time
    expected = sampled(fleet, many)
    replicas["a"].breaks_at = "/generate"
    assert sampled(fleet, many) == expected
    assert names(fleet) == ["b", "c"]


def test_one_that_was_started_again_is_taken_back_verified_and_pushed_to(connect, replicas, caplog):
    fleet, first = connect(), blob()  # packing it again gives other bytes: metadata has no order
    fleet.load_packed(first, 1)
    expected, incarnation = sampled(fleet), fleet.incarnation
    replicas["b"].is_away = True
    fleet.wake()
    assert names(fleet) == ["a", "c"]
    fleet.load_packed(blob(2.0), 2)
    fleet.load_packed(first, 1)
    replicas["b"].start_again()
    replicas["b"].asked.clear()
    fleet.wake()
    assert names(fleet) == ["a", "b", "c"]
    assert ("GET", "/base") in replicas["b"].asked
    assert (replicas["b"].version, replicas["b"].digest) == (1, replicas["a"].digest)
    assert fleet.incarnation > incarnation
    assert sampled(fleet) == expected
    assert "is back" in caplog.text


def test_one_that_was_only_out_of_reach_gets_the_version_that_it_has_missed(connect, replicas):
    fleet = connect(version=1)
    replicas["c"].is_away = True
    fleet.load_packed(blob(2.0), 2)
    replicas["c"].is_away = False
    fleet.wake()
    assert (replicas["c"].version, replicas["c"].digest) == (2, replicas["a"].digest)
    fleet.drop_adapter()
    replicas["c"].is_away = True
    fleet.load_packed(blob(), 3)
    fleet.drop_adapter()
    replicas["c"].is_away = False
    fleet.wake()
    assert (names(fleet), replicas["c"].version) == (["a", "b", "c"], 0)


def test_one_that_was_dropped_without_a_word_of_why_is_not_taken_back_unverified(connect, replicas, caplog):
    fleet = connect()
    (away,) = (each for each in fleet.replicas if each.url.endswith("b"))
    replicas["b"].is_away = True
    fleet._team.drop(away, TimeoutError())
    fleet.wake()
    assert names(fleet) == ["a", "c"]
    assert "is back" not in caplog.text


@pytest.mark.parametrize("how", ["base", "lie"])
def test_one_that_comes_back_as_another_is_left_out_and_the_others_go_on(connect, replicas, how, caplog):
    fleet = connect(version=1)
    expected = sampled(fleet)
    replicas["b"].start_again()
    replicas["b"].is_away = True
    fleet.wake()
    replicas["b"].is_away = False
    replicas["b"].base, replicas["b"].lies = ("other" if how == "base" else BASE), how == "lie"
    fleet.wake()
    assert sampled(fleet) == expected
    assert names(fleet) == ["a", "c"]
    assert "http://b is not taken back" in caplog.text


def test_when_all_are_away_one_that_comes_back_in_time_draws_everything(connect, replicas):
    fleet = connect(wait_s=60.0, version=1)
    expected = sampled(fleet)
    for each in replicas.values():
        each.is_away = True
    timer = threading.Timer(0.3, replicas["c"].start_again)
    timer.start()
    assert sampled(fleet) == expected
    assert names(fleet) == ["c"]
    timer.join()


def test_all_that_die_in_a_rollout_longer_than_wait_s_are_waited_for(connect, replicas):
    """What they have sampled with until then was no waiting for them."""
    whole = sampled(connect("c"))
    fleet = connect("ab", wait_s=1.0)
    for each in (replicas["a"], replicas["b"]):
        each.rate, each.breaks_at = 0.5, "/generate"  # 3 prompts and more in each

    def start_again():
        for each in (replicas["a"], replicas["b"]):
            each.rate = 0.0
            each.start_again()

    real = fleet._team.drop

    def drop(each, fault):
        real(each, fault)
        if not fleet.live:
            start_again()

    fleet._team.drop = drop
    assert sampled(fleet) == whole


def test_when_all_stay_away_the_error_names_each_and_what_to_do(connect, replicas):
    fleet = connect()
    for each in replicas.values():
        each.is_away = True
    with pytest.raises(errors.EngineBrokenError) as caught:
        sampled(fleet)
    assert [url in reason for url, reason in zip(("//a", "//b", "//c"), caught.value.reasons, strict=True)] == [
        True
    ] * 3


def test_replicas_that_answer_and_fail_each_time_do_not_keep_it_busy_for_ever(connect, replicas):
    fleet = connect(wait_s=0.5)
    broken = httpx.Response(500, text="boom")
    for each in replicas.values():
        answer = each.answer
        each.answer = lambda r, answer=answer: broken if r.url.path.endswith("/generate") else answer(r)
    started = time.monotonic()
    with pytest.raises(errors.EngineBrokenError):
        sampled(fleet)
    assert time.monotonic() - started < 120


def test_another_base_is_rejected_and_named(connect, replicas):
    replicas["b"].base = "other"
    with pytest.raises(errors.BaseMismatchError, match="http://b holds base=other"):
        connect()


@pytest.mark.parametrize(
    ("fields", "urls", "named"),
    [({"dtype": "float32"}, "abc", "http://b"), ({"start": "a-1"}, "abc", "the same"), ({}, "aab", "twice")],
)
def test_replicas_that_cannot_stand_for_one_another_are_rejected(connect, replicas, fields, urls, named):
    vars(replicas["b"]).update(fields)
    with pytest.raises(errors.ConfigConflictError, match=named):
        connect(urls)


def test_replicas_that_hold_different_adapters_do_not_pass(connect, replicas):
    fleet = connect(version=1)
    assert fleet.held_adapter(2) == {"A": replicas["a"].digest}
    replicas["c"].lies = True
    with pytest.raises(errors.CanaryError, match="http://c"):
        fleet.held_adapter(2)
    assert fleet.score_each([[1, 2]]) == [[[-1.0]], [[-1.0]], [[-2.0]]]


def test_what_was_withdrawn_is_not_sampled_with(connect):
    fleet = connect(version=1)
    fleet.withdraw_adapter("not verified")
    with pytest.raises(errors.EngineBrokenError, match="not verified"):
        sampled(fleet)
    fleet.load_packed(blob(), 2)
    assert sampled(fleet)


def test_a_closed_fleet_says_so_and_gives_all_servers_free(connect, replicas):
    fleet = connect()
    fleet.close()
    assert all(("DELETE", "/lease") in each.asked for each in replicas.values())
    with pytest.raises(errors.EngineClosedError):
        sampled(fleet)


def test_one_with_another_key_is_done_without_and_if_all_have_one_it_is_said(connect, replicas):
    fleet = connect()
    expected = sampled(fleet)
    replicas["b"].has_other_key = True
    assert sampled(fleet) == expected
    assert names(fleet) == ["a", "c"]
    for each in replicas.values():
        each.has_other_key = True
    with pytest.raises(errors.AccessDeniedError):
        sampled(fleet)


def test_replicas_that_serve_different_versions_draw_nothing_until_a_push(connect, replicas):
    replicas["b"].version, replicas["b"].digest = 3, "of-another"
    fleet = connect()
    with pytest.raises(errors.EngineBrokenError, match="//b version 3"):
        sampled(fleet)
    fleet.load_packed(blob(), 1)
    assert sampled(fleet)
    assert {each.version for each in replicas.values()} == {1}


def test_after_a_push_that_one_rejects_what_nobody_here_knows_is_not_sampled_with(connect, replicas):
    """Another trainer had pushed version 4 to all; one takes ours, one rejects it."""
    for each in replicas.values():
        each.version, each.digest = 4, "of-another"
    fleet = connect()
    replicas["b"].rejects = "/adapter"
    with pytest.raises(errors.SyncError):
        fleet.load_packed(blob(), 4)
    assert names(fleet) == ["b"]
    replicas["b"].rejects = ""
    fleet.load_packed(blob(), 5)
    fleet.wake()
    assert names(fleet) == ["a", "b", "c"]
    assert {each.version for each in replicas.values()} == {5}


def test_without_a_seed_replicas_draw_with_one_seed_that_is_new_each_time(connect):
    fleet = connect()
    first, second = (fleet.generate(PROMPTS).completion_ids for _ in range(2))
    assert first != second
    assert b"None" not in bytes(first[0])


# --- shares, stragglers, threads -------------------------------------------------------------------------------------


def test_equal_replicas_get_equal_shares_and_one_twice_as_fast_about_twice_the_prompts():
    shares, rows = LoadBalancer(), list(range(64))
    assert [len(share) for share in shares.out(rows, "abc").values()] == [21, 22, 21]
    for _ in range(12):  # each is measured with the share that it was given
        for each, share in shares.out(rows, "abc").items():
            shares.note(each, 10 * len(share), 10 * len(share) / (200.0 if each == "b" else 100.0))
    found = shares.out(rows, "abc")
    assert [row for share in found.values() for row in share] == rows
    assert len(found["a"]) == len(found["c"])
    assert 1.7 < len(found["b"]) / len(found["a"]) < 2.1


def test_with_fewer_prompts_than_replicas_the_fastest_draw_and_a_new_one_counts_as_the_mean():
    shares = LoadBalancer()
    for each, speed in zip("abc", (1, 3, 2), strict=True):
        shares.note(each, speed, 1.0)
    assert shares.out([0, 1], "abcd") in ({"b": [0], "c": [1]}, {"b": [0], "d": [1]})
    shares.forget("b")
    assert shares.speed("b") is None


def test_prompts_go_where_they_are_sampled_faster_and_the_result_is_the_same(connect, replicas):
    expected = sampled(connect("a"), PROMPTS * 6)
    replicas["a"].rate, replicas["b"].rate = 0.04, 0.01
    fleet = connect("ab")
    assert fleet.speeds == {"http://a": None, "http://b": None}
    found = [sampled(fleet, PROMPTS * 6) for _ in range(4)]
    assert found == [expected] * 4
    assert fleet.speeds["http://b"] > fleet.speeds["http://a"]


def test_a_straggler_is_done_without_what_it_says_later_is_not_counted_and_it_is_taken_back(
    connect, replicas, monkeypatch, caplog
):
    fleet = connect("ab", version=1)
    expected = sampled(fleet)
    replicas["b"].may_answer.clear()
    patience = (
        team._STRAGGLES_AFTER_S
    )  # on a busy machine the other one may be slow, too, where nobody waits for anything
    monkeypatch.setattr(team, "_STRAGGLES_AFTER_S", 0.2)
    assert sampled(fleet) == expected
    monkeypatch.setattr(team, "_STRAGGLES_AFTER_S", patience)
    assert names(fleet) == ["a"]
    assert "not done long after the others" in caplog.text
    fleet.wake()
    assert names(fleet) == ["a"]  # it has still to answer
    fleet.load_packed(blob(2.0), 2)
    replicas["b"].may_answer.set()
    end = time.monotonic() + 60
    while names(fleet) != ["a", "b"]:
        assert time.monotonic() < end
        fleet.wake()
    assert (replicas["b"].version, replicas["b"].digest) == (2, replicas["a"].digest)
    assert sampled(fleet) == sampled(fleet)


@pytest.mark.parametrize("named", [{"version": 1}, {}], ids=["asked for", "that serves"])
def test_what_has_begun_with_a_version_ends_with_it_while_the_next_is_pushed(named, connect, replicas):
    for each in replicas.values():
        each.holds_two = True
    fleet = connect("ab")
    assert fleet.capabilities().holds_two
    fleet.load_packed(blob(), 1)
    expected = sampled(fleet)
    replicas["b"].may_answer.clear()
    found = []
    thread = threading.Thread(target=lambda: found.append(fleet.generate(PROMPTS, seed=5, **named)))
    thread.start()
    while ("POST", "/generate") not in replicas["b"].asked:
        time.sleep(0.01)
    fleet.load_packed(blob(2.0), 2)
    replicas["b"].may_answer.set()
    thread.join(60)
    assert (found[0].version, found[0].completion_ids) == (1, expected)
    assert fleet.generate(PROMPTS, seed=5, version=1).completion_ids == expected
    assert fleet.generate(PROMPTS, seed=5, version=2).completion_ids == sampled(fleet) != expected


def test_one_that_came_back_with_the_newest_version_alone_leaves_the_one_before_it_to_the_others(connect, replicas):
    for each in replicas.values():
        each.holds_two = True
    fleet = connect("ab", version=1)
    expected = sampled(fleet)
    fleet.load_packed(blob(2.0), 2)
    replicas["b"].start_again()
    fleet.wake()
    assert names(fleet) == ["a", "b"]
    replicas["b"].asked.clear()
    assert fleet.generate(PROMPTS, seed=5, version=1).completion_ids == expected
    assert ("POST", "/generate") not in replicas["b"].asked
    for name in "ab":
        replicas[name].start_again()
    fleet.wake()
    with pytest.raises(errors.VersionGoneError):
        fleet.generate(PROMPTS, seed=5, version=1)


def test_several_threads_draw_while_one_replica_dies_and_every_prompt_is_sampled_once(connect, replicas, monkeypatch):
    monkeypatch.setattr(
        team, "_LOOK_AGAIN_S", 600.0
    )  # a busy machine takes longer than five seconds, and it would be back
    for each in replicas.values():
        each.holds_two = True
    fleet = connect(version=1)
    expected = [sampled(fleet, seed=seed) for seed in range(8)]
    found = {}
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: sampled(fleet, seed=seed)})) for seed in range(8)
    ]
    replicas["b"].breaks_at = "/generate"
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert [found[seed] for seed in range(8)] == expected
    assert names(fleet) == ["a", "c"]


def test_one_that_is_still_drawing_is_not_asked_for_a_sign_of_life(connect, replicas, monkeypatch):
    """Three of those without an answer end an actor of Ray."""
    monkeypatch.setattr(team, "_STRAGGLES_AFTER_S", 0.2)
    fleet = connect("ab")
    replicas["b"].may_answer.clear()
    sampled(fleet)
    assert names(fleet) == ["a"]
    (busy,) = (each for each in fleet.replicas if each.url.endswith("b"))
    monkeypatch.setattr(busy, "is_there", lambda _: pytest.fail("it was asked"))
    fleet._team._lost[busy] = replace(fleet._team._lost[busy], next_look=0.0)
    fleet.wake()
    assert names(fleet) == ["a"]
    replicas["b"].may_answer.set()


def test_an_actor_is_known_to_be_starting_before_anybody_can_ask_it(monkeypatch):
    """Otherwise the request of another thread would be answered by one that was not verified."""
    seen, made = [], []

    def actor():
        def remote(*asked):
            line = made[0] if made else None
            seen.append(line is not None and line._actor is mine)
            return asked

        mine = SimpleNamespace(ask=SimpleNamespace(remote=remote))
        return mine

    ray = SimpleNamespace(kill=lambda _: None, exceptions=SimpleNamespace(RayError=ValueError))
    monkeypatch.setattr(ray_connection, "require_ray", lambda: ray)
    limits = {"timeout_s": 1.0, "start_timeout_s": 1.0, "health_check_timeout_s": 1.0}
    made.append(ray_connection.RayConnection("ray:0", actor, ray_connection.Parcels(), **limits))
    first = made[0]._actor
    made[0]._replace(first)
    assert made[0]._actor is not first
    assert seen == [False, False]


@pytest.mark.parametrize("has_started", [True, False])
def test_an_actor_that_was_closed_is_asked_nothing_and_starts_no_cluster(has_started, monkeypatch):
    """Ray starts one by itself for whoever asks without one; a look for lost replicas may still be under way."""
    asked = []

    def ray():
        asked.append("ray")
        return SimpleNamespace(is_initialized=lambda: False)

    def actor():
        return SimpleNamespace(ask=SimpleNamespace(remote=lambda *question: asked.append(question[1:3])))

    monkeypatch.setattr(ray_connection, "require_ray", ray)
    limits = {"timeout_s": 1.0, "start_timeout_s": 1.0, "health_check_timeout_s": 1.0}
    connection = ray_connection.RayConnection("ray:0", actor, ray_connection.Parcels(), **limits)
    connection._starting = None if has_started else "its state"
    connection.close()
    asked.clear()
    with pytest.raises(errors.EngineClosedError):
        connection.computes(2.0, bare=True)
    assert asked == []


def test_one_that_was_restarted_unheard_on_another_base_is_left_out(connect, replicas):
    fleet = connect("ab", version=3)
    replicas["b"].start_again()
    replicas["b"].base = "another"
    fleet.wake()
    assert (names(fleet), replicas["b"].version) == (["a"], 0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_that_were_restarted_at_once_are_all_verified_and_pushed_to(connect, replicas, count, caplog):
    fleet = connect(version=3)
    for name in "abc"[:count]:
        replicas[name].start_again()
    fleet.wake()
    assert names(fleet) == ["a", "b", "c"]
    assert {(each.version, each.digest) for each in replicas.values()} == {(3, replicas["c"].digest)}
    assert "dropped" not in caplog.text


def test_one_that_was_restarted_is_verified_also_where_waking_another_failed(connect, replicas):
    fleet = connect("ab", version=3)
    replicas["a"].start_again()
    replicas["b"].rejects = "/state"
    with pytest.raises(errors.SyncError, match="Said by http://b"):
        fleet.wake()
    replicas["b"].rejects = ""
    fleet.wake()
    assert (names(fleet), replicas["a"].version) == (["a", "b"], 3)


def test_a_drop_that_comes_while_another_thread_takes_it_back_is_not_forgotten(connect, replicas, monkeypatch):
    """A thread takes the replica back; before it has noted that, another one finds it gone again."""
    fleet = connect()
    group = fleet._team
    lost = group.all[1]
    group.drop(lost, errors.EngineBrokenError("gone"))
    proves, dropped = group._prove, []

    def prove(each):
        proves(each)
        if not dropped:  # the proof was made; then it dies, and a rollout of another thread notices first
            dropped.append(threading.Thread(target=group.drop, args=(each, errors.EngineBrokenError("gone again"))))
            dropped[0].start()
            dropped[0].join(0.5)

    monkeypatch.setattr(group, "_prove", prove)
    for entry in group._lost.values():
        entry.next_look = 0.0
    group._look_for_lost()
    dropped[0].join()
    assert not group.takes_part(lost)
    assert group._lost[lost].reason == "gone again"
    assert group.returns == 0


@pytest.fixture
def direct(base):
    line = Direct(base.path, lambda directory: FakeEngine(load_base(base)))
    with EngineClient(line, timeout_s=60.0, wait_s=0.0) as engine:
        yield engine


def test_an_actor_answers_by_the_routes_of_a_server_and_gives_its_errors_as_they_are(direct, base, adapted):
    fake, packed = FakeEngine(load_base(base)), pack_adapter(export_adapter(adapted))
    assert isinstance(direct, RolloutEngine)
    assert direct.describe_base() == fake.describe_base()
    assert direct.repair_base() == {}
    wanted = replace(fake.capabilities(), name="", can_sleep=False, takes_in_place=False, takes_bytes=True)
    found = direct.capabilities()
    assert replace(found, name="") == replace(wanted, byte_way="object_store", dense_way="object_store")
    assert f"process {os.getpid()}" in found.name
    bare = fake.generate(PROMPTS, max_tokens=3, seed=1)
    assert replace(direct.generate(PROMPTS, max_tokens=3, seed=1), seconds=bare.seconds) == bare
    assert (
        direct.generate(PROMPTS[4:], max_tokens=3, seed=1, places=range(4, 7)).completion_ids == bare.completion_ids[4:]
    )
    direct.load_packed(packed, 3)
    assert (direct.version, direct.generate(PROMPTS, max_tokens=3).version) == (3, 3)
    assert set(direct.held_adapter(8)) == {name for name, t in export_adapter(adapted).tensors.items() if t.any()}
    assert direct.score(PROMPTS) != direct.score(PROMPTS, bare=True) == fake.score(PROMPTS)
    with pytest.raises(errors.SyncError, match="no module"):
        direct.load_packed(blob(), 4)
    with pytest.raises(errors.PromptTooLongError):
        direct.generate([[1] * 64])
    with pytest.raises(errors.EngineUnsupportedError, match="bake_base"):
        direct.load_dense(iter([("model.norm.weight", torch.ones(8))]), 4)
    assert direct.generate(PROMPTS, max_tokens=3).version == 3
    direct.drop_adapter()
    assert (direct.version, direct.held_adapter(8)) == (0, {})


def test_an_actor_in_the_place_of_another_is_asked_nothing_before_it_holds_base_and_adapter(direct, adapted):
    direct.load_packed(pack_adapter(export_adapter(adapted)), 3)
    served, start = direct.generate(PROMPTS, max_tokens=3, seed=1), direct.start
    direct.connection.start_again()
    again = direct.generate(PROMPTS, max_tokens=3, seed=1)
    assert (again.completion_ids, again.version) == (served.completion_ids, 3)
    assert (direct.incarnation, direct.start != start) == (2, True)


def test_actors_whose_engine_gives_no_logprobs_say_so(base):
    class Silent(FakeEngine):
        def capabilities(self):
            return replace(super().capabilities(), gives_logprobs=False)

        def generate(self, *args, **named):
            return replace(super().generate(*args, **named), logprobs=None)

    actors = [Direct(base.path, lambda directory: Silent(load_base(base))) for _ in range(2)]
    with Fleet([EngineClient(each, timeout_s=60.0, wait_s=0.0) for each in actors], wait_s=0.0) as fleet:
        assert not fleet.capabilities().gives_logprobs
        found = fleet.generate(PROMPTS, max_tokens=3, seed=1)
        one = FakeEngine(load_base(base)).generate(PROMPTS, max_tokens=3, seed=1)
        assert found.completion_ids == one.completion_ids
        assert found.logprobs == [[None] * len(ids) for ids in found.completion_ids]


def test_an_actor_makes_one_change_after_the_other_in_the_order_in_which_they_were_asked_for(base, adapted):
    """A first push whose answer nobody waits for any more is undone by the drop that comes behind it."""
    is_loading, may_load = threading.Event(), threading.Event()

    class Slow(FakeEngine):
        def load_adapter(self, directory, version):
            is_loading.set()
            assert may_load.wait(60)
            super().load_adapter(directory, version)

    packed, actor = pack_adapter(export_adapter(adapted)), Direct(base.path, lambda _: Slow(load_base(base))).actor
    push = threading.Thread(target=actor.ask, args=("", "PUT", "/adapter?version=1", packed, 1))
    drop = threading.Thread(target=actor.ask, args=("", "DELETE", "/adapter", None, 2))
    push.start()
    assert is_loading.wait(60)
    drop.start()
    drop.join(0.2)
    may_load.set()
    for each in (push, drop):
        each.join(60)
    late = actor.ask("", "PUT", "/adapter?version=1", packed, 1)
    assert (type(late.error), late.version) == (errors.SyncError, 0)
    assert actor.ask("", "PUT", "/adapter?version=1", packed, 3).version == 1
    never = actor.ask("", "PUT", "/adapter?version=0", packed, 4)
    assert (type(never.error), never.version) == (errors.SyncError, 1)
    actor.close()


@pytest.mark.parametrize("is_over", [True, False], ids=["it has ended", "it is under way"])
def test_what_an_actor_samples_with_the_version_of_a_push_in_between_is_given_as_it_is(base, adapted, is_over):
    """With an engine that holds one version: what was asked for with the one before is sampled with the next one."""

    class Pushed(Direct):
        def ask(self, method, path, body, start):
            if path == "/generate":
                push.start()
                assert has_come.wait(60)
                if is_over:
                    may_end.set()
                    push.join(60)
            answer = super().ask(method, path, body, start)
            if method == "PUT" and "version=2" in path:
                has_come.set()
                assert may_end.wait(60)
            return answer

    has_come, may_end, packed = threading.Event(), threading.Event(), pack_adapter(export_adapter(adapted))
    line = Pushed(base.path, lambda directory: FakeEngine(load_base(base)))
    with EngineClient(line, timeout_s=60.0, wait_s=0.0) as engine:
        push = threading.Thread(target=lambda: engine.load_packed(packed, 2))
        engine.load_packed(packed, 1)
        assert engine.generate(PROMPTS, max_tokens=2).version == 2
        may_end.set()
        push.join(60)
        assert engine.version == 2


def test_a_rollout_that_a_push_has_divided_is_sampled_again_with_one_version(base, adapted):
    """One of two engines that hold one version each had answered before the push, and the other one after it."""

    class Divided(Direct):
        def ask(self, method, path, body, start):
            if path == "/generate" and self is second and not has_pushed.is_set():
                assert has_answered.wait(60)
                has_pushed.set()
                push = threading.Thread(target=lambda: fleet.load_packed(packed, 2))
                push.start()
                push.join(60)
            answer = super().ask(method, path, body, start)
            if path == "/generate" and self is not second:
                has_answered.set()
            return answer

    has_answered, has_pushed, packed = threading.Event(), threading.Event(), pack_adapter(export_adapter(adapted))
    first, second = (Divided(base.path, lambda _: FakeEngine(load_base(base))) for _ in range(2))
    engines = [EngineClient(each, timeout_s=60.0, wait_s=0.0) for each in (first, second)]
    with Fleet(engines, wait_s=0.0) as fleet:
        found = fleet.generate(PROMPTS, max_tokens=3, seed=1)
        assert (found.version, fleet.version) == (2, 2)
        assert found.completion_ids == engines[0].generate(PROMPTS, max_tokens=3, seed=1).completion_ids
        assert fleet.generate(PROMPTS, max_tokens=3, seed=1).completion_ids == found.completion_ids
