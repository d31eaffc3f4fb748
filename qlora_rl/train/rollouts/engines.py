"""The engine that `rollout=` names: started here, connected to, or passed in."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from qlora_rl.base.checkpoint import PreparedBase
from qlora_rl.contracts import RolloutEngine
from qlora_rl.distributed import ranks
from qlora_rl.engine.started import ENGINES, is_url
from qlora_rl.errors import ConfigConflictError, NotYetSupportedError
from qlora_rl.stages import begin
from qlora_rl.train.setup.engine_order import closer


class EngineChoice:
    """What `rollout=` means, and whose engine it is.

    Attributes:
        is_ours: it is started or connected to here, and closed with the trainer.
        engine: the one that was passed or connected to; `None` where one is to be started.
        name: for the record.

    Args:
        rollout: "colocate", "server", "ray", URLs in one text, or an engine object; checked by `config_checks.check`.
        options: arguments of an engine that is started.
        api_key_file: holds the key of a server.
        sync_dir: the adapter directory of a server, if this machine sees it.
        session: gives the name under which a server knows this run; asked where there is a server.

    Raises:
        EngineBrokenError, AccessDeniedError, ServerTakenError: a server that cannot be used.
        ConfigConflictError: an engine of several ranks that do not fit the trainer's.
    """

    def __init__(
        self,
        rollout: Any,
        options: dict[str, Any],
        *,
        api_key_file: str | os.PathLike[str] | None = None,
        sync_dir: str | os.PathLike[str] | None = None,
        session: Callable[[], str] | None = None,
    ):
        reject_ranks(rollout, options.get("tensor_parallel_size", 1))
        self.rollout = rollout
        self.options = options
        self.is_ours = isinstance(rollout, str)
        self.name = rollout if isinstance(rollout, str) else type(rollout).__name__
        self.engine: RolloutEngine | None = None if isinstance(rollout, str) else rollout
        if is_url(rollout):
            self.engine = _for_all(
                lambda: claim_servers(rollout, api_key_file, sync_dir, session() if session is not None else None)
            )

    @property
    def why_no_base(self) -> str:
        """Why an engine that is started here lends its base to nobody; empty where it may."""
        is_parted = self.rollout == "colocate" and self.options.get("tensor_parallel_size", 1) > 1
        return "the engine's ranks are processes of their own" if is_parted else ""

    def start(self, base: PreparedBase, rank: int) -> RolloutEngine:
        """An engine on `base` for adapters of `rank`."""
        begin("starting vLLM on the base")
        return start_engine(self.rollout, base, rank, self.options)

    def start_dense(self, base: PreparedBase) -> RolloutEngine:
        """An engine that can be given all weights: on the baked base, or on one that is not 4-bit.

        Raises:
            NotYetSupportedError: one of several ranks cannot.
        """
        if (size := self.options.get("tensor_parallel_size", 1)) > 1:
            raise NotYetSupportedError(
                f"choosing the engine: tensor_parallel_size={size} takes adapters, and this policy needs full weights "
                "(see the reasons of its verdict: judge_adapter). Use tensor_parallel_size=1."
            )
        from qlora_rl.base.bake import bake_base

        baked = ranks().in_turn(lambda: bake_base(base), "baking the base") if base.spec.is_4bit else base
        begin("starting vLLM on the base")
        return start_engine(self.rollout, baked, 0, {**self.options, "max_lora_rank": 0})

    def closer(self, engine: RolloutEngine | None) -> Callable[[], None] | None:
        """What closes `engine`; `None` where that is its owner's business."""
        return closer(engine) if self.is_ours and engine is not None else None


def reject_ranks(rollout: Any, size: int) -> None:
    """Reject an engine of several ranks that do not fit the trainer's.

    Raises:
        ConfigConflictError: with what can be done instead.
    """
    if size > 1 and rollout == "colocate" and ranks().size > 1:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks().size))
        if here % size:
            raise ConfigConflictError(
                f"choosing the engine: tensor_parallel_size={size} under rollout='colocate', and {here} processes on "
                f"this machine: they cannot be parted into groups of {size}, each with an engine over its GPUs. Set "
                f"vllm_tensor_parallel_size to a divisor of {here}, or use rollout='server'."
            )


def start_engine(word: str, base: PreparedBase, rank: int, options: dict[str, Any]) -> RolloutEngine:
    """The engine of a word. In this process: vLLM there or, of several ranks, in processes on the GPUs of a group of
    the trainer's, next to them. Elsewhere: one for all, which ends with the trainer."""
    known, size = ENGINES[word], options.get("tensor_parallel_size", 1)
    options = {"max_lora_rank": rank, **options}
    if not known.is_here:
        # An engine elsewhere repairs its scales when it starts, and never sleeps.
        there = {name: value for name, value in options.items() if name not in ("repair_scales", "enable_sleep")}
        return _for_all(lambda: known.make(base, **there))
    if size > 1 and ranks().size > 1:
        return _for_all(lambda: known.make(base, **options), size)
    # Each rank has an engine of its own, on its own device; vLLM finds torch.distributed with all of them in it.
    launched = {"distributed_executor_backend": "external_launcher"} if ranks().size > 1 else {}
    return known.make(base, **launched | options)


def _for_all(make: Callable[[], RolloutEngine], group: int = 0) -> Any:
    """A server is rank 0's, and so are actors; what is on the GPUs of a group of ranks is the first one's."""
    if ranks().size == 1:
        return make()
    from qlora_rl.train.ranks.shared_engine import SharedEngine

    return SharedEngine(make, ranks(), group)


def claim_servers(
    url: str,
    api_key_file: str | os.PathLike[str] | None,
    sync_dir: str | os.PathLike[str] | None,
    session: str | None = None,
) -> RolloutEngine:
    """The server, or several, as an engine; from here on no other trainer may push to it."""
    from qlora_rl.engine.client import connect

    engine = connect(url, api_key_file=api_key_file, shared_dir=sync_dir, session=session)
    try:
        engine.claim()
        engine.drop_adapter()  # whatever an earlier run has left: the canary is calibrated on the bare base
    except BaseException:
        engine.close()
        raise
    return engine
