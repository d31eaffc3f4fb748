"""The programs of `programs/`: odd and right ones, and cheats, each with tests that it should pass, or not."""

import re
from pathlib import Path

FOLDER = Path(__file__).with_name("programs")
_CASE = re.compile(r"--- in\n(.*?)\n--- out(?:\n|\Z)(.*?)(?=\n--- in|\Z)", re.DOTALL)


def programs(name):
    """By what they are: completion, tests; of one file.

    A program begins with `=== what it is`, its tests with `--- tests`, a case of a script with `--- in` and `--- out`.
    """
    found = {}
    for part in re.split(r"^=== ", (FOLDER / f"{name}.txt").read_text(), flags=re.MULTILINE)[1:]:
        title, body = part.rstrip("\n").split("\n", 1)
        program, kind, rest = re.split(r"\n(?=--- (tests|in)\n)", body, maxsplit=1)
        program = re.sub(r"\\r$", "\r", program, flags=re.MULTILINE).replace("\\ufeff", "\ufeff")
        asked = (
            rest.removeprefix("--- tests\n")
            if kind == "tests"
            else [{"input": text, "output": wanted} for text, wanted in _CASE.findall(rest)]
        )
        assert title not in found, title
        assert asked, title
        found[title] = (program, asked)
    return found


RIGHT = ("functions", "classes", "asynchronous", "fences", "scripts", "larger")
