"""What `qlora-rl serve` rejects before anything is started."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI

from qlora_rl import (
    ConfigConflictError,
    EngineUnsupportedError,
    LocalEngine,
    SamplingSpec,
    ServerTakenError,
    errors,
    serve,
    start_server,
)
from qlora_rl.adapter.store import AdapterStore, pack_adapter
from qlora_rl.contracts import AdapterBundle
from qlora_rl.engine.client.http_errors import AwayError, rejection
from qlora_rl.engine.sampling import sampling_params
from qlora_rl.engine.server import served_adapter
from qlora_rl.engine.server.auth import Visits
from qlora_rl.engine.server.launch import check_adapter_dir, read_or_make_key
from qlora_rl.engine.server.routes import PREFIX, Api, TrainerLock
from qlora_rl.engine.server.served_adapter import misfits
from qlora_rl.engine.staging import open_regular

SIZES = {"model.q_proj": [4, 6]}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_host_that_others_can_reach_needs_a_key_that_exists(host, tmp_path):
    for file in (None, tmp_path / "none"):
        with pytest.raises(ConfigConflictError, match="--api-key-file"):
            serve(tmp_path, host=host, api_key_file=file)


def test_a_key_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    path = tmp_path / "keys" / "key"
    _, key = read_or_make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(key) >= 32
    assert read_or_make_key(path)[1] == key
    path.chmod(0o640)
    with pytest.raises(ConfigConflictError, match="chmod 600"):
        read_or_make_key(path)


@pytest.mark.parametrize("content", ["", "short", "two words in one key here", "schlüssel-mit-umlaut-x"])
def test_what_is_no_key_is_rejected(content, tmp_path):
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(ConfigConflictError, match="no key"):
        read_or_make_key(path)


def test_an_adapter_directory_that_others_can_write_into_is_rejected(tmp_path):
    assert check_adapter_dir(tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigConflictError, match="chmod 700"):
        check_adapter_dir(tmp_path / "open")


def bundle(rank=2, **config):
    names = [f"base_model.model.model.q_proj.lora_{part}.weight" for part in "AB"]
    tensors = dict(zip(names, (torch.ones(rank, 4), torch.ones(6, rank)), strict=True))
    return AdapterBundle(tensors, {"r": rank, "lora_alpha": rank, **config})


@pytest.mark.parametrize(
    "config",
    [{"r": 0}, {"r": 9}, {"r": "2"}, {"r": 1}, {"rank_pattern": {"q": 1}}, {"alpha_pattern": {"q": 1}},
    {"use_dora": True},
     {"lora_alpha": 4}, {"lora_alpha": float("nan")}, {"lora_alpha": "2"}, {"lora_alpha": None}, {"lora_alpha": True,
     "r": 1},
     {"use_rslora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}],
)  # fmt: skip
def test_a_config_that_vllm_would_serve_in_another_way_is_a_misfit(config):
    assert misfits(bundle(**config), SIZES, 8)


def scaled(factor, dtype=torch.float32):
    return AdapterBundle({name: (t * factor).to(dtype) for name, t in bundle().tensors.items()}, bundle().config)


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        (scaled(1.0), None),
        (scaled(99.0), None),
        (scaled(101.0), "100"),
        (scaled(-1e30), "100"),
        (scaled(1.0, torch.int8), "int8"),
        (AdapterBundle(bundle().tensors, [1]), "JSON"),
    ],
)
def test_what_no_training_gives_is_a_misfit(adapter, reason):
    found = misfits(adapter, SIZES, 8)
    assert bool(found) == bool(reason)
    assert reason is None or reason in found[0]


def test_every_misfit_is_said():
    bad = bundle()
    names = list(bad.tensors)
    tensors = {names[0]: torch.full((2, 4), float("inf")), names[1]: torch.ones(7, 2), "x": torch.ones(1)}
    reasons = misfits(AdapterBundle(tensors, bad.config), SIZES, 8)
    assert [word in " ".join(reasons) for word in ("infinity", "another base", "x is no A or B")] == [True] * 3


def test_a_trainer_with_a_long_request_open_is_not_silent():
    lease = TrainerLock(0.001)
    lease.claim("first")
    with lease.hearing("first"):
        time.sleep(0.01)
        with pytest.raises(ServerTakenError):
            lease.claim("second")
    time.sleep(0.01)
    lease.claim("second")


def test_a_trainer_whose_machine_is_gone_in_the_middle_of_a_body_is_silent(tmp_path):
    """No end of the connection comes, nor any more bytes; with bytes that come slowly it is heard."""
    pytest.importorskip("vllm")
    lease, app = TrainerLock(0.3), FastAPI()
    app.include_router(Api(policy_in(tmp_path), {}, lease).router())
    scope = {
        "type": "http", "method": "PUT", "path": f"{PREFIX}/weights", "query_string": b"push=x&part=0&offset=0",
        "headers": [(b"x-qlora-session", b"first")],
    }  # fmt: skip

    async def run():
        lease.claim("first")
        pieces = asyncio.Queue()
        task = asyncio.ensure_future(app(scope, pieces.get, lambda message: asyncio.sleep(0)))
        for _ in range(5):
            pieces.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
            await asyncio.sleep(0.1)
            with pytest.raises(ServerTakenError):
                lease.claim("second")
        await asyncio.sleep(0.4)
        lease.claim("second")
        pieces.put_nowait({"type": "http.request", "body": b"x"})  # it was asleep: the server is another's now
        await task
        with pytest.raises(ServerTakenError):
            lease.claim("first")

    asyncio.run(run())


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="Linux lists the descriptors of a process")
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda place: os.symlink("/etc/passwd", place)])
def test_what_is_no_regular_file_is_rejected_and_leaves_no_descriptor_open(tmp_path, make):
    """Whoever may write into a stage puts something else where a part is looked for."""
    place, before = tmp_path / "000000.safetensors", descriptors()
    make(place)
    for _ in range(3):
        with pytest.raises(OSError, match=r"regular|symbolic"):
            open_regular(place)
    assert descriptors() == before


DEEP = b"[" * 100_000
SAMPLING = {"max_tokens": 1}
ADAPTER = "/adapter?version=1&digest=0"
BAD = [
    ("POST", "/generate", DEEP),
    ("POST", "/generate", b'{"a":' * 100_000),
    ("POST", "/generate", b"\xff"),
    ("POST", "/generate", b"[]"),
    ("POST", "/generate", b""),
    ("POST", "/generate", b"9" * 5000),
    ("POST", "/generate", {"prompts": 1, "sampling": {}}),
    ("POST", "/generate", {"prompts": [["1"]], "sampling": SAMPLING}),
    ("POST", "/generate", {"prompts": [[2**70]], "sampling": SAMPLING}),
    *(
        ("POST", "/generate", {"prompts": [[1, 2]], "sampling": SAMPLING, name: value})
        for name, value in {"version": "²", "digest": 1, "places": {"ids": [0, 1]}}.items()
    ),
    *(
        ("POST", "/generate", {"prompts": [[1, 2]], "sampling": {"max_tokens": 1, **wrong}})
        for wrong in (
            {"\ud800": 1},
            {"temperature": float("nan")},
            {"temperature": "x"},
            {"top_k": 2**70},
            {"max_tokens": 1.5},
            {"regex": 1},
            {"extra": 1},
            {"extra": {"stop": "\ud800"}},
            {"extra": {"logit_bias": {"x": 1}}},
            {"stop_token_ids": [None]},
            {"first_place": "x", "seed": 1},
            {"extra": {"no_such": 1}},
        )
    ),
    ("POST", "/score", {"sequences": [[1, 2]], "bare": 1}),
    ("POST", "/score", {"sequences": {"a": 1}, "bare": True}),
    ("PUT", "/adapter?version=%C2%B2&digest=0", b""),
    ("PUT", "/adapter?version=%D9%A3&digest=0", b""),
    ("PUT", "/adapter?version=NaN", b""),
    ("PUT", "/adapter?version=" + "9" * 5000, b""),
    ("PUT", ADAPTER, DEEP),
    ("GET", "/held?rank=%C2%B2", b""),
    ("GET", "/held?rank=-1", b""),
    ("PUT", "/weights?push=%C3%A9&part=0&offset=0", b""),
    ("PUT", "/weights?push=x&part=%C2%B2&offset=0", b""),
    ("POST", "/weights/part?push=%C3%A9&part=0", b""),
    ("POST", "/weights/commit?push=%C3%A9", b""),
    ("DELETE", "/weights?reason=x", b""),
]


def answered(served, *asked, session="somebody", lease=None):
    """The answers of a server's own routes, without a server."""
    app = FastAPI()
    app.include_router(Api(served, {}, lease or TrainerLock(60.0)).router())

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return [
                await client.request(
                    method,
                    PREFIX + path,
                    content=body if isinstance(body, bytes) else json.dumps(body).encode(),
                    headers={"x-qlora-session": session},
                )
                for method, path, body in asked
            ]

    return asyncio.run(run())


