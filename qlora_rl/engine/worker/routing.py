"""Which experts vLLM chose for each token, and with which weights: noted step by step, through vLLM's own hook in its
routers and around what computes the weights.

vLLM 0.31 returns the choices itself (`enable_return_routed_experts`), but only with a model runner that needs Triton,
so not on a CPU, and weights nowhere. Remove when it returns both on a CPU. Its private names, as in `compat`. Runs
inside vLLM's worker, where no CUDA graph is: a graph would not run the hook again.

Shape letters: L layers that are mixtures, K chosen experts of a token, T tokens of a step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from qlora_rl.engine.compat import vllm_version

logger = logging.getLogger(__name__)


class Choices:
    """The choices of the requests that are generated, and their weights, until they are taken.

    Args:
        model: vLLM's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        layers = [module for module in model.modules() if isinstance(module, MoERunner)]
        self._step: list[Any] = [None] * len(layers)
        self._weights: list[Any] = [None] * len(layers)
        self._held: dict[str, list[tuple[int, Any, Any]]] = {}
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(functools.partial(self._step.__setitem__, number))
            if (compute := getattr(layer.router, "_compute_routing", None)) is not None:
                layer.router._compute_routing = functools.partial(self._compute, number, compute)
            elif number == 0:
                logger.warning(
                    "noting the routing: the routers of vLLM %s have no `_compute_routing`, so weights are not noted",
                    vllm_version(),
                )

    def _compute(
        self, layer: int, compute: Callable[..., Any], hidden: Any, logits: torch.Tensor, *others: Any, **named: Any
    ) -> Any:
        weights, ids = compute(hidden, logits, *others, **named)
        # On a CPU vLLM computes them in the dtype of the logits, and hands them on in float32.
        self._weights[layer] = weights.to(logits.dtype)
        return weights, ids

    def begin(self) -> None:
        """A step begins: what a trial run of vLLM's has left is forgotten."""
        self._step[:] = self._weights[:] = [None] * len(self._step)

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
        rows_TLK = torch.stack(self._step, dim=1).to(torch.int16)
        is_weighed = all(weights is not None for weights in self._weights)
        weights_TLK = torch.stack(self._weights, dim=1) if is_weighed else None
        first = 0
        for name in names:
            if count := scheduled.num_scheduled_tokens.get(name, 0):
                mine = slice(first, first + count)
                weights = None if weights_TLK is None else weights_TLK[mine]
                self._held.setdefault(name, []).append((starts[name], rows_TLK[mine], weights))
                first += count

    def take(self, names: list[str]) -> list[Any]:
        """For each request the choices [tokens, L, K], int16, and their weights in the dtype of the router's logits.

        -1 and NaN for tokens that came out of the prefix cache. `None` where nothing is known: in place of the pair, or
        of the weights.
        """
        return [_joined(self._held.pop(name, [])) for name in names]


def _joined(parts: list[tuple[int, Any, Any]]) -> Any:
    if not parts:
        return None
    tokens = max(start + len(rows) for start, rows, _ in parts)
    found = parts[0][1].new_full((tokens, *parts[0][1].shape[1:]), -1)
    weighed = None if parts[0][2] is None else parts[0][2].new_full(found.shape, float("nan"))
    for start, rows, weights in parts:
        found[start : start + len(rows)] = rows
        if weighed is not None:
            weighed[start : start + len(rows)] = weights
    return found, weighed
