"""`LocalEngine`: vLLM in this process, on a prepared base, with one LoRA slot. Usable alone, without any trainer."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from qlora_rl.contracts import AdapterSlots, BaseFingerprint, EngineCapabilities, Rollout, SamplingSpec, rank_class
from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.engine import compat
from qlora_rl.engine.images import Prompt, encoded, engine_inputs, token_ids
from qlora_rl.engine.linears.base_compute import BaseCompute, check_wish
from qlora_rl.engine.local.adapters import Adapters
from qlora_rl.engine.local.borrowing_models import BorrowingModels
from qlora_rl.engine.local.dense import DenseWeights
from qlora_rl.engine.local.routing import Routing, choices_of
from qlora_rl.engine.local.step_loop import Driver, alone
from qlora_rl.engine.options import cache_advice, start_options
from qlora_rl.engine.sampling import SCORING, check_lengths, holds_nan, sampled, sampling_params, spec_of
from qlora_rl.engine.worker.extension import Lending
from qlora_rl.engine.worker.parallel import IN_PROCESSES, described
from qlora_rl.errors import EngineBrokenError, EngineClosedError, EngineUnsupportedError

logger = logging.getLogger(__name__)


class LocalEngine:
    """vLLM on a prepared base, in this process.

    ::

        with LocalEngine(prepare_base("Qwen/Qwen3-0.6B")) as engine:
            rollout = engine.generate(["2+2="], temperature=0.0, max_tokens=8)
            print(engine.tokenizer.decode(rollout.completion_ids[0]))

    Args:
        base: directory made by `prepare_base`.
        max_lora_rank: largest rank that will be served, rounded up to one of vLLM's classes; 0 switches LoRA off.
        max_model_length: prompt plus completion, in tokens; by default what the model was made for, as far as vLLM and
            transformers compute one function (docs/functions.md).
        max_num_seqs: sequences in flight.
        tensor_parallel_size: processes that hold a part of the base each, on a GPU each; a 4-bit base is served in its
            baked form then.
        gpu_memory_utilization: share of the card that vLLM may fill (weights and KV cache).
        kv_cache_gib: size of the KV cache; on a GPU instead of `gpu_memory_utilization`. On the CPU by default what
            `max_num_seqs` need, up to 4 or what one needs.
        enforce_eager: no CUDA graphs; default true on the CPU.
        enable_sleep: `sleep()` gives memory back between rollouts (GPU; a no-op on the CPU).
        enable_prefix_caching: share the KV cache of common prompt beginnings, within one adapter version.
        model_impl: vLLM's own model code ("vllm"), transformers' ("transformers"), or "auto".
        trust_remote_code: let the model's own code run.
        seed: of the engine; requests carry their own.
        base_compute: what linears multiply with on the CPU: "nf4" is the codes, by a kernel of ours; "vllm" its own
            way, for the adapter too. On a GPU all is vLLM's way. The attribute says the outcome.
        repair_scales: write the exact scales into vLLM when it has loaded (`repair_base`).
        vllm_options: further arguments of `vllm.LLM`.

    Attributes:
        incarnation: grows with every start, rebuild and wake.

    Raises:
        MissingDependencyError: vLLM or its bitsandbytes support is missing; names what to install.
        EngineUnsupportedError: this base or setting cannot be served.
        BaseIncompleteError: `base` is not a prepared base.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        *,
        max_lora_rank: int = 16,
        max_model_length: int | None = None,
        max_num_seqs: int = 128,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.3,
        kv_cache_gib: float | None = None,
        enforce_eager: bool | None = None,
        enable_sleep: bool = False,
        enable_prefix_caching: bool = True,
        model_impl: str = "auto",
        trust_remote_code: bool = False,
        seed: int = 0,
        base_compute: str = "nf4",
        repair_scales: bool = True,
        **vllm_options: Any,
    ):
        check_wish(base_compute)
        self.base = Path(base)
        self.max_lora_rank = rank_class(max_lora_rank) if max_lora_rank else 0
        self._enable_sleep = enable_sleep
        self._numbers, self._lanes = itertools.count(1), list[Adapters]()
        self._adapters, self._dense = Adapters(self.max_lora_rank, self._numbers), DenseWeights()
        self.incarnation = self._repairs = 0
        self._is_broken = self._is_closed = self._is_asleep = False
        self._llm: Any = None
        self._products, self._routing, self.borrowers = Float32Products(), Routing(), BorrowingModels()
        self._driver = Driver(on_failure=self._break, on_end=self._routing.collect)
        self._owns_process_group = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        start = start_options(
            base,
            max_lora_rank=max_lora_rank,
            max_model_length=max_model_length,
            max_num_seqs=max_num_seqs,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_gib=kv_cache_gib,
            enforce_eager=enforce_eager,
            enable_sleep=enable_sleep,
            enable_prefix_caching=enable_prefix_caching,
            model_impl=model_impl,
            trust_remote_code=trust_remote_code,
            seed=seed,
            **vllm_options,
        )
        self._start, self._vllm_version, self._is_cpu = start, start.vllm_version, start.is_cpu
        self._options, self._max_model_length, self._is_4bit = start.arguments, start.max_model_length, start.is_4bit
        self._base_compute = base_compute
        self._repair_scales = start.is_4bit and repair_scales
        self._build()

    @property
    def llm(self) -> Any:
        """The `vllm.LLM` underneath."""
        self._ensure_usable()
        return self._llm

    @property
    def tokenizer(self) -> Any:
        """The tokenizer stored with the base."""
        return self.llm.get_tokenizer()

    @property
    def version(self) -> int:
        """The version that serves now; 0 is the bare base."""
        return self._adapters.version or self._dense.version

    def capabilities(self) -> EngineCapabilities:
        """What this engine can be asked for."""
        dtype = str(self.llm.llm_engine.model_config.dtype).removeprefix("torch.")
        return EngineCapabilities(
            name=f"vllm {self._vllm_version} ({'cpu' if self._is_cpu else 'gpu'})",
            takes_adapters=bool(self.max_lora_rank),
            takes_dense=self._start.takes_dense,
            max_lora_rank=self.max_lora_rank,
            max_model_length=self._max_model_length,
            adapter_dtype=dtype,
            can_sleep=self._enable_sleep and not self._is_cpu and compat.may_sleep(lends=bool(self.borrowers.alive())),
            holds_two=bool(self.max_lora_rank),
            takes_in_place=bool(self.max_lora_rank) and self._start.ranks == 1,
            takes_images=bool(self._start.image_tokens),
            gives_routing=self._routing.is_on,
            adapts_experts=self._start.adapts_experts,
        )

    def lane(self, slots: int = 2) -> Lane:
        """This engine as one of several policies sees it: `version`, pushes and requests are of that policy alone.

        Requests of all lanes share vLLM's batches, and a push to one lane leaves the others as they are.

        Args:
            slots: of the engine's `max_loras` that are the lane's until it is closed: 2 for an adapter that is pushed
                to, 1 for one that is only loaded.

        Raises:
            EngineUnsupportedError: so many are not free, or the engine itself serves an adapter.
        """
        taken = sum(each.slots or 0 for each in self._lanes)
        if self.version or taken + slots > (room := int(self._options.get("max_loras", 0))):
            why = f"version {self.version} serves" if self.version else f"max_loras={room} < {taken} + {slots}"
            raise EngineUnsupportedError(
                f"opening a lane: {why}. Close another lane, or start the engine with more max_loras."
            )
        return Lane(self, slots)

    def score(
        self, sequences: Sequence[Prompt], *, bare: bool = False, version: int | None = None
    ) -> list[list[float]]:
        """Natural logs of the probabilities of every token but the first.

        Args:
            sequences: token ids, or `ImagePrompt`s.
            bare: under the base alone, whatever adapter serves.
            version: of the adapter, as `generate` takes it.

        Raises:
            PromptTooLongError: a sequence does not fit.
            VersionGoneError: the engine no longer holds `version`.
        """
        self.wake()
        check_lengths(ids := [token_ids(s) for s in sequences], self._max_model_length)
        _, outputs = self._run(sequences, sampling_params(SCORING, range(len(ids))), bare=bare, version=version)
        return [
            [entry[token].logprob for token, entry in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
            for row, output in zip(ids, outputs, strict=True)
        ]

    @alone
    def held_adapter(self, rank: int) -> Mapping[str, str]:
        """Digests of what the adapter slot holds; empty for the bare base."""
        self.wake()
        return self._adapters.held(self._llm, rank)

    @alone
    def describe_base(self) -> BaseFingerprint:
        """The base as vLLM holds it, read from its own weights."""
        self.wake()
        return described(self.llm.collective_rpc("qlora_describe_base"), self._start.base)

    @alone
    def repair_base(self) -> dict[str, float]:
        """Write the exact scales of the base directory into vLLM's weights, where its loader has rounded them
        (docs/fidelity.md).

        Returns:
            The largest relative error of each repaired weight; empty when nothing differed.
        """
        self.wake()
        self._finish_calls()
        self._repair_scales = True  # a rebuilt engine gets them too
        repaired = self._repair()
        self._repairs += bool(repaired)
        return repaired

    @alone
    def lend_base(self) -> Lending:
        """vLLM's own tensors, for `borrow_base`; whoever takes them is noted in `borrowers`."""
        self.wake()
        return self._llm.collective_rpc("qlora_lend_base")[0]

    def _repair(self) -> dict[str, float]:
        return self._llm.collective_rpc("qlora_repair_scales")[0]

    def generate(
        self,
        prompts: Sequence[Prompt | str],
        sampling: SamplingSpec | None = None,
        *,
        version: int | None = None,
        places: Sequence[int] | None = None,
        **fields: Any,
    ) -> Rollout:
        """One completion for each of B prompts; repeat a prompt to sample several.

        Several threads may call it: their requests share vLLM's batch, and a push takes its turn between two steps. A
        call ends with the version with which it began. An interrupt (Ctrl-C, a notebook's stop button) takes effect
        between two engine steps: all requests of the call are aborted and the engine stays usable. A second one during
        the same step gives the engine up; it is rebuilt at the next use.

        Args:
            prompts: B token-id lists, strings, or `ImagePrompt`s.
            sampling: how to sample; or give its fields by name.
            version: of the adapter; that which serves, or the one before it while its slot has not been written again.
            places: number of each prompt in the whole of which these are a part; decides its seed. By default 0 to B -
                1.

        Raises:
            PromptTooLongError: names every prompt that leaves no room for a completion; nothing was generated.
            EngineBrokenError: vLLM failed in a step; the engine is rebuilt at the next use.
            VersionGoneError: the engine no longer holds `version`.
            RolloutCancelledError: another thread has called `cancel`.
        """
        sampling = spec_of(sampling, fields)
        self.wake()
        asked = encoded(self.tokenizer, prompts)
        check_lengths([token_ids(p) for p in asked], self._max_model_length)
        started = time.perf_counter()
        params = sampling_params(sampling, places or range(len(asked)), never=self._start.image_tokens)
        version, outputs = self._run(asked, params, version=version)
        routing = choices_of([token_ids(p) for p in asked], outputs) if self._routing.is_on else (None, None)
        return Rollout(
            **sampled(outputs),
            version=version,
            seconds=time.perf_counter() - started,
            routing=routing[0],
            routing_weights=routing[1],
        )

    def cancel(self, threads: Iterable[int] | None = None) -> None:
        """Have the calls of other threads end between two steps, with `RolloutCancelledError`; none of their requests
        stays.

        Args:
            threads: only the calls of these (`threading.get_ident`).
        """
        found = None if threads is None else set(threads)
        self._driver.cancel(lambda call: found is None or call.thread in found)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step of vLLM, in whichever thread, while it lasts: to change what is global to the process. Transformers
        changes torch's default dtype while it builds a model, PEFT patches a method of all modules, and a seed is that
        of all threads."""
        with self._driver.door, self._driver.lock:
            yield

    @alone
    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve a PEFT directory as `version` from the next request on.

        Raises:
            SyncError: vLLM rejected it, or some of its modules match no layer; the old version goes on serving.
        """
        self._ensure_usable()
        self._dense.reject_adapters(self.max_lora_rank)
        self._reject_beside_lanes()
        self._adapters.load(self._llm, directory, version, self._finish_calls)

    @alone
    def lend_slots(self, directory: Path) -> AdapterSlots:
        """Load a canonical PEFT directory into two slots and lend their buffers, until an adapter is loaded or dropped.

        Raises:
            SyncError: vLLM rejected it, or some of its modules match no layer.
        """
        self._ensure_usable()
        self._dense.reject_adapters(self.max_lora_rank)
        self._reject_beside_lanes()
        return self._adapters.lend(self._llm, directory, self._finish_calls)

    @alone
    def serve_slot(self, slots: AdapterSlots, index: int, version: int, recover: Callable[[], Path]) -> None:
        """Serve what is in a slot as `version` from the next request on; nothing is copied or read.

        Raises:
            SyncError: the slots are no longer the engine's; the old version goes on serving.
        """
        self._ensure_usable()
        self._adapters.serve_slot(slots, index, version, recover)

    @alone
    def load_dense(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Serve these weights instead of the base's, as `version`, from the next request on; adapters are dropped.

        Args:
            weights: every weight of the model, by transformers' name; read once, one after the other.

        Returns:
            Bytes.

        Raises:
            EngineUnsupportedError: the engine holds a 4-bit base, or lanes are open.
            MissingDependencyError: it takes adapters, too, before vLLM 0.31.
            EngineBusyError: a model borrows the base.
            SyncError: not all arrived. Nothing is served until a push arrives whole; if none had, the old version
                serves on.
        """
        self._reject_beside_lanes()
        self._dense.require_place(self.base, self.capabilities())
        self.borrowers.reject("loading weights")
        self.wake()
        self._finish_calls()
        serves = None if self._adapters.is_lost else self.version
        nbytes = self._dense.load(self._llm, weights, version, serves=serves)
        self._adapters.drop(self._llm)  # vLLM has dropped them
        return nbytes

    def withdraw_adapter(self, reason: str) -> None:
        """Serve nothing until the next push: what serves is not verified, and what was before is gone."""
        self._adapters.withdraw(reason)

    @property
    def holds_dense(self) -> bool:
        """The full weights that were loaded last are still in vLLM and may serve."""
        return bool(self._dense.version) and not self._dense.lost

    def withdraw_dense(self, reason: str) -> None:
        """Serve nothing until the next `load_dense`: what is there has turned out to be wrong."""
        self._dense.withdraw(reason)

    @alone
    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0; read again from its directory where dense weights replaced it."""
        self._ensure_usable()
        self._finish_calls()
        self._dense.drop(self._llm, self.base)
        self._adapters.drop(self._llm)

    @alone
    def sleep(self) -> None:
        """Give back the KV cache and move the weights to host memory (vLLM's level 1); a no-op on the CPU.

        Weights that a model borrows stay where they are. Level 2 is never used: it discards a bitsandbytes base that
        vLLM has no way to load again.
        """
        self._ensure_usable()
        if self._is_asleep or not self._options["enable_sleep_mode"]:
            return
        self._finish_calls()
        if not compat.may_sleep(lends=(lends := bool(self.borrowers.alive()))):
            return self._stay_awake(f"vLLM {self._vllm_version} cannot keep lent weights and sleep")
        for each in (self._adapters, *self._lanes):
            each.before_sleep(self._llm)
        compat.release_kv_cache(self._llm) if lends else self._llm.sleep(level=1)
        self._is_asleep = True

    def _stay_awake(self, why: str) -> None:
        logger.warning("%s: the engine stays awake", why)
        self._options["enable_sleep_mode"] = self._enable_sleep = False

    @alone
    def wake(self) -> None:
        """Undo `sleep`; `generate` does it by itself."""
        self._ensure_usable()
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False
            self.incarnation += 1
            self._adapters.after_wake(self._llm)
            for each in self._lanes:
                each.after_wake(self._llm)

    @alone
    def close(self, *, force: bool = False) -> None:
        """Stop vLLM and give its memory back; harmless when repeated.

        Args:
            force: also while a model borrows the base. The tensors are the model's then, and it goes on working.

        Raises:
            EngineBusyError: a living model borrows the base.
        """
        if not (force or self._is_closed):
            self.borrowers.reject("closing the engine")
        self._is_closed = True
        self._tear_down()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(force=error is not None)  # an error of the caller's must not be hidden by ours

    def _build(self) -> None:
        ranks = self._start.ranks
        self._products = Float32Products(*self._start.dtypes, owner=self)
        try:
            with compat.construction(ranks):
                from vllm import LLM

                try:
                    llm = LLM(**self._options)
                except Exception as error:
                    why = f"starting vLLM on {self.base}: {error}{IN_PROCESSES if ranks > 1 else cache_advice(error)}"
                    raise EngineUnsupportedError(why) from error
            compat.started(llm)
            self._llm = llm
            self._driver.stream.keep(not self._is_cpu)
            self._routing.begin(self._llm, self._start)
            if ranks > 1:
                self._llm.collective_rpc("qlora_begin_as_rank")
                self._llm.collective_rpc("qlora_multiply_in_float32", args=(self._start.dtype_names,))
            if self._repair_scales:
                self._repair()
            compute = self._llm.collective_rpc("qlora_multiply_directly", args=(self._base_compute,))[0]
            self.base_compute = BaseCompute(**compute)
            logger.info("%s", self.base_compute)
            if self.borrowers.alive():  # rebuilt: they must not go on with the old tensors
                self.borrowers.point_to(self._llm.collective_rpc("qlora_lend_base")[0])
        except BaseException:
            self._tear_down()
            raise
        self._is_broken = self._is_asleep = False
        self.incarnation += 1

    def _tear_down(self) -> None:
        llm, self._llm = self._llm, None
        self._products.close()
        if llm is not None:
            compat.shut_down(llm, owns_process_group=self._owns_process_group)
            del llm
        compat.trim_memory()

    def _ensure_usable(self) -> None:
        if self._is_closed:
            raise EngineClosedError("using the engine: it was closed, by itself or with its trainer. Make a new one.")
        if self._is_broken:
            logger.warning("rebuilding the engine after a failure; version %d is loaded again", self.version)
            self._tear_down()
            if self._options["enable_sleep_mode"] and compat.held_for_sleep():
                self._stay_awake("tensors of the engine before are in use, and vLLM's sleep mode takes one engine")
            self._build()
            self._dense.rebuilt()
            self._adapters.load_again(self._llm)
            for each in self._lanes:
                try:
                    each.load_again(self._llm)
                except EngineBrokenError as error:  # whoever asks that lane is told
                    logger.warning("%s", error)

    def _run(
        self, asked: Sequence[Prompt], params: list[Any], *, bare: bool = False, version: int | None = None
    ) -> tuple[int, list[Any]]:
        """Drive the engine until all B requests are done: the version that made them, and their outputs. None of them
        stays, whatever happens."""
        with self._driver.between_steps() as raise_if_interrupted:
            with self._driver.door, self._driver.lock, self._driver.stream.turn():
                self._ensure_usable()  # another thread's call may have failed just now
                version = self.version if version is None else version
                engine, (lora, salt) = self._llm.llm_engine, self._policy(version, bare=bare)
                inputs = engine_inputs(engine.renderer, asked, salt, self._dense.salt)
                call = self._driver.begin(engine, inputs, params, lora)
            # From here on a push may take place between two steps: these requests go on with what they began with.
            finished = self._driver.finish(engine, call, raise_if_interrupted)
        if holds_nan(finished):
            logger.warning("version %d gives NaN: the KV cache is cleared, so that no later request reads it", version)
            self._clear_cache()
        return version, finished

    @alone
    def _clear_cache(self) -> None:
        if self._llm is not None and not self._is_broken:  # the one that is built next has another
            self._finish_calls()  # zeros would be read by whoever is in the middle of a rollout
            self._llm.collective_rpc("qlora_clear_cache")
            self._is_broken = not self._llm.reset_prefix_cache()

    @alone
    def _finish_calls(self, adapter: int | None = None) -> None:
        """What others have begun (with `adapter`, with which nobody begins any more) is generated to its end: what it
        reads is to change."""
        if adapter is not None:
            self._adapters.forget_before(adapter)
        if self._llm is not None:
            self._driver.drain(self._llm.llm_engine, adapter)

    def _policy(self, version: int, *, bare: bool) -> tuple[Any, str]:
        """vLLM's LoRARequest (`None` for the base) and the salt of a version that is held."""
        self._dense.reject_lost(bare=bare)
        if not bare:
            self._adapters.reject_lost()
        served = None if bare else self._adapters.find(version, self.version)
        # The salt makes a KV block of one push invisible to every other, whatever their names and paths.
        lora, salt = (None, self._dense.salt) if served is None else (served.request, served.salt)
        return lora, f"{salt}-{self._repairs}"  # nor does one outlive a repair of the base

    def _break(self) -> None:
        self._is_broken = True

    def _reject_beside_lanes(self) -> None:
        if self._lanes:
            raise EngineUnsupportedError(
                f"pushing to the engine itself: its slots belong to {len(self._lanes)} lanes. Push to one of them, or "
                "close them."
            )


class Lane(LocalEngine):
    """What one of several policies sees of an engine: versions and slots of its own; all else is the engine's.

    `LocalEngine.lane` makes it. Closing it frees its slots, and leaves the engine running.
    """

    def __init__(self, engine: LocalEngine, slots: int) -> None:
        adapters = Adapters(engine.max_lora_rank, engine._numbers, slots)
        vars(self).update(_engine=engine, _adapters=adapters)
        engine._lanes.append(adapters)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_engine"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_engine"], name, value)

    def lane(self, slots: int = 2) -> Lane:
        """Another lane of the same engine."""
        return self._engine.lane(slots)

    def load_dense(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        """Full weights are the engine's own.

        Raises:
            EngineUnsupportedError: always.
        """
        raise EngineUnsupportedError("loading weights: a lane takes adapters. Load them into an engine without lanes.")

    def sleep(self) -> None:
        """The engine's: all lanes sleep together."""
        self._engine.sleep()

    def wake(self) -> None:
        """The engine's."""
        self._engine.wake()

    def is_read(self) -> bool:
        """Somebody generates with one of its versions."""
        return self._driver.reads(self._adapters.numbers)

    @alone
    def may_overwrite(self) -> bool:
        """Nobody generates with the version that the next push overwrites, nor begins any more; where somebody does,
        False, and all is as before."""
        numbers = self._adapters.overwritten()
        if self._driver.reads(numbers):
            return False
        for adapter in numbers:
            self._adapters.forget_before(adapter)
        return True

    @alone
    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0; what others generate goes on."""
        self._ensure_usable()
        self._free()

    @alone
    def close(self, *, force: bool = False) -> None:
        """Free the slots, once what is generated with them is done; harmless when repeated.

        Args:
            force: end that, with RolloutCancelledError.
        """
        if self._adapters not in self._engine._lanes:
            return
        self._engine._lanes.remove(self._adapters)
        if self._llm is not None and not self._is_broken:
            if force:
                numbers = self._adapters.numbers
                self._driver.cancel(lambda call: call.adapter in numbers)
            self._free()

    def _free(self) -> None:
        for adapter in self._adapters.numbers:
            self._finish_calls(adapter)
        self._adapters.drop(self._llm)

    def _ensure_usable(self) -> None:
        if self._adapters not in self._engine._lanes:  # its version is 0 now, and the bare base is another policy
            raise EngineClosedError("using a lane: it was closed. Open another one.")
        self._engine._ensure_usable()

    def _reject_beside_lanes(self) -> None:
        """It is one."""
