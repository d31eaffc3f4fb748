"""The notebooks as they are committed: executed from top to bottom, small, and of no particular machine."""

import json
import re
from pathlib import Path

import pytest
from support import program

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
TOPS = program("scripts/notebook_tops.py")

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind):
    """Those of a kind, but for the one that installs."""
    held = json.loads(path.read_text())["cells"]
    return [cell for cell in held if cell["cell_type"] == kind and not TOPS.is_skipped(cell)]


def source(cell):
    return "".join(cell["source"])


def test_it_was_executed_once_from_top_to_bottom(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))


def test_its_top_is_that_of_all(path):
    """`python scripts/notebook_tops.py` writes it."""
    held = json.loads(path.read_text())
    assert TOPS.with_top(json.loads(path.read_text()), path.name, TOPS.repository()) == held
    named = TOPS.with_top(held, path.name, "https://github.com/a/b")
    assert f"github/a/b/blob/main/examples/notebooks/{path.name}" in source(named["cells"][0])
    assert "git+https://github.com/a/b" in source(named["cells"][1])
    assert TOPS.with_top(named, path.name, TOPS.repository()) == json.loads(path.read_text())
    assert [i for i, cell in enumerate(held["cells"]) if TOPS.is_skipped(cell)] == [1]


def test_its_outputs_are_small_without_an_error_and_end_with_a_picture_or_a_table(path):
    assert path.stat().st_size < 250_000
    outputs = [output for cell in cells(path, "code") for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    shown = [o for o in outputs if "data" in o]
    assert {"image/png", "text/html"} <= {kind for o in shown for kind in o["data"]}
    last = next(cell for cell in reversed(cells(path, "code")) if any("data" in o for o in cell["outputs"]))
    assert source(last) in [source(cell) for cell in cells(path, "code")[-2:]]


def test_it_names_no_path_of_a_machine(path):
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/png", None)  # base64, in which anything may stand
    text = json.dumps(notebook)
    assert not re.findall(r"[^\s\"']*/(?:work|tmp|home|root|Users|mnt|opt)\b[^\s\"']*", text)
    assert not re.findall(r"at 0x[0-9a-f]+", text)  # another one at every run
    assert set(notebook["metadata"]) == {"kernelspec"}
