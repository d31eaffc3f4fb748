"""Shared makers: tiny random models, prepared bases; made once per session in a cache of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings
from support import make_model, move_a_scale, randomise

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every process that they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run: a change is blamed for what it broke, not for what luck has found. `make test-full` draws others.
settings.register_profile("same", derandomize=True)
settings.register_profile("drawn", derandomize=False)
settings.load_profile(os.environ.get("QLORA_RL_TEST_EXAMPLES", "same"))


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
