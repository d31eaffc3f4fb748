"""`ReceivedWeights`: full weights that wait in the worker's own memory until all are there; then they are loaded, or
thrown away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from qlora_rl.engine.weight_channels import checksum, open_receiver, unpack
from qlora_rl.errors import SyncError


class ReceivedWeights:
    """One push.

    Args:
        push: its name.
        told: what the trainer says of the way.
        wanted: dtype and shape of every weight that must come, by transformers' name.
        device: of the worker.

    Raises:
        ConfigConflictError: there is no such way here.
    """

    def __init__(
        self, push: str, told: Mapping[str, Any], wanted: Mapping[str, Sequence[Any]], device: torch.device
    ) -> None:
        self.push, self._wanted = push, wanted
        self._receiver = open_receiver(told, device)
        self._buffers: list[list[tuple[str, torch.Tensor]]] = []
        self._names: set[str] = set()

    def take(self, part: Mapping[str, Any]) -> None:
        """One part, checked.

        Raises:
            SyncError: it is not what was sent, or does not fit the model.
        """
        buffer = self._receiver.receive(part["ticket"], int(part["nbytes"]))
        if (found := checksum(buffer)) != int(part["checksum"]):
            raise SyncError(
                f"taking weights: part={len(self._buffers)}, {buffer.numel()} bytes, has checksum={found:016x} != "
                f"checksum={int(part['checksum']):016x} of what was sent. It was damaged on the way. Push again."
            )
        weights = unpack(buffer, [(name, kind, list(shape)) for name, kind, shape in part["places"]])
        for name, weight in weights:
            self._check(name, weight)
            self._names.add(name)
        self._buffers.append(weights)

    def missing(self) -> list[str]:
        """Weights for which no value has come."""
        return sorted(self._wanted.keys() - self._names)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of them, once; a part is let go of when it was read."""
        while self._buffers:
            yield from self._buffers.pop(0)

    def close(self) -> None:
        """Throw away what has come; harmless when repeated."""
        self._buffers.clear()
        self._receiver.close()

    def _check(self, name: str, weight: torch.Tensor) -> None:
        wanted, kind = self._wanted.get(name), str(weight.dtype).removeprefix("torch.")
        if wanted is None:
            raise SyncError(f"taking weights: the engine has no weight {name}: another model? Push to its own server.")
        if (kind, list(weight.shape)) != (wanted[0], list(wanted[1])):
            raise SyncError(
                f"taking weights: {name} has shape={list(weight.shape)}, dtype={kind}; the engine's is "
                f"{list(wanted[1])}, {wanted[0]}: another model? Push to its own server."
            )
        if name in self._names:
            raise SyncError(f"taking weights: {name} came twice. Push again.")
        if weight.numel() and not bool(torch.isfinite(torch.stack(weight.aminmax())).all()):
            raise SyncError(f"taking weights: {name} holds NaN or infinity. Lower the learning rate.")
