"""`ServerEngine`: a server of ours as an engine. HTTP only: this module and what it imports know nothing of vLLM."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import httpx

from qlora_rl import errors
from qlora_rl.adapter.store import CONFIG, WEIGHTS, pack_adapter
from qlora_rl.contracts import AdapterBundle, BaseFingerprint, EngineCapabilities, Rollout, SamplingSpec
from qlora_rl.engine.sampling import check_lengths
from qlora_rl.engine.upload import upload
from qlora_rl.errors import (
    AccessDeniedError,
    BaseMismatchError,
    ConfigConflictError,
    EngineBrokenError,
    EngineClosedError,
    EngineUnsupportedError,
    QloraRLError,
    SyncError,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PREFIX = "/qlora/v1"
START, SESSION, VERSION = "x-qlora-start", "x-qlora-session", "x-qlora-version"
KEY_VARIABLE = "QLORA_RL_API_KEY"
RESTARTED = 412
# Faults of a connection, after which nobody knows whether the server has done what was asked: all requests can be repeated.
_FAULTS = (httpx.TransportError,)
# What a proxy in front of a server answers while the server is away.
_AWAY = (502, 503, 504)


class ServerEngine:
    """A server started by `qlora-rl serve`, asked over HTTP.

    ::

        with ServerEngine("http://127.0.0.1:8000", api_key_file="key") as engine:
            rollout = engine.generate([[40, 41, 42]], temperature=0.0, max_tokens=8)

    When the server was started anew, its base is proven again (it must be the one that was there before) and the newest
    adapter is pushed again, before anything else is asked; `incarnation` grows.

    Args:
        url: such as "http://127.0.0.1:8000".
        api_key: by default what `api_key_file` holds, or the environment's QLORA_RL_API_KEY.
        api_key_file: a file that holds it.
        shared_dir: a directory of this machine that is the server's adapter directory, by tmpfs or a network mount. It is tried
            out; if it is another one, adapters travel in requests, and a log line says so.
        timeout_s: of one request, in seconds; a batch of long rollouts is one request.
        wait_s: how long to wait for a server that is away, in seconds, before giving up.
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
        timeout_s: float = 1800.0,
        wait_s: float = 120.0,
        transport: httpx.BaseTransport | None = None,
    ):
        self.url = url.rstrip("/")
        self.timeout_s, self.wait_s = timeout_s, wait_s
        self.session = uuid.uuid4().hex
        try:
            self._client = httpx.Client(
                base_url=self.url,
                headers={"authorization": f"Bearer {_find_key(api_key, api_key_file)}", SESSION: self.session},
                timeout=httpx.Timeout(timeout_s, connect=10.0),
                transport=transport,
                trust_env=False,  # neither proxies nor passwords of the environment: the key must not wander
            )
        except httpx.InvalidURL as error:
            raise ConfigConflictError(f"connecting to a server: url={url!r}: {error}. Use http://host:port.") from error
        self._is_closed = False
        self._start = ""
        self._incarnation = 1
        self._version = 0
        self._pushed: tuple[bytes, int] | None = None
        self._dense = 0  # the version of the full weights that were pushed last
        self._withdrawn = ""
        self._base = ""
        self._is_recovering = False
        self._about = self._ask("GET", "/state")
        self._base = self._about["base"]
        self.shared_dir = self._tried(Path(shared_dir).resolve()) if shared_dir is not None else None
        # Full weights go through the server's own directory where this machine has it, whether it was named or not.
        near = Path(self._about["adapter_dir"])
        is_here = self._about.get("takes_dense", False) and os.access(near, os.W_OK)
        self._near = self.shared_dir or (self._tried(near.resolve(), quietly=True) if is_here else None)

    # --- what people ask it -----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The adapter version that the server serves, as it said last."""
        return self._version

    @property
    def incarnation(self) -> int:
        """Grows when the server was started anew."""
        return self._incarnation

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
            dense_way="directory" if self.shared_dir or self._near else "http",
        )

    def describe_base(self) -> BaseFingerprint:
        """The base as the server's vLLM holds it, read from its weights."""
        return BaseFingerprint.from_dict(self._ask("GET", "/base"))

    def repair_base(self) -> dict[str, float]:
        """Write the exact scales back (the server has done it when it started)."""
        return self._ask("POST", "/repair")

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingSpec | None = None, **fields: Any
    ) -> Rollout:
        """One completion for each of B prompts (token ids), all by one version.

        Raises:
            PromptTooLongError: names every prompt that leaves no room for a completion; nothing was generated.
            ServerTakenError: somebody else has pushed another adapter.
            EngineBrokenError: the server stayed away longer than `wait_s`.
        """
        if sampling is not None and fields:
            raise TypeError("generate: give either sampling= or its fields by name, not both.")
        self._refuse_withdrawn()
        ids = _as_ids(prompts)
        check_lengths(ids, self._about["max_model_length"])
        started = time.perf_counter()
        spec = dataclasses.asdict(sampling or SamplingSpec(**fields))
        found = self._ask("POST", "/generate", lambda: self._asked(prompts=ids, sampling=spec))
        seconds = time.perf_counter() - started
        return Rollout(found["completion_ids"], found["logprobs"], found["version"], seconds)

    def score(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[float]]:
        """Natural logs of the probabilities of every token but the first; with `bare` under the base alone."""
        if not bare:
            self._refuse_withdrawn()
        ids = _as_ids(sequences)
        check_lengths(ids, self._about["max_model_length"])
        body = {"sequences": ids, "bare": bare}
        return self._ask("POST", "/score", lambda: body if bare else self._asked(**body))["logprobs"]

    def held_adapter(self, rank: int) -> Mapping[str, str]:
        """Digests of what the server multiplies with; empty for the bare base."""
        return self._ask("GET", f"/held?rank={rank}")["held"]

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
            SyncError: it was refused; the old version goes on serving.
            ServerTakenError: another trainer holds the server.
        """
        limit = self._about["max_body_bytes"]
        if len(blob) > limit:
            raise SyncError(
                f"pushing adapter version={version}: {len(blob)} bytes > max_body_bytes={limit} of the server. Start it with a larger "
                "--max-body-mib or --max-lora-rank."
            )
        digest = hashlib.sha256(blob).hexdigest()
        found = self._ask("PUT", f"/adapter?version={version}&digest={digest}", blob)
        if found["digest"] != digest or self._version != version:
            raise SyncError(
                f"pushing adapter version={version}: the server answers with version={self._version}. Push again."
            )
        self._pushed, self._withdrawn = (blob, version), ""

    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve a PEFT directory: by its name where it lies in the shared directory, else by its bytes."""
        directory = Path(directory)
        blob = pack_adapter(_read_directory(directory))
        if self.shared_dir is None or not directory.resolve().is_relative_to(self.shared_dir):
            self.load_packed(blob, version)
            return
        path = str(directory.resolve().relative_to(self.shared_dir))
        self._ask("POST", "/adapter", lambda: {"path": path, "version": version})
        self._pushed, self._withdrawn = (blob, version), ""

    @property
    def holds_dense(self) -> bool:
        """The full weights that were pushed last still lie in the server and may serve."""
        return bool(self._dense) and not self._withdrawn

    def load_dense(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Serve these weights instead of the base's, as `version`, from the next request on.

        Args:
            weights: every weight of the model, by transformers' name; read once, one after the other.

        Returns:
            Bytes.

        Raises:
            EngineUnsupportedError: the server holds a 4-bit base, or serves adapters. ServerTakenError: another trainer pushes to it.
            SyncError: not all arrived; the old version goes on serving. Or vLLM broke off while it loaded them: nothing is served.
        """
        nbytes = upload(self._ask, weights, version, max_body_bytes=self._about["max_body_bytes"], directory=self._near)
        if self._version != version:
            raise SyncError(
                f"pushing weights version={version}: the server answers with version={self._version}. Push again."
            )
        self._pushed, self._dense, self._withdrawn = None, version, ""
        return nbytes

    def withdraw_dense(self, reason: str) -> None:
        """Have the server serve nothing until the next `load_dense`."""
        self._withdrawn = reason
        try:
            self._ask("DELETE", f"/weights?{urlencode({'reason': reason})}")
        except QloraRLError as error:  # what has led here matters more
            logger.warning("the server at %s could not be told to stop serving: %s", self.url, error)

    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0; read anew from its directory where full weights lie over it."""
        self._pushed, self._dense, self._withdrawn = None, 0, ""
        self._ask("DELETE", "/adapter")

    def withdraw_adapter(self, reason: str) -> None:
        """Ask for nothing more until the next push: what the server serves was not proven."""
        self._pushed, self._withdrawn = None, reason

    def sleep(self) -> None:
        """Nothing: a server's memory is its own."""

    def wake(self) -> None:
        """See whether the server is still the one that was proven; if not, prove it and push again."""
        self._ask("GET", "/state")

    def close(self) -> None:
        """Give the server free for another trainer and close the connections; the server goes on. Harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
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

    # --- inside -----------------------------------------------------------------------------------------------------

    def _asked(self, **body: Any) -> dict[str, Any]:
        self._refuse_withdrawn()  # it may have been lost between two attempts
        return {**body, "version": self._version}

    def _refuse_withdrawn(self) -> None:
        if self._withdrawn:
            raise EngineBrokenError(
                f"generating: {self._withdrawn}. Push again, or call drop_adapter() to go on with the bare base."
            )

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Ask until there is an answer; a refusal is raised at once. `body`: bytes, or a function that gives JSON."""
        if self._is_closed:
            raise EngineClosedError("using the engine: it was closed. Make a new ServerEngine.")
        end, pause = time.monotonic() + self.wait_s, 0.1
        while True:
            try:
                return self._ask_once(method, path, body)
            except _RestartedError as found:
                self._recover(found)
            except _AwayError as fault:
                if time.monotonic() + pause > end:
                    raise EngineBrokenError(
                        f"asking the server at {self.url}: {fault}. It stayed away for wait_s={self.wait_s:.0f} s. Start it again on the "
                        "same base, or raise wait_s; version "
                        f"{self._version} is pushed again by itself."
                    ) from fault.__cause__
                logger.warning(
                    "the server at %s is away (%s); trying again for %.0f s", self.url, fault, end - time.monotonic()
                )
                time.sleep(pause)
                pause = min(5.0, 2 * pause)

    def _ask_once(self, method: str, path: str, body: Any) -> dict[str, Any]:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body()).encode()
        try:
            answer = self._client.request(
                method, PREFIX + path, content=content, headers={START: self._start} if self._start else {}
            )
        except _FAULTS as error:
            raise _AwayError(str(error) or type(error).__name__) from error
        start = answer.headers.get(START, "")
        if answer.status_code == RESTARTED:
            raise _RestartedError(start)
        if answer.status_code != 200:
            raise _refusal(answer, self.url)
        try:
            found = answer.json()
        except ValueError as error:
            raise _stranger(self.url) from error
        if not start or not isinstance(found, dict):
            raise _stranger(self.url)
        self._start = self._start or start
        self._version = int(answer.headers[VERSION])
        return found

    def _tried(self, directory: Path, *, quietly: bool = False) -> Path | None:
        """The directory, if the server sees there what we write."""
        content = uuid.uuid4().hex.encode()
        probe = directory / f".qlora-rl-probe-{uuid.uuid4().hex}"
        try:
            probe.write_bytes(content)
        except OSError as error:
            raise ConfigConflictError(f"sharing a directory with a server: {directory}: {error.strerror}.") from error
        try:
            seen = self._ask("POST", "/probe", lambda: {"path": probe.name})["digest"]
        finally:
            probe.unlink(missing_ok=True)
        if seen == hashlib.sha256(content).hexdigest():
            return directory
        logger.log(
            logging.DEBUG if quietly else logging.WARNING,
            "%s is not the adapter directory of the server at %s (%s): adapters travel in requests",
            directory,
            self.url,
            self._about["adapter_dir"],
        )
        return None

    def _recover(self, found: _RestartedError) -> None:
        """The server was started anew: the same base? Then the newest adapter again."""
        logger.warning("the server at %s was started anew: its base is proven and the adapter pushed again", self.url)
        if self._is_recovering:
            raise EngineBrokenError(
                f"asking the server at {self.url}: it was started anew twice in a row. Look into its log."
            )
        self._is_recovering = True
        try:
            self._start, self._version = found.start, 0
            about = self._ask("GET", "/state")
            if about["base"] != self._base or self.describe_base().digest != self._base:
                raise BaseMismatchError(
                    f"asking the server at {self.url}: it was started anew on another base: digest={about['base'][:16]} != "
                    f"digest={self._base[:16]} of the one before. Start it on the base directory that the trainer uses."
                )
            self._about = about
            self._incarnation += 1
            if self._pushed is not None:
                self.load_packed(*self._pushed)
            elif self._dense:
                self._withdrawn = f"weights version={self._dense} were lost when the server was started anew"
        except BaseException:
            self._start = "unproven"  # the next request finds the restart again
            raise
        finally:
            self._is_recovering = False


