"""Execute notebooks of examples/notebooks/ and keep their outputs: `python scripts/notebooks.py [102 ...]`.

Each runs in an empty directory of its own. A traceback, or an output that names a directory of this machine, leaves the
file as it was. Needs `pip install 'qlora-rl[notebooks]'`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "notebooks"


def execute(
    notebook: Any, directory: Path, environment: Mapping[str, str] | None = None, timeout_s: int | None = None
) -> Any:
    """Run all cells of a notebook in a fresh kernel, in `directory`; the notebook is filled with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell has raised.
    """
    # ipykernel leaves file descriptors alone under pytest, and vLLM writes to them.
    child = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} | dict(environment or {})
    client = NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(directory)}}
    )
    return client.execute(env=child)


def tidy(notebook: Any) -> None:
    """Join what a stream wrote in pieces, and forget when cells ran and which Python it was."""
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        joined: list[Any] = []
        for output in cell.get("outputs", []):
            if joined and output.output_type == "stream" and joined[-1].get("name") == output.name:
                joined[-1].text += output.text
            else:
                joined.append(output)
        if "outputs" in cell:
            cell.outputs = joined


def main() -> None:
    """Execute those that are named by the beginning of their file name, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    names = parser.parse_args().names
    for file in sorted(FOLDER.glob("*.ipynb")):
        if names and not any(file.name.startswith(name) for name in names):
            continue
        notebook = nbformat.read(file, as_version=4)
        with tempfile.TemporaryDirectory() as directory:
            execute(notebook, Path(directory))
        tidy(notebook)
        text = nbformat.writes(notebook)
        named = [place for place in (directory, str(Path.home()), str(ROOT)) if place in text]
        if named:
            raise SystemExit(f"{file.name}: an output names {named}; print relative paths, or none.")
        file.write_text(text + "\n")
        print(f"{file.name}: {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
