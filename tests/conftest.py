"""Shared makers: tiny random models, prepared bases; made once per session in a cache of their own."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from support import FOR_AN_ENGINE, make_model, move_a_scale, randomise

from qlora_rl.errors import QloraRLError

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tests' own processes share the cores: threads do not compute while they wait, and nobody is advised to say so.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Of actors; Ray's own is 15, and all other tests would come before them.
os.environ.setdefault("RAY_worker_niceness", "0")

# Processes that tests start import in two thirds of the time: children/sitecustomize.py. Behind tests/avx2, if that is
# there.
_CHILDREN = str(Path(__file__).resolve().parent / "children")
if _CHILDREN not in (_known := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, _known), _CHILDREN])

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process that they start and
# interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a change is blamed for what it broke, not for what luck has found. `make test-full`
# draws others.
# How long an example takes is no property: machines are busy.
if importlib.util.find_spec("hypothesis") is not None:  # a GPU host without network may lack it
    from hypothesis import HealthCheck, settings

    _PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("same", derandomize=True, **_PATIENT)
    settings.register_profile("sampled", derandomize=False, **_PATIENT)
    settings.load_profile(os.environ.get("QLORA_RL_TEST_EXAMPLES", "same"))


# What takes a minute and more, longest first, so that no worker waits at the end for another's long file; behind them
# by directory.
LONGEST = (
    "engine/test_demo.py",
    "engine/test_dense_fleet.py",
    "engine/test_server_faults.py",
    "distributed/test_full_weights.py",
    "engine/test_server.py",
    "distributed/test_ddp.py",
    "distributed/test_zero.py",
    "train/test_resume_online.py",
    "train/test_resume.py",
    "engine/test_notebooks_run.py",
    "engine/test_dense_server.py",
    "train/test_kill.py",
)
DIRECTORIES = ("engine", "distributed", "torchrl", "train", "gpu", "unit")
_HERE = Path(__file__).resolve().parent
_frozen_with = 0


def pytest_configure(config: pytest.Config) -> None:
    """The order of the files is ours: pytest-xdist would begin with those that hold the most tests."""
    config.option.loadscopereorder = False


def _place(item: pytest.Item) -> tuple[int, int]:
    name = Path(os.path.relpath(item.path, _HERE)).as_posix()
    directory = name.partition("/")[0]
    return (
        LONGEST.index(name) if name in LONGEST else len(LONGEST),
        DIRECTORIES.index(directory) if directory in DIRECTORIES else 0,
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order of `LONGEST`; within a file nothing changes."""
    items.sort(key=_place)


# vLLM freezes all that there is when an engine starts, and unfreezes all when it ends, the libraries too: four searches
# through a million objects were nine tenths of the time of an engine. `test_local.py` asks whether whoever closes an
# engine unfreezes.
_freeze, _unfreeze = (
    inspect.unwrap(gc.freeze),
    inspect.unwrap(gc.unfreeze),
)  # a worker of pytest-xdist is a child as well
gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture(scope="module", autouse=True)
def libraries_are_not_searched_for_garbage(request: pytest.FixtureRequest) -> None:
    """The end of every training and of every engine collects garbage: half a second through what libraries hold for
    good.

    What a test makes comes later, and is collected as ever.
    """
    global _frozen_with
    if request.path.parent.name == "engine":  # what its first engine would import: frozen as well
        for name in FOR_AN_ENGINE:
            importlib.import_module(name)
    if len(sys.modules) > _frozen_with + 100:
        gc.collect()
        _freeze()
        _frozen_with = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skipped on a vLLM that is older than that of the tests, with our own message that it lacks what is asked for."""
    try:
        return (yield)
    except QloraRLError as error:
        from qlora_rl.engine.compat import release, vllm_version

        if "Upgrade: pip install 'vllm>=0.31" not in str(error) or release(vllm_version()) >= (0, 31):
            raise
        pytest.skip(str(error))


pytest_runtest_setup = pytest_runtest_call


@pytest.fixture(autouse=True)
def libraries_are_as_loud_as_before() -> Iterator[None]:
    """A command of ours that a test calls in this process quietens them, as it does in a process of its own.

    transformers' level decides what a trainer shows (`told`), so that a later file would see nothing.
    """
    loggers = [logging.getLogger(name) for name in ("transformers", "bitsandbytes", "trl", "accelerate")]
    before = [each.level for each in loggers]
    yield
    for each, level in zip(loggers, before, strict=True):
        each.setLevel(level)


def pytest_unconfigure() -> None:
    """The interpreter's own end finds everything again."""
    _unfreeze()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of this session: prepared bases never come from, or go to, the user's own."""
    root = tmp_path_factory.mktemp("cache")
    before = os.environ.get("QLORA_RL_CACHE")
    os.environ["QLORA_RL_CACHE"] = str(root)
    yield root
    if before is None:
        del os.environ["QLORA_RL_CACHE"]
    else:
        os.environ["QLORA_RL_CACHE"] = before


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny checkpoint."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one."""
    return make_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def base(model_dir: Path):
    """The tiny checkpoint as an NF4 base with double quantisation."""
    from qlora_rl import prepare_base

    return prepare_base(model_dir)


@pytest.fixture(scope="session")
def apart(base, tmp_path_factory: pytest.TempPathFactory):
    """The tiny base as another machine might have quantised it: equal codes, one average rounded the other way."""
    from qlora_rl import prepare_base

    root = tmp_path_factory.mktemp("apart")
    return prepare_base(move_a_scale(base.path, root / "source"), out=root / "base")


@pytest.fixture
def adapted(base):
    """A fresh PeftModel on the base, with an adapter that does something."""
    import torch
    from peft import LoraConfig, get_peft_model

    from qlora_rl import load_base

    torch.manual_seed(0)
    model = get_peft_model(load_base(base), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    randomise(model)
    return model


@pytest.fixture
def rescaled(adapted):
    """That, with other factors than its config says."""
    for module in adapted.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    return adapted