class Idle:
    """An engine that answers everything, and samples nothing."""

    async def add_lora(self, request):
        pass

    async def collective_rpc(self, name, *_, **__):
        return [{"repaired": 0.5}]

    async def generate(self, *_, **__):
        yield SimpleNamespace(outputs=[sampled_token(-1.0, "length")], prompt_logprobs=[None, {}])


def policy_in(place):
    (place / "adapters").mkdir(exist_ok=True)
    return served_adapter.ServedPolicy(Idle(), {}, AdapterStore(place / "adapters"), SIZES, 8, 64, Visits())


def test_bad_input_is_the_clients_fault_and_said_in_a_sentence(tmp_path):
    pytest.importorskip("vllm")
    lease = TrainerLock(60.0)
    for asked, answer in zip(BAD, answered(policy_in(tmp_path), *BAD, lease=lease), strict=True):
        assert 400 <= answer.status_code < 500, (str(asked)[:200], answer.text)
        error = answer.json()["error"]
        assert issubclass(getattr(errors, error["kind"]), errors.QloraRLError)
        assert len(error["message"].split()) >= 5
    lease.claim("another")  # none of them has taken the server


def test_names_of_tokens_in_a_json_object_are_numbers_again():
    pytest.importorskip("vllm")
    detection = {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2}
    extra = {"logit_bias": {"5": 1.0}, "repetition_detection": detection}
    (params,) = sampling_params(SamplingSpec(extra=extra), [0])
    assert params.logit_bias == {5: 1.0}
    assert params.repetition_detection.min_count == 2
    numbers = {"min_tokens": np.int64(3), "presence_penalty": torch.tensor(0.5)}
    (params,) = sampling_params(SamplingSpec(max_tokens=np.int64(10), temperature=np.float32(1), extra=numbers), [0])
    assert (params.max_tokens, params.min_tokens, params.presence_penalty) == (10, 3, 0.5)
    with pytest.raises(ConfigConflictError, match="rejects the sampling arguments"):
        sampling_params(SamplingSpec(extra={"extra_args": {"x": object()}}), [0])
    with pytest.raises(ConfigConflictError, match="logit_bias"):
        sampling_params(SamplingSpec(extra={"logit_bias": {"five": 1.0}}), [0])


