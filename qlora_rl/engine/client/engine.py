"""`ServerEngine`: a server of ours as an engine. HTTP only: this module and what it imports know nothing of vLLM."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import httpx

from qlora_rl.adapter.store import pack_adapter, read_directory
from qlora_rl.contracts import BaseFingerprint, EngineCapabilities, Rollout, SamplingSpec
from qlora_rl.engine.client.channel_push import ChannelPush
from qlora_rl.engine.client.http_errors import (
    START,
    AwayError,
    Patience,
    RestartedError,
    content_of,
    not_taken,
    other_base,
    reject_other_version,
    says_lost,
)
from qlora_rl.engine.client.requests import (
    Lines,
    check_url,
    expected,
    find_key,
    near_directory,
    shared_with,
)
from qlora_rl.engine.client.state import Phase, ServerState
from qlora_rl.engine.client.upload import ServerPush
from qlora_rl.engine.fleet.engine import Fleet
from qlora_rl.engine.images import Prompt, as_prompts, pack, token_ids
from qlora_rl.engine.sampling import check_lengths
from qlora_rl.engine.weight_channels import check_way, open_carrier
from qlora_rl.errors import (
    ConfigConflictError,
    EngineBrokenError,
    EngineUnsupportedError,
    QloraRLError,
    RolloutCancelledError,
    SyncError,
)

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

PREFIX = "/qlora/v1"
SESSION, VERSION = "x-qlora-session", "x-qlora-version"
# Faults of a connection, after which nobody knows whether the server has done what was asked: all requests can be
# repeated.
_FAULTS = (httpx.TransportError,)


class ServerEngine:
    """A server started by `qlora-rl serve`, asked over HTTP.

    ::

        with ServerEngine("http://127.0.0.1:8000", api_key_file="key") as engine:
            rollout = engine.generate([[40, 41, 42]], temperature=0.0, max_tokens=8)

    When the server was restarted, its base is verified again (it must be the one that was there before) and the newest
    adapter is pushed again, before anything else is asked; `incarnation` grows.

    `connect` also takes several URLs.

    Args:
        url: such as "http://127.0.0.1:8000".
        api_key: by default what `api_key_file` holds, or the environment's QLORA_RL_API_KEY.
        api_key_file: a file that holds it.
        shared_dir: a directory of this machine that is the server's adapter directory, by tmpfs or a network mount. It
            is tried out; if it is another one, adapters are sent in requests, and a log line says so.
        session: who this is; what was killed comes back under the name that it had, and is not taken for another
            trainer.
        timeout_s: of one request, in seconds; a batch of long rollouts is one request.
        wait_s: how long to wait for a server that is away, in seconds, before giving up.
        weights_by: how full weights are sent: "http" (or the server's directory, if this machine sees it); into the
            worker's memory by "gloo" or "nccl". "nccl" has not been run.
        transport: of httpx, for tests.

    Raises:
        AccessDeniedError: no key, or a wrong one.
        EngineBrokenError: nobody answers within `wait_s`.
        EngineUnsupportedError: what answers is no server of ours.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        api_key_file: str | os.PathLike[str] | None = None,
        shared_dir: str | os.PathLike[str] | None = None,
        session: str | None = None,
        timeout_s: float = 1800.0,
        wait_s: float = 120.0,
        weights_by: str = "http",
        transport: httpx.BaseTransport | None = None,
    ):
        self.url, self.weights_by = check_url(url), weights_by
        if weights_by != "http":
            check_way(weights_by)
        self.timeout_s, self.wait_s = timeout_s, wait_s
        self.session = session or uuid.uuid4().hex
        self._lines = Lines()
        self._client = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {find_key(api_key, api_key_file)}", SESSION: self.session},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            transport=transport,
            trust_env=False,  # neither proxies nor passwords of the environment: the key must not wander
            event_hooks={"request": [self._lines.watch]},
        )
        self._state, self._recovering = ServerState(self.url), threading.RLock()
        self._incarnation, self._version = 1, 0
        self._dense = 0  # the version of the full weights that were pushed last
        self._base = ""
        self._about = self._ask("GET", "/state")
        self._base, self.found = self._about["base"], (self._version, self._about.get("digest", ""))  # what served
        self.shared_dir = self._tried(Path(shared_dir).resolve()) if shared_dir is not None else None
        # Full weights go through the server's own directory where this machine has it, whether it was named or not.
        self._near = self.shared_dir or self._tried(near_directory(self._about), quietly=True)

    # --- what people ask it -----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The adapter version that the server serves, as it said last."""
        return self._version

    @property
    def incarnation(self) -> int:
        """Grows when the server was restarted."""
        return self._incarnation

    @property
    def base(self) -> str:
        """Digest of the base that was there at first, and must be after every restart."""
        return self._base

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
        takes_dense = self._about.get("takes_dense", False)  # full weights have replaced the bare base
        try:
            body = {"sequences": [[0, 0]], "bare": not takes_dense}
            answer = self._client.post(f"{PREFIX}/score", json=body, timeout=timeout_s)
        except _FAULTS:
            return False
        return answer.status_code == 200 or (takes_dense and says_lost(answer))

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
            takes_bytes=self.shared_dir is None,
            dense_way="directory" if self.weights_by == "http" and (self.shared_dir or self._near) else self.weights_by,
            holds_two=self._about.get("holds_two", False),
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
        if sampling is not None and fields:
            raise TypeError("generate: give either sampling= or its fields by name, not both.")
        self._state.reject_withdrawn()
        asked = self._packed("prompts", prompts)
        started = time.perf_counter()
        asked["sampling"] = dataclasses.asdict(sampling or SamplingSpec(**fields))
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

    def note_canary(self, difference: float) -> None:
        """Show in the server's metrics what the newest scored check has found."""
        with contextlib.suppress(*_FAULTS, ValueError):  # NaN is no JSON
            body = {"difference": difference}
            self._client.post(f"{PREFIX}/canary", json=body, headers={START: self._state.start}, timeout=5.0)

    def cancel(self) -> None:
        """Have the calls of other threads end with `RolloutCancelledError`; the server lets go of what they wanted."""
        self._lines.cut()

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
        found = self._change("PUT", f"/adapter?version={version}&digest={digest}", blob)
        if found["digest"] != digest or self._version != version:
            raise not_taken("adapter", version, self._version)
        self._state.serve(version, digest, (blob, version))

    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve a PEFT directory: by its name where it is in the shared directory, else by its bytes."""
        directory = Path(directory)
        bundle, digest = read_directory(directory)
        blob = pack_adapter(bundle)
        if self.shared_dir is None or not directory.resolve().is_relative_to(self.shared_dir):
            self.load_packed(blob, version)
            return
        path = str(directory.resolve().relative_to(self.shared_dir))
        self._change("POST", "/adapter", lambda: {"path": path, "version": version, "digest": digest})
        self._state.serve(version, digest, (blob, version))

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
        if self.weights_by == "http":
            return self.begin_dense(version).upload(weights, version)
        carrier = open_carrier(self.weights_by, httpx.URL(self.url).host)
        return ChannelPush(self._ask, version, carrier=carrier, commit=self._commit(version)).upload(weights, version)

    def begin_dense(self, version: int) -> ServerPush:
        """Open a push of full weights, which are served as `version` from its `commit` on; `load_dense` does all of
        it."""
        limit, commit = self._about["max_body_bytes"], self._commit(version)
        return ServerPush(self._ask, version, max_body_bytes=limit, directory=self._near, commit=commit)

    def _commit(self, version: int) -> Callable[[str], None]:
        def commit(push: str) -> None:
            self._change("POST", f"/weights/commit?push={push}")
            if self._version != version:
                raise not_taken("weights", version, self._version)
            self._dense = version
            self._state.serve(version, push)

        return commit

    def withdraw_dense(self, reason: str) -> None:
        """Have the server serve nothing until the next `load_dense`."""
        self._state.withdraw(reason)
        try:
            self._ask("DELETE", f"/weights?{urlencode({'reason': reason})}")
        except QloraRLError as error:  # what has led here matters more
            logger.warning("the server at %s could not be told to stop serving: %s", self.url, error)

    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0; read again from its directory where full weights replaced it."""
        self._state.forget()  # should the server have been restarted, it has none already
        self._dense = 0
        self._change("DELETE", "/adapter")
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
        if self._state.phase is Phase.CLOSED:
            return
        self._state.close()
        try:
            self._client.request("DELETE", f"{PREFIX}/lease", timeout=5.0)
        except httpx.HTTPError as error:
            logger.debug("the server could not be given free: %s", error)
        self._client.close()

    def __enter__(self) -> ServerEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _packed(self, name: str, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Prompts for a body, which are checked before anything is sent."""
        asked, limit = as_prompts(prompts), self._about["max_body_bytes"]
        check_lengths([token_ids(each) for each in asked], self._about["max_model_length"])
        packed = pack(asked)
        if packed["images"] and not self._about.get("most_images"):
            raise EngineUnsupportedError(
                "generating: the prompts hold images, and the server's model takes none. Leave them out."
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
        return expected(version, asked.newest or (self._version, None), asked.before)

    def _change(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Ask for another version."""
        with self._state.changing():
            return self._ask(method, path, body)

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Ask until there is an answer; a rejection is raised at once. `body`: bytes, or a function that gives JSON."""
        self._state.reject_closed()
        patience, cuts = Patience(self.url, self.wait_s), self._lines.cuts
        while True:
            try:
                return self._ask_once(method, path, body)
            except RestartedError as found:
                with self._recovering:
                    if self._state.start == found.asked:  # or another thread has done it
                        self._recover(found)
            except AwayError as fault:
                if cuts != self._lines.cuts:
                    raise RolloutCancelledError("asking the server: cancelled, because the run ends.") from None
                patience.wait(fault, self._version)

    def _ask_once(self, method: str, path: str, body: Any) -> dict[str, Any]:
        with self._recovering:  # other threads wait until a server that was restarted is verified and pushed to
            known = self._state.start
        asked = body if isinstance(body, bytes) or body is None else body()
        content = json.dumps(asked).encode() if isinstance(asked, dict) else asked
        marks = {START: known} if known else {}
        try:
            answer = self._client.request(method, PREFIX + path, content=content, headers=marks)
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:  # its text may hold the key
            text = f"asking the server at {self.url}: {type(error).__name__}: no such request can be sent."
            raise EngineBrokenError(text) from None
        except _FAULTS as error:
            raise AwayError(str(error) or type(error).__name__) from error
        found = content_of(answer, self.url, known)
        reject_other_version(asked, found)
        self._state.answer(answer.headers[START])
        # The answer to a rollout may be read later than that to a push which came after it.
        if not self._state.asked or path not in ("/generate", "/score"):
            self._version = int(answer.headers[VERSION])
        return found

    def _tried(self, directory: Path | None, *, quietly: bool = False) -> Path | None:
        """The directory, if the server sees there what we write."""
        return directory and shared_with(self.url, directory, self._ask, self._about, quietly=quietly)

    def _recover(self, found: RestartedError) -> None:
        """The server was restarted: the same base? Then the newest adapter again."""
        is_in_doubt = self._state.is_in_doubt
        why = "is in doubt" if is_in_doubt else "was restarted"
        logger.warning("the server at %s %s: its base is verified and the policy pushed again", self.url, why)
        try:
            self._state.begin_recovery(found.start)  # an interrupt in it must not leave a start that nobody verifies
            self._version = 0
            about = self._ask("GET", "/state")
            if is_in_doubt and about.get("takes_dense"):  # weights may have replaced the base
                self._ask("DELETE", "/adapter")
            if about["base"] != self._base or self.describe_base().digest != self._base:
                raise other_base(self.url, about["base"], self._base)
            self._about = about
            self._incarnation += 1
            if self._near is not None:  # a directory that nobody has named is another one at each start
                self._near = self.shared_dir or self._tried(near_directory(about), quietly=True)
            if self._state.pushed is not None:
                self.load_packed(*self._state.pushed)
            elif self._dense or (is_in_doubt and about.get("takes_dense")):
                lost = f"weights version={self._dense}" if self._dense else "the newest weights"
                self._state.withdraw(f"{lost} were lost: the server {why}")
            elif self._state.asked.newest == (0, "") and (is_in_doubt or self._version != 0):
                self.drop_adapter()  # a push without an answer did arrive, or will; this one comes behind it
        except BaseException:
            self._state.doubt()  # the next request finds the restart again
            raise
        finally:
            self._state.end_recovery()


def connect(url: str | Sequence[str], *, wait_s: float = 120.0, **options: Any) -> ServerEngine | Fleet:
    """The server at `url` as an engine, or those at several as one.

    ::

        with connect(["http://a:8000", "http://b:8000"], api_key_file="key") as engine:
            rollout = engine.generate([[40, 41, 42]] * 8, max_tokens=16, seed=0)

    Args:
        url: such as "http://127.0.0.1:8000"; several in a list, or in one text, "http://a:8000,http://b:8000".
        wait_s: how long to wait for each server at first, and for one of them when none is left, in seconds.
        options: of `ServerEngine`, the same for all: one key, one `shared_dir`.

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
    if (way := options.get("weights_by", "http")) != "http":
        raise ConfigConflictError(
            f"connecting to servers: weights_by={way!r} with {len(urls)} URLs: what is kept for a server that comes "
            "back are files. Use 'http'."
        )
    connected: list[ServerEngine] = []
    try:
        for each in urls:
            connected.append(ServerEngine(each, wait_s=wait_s, **options))
    except BaseException:
        for engine in connected:
            engine.close()
        raise
    return Fleet(connected, wait_s=wait_s)
