"""`keep_on_host`: under gradient checkpointing the inputs of layers wait for the backward pass in host memory.

transformers has the setting, `gradient_checkpointing_kwargs={"offload": True}`, in its newer releases, and TRL hands it
on to torch, which does not know it. So torch's `save_on_cpu` is put around each layer here.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd.graph import save_on_cpu

logger = logging.getLogger(__name__)

# Makes a block in which what autograd saves waits on the host.
OnHost = Callable[[], AbstractContextManager[Any]]


def keep_on_host(model: Any, on_host: OnHost | None = None) -> None:
    """Have `model.gradient_checkpointing_enable(...)`, whenever it is called with `offload`, keep layer inputs on the
    host.

    On the CPU nothing is copied: they are in host memory as it is.

    Args:
        model: bare transformers model.
        on_host: by default torch's, in pinned memory, where the model is on a GPU.
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
        used = on_host
        if used is None and next(self.parameters()).device.type == "cuda":
            used = functools.partial(save_on_cpu, pin_memory=True)
        if used is None:
            logger.info("gradient_checkpointing_kwargs: offload=True has no effect on the CPU")
            return
        for module in self.modules():
            checkpoint = vars(module).get("_gradient_checkpointing_func")
            if checkpoint is not None:
                module._gradient_checkpointing_func = functools.partial(_checkpoint, used, checkpoint)

    model.gradient_checkpointing_enable = types.MethodType(enable, model)  # a method, so that a deep copy has its own


def _checkpoint(on_host: OnHost, checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is computed again inside has hooks of its own: only the inputs wait on the host."""
    with on_host():
        return checkpoint(*args, **kwargs)
