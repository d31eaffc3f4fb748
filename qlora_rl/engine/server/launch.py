"""`serve`: vLLM's OpenAI server on a prepared base, behind a gate; `start_server`: the same in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from qlora_rl.adapter.export import read_adapter
from qlora_rl.adapter.store import AdapterStore, default_root, pack_adapter
from qlora_rl.base.checkpoint import open_base
from qlora_rl.base.fingerprint import compare, recorded_fingerprint
from qlora_rl.base.writer import write_ends, write_template
from qlora_rl.contracts import AdapterBundle, ClosedAtEnd, rank_class
from qlora_rl.engine import compat
from qlora_rl.engine.cleanup import end_with
from qlora_rl.engine.client import ServerEngine
from qlora_rl.engine.linears.base_compute import BaseCompute, check_wish
from qlora_rl.engine.options import StartOptions, start_options
from qlora_rl.engine.server.auth import Gate, Visits
from qlora_rl.engine.signals import interrupts_for_sure, no_child_left
from qlora_rl.errors import BaseMismatchError, ConfigConflictError, EngineBrokenError, EngineUnsupportedError
from qlora_rl.locks import hold, sweep
from qlora_rl.stages import begin

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LEASE_S = 600.0
_WITH_PARENT = "QLORA_RL_END_WITH_PARENT"
# What `start_server` has a new process do.
_SERVE = """
import json, sys
from qlora_rl.engine.server.launch import serve
serve(**json.loads(sys.argv[1]))
"""
_MIB = 2**20
# Routes of vLLM that answer 500 to bad bodies: two that start and end its engines, and another name of those under /v1.
_CLOSED = ("/scale_elastic_ep", "/is_scaling_elastic_ep", "/invocations")
# Of one request with images: a rollout of a hundred photographs.
_IMAGES_MIB = 512.0


class PolicyNames(dict[str, Any]):
    """vLLM's table of adapters by model name, with one entry for the policy under the name that people ask for.

    Each adapter has a LoRARequest of its own name, because vLLM takes two requests of one name for the same; and
    `/v1/models` lists that name and the path.
    """

    def values(self) -> Any:
        """What `/v1/models` lists."""
        return [SimpleNamespace(lora_name=name, path="", base_model_name=None) for name in self]


def serve(
    base: str | os.PathLike[str],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key_file: str | os.PathLike[str] | None = None,
    adapter_dir: str | os.PathLike[str] | None = None,
    max_body_mib: float | None = None,
    ready_file: str | os.PathLike[str] | None = None,
    base_compute: str = "nf4",
    adapter: str | os.PathLike[str] | None = None,
    ends: Sequence[int] = (),
    chat_template: str | Mapping[str, str] | None = None,
    vllm_options: Sequence[str] = (),
    **options: Any,
) -> None:
    """Serve a prepared base until SIGTERM or Ctrl-C; no child is left behind.

    Args:
        base: directory made by `prepare_base` or `bake_base`.
        host: to listen on; another than loopback needs an `api_key_file` that exists.
        port: to listen on; 0 takes a free one.
        api_key_file: holds the key. Without it, or where there is no such file, a key is made and written with mode
            600.
        adapter_dir: where pushed adapters and parts of full weights are written; made with mode 700. By default one of
            its own on tmpfs.
        max_body_mib: largest request; by default what the largest adapter needs.
        ready_file: is written when the server answers: JSON with url, key_file, pid, base, limits.
        base_compute: what linears multiply with; see `LocalEngine`.
        adapter: PEFT directory of a LoRA on this base, served as model "policy" from the start, as version 1; the base
            must then be the one that was written.
        ends: tokens that end a completion, besides those of the base: a run's tokenizer may have had another EOS.
        chat_template: of messages, in place of that of the base; as `write_template` takes it.
        vllm_options: further options of vLLM's own command line.
        options: of the engine, as `LocalEngine` takes them: max_lora_rank, max_model_length, max_num_seqs, ...

    Raises:
        ConfigConflictError: arguments that would leave the server open, or contradict each other.
        EngineUnsupportedError, MissingDependencyError, BaseIncompleteError: as with `LocalEngine`.
        AdapterRejectedError: the adapter is of another base, or more than LoRA.
        BaseMismatchError: with an adapter, vLLM holds another base.
        KeyboardInterrupt: it was interrupted before it answered.
    """
    if (parent := os.environ.pop(_WITH_PARENT, None)) and not end_with(int(parent), signal.SIGTERM):
        sys.exit(1)  # it has ended before
    compat.require_server()
    check_wish(base_compute)
    bundle = None if adapter is None else _with_room(read_adapter(adapter, base), adapter, options)
    key_path = Path(api_key_file) if api_key_file is not None else None
    check_host(host, key_path)
    _prepare_environment()
    with contextlib.ExitStack() as stack:
        sweep(default_root(), "qlora-rl-serving-*")  # all of this name are locked while they live
        own = Path(tempfile.mkdtemp(prefix="qlora-rl-serving-", dir=default_root()))  # mode 700
        lock = hold(own)
        stack.callback(os.close, lock)
        stack.callback(shutil.rmtree, own, ignore_errors=True)
        server: _Server | None = None
        is_starting = lambda: server is None or not server.is_ready  # noqa: E731
        stack.enter_context(interrupts_for_sure(is_starting, lambda: shutil.rmtree(own, ignore_errors=True)))
        stack.enter_context(no_child_left())
        begin(f"starting vLLM on {base}")
        start = start_options(base, **{"disable_log_stats": False, **options})
        _check_takes(start)
        key_path, key = read_or_make_key(key_path or own / "api-key")
        store = AdapterStore(check_adapter_dir(own / "adapters" if adapter_dir is None else Path(adapter_dir)))
        stack.callback(store.close)
        sock = bind(host, port)
        stack.callback(sock.close)
        url = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
        vllm_options = [*_options_of_run(base, ends, chat_template, own), *vllm_options]
        own_arguments = start.arguments | (compat.executor_of_server(start.ranks) if start.is_cpu else {})
        arguments = compat.server_arguments(own_arguments, host, sock.getsockname()[1], vllm_options, start.dtypes)
        server = _Server(base, start, store, key, key_path, url, max_body_mib, ready_file, base_compute, bundle)
        stack.enter_context(compat.room_for(start.ranks))
        try:
            asyncio.run(compat.run_openai_server(arguments, server.prepare, sock))
        except (KeyboardInterrupt, asyncio.CancelledError):
            if not server.is_ready:
                raise KeyboardInterrupt from None


def _options_of_run(
    base: str | os.PathLike[str], ends: Sequence[int], chat_template: str | Mapping[str, str] | None, directory: Path
) -> list[str]:
    """vLLM's options for what a run has of its own; the files that they name are written into the directory."""
    found = ["--generation-config", str(directory)] if write_ends(Path(base), ends, directory) else []
    if chat_template is not None:
        found += ["--chat-template", str(write_template(chat_template, directory))]
    return found


