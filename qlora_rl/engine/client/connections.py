"""`Lines`: the connections of an HTTP client, so that one thread can end what another one waits for."""

from __future__ import annotations

import contextlib
import socket
import weakref
from typing import Any

import httpx

# httpcore's names for the moments at which a connection has its socket.
_CONNECTED = ("connection.connect_tcp.complete", "connection.start_tls.complete")


class Lines:
    """Make `watch` an event hook of httpx for every request: a connection serves many of them, whichever has opened it.

    Attributes:
        cuts: how often they were cut.
    """

    def __init__(self) -> None:
        self.cuts = 0
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def watch(self, request: httpx.Request) -> None:
        """Hear of the connection on which this request is sent."""
        request.extensions = {**request.extensions, "trace": self}

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        """Note a connection; httpcore calls it at everything that happens."""
        if event in _CONNECTED:
            self._sockets.add(info["return_value"].get_extra_info("socket"))

    def cut(self) -> None:
        """End all connections; whoever waits for an answer is told that there will be none."""
        self.cuts += 1
        for each in list(self._sockets):
            with contextlib.suppress(OSError):  # it has been closed
                each.shutdown(socket.SHUT_RDWR)
