"""The server, asked as Tinker's client asks: order, owners, hostile bodies, and a journal that survives kill -9."""

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.torch import load
from support import make_model
from tinker_hostile import Hostile
from tinker_server import TinkerServer, pass_body, read_passed, row_of

from qlora_rl import Adapters, TrainingRow, prepare_base
from qlora_rl.tinker import messages

OPTIONS = ("--max-model-length", "64", "--max-num-seqs", "32", "--max-rank", "8", "--max-adapters", "2")
ROW = row_of([40, 41, 42, 43, 44, 45, 46, 47])
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    server = TinkerServer(base.path, tmp_path_factory.mktemp("tinker"), *OPTIONS, keys=2)
    yield server
    server.stop()
    assert server.process.returncode == 0  # not killed by its signal: the engine was closed


def step(server, model, seq, rows=(ROW,), rate=1e-2, key=0):
    server.result(server.ask("forward_backward", raw=pass_body(model, seq, list(rows)), key=key), key=key)
    body = {"model_id": model, "seq_id": seq + 1, "adam_params": {"learning_rate": rate}}
    return server.result(server.ask("optim_step", body, key=key), key=key)


def sampled(server, session, path=None, number=50, key=0, **more):
    """Tokens and logprobs of one completion out of saved weights, or of a sampling session that there is."""
    if path is not None:
        body = {"session_id": session, "sampling_session_seq_id": number, "model_path": path}
        session = server.ask("create_sampling_session", body, key=key)[1]["sampling_session_id"]
    asked = {"sampling_session_id": session, "seq_id": number, "prompt": {"chunks": [{"tokens": [40, 41, 42]}]}}
    content = server.result(server.ask("asample", asked | {"sampling_params": SAMPLING} | more, key=key), key=key)
    found = messages._OF["Sampled"].FromString(content).sequences[0]
    return np.frombuffer(found.tokens, "<i4").tolist(), np.frombuffer(found.logprobs, "<f4").tolist()


def weights(server, model, seq, name="out", key=0):
    """The adapter's matrices, downloaded as a user would, without the key."""
    body = {"model_id": model, "seq_id": seq, "path": name}
    path = server.result(server.ask("save_weights_external", body, key=key), key=key)["path"]
    about = path.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
    urls = server.ask(f"training_runs/{about}/external_weights_urls", key=key)[1]["urls"]
    with urllib.request.urlopen(urls["adapter_model.safetensors"]) as answer:
        return load(answer.read())


def test_training_over_http_is_that_of_the_object(server, base):
    _, model = server.model()
    over = [read_passed(server.result(server.ask("forward_backward", raw=pass_body(model, 1, [ROW]))))]
    body = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-2, "weight_decay": 0.1}}
    made = server.result(server.ask("optim_step", body))
    over.append(
        read_passed(server.result(server.ask("forward_backward", raw=pass_body(model, 3, [ROW], forward_only=True))))
    )
    with Adapters(base.path, max_adapters=1, max_rank=8, max_model_length=64, max_num_seqs=8) as adapters:
        adapters.create("one", rank=4, seed=1)
        row = TrainingRow(ROW["tokens"], ROW["target_tokens"], {"weights": ROW["weights"]})
        first = adapters.forward_backward("one", [row])
        stepped = adapters.optim_step("one", learning_rate=1e-2, weight_decay=0.1)
        second = adapters.forward("one", [row])
    assert [metrics["loss:sum"] for metrics, _ in over] == [first.loss, second.loss]
    assert [logprobs for _, logprobs in over] == [first.logprobs, second.logprobs]
    assert made["metrics"] == stepped
    assert second.loss < first.loss


