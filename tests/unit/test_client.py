"""`ServerEngine` against answers of every kind; the real server is in tests/engine/test_server.py."""

import contextlib
import hashlib
import http.server
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from qlora_rl import errors
from qlora_rl.contracts import BaseFingerprint
from qlora_rl.engine.client import http_errors
from qlora_rl.engine.client.engine import PREFIX, START, VERSION, ServerEngine
from qlora_rl.engine.client.state import ServerState

KEY = "a-key-of-some-length"
ABOUT = {
    "name": "a server", "base": "b" * 64, "max_lora_rank": 8, "max_model_length": 64, "max_body_bytes": 1000,
    "adapter_dtype": "bfloat16", "adapter_dir": "/nowhere", "digest": "", "pushes": 0,
}  # fmt: skip


class Server:
    """Answers `/state`, and whatever else it is told to; `None` is a connection that breaks."""

    def __init__(self):
        self.start, self.version, self.asked, self.answers, self.about = "one", 0, [], [], dict(ABOUT)

    def __call__(self, request):
        self.asked.append((request.method, request.url.path.removeprefix(PREFIX)))
        assert request.headers["authorization"] == f"Bearer {KEY}"
        if self.answers:
            answer = self.answers.pop(0)
            if answer is None:
                raise httpx.ReadError("broken", request=request)
            return answer
        if request.headers.get(START, self.start) != self.start:
            return httpx.Response(412, headers=self.marks())
        return httpx.Response(200, json=self.content(request), headers=self.marks())

    def content(self, request):
        path = request.url.path.removeprefix(PREFIX)
        if request.method == "PUT":
            self.version = int(request.url.params["version"])
            return {"digest": request.url.params["digest"], "new": True}
        if (request.method, path) == ("DELETE", "/adapter"):
            self.version = 0
            return {}
        if path == "/generate":
            asked = json.loads(request.content)
            rows = len(asked["prompts"])
            return {
                "completion_ids": [[1]] * rows,
                "logprobs": [[-1.0]] * rows,
                "version": self.version,
                "seconds": 0.0,
            }
        if path == "/base":
            return {"leaves": {}, "facts": {}}
        return self.about

    def marks(self):
        return {START: self.start, VERSION: str(self.version)}


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def engine(server, monkeypatch):
    monkeypatch.setattr("qlora_rl.engine.client.http_errors.time.sleep", lambda s: None)
    with ServerEngine("http://server", api_key=KEY, wait_s=5.0, transport=httpx.MockTransport(server)) as engine:
        server.asked.clear()
        yield engine


def rejection(kind, message="because"):
    return {"error": {"kind": kind, "message": message, "reasons": ["one", "two"]}}


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (400, rejection("ConfigConflictError"), errors.ConfigConflictError),
        (400, rejection("PromptTooLongError"), errors.PromptTooLongError),
        (401, rejection("AccessDeniedError"), errors.AccessDeniedError),
        (401, "", errors.AccessDeniedError),
        (403, rejection("AccessDeniedError"), errors.AccessDeniedError),
        (403, "<html>proxy</html>", errors.AccessDeniedError),
        (404, {"detail": "Not Found"}, errors.EngineUnsupportedError),
        (409, rejection("ServerTakenError"), errors.ServerTakenError),
        (413, rejection("SyncError"), errors.SyncError),
        (422, rejection("SyncError"), errors.SyncError),
        (500, "boom", errors.EngineBrokenError),
        (500, rejection("nonsense"), errors.EngineBrokenError),
        (500, rejection("Sequence"), errors.EngineBrokenError),
        (503, rejection("EngineBrokenError"), errors.EngineBrokenError),
        (301, "", errors.EngineBrokenError),
        (418, [], errors.EngineBrokenError),
    ],
)
def test_a_rejection_is_an_error_of_its_own_and_is_not_asked_again(engine, server, status, content, error):
    server.answers = [
        httpx.Response(status, json=content) if not isinstance(content, str) else httpx.Response(status, text=content)
    ]
    with pytest.raises(error) as caught:
        engine.generate([[1, 2]], max_tokens=1)
    assert type(caught.value) is error
    assert len(server.asked) == 1
    if isinstance(content, dict) and content.get("error", {}).get("kind") == error.__name__:
        assert caught.value.reasons == ("one", "two")


