"""`qlora-rl tinker` in a process of its own, which tests may kill and start again; and what a client would send."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from qlora_rl.tinker import messages


class TinkerServer:
    """One on a free port, which it has again when it is started again."""

    def __init__(self, base: Any, root: Path, *options: str, keys: int = 1) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url, self.root = f"http://127.0.0.1:{self.port}", root
        files = [root / f"key-{number}" for number in range(keys)]
        self._command = [sys.executable, "-m", "qlora_rl", "tinker", str(base), "--dir", str(root / "kept")]
        self._command += ["--port", str(self.port), "--ready-file", str(root / "ready"), *options]
        self._command += [word for file in files for word in ("--api-key-file", str(file))]
        self.start()
        self.keys = [file.read_text().strip() for file in files]

    def start(self) -> None:
        ready = self.root / "ready"
        ready.unlink(missing_ok=True)
        with (self.root / "log").open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until = time.monotonic() + 300
        while not ready.exists():
            assert self.process.poll() is None, (self.root / "log").read_text()[-3000:]
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def waits(self, model: str, seq: int) -> bool:
        """This request is noted, and not over."""
        with sqlite3.connect(f"file:{self.root / 'kept' / 'journal.sqlite'}?mode=ro", uri=True, timeout=30) as db:
            found = db.execute("SELECT state FROM requests WHERE model = ? AND seq = ?", (model, seq)).fetchone()
        return found is not None and found[0] == "waiting"

    def samples(self, sampler: str, seq: int = 0, *, for_s: float = 1.0) -> bool:
        """This request of sampling is taken, and goes on for so long at least."""
        body = json.dumps({"request_id": f"{sampler}#{seq}"}).encode()
        headers = {"content-type": "application/json", "x-api-key": self.keys[0]}
        asked = urllib.request.Request(f"{self.url}/api/v1/retrieve_future", body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=for_s):
                raise AssertionError("it is over")
        except TimeoutError:
            return True
        except urllib.error.HTTPError as error:
            if error.code != 410:  # not asked yet
                raise
            return False

    def ask(
        self, path: str, body: Any = None, *, key: int = 0, method: str | None = None, raw: bytes | None = None
    ) -> tuple[int, Any]:
        """Status and body (JSON, or bytes) of a request under /api/v1/."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        kind = messages.MEDIA_TYPE if raw is not None else "application/json"
        asked = urllib.request.Request(f"{self.url}/api/v1/{path}", data, {"content-type": kind}, method=method)
        if key >= 0:
            asked.add_header("x-api-key", self.keys[key])
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                content = answer.read()
                is_json = "json" in answer.headers.get("content-type", "")
                return answer.status, json.loads(content) if is_json else content
        except urllib.error.HTTPError as error:
            content = error.read()
            return error.code, json.loads(content) if content[:1] in (b"{", b"[") else content

    def result(self, noted: tuple[int, Any], *, key: int = 0) -> Any:
        """What comes of a request."""
        status, body = noted
        assert status == 200, body
        while True:
            status, found = self.ask("retrieve_future", {"request_id": body["request_id"]}, key=key)
            if status != 408:
                assert status == 200, found
                return found

    def model(self, *, key: int = 0, session: str | None = None, number: int = 0, **lora: Any) -> tuple[str, str]:
        """A new session, unless there is one, and a model in it."""
        session = session or self.ask("create_session", {"tags": [], "user_metadata": {}}, key=key)[1]["session_id"]
        name = self.ask("get_server_capabilities", key=key)[1]["supported_models"][0]["model_name"]
        body = {"session_id": session, "model_seq_id": number, "base_model": name}
        made = self.result(
            self.ask("create_model", body | {"lora_config": {"rank": 4, "seed": 1, **lora}}, key=key), key=key
        )
        return session, made["model_id"]


def varint(number: int) -> bytes:
    """A number, as protocol buffers write it."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def pass_body(model: str, seq: int, rows: list[dict[str, Any]], loss: str = "cross_entropy", **fields: Any) -> bytes:
    """The body of a forward_backward; a row is its `tokens`, and a list for each input of the loss."""
    data = []
    for row in rows:
        inputs = [
            messages._OF["Named"](
                key=name,
                value={
                    "dense": np.asarray(values, "<i8" if name == "target_tokens" else "<f4").tobytes(),
                    "dtype": 2 if name == "target_tokens" else 1,
                    "shape": b"".join(map(varint, np.shape(values))),
                },
            )
            for name, values in row.items()
            if name != "tokens"
        ]
        chunk = {"text": {"tokens": np.asarray(row["tokens"], "<i4").tobytes()}}
        data.append(messages._OF["Datum"](chunks=[chunk], inputs=inputs))
    config = [
        messages._OF["Setting"](key=name, value={"number": value}) for name, value in fields.pop("config", {}).items()
    ]
    request = messages._OF["Request"](model_id=model, seq_id=seq, data=data, loss_fn=loss, config=config, **fields)
    return request.SerializeToString()


def read_passed(content: bytes) -> tuple[dict[str, float], list[list[float]]]:
    """Metrics and logprobs of a result."""
    found = messages._OF["Passed"].FromString(content)
    (field,) = found.records[0].fields
    ends = np.frombuffer(field.value.offsets, "<i8") // 4
    flat = np.frombuffer(field.value.data, "<f4")
    metrics = {each.key: each.value for each in found.metrics}
    return metrics, [flat[a:b].tolist() for a, b in itertools.pairwise(ends)]


def row_of(ids: list[int]) -> dict[str, Any]:
    """A row of cross_entropy."""
    return {"tokens": ids[:-1], "target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}


def client_python() -> str | None:
    """A Python that has Tinker's client (0.38 and torch): this one, or `QLORA_RL_TINKER_PYTHON`."""
    candidates = [os.environ.get("QLORA_RL_TINKER_PYTHON", ""), sys.executable]
    for python in filter(None, candidates):
        if subprocess.run([python, "-c", "import tinker, torch"], capture_output=True, cwd="/").returncode == 0:
            return python
    return None
