"""`qlora-rl bench sync` under its old name, and what other benchmarks use of it.

python benchmarks/sync.py [--json benchmarks/results/sync.json]
"""

from __future__ import annotations

import sys
from pathlib import Path

from qlora_rl.bench import shapes
from qlora_rl.bench.sync import merge_cycle, seconds, summary
from qlora_rl.cli import main

ROOT = Path(__file__).resolve().parent.parent
__all__ = ["make_model", "merge_cycle", "seconds", "summary"]


def make_model(directory: Path, layers: int) -> None:
    """The 0.4 B shape with fewer or more layers."""
    import dataclasses

    shapes.make_model(directory, dataclasses.replace(shapes.SIZES["0.4b"], layers=layers))


if __name__ == "__main__":
    written = [] if "--json" in sys.argv else ["--json", str(ROOT / "benchmarks" / "results" / "sync.json")]
    sys.exit(main(["bench", "sync", "--size", "0.4b", *written, *sys.argv[1:]]))
