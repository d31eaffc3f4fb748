"""`Gate`, called as a server calls it."""

import asyncio
import json
import unittest.mock

import pytest

import qlora_rl.engine.server.auth
from qlora_rl.engine.server.auth import Gate, Visits

KEY = "a-key-of-some-length"
PATHS = [
    "/v1/models", "/v1/chat/completions", "/metrics", "/docs", "/redoc", "/openapi.json", "/collective_rpc", "/pause",
    "/tokenize",
    "/invocations", "/ping", "/qlora/v1/state", "/nothing/of/the/kind", "/", "", "//health", "/health/", "/healthy",
    "/HEALTH",
    "/v1/../health", "/health/../metrics",
]  # fmt: skip


def call(gate, path="/v1/models", headers=(), body=(b"",), kind="http"):
    """Everything that is sent for one request."""
    sent, chunks = [], list(body)

    async def receive():
        chunk = chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    async def send(message):
        sent.append(message)

    asyncio.run(gate({"type": kind, "path": path, "method": "GET", "headers": list(headers)}, receive, send))
    return sent


async def app(scope, receive, send):
    """Reads the whole body and answers with its length."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def bearer(value):
    return [(b"authorization", value.encode("latin-1"))]


WRONG = {
    "none": [],
    "empty": bearer(""),
    "wrong": bearer("Bearer another-key"),
    "a beginning": bearer(f"Bearer {KEY[:-1]}"),
    "more": bearer(f"Bearer {KEY}x"),
    "no scheme": bearer(KEY),
    "other scheme": bearer(f"Basic {KEY}"),
    "twice": bearer(f"Bearer {KEY}") + bearer("Bearer another"),
    "other header": [(b"x-api-key", KEY.encode())],
    "not ascii": bearer("Bearer \xff"),
}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("path", PATHS)
def test_without_the_key_every_path_is_401_and_nothing_behind_is_reached(path, headers):
    async def unreachable(*_):
        raise AssertionError("reached")

    start, _ = call(Gate(unreachable, KEY, 100), path, headers)
    assert start["status"] == 401


@pytest.mark.parametrize("path", PATHS)
def test_with_the_key_every_path_reaches_the_app(path):
    for scheme in ("Bearer", "bearer"):
        assert call(Gate(app, KEY, 100), path, bearer(f"{scheme} {KEY}"))[0]["status"] == 200


def test_health_needs_no_key():
    assert call(Gate(app, KEY, 100), "/health")[0]["status"] == 200


def test_a_websocket_is_closed_whatever_it_brings():
    for headers in ([], bearer(f"Bearer {KEY}")):
        (sent,) = call(Gate(app, KEY, 100), headers=headers, kind="websocket")
        assert sent["type"] == "websocket.close"


def test_what_is_neither_http_nor_known_gets_nothing():
    assert call(Gate(app, KEY, 100), kind="webtransport") == []


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ([(b"content-length", b"100")], [b"x" * 100], 200),
        ([(b"content-length", b"101")], [b"x" * 101], 413),
        ([(b"content-length", b"many")], [b"x"], 413),
        ([(b"content-length", b"-1")], [b"x"], 413),
        ([], [b"x" * 60, b"x" * 40], 200),
        ([], [b"x" * 60, b"x" * 41], 413),
        ([(b"content-length", b"1")], [b"x" * 101], 413),
    ],
)
def test_a_body_is_bounded_whether_it_says_its_length_or_not(headers, body, status):
    sent = call(Gate(app, KEY, 100), headers=bearer(f"Bearer {KEY}") + headers, body=body)
    assert [m["status"] for m in sent if m["type"] == "http.response.start"] == [status]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", rb'{"stop": ["\udcff"]}', 400),
        ("/v1/completions", rb'{"stop": ["\ud83d"]}', 400),
        ("/v1/completions", rb'{"stop": ["\uD83D and \uDE00"]}', 400),
        ("/v1/completions", rb'{"stop": ["\ud83d\ud83d\ude00"]}', 400),
        ("/v1/completions", rb'{"stop": ["\ud83d\ude00 \\ud83d \u00e9"]}', 200),
        ("/qlora/v1/adapter", rb"\ud83d", 200),  # bytes
        ("/v1/completions", b'{"stop": ["\xed\xa0\xbd"]}', 400),  # which Python's parser takes
        ("/v1/completions", '{"stop": ["\\ud83d"]}'.encode("utf-16"), 400),
    ],
)
def test_half_characters_do_not_reach_vllm_however_they_come(path, body, status):
    """vLLM answers them with 500."""
    for chunks in ([body], [body[:14], body[14:]]):
        sent = call(Gate(app, KEY, 100), path, bearer(f"Bearer {KEY}"), chunks)
        assert [m["status"] for m in sent if m["type"] == "http.response.start"] == [status]


@pytest.mark.parametrize(
    ("answers", "raises", "limit", "body", "status", "said"),
    [
        (400, True, 100, rb'["\ud83d"]', 400, b"half a character"),
        (500, True, 100, rb'["\ud83d"]', 400, b"half a character"),
        (400, False, 10, b"x" * 11, 413, b""),
    ],
    ids=["half a character", "half a character, 500", "a long body, swallowed"],
)
def test_an_app_that_answers_the_gates_error_itself_is_not_heard(answers, raises, limit, body, status, said):
    async def eager(scope, receive, send):
        try:
            await app(scope, receive, send)
        except Exception:
            await send({"type": "http.response.start", "status": answers, "headers": []})
            await send({"type": "http.response.body", "body": b"?"})
            if raises:
                raise

    sent = call(Gate(eager, KEY, limit), headers=bearer(f"Bearer {KEY}"), body=[body])
    assert [m["status"] for m in sent if m["type"] == "http.response.start"] == [status]
    assert said in sent[-1]["body"]


def test_what_is_no_json_is_no_text_to_the_gate():
    kind = [(b"content-type", b"multipart/form-data; boundary=x")]
    sent = call(Gate(app, KEY, 100), headers=bearer(f"Bearer {KEY}") + kind, body=[b"\xff\xd8 \\ud83d\0"])
    assert [m["status"] for m in sent if m["type"] == "http.response.start"] == [200]


def test_a_client_that_still_writes_can_read_the_rejection():
    """Hanging up on it would reset the connection; but it is neither listened to for ever nor for any number of
    bytes."""
    gate, read = Gate(app, KEY, 100), []

    async def rejected(receive):
        sent = []

        async def send(message):
            sent.append((message, len(read)))

        scope = {"type": "http", "path": "/x", "headers": [*bearer(f"Bearer {KEY}"), (b"content-length", b"1000")]}
        await gate(scope, receive, send)
        return sent

    async def endless():
        read.append(1)
        return {"type": "http.request", "body": b"x" * 50, "more_body": True}

    (start, before), (answer, _), (end, after) = asyncio.run(rejected(endless))
    assert (start["status"], before, answer["more_body"], end.get("more_body", False)) == (413, 0, True, False)
    assert after == 4

    async def silent():
        await asyncio.sleep(3600)

    with unittest.mock.patch.object(qlora_rl.engine.server.auth, "_LINGER_SECONDS", 0.01):
        assert asyncio.run(rejected(silent))[-1][0] == {"type": "http.response.body", "body": b""}


def test_health_is_bounded_too():
    assert call(Gate(app, KEY, 10), "/health", [(b"content-length", b"11")])[0]["status"] == 413


def test_the_oldest_adapter_that_a_request_may_name_is_known():
    visits = Visits()
    visits.current = 3
    with visits.visit():
        visits.current = 5
        with visits.visit():
            assert visits.oldest() == 3
    assert visits.oldest() == 5


def test_a_request_names_an_adapter_only_when_its_body_is_whole():
    """A client that never ends its body must not keep old adapters on the disk."""
    seen = []

    async def app(scope, receive, send):
        seen.append(visits.oldest())
        while (await receive())["more_body"]:
            visits.current += 1
        visits.current += 1
        seen.append(visits.oldest())

    visits = Visits()
    call(Gate(app, KEY, 100, visits), headers=bearer(f"Bearer {KEY}"), body=(b"a", b"b", b"c"))
    assert seen == [0, 2]
    assert visits.oldest() == 3


def test_a_request_in_a_server_that_ends_is_answered_so_that_it_is_sent_again():
    sent = []

    async def run():
        gate = Gate(lambda *_: asyncio.sleep(3600), KEY, 100)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": bearer(f"Bearer {KEY}")}
        task = asyncio.ensure_future(gate(scope, None, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(run())
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["kind"] == ""


def test_an_empty_key_is_no_key():
    with pytest.raises(ValueError, match="empty"):
        Gate(app, "", 100)