@pytest.mark.parametrize("fault", [None, httpx.Response(502), httpx.Response(503, text="away"), httpx.Response(504)])
def test_a_fault_of_the_connection_is_asked_again(engine, server, fault):
    server.answers = [fault, fault]
    assert engine.generate([[1, 2]], max_tokens=1).completion_ids == [[1]]
    assert len(server.asked) == 3


def test_a_server_that_stays_away_is_an_error_that_says_what_to_do(engine, server):
    engine.wait_s = 0.0
    for version, way in (
        (0, r"Start it \(qlora-rl serve BASE\), or correct its address"),
        (2, "version 2 is pushed again"),
    ):
        engine.version = version
        server.answers = [None]
        with pytest.raises(errors.EngineBrokenError, match=way):
            engine.generate([[1, 2]], max_tokens=1)


def test_a_server_that_is_away_is_asked_again_and_again_and_said_to_be_away_once(engine, server, caplog, monkeypatch):
    monkeypatch.setattr(http_errors, "SAID_EVERY_S", 3600.0)
    server.answers = [None, None, None]
    assert engine.generate([[1, 2]], max_tokens=1).completion_ids
    assert not server.answers
    assert [record.message for record in caplog.records if "is away" in record.message] == [caplog.records[0].message]


def given_up():
    error = {"error": {"kind": "", "message": "vLLM has given up 1 of 1 requests before their end"}}
    return httpx.Response(503, json=error, headers={http_errors.GAVE_UP: "1"})


def test_a_request_that_a_living_server_gives_up_is_asked_again_but_not_for_ever(engine, server):
    engine.wait_s = 3600.0
    server.answers = [given_up() for _ in range(http_errors.GIVEN_UP_AT_MOST - 1)]
    assert engine.generate([[1, 2]], max_tokens=1).completion_ids == [[1]]
    server.answers = [given_up() for _ in range(100)]
    with pytest.raises(errors.EngineBrokenError):
        engine.generate([[1, 2]], max_tokens=1)
    assert len(server.answers) == 100 - http_errors.GIVEN_UP_AT_MOST


def test_after_a_restart_the_base_is_verified_and_the_adapter_pushed_before_anything_is_asked(own, server):
    engine = own
    engine.load_packed(b"bytes", 4)
    server.asked.clear()
    server.start, server.version = "two", 0
    rollout = engine.generate([[1, 2]], max_tokens=1)
    assert server.asked == [
        ("POST", "/generate"), ("GET", "/state"), ("GET", "/base"), ("PUT", "/adapter"), ("POST", "/generate"),
    ]  # fmt: skip
    assert (rollout.version, engine.version, engine.incarnation) == (4, 4, 2)


def test_while_a_restarted_server_is_verified_other_threads_ask_it_nothing(engine, server):
    engine.base = server.about["base"] = BaseFingerprint({}).digest
    engine.load_packed(b"bytes", 4)
    server.asked.clear()
    server.start, server.version = "two", 0
    real, seen = server.content, []

    def content(request):
        if request.url.path.endswith("/base") and not seen:
            seen.append(pool.submit(engine.generate, [[1, 2]], max_tokens=1))
            threading.Event().wait(0.2)  # `time.sleep` does nothing here
        return real(request)

    server.content = content
    with ThreadPoolExecutor(1) as pool:
        engine.wake()
        assert seen[0].result(30).version == 4
    verified = [("GET", "/state"), ("GET", "/state"), ("GET", "/base"), ("PUT", "/adapter")]
    assert server.asked[:4] == verified
    assert sorted(server.asked[4:]) == [("GET", "/state"), ("POST", "/generate")]  # whichever thread is quicker
    assert engine.incarnation == 2


def test_the_version_before_the_newest_is_asked_for_by_its_digest_and_an_older_one_not_at_all(engine, server):
    for version in (1, 2):
        engine.load_packed(b"bytes %d" % version, version)
    bodies, real = [], server.content

    def note(request):
        found = real(request)
        if request.url.path.endswith("/generate"):
            bodies.append(json.loads(request.content))
            found["version"] = bodies[-1]["version"]  # it holds both
        return found

    server.content = note
    assert [engine.generate([[1, 2]], max_tokens=1, version=v).version for v in (None, 2, 1)] == [2, 2, 1]
    assert [body.get("held") for body in bodies] == [None, True, True]
    assert [body["digest"] for body in bodies] == [hashlib.sha256(b"bytes %d" % v).hexdigest() for v in (2, 2, 1)]
    with pytest.raises(errors.VersionGoneError):
        engine.generate([[1, 2]], max_tokens=1, version=0)
    assert len(bodies) == 3


