"""Sends damaged requests with the key to every route of a running `qlora-rl serve`, and says what it answered.

python scripts/fuzz_server.py URL KEY_FILE --pid PID [--seconds 60] [--seed 0]

Exit code 1 where an answer was a 5xx, none came, or the server holds more descriptors or threads at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import http.client
import json
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psutil

OWN = "/qlora/v1"
SESSION = "x-qlora-session"
NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    0.5,
    2**31,
    2**63,
    2**64,
    -(2**70),
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "²",
    "٣",
    "\0",
    "\ud800",
    "..",
    "/",
    "x" * 5000,
    "a/" * 3000,
    [],
    {},
    [[]],
    [None],
    [1, "x"],
    {"": {}},
    [2**40],
    ["\udcff"],
    {"\ud800": 1},
    [0] * 500,
]
QUERIES = [
    "",
    "0",
    "1",
    "-1",
    "²",
    "٣",
    "1e3",
    "NaN",
    "999999999999",
    "9" * 5000,
    "é",
    "\0",
    "%",
    "x" * 300,
    "None",
    "0x1",
]
DEEP = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"[" * 900 + b"]" * 900,
    b'{"prompts":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
]
WHOLE = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"1",
    b'"x"',
    b"\xff\xfe",
    b"NaN",
    b"9" * 5000,
    b'{"a": 1',
    b"\0" * 100,
    b'"\\ud800"',
    *DEEP,
]
SAMPLING = {
    "max_tokens": 2,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": 1,
    "regex": None,
    "extra": {"stop": ["a"], "logit_bias": {"5": 1.0}},
    "first_place": 0,
    "stop_token_ids": [3],
}
CHAT = {"model": "base", "messages": [{"role": "user", "content": "1"}], "max_tokens": 1, "temperature": 0.0, "seed": 1}
# A body of each route that takes one, right or nearly so.
BODIES: dict[str, Any] = {
    f"{OWN}/generate": {
        "prompts": [[40, 41]],
        "sampling": SAMPLING,
        "places": [0],
        "version": 0,
        "digest": "",
        "held": False,
    },
    f"{OWN}/score": {"sequences": [[40, 41, 42]], "bare": True, "version": 0, "digest": "", "images": []},
    "/tokenize": {"model": "base", "prompt": "1", "add_special_tokens": True},
    "/detokenize": {"model": "base", "tokens": [40, 41]},
    "/v1/completions": {
        "model": "base",
        "prompt": [40, 41],
        "max_tokens": 1,
        "temperature": 1.0,
        "n": 1,
        "logprobs": 0,
        "seed": 1,
        "stop": ["a"],
    },
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {**CHAT, "messages": [CHAT["messages"]]},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"model": "base", "input": "1", "max_output_tokens": 1},
}


@dataclass
class Counts:
    """What was asked and what came back."""

    seed: int
    seconds: float = 0.0
    by_status: Counter[str] = field(default_factory=Counter)
    faults: dict[str, str] = field(default_factory=dict)
    fault_count: int = 0
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)

    @property
    def leaks(self) -> list[str]:
        """Of descriptors and threads those that are more than at the beginning."""
        return [name for name in ("descriptors", "threads") if self.after[name] > self.before[name]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        counted = {"requests": sum(self.by_status.values()), "by_status": dict(sorted(self.by_status.items()))}
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            **counted,
            "fault_count": self.fault_count,
            "faults": self.faults,
            "before": self.before,
            "after": self.after,
            "leaks": self.leaks,
        }


class Fuzzer:
    """One connection, one source of random numbers.

    Args:
        url: of the server.
        key: that it wants.
        pid: of the server's process on this host.
        seed: of what is sent.
    """

    def __init__(self, url: str, key: str, pid: int, seed: int):
        parts = urlsplit(url)
        self.address, self.key = (parts.hostname or "", parts.port or 80), key
        self.process, self.random = psutil.Process(pid), random.Random(seed)
        self.counts = Counts(seed)
        routes = json.loads(self.send("GET", "/openapi.json")[1])["paths"]
        self.routes = [(m.upper(), path) for path, methods in routes.items() for m in methods]

    def run(self, seconds: float) -> Counts:
        """Ask for so many seconds, or until Ctrl-C, after every route was asked."""
        for method, path in self.routes:
            for _ in range(5):
                self.ask(method, path)
        # Pools of threads grow with what comes at once, up to a limit; vLLM has one for grammars alone.
        spec = {"max_tokens": 2}
        right = [json.dumps({"prompts": [[40, 41]], "sampling": each}) for each in (spec, {**spec, "regex": "[0-9]+"})]
        with ThreadPoolExecutor(32) as crowd:
            list(crowd.map(lambda body: self.send("POST", f"{OWN}/generate", {}, body.encode()), right * 32))
        self.counts.by_status.clear()
        self.counts.before = self.held()
        started = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):
            while time.monotonic() < started + seconds:
                self.ask(*self.random.choice(self.routes))
        self.counts.seconds = time.monotonic() - started
        self.counts.after = self.held()
        return self.counts

    def held(self) -> dict[str, float]:
        """Descriptors, threads and memory of the server and of vLLM's engine, when nothing is asked."""
        self.send("DELETE", f"{OWN}/lease", {SESSION: "fuzzer"})
        time.sleep(3.0)
        all_of_it = [self.process, *self.process.children(recursive=True)]
        rss = sum(each.memory_info().rss for each in all_of_it) / 2**20
        return {
            "descriptors": sum(each.num_fds() for each in all_of_it),
            "threads": sum(each.num_threads() for each in all_of_it),
            "rss_mib": round(rss, 1),
        }

    def ask(self, method: str, path: str) -> None:
        """One damaged request."""
        headers, body = self.headers(), self.body(method, path)
        query = f"?{self.query()}" if path.startswith(OWN) else ""
        target = (path.replace("{response_id}", quote(str(self.pick(QUERIES)))) + query).encode("latin-1", "replace")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            try:
                status, answer = self.send(method, target.decode("latin-1"), headers, body)
            except TimeoutError:
                if {"content-length", "transfer-encoding"} & headers.keys():  # it waits for the rest of the body
                    self.counts.by_status["unfinished"] += 1
                    return
                status, answer = 0, b"no answer"
            self.counts.by_status[str(status)] += 1
            if status >= 500 or status == 0:
                self.counts.fault_count += 1
                asked = f"{method} {target[:120]!r} {body[:300]!r}"
                said = re.sub(r"\d+", "0", answer[:300].decode(errors="replace"))
                self.counts.faults.setdefault(f"{status} {method} {path} {said}", asked)
            return
        self.counts.by_status["closed"] += 1

    def send(
        self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> tuple[int, bytes]:
        """Status and body of the answer; `headers` may be no headers at all."""
        given = {"authorization": f"Bearer {self.key}", "content-length": str(len(body)), "connection": "close"}
        lines = [f"{method} {target} HTTP/1.1", "host: x"]
        lines += [f"{name}: {value}" for name, value in {**given, **(headers or {})}.items()]
        is_whole = not {"content-length", "transfer-encoding"} & (headers or {}).keys()
        with socket.create_connection(self.address, timeout=300 if is_whole else 10) as connection:
            connection.sendall("\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body)
            if headers and "x-hang-up" in headers:
                return 499, b""
            answer = http.client.HTTPResponse(connection, method=method)
            try:
                answer.begin()
                return answer.status, answer.read()
            except http.client.HTTPException as error:
                raise ConnectionResetError(str(error)) from error

    def pick(self, among: list[Any]) -> Any:
        """One of them."""
        return self.random.choice(among)

    def headers(self) -> dict[str, str]:
        """Mostly right ones."""
        headers = {SESSION: "fuzzer", "content-type": "application/json"}
        if self.random.random() < 0.1:
            headers[
                self.pick(
                    [
                        SESSION,
                        "content-type",
                        "accept",
                        "x-request-id",
                        "content-length",
                        "x-qlora-start",
                        "transfer-encoding",
                    ]
                )
            ] = self.pick(
                [
                    *QUERIES,
                    "chunked",
                    "-5",
                    "multipart/form-data; boundary=x",
                    "text/plain",
                    "application/json; charset=utf-7",
                ]
            )
        if self.random.random() < 0.02:
            headers["x-hang-up"] = "1"
        return headers

    def query(self) -> str:
        """Values of our routes' parameters, or none."""
        names = ["version", "digest", "rank", "push", "part", "offset", "force"]
        return "&".join(f"{name}={quote(self.pick(QUERIES), safe='')}" for name in names if self.random.random() < 0.7)

    def body(self, method: str, path: str) -> bytes:
        """A damaged body for a route."""
        if method == "GET" or self.random.random() < 0.1:
            return b"" if method == "GET" else self.pick(WHOLE)
        if method == "PUT":
            return self.blob()
        content = copy.deepcopy(
            BODIES.get(path, {"model": "base", "input": "1", "prompt": "1", "query": "1", "items": ["1"]})
        )
        for _ in range(self.random.choice([0, 1, 1, 1, 2, 4])):
            content = self.changed(content)
        body = json.dumps(content).encode()
        if self.random.random() < 0.1:
            place = self.random.randrange(len(body) + 1)
            body = (
                body[:place]
                + self.random.randbytes(self.random.randrange(4))
                + body[place + self.random.randrange(3) :]
            )
        return body

    def changed(self, value: Any) -> Any:
        """A JSON value with one part replaced, removed or added, anywhere in it."""
        if isinstance(value, dict) and value and self.random.random() < 0.9:
            name = self.pick([*value])
            if self.random.random() < 0.1:
                return {k: v for k, v in value.items() if k != name} | (
                    {"x": self.pick(NASTY)} if self.random.random() < 0.5 else {}
                )
            return {**value, name: self.changed(value[name])}
        if isinstance(value, list) and value and self.random.random() < 0.6:
            place = self.random.randrange(len(value))
            return [*value[:place], self.changed(value[place]), *value[place + 1 :]]
        return self.pick(NASTY)

    def blob(self) -> bytes:
        """Bytes that are nearly an adapter's."""
        tensor = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
        config = {"r": 1, "lora_alpha": 1, "bias": "none", "rank_pattern": {}, "target_modules": ["q_proj"]}
        told: Any = self.pick([json.dumps(self.changed(config)), "[" * 50_000, "NaN", "\ud800", None, 1])
        header = {"__metadata__": {"format": "pt", "adapter_config": told}, "base_model.model.a.lora_A.weight": tensor}
        text = json.dumps(self.changed(header) if self.random.random() < 0.5 else header).encode()
        length = self.pick([len(text), len(text), len(text), 0, 2**63, len(text) + 7])
        return struct.pack("<Q", length) + text + struct.pack("<f", self.pick([0.0, 1.0, float("nan"), 1e30]))


def main() -> int:
    """Fuzz, print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("key_file", type=Path)
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    counts = Fuzzer(asked.url, asked.key_file.read_text().strip(), asked.pid, asked.seed).run(asked.seconds)
    print(json.dumps(counts.as_dict(), indent=1))
    return 1 if counts.fault_count or counts.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