def test_a_request_that_is_sent_again_is_applied_once_and_those_of_a_model_keep_their_order(server):
    session, model = server.model()
    late = pass_body(model, 3, [ROW])
    noted = server.ask("forward_backward", raw=late)  # waits for 1 and 2
    first = server.ask("forward_backward", raw=pass_body(model, 1, [ROW]))
    again = server.ask("forward_backward", raw=pass_body(model, 1, [ROW]))
    assert again == first
    body = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
    stepped = [server.result(server.ask("optim_step", body)) for _ in range(3)]
    assert stepped[0] == stepped[1] == stepped[2]
    assert stepped[0]["metrics"]["step"] == 1
    before, after = read_passed(server.result(first))[0], read_passed(server.result(noted))[0]
    assert after["loss:sum"] < before["loss:sum"]  # 3 was computed behind 2
    status, said = server.ask("optim_step", body | {"adam_params": {"learning_rate": 9.0}})
    assert (status, "another one had seq_id=2" in said["error"]) == (422, True)
    assert server.ask("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "x"})[0] == 422
    asked = {"model_id": model, "seq_id": 4}
    first = server.ask("save_weights_for_sampler", asked | {"sampling_session_seq_id": 0})
    again = server.ask("save_weights_for_sampler", asked | {"sampling_session_seq_id": 1})  # as the client retries it
    assert again == first
    assert server.result(again)["sampling_session_id"] == f"{session}:sample:0"


def test_a_sampler_keeps_its_weights_while_training_goes_on_and_when_the_model_has_left_memory(server):
    session, model = server.model()
    step(server, model, 1)
    saved = server.result(
        server.ask("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0})
    )
    sampler = saved["sampling_session_id"]
    kept = sampled(server, sampler, number=1)
    for seq in range(4, 13, 3):
        step(server, model, seq)
        body = {"model_id": model, "seq_id": seq + 2, "path": f"s{seq}"}
        path = server.result(server.ask("save_weights_for_sampler", body))["path"]
    assert sampled(server, sampler, number=2) == kept
    newest = sampled(server, session, path, number=60)
    assert newest != kept
    loss = step(server, model, 13)["metrics"]
    for number in (1, 2, 3):  # two fit
        _, other = server.model(session=session, number=number, seed=number)
        step(server, other, 1)
    assert sampled(server, sampler, number=3) == kept
    assert sampled(server, session, path, number=61) == newest
    assert step(server, model, 15)["metrics"]["step"] == loss["step"] + 1


def test_what_is_wrong_or_not_offered_is_an_error_at_once_and_the_next_request_is_served(server):
    session, model = server.model()
    bad = {
        "tokens": ROW["tokens"],
        "target_tokens": ROW["target_tokens"],
        "logprobs": [float("nan")] * 7,
        "advantages": [1.0] * 7,
    }
    wide = {"tokens": [1, 2], "target_tokens": [[1, 2], [3, 4]], "weights": [1.0, 1.0]}
    for seq, (rows, loss, why) in enumerate(
        [
            ([bad], "ppo", "not finite"),
            ([ROW], "gspo", "not offered"),
            ([ROW], "custom", "not offered"),
            ([row_of([1, 200, 3])], "cross_entropy", "vocabulary"),
            ([row_of(list(range(2, 100)))], "cross_entropy", "at most 64"),
            ([wide], "cross_entropy", "two dimensions"),
            ([{**ROW, "weights": [1.0]}], "cross_entropy", "weights"),
            ([], "cross_entropy", "no rows"),
        ],
        start=1,
    ):
        found = server.result(server.ask("forward_backward", raw=pass_body(model, seq, rows, loss)))
        assert (why in found["error"], found["category"]) == (True, "user"), found
    nothing = server.result(server.ask("optim_step", {"model_id": model, "seq_id": 9, "adam_params": {}}))
    assert "no gradients" in nothing["error"]
    step(server, model, 10)
    for path, body, status in [
        ("create_model", {"session_id": session, "model_seq_id": 7, "base_model": "another"}, 422),
        (
            "create_model",
            {"session_id": session, "model_seq_id": 7, "base_model": "another", "optimizer_config": {"type": "dimuon"}},
            422,
        ),
        ("optim_step", {"model_id": model, "seq_id": 12, "optimizer_params": {"type": "dimuon"}}, 422),
        ("optim_step", {"model_id": model, "seq_id": 12, "adam_params": {"learning_rate": -1}}, 422),
        ("asample", {"sampling_session_id": "x", "seq_id": 1}, 422),
        ("copy_weights", {"source_path": "x"}, 404),
        ("billing/usage/events", {}, 404),
    ]:
        assert server.ask(path, body)[0] == status, path
    assert server.ask("forward_backward", raw=b"\xff\xff nonsense")[0] == 422
    assert server.ask("forward_backward", raw=b"\x1a\x00" * 2**18)[0] == 422
    assert server.ask("forward_backward", raw=b"x" * (65 * 2**20))[0] == 413
    sampler = {
        "session_id": session,
        "sampling_session_seq_id": 0,
        "base_model": server.ask("get_info", {"model_id": model})[1]["model_name"],
    }
    asked = {"sampling_session_id": server.ask("create_sampling_session", sampler)[1]["sampling_session_id"]}
    for seq, (tokens, params) in enumerate(
        [
            ([], SAMPLING),
            ([40, 5000], SAMPLING),
            ([40] * 64, SAMPLING),
            ([40], {"stop": ["x"] * 200}),
            ([40], {"top_p": 1e-300}),
        ]
    ):
        body = asked | {"seq_id": seq, "prompt": {"chunks": [{"tokens": tokens}]}, "sampling_params": params}
        found = server.result(server.ask("asample", body))
        assert isinstance(found, bytes) == (seq >= 3), found  # the last two are odd, and can be met
    assert (
        server.ask(
            "asample", asked | {"seq_id": 9, "prompt": {"chunks": []}, "sampling_params": {"temperature": "nan"}}
        )[0]
        == 422
    )
    body = asked | {"seq_id": 9, "prompt": {"chunks": [{"tokens": [40] * 65}]}, "sampling_params": SAMPLING}
    assert server.ask("asample", body)[0] == 422
    body = asked | {"seq_id": 10, "prompt": {"chunks": [{"tokens": [40]}]}, "sampling_params": {"max_tokens": 10**9}}
    assert isinstance(server.result(server.ask("asample", body)), bytes)
    assert server.ask("asample", body | {"num_samples": 10**6, "seq_id": 11})[0] == 422
    deep = server.ask("asample", raw=None, body=json.loads("[" * 400 + "]" * 400))[0]
    assert deep == 422
    step(server, model, 12)


def test_names_are_no_paths_and_nobody_reads_what_belongs_to_another_key(server):
    session, model = server.model()
    step(server, model, 1)
    for name in ("../x", "/etc/passwd", "a/b", "..", ".hidden", "", "x" * 129, "a\x00b"):
        assert server.ask("save_weights", {"model_id": model, "seq_id": 3, "path": name})[0] in (400, 422), name
    path = server.result(server.ask("save_weights", {"model_id": model, "seq_id": 3, "path": "mine"}))["path"]
    external = server.result(server.ask("save_weights_external", {"model_id": model, "seq_id": 4, "path": "mine"}))[
        "path"
    ]
    assert (
        "already"
        in server.result(server.ask("save_weights", {"model_id": model, "seq_id": 5, "path": "mine"}))["error"]
    )
    theirs, other = server.model(key=1)
    run = f"training_runs/{model}"
    for asked, body, method in [
        ("session_heartbeat", {"session_id": session}, None),
        ("get_info", {"model_id": model}, None),
        ("optim_step", {"model_id": model, "seq_id": 6, "adam_params": {}}, None),
        ("save_weights", {"model_id": model, "seq_id": 6, "path": "stolen"}, None),
        ("weights_info", {"tinker_path": path}, None),
        ("create_sampling_session", {"session_id": theirs, "sampling_session_seq_id": 0, "model_path": path}, None),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}, None),
        ("load_weights", {"session_id": theirs, "model_seq_id": 4, "path": path, "optimizer": True}, None),
        (run, None, None),
        (f"{run}/checkpoints", None, None),
        (f"{run}/checkpoints/weights/mine", None, "DELETE"),
        (f"{run}/checkpoints/external_weights/mine/external_weights_urls", None, None),
        (f"sessions/{session}", None, None),
        (f"sessions/{session}/finish", {}, None),
    ]:
        assert server.ask(asked, body, key=1, method=method)[0] == 404, asked
    assert server.ask("forward_backward", raw=pass_body(model, 6, [ROW]), key=1)[0] == 404
    assert server.ask("retrieve_future", {"request_id": f"{model}#1"}, key=1)[0] == 410
    loaded = {"model_id": other, "seq_id": 1, "path": path, "optimizer": True}
    assert "no checkpoint" in server.result(server.ask("load_weights", loaded, key=1), key=1)["error"]
    for traversal in ("tinker://../../x", "../kept/journal.sqlite", f"{path}/../mine"):
        body = {"session_id": session, "sampling_session_seq_id": 9, "model_path": traversal}
        assert server.ask("create_sampling_session", body)[0] == 404
    assert server.ask("healthz", key=-1)[0] == 401
    urls = server.ask(f"{run}/checkpoints/external_weights/mine/external_weights_urls")[1]["urls"]
    good = urls["adapter_config.json"]
    assert urllib.request.urlopen(good).status == 200
    other_digit = "1" if good[-30] == "0" else "0"  # of the signature
    for wrong in (
        good.replace("adapter_config.json", "..%2f..%2fjournal.sqlite"),
        good[:-30] + other_digit + good[-29:],
    ):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(wrong)
        assert error.value.code in (403, 404)
    assert server.ask(f"{run}/checkpoints/weights/mine", method="DELETE")[0] == 204
    assert server.ask("weights_info", {"tinker_path": path})[0] == 404
    assert external.endswith("/external_weights/mine")
    assert oct(os.stat(server.root / "kept").st_mode & 0o777) == "0o700"


