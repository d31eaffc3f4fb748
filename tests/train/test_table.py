"""docs/trl-arguments.md names every argument of TRL's trainer, docs/trainer.md every one of ours; rows.toml has the
tests of each row.

tests/capabilities.toml has those of everything that users have."""

import inspect
import re
import tomllib
from pathlib import Path

from trl import GRPOTrainer

from qlora_rl import QLoRAGRPOTrainer

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
TABLE = (DOCS / "trl-arguments.md").read_text()
ROWS = tomllib.loads((HERE / "rows.toml").read_text())
CAPABILITIES = tomllib.loads((HERE.parent / "capabilities.toml").read_text())
HEADINGS = {"model": "### `model`", "arguments": "### Other arguments", "config": "### `GRPOConfig`"}


def test_the_trainer_takes_trls_arguments_in_trls_order():
    ours = inspect.signature(QLoRAGRPOTrainer.__init__).parameters.values()
    assert [p.name for p in ours if p.kind != p.KEYWORD_ONLY] == list(
        inspect.signature(GRPOTrainer.__init__).parameters
    )


def test_the_tables_name_every_argument():
    parameters = [p for p in inspect.signature(QLoRAGRPOTrainer.__init__).parameters.values() if p.name != "self"]
    for parameter in parameters:
        page = (DOCS / "trainer.md").read_text() if parameter.kind == parameter.KEYWORD_ONLY else TABLE
        assert f"`{parameter.name}" in page, parameter.name
    assert set(ROWS["ours"]) == {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}


def test_every_row_of_the_tables_has_tests():
    for name, heading in HEADINGS.items():
        section = TABLE.split(f"\n{heading}\n")[1].split("\n#")[0]
        assert re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[1:] == list(ROWS[name])


def test_every_test_that_a_row_names_exists():
    source = "".join(path.read_text() for path in HERE.parent.glob("*/test_*.py"))
    tables = [*ROWS.values(), *CAPABILITIES.values()]
    named = {test for table in tables for tests in table.values() for test in tests}
    assert len(named) > 250
    assert all(tests for table in tables for tests in table.values())
    assert not {name for name in named if f"def {name}(" not in source}