def _with_room(bundle: AdapterBundle, adapter: object, options: dict[str, Any]) -> AdapterBundle:
    """The adapter, for whose rank the options leave room."""
    options.setdefault("max_lora_rank", max(16, rank_class(bundle.rank)))
    if options["max_lora_rank"] < bundle.rank:
        raise ConfigConflictError(
            f"starting the server: max_lora_rank={options['max_lora_rank']} < {bundle.rank}, the rank of "
            f"{adapter}. Leave it out."
        )
    return bundle


def check_host(host: str, key_path: Path | None) -> None:
    """Raise ConfigConflictError where a server would be open to other machines without a key that somebody chose."""
    if host not in LOOPBACK and (key_path is None or not key_path.is_file()):
        raise ConfigConflictError(
            f"starting the server: host={host!r} can be reached from other machines, and no key was given. Write one "
            "into a file (mode 600) and pass it as --api-key-file, or listen on 127.0.0.1."
        )


def _prepare_environment() -> None:
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        os.environ.pop(name, None)  # endpoints that our routes make unnecessary
    for name in ("VLLM_API_KEY", "VLLM_LORA_RESOLVER_CACHE_DIR"):
        os.environ.pop(name, None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # where vLLM's own processes meet: not for others


def _check_takes(start: StartOptions) -> None:
    if not start.max_lora_rank and (start.is_4bit or start.ranks > 1):
        held = "on a 4-bit base" if start.is_4bit else f"with tensor_parallel_size={start.ranks}"
        raise ConfigConflictError(
            f"starting the server: max_lora_rank=0 {held}: neither an adapter nor full weights can be pushed. Use "
            "at least 1, or serve the baked base (bake_base)."
        )


class _Server:
    """What is put into vLLM's app before the first request."""

    def __init__(
        self,
        base: str | os.PathLike[str],
        start: StartOptions,
        store: AdapterStore,
        key: str,
        key_path: Path,
        url: str,
        max_body_mib: float | None,
        ready_file: str | os.PathLike[str] | None,
        base_compute: str,
        bundle: AdapterBundle | None,
    ):
        self.bundle = bundle
        self.base, self.start, self.store, self.key, self.key_path, self.url = base, start, store, key, key_path, url
        self.max_body_mib, self.ready_file, self.base_compute = max_body_mib, ready_file, base_compute
        self.is_ready = False
        self._tasks: list[asyncio.Task[None]] = []

    async def prepare(self, app: Any, engine: Any) -> None:
        """Repair the scales, ask for the base, add our routes, and close the gate around everything."""
        from qlora_rl.engine.server.routes import PREFIX, Api, TrainerLock
        from qlora_rl.engine.server.served_adapter import ServedPolicy
        from qlora_rl.engine.server.served_weights import ServedWeights, Shutter
        from qlora_rl.engine.worker.parallel import adapter_sizes, described

        await engine.collective_rpc("qlora_end_with_server", args=(os.getpid(),))
        ranks = self.start.ranks
        if ranks > 1:
            await engine.collective_rpc("qlora_begin_as_rank")
        # A process that was given `FirstThing` does so already; ranks, and whoever sets --additional-config, were not.
        lifts = await engine.collective_rpc("qlora_multiply_in_float32", args=(self.start.dtype_names,))
        repaired = (await engine.collective_rpc("qlora_repair_scales"))[0] if self.start.is_4bit else {}
        done = (await engine.collective_rpc("qlora_multiply_directly", args=(self.base_compute,)))[0]
        compute = BaseCompute(**done)
        logger.info("%s", compute)
        found = described(await engine.collective_rpc("qlora_describe_base"), self.start.base)
        rank = self.start.max_lora_rank
        sizes = adapter_sizes(await engine.collective_rpc("qlora_adapter_sizes"), found) if rank else {}
        weights = ServedWeights(
            engine, self.store.root.parent, found.leaves if self.start.takes_dense and not rank else {}
        )
        limit = self.max_body_mib
        if limit is None:
            limit = max(16.0, 1.1 * 4 * rank * sum(i + o for i, o in sizes.values()) / _MIB + 1)
            limit = max(limit, _IMAGES_MIB if self.start.most_images else 0)
        max_body = int(limit * _MIB)
        visits, models = Visits(), app.state.openai_serving_models
        models.lora_requests = names = PolicyNames(models.lora_requests)
        length = self.start.max_model_length
        policy = ServedPolicy(
            engine, names, self.store, sizes, rank, length, visits, weights, self.start.base, self.start.image_tokens
        )
        if self.bundle is not None:
            if (diff := compare(recorded_fingerprint(self.start.base), found)).entries:
                raise BaseMismatchError(
                    f"serving {self.base}: vLLM holds another base than was written: {diff.entries[0]}. Models of "
                    "this type are not supported."
                )
            blob = pack_adapter(self.bundle)
            await policy.push(blob, 1, hashlib.sha256(blob).hexdigest())
        about = {
            "name": f"vllm {self.start.vllm_version} ({'cpu' if self.start.is_cpu else 'gpu'}) at {self.url}",
            "base": found.digest,
            "repaired": len(repaired),
            "max_lora_rank": rank,
            "takes_dense": weights.takes_any,
            "most_images": self.start.most_images,
            "holds_two": bool(rank),
            "adapts_experts": self.start.adapts_experts,
            "max_model_length": length,
            "max_body_bytes": max_body,
            "adapter_dtype": str(engine.model_config.dtype).removeprefix("torch."),
            "adapter_dir": str(self.store.root.parent),
            "base_compute": compute.base,
            "multiplies_in_float32": all(lifts),
        }
        app.router.routes = [route for route in app.router.routes if getattr(route, "path", "") not in _CLOSED]
        app.include_router(Api(policy, about, TrainerLock(LEASE_S)).router())
        # In front of everything, Starlette's own error page included; vLLM has built the stack already, so that none
        # can be added.
        inner = Shutter(app.middleware_stack or app.build_middleware_stack(), weights, PREFIX)
        app.middleware_stack = Gate(inner, self.key, max_body, visits)
        _measure(policy)
        self._tasks.append(asyncio.ensure_future(self._announce(about)))

    async def _announce(self, about: dict[str, Any]) -> None:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        while True:
            try:
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            except OSError:
                await asyncio.sleep(0.05)
                continue
            writer.close()
            break
        self.is_ready = True
        sequences = self.start.arguments["max_num_seqs"]
        takes = "full weights" if about["takes_dense"] else f"rank <= {about['max_lora_rank']}"
        begin("")
        print(
            f"qlora-rl: serving {self.base} at {self.url}; base {about['base'][:16]} ({about['repaired']} weights got "
            f"their exact scales back); {takes}, length <= {about['max_model_length']}, {sequences} sequences, "
            f"bodies <= {about['max_body_bytes'] / _MIB:.0f} MiB; key in {self.key_path}"
            + ("" if self.bundle is None else '; the trained model is "policy"'),
            flush=True,
        )
        if self.ready_file is not None:
            found = {**about, "url": self.url, "key_file": str(self.key_path), "pid": os.getpid()}
            staged = Path(f"{self.ready_file}.staged")
            staged.write_text(json.dumps(found))
            os.replace(staged, self.ready_file)


def _measure(policy: Any) -> None:
    """The policy among vLLM's own metrics."""
    from prometheus_client import REGISTRY, Gauge

    for name, text, read in (
        ("version", "Adapter version that serves", lambda: policy.version),
        ("pushes", "Adapters taken or dropped since the start", lambda: policy.pushes),
        ("push_seconds", "Seconds that the newest push took inside the server", lambda: policy.seconds),
        ("push_bytes", "Bytes of the newest adapter", lambda: policy.nbytes),
    ):
        with contextlib.suppress(ValueError):  # a second server in one process
            Gauge(f"qlora_rl_policy_{name}", text, registry=REGISTRY).set_function(read)


def read_or_make_key(path: Path, prefix: str = "") -> tuple[Path, str]:
    """The key in a file; a new one, which begins with `prefix`, is written where there is no such file.

    Raises:
        ConfigConflictError: others can read it, we cannot read or write it, or it holds no key.
    """
    try:
        if not path.exists():
            key = prefix + secrets.token_urlsafe(32)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(key + "\n")
            return path, key
        if path.stat().st_mode & 0o077:
            raise ConfigConflictError(f"reading the key: others can read {path}. Run: chmod 600 {path}")
        key = path.read_text(errors="replace").strip()
    except OSError as error:
        raise ConfigConflictError(f"reading the key: {path}: {error.strerror}. Pass another --api-key-file.") from error
    if len(key) < 16 or not key.isascii() or any(letter.isspace() for letter in key) or not key.startswith(prefix):
        begins = f", beginning with {prefix!r}" if prefix else ""
        raise ConfigConflictError(
            f"reading the key: {path} holds no key of at least 16 ASCII characters without spaces{begins}. Remove it, "
            "and one is made."
        )
    return path, key


def check_adapter_dir(path: Path) -> Path:
    """The directory, made with mode 700 where there is none.

    Raises:
        ConfigConflictError: others can write there, it belongs to another user, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = path.stat()
    except OSError as error:
        raise ConfigConflictError(
            f"checking the adapter directory: {path}: {error.strerror}. Pass a directory of your own."
        ) from error
    if about.st_uid != os.getuid():
        raise ConfigConflictError(
            f"checking the adapter directory: {path} belongs to another user (uid={about.st_uid}). Pass a directory of "
            "your own."
        )
    if about.st_mode & 0o022:
        raise ConfigConflictError(
            f"checking the adapter directory: others can write into {path}. Run: chmod 700 {path}"
        )
    return path.resolve()


def bind(host: str, port: int) -> socket.socket:
    """A socket to listen on; port 0 takes a free one.

    Raises:
        ConfigConflictError: the port is taken.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigConflictError(
            f"starting the server: {host}:{port}: {error.strerror}. Use another --port."
        ) from error
    return sock


@dataclass
class RunningServer(ClosedAtEnd):
    """A server in a process of its own; stops it at the end of a `with` block.

    Attributes:
        url: of the server.
        key: that it wants.
        process: the server's; it has a child of its own, vLLM's engine.
        log: what it has printed.
        directory: holds key, log and ready file; removed by `stop`.
    """

    url: str
    key: str
    process: subprocess.Popen[bytes]
    log: Path
    directory: Path

    def stop(self, timeout_s: float = 30.0) -> None:
        """End it by its own process id; harmless when repeated."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    close = stop


def start_server(
    base: str | os.PathLike[str], *, port: int = 0, timeout_s: float = 600.0, key: str | None = None, **options: Any
) -> RunningServer:
    """Start `serve` in a process of its own on this host, and wait until it answers. It ends with the thread that
    started it.

    Args:
        base: directory made by `prepare_base`.
        port: by default a free one.
        timeout_s: to wait at most, in seconds.
        key: by default a new one.
        options: of `serve`, but for ready_file.

    Raises:
        ConfigConflictError: options that contradict each other.
        MissingDependencyError: no vLLM is installed, or one whose server cannot be started.
        EngineUnsupportedError: it ended instead; with the end of its log.
        EngineBrokenError: it did not come up in time.
    """
    if "ready_file" in options or (key is not None and "api_key_file" in options):
        raise ConfigConflictError(
            "starting a server: start_server has a ready_file of its own, and takes either key= or api_key_file=. "
            "Leave one out."
        )
    compat.require_server()
    open_base(base, verify=False)  # what is wrong with the base is said here
    directory = Path(tempfile.mkdtemp(prefix="qlora-rl-started-"))
    try:
        return _started(base, directory, port, timeout_s, key, options)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _started(
    base: str | os.PathLike[str],
    directory: Path,
    port: int,
    timeout_s: float,
    key: str | None,
    options: dict[str, Any],
) -> RunningServer:
    key_path = Path(options.get("api_key_file") or directory / "api-key")
    if key is not None:
        key_path.touch(mode=0o600)
        key_path.write_text(key)
    key_path, key = read_or_make_key(key_path)
    ready, log = directory / "ready.json", directory / "log.txt"
    own = {"ready_file": ready, "api_key_file": key_path.absolute()}
    call = {"base": base, "port": port, **options, **own}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, json.dumps(call, default=os.fspath)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, _WITH_PARENT: str(os.getpid())},
            start_new_session=True,  # Ctrl-C in a terminal is ours to handle
        )
    running = RunningServer("", key, process, log, directory)
    try:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if ready.is_file():
                running.url = json.loads(ready.read_text())["url"]
                return running
            if process.poll() is not None:
                tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-15:])
                raise EngineUnsupportedError(
                    f"starting a server on {base}: it ended with code={process.returncode}. The end of its log:\n{tail}"
                )
            time.sleep(0.1)
        raise EngineBrokenError(
            f"starting a server on {base}: it did not answer within timeout_s={timeout_s:.0f}. Allow more, or look "
            "into its output with `qlora-rl serve`."
        )
    except BaseException:
        running.stop()
        raise


class LocalServer(ServerEngine):
    """`start_server` and `ServerEngine` in one; `close` stops the server by its own process id.

    Args:
        base: directory made by `prepare_base`.
        options: of `start_server`.
    """

    def __init__(self, base: str | os.PathLike[str], **options: Any):
        self.server = start_server(base, **options)
        try:
            # Nobody starts it again: long enough for a broken connection, no longer.
            super().__init__(self.server.url, api_key=self.server.key, wait_s=5.0)
        except BaseException:
            self.server.stop()
            raise

    def close(self) -> None:
        """Stop the server; harmless when repeated."""
        super().close()
        self.server.stop()
