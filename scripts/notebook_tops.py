"""Keep the top of every notebook equal: `python scripts/notebook_tops.py`.

After the opening comes one cell that installs the package where it is missing, and is not executed when outputs are
made. Where pyproject.toml names a public repository (`[project.urls] Repository`), the opening has a badge that opens
the notebook in Colab.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "notebooks"
SKIPPED = "skip-execution"  # nbclient's own name
_BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"


def repository() -> str:
    """The public address of the source; empty where there is none."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository", "")


def install(address: str) -> str:
    """The source of the cell that installs."""
    what = f'"qlora-rl[cuda,notebooks] @ git+{address}"' if address else '-e "../..[cuda,notebooks]"'
    return (
        "# Does nothing where qlora_rl is installed. Otherwise for a machine with a GPU; on a CPU `make setup` "
        "installs it.\n"
        "import importlib.util\n\n"
        'if importlib.util.find_spec("qlora_rl") is None:\n'
        f"    %pip install -q {what}"
    )


def with_top(notebook: dict[str, Any], name: str, address: str) -> dict[str, Any]:
    """The notebook with the top that it is to have; changed in place.

    Args:
        notebook: as JSON.
        name: of its file.
        address: of the repository; empty for none.
    """
    opening, *cells = notebook["cells"]
    text = [line for line in "".join(opening["source"]).splitlines() if not line.startswith(_BADGE)]
    while text[1:2] == [""] == text[2:3]:
        del text[1]
    if address:
        place = address.removeprefix("https://github.com/")
        link = f"https://colab.research.google.com/github/{place}/blob/main/examples/notebooks/{name}"
        text[1:1] = ["", f"{_BADGE}({link})"]
    opening["source"] = "\n".join(text).splitlines(keepends=True)
    cell: dict[str, Any] = {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {"tags": [SKIPPED]},
        "outputs": [],
        "source": install(address).splitlines(keepends=True),
    }
    if notebook["nbformat_minor"] >= 5:
        cell = {"cell_type": "code", "execution_count": None, "id": "install", **cell}
    notebook["cells"] = [opening, cell, *(each for each in cells if not is_skipped(each))]
    return notebook


def is_skipped(cell: dict[str, Any]) -> bool:
    """The cell is not executed when outputs are made."""
    return SKIPPED in cell["metadata"].get("tags", [])


def main() -> None:
    """Write the top of those whose top is another one."""
    for file in sorted(FOLDER.glob("*.ipynb")):
        before = file.read_text()
        after = json.dumps(with_top(json.loads(before), file.name, repository()), indent=1, ensure_ascii=False) + "\n"
        if after != before:
            file.write_text(after)
            print(file.name)


if __name__ == "__main__":
    main()
