"""Full weights to a real server process: exact, all or nothing whoever is killed, and nobody but the trainer may send
them.

float32, two layers, random weights, head and embedding apart: an error shows a thousandfold above the noise of 1e-6.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from kinds import ADAPTER, FULL_WEIGHTS, lora
from pair import SEQUENCES, Pair, breaking, trained
from test_training import lines, make

from qlora_rl import (
    Canary,
    CanaryError,
    DenseSync,
    EngineBrokenError,
    EngineUnsupportedError,
    ServerEngine,
    ServerTakenError,
    SyncError,
    bake_base,
    start_server,
    verify_base,
)
from qlora_rl.adapter.merged_weights import iter_weights
from qlora_rl.engine.staging import STAGES

EXACT = 1e-5
OPTIONS = {"max_lora_rank": 0, "max_model_length": 32, "max_num_seqs": 8, "timeout_s": 180}
WAYS = ("directory", "http")


@pytest.fixture(scope="module")
def server(untied):
    """On its baked float32 form."""
    with start_server(bake_base(untied, "float32"), **OPTIONS) as server:
        yield server


@contextlib.contextmanager
def connected(server, way="http", **options):
    with ServerEngine(server.url, api_key=server.key, **{"wait_s": 2.0, **options}) as engine:
        if way == "http":
            engine._near = None
        engine.claim(force=True)
        engine.drop_adapter()
        yield engine


@pytest.fixture(params=WAYS)
def pair(request, server, untied, tmp_path):
    """The trainer on the same base, and an engine that is reached by one of the two ways."""
    with connected(server, request.param) as engine:
        yield Pair(engine, bake_base(untied, "float32"), tmp_path)


@pytest.fixture
def far(server, untied, tmp_path):
    with connected(server) as engine:
        yield Pair(engine, bake_base(untied, "float32"), tmp_path)


def ask(server, method, path, key=None, session="somebody", **more):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.request(
        method, server.url + path, headers={**headers, "x-qlora-session": session}, **{"timeout": 60, **more}
    )


def stages(engine):
    return sorted(Path(engine._about["adapter_dir"]).glob(STAGES))


# --- what it serves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dora", "IA3", "modules-to-save", "head", "embedding", "bias", "plain"])
def test_a_kind_that_full_weights_carry_is_served_exactly(pair, name):
    model = trained(pair.base, {**ADAPTER, **FULL_WEIGHTS}[name])
    report = DenseSync(model, pair.engine).push()
    assert (report.mode, report.transport) == ("weights", pair.engine.capabilities().dense_way)
    assert pair.engine.version == report.version
    assert pair.apart(model) < EXACT
    assert stages(pair.engine) == []


def test_pushes_are_verified_by_the_canary_and_a_failed_proof_is_served_to_nobody(far, server, monkeypatch):
    model = trained(far.base, FULL_WEIGHTS["dora"])
    assert verify_base(model, far.engine).is_verified
    canary = Canary(model, far.engine)
    canary.calibrate()
    strategy = DenseSync(model, far.engine, canary)
    assert strategy.push().canary_difference < canary.threshold
    strategy.verify()
    true = far.engine.load_dense
    monkeypatch.setattr(
        far.engine,
        "load_dense",
        lambda weights, version: true(((n, w * 1.01 if "o_proj" in n else w) for n, w in weights), version),
    )
    with pytest.raises(CanaryError, match=r"2 of 27 weights .*self_attn.o_proj"):
        strategy.push()
    with pytest.raises(EngineBrokenError, match="canary"):
        far.engine.score(SEQUENCES)
    rejected = ask(server, "POST", "/v1/completions", server.key, json={"model": "policy", "prompt": SEQUENCES[0]})
    assert (rejected.status_code, rejected.json()["error"]["kind"]) == (503, "EngineBrokenError")
    monkeypatch.undo()
    strategy.push()
    assert far.apart(model) < EXACT


def test_an_openai_client_never_gets_an_answer_out_of_older_weights_cache(far, server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key)
    assert [model.id for model in client.models.list()] == ["policy"]
    prompt = [40 + i % 20 for i in range(24)]

    def say():
        found = client.completions.create(model="policy", prompt=prompt, max_tokens=4, temperature=0.0, logprobs=0)
        return found.choices[0].logprobs.token_logprobs

    found = []
    for seed in range(2):
        model = trained(far.base, ADAPTER["plain"], seed=seed)
        DenseSync(model, far.engine).push()
        mine = far.engine.generate([prompt], max_tokens=4, temperature=0.0)
        assert say() == pytest.approx(mine.logprobs[0], abs=EXACT)
        found.append(say())
    assert found[0] != found[1]


def test_requests_that_run_end_under_the_weights_with_which_they_began(far, server):
    old, new = trained(far.base, ADAPTER["plain"], seed=1), trained(far.base, FULL_WEIGHTS["dora"], seed=2)
    DenseSync(old, far.engine).push()
    version = far.engine.version
    prompts = [[40 + i, 41, 42] for i in range(8)]
    sampling = {"max_tokens": 28, "temperature": 0.0, "extra": {"ignore_eos": True}}
    expected = {version: far.engine.generate(prompts, **sampling).logprobs}
    DenseSync(new, far.engine).push()
    expected[version + 1] = far.engine.generate(prompts, **sampling).logprobs
    found, stop = [], threading.Event()

    def sample():
        with ServerEngine(far.engine.url, api_key=server.key) as reader:
            while not stop.is_set():
                reader.wake()  # whatever serves now
                with contextlib.suppress(ServerTakenError):
                    found.append(reader.generate(prompts, **sampling))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        for model in (old, new, old, new):
            before = len(found)
            end = time.monotonic() + 60
            while len(found) == before and time.monotonic() < end:
                time.sleep(0.01)
            DenseSync(model, far.engine).push()
    finally:
        stop.set()
        thread.join(60)
    assert len(found) >= 4
    for rollout in found:  # odd and even versions are one and the other model
        for mine, theirs in zip(expected[version + (rollout.version - version) % 2], rollout.logprobs, strict=True):
            assert theirs == pytest.approx(mine, abs=EXACT)


def test_the_base_can_be_had_back(far):
    bare = far.apart(far.base)
    DenseSync(trained(far.base, FULL_WEIGHTS["dora"]), far.engine).push()
    with pytest.raises(EngineUnsupportedError, match="replaced it"):
        far.engine.score(SEQUENCES, bare=True)
    far.engine.drop_adapter()
    assert far.engine.version == 0
    assert far.apart(far.base) == bare


# --- all or nothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("the line is dead"), KeyboardInterrupt()])
def test_a_stream_that_breaks_at_any_tenth_tensor_leaves_the_old_version_serving(pair, error):
    old, new = trained(pair.base, ADAPTER["plain"], seed=1), trained(pair.base, FULL_WEIGHTS["dora"], seed=2)
    DenseSync(old, pair.engine).push()
    version = pair.engine.version
    for at in (0, 10, 26):
        with pytest.raises(SyncError if isinstance(error, Exception) else KeyboardInterrupt):
            pair.engine.load_dense(breaking(iter_weights(new), at, error), version + 1)
        assert pair.engine.version == version
        assert pair.apart(old) < EXACT
        assert stages(pair.engine) == []
    DenseSync(new, pair.engine).push()
    assert pair.apart(new) < EXACT


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: {n: t for n, t in w.items() if "k_proj.weight" not in n}, "no value came for 2 of 27 weights"),
        (lambda w: w | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}, "the engine has no weight"),
        (lambda w: w | {"model.norm.weight": w["model.norm.weight"][:-1]}, "another model"),
        (lambda w: w | {"model.norm.weight": w["model.norm.weight"].bfloat16()}, "dtype=bfloat16"),
        (lambda w: w | {"model.norm.weight": w["model.norm.weight"] / 0}, "NaN or infinity"),
    ],
)
def test_weights_that_do_not_fit_are_rejected_before_the_engine_is_touched(far, change, says):
    model = trained(far.base, FULL_WEIGHTS["dora"])
    DenseSync(model, far.engine).push()
    served = far.engine.score(SEQUENCES)
    with pytest.raises(SyncError, match=says):
        far.engine.load_dense(change(dict(iter_weights(model))).items(), far.engine.version + 1)
    assert far.engine.score(SEQUENCES) == served
    assert stages(far.engine) == []


def test_bytes_that_are_cut_or_changed_at_any_place_are_rejected_and_the_old_version_serves(pair, monkeypatch):
    model = trained(pair.base, FULL_WEIGHTS["dora"])
    DenseSync(model, pair.engine).push()
    served, choice = pair.engine.score(SEQUENCES), random.Random(0)
    monkeypatch.setattr("qlora_rl.engine.chunks.PART_BYTES", 2**16)  # several parts
    true = pair.engine._ask

    def damage(content):
        place = choice.randrange(len(content))
        return (
            content[:place]
            if choice.random() < 0.5
            else content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        )

    for _ in range(8):
        victim, seen = choice.randrange(6), [0]

        def lossy(method, path, body=None, victim=victim, seen=seen):
            if path.startswith("/weights/part"):
                seen[0] += 1
            if method == "PUT" and seen[0] == victim:
                body, seen[0] = damage(body), seen[0] + 100
            elif path.startswith("/weights/part") and seen[0] == victim + 1 and pair.engine._near:
                (file,) = [f for stage in stages(pair.engine) for f in stage.glob("*") if int(f.stem) == victim]
                file.write_bytes(damage(file.read_bytes()))
            return true(method, path, body)

        monkeypatch.setattr(pair.engine, "_ask", lossy)
        with pytest.raises(SyncError, match=r"damaged|does not follow"):
            pair.engine.load_dense(iter_weights(model), pair.engine.version + 1)
        monkeypatch.setattr(pair.engine, "_ask", true)
        assert pair.engine.score(SEQUENCES) == served
        assert stages(pair.engine) == []
    DenseSync(model, pair.engine).push()


def test_a_connection_that_breaks_in_the_middle_goes_on_where_it_was(far, monkeypatch):
    model = trained(far.base, FULL_WEIGHTS["dora"])
    monkeypatch.setattr("qlora_rl.engine.client.engine.HttpConnection.piece_bytes", 2**16)
    true, choice, broken = far.engine.connection.client.request, random.Random(1), []

    def flaky(method, path, **more):
        if "/weights" in path and choice.random() < 0.3:
            broken.append(path)
            if choice.random() < 0.5:  # the request has arrived, its answer has not
                true(method, path, **more)
            raise httpx.ReadError("broken")
        return true(method, path, **more)

    monkeypatch.setattr(far.engine.connection.client, "request", flaky)
    far.engine.wait_s = 60.0
    DenseSync(model, far.engine).push()
    assert broken
    assert far.apart(model) < EXACT


PUSH = """
import httpx, os, signal, sys, torch
sys.path[:0] = sys.argv[4:]
from pair import trained
from kinds import FULL_WEIGHTS
from qlora_rl import ServerEngine, load_base
from qlora_rl.adapter.merged_weights import iter_weights
url, base, place = sys.argv[1:4]
model = trained(load_base(base), FULL_WEIGHTS["dora"], seed=9)
engine = ServerEngine(url)
def dying():
    for i, pair in enumerate(iter_weights(model)):
        if place == str(i):
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair
if place == "commit":
    true = engine._ask
    def ask(method, path, body=None):
        if "commit" in path:
            engine.connection.client.timeout = httpx.Timeout(60.0, read=0.01)  # it is sent, its answer not waited for
            try:
                engine._ask_once(method, path, body)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        return true(method, path, body)
    engine._ask = ask
