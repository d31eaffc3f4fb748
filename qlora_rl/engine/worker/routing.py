"""Which experts vLLM chose for each token: noted step by step, through vLLM's own hook in its routers.

vLLM 0.31 returns them itself (`enable_return_routed_experts`), but only with a model runner that needs Triton, so not on a CPU. Remove when it
does there. Its private names, as in `compat`. Runs inside vLLM's worker, where no CUDA graph is: a graph would not run the hook again.

Shape letters: L layers that are mixtures, K chosen experts of a token, T tokens of a step.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from qlora_rl.engine.compat import vllm_version
from qlora_rl.errors import EngineUnsupportedError


class Choices:
    """The choices of the requests that are generated, until they are taken.

    Args:
        model: vLLM's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        try:
            from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        except ImportError as error:
            raise EngineUnsupportedError(
                f"noting the routing: vLLM {vllm_version()} has its experts in other modules than 0.31 ({error}). Upgrade: pip install "
                "'vllm>=0.31,<0.32'"
            ) from error
        layers = [module for module in model.modules() if isinstance(module, MoERunner)]
        self._step: list[Any] = [None] * len(layers)
        self._held: dict[str, list[tuple[int, Any]]] = {}
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(functools.partial(self._step.__setitem__, number))

    def begin(self) -> None:
        """A step begins: what a trial run of vLLM's has left is forgotten."""
        self._step[:] = [None] * len(self._step)

    def end(self, scheduled: Any, names: list[str]) -> None:
        """A step has ended.

        Args:
            scheduled: vLLM's SchedulerOutput of the step.
            names: of its requests, in the order of their tokens in the batch.
        """
        if any(chosen is None for chosen in self._step):
            return  # nothing was computed
        old = scheduled.scheduled_cached_reqs
        starts = dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        rows_TLK = torch.stack(self._step, dim=1).to(torch.int16).numpy()
        first = 0
        for name in names:
            if count := scheduled.num_scheduled_tokens.get(name, 0):
                self._held.setdefault(name, []).append((starts[name], rows_TLK[first : first + count]))
                first += count

    def take(self, names: list[str]) -> list[Any]:
        """For each request [tokens, L, K], int16, -1 for tokens that came out of the prefix cache; `None` where nothing is known."""
        return [_joined(self._held.pop(name, [])) for name in names]


def _joined(parts: list[tuple[int, Any]]) -> Any:
    if not parts:
        return None
    found = np.full((max(start + len(rows) for start, rows in parts), *parts[0][1].shape[1:]), -1, dtype=np.int16)
    for start, rows in parts:
        found[start : start + len(rows)] = rows
    return found
