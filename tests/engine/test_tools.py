"""Tools and environments from a run's file with real vLLM: the model calls, the tool answers, the model goes on."""

import json
import random

import pytest
import torch

from qlora_rl.config.launch import launch
from qlora_rl.config.read import read_config
from qlora_rl.config.text import to_toml
from qlora_rl.demo.chat_model import make_chat_model

TOOLS = '''
def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


class Calculator:
    """Remembers what it was asked."""

    def reset(self, **row):
        self.asked = []

    def multiply(self, a: int, b: int) -> int:
        """
        Multiplies two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.asked.append((a, b))
        return a * b

    def get_reward(self):
        return float(len(self.asked))
'''


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def conversation(rng):
    """Half of them call the tool; the same numbers each time, so that a few steps are enough."""
    asked = {"role": "user", "content": "What is 12 * 34?"}
    if rng.random() < 0.5:
        return [asked, {"role": "assistant", "content": "The answer is 99."}]
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 12, "b": 34}}}
    return [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "content": "408"},
        {"role": "assistant", "content": "The answer is 408."},
    ]


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A chat model that calls the tool every other time."""
    rng = random.Random(0)
    out = tmp_path_factory.mktemp("models") / "caller"
    return make_chat_model(
        [conversation(rng) for _ in range(200)],
        out,
        tools=[multiply],
        steps=120,
        batch_size=8,
        hidden_size=128,
        layers=2,
    )


@pytest.mark.parametrize(
    ("method", "tables"),
    [
        ("grpo", {"tools": {"use": ["tools.py:multiply"]}, "rewards": [{"use": "numeric_match"}]}),
        ("grpo", {"environment": {"use": "tools.py:Calculator"}}),
        # A training more; an environment under asynchronous GRPO is in train/test_async.py, without vLLM.
        pytest.param(
            "async_grpo",
            {"tools": {"use": ["tools.py:multiply"]}, "rewards": [{"use": "numeric_match"}]},
            marks=pytest.mark.full,
        ),
    ],
    ids=["tools", "environment", "async tools"],
)
def test_a_call_is_answered_and_its_tokens_are_not_trained_on(method, tables, caller, tmp_path):
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "What is 12 * 34?", "answer": "408"}) + "\n")
    document = {
        "method": method,
        "base": {"model": str(caller)},
        "data": {"train": "rows.jsonl", "format": "chat"},
        "train": {
            "max_steps": 3,
            "per_device_train_batch_size": 16,
            "num_generations": 16,
            "max_completion_length": 80,
            "vllm_max_model_length": 384,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "use_cpu": not torch.cuda.is_available(),
        },
        "run": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "run.toml").write_text(to_toml(document | tables))
    out = launch(read_config(tmp_path / "run.toml"))
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    called = [step["tools/call_frequency"] for step in steps]
    assert max(called) > 0.2
    # Each call earns a reward: the answer that follows it is right, or the environment has counted it.
    assert all(abs(step["reward"] - step["tools/call_frequency"]) <= 0.25 for step in steps)
    # The tool's tokens were sampled by nobody; with them the distance would be that of unlikely tokens.
    assert max(step["mismatch_kl"] for step in steps) < 1e-3
    assert "# sha256 of " in (out / "run.toml").read_text()