def test_another_thread_ends_what_waits_on_a_connection_whichever_request_has_opened_it():
    """A real server, that answers everything but rollouts, and closes the first connection as if it had idled for too
    long."""
    http_errors, arrived, is_over = Server(), threading.Event(), threading.Event()
    opened = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            content = self.rfile.read(int(self.headers.get("content-length", 0)))
            request = httpx.Request(
                self.command, f"http://server{self.path}", headers=dict(self.headers), content=content
            )
            what = request.url.path.rpartition("/")[2]
            opened.setdefault(what, self.client_address)
            self.close_connection = what == "state"
            if what == "generate":
                arrived.set()
                is_over.wait(60)
            answer = http_errors(request)
            self.send_response(answer.status_code)
            for name, value in {
                **answer.headers,
                "connection": "close" if self.close_connection else "keep-alive",
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_DELETE = do_GET

        def log_message(self, *_):
            pass

    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        pool = stack.enter_context(ThreadPoolExecutor(2))
        pool.submit(listening.serve_forever)
        stack.callback(listening.shutdown)
        stack.callback(is_over.set)
        engine = stack.enter_context(ServerEngine(f"http://127.0.0.1:{listening.server_port}", api_key=KEY))
        engine.claim()
        rollout = pool.submit(engine.generate, [[1, 2]], max_tokens=1)
        assert arrived.wait(60)
        engine.cancel()
        with pytest.raises(errors.RolloutCancelledError):
            rollout.result(60)
    assert opened["generate"] == opened["lease"] != opened["state"]


def test_the_answer_to_a_rollout_that_is_read_after_a_push_does_not_turn_the_version_back(engine, server):
    engine.load_packed(b"old", 1)
    real = server.content

    def slow(request):
        found = real(request)
        if request.url.path.endswith("/generate"):
            server.content = real
            engine.load_packed(b"new", 2)  # another thread, while this answer is on its way
            server.version = 1
        return found

    server.content = slow
    assert engine.generate([[1, 2]], max_tokens=1).version == 1
    assert engine.version == 2


@pytest.mark.parametrize("has_arrived", [True, False])
@pytest.mark.parametrize("before", [b"old", "dropped", "nothing"])
def test_a_push_without_an_answer_is_undone_before_anything_is_sampled(own, server, before, has_arrived):
    """One that is late still waits for the server's lock when the state is read: only a request behind it undoes it."""
    if before == b"old":
        own.load_packed(before, 1)
    elif before == "dropped":
        own.drop_adapter()
    own.wait_s = 0.0
    server.answers = [None]
    with pytest.raises(errors.EngineBrokenError):
        own.load_packed(b"new", 2)
    server.version = 2 if has_arrived else server.version
    server.asked.clear()
    own.generate([[1, 2]], max_tokens=1)
    restored = ("PUT" if before == b"old" else "DELETE", "/adapter")
    assert server.asked == [
        ("POST", "/generate"), ("GET", "/state"), ("GET", "/base"), restored, ("POST", "/generate"),
    ]  # fmt: skip


def test_a_rejected_push_leaves_no_doubt(engine, server):
    server.answers = [httpx.Response(422, json=rejection("SyncError"))]
    with pytest.raises(errors.SyncError):
        engine.load_packed(b"new", 2)
    server.asked.clear()
    assert engine._expected() == {"version": 0, "digest": None}
    engine.generate([[1, 2]], max_tokens=1)
    assert server.asked == [("POST", "/generate")]


def test_what_was_withdrawn_is_not_asked_until_the_next_push(engine, server):
    engine.base = server.about["base"] = BaseFingerprint({}).digest
    engine.load_packed(b"bytes", 4)
    engine.withdraw_adapter("version 4 was not verified")
    server.asked.clear()
    for ask in (engine.generate, engine.score):
        with pytest.raises(errors.EngineBrokenError):
            ask([[1, 2]])
    server.answers = [httpx.Response(500, text="boom")]
    with pytest.raises(errors.EngineBrokenError):
        engine.drop_adapter()  # it may serve what was withdrawn still
    with pytest.raises(errors.EngineBrokenError):
        engine.generate([[1, 2]])
    assert server.asked == [("DELETE", "/adapter")]
    engine.drop_adapter()
    engine.generate([[1, 2]], max_tokens=1)
    engine.withdraw_adapter("it was lost")
    engine.load_packed(b"bytes", 5)
    engine.generate([[1, 2]], max_tokens=1)


def test_a_restart_on_another_base_is_rejected_each_time(engine, server):
    server.start = "two"
    for _ in range(2):
        with pytest.raises(errors.BaseMismatchError):
            engine.generate([[1, 2]], max_tokens=1)
    assert engine.incarnation == 1


@pytest.mark.parametrize(
    "answer", [httpx.Response(200, text="hello"), httpx.Response(200, json={}), httpx.Response(404)]
)
def test_somebody_else_at_the_url_is_said(answer):
    transport = httpx.MockTransport(lambda request: answer)
    with pytest.raises(errors.EngineUnsupportedError, match="qlora-rl serve"):
        ServerEngine("http://server", api_key=KEY, transport=transport)


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({}, errors.AccessDeniedError, "QLORA_RL_API_KEY"),
        ({"api_key_file": "/nowhere/none"}, errors.AccessDeniedError, "/nowhere/none"),
        ({"api_key": KEY, "api_key_file": "/nowhere/none"}, errors.ConfigConflictError, "api_key_file"),
    ],
)
def test_without_a_key_nothing_is_asked(monkeypatch, given, error, named):
    monkeypatch.delenv("QLORA_RL_API_KEY", raising=False)
    with pytest.raises(error, match=named):
        ServerEngine("http://server", **given)


