"""What is said when vLLM or its bitsandbytes support is missing, too old, or there twice."""

import contextlib
import importlib.metadata
import importlib.util
import os
import tomllib
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import numpy
import pytest
import torch

from qlora_rl import ConfigConflictError, MissingDependencyError, start_server
from qlora_rl.engine import compat
from qlora_rl.engine.images import ImagePrompt
from qlora_rl.engine.options import kv_cache_needed
from qlora_rl.engine.sampling import several


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these distributions and modules are installed."""

    def pretend(distributions, modules=()):
        def version(name):
            if name not in distributions:
                raise importlib.metadata.PackageNotFoundError(name)
            return distributions[name]

        def find_spec(name, package=None):
            return ModuleSpec(name, None) if name in modules else None

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return pretend


IN_TREE, PLUGIN = "vllm.model_executor.layers.quantization.bitsandbytes", "vllm_bnb_plugin"


@pytest.mark.parametrize(("installs", "named"), [({}, "make setup"), ({"vllm": "0.20.2"}, r"0\.20\.2 < 0\.26")])
def test_a_vllm_that_is_missing_or_old_is_an_import_error(installed, installs, named):
    installed(installs)
    with pytest.raises(MissingDependencyError, match=named) as caught:
        compat.vllm_version()
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize(
    ("version", "modules", "home"),
    [
        ("0.26.0", (IN_TREE,), "vllm"),
        ("0.31.0", (PLUGIN,), "vllm-bnb-plugin"),
        ("0.28.1", (PLUGIN,), "vllm-bnb-plugin"),
    ],
)
def test_bitsandbytes_is_found_where_it_lives(installed, version, modules, home):
    installed({"vllm": version}, modules)
    assert compat.require_bitsandbytes_support() == home


@pytest.mark.parametrize(
    ("version", "modules", "message"),
    [
        ("0.31.0", (), r"pip install --no-deps vllm-bnb-plugin==0\.0\.3"),
        ("0.26.0", (), r"Install vLLM >= 0\.28 with vllm-bnb-plugin"),
        ("0.27.1", (IN_TREE, PLUGIN), r"pip uninstall vllm-bnb-plugin"),
    ],
)
def test_a_missing_or_doubled_plugin_is_said_plainly(installed, version, modules, message):
    installed({"vllm": version}, modules)
    with pytest.raises(MissingDependencyError, match=message):
        compat.require_bitsandbytes_support()


@pytest.mark.parametrize(
    ("length", "sequences", "least", "most"),
    [
        (512, 1, 0.13, 0.14),  # twice 5 blocks of 14 MiB
        (4096, 256, 4.0, 4.0),
        (40_960, 8, 4.38, 4.40),  # a whole sequence, else vLLM does not start
        (16, 1, 1 / 16, 1 / 16),
    ],
)
def test_a_cache_is_at_most_4_gib_unless_one_sequence_needs_more(length, sequences, least, most):
    qwen3_600m = SimpleNamespace(
        num_hidden_layers=28, num_key_value_heads=8, head_dim=128, num_attention_heads=16, dtype="bfloat16"
    )
    assert least <= kv_cache_needed(qwen3_600m, length, sequences) <= most


@pytest.mark.parametrize(
    ("version", "server", "mixtures", "lent_sleep"),
    [("0.26.0", False, False, False), ("0.29.0", True, False, False), ("0.31.0", True, True, True)],
)
def test_what_an_older_vllm_lacks_is_said_before_anything_starts(
    installed, base, version, server, mixtures, lent_sleep
):
    from qlora_rl.engine.server import serve

    installed({"vllm": version})
    assert compat.may_sleep(lends=False)
    assert compat.may_sleep(lends=True) is lent_sleep
    for check, is_there in (
        (compat.require_server, server),
        (compat.require_mixtures, mixtures),
        (compat.require_dense_beside_adapters, mixtures),
    ):
        with (
            contextlib.nullcontext()
            if is_there
            else pytest.raises(MissingDependencyError, match=f"vLLM {version} keeps")
        ):
            check()
    if not server:
        for start in (serve, start_server):
            with pytest.raises(MissingDependencyError):
                start(base.path)


def test_without_vllm_a_plan_counts_on_what_the_newest_can(installed):
    installed({})
    assert compat.may_sleep(lends=True)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ("2+2=", "a single prompt"),
        ([50, 43], "a single prompt"),
        (numpy.array([50, 43]), "a single prompt"),
        (torch.tensor([50]), "a single prompt"),
        (ImagePrompt([1], ()), "a single prompt"),
        ([{"role": "user", "content": "2+2="}], "apply_chat_template"),
        ([[{"role": "user", "content": "2+2="}]], "apply_chat_template"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}, "input_ids"),
    ],
)
def test_what_is_no_list_of_prompts_is_rejected(prompts, said):
    with pytest.raises(ConfigConflictError, match=said):
        several(prompts)


def test_prompts_may_be_arrays_and_come_out_of_an_iterator():
    rows = [[1, 2], numpy.array([3, 4]), "5"]
    assert several(row for row in rows) == rows


def test_construction_puts_the_environment_and_the_random_state_back(monkeypatch):
    import random

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    state = random.getstate()
    with pytest.raises(ZeroDivisionError):
        _fail_under_construction()
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    assert random.getstate() == state
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    with compat.construction():
        pass
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ


@pytest.mark.parametrize(
    ("visible", "local_rank", "seen"),
    [("4,5,6,7", "2", "6,7"), (None, "2", "2,3"), ("4,5,6,7", None, "4,5"), ("0", "1", "0")],
)
def test_ranks_that_a_trainer_process_starts_see_its_groups_gpus_and_nothing_of_its_launcher(
    visible, local_rank, seen, monkeypatch
):
    platforms = pytest.importorskip("vllm.platforms")
    gpu = SimpleNamespace(device_control_env_var="CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(platforms, "current_platform", gpu)
    monkeypatch.setattr(compat, "platform_is_cpu", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    told = {"RANK": "6", "WORLD_SIZE": "8", "MASTER_ADDR": "far", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**told, "CUDA_VISIBLE_DEVICES": visible, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    envs = pytest.importorskip("vllm.envs")
    assert envs.VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME  # a name that vLLM samples, and sets, when it is first asked for it
    before = dict(os.environ)
    with compat.room_for(2):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
        assert not compat.launcher_variables()
    assert dict(os.environ) == before
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert envs.VLLM_LOGGING_LEVEL == "DEBUG", "vLLM remembers nothing that it did not remember before"


def test_an_engine_is_built_in_this_process_whatever_vllm_remembers_of_the_environment(monkeypatch):
    """Else its core would be another process, and a lent base or slot would be nobody's."""
    envs = pytest.importorskip("vllm.envs")
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    envs.enable_envs_cache()
    assert envs.VLLM_ENABLE_V1_MULTIPROCESSING
    with compat.construction():
        assert not envs.VLLM_ENABLE_V1_MULTIPROCESSING
    envs.disable_envs_cache()


def _fail_under_construction():
    import random

    with compat.construction():
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        random.seed(1)
        raise ZeroDivisionError


def test_messages_name_the_range_that_the_cuda_extra_asks_for():
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    asked = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cuda"]
    assert f"pip install '{asked[0]}'" == compat.pip_line(compat.PLUGIN_SINCE)


@pytest.mark.parametrize("version", ["old", "new"])
def test_a_module_that_moved_is_found_where_this_vllm_has_it(version, tmp_path, monkeypatch):
    for name, there in (("elder", version == "old"), ("younger", version == "new")):
        (tmp_path / f"{name}.py").write_text(f"at = {name!r}\n") if there else None
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(compat.PLACES, "cli_args", ("younger", "elder"))
    assert compat.moved("cli_args").at == {"old": "elder", "new": "younger"}[version]
