"""`LocalServer`: a server that is started for one engine, on this host, and ends with it."""

from __future__ import annotations

import os
from typing import Any

from qlora_rl.engine.client import ServerEngine
from qlora_rl.engine.server.launch import start_server


class LocalServer(ServerEngine):
    """`start_server` and `ServerEngine` in one; `close` stops the server by its own process id.

    Args:
        base: directory made by `prepare_base`.
        options: of `start_server`.
    """

    def __init__(self, base: str | os.PathLike[str], **options: Any):
        self.server = start_server(base, **options)
        try:
            # Nobody starts it again: long enough for a broken connection, no longer.
            super().__init__(self.server.url, api_key=self.server.key, wait_s=5.0)
        except BaseException:
            self.server.stop()
            raise

    def close(self) -> None:
        """Stop the server; harmless when repeated."""
        super().close()
        self.server.stop()
