"""docs/trl-arguments.md names every argument of TRL's trainer, and every test that it names exists."""

import inspect
import re
from pathlib import Path

from trl import GRPOTrainer

from qlora_rl import QLoRAGRPOTrainer

TABLE = (Path(__file__).parents[2] / "docs" / "trl-arguments.md").read_text()


def test_the_trainer_takes_trls_arguments_in_trls_order():
    ours = inspect.signature(QLoRAGRPOTrainer.__init__).parameters.values()
    assert [p.name for p in ours if p.kind != p.KEYWORD_ONLY] == list(
        inspect.signature(GRPOTrainer.__init__).parameters
    )


def test_the_table_names_every_argument():
    for name in inspect.signature(QLoRAGRPOTrainer.__init__).parameters:
        assert name == "self" or f"`{name}" in TABLE, name


def test_every_test_that_the_table_names_exists():
    source = "".join(path.read_text() for path in Path(__file__).parents[1].glob("*/test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    assert len(named) > 50
    for name in named:
        assert f"def {name}(" in source, name