def test_a_prompt_that_does_not_fit_is_not_sent(engine, server):
    with pytest.raises(errors.PromptTooLongError):
        engine.generate([[1] * 64])
    assert server.asked == []


def test_the_client_imports_no_vllm():
    code = (
        "import sys, qlora_rl; qlora_rl.ServerEngine, qlora_rl.connect; "
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'fastapi', 'ray')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_full_weights_that_a_restarted_server_has_lost_are_never_silently_the_base(engine, server, monkeypatch):
    server.about["base"] = engine.base = BaseFingerprint({}).digest
    engine._dense = engine.version = server.version = 3
    assert engine.holds_dense
    server.start, server.version = "two", 0
    for use in (lambda: engine.generate([[1, 2]], max_tokens=1), lambda: engine.score([[1, 2]])):
        with pytest.raises(errors.EngineBrokenError):
            use()
    assert not engine.holds_dense
    assert server.asked[0] == ("POST", "/generate")
    assert len([path for _, path in server.asked if path == "/generate"]) == 1  # the new server was not asked


def test_full_weights_without_an_answer_are_taken_back_before_anything_is_verified(engine, server):
    """They may have arrived: then what the server holds is not the base."""
    server.about |= {"base": BaseFingerprint({}).digest, "takes_dense": True}
    engine.base, engine.wait_s = server.about["base"], 0.0
    begun = {"push": "p", "directory": "qlora-rl-weights-0f"}
    server.answers = [httpx.Response(200, json=begun, headers=server.marks()), None]  # the commit
    with pytest.raises(errors.EngineBrokenError):
        engine.load_dense([], 1)
    server.asked.clear()
    with pytest.raises(errors.EngineBrokenError):
        engine.generate([[1, 2]], max_tokens=1)
    assert server.asked == [("POST", "/generate"), ("GET", "/state"), ("DELETE", "/adapter"), ("GET", "/base")]


@pytest.mark.parametrize(
    "key", ["two words of a key", "line\nbreak-in-a-key", "a-key-with-\x00-inside", "schlüssel-schlüssel"]
)
def test_a_key_that_cannot_be_sent_is_rejected_and_never_shown(key, tmp_path, monkeypatch):
    monkeypatch.delenv("QLORA_RL_API_KEY", raising=False)
    file = tmp_path / "key"
    file.write_bytes(key.encode("latin-1"))
    for given in ({"api_key": key}, {"api_key_file": file}):
        with pytest.raises(errors.AccessDeniedError) as caught:
            ServerEngine("http://server", transport=httpx.MockTransport(Server()), **given)
        assert key not in str(caught.value)


@pytest.mark.parametrize("error", [httpx.LocalProtocolError, httpx.UnsupportedProtocol])
def test_what_cannot_be_sent_is_not_tried_again_and_shows_no_header(engine, server, error):
    def fail(request):
        raise error(f"Illegal header value b'Bearer {KEY}'", request=request)

    engine.connection.client._transport = httpx.MockTransport(fail)
    engine.wait_s = 3600.0
    with pytest.raises(errors.EngineBrokenError) as caught:
        engine.wake()
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:8000", "127.0.0.1:8000", "ftp://server", "http://", "http://server:port"])
def test_what_is_no_url_of_a_server_is_rejected_at_once(url):
    with pytest.raises(errors.ConfigConflictError):
        ServerEngine(url, api_key=KEY, wait_s=3600.0)