engine.load_dense(dying(), engine.version + 1)
"""


# By default in the commit; a stream that breaks, without a kill, is above.
@pytest.mark.parametrize("place", [pytest.param("15", marks=pytest.mark.full), "commit"])
def test_a_trainer_that_is_killed_in_the_middle_leaves_the_old_version_or_all_of_the_new_one(
    server, untied, far, place
):
    old, new = trained(far.base, ADAPTER["plain"], seed=1), trained(far.base, FULL_WEIGHTS["dora"], seed=9)
    DenseSync(old, far.engine).push()
    version = far.engine.version
    far.engine._ask("DELETE", "/lease")
    here = str(Path(__file__).parent.parent)
    job = subprocess.run(
        [sys.executable, "-c", PUSH, server.url, str(bake_base(untied, "float32")), place, here],
        env={**os.environ, "QLORA_RL_API_KEY": server.key},
        timeout=300,
    )
    assert job.returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while place == "commit" and time.monotonic() < end:  # the server finishes what it was told
        far.engine.wake()
        if far.engine.version == version + 1:
            break
        time.sleep(0.1)
    far.engine.wake()
    assert far.engine.version == version + (place == "commit")
    with ServerEngine(server.url, api_key=server.key) as reader:  # who has pushed nothing is told what serves
        far.engine, mine = reader, far.engine
        assert far.apart(new if place == "commit" else old) < EXACT
    far.engine = mine
    with pytest.raises(ServerTakenError):  # until it has been silent for long enough
        DenseSync(new, far.engine).push()
    far.engine.claim(force=True)
    DenseSync(new, far.engine).push()
    assert far.apart(new) < EXACT
    assert stages(far.engine) == []


# --- who may --------------------------------------------------------------------------------------------------------


def test_only_the_trainer_that_began_a_push_may_go_on_with_it(server, far):
    begun = far.engine._ask("POST", "/weights?version=5")
    push, mine = begun["push"], far.engine.session
    routes = [
        ("PUT", f"/weights?push={push}&part=0&offset=0"), ("POST", f"/weights/part?push={push}&part=0&digest=0"),
        ("POST", f"/weights/commit?push={push}"), ("DELETE", f"/weights?push={push}"), ("POST", "/weights?version=6"),
        ("DELETE", "/weights?reason=because"),
    ]  # fmt: skip
    for method, path in routes:
        assert ask(server, method, f"/qlora/v1{path}", content=b"x").status_code == 401
        assert ask(server, method, f"/qlora/v1{path}", server.key, content=b"x").status_code == 409
    other = push[:-1] + ("0" if push[-1] != "0" else "1")
    for method, path in routes[:4]:
        content = b"x" if method == "PUT" else b""
        rejected = ask(server, method, f"/qlora/v1{path.replace(push, other)}", server.key, mine, content=content)
        assert (rejected.status_code, "not open" in rejected.text) == (422, True)
    assert len(stages(far.engine)) == 1
    assert all(stage.stat().st_mode & 0o777 == 0o700 for stage in stages(far.engine))
    far.engine._ask("DELETE", "/lease")
    assert stages(far.engine) == []


def test_a_push_cannot_fill_the_disk_or_lead_out_of_its_directory(server, far, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 100)
    limit = far.engine._about["max_body_bytes"]

    def begin():
        begun = far.engine._ask("POST", "/weights?version=5")
        return begun["push"], Path(far.engine._about["adapter_dir"]) / begun["directory"]

    push, _ = begin()
    send = lambda path, content=b"": ask(server, "PUT", path, server.key, far.engine.session, content=content)  # noqa: E731
    assert send(f"/qlora/v1/weights?push={push}&part=0&offset=0", b"x" * (limit + 1)).status_code == 413
    for query in ("part=-1&offset=0", "part=../x&offset=0", "part=0&offset=-1", "part=0&offset=1e3", "part=&offset=0"):
        assert send(f"/qlora/v1/weights?push={push}&{query}", b"x").status_code == 400
    for query in ("part=1&offset=0", "part=0&offset=7"):
        push, _ = begin()
        assert send(f"/qlora/v1/weights?push={push}&{query}", b"x").status_code == 422
    push, _ = begin()
    codes = [
        send(f"/qlora/v1/weights?push={push}&part=0&offset={i * 2**20}", b"x" * 2**20).status_code for i in range(8)
    ]
    assert 422 in codes  # long before the disk is full
    assert stages(far.engine) == []
    push, directory = begin()
    (directory / "000000.safetensors").symlink_to(secret)
    digest = hashlib.sha256(secret.read_bytes()).hexdigest()
    path = f"/qlora/v1/weights/part?push={push}&part=0&digest={digest}"
    assert ask(server, "POST", path, server.key, far.engine.session).status_code == 422
    assert (
        send(f"/qlora/v1/weights?push={push}&part=0&offset=0", b"y").status_code == 422
    )  # nor may it be written through
    assert secret.read_bytes() == b"x" * 100
    assert far.engine.version == 0


# --- under the trainer ----------------------------------------------------------------------------------------------


@pytest.mark.full  # test_demo.py trains it in process, and the tests above push to this server
@pytest.mark.parametrize("way", ["server", "url"])
def test_the_trainer_trains_dora_through_a_server(untied, server, tmp_path, way):
    """Started beside it, or running already."""
    key = tmp_path / "key"
    key.write_text(server.key)
    options = {"rollout": "server"} if way == "server" else {"rollout": server.url, "api_key_file": key}
    base = untied if way == "server" else bake_base(untied, "float32")
    with make(
        base, tmp_path / "run", peft_config=lora(use_dora=True), vllm_max_model_length=None, **options
    ) as trainer:
        trainer.train()
        assert trainer.plan.transport == "http"
    rows = lines(tmp_path / "run", "sync.jsonl")
    assert [row["mode"] for row in rows] == ["weights"] * len(rows)
    assert all(row["mismatch_kl"] < 1e-3 for row in lines(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["sync"] == "weights"
