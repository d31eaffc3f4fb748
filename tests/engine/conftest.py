"""One engine for many tests: vLLM starts once per module that asks for it."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys

import pytest
from support import make_model

PROMPTS = [[40 + i, 41, 42, 43 + i] for i in range(8)]


@pytest.fixture(scope="module")
def engine(base):
    """Real vLLM on the tiny NF4 base, rank class 8."""
    from qlora_rl import LocalEngine

    with LocalEngine(base, max_lora_rank=8, max_model_length=64, max_num_seqs=64, max_num_batched_tokens=512) as engine:
        yield engine


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """An NF4 base whose head and embedding are apart."""
    from qlora_rl import prepare_base

    return prepare_base(make_model(tmp_path_factory.mktemp("untied") / "model", tied=False))


@pytest.fixture
def bundle(adapted):
    """What is pushed of the adapted model."""
    import torch

    from qlora_rl import export_adapter

    return export_adapter(adapted, dtype=torch.bfloat16)


@pytest.fixture
def interruptible():
    """Python's own handler: a shell in the background hands on SIGINT as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def prompts():
    """Eight prompts of four tokens."""
    return [list(p) for p in PROMPTS]


@pytest.fixture(scope="session")
def demo_home(tmp_path_factory):
    """A cache for the demo's own model, of all workers of this run: whoever needs it first pretrains it, inside
    `pretraining`."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # a worker's own directory lies in that of the run
    (root / "demo-home").mkdir(exist_ok=True)
    return root / "demo-home"


@pytest.fixture(scope="session")
def pretraining(demo_home):
    """A lock that is held while the demo's model may be pretrained into `demo_home`; the others wait for it."""

    @contextlib.contextmanager
    def alone():
        with (demo_home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    return alone


@pytest.fixture(scope="session")
def with_demo_model(demo_home, pretraining):
    """What a process is told that needs the demo's model and shall not pretrain it."""
    environment = {"QLORA_RL_CACHE": str(demo_home)}
    with pretraining():
        subprocess.run([sys.executable, "-m", "qlora_rl.demo.tiny_model"], env=os.environ | environment, check=True)
    return environment
