"""What vLLM is told when it starts on a base; the same for the engine in this process and for a server."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.checkpoint import PreparedBase, open_base
from qlora_rl.base.experts import is_mixture
from qlora_rl.base.fingerprint import linear_names
from qlora_rl.base.model_classes import attends_both_ways, image_tokens
from qlora_rl.base.unsupported_configs import check_function, engine_positions, note_function
from qlora_rl.contracts import rank_class
from qlora_rl.engine import compat
from qlora_rl.errors import EngineUnsupportedError

logger = logging.getLogger(__name__)

# Of vLLM's arguments, those that nobody else may set: with another value an engine would hold or report something else.
OWN = frozenset(
    {"model", "dtype", "enable_lora", "load_format", "logprobs_mode", "lora_target_modules", "worker_extension_cls"}
)
# Images of one prompt.
MOST_IMAGES = 8
# And those that cut weights or adapters in ways that `parallel.places_of` does not know.
_UNKNOWN_CUTS = {
    "fully_sharded_loras": False,
    "pipeline_parallel_size": 1,
    "enable_expert_parallel": False,
    "quantization": None,
}

# vLLM's classes of model types whose checkpoints hold gate_up_proj as one, where vLLM 0.31 names gate_proj and up_proj:
# it would find no adapter for it. To be removed when it names it as they do.
ONE_GATE_UP = {"glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM"}

_LEAST_SHARE = 0.01  # of the card; vLLM takes no 0
_STEP_TOKENS = 4096  # vLLM's own default on a CPU


@dataclass(frozen=True)
class StartOptions:
    """How vLLM is started.

    Attributes:
        arguments: of `vllm.LLM`, or of the server's engine.
        base: directory that is loaded: the one that was asked for, or its baked form.
        ranks: processes that hold a part of it each.
        vllm_version: that is installed.
        is_4bit: what is loaded is.
        is_cpu: vLLM runs on the CPU.
        max_lora_rank: one of vLLM's classes; 0 without LoRA.
        max_model_length: prompt plus completion, in tokens.
        is_mixture: the base is a mixture of experts; vLLM cannot be given other weights for it.
        image_tokens: what stands for images and videos in the ids of a vision-language model, and is never sampled;
            empty for a text model.
        adapts_experts: experts of the base take adapters: in 4 bits, on a CPU.
    """

    arguments: dict[str, Any]
    base: Path
    ranks: int
    vllm_version: str
    is_4bit: bool
    is_cpu: bool
    max_lora_rank: int
    max_model_length: int
    is_mixture: bool = False
    image_tokens: tuple[int, ...] = ()
    adapts_experts: bool = False

    @property
    def most_images(self) -> int:
        """Images of one prompt; 0 for a text model."""
        return images_a_prompt(self.arguments["limit_mm_per_prompt"]) if self.image_tokens else 0

    @property
    def takes_dense(self) -> bool:
        """It can be given full weights, as far as the base decides."""
        return not self.is_4bit and self.ranks == 1 and not self.is_mixture

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of matrices that are multiplied on the CPU: those of the model, and bf16, in which a 4-bit base is
        multiplied."""
        if not self.is_cpu:
            return ()
        own = getattr(torch, self.arguments["dtype"])
        return (own, torch.bfloat16) if self.is_4bit else (own,)

    @property
    def dtype_names(self) -> list[str]:
        """Those of `dtypes`, for other processes: vLLM sends them no torch dtypes."""
        return [str(dtype).removeprefix("torch.") for dtype in self.dtypes]


def images_a_prompt(limits: Mapping[str, Any] | None) -> int:
    """Images that `limit_mm_per_prompt` allows in one prompt: a number, or a mapping with `count`, as vLLM takes it."""
    given = (limits or {}).get("image", MOST_IMAGES)
    return int(given.get("count", MOST_IMAGES) if isinstance(given, Mapping) else given)


