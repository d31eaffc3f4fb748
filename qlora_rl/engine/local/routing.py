"""`Routing`: the experts that the engine of this process chose for each token of what it generates, and their weights.

Shape letters: N tokens of a prompt and its completion, L layers that are mixtures, K chosen experts of a token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from qlora_rl.engine.local.step_loop import Call
from qlora_rl.engine.options import StartOptions

logger = logging.getLogger(__name__)


class Routing:
    """Asks the worker to note choices, and puts them where vLLM puts those that it returns itself
    (`CompletionOutput.routed_experts`), and their weights, which vLLM does not return, next to them.

    Attributes:
        is_on: choices are noted.
    """

    def __init__(self) -> None:
        self.is_on, self._llm = False, None

    def begin(self, llm: Any, start: StartOptions) -> None:
        """An engine was built. Noted is what a mixture chooses on a CPU; on a GPU vLLM is asked by
        `enable_return_routed_experts`."""
        returned = bool(start.arguments.get("enable_return_routed_experts"))
        self._llm = llm if start.is_mixture and start.is_cpu and start.ranks == 1 and not returned else None
        self.is_on = self._llm is not None or returned
        if self._llm is not None:
            self._llm.collective_rpc("qlora_note_routing")

    def collect(self, call: Call) -> None:
        """A call has ended, as it may: what was noted of its requests is handed to their outputs, and forgotten."""
        if self._llm is None:
            return
        try:
            found = self._llm.collective_rpc("qlora_take_routing", args=(call.internal,))[0]
        except Exception as error:  # the engine is lost, and says so itself
            logger.debug("the routing of %d requests is lost: %s", len(call.internal), error)
            return
        for output, noted in zip(call.finished, found, strict=False):
            if output is not None and noted is not None:
                output.outputs[0].routed_experts, output.outputs[0].qlora_routing_weights = noted


def choices_of(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Any]
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """Choices and weights, [N - 1, L, K] of each request, -1 and NaN where they are not known; `None` where nothing is.

    The last token is never read. What vLLM took out of its prefix cache, another request of the call has computed, or
    an earlier call.

    Args:
        prompts: token ids.
        outputs: vLLM's.
    """
    rows = [list(prompt) + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    found = [_kept(output, "routed_experts", len(ids) - 1) for ids, output in zip(rows, outputs, strict=True)]
    found = [None if each is None else each.to(torch.int16) for each in found]
    weights = [_kept(output, "qlora_routing_weights", len(ids) - 1) for ids, output in zip(rows, outputs, strict=True)]
    cached = [0 if each is None else int((each[:, 0, 0] < 0).sum()) for each in found]
    for count in sorted(set(cached) - {0}):
        whole = {
            tuple(ids[:count]): place
            for place, (ids, each, missing) in enumerate(zip(rows, found, cached, strict=True))
            if each is not None and not missing and len(each) >= count
        }
        for place, (ids, missing) in enumerate(zip(rows, cached, strict=True)):
            if missing == count and (known := whole.get(tuple(ids[:count]))) is not None:
                for kind in (found, weights):
                    if (mine := kind[place]) is not None and (theirs := kind[known]) is not None:
                        mine[:count] = theirs[:count]
    return found, weights


def _kept(output: Any, name: str, tokens: int) -> torch.Tensor | None:
    """Of these tokens; vLLM's own are an array of numpy's."""
    held = getattr(output.outputs[0], name, None)
    return None if held is None else torch.as_tensor(held[:tokens])
