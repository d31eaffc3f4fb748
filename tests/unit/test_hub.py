"""Without network: one message at once, and what is cached still loads."""

import os
import re
import socket
import subprocess
import sys
import time

import pytest
from runfile import GOOD, written

from qlora_rl.base import hub
from qlora_rl.cli import main
from qlora_rl.memory.shape import _say_shipped, skeleton


@pytest.fixture
def asked(monkeypatch):
    """`hub_reachable`, asked again for an endpoint; the settings of huggingface_hub and datasets are restored."""
    import datasets
    from huggingface_hub import constants

    def ask(endpoint, **proxies):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            monkeypatch.setattr(datasets.config, name, False)
        for name in (*hub._PROXIES, "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in proxies.items():
            monkeypatch.setenv(name, value)
        hub.hub_reachable.cache_clear()
        return hub.hub_reachable(), (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE)

    yield ask
    hub.hub_reachable.cache_clear()


@pytest.fixture
def unreachable(asked):
    """The hub's answer where nobody listens: a port that was just given back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return asked(f"http://127.0.0.1:{port}")


def test_a_host_that_takes_a_connection_is_reachable(asked):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert asked(f"http://127.0.0.1:{server.getsockname()[1]}") == (True, (False, False))


def test_one_that_does_not_switches_both_libraries_to_their_caches(unreachable, caplog):
    assert unreachable == (False, (True, True))
    assert "only what is cached here can be used" in caplog.get_records("setup")[0].getMessage()
    assert "'a/b' is no path here, is not in the local cache, and the hub cannot be reached" in hub.why_missing("a/b")


def test_who_has_switched_the_hub_off_is_told_so(asked, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "is not in the local cache, and HF_HUB_OFFLINE is set. Unset it" in hub.why_missing("a/b")


def test_behind_a_proxy_nothing_is_tried(asked):
    assert asked("http://nowhere.invalid", HTTPS_PROXY="http://127.0.0.1:1") == (True, (False, False))
    assert "the hub has no 'a/b'" in hub.why_missing("a/b")


@pytest.mark.parametrize("command", [["plan", "a/b"], ["prepare", "a/b", "base"], ["recommend", "a/b"]])
def test_a_command_says_it_once_and_soon(command, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in (*hub._PROXIES, "HF_HUB_OFFLINE")}
    environment |= {"HF_ENDPOINT": "http://nowhere.invalid", "HF_HOME": str(tmp_path)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "qlora_rl", *command], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1
    assert done.stderr.count("is not in the local cache, and the hub cannot be reached") == 1
    assert "retry" not in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 60  # it was five minutes of retries; most of this is imports


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "no/such/model"])
@pytest.mark.parametrize("command", ["plan", "recommend", "prepare", "train"])
def test_every_command_says_the_same_of_a_path_at_which_there_is_no_model(command, model, tmp_path, capsys):
    file = written(tmp_path, {**GOOD, "base": {"model": model}})
    words = {"train": ["train", str(file), "--check"], "prepare": ["prepare", model, str(tmp_path / "base")]}
    assert main(words.get(command, [command, model])) == 1
    said = capsys.readouterr().err
    # Paths in a file start from its directory.
    place = os.path.normpath(tmp_path / model) if command == "train" and model.startswith(".") else model
    assert f"there is no directory {place}" in said
    assert "Repo id" not in said
    assert ".." not in said


UNSUPPORTED = [
    ("openai/gpt-oss-20b", "is a mixture of experts"),
    ("meta-llama/Llama-3.2-11B-Vision-Instruct", "reads images"),
]


@pytest.mark.parametrize(("model", "said"), UNSUPPORTED)
@pytest.mark.parametrize("command", ["plan", "recommend", "check"])
def test_a_model_that_cannot_be_trained_is_said_before_anything_is_loaded(command, model, said, tmp_path, capsys):
    file = written(tmp_path, {**GOOD, "base": {"model": model}})
    assert main(["train", str(file), "--check"] if command == "check" else [command, model]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Qwen2MoeConfig", "GptOssConfig", "PaliGemmaConfig", "LlavaConfig"])
def test_it_is_known_by_its_config_too(name, tmp_path, capsys):
    import transformers

    getattr(transformers, name)().save_pretrained(tmp_path)
    for command in ("plan", "recommend"):
        assert main([command, str(tmp_path / "config.json")]) == 1
        assert re.search("is a mixture of experts|reads images", capsys.readouterr().err)


@pytest.mark.parametrize(
    "name",
    ["MixtralConfig", *(pytest.param(each, marks=pytest.mark.full) for each in ("Qwen3MoeConfig", "OlmoeConfig"))],
)
def test_a_mixture_is_planned_with_adapters_on_attention(name, tmp_path, capsys):
    import transformers

    from qlora_rl.memory.plan import plan_memory

    config = getattr(transformers, name)(num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    estimate = plan_memory(config)
    assert {key.split(".")[-4] for key in estimate.adapter} == {"k_proj", "o_proj", "q_proj", "v_proj"}
    experts = next(line for line in estimate.lines if line.name == "base, trainer's experts")
    assert experts.nbytes == 2 * sum(
        parameter.numel() for key, parameter in skeleton(config).named_parameters() if ".mlp." in key
    )
    for command in ("plan", "recommend"):
        assert main([command, str(tmp_path / "config.json")]) == 0
    assert "attention only: adapters on experts take far more memory" in capsys.readouterr().out
    document = {**GOOD, "base": {"model": str(tmp_path)}}
    assert main(["train", str(written(tmp_path, document)), "--check"]) == 1
    assert 'target_modules = ["k_proj", "o_proj", "q_proj", "v_proj"]' in capsys.readouterr().err
    document["adapter"] = {"target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"]}
    assert main(["train", str(written(tmp_path, document)), "--check"]) == 0


def test_a_model_for_images_is_planned_with_adapters_on_its_language_model(tmp_path, capsys):
    name = "Qwen/Qwen2.5-VL-3B-Instruct"
    assert main(["plan", name, "--gpu-memory", "24"]) == 0
    assert "vision tower, one pass" in capsys.readouterr().out
    assert main(["recommend", name, "--gpu-memory", "24"]) == 0
    said = capsys.readouterr().out
    assert r"model\\.language_model\\..*_proj" in said
    assert "every linear of the language model; engines apply no adapter to a vision tower" in said
    document = {**GOOD, "base": {"model": name}}
    assert main(["train", str(written(tmp_path, document)), "--check"]) == 1
    told = r"target_modules = 'model\.language_model\..*_proj'"
    assert told in capsys.readouterr().err
    document["adapter"] = {"target_modules": r"model\.language_model\..*_proj"}
    assert main(["train", str(written(tmp_path, document)), "--check"]) == 0


def test_a_check_says_what_it_did_not_look_at(unreachable, tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def score(completions, **_):\n    return [0.0] * len(completions)\n")
    document = {**GOOD, "base": {"model": "a/b"}, "rewards": [{"use": f"{tmp_path / 'mine.py'}:score"}]}
    assert main(["train", str(written(tmp_path, document)), "--check"]) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qlora-rl: ")]
    for part in (
        "the model (there is no directory a/b, and no cached hub model of this name; the hub cannot be reached)",
        "rows of sums.jsonl after the first",
        "what mine.py does",
        "whether it fits (`qlora-rl plan a/b`)",
    ):
        assert part in said
    document["data"] = {"train": "openai/gsm8k", "subset": "main", "columns": {"prompt": "question"}}
    document["base"] = {"model": "Qwen/Qwen3-8B"}
    assert main(["train", str(written(tmp_path, document)), "--check"]) == 0
    said = capsys.readouterr().err
    assert "the dataset openai/gsm8k" in said
    assert "the model (" not in said.split("no errors found. Not checked: ")[1]


def test_a_model_whose_shape_is_shipped_is_planned_without_network_and_that_is_said(unreachable, caplog):
    _say_shipped.cache_clear()
    assert main(["plan", "Qwen/Qwen3-8B", "--gpu-memory", "24GB"]) == 0
    assert main(["recommend", "Qwen/Qwen3-8B", "--gpu-memory", "24GB"]) == 0
    assert caplog.text.count("its shape is the one shipped with qlora_rl") == 1