def test_what_changes_a_server_needs_its_lease_and_who_is_rejected_does_not_get_it(tmp_path):
    pytest.importorskip("vllm")
    served, lease = policy_in(tmp_path), TrainerLock(60.0)
    good = pack_adapter(bundle())
    right = ("PUT", f"/adapter?version=1&digest={hashlib.sha256(good).hexdigest()}", good)
    changing = [
        ("POST", "/repair", b""),
        ("PUT", ADAPTER, b"x"),
        ("DELETE", "/adapter", b""),
        ("POST", "/weights?version=1", b""),
        ("PUT", "/weights?push=x&part=0&offset=0", b""),
        ("POST", "/weights/part?push=x&part=0", b""),
        ("POST", "/weights/commit?push=x", b""),
        ("DELETE", "/weights?push=x", b""),
    ]
    lease.claim("first")
    for answer in answered(served, *changing, right, session="second", lease=lease):
        assert (answer.status_code, answer.json()["error"]["kind"]) == (409, "ServerTakenError")
    lease.release("first")
    rejected = [asked for asked in changing if asked[1] != "/repair" and asked[0] + asked[1] != "DELETE/adapter"]
    for answer in answered(served, *rejected, session="second", lease=lease):
        assert answer.status_code in (400, 422)
    assert answered(served, right, session="first", lease=lease)[0].json()["new"]
    with pytest.raises(ServerTakenError):
        lease.claim("second")
    assert answered(served, ("PUT", ADAPTER, b"x"), session="first", lease=lease)[0].status_code == 422
    with pytest.raises(ServerTakenError):  # a holder who is rejected stays it
        lease.claim("second")


