"""`Routers`: the routers of a mixture in the trainer, compared with the engine's choices, which may be replayed.

B sequences, T tokens with padding, N without, of all sequences together; L layers that are mixtures, K chosen experts, E experts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.base.experts import mixtures_in


@dataclass
class Given:
    """What the engine chose for a batch, as far as the model has not read it yet.

    Attributes:
        kept_BT: which tokens are none of padding.
        chosen: for each sequence [tokens, L, K], without its last token; `None` where nothing is known.
    """

    kept_BT: torch.Tensor
    chosen: Sequence[torch.Tensor | None]

    def take(self, rows: int | None, tokens: int) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        """Mask and choices of the sequences that a forward reads next.

        Args:
            rows: how many they are; `None`: as many as have so many tokens without padding.
            tokens: of all of them.
        """
        if rows is None:
            read = self.kept_BT.sum(1).cumsum(0)
            rows = int((read <= tokens).sum())
        mine = self.kept_BT[:rows], self.chosen[:rows]
        self.kept_BT, self.chosen = self.kept_BT[rows:], self.chosen[rows:]
        return mine


class Routers:
    """Hooks on the routers of a model. They change nothing until `given` says what the engine chose, and then only with `replays`.

    The experts of a layer get the engine's choice, with the weights that the trainer's router has for them, also when gradient checkpointing
    computes the layer again.

    Args:
        model: the bare transformers model.
        replays: the engine's choice takes the place of the trainer's.

    Attributes:
        agreed, compared: choices that the engine has made too, of those that were compared since `forget`.
    """

    def __init__(self, model: Any, *, replays: bool = False) -> None:
        self._given: Given | None = None
        self._now: torch.Tensor | None = (
            None  # [tokens of the forward, L, K], -1 where the engine's choice is not known
        )
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

    @property
    def agreement(self) -> float | None:
        """Share of the trainer's choices that are the engine's too; `None` where none was compared."""
        compared = int(self._compared)
        return int(self._agreed) / compared if compared else None

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def given(self, kept_BT: torch.Tensor, chosen: Sequence[torch.Tensor | None]) -> Iterator[None]:
        """The forwards in here read these sequences, one after the other: each some rows of the batch, or their tokens in one row.

        Args:
            kept_BT: nonzero where a token is none of padding.
            chosen: for each sequence what the engine chose, [tokens, L, K]; `None` where nothing is known.
        """
        self._given = Given(kept_BT.bool(), chosen)
        try:
            yield
        finally:
            self._given = None  # `_now` stays: the backward pass may compute layers again

    def _begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._now, self._counted = None, set()
        if self._given is None:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        is_row = kwargs.get("cu_seq_lens_q") is not None
        kept_BT, chosen = self._given.take(None if is_row else len(ids), ids.numel())
        if kept_BT.shape != ids.shape and not (is_row and int(kept_BT.sum()) == ids.numel()):
            return  # other tokens than those that were announced
        k = next((each.shape[-1] for each in chosen if each is not None), 0)
        if not k:
            return
        parts, blank = [], torch.full((1, self.layers, k), -1, dtype=torch.int16)
        for count, each in zip(kept_BT.sum(1).tolist(), chosen, strict=True):
            known = blank[:0] if each is None else each[:count]
            parts += [known, blank.expand(count - len(known), -1, -1)]
        now = torch.cat(parts).to(ids.device, torch.long)
        if not is_row:
            padded = now.new_full((*kept_BT.shape, self.layers, k), -1)
            padded[kept_BT.to(ids.device)] = now
            now = padded.flatten(0, 1)
        self._now = now

    def _route(self, layer: int, router: Any, _: Any, out: tuple[torch.Tensor, ...]) -> Any:
        if self._now is None:
            return None
        logits_NE, weights_NK, own_NK = out
        theirs_NK = self._now[:, layer]
        known_N = theirs_NK[:, 0] >= 0
        agrees_NK = (own_NK[:, :, None] == theirs_NK[:, None, :]).any(-1)
        if layer not in self._counted:
            self._counted.add(layer)
            self._agreed = self._agreed + (agrees_NK & known_N[:, None]).sum()
            self._compared = self._compared + known_N.sum() * own_NK.shape[1]
        if not self.replays:
            return None
        # Where both have chosen the same, the order stays the trainer's, and so every bit.
        chosen_NK = torch.where((known_N & ~agrees_NK.all(-1))[:, None], theirs_NK, own_NK)
        weights = torch.nn.functional.softmax(logits_NE, dtype=torch.float32, dim=-1).gather(1, chosen_NK)
        if getattr(router, "norm_topk_prob", True):  # Mixtral has no such field
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits_NE, weights.to(weights_NK.dtype), chosen_NK
