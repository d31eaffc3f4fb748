"""The diagrams of the documentation: docs/diagrams/NAME.dot -> docs/diagrams/NAME.svg, by Graphviz.

    apt install graphviz
    python scripts/diagrams.py

Text and picture are both in the repository, so that nobody needs Graphviz to read or build the pages. Each picture
holds the digest of its text; a test says when one was changed without the other.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

DIAGRAMS = Path(__file__).resolve().parents[1] / "docs" / "diagrams"


def digest(source: Path) -> str:
    """Of a text."""
    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]


def drawn_from(picture: Path) -> str:
    """The digest of the text that `picture` was drawn from."""
    found = re.search(r"<!-- drawn from (\w+) -->", picture.read_text())
    return found[1] if found else ""


def main() -> int:
    """Draw all."""
    if shutil.which("dot") is None:
        print("drawing the diagrams: there is no `dot`. Install Graphviz: apt install graphviz", file=sys.stderr)
        return 1
    for source in sorted(DIAGRAMS.glob("*.dot")):
        svg = subprocess.run(["dot", "-Tsvg", source], check=True, capture_output=True, text=True).stdout
        svg = svg[svg.index("<svg") :]  # without Graphviz' version and its doctype
        svg = svg.replace(">", f">\n<!-- drawn from {digest(source)} -->", 1)  # behind the first tag
        source.with_suffix(".svg").write_text(svg)
        print(source.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