def test_a_rejected_change_does_not_take_the_server_from_one_of_the_same_trainer_that_was_taken():
    lease = TrainerLock(60.0)

    def both():
        with lease.trying("first"):
            with lease.trying("first"):  # began later, and is done
                pass
            raise ValueError("rejected")

    with pytest.raises(ValueError, match="rejected"):
        both()
    with pytest.raises(ServerTakenError):
        lease.claim("second")


@pytest.mark.parametrize(
    ("extra", "stops"), [({}, [1, 7]), ({"stop_token_ids": [3, 7]}, [1, 3, 7]), ({"ignore_eos": True}, [])]
)
def test_the_trainers_ends_are_added_to_those_that_the_user_names(extra, stops):
    pytest.importorskip("vllm")
    (params,) = sampling_params(SamplingSpec(stop_token_ids=[7, 1], extra=extra), [0])
    assert params.stop_token_ids == stops


def sampled_token(logprob, finish_reason="length"):
    return SimpleNamespace(token_ids=[1], logprobs=[{1: SimpleNamespace(logprob=logprob)}], finish_reason=finish_reason)


@pytest.mark.parametrize("cut", ["aborted", "without a word", "rejected"])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/generate", {"prompts": [[1, 2], [1, 3]], "sampling": {"max_tokens": 4}}),
        ("/score", {"sequences": [[1, 2], [1, 3]], "bare": True}),
    ],
)
def test_what_an_ending_engine_gives_up_is_no_answer_and_the_next_server_is_waited_for(tmp_path, path, asked, cut):
    """vLLM answers a request that it aborts like any other: with what was sampled so far, or nothing."""
    pytest.importorskip("vllm")

    class Engine:
        asked = 0

        async def generate(self, *_, **__):
            self.asked += 1
            reason = "length" if self.asked == 1 else "abort"
            if self.asked == 2 and cut == "rejected":
                raise RuntimeError("Call to generate method failed: Server shutting down")
            if self.asked == 1 or cut == "aborted":
                yield SimpleNamespace(outputs=[sampled_token(-1.0, reason)], prompt_logprobs=[None, {}])

    served = served_adapter.ServedPolicy(Engine(), {}, SimpleNamespace(root=tmp_path / "store"), {}, 8, 64, Visits())
    app = FastAPI()
    app.include_router(Api(served, {}, TrainerLock(60.0)).router())

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(PREFIX + path, json=asked)

    answer = asyncio.run(run())
    assert answer.status_code == 503
    fault = rejection(answer, "http://server")
    assert isinstance(fault, AwayError)
    assert fault.gave_up == (cut != "rejected")
    assert ("given up 1 of 2 requests" in str(fault)) == (cut != "rejected")


def test_after_nan_the_servers_cache_is_cleared_before_anything_else_is_sampled(tmp_path):
    pytest.importorskip("vllm")
    values, done = [float("nan"), -1.0], []

    class Engine:
        async def generate(self, *_, **__):
            done.append("sampled")
            sampled = sampled_token(values.pop(0))
            yield SimpleNamespace(outputs=[sampled], prompt_logprobs=None)

        async def collective_rpc(self, name):
            done.append(name)

        async def reset_prefix_cache(self):
            done.append("reset")
            return True

        async def reset_encoder_cache(self):
            pass

    served = served_adapter.ServedPolicy(Engine(), {}, SimpleNamespace(root=tmp_path / "store"), {}, 8, 64, Visits())

    async def run():
        return [(await served.generate([[1, 2]], {"max_tokens": 1}))["logprobs"] for _ in range(2)]

    assert asyncio.run(run()) == [[[None]], [[-1.0]]]
    assert done == ["sampled", "qlora_clear_cache", "reset", "sampled"]