def vllm_arguments() -> set[str]:
    """Names of the arguments that the installed vLLM takes; importing it takes seconds and starts nothing.

    Raises:
        MissingDependencyError: there is none.
    """
    compat.vllm_version()
    from vllm import EngineArgs

    return {each.name for each in fields(EngineArgs)}


def start_options(
    base: str | os.PathLike[str],
    *,
    max_lora_rank: int = 16,
    max_loras: int = 2,
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
    **vllm_options: Any,
) -> StartOptions:
    """The arguments, as `LocalEngine` documents them.

    Raises:
        MissingDependencyError: vLLM or its bitsandbytes support is missing.
        EngineUnsupportedError: this base or setting cannot be served.
        BaseIncompleteError: `base` is not a prepared base.
    """
    _check_options(vllm_options)
    rank = rank_class(max_lora_rank) if max_lora_rank else 0
    ranks = tensor_parallel_size
    prepared, config = _opened(base, ranks, vllm_options, trust_remote_code=trust_remote_code)
    base, is_4bit, is_cpu = prepared.path, prepared.spec.is_4bit, compat.platform_is_cpu()
    mixture, both_ways = is_mixture(config), attends_both_ways(base)
    length = _length(config, max_model_length, vllm_options)
    if is_cpu and kv_cache_gib is None:
        kv_cache_gib = max(1 / 16, kv_cache_needed(config.get_text_config(), length, max_num_seqs) / ranks)  # of each
    arguments: dict[str, Any] = {
        "model": str(base),
        # Explicit: "auto" would serve a float32 base in 16 bits.
        "dtype": str(config.dtype).removeprefix("torch."),
        "enable_lora": bool(rank),
        "max_model_len": length,
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": ranks,
        "enforce_eager": is_cpu if enforce_eager is None else enforce_eager,
        "enable_sleep_mode": enable_sleep and not is_cpu,
        "enable_prefix_caching": enable_prefix_caching,
        "model_impl": model_impl,
        "trust_remote_code": trust_remote_code,
        "seed": seed,
        # The default, raw logprobs, leaves temperature out: importance ratios would be wrong at any but 1.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": sys.stderr.isatty(),  # in a file its bars are a line for each state
        "worker_extension_cls": "qlora_rl.engine.worker.BaseExtension",
    }
    if is_cpu or both_ways:
        # No prompt is split over steps. An image whose tokens attend to each other must not be. On a CPU no prompt
        # must: it has its seed's generator set back, which torch's CPU generators cannot do, and vLLM 0.31 raises.
        # Remove when it does not.
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(_STEP_TOKENS, length)}
    arguments |= (_slots(rank, max_loras, base) if rank else {}) | _worker(config, is_cpu=is_cpu, both_ways=both_ways)
    if prepared.spec.quantize_experts and not is_cpu:
        arguments["enforce_eager"] = _without_graphs(enforce_eager)
    if ranks > 1:
        arguments["distributed_executor_backend"] = "mp"  # also where Ray runs, which would place them by itself
    arguments |= _memory(kv_cache_gib, gpu_memory_utilization, vllm_options)
    images = image_tokens(base)
    arguments |= _of_images(ranks, vllm_options) if images else {}
    return StartOptions(
        arguments | vllm_options,
        base,
        ranks,
        compat.vllm_version(),
        is_4bit,
        is_cpu,
        rank,
        length,
        mixture,
        tuple(images),
        adapts_experts=bool(rank) and is_cpu and prepared.spec.quantize_experts and is_4bit,
    )


def _check_options(vllm_options: Mapping[str, Any]) -> None:
    compat.reject_data_parallel(vllm_options.get("data_parallel_size"))
    compat.reject_speculation(vllm_options)
    if taken := sorted(OWN & set(vllm_options)):
        raise EngineUnsupportedError(
            f"starting vLLM: {', '.join(taken)}: set here, as what the trainer relies on hangs on it (the same "
            "weights, probabilities after temperature). Leave it out."
        )


