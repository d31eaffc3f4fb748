"""What one rank owns and others use: a server, a fleet, an engine that spans the GPUs of several ranks; and the way to
it.

All ranks call every method that asks it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from qlora_rl.contracts import (
    AdapterBundle,
    AdapterSource,
    BaseFingerprint,
    ClosedAtEnd,
    Delivery,
    EngineCapabilities,
    Rollout,
    RolloutEngine,
    SamplingSpec,
    Transport,
)
from qlora_rl.distributed import Ranks
from qlora_rl.engine.images import Prompt, as_prompts
from qlora_rl.sync.full_weights import DenseStream
from qlora_rl.train.ranks.rank_rpc import RankRPC

logger = logging.getLogger(__name__)


class SharedEngine(ClosedAtEnd):
    """One engine, on rank 0, or one for each group of ranks, on the first of them.

    The prompts of all ranks that share it are sampled in one call, and each is given its own; after `let_threads_ask`
    each rank's in calls of its own.

    Args:
        make: makes the engine; called on the rank that owns it.
        ranks: all processes.
        group: neighbouring ranks that share an engine; 0: all of them.

    Attributes:
        inner: on the rank that owns it the engine; `None` elsewhere.
        url: where it listens.
    """

    def __init__(self, make: Callable[[], RolloutEngine], ranks: Ranks, group: int = 0):
        self._ranks, self._group = ranks, group or ranks.size
        self._first = ranks.rank - ranks.rank % self._group
        self.inner: Any = None
        self._desk: RankRPC | None = None
        with ranks.together("starting the engine"):
            if ranks.rank == self._first:
                self.inner = make()
        try:
            self._capabilities = self.share(lambda: self.inner.capabilities(), "asking the engine")
            self.url: str = self.share(lambda: str(getattr(self.inner, "url", "")), "asking the engine")
            self._version = self._incarnation = 0
            self._ask(lambda engine: None, "asking the engine")
        except BaseException:
            self.close()
            raise

    def share(self, make: Callable[[], Any], doing: str) -> Any:
        """What the owner of the engine makes, on the ranks that share it."""
        return self._ranks.share(make, doing, group=self._group)

    def _ask(self, ask: Callable[[Any], Any], doing: str) -> Any:
        """What its owner hears from the engine."""

        def asked() -> tuple[Any, int, int]:
            with nullcontext() if self._desk is None else self._desk.alone():
                answer = ask(self.inner)
            return answer, self.inner.version, self.inner.incarnation

        answer, self._version, self._incarnation = self.share(asked, doing)
        return answer

    @property
    def version(self) -> int:
        """Of the adapter that serves, when it was asked last; where threads ask it, its owner knows what serves now."""
        return self._version if self._desk is None or self.inner is None else self.inner.version

    @property
    def incarnation(self) -> int:
        """Of the engine, as `version`."""
        return self._incarnation if self._desk is None or self.inner is None else self.inner.incarnation

    def let_threads_ask(self) -> None:
        """From now on each rank generates when it wants to, from any thread; called by all ranks."""
        if self._desk is None:
            self._desk = RankRPC(self.inner, self._ranks, self._group, holds_two=self._capabilities.holds_two)

    def cancel(self) -> None:
        """Have the calls of this rank's threads end soon, with `RolloutCancelledError`."""
        if self._desk is not None:
            self._desk.cancel()

    @property
    def tokenizer(self) -> Any:
        """Where the engine is."""
        return self.inner.tokenizer

    def capabilities(self) -> EngineCapabilities:
        """What it can be asked for."""
        return self._capabilities

    def describe_base(self) -> BaseFingerprint:
        """The base that it holds."""
        return self._ask(lambda engine: engine.describe_base(), "reading the engine's base")

    def repair_base(self) -> Mapping[str, float]:
        """Exact scales are written."""
        return self._ask(lambda engine: engine.repair_base(), "repairing the engine's base")

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, version: int | None = None) -> Rollout:
        """One completion for each prompt of this rank; request i of the whole is seeded as in one process.

        Args:
            version: as `RolloutEngine.generate`, where threads ask.
        """
        if self._desk is not None:
            return self._desk.generate(as_prompts(prompts), sampling, version)
        parts = self._ranks.gather((as_prompts(prompts), sampling), "gathering the prompts")
        parts = parts[self._first : self._first + self._group]
        together = [prompt for part, _ in parts for prompt in part]
        rollout = self._ask(lambda engine: engine.generate(together, parts[0][1]), "generating")
        first = sum(len(part) for part, _ in parts[: self._ranks.rank - self._first])
        mine = slice(first, first + len(prompts))
        logprobs = rollout.logprobs[mine] if rollout.logprobs else rollout.logprobs  # `None` where it gives none
        has_ended = rollout.has_ended and rollout.has_ended[mine]
        return Rollout(rollout.completion_ids[mine], logprobs, rollout.version, rollout.seconds, has_ended=has_ended)

    def score(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[float]]:
        """Of the sequences of the owner, which all ranks hold."""
        return self._ask(lambda engine: engine.score(sequences, bare=bare), "scoring")

    def score_each(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[list[float]]]:
        """By every replica, where there are several."""

        def each(engine: Any) -> list[list[list[float]]]:
            if hasattr(engine, "score_each"):
                return engine.score_each(sequences, bare=bare)
            return [engine.score(sequences, bare=bare)]

        return self._ask(each, "scoring")

    def held_adapter(self, rank: int) -> Mapping[str, str]:
        """Digests of what it holds."""
        return self._ask(lambda engine: engine.held_adapter(rank), "reading the engine's adapter")

    def load_adapter(self, directory: Any, version: int) -> None:
        """The owner's directory is loaded."""
        self._ask(lambda engine: engine.load_adapter(directory, version), "loading the adapter")

    def drop_adapter(self) -> None:
        """Serve the bare base."""
        self._ask(lambda engine: engine.drop_adapter(), "dropping the adapter")

    def withdraw_adapter(self, reason: str) -> None:
        """Serve nothing."""
        self._ask(lambda engine: engine.withdraw_adapter(reason), "withdrawing the adapter")

    def load_dense(self, weights: DenseStream, version: int) -> int:
        """The owner sends the weights; the others take part in what is gathered for them, and learn what was sent."""
        if self.inner is None:
            weights.follow()
        nbytes, weights.count, weights.digests = self._ask(
            lambda engine: (engine.load_dense(weights, version), weights.count, weights.digests), "loading the weights"
        )
        return nbytes

    @property
    def holds_dense(self) -> bool:
        """The full weights that were pushed last may serve."""
        return self._ask(lambda engine: engine.holds_dense, "asking the engine")

    def withdraw_dense(self, reason: str) -> None:
        """Serve nothing until the next push; what has led here may have ended one rank alone, so nobody is waited
        for."""
        if self.inner is not None:
            self.inner.withdraw_dense(reason)

    def sleep(self) -> None:
        """Give memory back."""
        self._ask(lambda engine: engine.sleep(), "sending the engine to sleep")

    def wake(self) -> None:
        """Undo `sleep`."""
        self._ask(lambda engine: engine.wake(), "waking the engine")

    def close(self) -> None:
        """Close it; only its owner has something to close, and waits for nobody."""
        if self._desk is not None:
            self._desk.close()
        if self.inner is not None:
            self.inner.close()


