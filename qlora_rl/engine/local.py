"""`LocalEngine`: vLLM in this process, on a prepared base, with one LoRA slot. Usable alone, without any trainer."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from qlora_rl.base.checkpoint import open_base
from qlora_rl.base.fingerprint import linear_names
from qlora_rl.contracts import BaseFingerprint, EngineCapabilities, Rollout, SamplingSpec, rank_class
from qlora_rl.engine import compat
from qlora_rl.engine.interrupt import ForcedInterrupt, interrupts_between_steps
from qlora_rl.engine.sampling import sampled_logprobs, sampling_params
from qlora_rl.errors import (
    ConfigConflictError,
    EngineBrokenError,
    EngineClosedError,
    EngineUnsupportedError,
    NotYetSupportedError,
    PromptTooLongError,
    SyncError,
)

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
        max_model_length: prompt plus completion, in tokens; by default what the model was made for.
        max_num_seqs: sequences in flight.
        tensor_parallel_size: GPUs; a 4-bit base needs 1.
        gpu_memory_utilization: share of the card that vLLM may fill (weights and KV cache).
        kv_cache_gib: size of the KV cache; on a GPU it replaces `gpu_memory_utilization`. On the CPU the default is what
            `max_num_seqs` sequences of full length need, at most 4 GiB.
        enforce_eager: no CUDA graphs; default true on the CPU.
        enable_sleep: `sleep()` gives memory back between rollouts (GPU; a no-op on the CPU).
        enable_prefix_caching: share the KV cache of common prompt beginnings, within one adapter version.
        model_impl: vLLM's own model code ("vllm"), transformers' ("transformers"), or "auto".
        trust_remote_code: let the model's own code run.
        seed: of the engine; requests carry their own.
        repair_scales: write the exact scales into vLLM when it has loaded (`repair_base`).
        vllm_options: further arguments of `vllm.LLM`.

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
        repair_scales: bool = True,
        **vllm_options: Any,
    ):
        self.base = Path(base)
        self.max_lora_rank = rank_class(max_lora_rank) if max_lora_rank else 0
        self._enable_sleep = enable_sleep
        self._version = 0
        self._adapter: Any = None  # the LoRARequest that serves
        self._requests = self._loads = self._incarnation = 0
        self._is_broken = self._is_closed = self._is_asleep = self._is_lost = False
        self._llm: Any = None

        self._vllm_version = compat.vllm_version()
        self._owns_process_group = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        from transformers import AutoConfig

        is_4bit = open_base(base, verify=False).spec.is_4bit
        config = AutoConfig.from_pretrained(self.base, trust_remote_code=trust_remote_code)
        if is_4bit:
            compat.require_bitsandbytes_support()
        self._is_cpu = compat.platform_is_cpu()
        compat.require_head_size(config)
        if tensor_parallel_size > 1 and not is_4bit:
            raise NotYetSupportedError(
                f"starting vLLM: tensor_parallel_size={tensor_parallel_size}: what several GPUs hold cannot be proven yet. Use "
                "tensor_parallel_size=1."
            )
        if is_4bit and tensor_parallel_size > 1:
            raise EngineUnsupportedError(
                f"starting vLLM: tensor_parallel_size={tensor_parallel_size} with a 4-bit base: vLLM cannot shard what was "
                "quantised beforehand. Use tensor_parallel_size=1, or a base with quant='none'."
            )
        if is_4bit and str(config.dtype).endswith("float32"):
            raise EngineUnsupportedError(
                "starting vLLM: the base is 4-bit with compute_dtype=float32, which vLLM's bitsandbytes kernels do not take. "
                "Prepare it with compute_dtype='bfloat16'."
            )
        if max_model_length is None and "max_model_len" in vllm_options:
            max_model_length = vllm_options.pop("max_model_len")
        text = config.get_text_config()
        self._max_model_length = max_model_length or int(text.max_position_embeddings)
        if self._is_cpu and kv_cache_gib is None:
            kv_cache_gib = _kv_cache_gib(text, self._max_model_length, max_num_seqs)
        self._options: dict[str, Any] = {
            "model": str(self.base),
            # Said aloud: "auto" would serve a float32 base in 16 bits.
            "dtype": str(config.dtype).removeprefix("torch."),
            "enable_lora": bool(self.max_lora_rank),
            "max_model_len": self._max_model_length,
            "max_num_seqs": max_num_seqs,
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "enforce_eager": self._is_cpu if enforce_eager is None else enforce_eager,
            "enable_sleep_mode": enable_sleep and not self._is_cpu,
            "enable_prefix_caching": enable_prefix_caching,
            "model_impl": model_impl,
            "trust_remote_code": trust_remote_code,
            "seed": seed,
            # The default, raw logprobs, leaves temperature out: importance ratios would be wrong at any but 1.
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "worker_extension_cls": "qlora_rl.engine.worker.BaseExtension",
        }
        if self.max_lora_rank:
            # Two in memory, one in the slot: the version that serves stays whole while the next one loads.
            self._options |= {"max_lora_rank": self.max_lora_rank, "max_loras": 1, "max_cpu_loras": 2}
            # Without this, vLLM wraps embeddings and head of some models too: buffers of vocabulary x rank that we never
            # fill, and a crash of its CPU backend when prompt logprobs are asked for.
            self._options["lora_target_modules"] = linear_names(self.base)
        if kv_cache_gib is not None:
            self._options["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
        self._options |= vllm_options
        self._repair_scales = is_4bit and repair_scales
        self._build()

    # --- what people ask it -----------------------------------------------------------------------------------------

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
        """The adapter version that serves now; 0 is the bare base."""
        return self._version

    @property
    def incarnation(self) -> int:
        """Grows with every start, rebuild and wake."""
        return self._incarnation

    def capabilities(self) -> EngineCapabilities:
        """What this engine can be asked for."""
        dtype = str(self.llm.llm_engine.model_config.dtype).removeprefix("torch.")
        return EngineCapabilities(
            name=f"vllm {self._vllm_version} ({'cpu' if self._is_cpu else 'gpu'})",
            takes_adapters=bool(self.max_lora_rank),
            takes_dense=False,
            max_lora_rank=self.max_lora_rank,
            max_model_length=self._max_model_length,
            adapter_dtype=dtype,
            can_sleep=self._enable_sleep and not self._is_cpu,
        )

    def score(self, sequences: Sequence[Sequence[int]], *, bare: bool = False) -> list[list[float]]:
        """Natural logs of the probabilities of every token but the first.

        Args:
            sequences: token ids.
            bare: under the base alone, whatever adapter serves.

        Raises:
            PromptTooLongError: a sequence does not fit.
        """
        self.wake()
        ids = [list(s) for s in sequences]
        self._check_lengths(ids)
        outputs = self._run(ids, SamplingSpec(max_tokens=1, temperature=0.0, extra={"prompt_logprobs": 0}), bare=bare)
        return [
            [entry[token].logprob for token, entry in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
            for row, output in zip(ids, outputs, strict=True)
        ]

    def held_adapter(self, rank: int) -> dict[str, str]:
        """Digests of what the adapter slot holds; empty for the bare base."""
        if self._adapter is None:
            return {}
        self.wake()
        return self.llm.collective_rpc("qlora_held_adapter", args=(self._adapter.lora_int_id, rank))[0]

    def describe_base(self) -> BaseFingerprint:
        """The base as vLLM holds it, read from its own weights."""
        self.wake()
        return BaseFingerprint.from_dict(self.llm.collective_rpc("qlora_describe_base")[0])

    def repair_base(self) -> dict[str, float]:
        """Write the exact scales of the base directory into vLLM's weights, where its loader has rounded them.

        vllm-bnb-plugin 0.0.3 reads the offset of double-quantised scales in bf16; see docs/fidelity.md.

        Returns:
            The largest relative error of each repaired weight; empty when nothing differed.
        """
        self.wake()
        repaired = self._repair()
        self._repair_scales = True  # a rebuilt engine gets them too
        return repaired

    def _repair(self) -> dict[str, float]:
        return self._llm.collective_rpc("qlora_repair_scales")[0]

    def generate(
        self, prompts: Sequence[Sequence[int] | str], sampling: SamplingSpec | None = None, **fields: Any
    ) -> Rollout:
        """One completion for each of B prompts; repeat a prompt to draw several.

        An interrupt (Ctrl-C, a notebook's stop button) takes effect between two engine steps: all requests of the call
        are aborted and the engine stays usable. A second interrupt during the same step gives the engine up; it is
        rebuilt at the next use.

        Args:
            prompts: B token-id lists or strings.
            sampling: how to draw; or give its fields by name.

        Raises:
            PromptTooLongError: names every prompt that leaves no room for a completion; nothing was generated.
            EngineBrokenError: vLLM failed in a step; the engine is rebuilt at the next use.
        """
        if sampling is not None and fields:
            raise TypeError("generate: give either sampling= or its fields by name, not both.")
        sampling = sampling or SamplingSpec(**fields)
        self.wake()
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]
        self._check_lengths(ids)
        started = time.perf_counter()
        outputs = [output.outputs[0] for output in self._run(ids, sampling)]
        rollout = Rollout(
            completion_ids=[list(o.token_ids) for o in outputs],
            logprobs=[sampled_logprobs(o) for o in outputs],
            version=self._version,
            seconds=time.perf_counter() - started,
        )
        return rollout

    def load_adapter(self, directory: Path, version: int) -> None:
        """Serve a PEFT directory as `version` from the next request on.

        Raises:
            SyncError: vLLM refused it, or some of its modules match no layer; the old version goes on serving.
        """
        if not self.max_lora_rank:
            raise EngineUnsupportedError(
                "loading an adapter: this engine was started without LoRA (max_lora_rank=0). Start it with the adapter's rank."
            )
        self._ensure_usable()
        from vllm.lora.request import LoRARequest

        # A number that vLLM has never seen: it would take one that it knows for the adapter that it has loaded already.
        self._loads += 1
        request = LoRARequest(f"policy-v{version}", self._loads, str(directory))
        engine = self._llm.llm_engine
        try:
            engine.add_lora(request)
            lost = compat.unreached_modules(self._llm, self._loads)
        except BaseException as error:
            self._forget(self._loads)
            if not isinstance(error, Exception):
                raise
            raise SyncError(
                f"loading adapter version={version} into vLLM: {error}. Version {self._version} goes on serving."
            ) from error
        if lost:
            self._forget(self._loads)
            raise SyncError(
                f"loading adapter version={version} into vLLM: no layer of the engine multiplies with {', '.join(lost[:4])}"
                f"{' …' if len(lost) > 4 else ''}; it would have been left out without a word. Version {self._version} goes "
                "on serving. Leave these modules out of target_modules.",
                reasons=lost,
                module=lost[0],
            )
        self._adapter, self._version, self._is_lost = request, version, False

    def drop_adapter(self) -> None:
        """Serve the bare base again, as version 0."""
        self._ensure_usable()
        if self._adapter is not None:
            self._forget(self._adapter.lora_int_id)
        self._adapter, self._version, self._is_lost = None, 0, False

    def sleep(self) -> None:
        """Give back the KV cache and move the weights to host memory (vLLM's level 1); a no-op on the CPU.

        Level 2 is never used: it discards a bitsandbytes base that vLLM has no way to load again.
        """
        self._ensure_usable()
        if self._is_asleep or not self._options["enable_sleep_mode"]:
            return
        self._llm.sleep(level=1)
        self._is_asleep = True

    def wake(self) -> None:
        """Undo `sleep`; `generate` does it by itself."""
        self._ensure_usable()
        if self._is_asleep:
            self._llm.wake_up()
            self._is_asleep = False
            self._incarnation += 1
            self._load_again()  # a wake has been seen to lose adapters (vllm#53888)

    def close(self) -> None:
        """Stop vLLM and give its memory back; harmless when repeated."""
        self._is_closed = True
        self._tear_down()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        with compat.construction():
            from vllm import LLM

            try:
                self._llm = LLM(**self._options)
            except Exception as error:
                compat.trim_memory()
                raise EngineUnsupportedError(f"starting vLLM on {self.base}: {error}") from error
        compat.started()
        try:
            if self._repair_scales:
                self._repair()
        except BaseException:
            self._tear_down()
            raise
        self._is_broken = self._is_asleep = False
        self._incarnation += 1

    def _tear_down(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            compat.shut_down(llm, owns_process_group=self._owns_process_group)
            del llm
        compat.trim_memory()

    def _ensure_usable(self) -> None:
        if self._is_closed:
            raise EngineClosedError("using the engine: it was closed. Make a new LocalEngine.")
        if self._is_broken:
            logger.warning("rebuilding the engine after a failure; version %d is loaded again", self._version)
            self._tear_down()
            self._build()
            self._load_again()

    def _load_again(self) -> None:
        """Load the adapter that serves anew; without its directory the engine must not go on as the bare base."""
        if self._adapter is None:
            return
        directory = Path(self._adapter.lora_path)
        self._adapter, self._is_lost = None, True
        if directory.is_dir():
            self.load_adapter(directory, self._version)

    def _forget(self, adapter_id: int) -> None:
        """Take an adapter that will not serve out of vLLM, if it got that far."""
        with contextlib.suppress(Exception):
            self._llm.llm_engine.remove_lora(adapter_id)

    def _check_lengths(self, ids: list[list[int]]) -> None:
        reasons = [
            f"prompt {i} has {len(p)} tokens" if p else f"prompt {i} is empty"
            for i, p in enumerate(ids)
            if not 0 < len(p) < self._max_model_length
        ]
        if reasons:
            shown = ", ".join(reasons[:5]) + (f" and {len(reasons) - 5} more" if len(reasons) > 5 else "")
            raise PromptTooLongError(
                f"generating: {shown}; max_model_length={self._max_model_length} must hold the prompt and at least one token. "
                "Shorten the prompts, or raise max_model_length (GRPOConfig.vllm_max_model_length).",
                reasons=reasons,
            )

    def _run(self, ids: list[list[int]], sampling: SamplingSpec, *, bare: bool = False) -> list[Any]:
        """Drive the engine until all B requests are done; whatever happens, none of them stays behind."""
        engine = self._llm.llm_engine
        if self._is_lost and not bare:
            raise EngineBrokenError(
                f"generating: adapter version={self._version} was lost when the engine was built anew. Push the adapter again, or "
                "call drop_adapter() to go on with the bare base."
            )
        lora = None if bare else self._adapter
        # The salt makes a KV block of one version invisible to every other, whatever their names and paths.
        salt = "base" if lora is None else f"policy-{lora.lora_int_id}"
        try:
            params = [sampling_params(sampling, i) for i in range(len(ids))]
        except Exception as error:  # vLLM has an error type of its own for them
            raise ConfigConflictError(f"generating: vLLM refuses the sampling arguments: {error}") from error
        place = {f"{self._requests + i}": i for i in range(len(ids))}
        self._requests += len(ids)
        finished: list[Any] = [None] * len(ids)
        internal: list[str] = []
        try:
            with interrupts_between_steps() as raise_if_interrupted:
                for name, i in place.items():
                    prompt = {"prompt_token_ids": ids[i], "cache_salt": salt}
                    internal.append(engine.add_request(name, prompt, params[i], lora_request=lora))
                while engine.has_unfinished_requests():
                    raise_if_interrupted()
                    for output in engine.step():
                        if output.finished:
                            finished[place[output.request_id]] = output
                raise_if_interrupted()
        except ForcedInterrupt:
            self._is_broken = True
            raise KeyboardInterrupt from None
        except KeyboardInterrupt:
            self._abort(internal)
            raise
        except Exception as error:
            if len(internal) < len(ids):  # refused while it was being added: nothing has run yet
                self._abort(internal)
                raise EngineUnsupportedError(f"generating: vLLM refuses prompt {len(internal)}: {error}") from error
            self._is_broken = True
            raise EngineBrokenError(
                f"generating: vLLM failed in a step ({type(error).__name__}: {error}). The engine is rebuilt at its next use."
            ) from error
        return finished

    def _abort(self, internal: list[str]) -> None:
        """Take all requests of the call out of scheduler and workers."""
        engine = self._llm.llm_engine
        self._is_broken = True  # until they are gone: an interrupt may strike here too
        try:
            engine.abort_request(internal, internal=True)
            while engine.has_unfinished_requests():
                engine.step()
            engine.step()  # tells the worker to forget them
        except Exception:
            logger.warning("aborting the requests failed; the engine is rebuilt at its next use", exc_info=True)
            return
        self._is_broken = False


def _kv_cache_gib(config: Any, length: int, sequences: int) -> float:
    """What `sequences` of full `length` need, in GiB (2-byte elements, blocks of 128 tokens), at most 4, at least 1/16."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = 4 if str(config.dtype).endswith("float32") else 2
    per_token = 2 * config.num_hidden_layers * kv_heads * head * width
    blocks = math.ceil(length / 128) + 1
    return min(4.0, max(1 / 16, per_token * 128 * blocks * (sequences + 1) / 2**30))
