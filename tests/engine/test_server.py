"""A real server process: what it lets in, what it serves, what it rejects, and how it is found again."""

import copy
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import torch
from support import cpu_seconds, randomise, since_vllm
from test_training import lines, make
from trained import make_run
from trl.trainer import grpo_trainer

from qlora_rl import (
    AdapterSync,
    BaseMismatchError,
    Canary,
    CanaryError,
    ConfigConflictError,
    EngineBrokenError,
    EngineUnsupportedError,
    PromptTooLongError,
    RolloutCancelledError,
    ServerEngine,
    ServerTakenError,
    SyncError,
    VersionGoneError,
    export_adapter,
    judge_adapter,
    load_base,
    open_trained,
    plan_sync,
    prepare_base,
    start_server,
    verify_base,
)
from qlora_rl.adapter.merged_weights import iter_weights
from qlora_rl.adapter.store import pack_adapter, write_adapter
from qlora_rl.base.fingerprint import digest_bytes
from qlora_rl.cli import main
from qlora_rl.contracts import AdapterBundle, RolloutEngine
from qlora_rl.cpu_features import SETTING
from qlora_rl.engine.server.launch import RunningServer
from qlora_rl.sync.transports import BytesTransport
from qlora_rl.train.rollouts.engine_link import claim_servers

SEQUENCES = [[40, 41, 42, 43, 44, 45], [60, 9, 33, 12, 7]]
OPTIONS = {"max_lora_rank": 8, "max_model_length": 64, "max_num_seqs": 64, "timeout_s": 180}


@pytest.fixture(scope="module")
def server(base):
    with start_server(base, **OPTIONS) as server:
        yield server


@pytest.fixture
def remote(server):
    with ServerEngine(server.url, api_key=server.key, wait_s=1.0) as remote:
        remote.drop_adapter()
        yield remote


def ask(server, method, path, key=None, **more):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.request(method, server.url + path, headers=headers, verify=False, **{"timeout": 20, **more})


# --- who gets in ----------------------------------------------------------------------------------------------------


def test_every_route_that_the_app_lists_and_those_it_hides_need_the_key(server):
    assert ask(server, "GET", "/health").status_code == 200
    listed = ask(server, "GET", "/openapi.json", server.key).json()["paths"]
    routes = [(method.upper(), path) for path, methods in listed.items() for method in methods]
    assert ("PUT", "/qlora/v1/adapter") in routes
    assert ("POST", "/v1/chat/completions") in routes
    hidden = ["/", "/metrics", "/docs", "/redoc", "/openapi.json", "/collective_rpc", "/pause", "/sleep",
    "/update_weights",
              "/v1/load_lora_adapter", "/server_info", "/docs/oauth2-redirect", "/no/such/route"]  # fmt: skip
    routes += [(method, path) for path in hidden for method in ("GET", "POST")]
    for method, path in routes:
        if path == "/health":
            continue
        for key in (None, server.key[:-1], "wrong"):
            assert ask(server, method, path, key).status_code == 401, (method, path, key)


