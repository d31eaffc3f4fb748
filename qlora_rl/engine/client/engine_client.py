"""`EngineClient`: an engine in another process, over a connection: HTTP, or Ray. Knows nothing of vLLM."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlencode

from qlora_rl.adapter.store import pack_adapter, read_directory
from qlora_rl.contracts import BaseFingerprint, ClosedAtEnd, EngineCapabilities, Rollout, SamplingSpec
from qlora_rl.engine.client.http_errors import (
    AwayError,
    Patience,
    RestartedError,
    not_taken,
    other_base,
    reject_other_version,
)
from qlora_rl.engine.client.state import ServerState
from qlora_rl.engine.client.upload import WeightsPush
from qlora_rl.engine.images import Prompt, as_prompts, pack, token_ids
from qlora_rl.engine.sampling import check_lengths, spec_of
from qlora_rl.errors import (
    EngineUnsupportedError,
    QloraRLError,
    RolloutCancelledError,
    ServerTakenError,
    SyncError,
    VersionGoneError,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# What names the version that must answer it.
_SAMPLING = ("/generate", "/score")
# Before it is asked again, while a push of another thread ends, in seconds.
_PUSH_S = 0.05


@dataclass(frozen=True)
class Answer:
    """What an engine elsewhere says.

    Attributes:
        found: what was asked for.
        start: name of the engine's start: no two have the same.
        version: that serves now.
        error: of ours, that came instead, where a connection brings it as an object.
    """

    found: dict[str, Any]
    start: str
    version: int
    error: QloraRLError | None = None

    def checked(self, asked: str) -> Answer:
        """This, where it is an answer of the start that was `asked`.

        Raises:
            RestartedError: it is of another one. QloraRLError: what came instead.
        """
        if asked and self.start != asked:
            raise RestartedError(self.start, asked)
        if self.error is not None:
            raise self.error
        return self


class Connection(Protocol):
    """The way to one engine; from any thread.

    Attributes:
        url: where the engine is, for messages.
        way: how bytes are sent: "http" or "object_store".
        piece_bytes: of full weights in one request, at most.
    """

    url: str
    way: str
    piece_bytes: int

    @property
    def cuts(self) -> int:
        """How often `cancel` was called."""
        ...

    def ask(self, method: str, path: str, body: bytes | dict[str, Any] | None, start: str) -> Answer:
        """One request, by the routes of `qlora-rl serve` (`engine/server/routes.py`).

        Args:
            start: of the engine that is meant; empty before the first answer.

        Raises:
            RestartedError: an engine that was started later is there. AwayError: nobody answers; ask again.
            QloraRLError: it was rejected.
        """
        ...

    def computes(self, timeout_s: float, *, bare: bool) -> bool:
        """The engine computes something within `timeout_s` seconds, or says that its weights were lost; asked once."""
        ...

    def cancel(self) -> None:
        """Have the calls of other threads end."""
        ...

    def close(self) -> None:
        """Give the engine back."""
        ...


class EngineClient(ClosedAtEnd):
    """An engine in another process.

    When it was restarted, its base is verified again (it must be the one that was there before) and the newest adapter
    is pushed again, before anything else is asked; `incarnation` grows.

    Args:
        connection: to it; closed with this object.
        timeout_s: of one request, in seconds.
        wait_s: how long to wait for an engine that is away, in seconds, before giving up.

    Attributes:
        version: of the adapter that the server serves, as it said last.
        incarnation: grows when the server was restarted.
        base: digest of the base that was there at first, and must be after every restart.

    Raises:
        EngineBrokenError: nobody answers within `wait_s`.
        QloraRLError: what answers cannot be used; as the connection says.
    """

    _near = True  # full weights go through the engine's own directory, where this machine sees it

    def __init__(self, connection: Connection, *, timeout_s: float, wait_s: float):
        self.connection, self.url = connection, connection.url
        self.timeout_s, self.wait_s = timeout_s, wait_s
        self._state, self._recovering = ServerState(self.url), threading.RLock()
        self.incarnation, self.version = 1, 0
        self._dense = 0  # the version of the full weights that were pushed last
        self._about = self._ask("GET", "/state")
        self.base, self.found = self._about["base"], (self.version, self._about.get("digest", ""))  # what served

    # --- what people ask it -----------------------------------------------------------------------------------------

    @property
    def start(self) -> str:
        """Name of the start of the server: no two have the same."""
        return self._state.start

    @property
    def pushed(self) -> tuple[bytes, int] | None:
        """What a restarted server gets: the bytes of an adapter, and its version."""
        return self._state.pushed

    def is_there(self, timeout_s: float) -> bool:
        """Its vLLM computes something within `timeout_s` seconds, or says that its weights were lost; asked once,
        nothing is verified."""
        # Full weights have replaced the bare base.
        return self.connection.computes(timeout_s, bare=not self._about.get("takes_dense", False))

    def capabilities(self) -> EngineCapabilities:
        """What the server can be asked for."""
        return EngineCapabilities(
            name=self._about["name"],
            takes_adapters=self._about["max_lora_rank"] > 0,
            takes_dense=self._about.get("takes_dense", False),
            max_lora_rank=self._about["max_lora_rank"],
            max_model_length=self._about["max_model_length"],
            adapter_dtype=self._about["adapter_dtype"],
            can_sleep=False,
            takes_bytes=True,
            byte_way=self.connection.way,
            dense_way=self.connection.way,
            holds_two=self._about.get("holds_two", False),
            gives_logprobs=self._about.get("gives_logprobs", True),
            takes_images=self._about.get("most_images", 0) > 0,
            adapts_experts=self._about.get("adapts_experts", False),
        )

    def describe_base(self) -> BaseFingerprint:
        """The base as the server's vLLM holds it, read from its weights."""
        return BaseFingerprint.from_dict(self._ask("GET", "/base"))

    def repair_base(self) -> dict[str, float]:
        """Write the exact scales back (the server has done it when it started)."""
        return self._ask("POST", "/repair")

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingSpec | None = None,
        *,
        places: Sequence[int] | None = None,
        version: int | None = None,
        **fields: Any,
    ) -> Rollout:
        """One completion for each of B prompts (token ids), all by one version; from any thread.

        Args:
            prompts: token ids, or `ImagePrompt`s, whose images are sent as PNG.
            sampling: how to sample.
            places: number of each prompt in the whole of which these are a part; decides its seed. By default 0 to B -
                1.
            version: that was pushed last, or the one before it.
            fields: of `SamplingSpec`, instead of `sampling`.

        Raises:
            PromptTooLongError: names every prompt that leaves no room for a completion; nothing was generated.
            EngineUnsupportedError: images, and the server takes none, or not so many in one request.
            VersionGoneError: neither. RolloutCancelledError: another thread has called `cancel`.
            ServerTakenError: somebody else has pushed another adapter.
            EngineBrokenError: the server stayed away longer than `wait_s`.
        """
        spec = spec_of(sampling, fields)
        self._state.reject_withdrawn()
        asked = self._packed("prompts", prompts)
        started = time.perf_counter()
        asked["sampling"] = dataclasses.asdict(spec)
        if places is not None:
            asked["places"] = list(places)
        found = self._ask("POST", "/generate", lambda: asked | self._expected(version))
        seconds = time.perf_counter() - started
        return Rollout(
            found["completion_ids"], found["logprobs"], found["version"], seconds, has_ended=found.get("has_ended")
        )

    def score(self, sequences: Sequence[Prompt], *, bare: bool = False) -> list[list[float]]:
        """Natural logs of the probabilities of every token but the first; with `bare` under the base alone."""
        if not bare:
            self._state.reject_withdrawn()
        body = self._packed("sequences", sequences) | {"bare": bare}
        return self._ask("POST", "/score", lambda: body if bare else body | self._expected())["logprobs"]

    def held_adapter(self, rank: int) -> Mapping[str, str]:
        """Digests of what the server multiplies with; empty for the bare base."""
        return self._ask("GET", f"/held?rank={rank}")["held"]

    def cancel(self) -> None:
        """Have the calls of other threads end with `RolloutCancelledError`; the server lets go of what they wanted."""
        self.connection.cancel()

    def claim(self, *, force: bool = False) -> None:
        """Become the one trainer that pushes to this server; a push does it too.

        Args:
            force: take it from another one, which is told no at its next push.

        Raises:
            ServerTakenError: another one is.
        """
        self._ask("POST", f"/lease?force={int(force)}")

    def load_packed(self, blob: bytes, version: int) -> None:
        """Serve the adapter in the bytes of `pack_adapter` as `version` from the next request on; can be repeated.

        Raises:
            SyncError: it was rejected; the old version goes on serving.
            ServerTakenError: another trainer holds the server.
        """
        limit = self._about["max_body_bytes"]
        if len(blob) > limit:
            raise SyncError(
                f"pushing adapter version={version}: {len(blob)} bytes > max_body_bytes={limit} of the server. Start "
                "it with a larger --max-body-mib or --max-lora-rank."
            )
        digest = hashlib.sha256(blob).hexdigest()
        with self._state.pushes(version):
            found = self._ask("PUT", f"/adapter?version={version}&digest={digest}", blob)
            if found["digest"] != digest or self.version != version:
                raise not_taken("adapter", version, self.version)
            self._state.serve(version, digest, (blob, version))

    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve a PEFT directory, which is sent."""
        self.load_packed(pack_adapter(read_directory(Path(directory))), version)

    @property
    def holds_dense(self) -> bool:
        """The full weights that were pushed last are still in the server and may serve."""
        return bool(self._dense) and not self._state.withdrawn

    def load_dense(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Serve these weights instead of the base's, as `version`, from the next request on.

        Args:
            weights: every weight of the model, by transformers' name; read once, one after the other.

        Returns:
            Bytes.

        Raises:
            EngineUnsupportedError: the server holds a 4-bit base, or serves adapters. ServerTakenError: another trainer
                pushes to it.
            SyncError: not all arrived; the old version goes on serving. Or vLLM broke off while it loaded them: nothing
                is served.
        """
        return self.begin_dense(version).upload(weights)

    def begin_dense(self, version: int) -> WeightsPush:
        """Open a push of full weights, which are served as `version` from its `commit` on; `load_dense` does all of
        it."""
        piece_bytes = min(self.connection.piece_bytes, self._about["max_body_bytes"])
        root = self._about.get("adapter_dir") if self._near else None

        def commit(push: str) -> None:
            with self._state.pushes(version):
                self._ask("POST", f"/weights/commit?push={push}")
                if self.version != version:
                    raise not_taken("weights", version, self.version)
                self._dense = version
                self._state.serve(version, push)

        return WeightsPush(self._ask, version, commit, piece_bytes=piece_bytes, root=root and Path(root))

    def withdraw_dense(self, reason: str) -> None:
        """Have the server serve nothing until the next `load_dense`."""
        self._state.withdraw(reason)
        try:
            self._ask("DELETE", f"/weights?{urlencode({'reason': reason})}")
        except QloraRLError as error:  # what has led here matters more
            logger.warning("%s could not be told to stop serving: %s", self.url, error)

    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0; read again from its directory where full weights replaced it."""
        self._state.forget()  # should the server have been restarted, it has none already
        self._dense = 0
        with self._state.pushes(0):
            self._ask("DELETE", "/adapter")
            self._state.serve(0, "")

    def withdraw_adapter(self, reason: str) -> None:
        """Ask for nothing more until the next push: what the server serves was not verified."""
        self._state.withdraw(reason)

    def sleep(self) -> None:
        """Nothing: a server's memory is its own."""

    def wake(self) -> None:
        """See whether the server is still the one that was verified; if not, verify it and push again."""
        self._ask("GET", "/state")

    def close(self) -> None:
        """Give the server free for another trainer and close the connections; the server goes on. Harmless when
        repeated."""
        if self._state.is_closed:
            return
        self._state.close()
        self.connection.close()

    def _packed(self, name: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Prompts for a body, which are checked before anything is sent."""
        asked, limit = as_prompts(prompts), self._about["max_body_bytes"]
        check_lengths([token_ids(each) for each in asked], self._about["max_model_length"])
        packed = pack(asked)
        if packed["images"] and not self._about.get("most_images"):
            raise EngineUnsupportedError(
                "generating: the prompts hold images, and the engine's model takes none. Leave them out."
            )
        size = sum(map(len, packed["images"]))
        if size > 0.9 * limit:
            raise EngineUnsupportedError(
                f"generating: {len(packed['images'])} images have {size} bytes, more than the server's "
                f"max_body_bytes={limit} leaves room for. Start it with a larger --max-body-mib, or use smaller images."
            )
        return {name: packed["rows"], **({"images": packed["images"]} if packed["images"] else {})}

    # --- inside -----------------------------------------------------------------------------------------------------

    def _expected(self, version: int | None = None) -> dict[str, Any]:
        """What must serve, or has before; who has pushed nothing follows the server."""
        self._state.reject_withdrawn()  # it may have been lost between two attempts
        asked = self._state.asked
        return expected(version, asked.newest or (self.version, None), asked.before)

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Ask until there is an answer; a rejection is raised at once. `body`: bytes, or a function that gives JSON."""
        self._state.reject_closed()
        patience, cuts = Patience(self.url, self.wait_s), self.connection.cuts
        while True:
            pushed = self._state.asked
            try:
                return self._ask_once(method, path, body)
            except ServerTakenError:
                # A push of this client by another thread may have come before the request, which names what served.
                if path not in _SAMPLING or not self._state.has_pushed_since(pushed):
                    raise
                time.sleep(_PUSH_S)
            except RestartedError as found:
                with self._recovering:
                    if self._state.start == found.asked:  # or another thread has done it
                        self._recover(found)
            except AwayError as fault:
                if cuts != self.connection.cuts:
                    raise RolloutCancelledError("asking the server: cancelled, because the run ends.") from None
                patience.wait(fault, self.version)

    def _ask_once(self, method: str, path: str, body: Any) -> dict[str, Any]:
        with self._recovering:  # other threads wait until a server that was restarted is verified and pushed to
            known = self._state.start
        asked = body if isinstance(body, bytes) or body is None else body()
        answer = self.connection.ask(method, path, asked, known)
        reject_other_version(asked, answer.found, self._state.may_serve)
        self._state.answer(answer.start)
        # The answer to a rollout may be read later than that to a push which came after it.
        if not self._state.asked or path not in _SAMPLING:
            self.version = answer.version
        return answer.found

    def _recover(self, found: RestartedError) -> None:
        """The server was restarted: the same base? Then the newest adapter again."""
        is_in_doubt = self._state.is_in_doubt
        why = "is in doubt" if is_in_doubt else "was restarted"
        logger.warning("%s %s: its base is verified and the policy pushed again", self.url, why)
        try:
            self._state.begin_recovery(found.start)  # an interrupt in it must not leave a start that nobody verifies
            self.version = 0
            about = self._ask("GET", "/state")
            if is_in_doubt and about.get("takes_dense"):  # weights may have replaced the base
                self._ask("DELETE", "/adapter")
            if about["base"] != self.base or self.describe_base().digest != self.base:
                raise other_base(self.url, about["base"], self.base)
            self._about = about
            self.incarnation += 1
            if self._state.pushed is not None:
                self.load_packed(*self._state.pushed)
            elif self._dense or (is_in_doubt and about.get("takes_dense")):
                lost = f"weights version={self._dense}" if self._dense else "the newest weights"
                self._state.withdraw(f"{lost} were lost: the engine {why}")
            elif self._state.wants_base and (is_in_doubt or self.version != 0):
                self.drop_adapter()  # a push without an answer did arrive, or will; this one comes behind it
        except BaseException:
            self._state.doubt()  # the next request finds the restart again
            raise
        finally:
            self._state.end_recovery()


def expected(
    version: int | None, serves: tuple[int, str | None], before: tuple[int, str | None] | None
) -> dict[str, Any]:
    """What a request names: the version that must answer it, and its digest.

    Args:
        version: that is wanted; `None` is that which serves.
        serves, before: version and digest.

    Raises:
        VersionGoneError: it is neither.
    """
    if version is None:
        return {"version": serves[0], "digest": serves[1]}
    if version == serves[0]:  # which a push may make the one before, while this is asked
        return {"version": version, "digest": serves[1], "held": True}
    if before is None or before[0] != version:
        raise VersionGoneError(
            f"generating: version={version} is asked for, and is neither version={serves[0]}, which serves, nor the "
            "one before it. Generate again, with what serves now."
        )
    return {"version": version, "digest": before[1], "held": True}
