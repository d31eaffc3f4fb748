"""Has a torchvision of another build than torch be imported: its compiled operators (boxes and regions) are declared,
and raise when they are called.

Processors of images use none of them; torchvision itself describes two of them to torch when it is imported, and fails
where they do not exist. Called by scripts/setup.sh where the package index has no build for torch's CPU build. Harmless
when repeated.
"""

import importlib.util
import sys
from pathlib import Path

BEFORE = "def _has_ops():\n    return False\n"
DECLARED = """

# Declared by qlora_rl's scripts/torchvision_without_operators.py.
for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> int:
    """0 if torchvision can be imported afterwards."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        print("torchvision is not installed", file=sys.stderr)
        return 1
    folder = Path(found.origin).parent
    file = folder / "extension.py"
    content = file.read_text()
    if DECLARED not in content:
        if content.count(BEFORE) != 1:
            print(f"{file} is not as expected; nothing was changed", file=sys.stderr)
            return 1
        for library in folder.glob("*.so"):  # one that loaded would declare them, too
            library.unlink()
        file.unlink()  # uv may have linked it to its cache, for other environments
        file.write_text(content.replace(BEFORE, BEFORE + DECLARED))
    import torchvision  # noqa: F401

    return 0


if __name__ == "__main__":
    sys.exit(main())
