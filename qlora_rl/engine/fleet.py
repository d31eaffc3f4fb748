"""`Fleet`: several servers on one base as one engine. A version is live only when all replicas that take part hold it."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from qlora_rl.adapter.store import unpack_adapter
from qlora_rl.contracts import BaseFingerprint, EngineCapabilities, Rollout, SamplingSpec
from qlora_rl.engine.asking import as_ids, shared_out
from qlora_rl.engine.client import ServerEngine
from qlora_rl.engine.sampling import check_lengths
from qlora_rl.errors import (
    AccessDeniedError,
    BaseMismatchError,
    CanaryError,
    ConfigConflictError,
    EngineBrokenError,
    EngineClosedError,
    EngineUnsupportedError,
    QloraRLError,
)

logger = logging.getLogger(__name__)

# How long a replica may be away before the others do its work, in seconds; the last one has all of `wait_s`.
_PATIENCE_S = 2.0
# A replica that was dropped is looked for again after so many seconds, then less and less often.
_LOOK_AGAIN_S, _LOOK_SELDOM_S = 5.0, 60.0
_PROBE_S = 10.0
# A replica that stands still must not hold up the others for the time limit of a rollout.
_WAKE_S = 30.0


# Another key, or somebody else at its URL: in one replica the others do without it.
_ESTRANGED = (AccessDeniedError, EngineUnsupportedError)
_GONE = (EngineBrokenError, BaseMismatchError, *_ESTRANGED)


@dataclass
class _Lost:
    """A replica that does not take part.

    Attributes:
        reason: why.
        next_look: when it is looked for again, by the monotonic clock.
        pause_s: between the looks.
    """

    reason: str
    next_look: float
    pause_s: float


class Fleet:
    """Servers of `qlora-rl serve` on one base, asked as one engine; `ServerEngine([url, url])` makes it.

    Prompts are shared out in equal parts. Prompt i is drawn with the seed of prompt i, whichever replica draws it. A replica that
    stays away is dropped, and the others draw its share; it is taken back when it has proven its base and holds the version
    that serves. When none is left, all of `wait_s` is waited for one. `incarnation` grows when a replica was started anew or
    taken back.

    Args:
        urls: of the replicas.
        options: of `ServerEngine`, the same for all: one key, one `shared_dir`.

    Raises:
        BaseMismatchError: a replica holds another base than the first; names it.
        ConfigConflictError: two URLs lead to one server, or the replicas cannot be used for one another.
    """

    def __init__(self, urls: Sequence[str], *, wait_s: float = 120.0, **options: Any):
        urls = [url.rstrip("/") for url in urls]
        self.url, self.wait_s = ",".join(urls), wait_s
        if not urls or len(set(urls)) < len(urls):
            raise ConfigConflictError(
                f"connecting to servers: urls={urls}: a URL is missing or named twice. Name each one once."
            )
        self.replicas: list[ServerEngine] = []
        self._lost: dict[ServerEngine, _Lost] = {}
        self._left_alone: list[threading.Thread] = []
        self._pushed: tuple[bytes, int] | None = None
        self._version = self._returns = 0
        self._withdrawn = ""
        self._is_closed = False
        try:
            for url in urls:
                self.replicas.append(ServerEngine(url, wait_s=wait_s, **options))
            _check_alike(self.replicas)
        except BaseException:
            self.close()
            raise
        for each in self.replicas:
            each.wait_s = min(wait_s, _PATIENCE_S)
        self._version = self.replicas[0].version
        if len({each.found for each in self.replicas}) > 1:
            found = ", ".join(f"{each.url} version {each.version}" for each in self.replicas)
            self._withdrawn = f"the replicas do not serve the same ({found})"

    # --- what people ask it -----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The adapter version that all replicas serve."""
        return self._version

    @property
    def incarnation(self) -> int:
        """Grows when a replica was started anew or taken back."""
        return self._returns + sum(each.incarnation for each in self.replicas)

    @property
    def live(self) -> list[ServerEngine]:
        """The replicas that take part."""
        return [each for each in self.replicas if each not in self._lost]

    def capabilities(self) -> EngineCapabilities:
        """What all of them can be asked for."""
        found = [each.capabilities() for each in self.replicas]
        return replace(
            found[0],
            name=f"{len(found)} replicas: {', '.join(each.name for each in found)}",
            takes_dense=False,
            max_lora_rank=min(each.max_lora_rank for each in found),
            max_model_length=min(each.max_model_length for each in found),
            takes_bytes=any(each.takes_bytes for each in found),
            holds_two=False,
        )

    def describe_base(self) -> BaseFingerprint:
        """The base that all of them hold, read from the weights of each.

        Raises:
            BaseMismatchError: one holds another; names it.
        """
        found = self._ask_all(lambda each: each.describe_base())
        first, *others = found
        for each in others:
            if found[each].digest != found[first].digest:
                raise BaseMismatchError(
                    f"reading the base: {each.url} holds digest={found[each].digest[:16]}, {first.url} holds "
                    f"digest={found[first].digest[:16]}. Start all replicas on one base directory."
                )
        return found[first]

    def repair_base(self) -> dict[str, float]:
        """Write the exact scales back in all of them; the largest relative error of each weight."""
        repaired: dict[str, float] = {}
        for found in self._ask_all(lambda each: each.repair_base()).values():
            repaired |= {name: max(error, repaired.get(name, 0.0)) for name, error in found.items()}
        return repaired

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec | None = None, **fields: Any
    ) -> Rollout:
        """One completion for each of B prompts (token ids), all by one version, in the order of the prompts.

        Raises:
            PromptTooLongError: names every prompt that leaves no room for a completion; nothing was generated.
            ServerTakenError: somebody else has pushed another adapter to a replica.
            EngineBrokenError: all replicas stayed away longer than `wait_s`.
        """
        if sampling is not None and fields:
            raise TypeError("generate: give either sampling= or its fields by name, not both.")
        self._refuse_withdrawn()
        ids, spec = as_ids(prompts), sampling or SamplingSpec(**fields)
        if spec.seed is None:  # without one, replicas may draw the same
            spec = replace(spec, seed=secrets.randbits(62))
        check_lengths(ids, min(each.capabilities().max_model_length for each in self.replicas))
        started, versions = time.perf_counter(), {self._version: ""} if not ids else {}
        tokens: list[list[int]] = [[] for _ in ids]
        logprobs: list[list[float | None]] = [[] for _ in ids]
        left, end = list(range(len(ids))), time.monotonic() + self.wait_s
        while left:
            shares = shared_out(left, self._present(end))
            done, _ = self._try(
                list(shares),
                lambda each, shares=shares: each.generate([ids[i] for i in shares[each]], spec, places=shares[each]),  # type: ignore[misc]
            )
            versions |= {rollout.version: each.url for each, rollout in done.items()}
            if len(versions) > 1:
                self._withdrawn = "; ".join(f"{url} serves version {version}" for version, url in versions.items())
                self._refuse_withdrawn()
            for each, rollout in done.items():
                for i, drawn, values in zip(shares[each], rollout.completion_ids, rollout.logprobs, strict=True):
                    tokens[i], logprobs[i] = drawn, values
            drawn_now = {i for each in done for i in shares[each]}
            left = [i for i in left if i not in drawn_now]
        return Rollout(tokens, logprobs, next(iter(versions)), time.perf_counter() - started)

    def score(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[float]]:
        """Natural logs of the probabilities of every token but the first, by the first replica; with `bare` under the base alone."""
        return self.score_each(sequences, bare=bare)[0]

    def score_each(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[list[float]]]:
        """`score` of every replica that takes part."""
        if not bare:
            self._refuse_withdrawn()
        return list(self._ask_all(lambda each: each.score(sequences, bare=bare)).values())

    def held_adapter(self, rank: int) -> Mapping[str, str]:
        """Digests of what all of them multiply with.

        Raises:
            CanaryError: they hold different ones; names two.
        """
        found = self._ask_all(lambda each: each.held_adapter(rank))
        first, *others = found
        for each in others:
            if found[each] != found[first]:
                raise CanaryError(
                    f"comparing replicas: {each.url} multiplies with another adapter than {first.url}. Push again."
                )
        return found[first]

    def note_canary(self, difference: float) -> None:
        """Show in the metrics of all of them what the newest scored proof has found."""
        for each in self.live:
            each.note_canary(difference)

    def claim(self, *, force: bool = False) -> None:
        """Become the one trainer that pushes to these servers.

        Raises:
            ServerTakenError: another one is, at one of them.
        """
        self._ask_all(lambda each: each.claim(force=force))

    def load_packed(self, blob: bytes, version: int) -> None:
        """Serve the adapter in the bytes of `pack_adapter` as `version` from the next request on; can be repeated.

        Raises:
            SyncError: a replica refused it; all serve the version before.
            EngineBrokenError: all replicas stayed away longer than `wait_s`.
        """
        self._push(lambda each: each.load_packed(blob, version), lambda _: (blob, version), version)

    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve a PEFT directory: by its name where it lies in a replica's shared directory, else by its bytes."""
        self._push(lambda each: each.load_adapter(directory, version), lambda each: each.pushed, version)

    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0."""
        self._push(lambda each: each.drop_adapter(), lambda _: None, 0)

    def withdraw_adapter(self, reason: str) -> None:
        """Ask for nothing more until the next push: what the servers serve was not proven."""
        self._pushed, self._withdrawn = None, reason

    def sleep(self) -> None:
        """Nothing: a server's memory is its own."""

    def wake(self) -> None:
        """See which replicas are there; those that were started anew or are back are proven and pushed to."""
        self._ask_all(_wake)

    def close(self) -> None:
        """Give all of them free and close the connections; the servers go on. Harmless when repeated."""
        self._is_closed = True
        for each in self.replicas:
            each.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- a push -----------------------------------------------------------------------------------------------------

    def _push(
        self,
        load: Callable[[ServerEngine], None],
        kept: Callable[[ServerEngine], tuple[bytes, int] | None],
        version: int,
    ) -> None:
        """Load it everywhere, or serve everywhere what was served before."""
        end = time.monotonic() + self.wait_s
        held: dict[ServerEngine, Any] = {}
        while not held:
            asked = self._present(end)
            try:
                held, _ = self._try(asked, load)
            except BaseException:
                self._roll_back(asked)
                raise
        self._pushed, self._version, self._withdrawn = kept(next(iter(held))), version, ""

    def _roll_back(self, replicas: Sequence[ServerEngine]) -> None:
        """Serve the version before again; a replica that cannot is dropped, and proven before it is taken back."""
        with contextlib.suppress(EngineBrokenError):
            self._wait_for_left_alone()  # an interrupted push may still arrive
        for each in replicas:
            if each in self._lost:
                continue
            try:
                self._restore(each)
            except Exception as error:
                self._drop(each, error)

    def _restore(self, each: ServerEngine) -> None:
        """Have a replica serve what all of them serve."""
        if self._pushed is not None:
            each.load_packed(*self._pushed)
        elif self._version == 0:
            if each.version != 0:
                each.drop_adapter()
        elif each.version != self._version or each.pushed is not None:
            raise EngineBrokenError(
                f"restoring {each.url}: version {self._version} was pushed by somebody else, and is not known here. Push again, or call "
                "drop_adapter()."
            )

    # --- who takes part ---------------------------------------------------------------------------------------------

    def _ask_all(self, ask: Callable[[ServerEngine], Any]) -> dict[ServerEngine, Any]:
        """The answer of every replica that takes part, in their order; there is one at least."""
        end = time.monotonic() + self.wait_s
        while True:
            answers, _ = self._try(self._present(end), ask)
            if answers:
                return answers

    def _try(
        self, replicas: Sequence[ServerEngine], ask: Callable[[ServerEngine], Any]
    ) -> tuple[dict[ServerEngine, Any], list[ServerEngine]]:
        """Ask at the same time. Who does not answer is dropped; a refusal is raised when all have answered.

        Returns:
            The answers, and who was dropped.
        """
        answers, faults = self._in_parallel(replicas, ask)
        refusals = {e: f for e, f in faults.items() if not isinstance(f, _GONE)}
        if faults and all(isinstance(faults.get(e), _ESTRANGED) for e in replicas):  # then it is not the replica
            refusals = faults
        dropped = [each for each in faults if each not in refusals]
        for each in dropped:
            self._drop(each, faults[each])
        for each, fault in refusals.items():
            if isinstance(fault, QloraRLError) and len(self.replicas) > 1:
                reasons = () if fault.reasons == (str(fault),) else fault.reasons
                raise type(fault)(f"{fault} (Said by {each.url}.)", reasons=reasons, module=fault.module) from fault
            raise fault
        return answers, dropped

    def _in_parallel(
        self, replicas: Sequence[ServerEngine], ask: Callable[[ServerEngine], Any]
    ) -> tuple[dict[ServerEngine, Any], dict[ServerEngine, BaseException]]:
        """One thread for each; daemons, so that Ctrl-C need not wait for a long rollout."""
        self._wait_for_left_alone()  # of a call that was interrupted: a replica answers one question at a time
        answers: dict[ServerEngine, Any] = {}
        faults: dict[ServerEngine, BaseException] = {}

        def one(each: ServerEngine) -> None:
            try:
                answers[each] = ask(each)
            except BaseException as error:
                faults[each] = error

        if len(replicas) == 1:
            one(replicas[0])
            for fault in faults.values():
                if not isinstance(fault, Exception):
                    raise fault
        else:
            for each in replicas:
                thread = threading.Thread(target=one, args=(each,), daemon=True)
                thread.start()
                self._left_alone.append(thread)
            for thread in self._left_alone:
                thread.join()
        self._left_alone = []
        return {e: answers[e] for e in replicas if e in answers}, {e: faults[e] for e in replicas if e in faults}

    def _wait_for_left_alone(self) -> None:
        limit = max(each.timeout_s + each.wait_s for each in self.replicas)
        end = time.monotonic() + limit
        for thread in self._left_alone:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise EngineBrokenError(
                    f"asking {len(self.replicas)} replicas: a request that was interrupted has not ended within {limit:.0f} s. Make a "
                    "new ServerEngine."
                )
        self._left_alone = []

    def _present(self, end: float) -> list[ServerEngine]:
        """The replicas that take part, those that are back among them; waits until `end` when there is none.

        Raises:
            EngineBrokenError: nobody is back by then; gives the reason of each.
        """
        if self._is_closed:
            raise EngineClosedError("using the engine: it was closed. Make a new ServerEngine.")
        while True:
            is_over = not self.live and time.monotonic() > end  # also where replicas come back, and fail again
            for each, lost in list(self._lost.items()):
                if not is_over and (time.monotonic() >= lost.next_look or not self.live):
                    self._take_back(each, lost)
            if self.live:
                return self.live
            if is_over:
                reasons = [f"{each.url}: {lost.reason}" for each, lost in self._lost.items()]
                raise EngineBrokenError(
                    f"asking {len(self.replicas)} replicas: all stayed away for wait_s={self.wait_s:.0f} s; {'; '.join(reasons)} Start "
                    f"one of them again on the same base, or raise wait_s; version {self._version} is pushed again by itself.",
                    reasons=reasons,
                )
            time.sleep(min(0.5, max(0.0, end - time.monotonic()) + 0.01))

    def _drop(self, each: ServerEngine, fault: BaseException) -> None:
        self._lost[each] = _Lost(str(fault), time.monotonic() + _LOOK_AGAIN_S, _LOOK_AGAIN_S)
        logger.warning("%s is dropped, %d replicas are left: %s", each.url, len(self.live), fault)

    def _take_back(self, each: ServerEngine, lost: _Lost) -> None:
        """If it is there, on the same base, and holds what the others hold."""
        started, reason = time.monotonic(), ""
        try:
            if each.is_there(_PROBE_S):
                self._prove(each)
            else:
                reason = lost.reason
        except QloraRLError as error:
            reason = str(error)
            if reason != lost.reason:
                logger.warning("%s is not taken back: %s", each.url, error)
        if reason:
            pause = min(_LOOK_SELDOM_S, 2 * max(lost.pause_s, time.monotonic() - started))
            self._lost[each] = _Lost(reason, time.monotonic() + pause, pause)
            return
        del self._lost[each]
        self._returns += 1
        logger.warning("%s is back: its base is proven and it holds version %d", each.url, self._version)

    def _prove(self, each: ServerEngine) -> None:
        each.wake()
        held, wanted = each.describe_base().digest, each.base
        if held != wanted:
            raise BaseMismatchError(
                f"taking back {each.url}: it holds another base, digest={held[:16]} != digest={wanted[:16]}. Start it on the base "
                "directory that the trainer uses."
            )
        self._restore(each)
        if self.live and self._pushed is not None:
            rank = unpack_adapter(self._pushed[0]).rank
            if each.held_adapter(rank) != self.live[0].held_adapter(rank):
                raise CanaryError(f"taking back {each.url}: it multiplies with another adapter than the others.")

    def _refuse_withdrawn(self) -> None:
        if self._withdrawn:
            raise EngineBrokenError(
                f"generating: {self._withdrawn}. Push the adapter again, or call drop_adapter() to go on with the bare base."
            )


