"""A right TOML file of a run, and ways to make it wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from qlora_rl.config.read import read_config
from qlora_rl.config.text import to_toml
from qlora_rl.errors import ConfigConflictError

ROOT = Path(__file__).resolve().parents[1]
GOOD = {
    "method": "grpo",
    "base": {"model": "Qwen/Qwen3-0.6B"},
    "data": {"train": str(ROOT / "examples" / "data" / "sums.jsonl")},
    "rewards": [{"use": "exact_match"}],
}


def written(directory: Path, document: dict) -> Path:
    file = directory / "some.toml"
    file.write_text(to_toml(document))
    return file


def with_field(table: str, name: str, value) -> dict:
    held = {**GOOD["rewards"][0], name: value} if table == "rewards" else {**GOOD.get(table, {}), name: value}
    return {**GOOD, table: [held] if table == "rewards" else held}


def reasons(file: Path, *overrides: str, asks_trl: bool = False) -> tuple[str, ...]:
    with pytest.raises(ConfigConflictError) as caught:
        read_config(file, overrides, asks_trl=asks_trl, trains=True)
    return caught.value.reasons
