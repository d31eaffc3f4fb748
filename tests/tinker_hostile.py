"""Requests of a client that means no good, from a seed: `python tinker_hostile.py COUNT SEED` asks a server of its own
that many, and prints what was answered."""

from __future__ import annotations

import collections
import http.client
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tinker_server import TinkerServer, pass_body, row_of

from qlora_rl.tinker import messages

ODD = [
    *(None, True, -1, 0, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, 1e308, -0.5, 1e-300),
    *(float("nan"), float("inf"), -float("inf")),
    *("", "x" * 100_000, "\x00", "a\x00b", "\ud800", "\U0001f4a5", "nan", "1", "../../etc/passwd", "/etc/passwd"),
    *("tinker://../..", "tinker://../../journal.sqlite", "tinker://%2e%2e/%2e%2e/api-key", "tinker://", ".", ".."),
    *([], {}, [[]], [None], {"": {}}, [{}] * 1000, ["x"] * 5000, [-1], [2**31], [10**30], list(range(20_000))),
]
SEGMENTS = ["..", ".", "%2e%2e", "%2e%2e%2f", "%00", "%ff", "a\\..\\b", "~", "x" * 3000, "", "weights", "1", "-1"]
# What may hold for a request of this server: it was met, wrong, not there, gone, too large, or not for this key.
EXPECTED = {200, 204, 400, 401, 403, 404, 405, 408, 410, 413, 422, 429, 431}