def _length(config: Any, given: int | None, vllm_options: dict[str, Any]) -> int:
    """Of the longest sequence, also by vLLM's name for it, where the engine and transformers compute one function."""
    if given is None and "max_model_len" in vllm_options:
        given = vllm_options.pop("max_model_len")
    check_function(config, given, doing="starting vLLM")
    note_function(config)
    return given or engine_positions(config)


def _memory(kv_cache_gib: float | None, share: float, vllm_options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for the KV cache, or the share of the card.

    Where the cache has a size, vLLM asks of the share only whether so much is free, also of an engine that is rebuilt
    while the trainer fills the card.
    """
    sized = {} if kv_cache_gib is None else {"kv_cache_memory_bytes": int(kv_cache_gib * 2**30)}
    is_sized = bool(sized) or "kv_cache_memory_bytes" in vllm_options
    return {"gpu_memory_utilization": _LEAST_SHARE if is_sized else share, **sized}


def _slots(rank: int, count: int, base: Path) -> dict[str, Any]:
    """Arguments for adapters: `count` slots, so that the version that serves stays whole while the next one is loaded
    or written.

    Without target modules vLLM wraps embeddings and head of some models too: buffers of vocabulary x rank that we never
    fill, and a crash of its CPU backend when prompt logprobs are asked for.
    """
    slots = {"max_lora_rank": rank, "max_loras": count, "max_cpu_loras": count}
    return {**slots, "lora_target_modules": linear_names(base)}


def _without_graphs(enforce_eager: bool | None) -> bool:
    if enforce_eager is False:
        raise EngineUnsupportedError(
            "starting vLLM: enforce_eager=False with experts in 4 bits, which are multiplied one after another: no "
            "CUDA graph can hold that. Leave it out."
        )
    return True


def _opened(
    base: str | os.PathLike[str], ranks: int, vllm_options: Mapping[str, Any], *, trust_remote_code: bool
) -> tuple[PreparedBase, Any]:
    """The base that vLLM is to load, and its config, where vLLM can serve it.

    Raises:
        EngineUnsupportedError, MissingDependencyError: it cannot.
    """
    from transformers import AutoConfig

    prepared = open_base(base, verify=False)
    config = AutoConfig.from_pretrained(prepared.path, trust_remote_code=trust_remote_code)
    compat.require_head_size(config)
    if is_mixture(config):
        compat.require_mixtures()
    if attends_both_ways(prepared.path):
        check_both_ways(config, vllm_options)
    if ranks > 1:
        if is_mixture(config):
            raise EngineUnsupportedError(
                f"starting vLLM: tensor_parallel_size={ranks} with a mixture of experts: which part of an expert a "
                "rank holds cannot be told here, and so not verified. Use tensor_parallel_size=1."
            )
        prepared = _for_ranks(prepared, ranks, vllm_options)
    if prepared.spec.is_4bit:
        compat.require_bitsandbytes_support()
        if str(config.dtype).endswith("float32"):
            raise EngineUnsupportedError(
                "starting vLLM: the base is 4-bit with compute_dtype=float32, which vLLM's bitsandbytes kernels do not "
                "take. Prepare it with compute_dtype='bfloat16'."
            )
    return prepared, config


def _worker(config: Any, *, is_cpu: bool, both_ways: bool) -> dict[str, Any]:
    """Which of our workers vLLM has to start, if any, and what belongs to it."""
    workers = "qlora_rl.engine.worker.workers"
    if is_mixture(config):
        # Which leaves the experts in the order in which they are compared.
        backend = {} if is_cpu else {"moe_backend": "triton"}
        return {"worker_cls": f"{workers}.MixtureWorker", **backend}
    if both_ways and is_cpu:
        worker = "qlora_rl.engine.worker.bidirectional_attention.Worker"
        return {"worker_cls": worker, "disable_chunked_mm_input": True}
    return {"worker_cls": f"{workers}.FusedWorker"} if config.model_type in ONE_GATE_UP else {}


def _of_images(ranks: int, vllm_options: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a model that takes images; its limits are taken out of the options.

    Raises:
        EngineUnsupportedError: its vision tower could not be verified.
    """
    if ranks > 1:
        raise EngineUnsupportedError(
            f"starting vLLM: tensor_parallel_size={ranks} with a model that takes images: what each rank holds of "
            "its vision tower cannot be told here, and so not verified. Use tensor_parallel_size=1."
        )
    limits = {"image": MOST_IMAGES, "video": 0} | dict(vllm_options.pop("limit_mm_per_prompt", None) or {})
    if images_a_prompt(limits) < 1:
        raise EngineUnsupportedError(
            f"starting vLLM: limit_mm_per_prompt={limits}: without images vLLM leaves out the vision tower, which "
            "could not be verified then. Allow one image: {'image': 1, 'video': 0}."
        )
    # Without its cache of processed images: one that is rejected half-way would be missing from the other half of
    # it. `images` processes each once. A server fetches nothing: no URL is of a domain that cannot exist.
    return {
        "limit_mm_per_prompt": limits,
        "mm_processor_cache_gb": 0,
        "allowed_media_domains": ["nowhere.invalid"],
    }


def check_both_ways(config: Any, vllm_options: Mapping[str, Any]) -> None:
    """Images whose tokens attend to each other in both directions: vLLM has to see each as a whole.

    Raises:
        EngineUnsupportedError: it would not.
    """
    size, window = int(config.mm_tokens_per_image), getattr(config.get_text_config(), "sliding_window", None)
    if window is not None and size > window:
        raise EngineUnsupportedError(
            f"starting vLLM: mm_tokens_per_image={size} > sliding_window={window} of the base: vLLM lets the tokens of "
            "such an image attend to earlier ones only, the trainer in both directions. Use another base."
        )
    if vllm_options.get("enable_chunked_prefill"):
        raise EngineUnsupportedError(
            f"starting vLLM: enable_chunked_prefill=True with {config.model_type}: an image that is split over two "
            "steps cannot attend to itself in both directions. Leave it out."
        )


def _for_ranks(prepared: PreparedBase, ranks: int, vllm_options: Mapping[str, Any]) -> PreparedBase:
    """The base that several ranks load: their parts of a 4-bit weight could not be decoded, so its decoded form is cut.

    Raises:
        EngineUnsupportedError: an option with which it could not be said what a rank holds.
    """
    if taken := sorted(name for name, plain in _UNKNOWN_CUTS.items() if vllm_options.get(name, plain) != plain):
        raise EngineUnsupportedError(
            f"starting vLLM: tensor_parallel_size={ranks} with {', '.join(taken)}: what each rank holds then cannot be "
            "told here, and so not verified. Leave it out."
        )
    if not prepared.spec.is_4bit:
        return prepared
    from qlora_rl.base.bake import bake_base

    baked = bake_base(prepared)
    logger.info(
        "tensor_parallel_size=%d: vLLM cannot cut 4-bit weights, so its ranks load what the codes of %s stand for, in "
        "%s (four times the bytes, shared by %d ranks): %s. The trainer keeps the codes; both sides multiply with the "
        "same numbers.",
        ranks,
        prepared,
        baked.spec.compute_dtype,
        ranks,
        baked,
    )
    return baked


def kv_cache_needed(config: Any, length: int, sequences: int) -> float:
    """What `sequences` of full `length` need, in GiB (blocks of 128 tokens): at least 1/16, at most 4 or what one of
    them needs."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = 4 if str(config.dtype).endswith("float32") else 2
    per_token = 2 * config.num_hidden_layers * kv_heads * head * width
    one = per_token * 128 * (math.ceil(length / 128) + 1) / 2**30
    return min(max(4.0, one), max(1 / 16, one * (sequences + 1)))


def cache_advice(error: Exception) -> str:
    """For vLLM's error that the KV cache holds no sequence of full length: our names of what it wants changed."""
    if "gpu_memory_utilization" not in str(error):
        return ""
    return (
        " Here: lower max_model_length (vllm_max_model_length of a trainer's config), or raise kv_cache_gib (in "
        "its engine_options)."
    )
