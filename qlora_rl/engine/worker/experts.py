"""Mixtures of experts in vLLM: loaded next to 4-bit linears, on the CPU's own kernel although LoRA is on; their experts
read back.

Names that are private to vLLM and its bitsandbytes plugin, as in `compat`. Runs inside vLLM's worker.

Shape letters: E experts, I inner width of one, H hidden size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from qlora_rl.base.checkpoint import open_base
from qlora_rl.errors import EngineUnsupportedError

_GATE_UP, _DOWN = "w13_weight", "w2_weight"


@contextlib.contextmanager
def experts_of(directory: str) -> Iterator[None]:
    """While it lasts vLLM makes mixtures as the base in `directory` has them, with experts in 16 or in 4 bits that no
    adapter changes.

    - With LoRA on, 0.31 takes a Triton kernel for experts even where `lora_target_modules` leaves them out, and ends on
      the CPU. Remove when its choice knows the target modules.
    - The plugin (0.0.3) takes the experts of every 4-bit checkpoint for 4-bit, and cannot load these. Remove when it
      reads their names in `llm_int8_skip_modules`.
    - It looks through all names for each 4-bit weight, which takes minutes with those of experts; `CodedExperts` reads
      these itself.
    - It also checks which parameters were loaded, and `MoERunner.load_weights` leaves a part of the experts' names out,
      before 0.32. Remove when 0.31 is dropped.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantized
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    select, load = unquantized.select_unquantized_moe_backend, MoERunner.load_weights

    def select_unadapted(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config)

    def load_named(self: Any, weights: Any) -> Iterator[str]:
        part = "routed_experts."
        return (name if name.startswith(part) else part + name for name in load(self, weights))

    with contextlib.ExitStack() as patches:
        patches.enter_context(_replaced(unquantized, "select_unquantized_moe_backend", select_unadapted))
        patches.enter_context(_replaced(MoERunner, "load_weights", load_named))
        with contextlib.suppress(ImportError):
            from vllm_bnb_plugin.bitsandbytes_loader import BitsAndBytesModelLoader
            from vllm_bnb_plugin.quantization.config import BitsAndBytesConfig

            method, tensors = BitsAndBytesConfig.get_quant_method, BitsAndBytesModelLoader._hf_weight_iter
            are_4bit = open_base(directory, verify=False).spec.quantize_experts

            def method_of(self: Any, layer: Any, prefix: str) -> Any:
                if isinstance(layer, RoutedExperts) and are_4bit:
                    from qlora_rl.engine.worker.experts_4bit import CodedExperts

                    return CodedExperts(layer.moe_config, prefix)
                if isinstance(layer, RoutedExperts):
                    return unquantized.UnquantizedFusedMoEMethod(layer.moe_config)
                return method(self, layer, prefix)

            def without_experts(self: Any, files: Any, use_safetensors: bool) -> Iterator[Any]:
                return (each for each in tensors(self, files, use_safetensors) if ".experts." not in each[0])

            patches.enter_context(_replaced(BitsAndBytesConfig, "get_quant_method", method_of))
            if are_4bit:
                patches.enter_context(_replaced(BitsAndBytesModelLoader, "_hf_weight_iter", without_experts))
            patches.enter_context(_replaced(BitsAndBytesModelLoader, "_fuse_moe_quant_states", lambda *_: {}))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def is_of_experts(name: str) -> bool:
    """A parameter of vLLM's holds the experts of a layer."""
    return name.endswith((f".experts.routed_experts.{_GATE_UP}", f".experts.routed_experts.{_DOWN}"))


def expert_names(name: str, owner: Any) -> list[str]:
    """What checkpoints call the matrices in such a parameter, expert by expert.

    Args:
        name: of the parameter.
        owner: vLLM's layer that holds it.
    """
    path, _, own = name.rpartition(".routed_experts.")
    parts = [owner.ckpt_gate_proj_name, owner.ckpt_up_proj_name] if own == _GATE_UP else [owner.ckpt_down_proj_name]
    return [f"{path}.{number}.{part}.weight" for number in range(owner.moe_config.num_experts) for part in parts]


def expert_matrices(name: str, weight: torch.Tensor, owner: Any) -> Iterator[torch.Tensor]:
    """The matrices in such a parameter, in the order of `expert_names`, without the zeros that its kernel pads them
    with.

    Args:
        name: of the parameter.
        weight: [E, 2I, H] or [E, H, I], as `unpacked` gives it.
        owner: vLLM's layer that holds it.
    """
    width = owner.moe_config.intermediate_size_per_partition_unpadded
    for expert in weight:
        if name.endswith(_DOWN):
            yield expert[:, :width]
        else:
            yield from (half[:width] for half in expert.chunk(2))


def unpacked(weight: torch.Tensor, owner: Any) -> torch.Tensor:
    """The experts of a layer in row-major order; on the CPU vLLM's kernel has put them in an order of its own.

    Which order that is, is asked of vLLM's own packing: what it makes of the numbers of all places in an expert.

    Args:
        weight: as vLLM holds it, [E, rows, columns].
        owner: vLLM's layer that holds it.

    Raises:
        EngineUnsupportedError: the packing does more than move elements.
    """
    kernel = owner.quant_method.moe_kernel.fused_experts
    isa = getattr(kernel, "isa", None)
    if isa is None or kernel._use_zentorch:
        return weight
    order = _packed_order(weight.shape[1:], weight.dtype, isa)
    plain = torch.empty_like(weight)
    for expert, packed in zip(plain.flatten(1), weight.flatten(1), strict=True):
        expert[order] = packed
    return plain


@functools.lru_cache(maxsize=2)  # the two of a model; making one takes longer than using it
def _packed_order(shape: torch.Size, dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Where each element of a packed expert was before, int32 [rows · columns]."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    count, width = shape.numel(), dtype.itemsize * 8
    places = torch.arange(count)
    order = torch.zeros(count, dtype=torch.int32)
    # Elements of 16 bits cannot hold the number of a place: it is packed in two halves.
    kind, mask = (torch.int16, 2**16 - 1) if width == 16 else (torch.int32, -1)
    for low in range(0, 32, width):
        part = (places >> low) & mask
        bits = torch.where(part >= 2 ** (width - 1), part - 2**width, part).to(kind)
        packed = cpu_prepack_moe_weight(bits.view(dtype).reshape(1, *shape), isa)
        order |= (packed.flatten().view(kind).int() & mask) << low
    if not bool(torch.zeros(count, dtype=torch.bool).index_fill_(0, order.long(), True).all()):
        raise EngineUnsupportedError(
            f"reading the experts: vLLM's packing for {isa} does more than move elements of {dtype}, so that what it "
            "holds cannot be compared."
        )
    return order