class SharedTransport:
    """A push once, by the owner of the engine; the others take part in what has to be gathered, and learn the outcome.

    Args:
        inner: used by the owner; closed with this.
        engine: to which it leads.
    """

    def __init__(self, inner: Transport, engine: SharedEngine):
        self.inner, self._engine = inner, engine
        self.name = inner.name

    def deliver(self, adapter: AdapterSource, version: int, engine: SharedEngine) -> Delivery:
        """The owner delivers what all ranks have gathered; where one group's engine does not take it, no other serves
        it."""
        adapter.bundle()
        try:
            return engine._ask(lambda held: self.inner.deliver(adapter, version, held), "delivering the adapter")
        except BaseException:
            self._undo(version)
            raise

    def _undo(self, version: int) -> None:
        """By each owner for itself: what has led here may have ended one rank alone, so nobody is waited for."""
        held = self._engine.inner
        if held is None or held.version != version:
            return
        try:
            self.inner.revoke(held, version)
        except Exception:
            logger.exception(
                "version %d could not be taken back; the engine serves nothing until the next push", version
            )
            held.withdraw_adapter(
                f"version={version} did not arrive everywhere, and the one before it could not be loaded"
            )

    def commit(self, pushed: AdapterBundle | None = None) -> None:
        """The version is verified."""
        if self._engine.inner is not None:
            self.inner.commit(pushed)

    def revoke(self, engine: SharedEngine, version: int) -> None:
        """Have the version before serve again."""
        engine._ask(lambda held: self.inner.revoke(held, version), "taking the adapter back")

    def before(self) -> Any:
        """The version before the newest."""
        return self._engine.share(self.inner.before, "reading the version before")

    def close(self) -> None:
        """Remove what is on the way."""
        self.inner.close()
