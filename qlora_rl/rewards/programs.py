"""A reward that runs what the model wrote: apart from its tests, in processes from which the kernel takes what they do
not need."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qlora_rl.errors import ConfigConflictError, NotYetSupportedError, RewardFunctionError
from qlora_rl.rewards.match import references, text_of

logger = logging.getLogger(__name__)

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)")
_PYTHON = re.compile(r"[\s{.]*(?:$|i?py(?:thon)?[\d.]*(?![\w-]))", re.IGNORECASE)
_JUDGING = Path(__file__).with_name("judging") / "__main__.py"
_GRACE_S = 20.0  # for processes to start on a busy machine; the time of a program is counted from there
_REWARDS = {"passed": 1.0, "failed": 0.0, "idle": None}
_DOING = "running programs"
_MEANS = ("namespace", "landlock")  # that files and other processes are hidden by; each where the kernel has it
_SAID: set[str] = set()  # warnings that this process has logged
_Tests = str | list[tuple[str, str]] | None


def program_match(
    completions: Sequence[Any],
    *,
    column: str = "tests",
    timeout_s: float = 5.0,
    memory_mib: int = 256,
    **columns: Any,
) -> list[float | None]:
    """1 where the program in the completion passes its tests; else 0.

    The program is the last fenced block of the completion, or all of it. Its tests are one of two kinds:

    - Python that raises where the program is wrong, as a text or a list of them (`assert add(1, 2) == 3`). Names that
      it neither defines nor imports are the program's, which is imported: a block under `if __name__ == "__main__"` is
      not run. Tests that call the program with data and compare data run in a process of their own, in which none of
      the program's code runs. Tests that need its objects (classes, operators, `with`, `async`) run in its interpreter,
      where it can cheat.
    - A list of `{"input": ..., "output": ...}`: the program is run once for each as a script. What it has written must
      be the output, white space at the ends of lines aside, and its exit code 0.

    Programs have no packages but the standard library, no environment, no files to write, no sockets, no other
    processes, and limits on time and memory; `program_isolation` says what hides files and other processes from them.
    docs/rewards.md says what is left.

    Args:
        completions: B of them, text or messages.
        column: of the dataset, which holds the tests.
        timeout_s: for one program and all of its tests, in seconds.
        memory_mib: that each of its processes may take, in MiB; two run at a time.
        columns: what TRL passes: the dataset's columns and more, B values each.

    Returns:
        B rewards; `None` (TRL leaves the completion out) where the tests ask nothing of the program.

    Raises:
        ConfigConflictError: tests of another form.
        NotYetSupportedError: this machine cannot take from a process what a program must not have.
        RewardFunctionError: the judging process has failed.
    """
    rows = references(columns, column, len(completions))
    tests = [_tests_of(each, column) for each in rows]
    tell_modes(rows, column)
    with ThreadPoolExecutor(max(1, min(len(completions), os.cpu_count() or 1))) as pool:
        programs = [program_of(text_of(each)) for each in completions]
        verdicts = list(pool.map(lambda program, test: _judged(program, test, timeout_s, memory_mib), programs, tests))
    if None in verdicts:
        _say_once(
            "some tests ask nothing of the program, and give no reward: call what is to be tested, as in check(add)."
        )
    return verdicts


def tell_modes(tests: Iterable[Any], column: str = "tests") -> None:
    """Say once how many of some rows' tests run in the program's interpreter."""
    found = [_tests_of(each, column) for each in tests]
    inside = sum(_needs_objects(each) for each in found)
    if inside:
        _say_once(
            "%d of %d rows compare values; the tests of %d use the program's objects and run in its interpreter, "
            "where a program "
            "can cheat: docs/rewards.md#programs",
            len(found) - inside,
            len(found),
            inside,
        )


def program_isolation() -> dict[str, str]:
    """What hides files and other processes from a program here: for each means of the kernel "active", or why it is
    not."""
    return _asked("x = 1", "assert x == 1", 60.0, 256)["isolation"]


def program_of(text: str) -> str:
    """The last fenced block of Python, or of no language, as Markdown has it; the whole text where there is none."""
    found: list[tuple[re.Match[str], list[str]]] = []
    block: list[str] | None = None
    opened: re.Match[str] | None = None
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        if block is None or opened is None:
            if fence and "`" not in fence[3]:
                opened, block = fence, []
        elif fence and fence[2].startswith(opened[2]) and not fence[3].strip():
            found.append((opened, block))
            opened = block = None
        else:
            block.append(line.removeprefix(opened[1]))
    if opened is not None and block:  # unclosed, or closed behind the last line
        found.append((opened, "\n".join(block).rstrip().removesuffix(opened[2]).split("\n")))
    programs = [lines for opened, lines in found if _PYTHON.match(opened[3]) and any(lines)]
    return "\n".join([*programs[-1], ""]) if programs else text


def _tests_of(value: Any, column: str) -> _Tests:
    """Python, or pairs of input and output; `None` where there are none."""
    if value is None or isinstance(value, str):
        return value if value and value.strip() else None
    if isinstance(value, Mapping) and isinstance(value.get("input"), list) and isinstance(value.get("output"), list):
        value = [
            {"input": i, "output": o} for i, o in zip(value["input"], value["output"], strict=True)
        ]  # as `datasets` may give them
    if isinstance(value, (list, tuple)):
        if all(isinstance(each, str) for each in value):
            return _tests_of("\n".join(value), column)
        if all(
            isinstance(each, Mapping) and {type(each.get("input")), type(each.get("output"))} == {str} for each in value
        ):
            return [(each["input"], each["output"]) for each in value]
    raise ConfigConflictError(
        f"{_DOING}: column {column!r} holds {str(value)[:100]!r}. Tests are Python as text, a list of such texts, or a "
        "list of "
        '{"input": "...", "output": "..."}.'
    )


def _needs_objects(tests: _Tests) -> bool:
    from qlora_rl.rewards.judging.modes import objects_needed

    return isinstance(tests, str) and objects_needed(tests) is not None


def _judged(program: str, tests: _Tests, timeout_s: float, memory_mib: int) -> float | None:
    if tests is None:
        return None
    said = _asked(program, tests, timeout_s, memory_mib)
    if "active" not in said["isolation"].values():
        reasons = "; ".join(f"{means}: {reason}" for means, reason in said["isolation"].items())
        _say_once(
            f"{_DOING}: files of this user can be read by them, and what other processes of this user show "
            f"({reasons}). Train in a container without other files and processes, or on a kernel that has one of the "
            "two."
        )
    return _REWARDS[said["verdict"]]


def _asked(program: str, tests: str | list[tuple[str, str]], timeout_s: float, memory_mib: int) -> dict[str, Any]:
    """What the supervisor says of a program (`judging`)."""
    if sys.platform != "linux":
        raise _unsupported(f"{sys.platform} is not Linux")
    is_code = isinstance(tests, str)
    options = {
        "trainer": os.getpid(),
        "means": _MEANS,
        "seconds": timeout_s,
        "bytes": memory_mib * 2**20,
        "cases": None if is_code else len(tests),
        "inside": _needs_objects(tests),
    }
    parts = [
        json.dumps(options),
        program,
        *([tests] if isinstance(tests, str) else [text for pair in tests for text in pair]),
    ]
    frames = [part.encode("utf-8", "surrogatepass") for part in parts]
    with tempfile.TemporaryDirectory(prefix="qlora-rl-program-") as directory:
        job = _started(directory, timeout_s + _GRACE_S)
        if job is None:
            _say_once(
                f"{_DOING}: this machine starts no more processes, and a program that could not be run has failed."
            )
            return {"verdict": "failed", "isolation": {means: "active" for means in _MEANS}}
        with job:
            try:
                out, err = job.communicate(
                    b"".join(len(f).to_bytes(4, "big") + f for f in frames), timeout=2 * timeout_s + _GRACE_S
                )
            except subprocess.TimeoutExpired:
                out, err = b"", b"it did not end in time"
            finally:
                job.kill()  # its processes end with it
    try:
        said = json.loads(out[4:])
    except ValueError:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        raise RewardFunctionError(
            f"{_DOING}: the judging process ended with {job.returncode}: {' '.join(last)}"
        ) from None
    if "error" in said:
        raise _unsupported(said["error"])
    return said


def _started(directory: str, longest_s: float) -> subprocess.Popen[bytes] | None:
    """A supervisor; where other programs' threads are all that a limit allows for, this waits for their end."""
    tried_until = time.monotonic() + longest_s
    while True:
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(_JUDGING)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=directory,
                env={},
                start_new_session=True,
            )
        except BlockingIOError:
            if time.monotonic() > tried_until:
                return None
            time.sleep(0.1)


def _unsupported(reason: str) -> NotYetSupportedError:
    return NotYetSupportedError(
        f"{_DOING}: {reason}. Programs are run on Linux (x86-64, aarch64) with system calls filtered; elsewhere write "
        "a reward that asks a sandbox, and name it as path.py:function."
    )


def _say_once(text: str, *values: object) -> None:
    if text not in _SAID:
        _SAID.add(text)
        logger.warning(text, *values)
