"""`RoutedSteps`: a mixin that follows the experts of a mixture: how often trainer and engine choose the same, with
which weights, and replay; by `Routers`, hooks on the routers of the trainer's model.

B sequences, T tokens with padding, N without, of all sequences together; L layers that are mixtures, K chosen experts,
E experts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.adapter.inspected import bare_model
from qlora_rl.base.experts import is_mixture, mixtures_in
from qlora_rl.distributed import ranks
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.methods import Method
from qlora_rl.train.rollouts.bridge import EngineBridge

# What the weights of a token may differ by, together, as a share of them. Rounding is below it; more is another router,
# which the alarm must hear.
_FAR = 0.25


@dataclass
class Given:
    """What the engine chose for a batch, as far as the model has not read it yet.

    Attributes:
        kept_BT: which tokens are none of padding.
        chosen, weights: for each sequence [tokens, L, K], without its last token; `None` where nothing is known.
    """

    kept_BT: torch.Tensor
    chosen: Sequence[torch.Tensor | None]
    weights: Sequence[torch.Tensor | None]

    def take(self, rows: int | None, tokens: int) -> Given:
        """Of the sequences that a forward reads next.

        Args:
            rows: how many they are; `None`: as many as have so many tokens without padding.
            tokens: of all of them.
        """
        if rows is None:
            read = self.kept_BT.sum(1).cumsum(0)
            rows = int((read <= tokens).sum())
        mine = Given(self.kept_BT[:rows], self.chosen[:rows], self.weights[:rows])
        self.kept_BT, self.chosen, self.weights = self.kept_BT[rows:], self.chosen[rows:], self.weights[rows:]
        return mine

    def laid_out(self, which: str, like: torch.Tensor, *, padded: bool) -> torch.Tensor | None:
        """`chosen` or `weights` of all tokens [N or B·T, L, K] on the device of `like`; `None` where nothing is known
        of any sequence.

        Args:
            which: "chosen" or "weights".
            like: token ids.
            padded: with the tokens of padding.
        """
        held: Sequence[torch.Tensor | None] = getattr(self, which)
        if (first := next((each for each in held if each is not None), None)) is None:
            return None
        unknown = float("nan") if first.is_floating_point() else -1
        blank, parts = first.new_full((1, *first.shape[1:]), unknown), []
        for count, each in zip(self.kept_BT.sum(1).tolist(), held, strict=True):
            known = blank[:0] if each is None else each[:count]
            parts += [known, blank.expand(count - len(known), -1, -1)]
        now = torch.cat(parts).to(like.device)
        if not padded:
            return now
        laid = now.new_full((*self.kept_BT.shape, *now.shape[1:]), unknown)
        laid[self.kept_BT.to(like.device)] = now
        return laid.flatten(0, 1)


class Routers:
    """Hooks on the routers of a model. They change nothing until `given` says what the engine chose, and then only with
    `replays`.

    The experts of a layer get the engine's choice, also when gradient checkpointing computes the layer again. Their
    weights are the engine's in value, and have the gradient of those that the trainer's router has for the same
    experts. The trainer's own they are where the engine's are not known, or further away than rounding.

    Args:
        model: the bare transformers model.
        replays: the engine's choice takes the place of the trainer's.

    Attributes:
        layers: L.
    """

    def __init__(self, model: Any, *, replays: bool = False) -> None:
        self._given: Given | None = None
        # [tokens of the forward, L, K], -1 and NaN where the engine's choice and its weights are not known.
        self._now: torch.Tensor | None = None
        self._weights_now: torch.Tensor | None = None
        self._counted: set[int] = set()
        self.replays = replays
        self.forget()
        names = mixtures_in(model)
        self.layers = len(names)
        self._handles = [model.base_model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for number, name in enumerate(names):
            router = model.get_submodule(name).gate
            self._handles.append(router.register_forward_hook(functools.partial(self._route, number)))

    def forget(self) -> None:
        """Count from zero."""
        self._agreed: torch.Tensor | int = 0
        self._compared: torch.Tensor | int = 0
        self._apart: torch.Tensor | float = 0.0
        self._weighed: torch.Tensor | int = 0
        self._furthest: torch.Tensor | float = 0.0
        self._rejected: torch.Tensor | int = 0

    @property
    def agreement(self) -> float | None:
        """Share of the trainer's choices that are the engine's too; `None` where none was compared."""
        compared = int(self._compared)
        return int(self._agreed) / compared if compared else None

    @property
    def weight_diff_mean(self) -> float | None:
        """Mean absolute difference of the weights of the engine's experts on both sides; `None` where none was
        compared.

        Without `replays`, of tokens for which both sides have chosen the same.
        """
        weighed = int(self._weighed)
        return float(self._apart) / weighed if weighed else None

    @property
    def weight_diff_max(self) -> float | None:
        """The largest of the same."""
        return float(self._furthest) if int(self._weighed) else None

    @property
    def weights_rejected(self) -> float | None:
        """Share of the engine's weights that were further away than rounding, so that the trainer kept its own; `None`
        where none was to be replayed.

        A token counts once in each layer, with all its experts.
        """
        weighed = int(self._weighed) if self.replays else 0
        return int(self._rejected) / weighed if weighed else None

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def given(
        self,
        kept_BT: torch.Tensor,
        chosen: Sequence[torch.Tensor | None],
        weights: Sequence[torch.Tensor | None] | None = None,
    ) -> Iterator[None]:
        """The forwards in here read these sequences, one after the other: each some rows of the batch, or their tokens
        in one row.

        Args:
            kept_BT: nonzero where a token is none of padding.
            chosen: for each sequence what the engine chose, [tokens, L, K]; `None` where nothing is known.
            weights: of the same; `None` where the engine does not say.
        """
        self._given = Given(kept_BT.bool(), chosen, weights or [None] * len(chosen))
        try:
            yield
        finally:
            self._given = None  # `_now` stays: the backward pass may compute layers again

    def _begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._now, self._weights_now, self._counted = None, None, set()
        if self._given is None:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        is_row = kwargs.get("cu_seq_lens_q") is not None
        mine = self._given.take(None if is_row else len(ids), ids.numel())
        if mine.kept_BT.shape != ids.shape and not (is_row and int(mine.kept_BT.sum()) == ids.numel()):
            return  # other tokens than those that were announced
        self._now = mine.laid_out("chosen", ids, padded=not is_row)
        self._weights_now = mine.laid_out("weights", ids, padded=not is_row)

    def _route(self, layer: int, router: Any, _: Any, out: tuple[torch.Tensor, ...]) -> Any:
        if self._now is None:
            return None
        logits_NE, weights_NK, own_NK = out
        theirs_NK = self._now[:, layer].long()
        known_N = theirs_NK[:, 0] >= 0
        agrees_NK = (own_NK[:, :, None] == theirs_NK[:, None, :]).any(-1)
        differs_N1 = (known_N & ~agrees_NK.all(-1))[:, None]
        if is_first := layer not in self._counted:
            self._counted.add(layer)
            self._agreed = self._agreed + (agrees_NK & known_N[:, None]).sum()
            self._compared = self._compared + known_N.sum() * own_NK.shape[1]
        chosen_NK = own_NK
        if self.replays:
            # Where both have chosen the same, the order stays the trainer's, and so every bit.
            chosen_NK = torch.where(differs_N1, theirs_NK, own_NK)
            weights = torch.nn.functional.softmax(logits_NE, dtype=torch.float32, dim=-1).gather(1, chosen_NK)
            if getattr(router, "norm_topk_prob", True):  # Mixtral has no such field
                weights = weights / weights.sum(dim=-1, keepdim=True)
            weights_NK = weights.to(weights_NK.dtype)
        if self._weights_now is not None:
            compared_N1 = known_N[:, None] if self.replays else known_N[:, None] & ~differs_N1
            # In the order of `chosen_NK`.
            place_NK = (chosen_NK[:, :, None] == theirs_NK[:, None, :]).byte().argmax(-1)
            engines_NK = self._weights_now[:, layer].to(weights_NK.dtype).gather(1, place_NK)
            weights_NK = self._weigh(weights_NK, engines_NK, compared_N1, counts=is_first)
        return (logits_NE, weights_NK, chosen_NK) if self.replays else None

    def _weigh(
        self, weights_NK: torch.Tensor, engines_NK: torch.Tensor, compared_N1: torch.Tensor, *, counts: bool
    ) -> torch.Tensor:
        """The engine's weights of the same experts, with the gradient of the trainer's."""
        ours_NK = weights_NK.detach()
        known_N1 = compared_N1 & ~engines_NK.isnan().any(-1, keepdim=True)
        apart_NK = (engines_NK - ours_NK).abs().float().masked_fill(~known_N1, 0.0)
        if counts:
            self._apart = self._apart + apart_NK.sum()
            self._weighed = self._weighed + known_N1.sum() * apart_NK.shape[1]
            self._furthest = torch.maximum(torch.as_tensor(self._furthest, device=apart_NK.device), apart_NK.max())
        near_N1 = known_N1 & (apart_NK.sum(-1, keepdim=True) <= _FAR * ours_NK.sum(-1, keepdim=True))
        if counts:
            self._rejected = self._rejected + (known_N1 & ~near_N1).sum() * apart_NK.shape[1]
        return torch.where(near_N1, engines_NK + (weights_NK - ours_NK), weights_NK)


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
