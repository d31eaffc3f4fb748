"""`Fleet`: several engines on one base as one; `connect` makes it of servers. A version is live only when all replicas
that take part hold it."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlora_rl.adapter.store import pack_adapter, read_directory, unpack_adapter
from qlora_rl.contracts import BaseFingerprint, ClosedAtEnd, EngineCapabilities, Rollout, SamplingSpec
from qlora_rl.engine.client import EngineClient, ServerEngine
from qlora_rl.engine.fleet.dense import Broadcast, Kept
from qlora_rl.engine.fleet.replicas import LoadBalancer, Replicas, check_alike
from qlora_rl.engine.images import Prompt, as_prompts, token_ids
from qlora_rl.engine.sampling import check_lengths, spec_of
from qlora_rl.errors import (
    BaseMismatchError,
    CanaryError,
    ConfigConflictError,
    EngineBrokenError,
    QloraRLError,
    SyncError,
    VersionGoneError,
)

if TYPE_CHECKING:
    import torch

# How long a replica may be away before the others do its work, in seconds; the last one has all of `wait_s`.
_PATIENCE_S = 2.0
# A replica that stands still must not hold up the others for the time limit of a rollout.
_WAKE_S = 30.0


class Fleet(ClosedAtEnd):
    """Engines on one base, asked as one: servers (`connect([url, url])` makes it) or actors (`RayFleet`).

    Prompts are shared out by the speed that was measured of each replica. Prompt i is sampled with the seed of prompt
    i, whichever replica samples it. A replica that stays away is dropped, and the others generate its share; so is one
    that is not done long after the others. It is taken back when its base is verified and it holds the version that
    serves. When none is left, all of `wait_s` is waited for one. `incarnation` grows when a replica was restarted or
    taken back.

    Where the replicas may be asked by several threads, so may the fleet; also during a push.

    Args:
        replicas: connected to; closed with the fleet, or where it cannot be made.
        wait_s: how long to wait for a replica when there is none, in seconds.

    Attributes:
        version: of the adapter that all replicas serve.

    Raises:
        BaseMismatchError: a replica holds another base than the first; names it.
        ConfigConflictError: two are one and the same, or they cannot be used for one another.
    """

    def __init__(self, replicas: Sequence[EngineClient], *, wait_s: float = 120.0):
        self.url, self.wait_s = ",".join(each.url for each in replicas), wait_s
        self._team = Replicas(replicas, wait_s=wait_s, prove=self._prove)
        self._shares = LoadBalancer()
        self._pushed: tuple[bytes, int] | None = None
        self._kept: Kept | None = None  # full weights, where they serve
        self._sends_dense = False
        self.version = 0
        self._withdrawn = ""
        self._pushes = 0  # that have begun, and that have ended: odd while one is under way
        try:
            check_alike(replicas)
        except BaseException:
            self.close()
            raise
        for each in replicas:
            each.wait_s = min(wait_s, _PATIENCE_S)
        self.version = replicas[0].version
        if len({each.found for each in replicas}) > 1:
            found = ", ".join(f"{each.url} version {each.version}" for each in replicas)
            self._withdrawn = f"the replicas do not serve the same ({found})"

    # --- what people ask it -----------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """Grows when a replica was restarted or taken back."""
        return self._team.returns + sum(each.incarnation for each in self.replicas)

    @property
    def replicas(self) -> list[EngineClient]:
        """All of them."""
        return self._team.all

    @property
    def live(self) -> list[EngineClient]:
        """The replicas that take part."""
        return self._team.live

    @property
    def speeds(self) -> dict[str, float | None]:
        """Tokens per second that were measured of each replica, by `url`; `None` before its first rollout."""
        return {each.url: self._shares.speed(each) for each in self.replicas}

    def capabilities(self) -> EngineCapabilities:
        """What all of them can be asked for."""
        found = [each.capabilities() for each in self.replicas]
        return replace(
            found[0],
            name=f"{len(found)} replicas: {', '.join(each.name for each in found)}",
            takes_dense=all(each.takes_dense for each in found),
            max_lora_rank=min(each.max_lora_rank for each in found),
            max_model_length=min(each.max_model_length for each in found),
            holds_two=all(each.holds_two for each in found),
            gives_logprobs=all(each.gives_logprobs for each in found),
            takes_images=all(each.takes_images for each in found),
            adapts_experts=all(each.adapts_experts for each in found),
        )

    def describe_base(self) -> BaseFingerprint:
        """The base that all of them hold, or the full weights that have replaced it, read from the weights of each.

        Raises:
            BaseMismatchError, CanaryError: one holds another; names it.
        """
        found = self._team.ask_all(lambda each: each.describe_base())
        first, *others = found
        for each in others:
            if found[each].digest != found[first].digest:
                if self._kept is not None:
                    raise CanaryError(
                        f"comparing replicas: {each.url} holds other weights than {first.url}. Push again."
                    )
                raise BaseMismatchError(
                    f"reading the base: {each.url} holds digest={found[each].digest[:16]}, {first.url} holds "
                    f"digest={found[first].digest[:16]}. Start all replicas on one base directory."
                )
        return found[first]

    def repair_base(self) -> dict[str, float]:
        """Write the exact scales back in all of them; the largest relative error of each weight."""
        repaired: dict[str, float] = {}
        for found in self._team.ask_all(lambda each: each.repair_base()).values():
            repaired |= {name: max(error, repaired.get(name, 0.0)) for name, error in found.items()}
        return repaired

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSpec | None = None,
        *,
        version: int | None = None,
        **fields: Any,
    ) -> Rollout:
        """One completion for each of B prompts (token ids), all by one version, in the order of the prompts.

        Args:
            prompts: token ids.
            sampling: how to sample; or give its fields by name.
            version: that was pushed last, or the one before it.
            fields: of `SamplingSpec`.

        Raises:
            PromptTooLongError: names every prompt that leaves no room for a completion; nothing was generated.
            VersionGoneError: no replica holds `version` any more. RolloutCancelledError: another thread has called
                `cancel`.
            ServerTakenError: somebody else has pushed another adapter to a replica.
            EngineBrokenError: all replicas stayed away longer than `wait_s`.
        """
        spec = spec_of(sampling, fields)
        self._reject_withdrawn()
        ids = as_prompts(prompts)
        if spec.seed is None:  # without one, replicas may sample the same
            spec = replace(spec, seed=secrets.randbits(62))
        check_lengths(
            [token_ids(each) for each in ids], min(each.capabilities().max_model_length for each in self.replicas)
        )
        if version is None and self.capabilities().holds_two:
            # What has begun with a version ends with it, also when a push goes through meanwhile.
            version = self.version
        named = {} if version is None else {"version": version}
        started, pushes = time.perf_counter(), self._pushes
        versions = {} if ids else {self.version if version is None else version: ""}
        tokens: list[list[int]] = [[] for _ in ids]
        logprobs: list[list[float | None]] = [[] for _ in ids]
        has_ended: dict[int, bool] = {}
        left, end = list(range(len(ids))), time.monotonic() + self.wait_s
        without: dict[EngineClient, VersionGoneError] = {}
        has_waited = False
        while left:
            able = [each for each in self._team.present(end) if each not in without]
            if not able:
                raise next(iter(without.values()))
            shares = self._shares.out(left, able)

            def sample(each: EngineClient, shares: dict[EngineClient, list[int]] = shares) -> Rollout:
                begun = time.perf_counter()  # by the clock here: the way there and back counts
                rollout = each.generate([ids[i] for i in shares[each]], spec, places=shares[each], **named)
                return replace(rollout, seconds=time.perf_counter() - begun)

            forgives = (VersionGoneError,) if named else ()
            answers = self._team.ask(list(shares), sample, forgives=forgives, watches=True)
            # One that was taken back has the newest version alone: the others sample with the one before it.
            without |= {each: found for each, found in answers.items() if isinstance(found, VersionGoneError)}
            done = {each: found for each, found in answers.items() if each not in without}
            if not answers and not has_waited:
                # All were lost in it: what they had generated until then was no waiting for them.
                has_waited, end = True, time.monotonic() + self.wait_s
            versions |= {rollout.version: each.url for each, rollout in done.items()}
            if len(versions) > 1 and (self._pushes % 2 or pushes != self._pushes):
                # A push of another thread came in between: engines that hold one version sample with what they have.
                versions, left, pushes = {}, list(range(len(ids))), self._pushes
                continue
            if len(versions) > 1:
                self._withdrawn = "; ".join(f"{url} serves version {version}" for version, url in versions.items())
                self._reject_withdrawn()
            for each, rollout in done.items():
                self._shares.note(each, rollout.tokens, rollout.seconds)
                for i, sampled, values in zip(shares[each], rollout.completion_ids, rollout.logprobs, strict=True):
                    tokens[i], logprobs[i] = sampled, values
                has_ended |= zip(shares[each], rollout.has_ended or (), strict=False)
            sampled_now = {i for each in done for i in shares[each]}
            left = [i for i in left if i not in sampled_now]
        are_known = [has_ended[i] for i in range(len(ids))] if len(has_ended) == len(ids) else None
        return Rollout(tokens, logprobs, next(iter(versions)), time.perf_counter() - started, has_ended=are_known)

    def cancel(self) -> None:
        """Have the calls of other threads end with `RolloutCancelledError`."""
        for each in self.live:
            each.cancel()

    def score(self, sequences: Sequence[Prompt], *, bare: bool = False) -> list[list[float]]:
        """Natural logs of the probabilities of every token but the first, by the first replica; with `bare` under the
        base alone."""
        return self.score_each(sequences, bare=bare)[0]

    def score_each(self, sequences: Sequence[Prompt], *, bare: bool = False) -> list[list[list[float]]]:
        """`score` of every replica that takes part."""
        if not bare:
            self._reject_withdrawn()
        return list(self._team.ask_all(lambda each: each.score(sequences, bare=bare)).values())

    def held_adapter(self, rank: int) -> Mapping[str, str]:
        """Digests of what all of them multiply with.

        Raises:
            CanaryError: they hold different ones; names two.
        """
        found = self._team.ask_all(lambda each: each.held_adapter(rank))
        first, *others = found
        for each in others:
            if found[each] != found[first]:
                raise CanaryError(
                    f"comparing replicas: {each.url} multiplies with another adapter than {first.url}. Push again."
                )
        return found[first]

    def claim(self, *, force: bool = False) -> None:
        """Become the one trainer that pushes to them.

        Raises:
            ServerTakenError: another one is, at one of them.
        """
        self._team.ask_all(lambda each: each.claim(force=force))

    def load_packed(self, blob: bytes, version: int) -> None:
        """Serve the adapter in the bytes of `pack_adapter` as `version` from the next request on; can be repeated.

        Raises:
            SyncError: a replica rejected it; all serve the version before.
            EngineBrokenError: all replicas stayed away longer than `wait_s`.
        """
        self._push(lambda each: each.load_packed(blob, version), version, (blob, version))

    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve a PEFT directory, which is sent."""
        self.load_packed(pack_adapter(read_directory(Path(directory))), version)

    @property
    def holds_dense(self) -> bool:
        """The full weights that were pushed last may serve; one that is taken back gets them."""
        return self._kept is not None and not self._withdrawn

    def load_dense(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Serve these weights instead of the base's, as `version`, from the next request on.

        Each part is made once and sent to all; none loads anything before all hold all parts. They are kept on this
        machine's disk (TMPDIR) until the next push, for a replica that is lost and comes back, or for the way back. A
        rollout that another thread begins while they are loaded may end with an error.

        Args:
            weights: every weight of the model, by transformers' name; read once, one after the other.

        Returns:
            Bytes.

        Raises:
            EngineUnsupportedError: a replica holds a 4-bit base, or serves adapters.
            SyncError: a replica rejected them, or all were lost; all serve the version before. Can be repeated.
            EngineBrokenError: all replicas stayed away longer than `wait_s`.
        """
        self._team.wait_for_left_alone()
        with self._team.changing, self._push_under_way():
            self._sends_dense = True
            broadcast, is_loading = Broadcast(self._team, version), False
            asked = self._team.present(time.monotonic() + self.wait_s)
            try:
                nbytes = broadcast.stream(asked, weights, self._forget_kept)
                is_loading = True
                broadcast.commit()
                self._hold(None, version, broadcast.kept)
            except BaseException as error:
                if is_loading:
                    if self._kept is None and self.version:
                        self._withdrawn = f"weights version={version} did not arrive, and those before are not kept"
                    self._roll_back(asked)
                    broadcast.abandon()
                if isinstance(error, SyncError) and not self._team.live:
                    self._team.present(time.monotonic() + self.wait_s)  # with one that is back it can be repeated
                raise
        return nbytes

    def withdraw_dense(self, reason: str) -> None:
        """Have all of them serve nothing until the next push; one that is taken back gets the base."""
        for each in self.live:
            try:
                each.withdraw_dense(reason)
            except QloraRLError as error:
                self._team.drop(each, error)
        self._forget_kept()
        self._withdrawn = reason

    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0; read again from its directory where full weights replaced it."""
        self._push(lambda each: each.drop_adapter(), 0)

    def withdraw_adapter(self, reason: str) -> None:
        """Ask for nothing more until the next push: what the replicas serve was not verified."""
        self._pushed, self._withdrawn = None, reason

    def sleep(self) -> None:
        """Nothing: their memory is their own."""

    def wake(self) -> None:
        """See which replicas are there; those that were restarted or are back are verified and pushed to."""
        self._team.ask_all(self._wake)

    def close(self) -> None:
        """Close all of them. Harmless when repeated."""
        self._team.is_closed = True
        self._forget_kept()
        for each in self.replicas:
            each.close()

    # --- a push -----------------------------------------------------------------------------------------------------

    def _push(
        self, load: Callable[[EngineClient], None], version: int, pushed: tuple[bytes, int] | None = None
    ) -> None:
        """Load it everywhere, or serve everywhere what was served before; nobody is taken back meanwhile."""
        end = time.monotonic() + self.wait_s
        self._team.wait_for_left_alone()  # which may want what is held from here on
        with self._team.changing, self._push_under_way():
            held: dict[EngineClient, Any] = {}
            while not held:
                asked = self._team.present(end)
                try:
                    held = self._team.ask(asked, load, watches=True)
                except BaseException:
                    self._roll_back(asked)
                    raise
            self._hold(pushed, version, None)

    @contextlib.contextmanager
    def _push_under_way(self) -> Iterator[None]:
        self._pushes += 1
        try:
            yield
        finally:
            self._pushes += 1

    def _hold(self, pushed: tuple[bytes, int] | None, version: int, kept: Kept | None) -> None:
        """All serve it."""
        self._forget_kept()
        self._pushed, self.version, self._kept, self._withdrawn = pushed, version, kept, ""

    def _forget_kept(self) -> None:
        if self._kept is not None:
            self._kept.discard()
        self._kept = None

    def _roll_back(self, replicas: Sequence[EngineClient]) -> None:
        """Serve the version before again; a replica that cannot is dropped, and verified before it is taken back."""
        with contextlib.suppress(EngineBrokenError):
            self._team.wait_for_left_alone()  # an interrupted push may still arrive
        for each in replicas:
            if not self._team.takes_part(each):
                continue
            try:
                self._restore(each)
            except Exception as error:
                self._team.drop(each, error)

    def _restore(self, each: EngineClient) -> None:
        """Have a replica serve what all of them serve."""
        if self._pushed is not None:
            each.load_packed(*self._pushed)
        elif self._kept is not None:
            self._kept.replay(each)
        elif self.version == 0 or (self._sends_dense and self._withdrawn):
            if each.version != 0 or self._sends_dense:  # weights of which some were loaded have no version
                each.drop_adapter()
        elif each.version != self.version or each.pushed is not None:
            raise EngineBrokenError(
                f"restoring {each.url}: version {self.version} was pushed by somebody else, and is not known here. "
                "Push again, or call drop_adapter()."
            )

    def _prove(self, each: EngineClient) -> None:
        """One that is there again: the base from before, and what the others hold."""
        each.wake()
        if self._sends_dense:  # weights may have replaced its base
            each.drop_adapter()
        held, wanted = each.describe_base().digest, each.base
        if held != wanted:
            raise BaseMismatchError(
                f"taking back {each.url}: it holds another base, digest={held[:16]} != digest={wanted[:16]}. Start it "
                "on the base directory that the trainer uses."
            )
        self._restore(each)
        self._compare_held(each)
        self._shares.forget(each)

    def _compare_held(self, each: EngineClient) -> None:
        """With the first of the others that can be compared with: one that was replaced itself may only now be found
        out."""
        if self._pushed is not None:
            rank = unpack_adapter(self._pushed[0]).rank
        elif self._kept is None:
            return

        def look(one: EngineClient) -> Any:
            return one.describe_base().digest if self._pushed is None else one.held_adapter(rank)

        for other in self.live:
            if other is each:
                continue
            try:
                held = look(other)
            except EngineBrokenError:
                continue
            if self._kept is not None and not other.holds_dense:  # asked, it was found to be restarted
                continue
            if look(each) != held:
                raise CanaryError(f"taking back {each.url}: it multiplies with another policy than the others.")
            return

    def _wake(self, each: EngineClient) -> None:
        """Without the long patience that a rollout has. One that was restarted verifies its base and gets the adapter
        by itself."""
        if not each.is_there(_WAKE_S):
            raise EngineBrokenError(f"looking for {each.url}: it did not answer. Start it again on the same base.")
        each.wake()
        if self._kept is not None and not each.holds_dense:
            raise EngineBrokenError(f"looking for {each.url}: it was restarted, and the weights were lost with it.")

    def _reject_withdrawn(self) -> None:
        if self._withdrawn:
            raise EngineBrokenError(
                f"generating: {self._withdrawn}. Push the adapter again, or call drop_adapter() to go on with the bare "
                "base."
            )


def connect(url: str | Sequence[str], *, wait_s: float = 120.0, **options: Any) -> ServerEngine | Fleet:
    """The server at `url` as an engine, or those at several as one.

    ::

        with connect(["http://a:8000", "http://b:8000"], api_key_file="key") as engine:
            rollout = engine.generate([[40, 41, 42]] * 8, max_tokens=16, seed=0)

    Args:
        url: such as "http://127.0.0.1:8000"; several in a list, or in one text, "http://a:8000,http://b:8000".
        wait_s: how long to wait for each server at first, and for one of them when none is left, in seconds.
        options: of `ServerEngine`, the same for all: one key.

    Raises:
        BaseMismatchError: a server holds another base than the first; names it.
        ConfigConflictError: two URLs lead to one server, or the servers cannot be used for one another.
        AccessDeniedError, EngineBrokenError, EngineUnsupportedError: as `ServerEngine`.
    """
    parts = url.split(",") if isinstance(url, str) else url
    urls = [part.strip().rstrip("/") for part in parts if part.strip()]
    if not urls or len(set(urls)) < len(urls):
        raise ConfigConflictError(
            f"connecting to servers: urls={urls}: a URL is missing or named twice. Name each one once."
        )
    if len(urls) == 1:
        return ServerEngine(urls[0], wait_s=wait_s, **options)
    connected: list[ServerEngine] = []
    try:
        for each in urls:
            connected.append(ServerEngine(each, wait_s=wait_s, **options))
    except BaseException:
        for engine in connected:
            engine.close()
        raise
    return Fleet(connected, wait_s=wait_s)
