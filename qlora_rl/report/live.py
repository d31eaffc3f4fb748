"""`LiveReport`: the page of a run while it trains, on this machine's loopback address only; it renews itself in the
browser."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ..errors import ConfigConflictError, QloraRLError
from .page import render
from .quantities import seconds
from .run import Run, read_run

HOST = "127.0.0.1"
_FILES = (
    "config.json",
    "metrics.jsonl",
    "sync.jsonl",
    "summary.json",
    "samples.json",
    "rollouts.json",
    "teacher.json",
    "eval.json",
)


class LiveReport:
    """A small server for one page. The page is read-only, and only this machine can reach it.

    Args:
        runs: run directories; the page is of the first, the others are drawn for comparison.
        port: 0 takes a free one.

    Raises:
        RunDirectoryError: one of them is no directory.
        ConfigConflictError: the port is taken.
    """

    def __init__(self, runs: Sequence[Path | str], port: int = 0):
        self._runs = [Path(run) for run in runs]
        for run in self._runs:
            read_run(run)
        self._page: tuple[str, bytes] = ("", b"")
        try:
            self._server = ThreadingHTTPServer((HOST, port), self._handler())
        except OSError as error:
            raise ConfigConflictError(
                f"starting the live report: port {port} of {HOST} is not available ({error.strerror}). Choose another "
                "--port, or leave it out."
            ) from error
        self._server.daemon_threads = True
        self._is_serving = False

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self._server.server_port}/"

    def serve(self) -> None:
        """Answer until `close`, or Ctrl-C."""
        self._is_serving = True
        try:
            self._server.serve_forever(poll_interval=0.2)
        finally:
            self._is_serving = False

    def close(self) -> None:
        """Stop; harmless when repeated, and from another thread than the one that serves."""
        if self._is_serving:
            self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> LiveReport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def page(self) -> tuple[str, bytes]:
        """The current page and its tag; it is drawn again only where a file has changed."""
        tag = self._stamp()
        if tag != self._page[0]:
            runs = [read_run(run) for run in self._runs]
            self._page = tag, render(runs, news=say_state(runs[0], self._age())).encode("utf-8", errors="replace")
        return self._page

    def _stamp(self) -> str:
        known = []
        for run in self._runs:
            for name in _FILES:
                with contextlib.suppress(OSError):
                    stat = (run / name).stat()
                    known.append(f"{run}/{name}:{stat.st_mtime_ns}:{stat.st_size}")
        # A run that is silent for long says so: its page changes with the minute although its files do not.
        return hashlib.sha256("\n".join([*known, str(self._age() // 60)]).encode()).hexdigest()[:16]

    def _age(self) -> float:
        """Seconds since the run has written anything."""
        times = []
        for name in _FILES:
            with contextlib.suppress(OSError):
                times.append((self._runs[0] / name).stat().st_mtime)
        return max(0.0, time.time() - max(times, default=time.time()))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        report = self

        class Handler(BaseHTTPRequestHandler):
            """GET / and nothing else."""

            def do_GET(self) -> None:
                port = self.connection.getsockname()[1]
                # A page of another name that resolves to this address must not read it (DNS rebinding).
                if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
                    self.send_error(HTTPStatus.FORBIDDEN, "Not this host")
                elif self.path != "/":
                    self.send_error(HTTPStatus.NOT_FOUND)
                else:
                    self._send()

            def _send(self) -> None:
                try:
                    tag, body = report.page()
                except QloraRLError as error:
                    self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "The run cannot be read", str(error))
                    return
                is_known = self.headers.get("If-None-Match") == f'"{tag}"'
                self.send_response(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK)
                self.send_header("ETag", f'"{tag}"')
                self.send_header("Cache-Control", "no-cache")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Referrer-Policy", "no-referrer")
                if not is_known:
                    self.send_header("Content-Type", "text/html; charset=utf-8")
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if not is_known:
                    with contextlib.suppress(ConnectionError):  # the browser has gone on
                        self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing: the terminal is the user's."""

        return Handler


def say_state(run: Run, age_s: float) -> str:
    """One sentence for the top of a live page."""
    if run.status in ("finished", "interrupted", "failed"):
        word = {"finished": "has finished", "interrupted": "was interrupted", "failed": "has failed"}[run.status]
        return f"This run {word}; the page changes no more."
    if age_s >= 120:
        return (
            f"Live, but the run has written nothing for {seconds(age_s)}: it may have been killed, or a step takes "
            "that long."
        )
    return "Live: this run is training, and the page renews itself."
