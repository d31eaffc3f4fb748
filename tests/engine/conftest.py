"""One engine for many tests: vLLM starts once per module that asks for it."""

import pytest

PROMPTS = [[40 + i, 41, 42, 43 + i] for i in range(8)]


@pytest.fixture(scope="module")
def engine(base):
    """Real vLLM on the tiny NF4 base, rank class 8."""
    from qlora_rl import LocalEngine

    with LocalEngine(base, max_lora_rank=8, max_model_length=64, max_num_seqs=64) as engine:
        yield engine


@pytest.fixture
def prompts():
    """Eight prompts of four tokens."""
    return [list(p) for p in PROMPTS]