def _check_alike(replicas: Sequence[ServerEngine]) -> None:
    """Refuse replicas that cannot stand for one another.

    Raises:
        BaseMismatchError: another base than the first one's.
        ConfigConflictError: another dtype, or the same server twice.
    """
    first, *others = replicas
    for each in others:
        if each.base != first.base:
            raise BaseMismatchError(
                f"connecting to {len(replicas)} replicas: {each.url} holds base={each.base[:16]} != base={first.base[:16]} of "
                f"{first.url}. Start all of them on one base directory, or leave that one out."
            )
        mine, other = each.capabilities().adapter_dtype, first.capabilities().adapter_dtype
        if mine != other:
            raise ConfigConflictError(
                f"connecting to {len(replicas)} replicas: {each.url} serves adapters in {mine}, {first.url} in {other}. Start "
                "all of them with one dtype."
            )
    starts: dict[str, ServerEngine] = {}
    for each in replicas:
        twin = starts.setdefault(each.start, each)
        if twin is not each:
            raise ConfigConflictError(
                f"connecting to {len(replicas)} replicas: {each.url} and {twin.url} are one server. Name it once."
            )


def _wake(each: ServerEngine) -> None:
    """Without the long patience that a rollout has."""
    if not each.is_there(_WAKE_S):
        raise EngineBrokenError(f"looking for {each.url}: it did not answer. Start it again on the same base.")
    each.wake()