def test_a_step_does_not_wait_for_another_clients_long_request(server):
    _, slow = server.model()
    _, quick = server.model(key=1)
    rows = [row_of([2 + (7 * i + j) % 120 for j in range(64)]) for i in range(1500)]
    noted = server.ask("forward_backward", raw=pass_body(slow, 1, rows))
    for seq in (1, 3, 5):
        step(server, quick, seq, key=1)
    assert server.waits(slow, 1)
    assert len(read_passed(server.result(noted))[1]) == 1500


def test_a_long_sample_ends_behind_the_steps_of_other_models(tmp_path_factory):
    """Steps, pushes and new models of others are over before it, and its tokens are those without them."""
    base = prepare_base(make_model(tmp_path_factory.mktemp("model") / "model", positions=2048))
    options = ("--max-model-length", "2048", "--max-num-seqs", "32", "--max-rank", "8", "--max-adapters", "2")
    server = TinkerServer(base.path, tmp_path_factory.mktemp("long"), *options, "--kv-cache-gib", "0.5", keys=2)
    try:
        _, sampled_model = server.model()
        _, other = server.model(key=1)
        step(server, sampled_model, 1)
        saved = {"model_id": sampled_model, "seq_id": 3, "sampling_session_seq_id": 0}
        sampler = server.result(server.ask("save_weights_for_sampler", saved))["sampling_session_id"]
        asked = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [40, 41]}]}, "num_samples": 4}
        asked["sampling_params"] = {"max_tokens": 2000, "seed": 1, "stop": []}
        noted = server.ask("asample", asked | {"seq_id": 0})
        with ThreadPoolExecutor(1) as threads:
            long = threads.submit(server.result, noted)
            for seq in (1, 3, 5):  # another client's
                step(server, other, seq, key=1)
                assert not long.done()
            for seq in (4, 7, 10):  # its own, whose pushes take the place of the version that is sampled
                step(server, sampled_model, seq)
                saved = {"model_id": sampled_model, "seq_id": seq + 2, "sampling_session_seq_id": seq}
                server.result(server.ask("save_weights_for_sampler", saved))
                assert not long.done()
            _, third = server.model(key=1)  # for which the model that is sampled leaves memory
            step(server, third, 1, key=1)
            step(server, other, 7, key=1)
            assert not long.done()
            found = long.result()
        assert server.result(server.ask("asample", asked | {"seq_id": 1})) == found
    finally:
        server.stop()


