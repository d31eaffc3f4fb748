"""`keep_on_host`: under gradient checkpointing the inputs of layers wait for the backward pass in host memory.

transformers has the setting, `gradient_checkpointing_kwargs={"offload": True}`, and copies on the stream that computes.
Here each copy has a stream of its own: an input goes out while its layer computes, and comes back while the layer after
it is computed again.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

logger = logging.getLogger(__name__)

# Smaller tensors stay where they are, in elements.
SMALLEST = 1024


class Copier(Protocol):
    """Copies between a device and the host, which are done when `wait` has been called with what came along."""

    device: str

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin a copy in host memory."""

    def fetch(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin a copy on the device."""

    def wait(self, event: Any) -> None:
        """What is computed from here on finds that copy complete."""


class CudaCopier:
    """A stream for all copies, between the current device and pinned memory.

    They are made in the order in which they begin, so a host copy is complete when it is fetched. torch's allocators
    know who uses which memory: the device's tensors are allocated for the stream that computes, which waits for their
    copies.
    """

    device = "cuda"

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begin a copy in pinned memory; the tensor must be kept until `wait`."""
        return self._copy(tensor, torch.empty_like(tensor, device="cpu", pin_memory=True))

    def fetch(self, host: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begin a copy on the device."""
        return self._copy(host, torch.empty_like(host, device="cuda", pin_memory=False))

    def wait(self, event: torch.cuda.Event) -> None:
        """The stream that computes goes on when the copy is made; this thread does not wait."""
        torch.cuda.current_stream().wait_event(event)

    def _copy(self, source: torch.Tensor, to: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        # What is copied has been computed, and what used this memory before is done.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            return to, self._stream.record_event()


class _Kept:
    """One input.

    Attributes:
        on_device: the input, until its copy on the host is complete, or again from when it is fetched until it is used.
        before: the input that was kept before this one, and will be needed after it.
    """

    on_device: torch.Tensor | None = None

    def __init__(self, tensor: torch.Tensor, copier: Copier, before: _Kept | None) -> None:
        self._copier = copier
        self.before = None if before is None else weakref.ref(before)
        self._host, self._event = copier.send(tensor)
        self.on_device = tensor

    def __del__(self) -> None:
        self.leave()  # a backward pass that ends early: nobody may get memory that is still being written

    def leave(self) -> None:
        """Give back the memory on the device."""
        if self.on_device is not None:
            self._copier.wait(self._event)
            self.on_device = None

    def come(self) -> None:
        """Begin to come back."""
        if self.on_device is None:
            self.on_device, self._event = self._copier.fetch(self._host)

    def take(self) -> torch.Tensor:
        """The input on the device; it is not kept there any longer."""
        self.come()
        self._copier.wait(self._event)
        tensor, self.on_device = self.on_device, None
        assert tensor is not None
        return tensor


class LayerInputs:
    """What is saved in a forward pass, on the host.

    On the device are at any time the last input and the one before it: in the forward pass until its copy is made, in
    the backward pass ahead of its use. The last input of all never leaves, as it is needed first.

    Args:
        copier: between device and host.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._last: weakref.ref[_Kept] | None = None

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        """For autograd, which calls it with what a node saves."""
        if tensor.device.type != self._copier.device or tensor.numel() < SMALLEST or not tensor.is_floating_point():
            return tensor
        before = None if self._last is None else self._last()
        kept = _Kept(tensor.detach(), self._copier, before)
        if before is not None:
            before.leave()
        self._last = weakref.ref(kept)
        return kept

    def take(self, kept: torch.Tensor | _Kept) -> torch.Tensor:
        """For autograd, which calls it with what `keep` has returned."""
        if isinstance(kept, torch.Tensor):
            return kept
        tensor = kept.take()
        before = None if kept.before is None else kept.before()
        if before is not None:
            before.come()
        return tensor

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """A checkpointing function whose inputs are kept here; what it computes again inside has hooks of its own."""

        @functools.wraps(checkpoint)
        def kept(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(self.keep, self.take):
                return checkpoint(function, *args, **kwargs)

        return kept


def keep_on_host(model: Any, copier: Copier | None = None) -> None:
    """Have `model.gradient_checkpointing_enable(...)`, whenever it is called with `offload`, keep layer inputs on the
    host this way.

    On the CPU nothing is copied: they are in host memory as it is.

    Args:
        model: bare transformers model.
        copier: by default one for CUDA, where the model is there.
    """

    def enable(
        self: Any,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        # TRL hands on all of the config's dict, from which transformers' Trainer takes these two.
        given = dict(gradient_checkpointing_kwargs or {})
        offload, every_n_layers = given.pop("offload", offload), given.pop("every_n_layers", every_n_layers)
        # transformers has not always had it.
        more = {} if every_n_layers == 1 else {"every_n_layers": every_n_layers}
        type(self).gradient_checkpointing_enable(self, given or None, **more)
        if not offload:
            return
        used = copier
        if used is None and next(self.parameters()).device.type == "cuda":
            used = CudaCopier()
        if used is None:
            logger.info("gradient_checkpointing_kwargs: offload=True has no effect on the CPU")
            return
        inputs = LayerInputs(used)
        for module in self.modules():
            checkpoint = vars(module).get("_gradient_checkpointing_func")
            if checkpoint is not None:
                module._gradient_checkpointing_func = inputs.around(checkpoint)

    model.gradient_checkpointing_enable = types.MethodType(enable, model)  # a method, so that a deep copy has its own