@pytest.mark.parametrize("url", ["user:secret@host", "user:secret@ho st,b", "host/?token=secret", "host/#secret"])
def test_a_url_with_a_secret_is_rejected_and_never_shown(url):
    with pytest.raises(errors.ConfigConflictError, match="api_key_file") as caught:
        ServerEngine(f"http://{url}", api_key=KEY, wait_s=3600.0)
    assert "secret" not in str(caught.value)


def test_an_answer_by_another_version_than_was_asked_for_is_rejected(engine, server):
    engine.load_packed(b"adapter", 3)
    content = {"completion_ids": [[1]], "logprobs": [[-1.0]], "version": 4, "seconds": 0.0}
    server.answers = [httpx.Response(200, json=content, headers=server.marks())]
    with pytest.raises(errors.ServerTakenError):
        engine.generate([[1]])


@pytest.mark.parametrize("is_over", [True, False], ids=["it has ended", "it is under way"])
def test_a_push_by_another_thread_of_the_same_trainer_is_nobody_elses(engine, server, is_over):
    """The server rejects a request that names the version before; it is asked again, with what serves now."""
    engine.load_packed(b"one", 1)
    push = threading.Thread(target=engine.load_packed, args=(b"two", 2))
    has_come, may_end, named = threading.Event(), threading.Event(), []

    def answer(request):
        found = server(request)
        if request.method == "PUT":
            has_come.set()
            assert may_end.wait(60)
        if request.url.path.endswith("/generate"):
            named.append(json.loads(request.content)["version"])
            if len(named) == 1:
                push.start()
                assert has_come.wait(60)
            if is_over or len(named) == 2:
                may_end.set()
            if is_over:
                push.join(60)
            if named[-1] == 1:
                return httpx.Response(409, json=rejection("ServerTakenError"), headers=server.marks())
        return found

    engine.connection.client._transport = httpx.MockTransport(answer)
    assert engine.generate([[1, 2]], max_tokens=1).version == 2
    push.join(60)
    assert (named[0], named[-1]) == (1, 2)
    assert is_over == (len(named) == 2)


def test_who_was_killed_comes_back_under_its_name(server):
    names = []

    def seen(request):
        names.append(request.headers["x-qlora-session"])
        return server(request)

    for session in ("run-7", "run-7", None, None):
        ServerEngine("http://server", api_key=KEY, session=session, transport=httpx.MockTransport(seen)).claim()
    assert names[:4] == ["run-7"] * 4
    assert len(set(names[4:])) == 2


@pytest.fixture
def own(engine, server):
    """The engine, on the base that the server describes: after a restart it is verified."""
    engine.base = server.about["base"] = BaseFingerprint({}).digest
    assert not engine._state.is_in_doubt
    return engine


def recoveries(engine, server):
    """Each request but those for rollouts, and whether it belongs to a recovery."""
    seen, real = [], server.content

    def content(request):
        path = request.url.path.removeprefix(PREFIX)
        if path != "/generate":
            seen.append((request.method, path, engine._state.is_recovering))
        return real(request)

    server.content = content
    return seen


def test_from_the_first_answer_on_the_server_is_known(engine):
    assert ServerState("http://server").start == ""
    assert (engine._state.is_in_doubt, engine.start) == (False, "one")


@pytest.mark.parametrize("cause", ["restart", "doubt"])
def test_a_recovery_lasts_until_the_base_is_verified_and_the_policy_pushed_again(own, server, cause):
    own.load_packed(b"old", 1)
    if cause == "restart":
        server.start, server.version = "two", 0
    else:
        own.wait_s, server.answers = 0.0, [None]
        with pytest.raises(errors.EngineBrokenError):
            own.load_packed(b"new", 2)
        assert own._state.is_in_doubt
    seen = recoveries(own, server)
    assert own.generate([[1, 2]], max_tokens=1).version == 1
    assert seen == [(*what, True) for what in (("GET", "/state"), ("GET", "/base"), ("PUT", "/adapter"))]
    assert (own._state.is_recovering, own.start, own.incarnation) == (False, server.start, 2)