def test_the_directory_of_a_version_stays_while_a_rollout_is_sampled_with_it(tmp_path):
    """vLLM may have let go of an adapter in between, and reads it again."""
    pytest.importorskip("vllm")

    async def run():
        begun, may_end = asyncio.Event(), asyncio.Event()

        class Engine:
            async def add_lora(self, request):
                pass

            async def generate(self, *_, **__):
                begun.set()
                await may_end.wait()
                yield SimpleNamespace(outputs=[sampled_token(-1.0)], prompt_logprobs=None)

        store, visits = AdapterStore(tmp_path), Visits()
        served = served_adapter.ServedPolicy(Engine(), {}, store, SIZES, 8, 64, visits)

        async def push(version):
            await served._take(bundle(), version, f"digest-{version}")
            return served.held.directory

        async def ask():
            with visits.visit():  # as the gate has it: the second version serves when the request comes
                return await served.generate([[1, 2]], {"max_tokens": 1}, None, (1, "digest-1", True))

        first, second = await push(1), await push(2)
        rollout = asyncio.ensure_future(ask())
        await begun.wait()
        third = await push(3)
        assert first.is_dir()
        may_end.set()
        assert (await rollout)["version"] == 1
        await push(4)
        assert [each.is_dir() for each in (first, second, third)] == [False, False, True]

    asyncio.run(run())


STOPPED = """
import signal, time
from qlora_rl.engine.signals import interrupts_for_sure
with interrupts_for_sure(lambda: False, lambda: None):
    print("ready", flush=True)
    time.sleep(5)
print("untouched", flush=True)
"""


def test_a_process_that_was_stopped_and_goes_on_was_not_interrupted():
    job = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "ready\n"
    for _ in range(3):
        job.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        job.send_signal(signal.SIGCONT)
        time.sleep(0.3)
    assert job.communicate(timeout=60)[0] == "untouched\n"
    assert job.returncode == 0


REPLICAS = "data_parallel_size=2"
REJECTED = [
    # Of its answers vLLM returns the first replica's alone: the others could not be verified.
    (EngineUnsupportedError, REPLICAS, lambda base, _: serve(base, vllm_options=["--data-parallel-size", "2"])),
    (EngineUnsupportedError, REPLICAS, lambda base, _: serve(base, data_parallel_size=2)),
    (EngineUnsupportedError, REPLICAS, lambda base, _: LocalEngine(base, data_parallel_size=2)),
    (EngineUnsupportedError, "spec_method: on a CPU", lambda base, _: LocalEngine(base, spec_method="ngram")),
    (
        EngineUnsupportedError,
        "speculative_config: on a CPU",
        lambda base, _: serve(base, vllm_options=["--speculative-config", '{"method": "ngram"}']),
    ),
    *(
        (EngineUnsupportedError, name, lambda base, _, name=name: LocalEngine(base, **{name: "x"}))
        for name in ("logprobs_mode", "dtype", "load_format", "worker_extension_cls")
    ),
    *(
        (ConfigConflictError, name, lambda *_, name=name: sampling_params(SamplingSpec(extra={name: 2}), [0]))
        for name in ("logprobs", "n", "output_kind")
    ),
    (ConfigConflictError, "bake_base", lambda base, _: serve(base, max_lora_rank=0)),
    (ConfigConflictError, "max_lora_rank=1", lambda base, a: serve(base, adapter=a, max_lora_rank=1)),
    (ConfigConflictError, "ready_file", lambda base, _: start_server(base, ready_file="x")),
    (
        ConfigConflictError,
        "api_key_file",
        lambda base, _: start_server(base, key="a-key-of-some-length", api_key_file="x"),
    ),
]


@pytest.mark.parametrize(("error", "named", "ask"), REJECTED)
def test_what_could_not_be_verified_or_contradicts_is_rejected_before_anything_starts(
    error, named, ask, base, adapted, tmp_path
):
    pytest.importorskip("vllm")
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(error, match=named):
        ask(base, tmp_path / "adapter")
