"""`serve_adapters`: the server in this process, on loopback unless a key is given, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from qlora_rl.base.checkpoint import open_base
from qlora_rl.engine.server import bind, check_host, read_or_make_key
from qlora_rl.stages import begin
from qlora_rl.tinker.journal import Journal
from qlora_rl.tinker.routes import KeyGate, make_app
from qlora_rl.tinker.service import LAPSE_S, Service
from qlora_rl.train.adapters import Adapters

KEY_PREFIX = "tml-"  # without it the client sends nothing


def serve_adapters(
    base: str | os.PathLike[str],
    *,
    directory: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = 8001,
    api_key_files: Sequence[str | os.PathLike[str]] = (),
    model_name: str | None = None,
    max_body_mib: float = 64.0,
    checkpoint_every: int = 1,
    client_timeout_s: float = LAPSE_S,
    ready_file: str | os.PathLike[str] | None = None,
    **options: Any,
) -> None:
    """Serve a prepared base to Tinker's client until SIGTERM or Ctrl-C.

    Args:
        base: directory made by `prepare_base`.
        directory: of the journal and of all weights; a server that is started with it again goes on.
        host: to listen on; another than loopback needs key files that exist.
        port: to listen on; 0 takes a free one.
        api_key_files: one for each client, whose sessions, models and weights no other can read; by default one in
            `directory`, made with mode 600.
        model_name: that clients call the base; by default its directory, from which their tokenizer is loaded.
        max_body_mib: largest request.
        checkpoint_every: optimizer steps of a model from one saved state to the next.
        client_timeout_s: without a sign of life, until the adapters of a client's session leave memory.
        ready_file: is written when the server answers: JSON with url, key_file, pid.
        options: of `Adapters`, and of its engine.

    Raises:
        ConfigConflictError: arguments that would leave the server open, or a key that cannot be read.
        EngineUnsupportedError, CannotShareError, BaseMismatchError: as with `Adapters`.
        RunDirectoryError: another server uses the directory.
    """
    root = Path(directory)
    check_host(host, Path(api_key_files[0]) if api_key_files else None)
    journal = Journal(root)  # before vLLM is loaded: the directory may be another server's
    keys = [read_or_make_key(Path(file), KEY_PREFIX) for file in api_key_files or [root / "api-key"]]
    path = open_base(base, verify=False).path
    sock = bind(host, port)
    url = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    begin(f"starting vLLM on {base}")
    with Adapters(path, **options) as adapters:
        service = Service(adapters, journal, model_name or str(path), checkpoint_every, client_timeout_s)
        try:
            app = make_app(service, str(path))
            gate = KeyGate(app, [key for _, key in keys], int(max_body_mib * 2**20))
            # h11 bounds the headers, which are read before the key is known.
            config = uvicorn.Config(gate, http="h11", log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
            server = _Server(config)
            server.about = {"url": url, "key_file": str(keys[0][0]), "pid": os.getpid(), "model": service.model_name}
            server.ready_file = ready_file
            server.run(sockets=[sock])
        finally:
            service.close()
            sock.close()


class _Server(uvicorn.Server):
    """uvicorn's, which says when it answers, and after a signal lets this process end in its own way."""

    about: dict[str, Any]
    ready_file: str | os.PathLike[str] | None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end the server; uvicorn would raise them again before the engine is closed."""
        known = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in known.items():
                signal.signal(number, handler)

    async def startup(self, sockets: Any = None) -> None:
        """uvicorn's; then it is announced."""
        await super().startup(sockets)
        begin("")
        about = self.about
        print(
            f"qlora-rl: Tinker's API for {about['model']} at {about['url']}; key in {about['key_file']}. "
            f"tinker.ServiceClient(base_url={about['url']!r}, api_key=...)",
            flush=True,
        )
        if self.ready_file is not None:
            staged = Path(f"{self.ready_file}.staged")
            staged.write_text(json.dumps(about))
            os.replace(staged, self.ready_file)