def encoded(body: Any) -> bytes:
    """JSON, in which "deep 5000" is a value in so many lists."""
    return re.sub(r'"deep (\d+)"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), json.dumps(body)).encode()


class Hostile:
    """One session of key 0, and the names of one of key 1.

    Attributes:
        seen: how often each answer came: its status, or what the connection did.
        wrong: what no request may cause: its answer, and the request.
    """

    def __init__(self, server: TinkerServer, seed: int) -> None:
        self._server, self._random = server, random.Random(seed)
        self.seen = collections.Counter[str]()
        self.wrong: list[tuple[str, str]] = []
        self.session, self.model = server.model()
        self._next = 1
        _, self.theirs = server.model(key=1)
        body = {"model_id": self.theirs, "seq_id": 1, "path": "theirs"}
        self.their_path = server.result(server.ask("save_weights", body, key=1), key=1)["path"]
        self.base = server.ask("get_info", {"model_id": self.model})[1]["model_name"]
        opened = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": self.base}
        self.sampler = server.ask("create_sampling_session", opened)[1]["sampling_session_id"]
        self._sampled = 0

    def run(self, count: int) -> None:
        """Ask so often."""
        kinds = [self._json] * 12 + [self._pass] * 5 + [self._path] * 3 + [self._headers] * 2 + [self._not_json] * 2
        for _ in range(count):
            self._random.choice(kinds)()

    def _odd(self) -> Any:
        names = [self.theirs, self.their_path, self.theirs.partition(":")[0], f"{self.theirs}#0", self.model]
        return self._random.choice([*ODD, *names, f"deep {self._random.choice((3, 200, 990, 5000))}"])

    def _good(self) -> tuple[str, dict[str, Any]]:
        """A request that could be met."""
        model = {"model_id": self.model, "seq_id": self._next}
        session = {"session_id": self.session}
        self._sampled += 1
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [40, 41]}]}
        params = {"max_tokens": 3, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": [1]}
        sample = {"sampling_session_id": self.sampler, "seq_id": self._sampled, "num_samples": 2, "prompt": prompt}
        adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
        made = {"rank": 4, "seed": 1, "train_mlp": True, "train_attn": True}
        return self._random.choice(
            [
                ("create_session", {"tags": [], "user_metadata": {}}),
                ("session_heartbeat", session),
                ("create_model", session | {"model_seq_id": 0, "base_model": self.base, "lora_config": made}),
                ("get_info", {"model_id": self.model}),
                ("optim_step", model | {"adam_params": adam}),
                ("save_weights", model | {"path": "w", "ttl_seconds": 60, "overwrite": True, "user_metadata": {}}),
                ("save_weights_for_sampler", model | {"sampling_session_seq_id": self._sampled + 1}),
                ("save_weights_external", model | {"path": "e", "overwrite": True}),
                ("load_weights", model | {"path": "tinker://x", "optimizer": True}),
                ("load_weights", session | {"model_seq_id": 0, "path": "tinker://x", "optimizer": True}),
                ("weights_info", {"tinker_path": "tinker://x"}),
                ("create_sampling_session", session | {"sampling_session_seq_id": 0, "base_model": self.base}),
                ("asample", sample | {"sampling_params": params, "prompt_logprobs": True}),
                ("asample", sample | {"sampling_params": params}),
                ("retrieve_future", {"request_id": f"{self.model}#0"}),
            ]
        )

    def _spoiled(self, body: Any) -> Any:
        """One value of it is odd, missing, or too many."""
        holder, key = body, self._random.choice(list(body))
        while isinstance(holder[key], dict | list) and holder[key] and self._random.random() < 0.8:
            holder = holder[key]
            key = self._random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        how = self._random.random()
        if how < 0.2:
            del holder[key]
        elif how < 0.25 and isinstance(holder, dict):
            holder["x" * self._random.choice((1, 10_000))] = self._odd()
        else:
            holder[key] = self._odd()
        return body

    def _json(self) -> None:
        path, body = self._good()
        self._send("POST", f"/api/v1/{path}", encoded(self._spoiled(body)))

    def _not_json(self) -> None:
        path, body = self._good()
        sent = json.dumps(body).encode()
        at = self._random.randrange(len(sent))
        odd = [b"", b"{", b"[" * 100_000, sent[:at], sent[:at] + b"\xff" + sent[at:], b"\x00" * 100, b"9" * 5000]
        odd += [sent.decode().encode("utf-16"), b'{"a":' * 3000, b"[" + b"{}," * 1_600_000 + b"{}]", b"NaN", b"-"]
        self._send("POST", f"/api/v1/{path}", self._random.choice(odd))

    def _pass(self) -> None:
        pick, count = self._random.choice, self._random.randint(2, 8)
        row: dict[str, Any] = row_of([40 + i for i in range(count)])
        loss = pick(["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "nothing", "x" * 10_000])
        if loss != "cross_entropy" and pick([True, True, False]):
            del row["weights"]
            row |= {"logprobs": [-1.0] * (count - 1), "advantages": [1.0] * (count - 1)}
        spoil = pick(["values", "tokens", "names", "numbers", "bytes", "bytes", "config", "none"])
        name = pick([key for key in row if key != "tokens"])
        if spoil == "values" and name != "target_tokens":
            row[name] = [pick([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 0.0]) for _ in row[name]]
        if spoil in ("values", "tokens"):
            key = pick(["tokens", "target_tokens"])
            bad = pick([-1, 2**31 - 1, -(2**31), 129, 10**6])
            row[key] = pick([[bad] * len(row[key]), [], row[key] * 20, [40] * 100_000, row[key][:-1]])
        if spoil == "names":
            row[pick(["x" * 5000, "", "mask", "logprobs"])] = row.pop(name)
        seq = pick([self._next, -1, 0, 2**31 - 1]) if spoil == "numbers" else self._next
        model = pick([self.theirs, "../..", "x" * 10_000, ""]) if spoil == "numbers" else self.model
        odd = pick([float("nan"), float("inf"), -1.0, 1e300, 0.0])
        config = {pick(["beta", "clip_low_threshold", "x" * 3000]): odd} if spoil == "config" else {}
        sent = bytearray(pass_body(model, seq, [row] * pick([0, 1, 1, 3]), loss, config=config))
        if spoil == "bytes":
            for _ in range(pick([1, 3, 50])):
                sent[self._random.randrange(len(sent))] = self._random.randrange(256)
            sent = pick([sent, sent[: self._random.randrange(len(sent))], sent * 3])
        self._send("POST", "/api/v1/forward_backward", bytes(sent), {"content-type": messages.MEDIA_TYPE})

    def _path(self) -> None:
        some = [*SEGMENTS, self.model, self.theirs, self.session, self.theirs.partition(":")[0]]
        parts = [self._random.choice(some) for _ in range(3)]
        path = self._random.choice(
            [
                "/api/v1/training_runs/{0}/checkpoints/{1}/{2}",
                "/api/v1/training_runs/{0}/checkpoints/external_weights/{1}/external_weights_urls",
                "/api/v1/training_runs/" + self.theirs + "/checkpoints/weights/theirs",
                "/api/v1/sessions/{0}",
                "/api/v1/sessions/{0}/finish" if parts[0] != self.session else "/{0}",
                "/api/v1/samplers/{0}",
                "/files/{0}/{1}/{2}/adapter_model.safetensors",
                "/files/{0}/99999999999/{1}/{2}",
                "/{0}/{1}/{2}",
            ]
        ).format(*parts)
        self._send(self._random.choice(["GET", "GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "TRACE"]), path, b"")

    def _headers(self) -> None:
        path, body = self._good()
        odd: list[dict[str, str]] = [
            *({"x-api-key": key} for key in ("", "tml-wrong", "x" * 20_000, "\xe9", self._server.keys[0] + "x")),
            *({f"x-{i}": "y" * 1000 for i in range(count)} for count in (10, 60, 500)),
            *({"content-encoding": name} for name in ("gzip", "zstd")),
            *({"content-type": name} for name in ("text/plain", "", "multipart/form-data", "application/json; x=y")),
            *({"content-length": size} for size in ("-1", "9" * 30, "99999999", "0x10")),
            {"transfer-encoding": "chunked"},
            {"expect": "100-continue"},
        ]
        self._send("POST", f"/api/v1/{path}", json.dumps(body).encode(), self._random.choice(odd))

    def _send(self, method: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        given = {"x-api-key": self._server.keys[0], "content-type": "application/json"} | (headers or {})
        given.setdefault("content-length", str(len(body)))
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=3 if headers else 30)
        content = b""
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in given.items():
                connection.putheader(name, value.encode("latin-1"))
            connection.endheaders()
            connection.send(body)
            answer = connection.getresponse()
            content = answer.read()
            seen, is_wrong = str(answer.status), answer.status not in EXPECTED
        except TimeoutError:  # it waits for the rest of a body that was promised
            seen, is_wrong = "waits", "content-length" not in (headers or {}) and "transfer-encoding" not in given
        except (OSError, http.client.HTTPException) as error:  # hung up on, as those are whose head is no HTTP
            seen, is_wrong = f"closed ({type(error).__name__})", not headers
        finally:
            connection.close()
        is_wrong = is_wrong or (b"theirs" in content and self.their_path.encode() in content and seen == "200")
        about = f"{method} {path[:200]} {given if headers else ''} {body[:300]!r} -> {content[:300]!r}"
        self._note(seen, is_wrong, about)
        if seen == "200" and b'"request_id"' in content and b'"try_again"' not in content:
            self._follow(json.loads(content)["request_id"], body)

    def _follow(self, request: str, body: bytes) -> None:
        """What comes of one that was taken; one with a number that is far ahead waits for those before it."""
        model, _, seq = request.rpartition("#")
        if model == self.model and seq != "0":
            if int(seq) > self._next:
                return
            self._next = max(self._next, int(seq) + 1)
        status, found = self._server.ask("retrieve_future", {"request_id": request})
        kind = found.get("category", "done") if isinstance(found, dict) else "done"
        seen = f"result: {kind}" if status == 200 else f"result: {status}"
        self._note(seen, status != 200 or kind == "server", f"{request[:100]} {body[:300]!r} -> {found!r:.300}")

    def _note(self, seen: str, is_wrong: bool, about: str) -> None:
        self.seen[seen] += 1
        if is_wrong:
            self.wrong.append((seen, about))


def resident_mib(process: int) -> int:
    """Memory of a process."""
    return next(
        int(line.split()[1]) // 1024
        for line in Path(f"/proc/{process}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    )


def main(count: int, seed: int) -> None:
    """Ask a server of its own, and print what came."""
    from support import make_model

    from qlora_rl import prepare_base

    np.seterr(all="ignore")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        base = prepare_base(make_model(root / "model"))
        options = ("--max-model-length", "64", "--max-num-seqs", "32", "--max-rank", "8", "--max-adapters", "2")
        server = TinkerServer(base.path, root, *options, keys=2)
        try:
            hostile = Hostile(server, seed)
            before = resident_mib(server.process.pid)
            hostile.run(count)
            print(json.dumps({"seen": dict(hostile.seen.most_common()), "wrong": len(hostile.wrong)}))
            print(f"resident MiB {before} -> {resident_mib(server.process.pid)}; {server.ask('healthz')}")
            for seen, about in hostile.wrong[:40]:
                print(seen, about)
        finally:
            server.stop()
            print((root / "log").read_text()[-3000:])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