class _AwayError(Exception):
    """Nobody answers, or a proxy says so."""


class _RestartedError(Exception):
    """Somebody answers who was started later."""

    def __init__(self, start: str):
        super().__init__(start)
        self.start = start


def _refusal(answer: httpx.Response, url: str) -> Exception:
    """The error that a status stands for."""
    status = answer.status_code
    try:
        error = answer.json()["error"]
        kind, message = getattr(errors, str(error.get("kind")), None), str(error["message"])
        reasons = [str(reason) for reason in error.get("reasons", ())]
    except (ValueError, KeyError, TypeError, AttributeError):
        kind, message, reasons = None, answer.text.strip()[:200], []
    if isinstance(kind, type) and issubclass(kind, QloraRLError):
        if kind is AccessDeniedError and status == 401:
            message = (
                f"asking the server at {url}: the key is missing or wrong. Pass api_key_file= (or set {KEY_VARIABLE})."
            )
        return kind(message, reasons=reasons)
    if status in _AWAY:
        return _AwayError(f"status={status} ({message})")
    if status in (401, 403):
        return AccessDeniedError(f"asking the server at {url}: status={status} ({message}). Is the key right?")
    if status == 404:
        return _stranger(url)
    return EngineBrokenError(f"asking the server at {url}: status={status} ({message}). Its log says more.")