def test_with_the_key_vllms_development_and_loading_routes_are_not_there(server):
    for path in ("/collective_rpc", "/update_weights", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/sleep"):
        assert ask(server, "POST", path, server.key, json={}).status_code == 404, path


def test_on_the_cpu_vllm_computes_in_its_engines_process(server, remote):
    """A worker of its own would wait awake between two requests, and have a core less."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    names = [" ".join(each.cmdline()) for each in processes]
    assert any("EngineCore" in name for name in names)
    assert not any("Worker" in name for name in names)


def test_the_key_is_in_no_list_of_processes(server):
    for pid in [server.process.pid, *children(server.process.pid)]:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            assert server.key.encode() not in file.read()


def test_a_body_that_is_too_large_is_rejected(server, remote):
    limit = remote._about["max_body_bytes"]
    path = "/qlora/v1/adapter?version=1&digest=0"
    assert ask(server, "PUT", path, server.key, content=b"x" * (limit + 1)).status_code == 413
    chunks = (b"x" * 2**20 for _ in range(limit // 2**20 + 2))
    headers = {"authorization": f"Bearer {server.key}", "x-qlora-session": remote.session}
    assert httpx.put(server.url + path, content=chunks, headers=headers, timeout=60).status_code == 413
    with pytest.raises(SyncError, match="max_body_bytes"):
        remote.load_packed(b"x" * (limit + 1), 1)


# --- what it serves -------------------------------------------------------------------------------------------------


def test_it_is_an_engine_and_holds_the_trainers_base(remote, base):
    assert isinstance(remote, RolloutEngine)
    proof = verify_base(load_base(base), remote)
    assert proof.is_verified
    assert not proof.repaired  # it has done so when it started
    assert remote.repair_base() == {}


def test_it_draws_and_scores_to_the_last_bit_what_the_engine_in_this_process_does(
    remote, engine, bundle, prompts, tmp_path
):
    directory = tmp_path / "adapter"
    directory.mkdir()
    write_adapter(bundle, directory)
    for version in (0, 1):
        if version:
            engine.load_adapter(directory, 1)
            remote.load_packed(pack_adapter(bundle), 1)
        for fields in (
            {"temperature": 0.0},
            {"temperature": 0.7, "seed": 3, "top_p": 0.9},
            {"seed": 5, "extra": {"stop": ["1"]}},
            {"seed": 5, "stop_token_ids": list(range(40, 60))},
        ):
            mine, theirs = (e.generate(prompts * 4, max_tokens=12, **fields) for e in (engine, remote))
            assert theirs.completion_ids == mine.completion_ids
            assert theirs.logprobs == mine.logprobs
            assert theirs.version == mine.version == version
            assert theirs.has_ended == mine.has_ended
        assert remote.score(SEQUENCES) == engine.score(SEQUENCES)
        assert remote.held_adapter(8) == engine.held_adapter(8)
    assert remote.score(SEQUENCES, bare=True) == engine.score(SEQUENCES, bare=True) != remote.score(SEQUENCES)


def test_pushes_are_verified_by_the_canary_and_each_is_what_serves(remote, adapted):
    canary = Canary(adapted, remote)
    canary.calibrate()
    strategy = AdapterSync(adapted, remote, BytesTransport(), canary)
    for version in range(1, 6):
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(1.1)
        report = strategy.push()
        assert (report.version, remote.version, report.transport) == (version, version, "http")
    root = remote._about["adapter_dir"]
    (store,) = [entry for entry in os.listdir(root) if entry.startswith("qlora-rl-adapter-")]
    assert len(os.listdir(os.path.join(root, store))) <= 3


def test_a_push_that_the_canary_rejects_is_taken_back(remote, adapted, monkeypatch):
    strategy = AdapterSync(adapted, remote, BytesTransport(), Canary(adapted, remote))
    strategy.canary.calibrate()
    strategy.push()
    served = remote.score(SEQUENCES)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)

    def lying(rank, held=remote.held_adapter):
        return {name: "0" for name in held(rank)}

    monkeypatch.setattr(remote, "held_adapter", lying)
    with pytest.raises(CanaryError):
        strategy.push()
    assert remote.version == 1
    assert remote.score(SEQUENCES) == served


def test_a_repeated_push_changes_nothing(server, remote, bundle):
    blob = pack_adapter(bundle)
    remote.load_packed(blob, 4)
    pushes = ask(server, "GET", "/qlora/v1/state", server.key).json()["pushes"]
    remote.load_packed(blob, 4)
    assert ask(server, "GET", "/qlora/v1/state", server.key).json()["pushes"] == pushes


def test_a_plain_openai_client_chats_with_the_current_policy(server, remote, bundle):
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key)
    assert [model.id for model in client.models.list()] == ["base"]
    remote.load_packed(pack_adapter(bundle), 1)
    assert [model.id for model in client.models.list()] == ["base", "policy"]

    def say(model):
        found = client.completions.create(model=model, prompt=SEQUENCES[0], max_tokens=8, temperature=0.0, logprobs=0)
        return found.choices[0].logprobs.token_logprobs

    first = say("policy")
    assert first != say("base")
    remote.load_packed(pack_adapter(scaled(bundle, -1.0)), 2)
    assert say("policy") != first  # not out of an older version's cache
    remote.load_packed(pack_adapter(bundle), 3)
    assert say("policy") == first


def test_metrics_tell_the_version(server, remote, bundle):
    remote.load_packed(pack_adapter(bundle), 7)
    text = ask(server, "GET", "/metrics", server.key).text
    assert "qlora_rl_policy_version 7.0" in text
    assert "vllm:" in text


# Many show what leaks slowly; by default a hundred.
@pytest.mark.parametrize("pushes", [100, pytest.param(1900, marks=pytest.mark.full)])
def test_many_pushes_are_all_answered_right_and_leave_nothing_behind(server, remote, bundle, pushes):
    """After each push, what is scored is that adapter's own, bit for bit; memory within 30 MiB of that after 100, files
    exactly."""
    adapters = [scaled(bundle, 1.0 + i / 4) for i in range(8)]
    packed = [pack_adapter(adapter) for adapter in adapters]
    processes = [psutil.Process(pid) for pid in (os.getpid(), server.process.pid)]
    processes += psutil.Process(server.process.pid).children(recursive=True)
    root = remote._about["adapter_dir"]
    known = {}

    def push(version):
        which = version % len(adapters)
        remote.load_packed(packed[which], version)
        answer = remote.score(SEQUENCES)
        if which not in known:
            assert remote.held_adapter(8) == {n: digest_bytes(t) for n, t in adapters[which].tensors.items()}
            known[which] = answer
        assert answer == known[which], f"version {version}"

    def left():
        gc.collect()
        files = sorted(len(names) for _, *names in os.walk(root) for names in names)
        return [p.memory_info().rss for p in processes], [p.num_fds() for p in processes], files

    for version in range(1, 101):
        push(version)
    assert len({str(answer) for answer in known.values()}) == len(adapters)
    memory, handles, files = left()
    for version in range(101, 101 + pushes):
        push(version)
    grown, handles_now, files_now = left()
    print([round((b - a) / 2**20, 1) for a, b in zip(memory, grown, strict=True)])
    assert all(b - a < 30 * 2**20 for a, b in zip(memory, grown, strict=True))
    assert all(now <= then for now, then in zip(handles_now, handles, strict=True))
    assert files_now == files


def test_a_server_that_hangs_is_given_up_in_time_and_found_again(server, remote, prompts):
    with ServerEngine(server.url, api_key=server.key, timeout_s=1.0, wait_s=0.5) as engine:
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineBrokenError, match="stayed away"):
                engine.generate(prompts, max_tokens=2)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        assert remote.generate(prompts, max_tokens=2).tokens


def test_it_takes_no_full_weights_beside_adapters_or_over_a_4_bit_base(remote, adapted):
    assert not remote.capabilities().takes_dense
    with pytest.raises(ConfigConflictError, match="--max-lora-rank 0"):
        plan_sync(judge_adapter(adapted), remote.capabilities(), wish="weights")
    with pytest.raises(EngineUnsupportedError, match="--max-lora-rank 0"):
        remote.load_dense(iter_weights(adapted), 1)


# --- what it rejects ------------------------------------------------------------------------------------------------


def scaled(bundle, factor):
    return AdapterBundle({n: t * factor if "lora_B" in n else t for n, t in bundle.tensors.items()}, bundle.config)


def changed(bundle, change):
    tensors, config = dict(bundle.tensors), copy.deepcopy(dict(bundle.config))
    change(tensors, config)
    return pack_adapter(AdapterBundle(tensors, config))


def _nan(tensors, config):
    name = next(iter(tensors))
    tensors[name] = tensors[name].clone()
    tensors[name][0, 0] = float("nan")


def _rank(tensors, config):
    config["r"] = 4


def _large(tensors, config):
    config["r"] = 16
    for name, tensor in tensors.items():
        tensors[name] = torch.cat([tensor, tensor], dim=0 if "lora_A" in name else 1)


def _foreign(tensors, config):
    for name in list(tensors):
        tensors[name] = torch.zeros(tensors[name].shape[0] + 32 * ("lora_B" in name), tensors[name].shape[1])


def _stranger(tensors, config):
    tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = torch.zeros(8, 128)


def _half(tensors, config):
    tensors.pop(next(name for name in tensors if "lora_B" in name))


def _pattern(tensors, config):
    config["rank_pattern"] = {"q_proj": 4}


def _empty(tensors, config):
    tensors.clear()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_nan, "NaN"), (_rank, "shape"), (_large, "max_lora_rank=8"), (_foreign, "another base"), (_stranger,
            "another base"),
        (_half, "missing"), (_pattern, "rank_pattern"), (_empty, "empty"),
    ],
)  # fmt: skip
def test_a_bad_adapter_is_rejected_and_the_old_version_serves(remote, bundle, change, says):
    remote.load_packed(pack_adapter(bundle), 1)
    served = remote.score(SEQUENCES)
    with pytest.raises(SyncError, match=says):
        remote.load_packed(changed(bundle, change), 2)
    assert remote.version == 1
    assert remote.score(SEQUENCES) == served
    remote.load_packed(pack_adapter(scaled(bundle, 2.0)), 2)  # and it can be repeated


def test_bytes_that_were_damaged_on_the_way_are_rejected(server, remote, bundle):
    blob = pack_adapter(bundle)
    remote.load_packed(blob, 1)
    digest = hashlib.sha256(blob).hexdigest()
    flipped = bytearray(blob)
    flipped[-1] ^= 1
    headers = {"authorization": f"Bearer {server.key}", "x-qlora-session": remote.session}
    for sent, named in (
        (blob[:-1], digest),
        (bytes(flipped), digest),
        (b"", digest),
        (blob[:-9], None),
        (b"\x80\x04.", None),
    ):
        named = named or hashlib.sha256(sent).hexdigest()
        answer = httpx.put(
            f"{server.url}/qlora/v1/adapter?version=2&digest={named}", content=sent, headers=headers, timeout=120
        )
        assert (answer.status_code, answer.json()["error"]["kind"]) == (422, "SyncError")
        assert answer.headers["x-qlora-version"] == "1"


def test_a_second_trainer_is_told_no_until_the_first_has_gone(server, remote, bundle):
    remote.claim()
    with ServerEngine(server.url, api_key=server.key) as second:
        assert second.score(SEQUENCES, bare=True)
        for asked in (second.claim, second.drop_adapter, lambda: second.load_packed(pack_adapter(bundle), 1)):
            with pytest.raises(ServerTakenError, match="another trainer"):
                asked()
        remote.load_packed(pack_adapter(bundle), 1)
        with pytest.raises(ServerTakenError, match="somebody else"):
            second.generate(SEQUENCES, max_tokens=1)
        second.claim(force=True)
        with pytest.raises(ServerTakenError, match="another trainer"):
            remote.drop_adapter()
        second.close()
        remote.claim()


def test_what_cannot_be_sampled_is_rejected_before_anything_runs(remote):
    with pytest.raises(PromptTooLongError, match="prompt 1 has 64"):
        remote.generate([[1], [1] * 64])
    with pytest.raises(ConfigConflictError, match="sampling arguments"):
        remote.generate([[1]], top_p=7.0)
    with pytest.raises(ConfigConflictError, match="prompt"):
        remote.generate([[10**6]], max_tokens=1)
    with pytest.raises(ConfigConflictError, match="token ids"):
        remote.generate(["text"])


def test_requests_of_a_client_that_has_gone_are_given_up(server, remote, prompts):
    with pytest.raises(httpx.ReadTimeout):
        ask(
            server,
            "POST",
            "/qlora/v1/generate",
            server.key,
            json={"prompts": prompts * 50, "sampling": {"max_tokens": 60}},
            timeout=httpx.Timeout(60, read=0.3),
        )
    end = time.monotonic() + 60
    while running(server):
        assert time.monotonic() < end
        time.sleep(0.05)
    remote.generate(prompts, max_tokens=2)


def test_the_version_before_the_newest_is_sampled_with_where_it_is_asked_for(server, remote, adapted, prompts):
    def push(version):
        randomise(adapted, 0.1, seed=version)
        remote.load_packed(pack_adapter(export_adapter(adapted, dtype=torch.bfloat16)), version)
        return remote.generate(prompts, max_tokens=8, seed=1)

    first, second = push(1), push(2)
    assert first.logprobs != second.logprobs
    again = remote.generate(prompts, max_tokens=8, seed=1, version=1)
    assert (again.version, again.completion_ids, again.logprobs) == (1, first.completion_ids, first.logprobs)
    assert remote.generate(prompts, max_tokens=8, seed=1, version=2).logprobs == second.logprobs
    assert remote.version == 2
    push(3)
    with pytest.raises(VersionGoneError, match="version=1"):
        remote.generate(prompts, max_tokens=8, version=1)
    # The server says it as well, to whom does not know.
    body = {"prompts": prompts, "sampling": {}, "version": 1, "digest": "0" * 64, "held": True}
    answer = ask(server, "POST", "/qlora/v1/generate", server.key, json=body)
    assert (answer.status_code, answer.json()["error"]["kind"]) == (409, "VersionGoneError")


def test_another_thread_can_end_what_is_asked_and_the_server_lets_go_of_it(server, remote, prompts):
    with ThreadPoolExecutor(1) as pool:
        many = [list(p) for p in prompts for _ in range(32)]
        for _ in range(2):  # the first one is slower
            before = cpu_seconds(server.process.pid)
            remote.generate(many, max_tokens=56, extra={"min_tokens": 56})
            cost = cpu_seconds(server.process.pid) - before
        before = cpu_seconds(server.process.pid)
        call = pool.submit(remote.generate, many, max_tokens=56, extra={"min_tokens": 56})
        while cpu_seconds(server.process.pid) < before + cost / 3:  # a busy server answers no question of ours
            assert not call.done()
            time.sleep(0.005)
        remote.cancel()
        with pytest.raises(RolloutCancelledError):
            call.result(60)
    end = time.monotonic() + 60
    while running(server):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert len(remote.generate(prompts[:1], max_tokens=2).completion_ids) == 1


def test_the_bare_base_beside_the_policy_is_scored_as_the_bare_base(server, remote, bundle, prompts):
    """vLLM's own LoRA on the CPU gives requests without an adapter the one of its last slot, where they share a
    step."""
    quiet = remote.score(prompts, bare=True)
    remote.load_packed(pack_adapter(scaled(bundle, 3.0)), 1)
    assert largest_difference(remote.score(prompts), quiet) > 0.1
    body = {"model": "policy", "prompt": prompts * 4, "max_tokens": 50, "ignore_eos": True, "temperature": 0.0}
    shared = 0
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            chat = pool.submit(ask, server, "POST", "/v1/completions", server.key, json=body, timeout=120)
            while not running(server) and not chat.done():
                time.sleep(0.01)
            found = remote.score(prompts, bare=True)
            shared += not chat.done()
            assert chat.result().status_code == 200
            assert largest_difference(found, quiet) < 0.02  # another number of rows may round in another way
            if shared == 2:
                break
    assert shared


def largest_difference(one, other):
    return max(abs(x - y) for row, twin in zip(one, other, strict=True) for x, y in zip(row, twin, strict=True))


def running(server):
    """Requests that vLLM has not given up, running or waiting."""
    lines = ask(server, "GET", "/metrics", server.key).text.splitlines()
    return sum(float(each.split()[-1]) for each in lines if each.startswith("vllm:num_requests_"))


# --- under a trainer ------------------------------------------------------------------------------------------------


def measured(directory):
    """What a training has seen, without what a clock has."""
    kept = ("reward", "loss", "grad_norm", "mismatch_kl", "policy_version", "canary_difference")
    return [{name: row.get(name) or 0.0 for name in kept} for row in lines(directory)]


def test_a_training_through_a_server_is_the_one_in_this_process(server, engine, base, tmp_path, monkeypatch):
    # TRL shuffles a batch by torch's own generator, which an engine in this process uses as well.
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    key = tmp_path / "key"
    key.write_text(server.key)
    limits = {"max_steps": 2, "vllm_max_model_length": None, "share_base": False}
    engine.drop_adapter()
    make(base, tmp_path / "local", rollout=engine, **limits).train()
    with make(base, tmp_path / "far", rollout=server.url, api_key_file=key, **limits) as trainer:
        assert str(trainer.plan).startswith("sync: lora_adapter by http")
        with pytest.raises(ServerTakenError, match="another trainer"):
            claim_servers(server.url, key, None)
        trainer.train()
    far, local = measured(tmp_path / "far"), measured(tmp_path / "local")
    # Rollouts are equal to the last bit; sums depend on threads, which an engine in this process sets: by 1e-16 in
    # float64, where one bit of a rollout's float32 is a 1e-9 and more.
    for name in ("reward", "mismatch_kl", "canary_difference", "policy_version"):
        assert far[0][name] == pytest.approx(local[0][name], rel=1e-13, abs=0)
    for row, other in zip(far, local, strict=True):
        assert row == pytest.approx(other, rel=1e-3)
    config = json.loads((tmp_path / "far" / "config.json").read_text())
    assert (config["rollout"], config["base_proof"]["verified"]) == (server.url, True)
    assert config["base_held"] == {"copies": 2, "reason": "share_base=False"}
    assert server.key not in (tmp_path / "far" / "config.json").read_text()
    with ServerEngine(server.url, api_key=server.key) as free:
        free.claim()


def test_a_server_on_another_base_is_rejected(server, other_model_dir, tmp_path):
    key = tmp_path / "key"
    key.write_text(server.key)
    with pytest.raises(BaseMismatchError):
        make(
            prepare_base(other_model_dir),
            tmp_path / "run",
            rollout=server.url,
            api_key_file=key,
            vllm_max_model_length=None,
        )
    with ServerEngine(server.url, api_key=server.key) as free:
        free.claim()


def test_verify_asks_a_server_with_its_key(server, base, other_model_dir, tmp_path, capsys):
    key = tmp_path / "key"
    key.write_text(server.key)

    def verify(directory, key_file):
        code = main(["verify", str(directory), "--server", server.url, "--api-key-file", str(key_file), "--json"])
        return code, json.loads(capsys.readouterr().out)

    code, found = verify(base, key)
    assert (code, found["state"]) == (0, "equal")
    assert verify(prepare_base(other_model_dir), key)[0] == 1
    key.write_text("wrong-key-of-some-length")
    code, found = verify(base, key)
    assert code == 2
    assert "key is missing or wrong" in found["message"]


@pytest.mark.full  # a server of its own; trainings on one are test_config_on_vllm.py's
def test_a_server_beside_the_trainer_ends_with_it(base, tmp_path):
    with make(base, tmp_path, rollout="server") as trainer:
        process = trainer.engine.server.process
        offspring = children(process.pid)
        trainer.train()
    assert process.returncode == 0
    assert ended(offspring) == []


# --- where it has gone ----------------------------------------------------------------------------------------------


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found]


def ended(pids, within_s=60):
    end = time.monotonic() + within_s
    while time.monotonic() < end and any(os.path.exists(f"/proc/{pid}") and state(pid) != "Z" for pid in pids):
        time.sleep(0.1)
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}") and state(pid) != "Z"]


def state(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


@pytest.mark.full  # two servers; one of two killed in a rollout is test_server_faults.py's
def test_killed_in_the_middle_of_a_rollout_and_started_again_it_is_verified_pushed_to_and_asked_again(
    base, bundle, prompts
):
    """One server of its own: kill -9 in a rollout, restart, another kill, and nobody comes back."""
    with start_server(base, **OPTIONS) as first:
        port = int(first.url.rsplit(":", 1)[1])
        offspring = children(first.process.pid)
        assert offspring
        with ServerEngine(first.url, api_key=first.key, wait_s=120) as remote:
            remote.load_packed(pack_adapter(bundle), 3)
            sampling = {"max_tokens": 56, "seed": 1, "extra": {"ignore_eos": True}}
            for _ in range(2):  # the second is warm, and its time is the third's
                expected = remote.generate(prompts * 8, **sampling)
            killer = threading.Timer(expected.seconds / 3, os.kill, (first.process.pid, signal.SIGKILL))
            killer.start()
            started: list[RunningServer] = []

            def start_again():
                first.process.wait()
                started.append(start_server(base, port=port, key=first.key, **OPTIONS))

            # In this thread's stead the main one waits in the rollout; the kernel ends a server with the thread that
            # started it.
            keeper = threading.Event()
            again = threading.Thread(target=lambda: (start_again(), keeper.wait()))
            again.start()
            try:
                found = remote.generate(prompts * 8, **sampling)
                assert (found.completion_ids, found.logprobs, found.version) == (
                    expected.completion_ids,
                    expected.logprobs,
                    3,
                )
                assert remote.incarnation == 2
                assert ended(offspring) == []  # vLLM's engine goes with its server
                remote.wait_s = 0.5
                os.kill(started[0].process.pid, signal.SIGKILL)
                with pytest.raises(EngineBrokenError, match="stayed away"):
                    remote.generate(prompts, max_tokens=2)
            finally:
                keeper.set()
                again.join()
                for each in started:
                    each.stop()


@since_vllm("0.29", "the modules of the server that we start")
def test_a_signal_leaves_no_child_and_no_directory_behind(base, tmp_path):
    """By the command itself; an option of the user's in the place of ours does not keep the processes from what this
    processor needs."""
    ready, key = tmp_path / "ready.json", tmp_path / "key"
    command = [sys.executable, "-m", "qlora_rl.cli", "serve", str(base), "--port", "0", "--api-key-file", str(key),
    "--ready-file",
               str(ready), "--max-lora-rank", "8", "--max-model-length", "64", "--max-num-seqs", "4", "--",
               "--additional-config", '{"mine": 1}']  # fmt: skip
    # Without tests/children, whose frozen garbage would be listed as leaks at the end.
    paths = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if os.path.basename(path) != "children"]
    environment = os.environ | {SETTING: "float32", "PYTHONPATH": os.pathsep.join(paths)}
    log = (tmp_path / "log").open("w+")
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        end = time.monotonic() + 400
        while not ready.exists() and job.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        offspring = children(job.pid)
        assert offspring
        about = json.loads(ready.read_text())
        assert about["multiplies_in_float32"]
        assert key.stat().st_mode & 0o777 == 0o600
        assert os.path.isdir(about["adapter_dir"])
        job.send_signal(signal.SIGTERM)
        job.wait(30)
        assert ended(offspring) == []
        assert not os.path.exists(about["adapter_dir"])
        assert job.returncode == 0
        (line,) = [line for line in job.stdout.read().splitlines() if line.startswith("qlora-rl: serving")]
        assert about["url"] in line
        assert about["base"][:16] in line
        assert key.read_text().strip() not in line
        log.seek(0)
        said = log.read()
        assert "Traceback" not in said
        assert "leaked" not in said
    finally:
        job.kill()
        job.wait()
        log.close()


@since_vllm("0.29", "the modules of the server that we start")
def test_a_trained_run_is_served_by_its_name_alone(base, tmp_path):
    """The command finds the base and the adapter of the run, and vLLM holds that base before the policy answers."""
    run, ready, key = make_run(base, tmp_path / "run"), tmp_path / "ready.json", tmp_path / "key"
    with torch.no_grad():
        policy = open_trained(run).load()
        logits = [policy(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in SEQUENCES]
    likeliest = [each[-1].topk(2) for each in logits]
    surest = max(range(len(SEQUENCES)), key=lambda i: float(likeliest[i].values.diff().abs()))
    last = int(likeliest[surest].indices[0])
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"ends": [1, last], "chat_template": "<2>"}))
    command = [sys.executable, "-m", "qlora_rl.cli", "serve", str(run), "--port", "0", "--api-key-file", str(key),
    "--ready-file",
               str(ready), "--max-model-length", "64", "--max-num-seqs", "4"]  # fmt: skip
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        end = time.monotonic() + 400
        while not ready.exists() and job.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        with ServerEngine(json.loads(ready.read_text())["url"], api_key_file=key) as engine:
            assert verify_base(load_base(base), engine).is_verified
            found = [engine.score(SEQUENCES, bare=bare) for bare in (False, True)]
            ended = engine.generate([SEQUENCES[surest]], max_tokens=4, temperature=0.0)
            messages = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 1}
            answer = ask(engine, "POST", "/v1/chat/completions", key.read_text().strip(), json=messages, timeout=60)
        assert answer.json()["usage"]["prompt_tokens"] == 3  # by the run's own chat template
        assert (ended.completion_ids, ended.has_ended) == ([[last]], [True])  # as the run's own completions
        own = [
            logits_TV[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            for logits_TV, ids in zip(logits, SEQUENCES, strict=True)
        ]
        apart = [
            max(float((torch.tensor(e) - o).abs().max()) for e, o in zip(each, own, strict=True)) for each in found
        ]
        assert apart[0] < 0.1 < apart[1]  # bf16 rounding; the bare base is another function
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 0
        assert 'the trained model is "policy"' in job.stdout.read()
    finally:
        job.kill()
        job.wait()
