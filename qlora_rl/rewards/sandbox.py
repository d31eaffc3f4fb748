"""Runs a program in a sandbox elsewhere, over HTTP as SandboxFusion speaks it (`POST /run_code`)."""

from __future__ import annotations

import http.client
import json
import os
import urllib.request
from typing import Any

from qlora_rl.errors import RewardFunctionError

_LONGEST = 64 * 2**20  # bytes of an answer
_GRACE_S = 30.0  # for the sandbox to start, beyond the time of a program
_TOGETHER = """
import sys
sys.modules["program"] = sys.modules["__main__"]
exec(compile({program!r}, "program.py", "exec", dont_inherit=True), globals())
exec(compile({tests!r}, "tests", "exec", dont_inherit=True), globals())
print({sentinel!r})
"""


def passes_elsewhere(
    address: str, program: str, tests: str | list[tuple[str, str]], timeout_s: float, memory_mib: int
) -> bool:
    """Whether a program passes its tests in the sandbox at this address.

    Python tests run in the program's interpreter, behind a random word; a program can change what tests it.

    Raises:
        RewardFunctionError: the sandbox cannot be reached, or has failed itself.
    """
    if isinstance(tests, str):
        sentinel = os.urandom(16).hex()
        code = _TOGETHER.format(program=program, tests=tests, sentinel=sentinel)
        said = _run(address, code, "", timeout_s, memory_mib)
        return said is not None and said.rstrip().endswith(sentinel)
    for text, wanted in tests:
        said = _run(address, program, text, timeout_s, memory_mib)
        if said is None or lines(said) != lines(wanted):
            return False
    return True


def lines(text: str) -> list[str]:
    """White space at the ends of lines, and behind the last one, is no difference."""
    return [each.rstrip() for each in text.rstrip().split("\n")]


def _run(address: str, code: str, stdin: str, timeout_s: float, memory_mib: int) -> str | None:
    """What it has written, where it has ended well."""
    asked = {
        "code": code,
        "stdin": stdin,
        "language": "python",
        "run_timeout": timeout_s,
        "memory_limit_MB": memory_mib,
    }
    try:
        request = urllib.request.Request(
            f"{address.rstrip('/')}/run_code", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s + _GRACE_S) as answer:
            said: dict[str, Any] = json.loads(answer.read(_LONGEST))
        status, result = said["status"], dict(said.get("run_result") or {})
        if status == "Success" and result.get("return_code") is None:
            raise ValueError("Success without a return_code")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, http.client.HTTPException) as error:
        raise RewardFunctionError(
            f"running programs: the sandbox at {address} gives no answer that can be read "
            f"({type(error).__name__}: {error}). Is it running, and does it speak as SandboxFusion does?"
        ) from error
    if status not in ("Success", "Failed"):
        raise RewardFunctionError(
            f"running programs: the sandbox at {address} has failed: {status}, {said.get('message')}"
        )
    is_well = status == "Success" and result.get("status") == "Finished" and result.get("return_code") == 0
    return str(result.get("stdout") or "") if is_well else None
