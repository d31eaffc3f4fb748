"""Mends the ends of lines and of files; rejects marks of a conflict and files above a megabyte. A hook of pre-commit.

python scripts/ends.py FILE ...      exit 1 where something was mended, or must be by hand
"""

import re
import sys
from pathlib import Path

LARGEST = 2**20
CONFLICT = re.compile(rb"^(<{7} |={7}$|>{7} )", re.MULTILINE)


def mended(content: bytes) -> bytes:
    """Without blanks at the ends of lines, with one newline at the end."""
    content = content.replace(b"\r\n", b"\n")
    content = re.sub(rb"(?m)[ \t]+$", b"", content)
    return content.rstrip(b"\n") + b"\n" if content.strip() else b""


def main(names: list[str]) -> int:
    """Look at each file."""
    code = 0
    for file in map(Path, names):
        content = file.read_bytes()
        if len(content) > LARGEST:
            print(f"{file}: {len(content) / 2**20:.1f} MiB; keep large files out of the repository")
            code = 1
        if CONFLICT.search(content):
            print(f"{file}: marks of a conflict")
            code = 1
        elif mended(content) != content:
            file.write_bytes(mended(content))
            print(f"{file}: mended")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