def _stranger(url: str) -> EngineUnsupportedError:
    return EngineUnsupportedError(
        f"asking the server at {url}: what answers is no server of qlora_rl. Start it with `qlora-rl serve BASE`, and give its own "
        "URL, without a path."
    )


def _find_key(key: str | None, file: str | os.PathLike[str] | None) -> str:
    if key is not None and file is not None:
        raise ConfigConflictError("connecting to a server: give either api_key= or api_key_file=, not both.")
    if file is not None:
        try:
            key = Path(file).read_text()
        except OSError as error:
            raise AccessDeniedError(f"connecting to a server: reading the key: {file}: {error.strerror}.") from error
    key = (key or os.environ.get(KEY_VARIABLE) or "").strip()
    if not key or not key.isascii():
        raise AccessDeniedError(
            f"connecting to a server: no key. Pass api_key_file= (the server says where it lies), api_key=, or set {KEY_VARIABLE}."
        )
    return key


def _as_ids(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    if any(isinstance(row, str) for row in rows):
        raise ConfigConflictError(
            "generating: a prompt is a string; a server takes token ids. Encode it with the base's tokenizer."
        )
    return [[int(token) for token in row] for row in rows]


def _read_directory(directory: Path) -> AdapterBundle:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return AdapterBundle(load_file(directory / WEIGHTS), json.loads((directory / CONFIG).read_text()))
    except (OSError, ValueError, SafetensorError) as error:
        raise SyncError(f"reading the adapter in {directory}: {error}. Write it again.") from error
