"""`ChannelPush`: full weights to a server's worker, past the server; only tickets are sent by HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from qlora_rl.engine.chunks import PART_BYTES, Outgoing
from qlora_rl.engine.client.upload import Ask
from qlora_rl.engine.weight_channels import Group, checksum, pack
from qlora_rl.errors import QloraRLError

Weights = Sequence[tuple[str, torch.Tensor]]


class ChannelPush:
    """Opens a push, and carries the parts over.

    Args:
        ask: method, path, body -> the server's answer; a request may be repeated.
        version: that the weights get.
        carrier: the trainer's end of the way; closed with the push.
        commit: asks the server to serve what has come under the push's name.

    Attributes:
        name: the server's name of this push.
        nbytes: of all weights that the server wants.

    Raises:
        SyncError: the server, or its worker, does not have that way, or the two ends do not meet.
    """

    def __init__(self, ask: Ask, version: int, *, carrier: Group, commit: Callable[[str], None]):
        self._ask, self._commit, self._carrier, self._index = ask, commit, carrier, 0
        self.name = ""
        try:
            begun = ask("POST", f"/weights?version={version}", carrier.describe)
            self.name, self.nbytes = str(begun["push"]), int(begun["nbytes"])
            carrier.join()
        except BaseException:
            self.abandon()
            raise

    def upload(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Send all weights, and have them served; their bytes.

        Raises:
            SyncError: they could not be made, or did not arrive; says what serves.
        """
        outgoing = Outgoing(version)
        outgoing.stream(weights, self.send, self.abandon, PART_BYTES)
        self.commit()
        return outgoing.nbytes

    def send(self, weights: Weights) -> None:
        """One part; the worker checks it by its sum."""
        buffer, places = pack(weights, self._carrier.device)
        part = {"nbytes": buffer.numel(), "checksum": str(checksum(buffer)), "places": places}

        def ask(ticket: dict[str, Any]) -> None:
            path = f"/weights/part?push={self.name}&part={self._index}"
            self._ask("POST", path, lambda: {**part, "ticket": ticket})

        self._carrier.carry(buffer, ask)
        self._index += 1

    def commit(self) -> None:
        """All parts were sent: have them served."""
        try:
            self._commit(self.name)
        finally:
            self._carrier.close()

    def abandon(self) -> None:
        """Throw away what has come."""
        try:
            if self.name:
                with contextlib.suppress(QloraRLError):
                    self._ask("DELETE", f"/weights?push={self.name}")
        finally:
            self._carrier.close()
