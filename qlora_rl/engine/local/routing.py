"""`Routing`: the experts that the engine of this process chose for each token of what it generates.

Shape letters: N tokens of a prompt and its completion, L layers that are mixtures, K chosen experts of a token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from qlora_rl.engine.local.drive import Call
from qlora_rl.engine.options import StartOptions

logger = logging.getLogger(__name__)


class Routing:
    """Asks the worker to note choices, and puts them where vLLM puts those that it returns itself (`CompletionOutput.routed_experts`).

    Attributes:
        is_on: choices are noted.
    """

    def __init__(self) -> None:
        self.is_on, self._llm = False, None

    def begin(self, llm: Any, start: StartOptions) -> None:
        """An engine was built. Noted is what a mixture chooses on a CPU; on a GPU vLLM is asked by `enable_return_routed_experts`."""
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
        for output, chosen in zip(call.finished, found, strict=False):
            if output is not None and chosen is not None:
                output.outputs[0].routed_experts = chosen


def choices_of(prompts: Sequence[Sequence[int]], outputs: Sequence[Any]) -> list[torch.Tensor | None]:
    """[N - 1, L, K] of each request, -1 where it is not known; `None` where nothing is.

    The last token is never read. What vLLM took out of its prefix cache, another request of the call has computed, or an earlier call.

    Args:
        prompts: token ids.
        outputs: vLLM's.
    """
    rows = [list(prompt) + list(output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    found: list[Any] = [
        None
        if (chosen := getattr(output.outputs[0], "routed_experts", None)) is None
        else chosen[: len(ids) - 1].astype("int16", copy=False)
        for ids, output in zip(rows, outputs, strict=True)
    ]
    cached = [0 if each is None else int((each[:, 0, 0] < 0).sum()) for each in found]
    for count in sorted(set(cached) - {0}):
        whole = {
            tuple(ids[:count]): each[:count]
            for ids, each, missing in zip(rows, found, cached, strict=True)
            if each is not None and not missing and len(each) >= count
        }
        for ids, each, missing in zip(rows, found, cached, strict=True):
            if each is not None and missing == count and (known := whole.get(tuple(ids[:count]))) is not None:
                each[:count] = known
    return [None if each is None else torch.from_numpy(each) for each in found]
