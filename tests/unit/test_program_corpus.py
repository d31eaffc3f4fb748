"""`program_match` on the programs of `programs/`, and in a sandbox elsewhere."""

import http.server
import json
import subprocess
import sys
import threading

import pytest
from corpus import RIGHT, programs

from qlora_rl import RewardFunctionError
from qlora_rl.rewards import program_match
from qlora_rl.rewards import programs as judging
from qlora_rl.rewards.judging.modes import objects_needed

# Right, and judged wrong: containers are copied for each call. docs/rewards.md says so.
MISJUDGED = {"a list that the program keeps", "a mutable default"}
# They pass, in the interpreter that they share with tests which need their objects.
PASSING = {
    "a manager swallows an exit",
    "the tests' object gets a method",
    "globals through a method's function",
    "an assertion in a loop before the line that raises",
    "if and raise in a with of the program",
    "a Mock of the tests is asked to forget",
}
ADD = "def add(a, b):\n    return a + b\n"
ADDS = "assert add(1, 2) == 3"


def passing(found, **options):
    """What passes, in one call: the judge starts two at a time."""
    rewards = program_match(
        [p for p, _ in found.values()], tests=[t for _, t in found.values()], timeout_s=60.0, **options
    )
    return {name for name, reward in zip(found, rewards, strict=True) if reward == 1.0}


@pytest.mark.parametrize("kind", RIGHT)
def test_odd_programs_that_are_right_pass(kind):
    found = programs(kind)
    assert set(found) - passing(found) <= MISJUDGED


def test_programs_that_cheat_get_nothing_where_tests_compare_values():
    found = {
        name: (p, t) for name, (p, t) in programs("cheats").items() if not (isinstance(t, str) and objects_needed(t))
    }
    assert len(found) > 70
    assert passing(found) == set()


def test_programs_that_cheat_tests_which_need_their_objects_are_known_by_name():
    found = {name: (p, t) for name, (p, t) in programs("cheats").items() if isinstance(t, str) and objects_needed(t)}
    assert passing(found) == PASSING


def test_a_machine_that_starts_no_more_processes_for_a_while_is_waited_for(monkeypatch):
    real, left = subprocess.Popen, [3]

    def start(*arguments, **keywords):
        if left[0]:
            left[0] -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return real(*arguments, **keywords)

    monkeypatch.setattr(judging.subprocess, "Popen", start)
    assert program_match([ADD], tests=[ADDS], timeout_s=60.0) == [1.0]
    assert left == [0]


def test_where_no_process_starts_only_that_program_fails(monkeypatch, caplog):
    def start(*arguments, **keywords):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    judging._SAID.clear()
    monkeypatch.setattr(judging.subprocess, "Popen", start)
    monkeypatch.setattr(judging, "_GRACE_S", 0.1)
    assert program_match([ADD], tests=[ADDS], timeout_s=0.1) == [0.0]
    assert "starts no more processes" in caplog.text


class Sandbox(http.server.BaseHTTPRequestHandler):
    """SandboxFusion's `run_code`, without the sandbox."""

    failing = False

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ran = subprocess.run(
            [sys.executable, "-I", "-c", asked["code"]],
            input=asked["stdin"],
            capture_output=True,
            text=True,
            check=False,
        )
        said = {
            "status": "Success" if ran.returncode == 0 else "Failed",
            "message": "",
            "run_result": {
                "status": "Finished",
                "return_code": ran.returncode,
                "stdout": ran.stdout,
                "stderr": ran.stderr,
            },
        }
        body = json.dumps({"status": "SandboxError", "message": "broken"} if self.failing else said).encode()
        self.send_response(200 if self.path == "/run_code" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def sandbox():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sandbox) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_programs_run_in_a_sandbox_elsewhere(sandbox, monkeypatch):
    sums = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2\n", "output": "4"}]
    prints = "print(sum(map(int, input().split())))"
    wrong = ADD.replace("+", "-")
    rewards = program_match(
        [ADD, wrong, "import os; os._exit(0)", prints, "print(3)", "from __future__ import annotations\n" + ADD, ADD],
        tests=[ADDS, ADDS, ADDS, sums, sums, ["from program import add", ADDS], None],
        sandbox=sandbox,
    )
    assert rewards == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, None]
    monkeypatch.setattr(Sandbox, "failing", True)
    with pytest.raises(RewardFunctionError, match="SandboxError, broken"):
        program_match([ADD], tests=[ADDS], sandbox=sandbox)
    with pytest.raises(RewardFunctionError, match="gives no answer that can be read"):
        program_match([ADD], tests=[ADDS], sandbox="http://127.0.0.1:9")