def test_a_second_server_on_a_directory_ends_before_it_loads_vllm(server, base):
    command = [sys.executable, "-m", "qlora_rl", "tinker", str(base.path), "--dir", str(server.root / "kept")]
    found = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    assert f"is used by another one (process {server.process.pid})" in found.stderr
    assert "starting vLLM" not in found.stderr + found.stdout
    assert not (server.root / "kept" / "api-key").exists()
    assert server.ask("healthz")[0] == 200


def test_hostile_requests_are_errors_of_the_client_and_leave_everything_as_it_was(server):
    """Never an error of the server's, and never a word of another key's; more of them by tests/tinker_hostile.py."""
    _, mine = server.model()
    step(server, mine, 1)
    before = weights(server, mine, 3, "before")
    hostile = Hostile(server, seed=5)
    hostile.run(250)
    assert hostile.wrong == []
    assert {"200", "422", "404", "401", "result: user"} <= set(hostile.seen)
    after = weights(server, mine, 4, "after")
    assert all((after[name] == before[name]).all() for name in before)
    assert step(server, mine, 5)["metrics"]["step"] == 2


def test_a_server_that_is_killed_goes_on_and_has_applied_each_request_once(tmp_path_factory):
    """In forward_backward, in optim_step, and in save; what is trained then is bit for bit what is without."""
    base = prepare_base(make_model(tmp_path_factory.mktemp("model") / "model"))
    server = TinkerServer(base.path, tmp_path_factory.mktemp("killed"), *OPTIONS, "--checkpoint-every", "5")
    batches = [[row_of([2 + (11 * b + 7 * i + j) % 120 for j in range(60)]) for i in range(60)] for b in range(4)]
    batches[2] = [{**row, "weights": [3e38] * 59} for row in batches[2]]  # this step fails, and drops the gradients
    try:

        def train(model, kills=()):
            made = []
            for number, rows in enumerate(batches):
                seq = 2 * number + 1
                passed = server.ask("forward_backward", raw=pass_body(model, seq, rows))
                if seq in kills:
                    assert server.waits(model, seq)
                    server.kill()
                    server.start()
                    assert server.ask("forward_backward", raw=pass_body(model, seq, rows)) == passed
                body = {"model_id": model, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-2}}
                stepped = server.ask("optim_step", body)
                if seq + 1 in kills:
                    server.kill()
                    server.start()
                    assert server.ask("optim_step", body) == stepped
                made.append((read_passed(server.result(passed)), server.result(stepped)))
            saving = server.ask("save_weights", {"model_id": model, "seq_id": 9, "path": "last"})
            if 9 in kills:
                server.kill()
                server.start()
            server.result(saving)
            return made, weights(server, model, 10)

        session, model = server.model()
        wanted = train(model)
        _, model = server.model(session=session, number=1)
        found = train(model, kills=(3, 6, 9))
        assert found[0] == wanted[0]
        assert all((found[1][name] == wanted[1][name]).all() for name in wanted[1])
        assert "norm of the gradients" in wanted[0][2][1]["error"]
        assert wanted[0][-1][1]["metrics"]["step"] == 3
    finally:
        server.stop()
