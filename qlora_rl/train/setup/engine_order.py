"""The trainer's model and the engine: which is made first, and whether the base is held once or twice.

A borrowed base needs the engine first, and the engine needs the adapter's rank: so the adapter is judged on a model
without values. Where nothing is shared, the model comes first and the engine last, when the adapter has been made.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.adapter.verdict import Verdict, judge_config
from qlora_rl.base.checkpoint import outline
from qlora_rl.contracts import RolloutEngine
from qlora_rl.engine.started import ENGINES, is_here
from qlora_rl.errors import CannotShareError, ConfigConflictError
from qlora_rl.train.setup.model_source import Source

logger = logging.getLogger(__name__)

SHARE = ("auto", True, False)


@dataclass
class Pair:
    """A model, and the engine if it has been started already.

    Attributes:
        reason: why the base is held twice; empty where it is shared.
    """

    model: Any
    engine: RolloutEngine | None
    reason: str

    def describe(self) -> dict[str, Any]:
        """How the base is held, for config.json."""
        bare = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        loan = getattr(bare, "qlora_loan", None)
        if loan is None:
            return {"copies": 2, "reason": self.reason}
        return {"copies": 1, "shared_bytes": loan.shared_bytes, "copied": dict(loan.copied)}


def why_not_shared(source: Source, rollout: str | RolloutEngine, share_base: bool | str) -> str:
    """The reason that is known before anything is started; empty where sharing is to be tried.

    Raises:
        ConfigConflictError: share_base=True contradicts the other arguments.
    """
    if share_base is False:
        return "share_base=False"
    if source.model is not None:
        if share_base is True:
            raise ConfigConflictError(
                "reading the arguments: share_base=True, and the model is an object that is loaded already. Pass a "
                "prepared base, a path or a name, or leave share_base out."
            )
        return "the model was passed as an object, which is loaded already"
    if not ENGINES[rollout].is_here if isinstance(rollout, str) else hasattr(rollout, "url"):
        if share_base is True:
            raise CannotShareError("sharing the base: the engine is a process of its own. Leave share_base out.")
        return "the engine is a process of its own"
    if not isinstance(rollout, str) and share_base == "auto":
        return "the engine was passed as an object, which its owner may close (share_base=True borrows from it)"
    return ""


def expects_one_copy(model: Any, rollout: str | RolloutEngine, share_base: bool | str) -> bool:
    """What the arguments alone tell, before anything is read: the memory estimate counts the base once or twice."""
    is_named = isinstance(model, str | os.PathLike)
    return share_base is not False and is_named and (is_here(rollout) or share_base is True)


def make_pair(
    source: Source,
    rollout: str | RolloutEngine,
    share_base: bool | str,
    peft_config: Any,
    *,
    check: Callable[[Verdict], str],
    start: Callable[[int], RolloutEngine],
    reason: str = "",
) -> Pair:
    """The model to train; shares its base with the engine where that can be.

    Args:
        source: where the model comes from.
        rollout: "colocate", "server", "ray", or the engine that was passed or connected to.
        share_base: "auto", True or False.
        peft_config: the adapter that will be made.
        check: rejects an adapter by raising, and gives the reason why it needs an engine of its own, or ""; called
            before the engine is started.
        start: starts an engine for adapters of this rank.
        reason: why it cannot be shared, if that is known already.

    Raises:
        CannotShareError: share_base=True, and why it cannot be.
    """
    engine = None if isinstance(rollout, str) else rollout
    with contextlib.ExitStack() as undo:  # closes an engine that was started here
        if not reason:
            reason = why_not_shared(source, rollout, share_base)
        if not reason and engine is None:
            verdict, reason = _judged(source, peft_config)
            reason = reason or check(verdict)
            if not reason:
                engine = start(verdict.rank)
                undo.callback(closer(engine))
        model = None
        if not reason:
            try:
                model = _borrow(engine, source)
            except CannotShareError as error:
                if share_base is True:
                    raise
                reason = str(error)
        elif share_base is True:
            raise CannotShareError(f"sharing the base: {reason}. Leave share_base out.")
        if model is None:
            logger.info("the base is held twice, by the trainer and by the engine: %s", reason)
            model = source.load()
        undo.pop_all()
    return Pair(model, engine, reason)


def _judged(source: Source, peft_config: Any) -> tuple[Verdict | None, str]:
    """The verdict on the adapter that is to be made, before there is a model; or why there is none."""
    try:
        empty = outline(source.base, trust_remote_code=source.options.get("trust_remote_code", False))
        return judge_config(empty, peft_config), ""
    except Exception as error:
        return None, f"PEFT cannot make this adapter on a model without values ({type(error).__name__}: {error})"


def _borrow(engine: Any, source: Source) -> Any:
    """A model on the engine's tensors, if they are the right ones and on the right device."""
    from qlora_rl.engine.local import borrow_base

    held, wanted = getattr(engine, "base", None), source.options.get("device")
    if held is not None and held.resolve() != source.base.path.resolve():
        raise CannotShareError(f"sharing the base: the engine was started on {held}, the trainer's is {source.base}.")
    model = borrow_base(engine, **{key: value for key, value in source.options.items() if key != "device"})
    if wanted is not None and not _is_same(torch.device(wanted), model.device):
        raise CannotShareError(
            f"sharing the base: the engine's is on {model.device}, the trainer's is wanted on {wanted}."
        )
    return model


def _is_same(one: torch.device, other: torch.device) -> bool:
    """Two names of one device; without an index it is the first."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def closer(engine: Any) -> Callable[[], None]:
    """What closes an engine of ours, although the trainer's model may borrow from it."""
    if hasattr(engine, "borrowers"):
        return lambda: engine.close(force=True)
    return engine.close