@pytest.mark.parametrize(
    ("fault", "error"),
    [("other base", errors.BaseMismatchError), ("rejected", errors.SyncError), ("away", errors.EngineBrokenError)],
)
def test_a_recovery_that_fails_leaves_doubt_and_the_next_request_begins_another(own, server, fault, error):
    own.load_packed(b"old", 1)
    own.wait_s, server.start, server.version = 0.0, "two", 0
    base, real = server.about["base"], server.content
    http_errors = {"rejected": httpx.Response(422, json=rejection("SyncError")), "away": None}

    def content(request):
        found = real(request)
        if request.url.path.endswith("/base") and fault in http_errors:
            server.answers = [http_errors[fault]]  # to the push that comes next
        return found

    server.content = content
    server.about["base"] = "c" * 64 if fault == "other base" else base
    with pytest.raises(error):
        own.generate([[1, 2]], max_tokens=1)
    assert (own._state.is_in_doubt, own.incarnation) == (True, 1 if fault == "other base" else 2)
    server.content, server.about["base"] = real, base
    assert own.generate([[1, 2]], max_tokens=1).version == 1
    assert not own._state.is_in_doubt


def test_a_server_that_is_started_again_during_a_recovery_ends_it_with_an_error(own, server):
    own.load_packed(b"old", 1)
    server.start, real = "two", server.content

    def content(request):
        if request.url.path.endswith("/base"):
            server.start, server.content = "three", real
        return real(request)

    server.content = content
    with pytest.raises(errors.EngineBrokenError):
        own.generate([[1, 2]], max_tokens=1)
    assert own._state.is_in_doubt
    assert own.generate([[1, 2]], max_tokens=1).version == 1
    assert (own._state.is_recovering, own.start) == (False, "three")


def test_an_engine_that_is_closed_during_a_recovery_stays_closed(own, server):
    server.start, real = "two", server.content

    def content(request):
        if request.url.path.endswith("/state"):
            own.close()
        return real(request)

    server.content = content
    with pytest.raises(errors.EngineClosedError):
        own.generate([[1, 2]], max_tokens=1)
    assert own._state.is_closed
    own.close()
    assert server.asked[-1] == ("DELETE", "/lease")


@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_drop_without_an_answer_ends_in_the_bare_base(own, server, has_arrived):
    own.load_packed(b"old", 5)
    own.wait_s, server.answers = 0.0, [None]
    with pytest.raises(errors.EngineBrokenError):
        own.drop_adapter()
    server.version = 0 if has_arrived else 5
    assert own.generate([[1, 2]], max_tokens=1).version == server.version == 0


def test_a_push_that_was_cancelled_after_it_arrived_leaves_doubt(own, server):
    own.load_packed(b"old", 1)
    real = server.content

    def content(request):
        real(request)
        server.content = real
        own.cancel()
        raise httpx.ReadError("cut", request=request)

    server.content = content
    with pytest.raises(errors.RolloutCancelledError):
        own.load_packed(b"new", 2)
    assert (server.version, own._state.is_in_doubt) == (2, True)
    assert own.generate([[1, 2]], max_tokens=1).version == 1


def test_a_recovery_that_is_interrupted_as_it_begins_verifies_nothing_and_the_next_one_does(own, server, monkeypatch):
    own.load_packed(b"old", 1)
    server.start, server.version = "two", 0
    begin = own._state.begin_recovery

    def interrupted(start):
        begin(start)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(own._state, "begin_recovery", interrupted)
    with pytest.raises(KeyboardInterrupt):
        own.wake()
    server.asked.clear()
    assert own.generate([[1, 2]], max_tokens=1).version == 1
    assert ("GET", "/base") in server.asked
    assert (own._state.is_recovering, own.start, own.incarnation) == (False, "two", 2)


@pytest.mark.parametrize("before", ["nothing", "withdrawn"])
def test_who_asks_for_nothing_pushes_nothing_to_a_restarted_server(own, server, before):
    if before == "withdrawn":
        own.load_packed(b"old", 1)
        own.withdraw_adapter("version 1 was not verified")
    server.start, server.version = "two", 0
    server.asked.clear()
    own.wake()
    assert server.asked == [("GET", "/state"), ("GET", "/state"), ("GET", "/base"), ("GET", "/state")]
    assert (own._state.is_in_doubt, own._state.withdrawn != "") == (False, before == "withdrawn")
