"""A reward that runs what the model wrote. In a process of its own with limits: a seat belt, not a jail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from qlora_rl.rewards.match import references, text_of

_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_RUNNER = Path(__file__).with_name("runner.py")


def program_match(
    completions: Sequence[Any],
    *,
    column: str = "tests",
    timeout_s: float = 5.0,
    memory_mib: int = 256,
    **columns: Any,
) -> list[float]:
    """1 where the tests pass after the program in the completion has run; else 0.

    The program is the last fenced block of the completion, or all of it. The tests are Python that raises where the program is wrong
    (`assert add(1, 2) == 3`). Each pair runs in a Python of its own, without this process's packages and environment, in an empty
    directory, with limits on time, memory and open files; files to write, sockets and other processes are refused by an audit hook.
    That stops what models write by accident. It does not stop an attacker: train on untrusted data inside a container.

    Args:
        completions: B of them, text or messages.
        column: of the dataset, which holds the tests.
        timeout_s: for one program and its tests, in seconds.
        memory_mib: that one may take, in MiB.
        columns: what TRL passes: the dataset's columns and more, B values each.
    """
    tests = references(columns, column, len(completions))
    with ThreadPoolExecutor(max(1, min(len(completions), os.cpu_count() or 1))) as pool:
        passed = pool.map(
            lambda pair: _passes(program_of(text_of(pair[0])), str(pair[1]), timeout_s, memory_mib),
            zip(completions, tests, strict=True),
        )
        return [float(each) for each in passed]


def program_of(text: str) -> str:
    """The last fenced block, or the whole text."""
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def _passes(program: str, tests: str, timeout_s: float, memory_mib: int) -> bool:
    token = secrets.token_hex(16)  # exiting with 0 is no proof that the tests have run
    asked = {"program": program, "tests": tests, "token": token, "seconds": timeout_s, "bytes": memory_mib * 2**20}
    with tempfile.TemporaryDirectory(prefix="qlora-rl-program-") as directory:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_RUNNER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={},
            start_new_session=True,
        ) as job:
            try:
                said, _ = job.communicate(json.dumps(asked).encode(), timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return False
            finally:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and left nobody
                    os.killpg(job.pid, signal.SIGKILL)
    return said.decode(errors="replace") == token
