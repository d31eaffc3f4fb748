"""`RoutedSteps`: a mixin that follows the experts of a mixture: how often trainer and engine choose the same, with
which weights, and replay."""

from __future__ import annotations

import logging
from typing import Any

import torch

from qlora_rl.adapter.inspected import bare_model
from qlora_rl.base.experts import is_mixture
from qlora_rl.distributed import ranks
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.methods import Method
from qlora_rl.train.rollouts.bridge import EngineBridge
from qlora_rl.train.scoring.routing import Routers

logger = logging.getLogger(__name__)


class RoutedSteps:
    """Comes before everything that scores; `follow_routing` begins it."""

    bridge: EngineBridge
    routing_replay = False
    _routers: Routers | None = None
    _is_told = False  # that the engine gives no weights
    _method: Method

    def follow_routing(self, *, replays: bool) -> None:
        """Compare the experts that both sides choose, where the engine says which it chose; with `replays` take the
        engine's.

        Raises:
            ConfigConflictError: the model is no mixture. NotYetSupportedError: the engine does not say what it chose.
        """
        model = bare_model(self.model)
        # Of batches that are generated while an earlier one is trained on, what the engine chose is not kept.
        why = _why_not(model, self.bridge, is_ahead=self._method.is_ahead)
        if replays and why:
            raise (NotYetSupportedError if is_mixture(model.config) else ConfigConflictError)(
                f"reading the arguments: routing_replay=True: {why}."
            )
        if why:
            return
        self.routing_replay, self._routers = replays, Routers(model, replays=replays)
        self.bridge.keep_routing()

    def decisive(self) -> dict[str, Any]:
        """With another routing it is another run."""
        return super().decisive() | {"routing_replay": self.routing_replay}

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self._routers is not None:
            self._routers.forget()
        return super()._generate_and_score_completions(inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, *args: Any, **kw: Any
    ) -> Any:
        if self._routers is None or not _is_policy(model, self.model):
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kw)
        kept_BT = attention_mask.bool()
        ids, ends = input_ids[kept_BT].tolist(), kept_BT.sum(1).cumsum(0).tolist()
        rows = [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        routed = self.bridge.routing_of(rows)
        chosen, weights = [each for each, _ in routed], [each for _, each in routed]
        if self.routing_replay and not self._is_told and any(c is not None and w is None for c, w in routed):
            self._is_told = True
            logger.warning(
                "routing_replay: %s gives the experts that it chose without their weights: those of the trainer's "
                "routers are used",
                self.bridge.engine.capabilities().name,
            )
        with self._routers.given(kept_BT, chosen, weights):
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kw)

    def _look_at(self, mode: str, batch: dict[str, Any], logprobs_BT: torch.Tensor) -> None:
        if self._routers is not None and (agreement := self._routers.agreement) is not None:
            self._note(mode, {"routing_agreement": agreement})
            if (mean := self._routers.weight_diff_mean) is not None:
                largest = self._routers.weight_diff_max
                self._note(mode, {"routing_weight_diff_mean": mean, "routing_weight_diff_max": largest})
            if (rejected := self._routers.weights_rejected) is not None:
                self._note(mode, {"routing_weights_rejected": rejected})
        super()._look_at(mode, batch, logprobs_BT)


def _why_not(model: Any, bridge: EngineBridge, *, is_ahead: bool) -> str:
    if not is_mixture(model.config):
        return "the model has no experts. Leave it out"
    if is_ahead:
        return "rollouts are generated ahead. Use QLoRAGRPOTrainer, or leave it out"
    if ranks().size > 1:
        return "in several processes the engine's choices are not shared out. Train in one process, or leave it out"
    if not bridge.engine.capabilities().gives_routing:
        return (
            f"{bridge.engine.capabilities().name} does not say which experts it chose: a vLLM in the trainer's process "
            "on a CPU does. Use rollout='colocate' there, or leave it out"
        )
    return ""


def _is_policy(model: Any, trained: Any) -> bool:
    """Not the reference: another model, or the same one with its adapter off or another one on."""
    if bare_model(model) is not bare_model(trained):
        return False
    layers = (module for module in bare_model(model).modules() if hasattr(module, "lora_A"))
    return all(not layer.disable_adapters and "ref" not in layer.active_adapters for layer in layers)
