"""vLLM's CPU layers and kernels by their private names: the part of `compat` that `base_compute` works with.

Nothing here runs at import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qlora_rl.cpu_features import processor
from qlora_rl.engine.linears.cpu_kernel import CodesKernel, codes_kernel


def multiply_adapters_directly(runner: Any) -> str:
    """Have `linear.AdapterProducts` multiply the adapters of a model runner; empty, or why it stays with vLLM's own
    way.

    vLLM's CPU wrapper gathers A and B for every token, and takes the last slot's adapter for tokens that have none when
    others of the step have one. Remove when `PunicaWrapperCPU` does neither.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from qlora_rl.engine.linears.linear import AdaptedLinear, AdapterProducts

    manager = getattr(getattr(runner, "lora_manager", None), "_adapter_manager", None)
    if manager is None:
        return "the engine takes no adapters"
    if not runner.vllm_config.model_config.enforce_eager:
        return "enforce_eager is off: the compiled graph holds vLLM's own way"
    kernel = codes_kernel()
    products: dict[int, AdapterProducts] = {}
    for layer in manager.modules.values():
        wrapper = getattr(layer, "punica_wrapper", None)
        if type(wrapper) is not PunicaWrapperCPU:
            continue
        if isinstance(wrapper.add_lora_linear, AdapterProducts):
            products.setdefault(id(wrapper), wrapper.add_lora_linear)
        else:
            products[id(wrapper)] = _follow(
                wrapper,
                AdapterProducts(wrapper.add_lora_linear, pack, None if isinstance(kernel, str) else kernel),
            )
        if isinstance(layer.lora_a_stacked, tuple):
            layer.lora_a_stacked = _numbered(layer.lora_a_stacked)
            layer.lora_b_stacked = _numbered(layer.lora_b_stacked)
            if _is_plain(layer):
                layer.apply = AdaptedLinear(layer, products[id(wrapper)])
    return "" if products else "vLLM's kernels for this device need no help"


def count_ranks_directly() -> None:
    """Have vLLM's sampler count the ranks of sampled tokens by the function that it has for it, not by what torch
    compiles from it.

    On a CPU tracing it takes two seconds of the first rollout in each process. The integers are the same. For the life
    of the process. Remove when vLLM compiles it for GPUs alone.
    """
    from vllm.v1.sample import sampler

    compiled = getattr(sampler, "batched_count_greater_than", None)
    written = getattr(compiled, "_torchdynamo_orig_callable", None)
    if written is not None:
        sampler.batched_count_greater_than = written


def norm_directly(model: torch.nn.Module, kernel: CodesKernel) -> None:
    """Have one kernel compute each norm in bf16, where vLLM's operators are a dozen of torch's in between.

    What it gives is theirs, up to the order of one sum. vLLM's own CPU kernel rounds once where the trainer's model
    rounds twice.
    """
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.layernorm import RMSNorm

    if RMSNorm.forward_cpu is not CustomOp.forward_cpu:
        return  # vLLM has found a faster way
    for layer in model.modules():
        # A class that inherits from it may compute something else.
        if (
            type(layer) is RMSNorm
            and layer._forward_method in (layer.forward_native, layer.forward_cpu)
            and (layer.pass_weight and layer.pass_weight_add and layer.variance_size_override is None)
            and (layer.weight.dtype == torch.bfloat16 and layer.weight.is_cpu)
        ):
            layer._forward_method = _normed(layer, kernel)


def _normed(layer: Any, kernel: CodesKernel) -> Callable[..., Any]:
    own, epsilon = layer._forward_method, layer.variance_epsilon

    def forward(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        is_plain = x.dtype == layer.weight.dtype == torch.bfloat16 and x.shape[-1:] == layer.weight.shape
        if residual is not None:
            is_plain = is_plain and residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()
        if not is_plain:
            return own(x, residual)
        out = kernel.norm(x, layer.weight, epsilon, residual)
        return out if residual is None else (out, residual)

    return forward


def _is_plain(layer: Any) -> bool:
    """A linear whose `apply` does nothing but the product of the base and that of the adapter."""
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    owns = (BaseLinearLayerWithLoRA.apply, MergedColumnParallelLinearWithLoRA.apply)
    forwards = (ColumnParallelLinear.forward, RowParallelLinear.forward)
    return getattr(type(layer), "apply", None) in owns and type(layer.base_layer).forward in forwards


def bitsandbytes_linears(model: torch.nn.Module, device: str = "cpu") -> dict[str, torch.nn.Module]:
    """Layers on a kind of device whose `quant_method` is one of their own and multiplies with 4-bit codes, by name."""
    found = {
        name: layer
        for name, layer in model.named_modules()
        if getattr(layer, "quant_method", None) is not None
        and "weight" in layer._parameters
        and hasattr(layer.weight, "bnb_quant_state")
        and layer.weight.device.type == device
    }
    methods = [id(layer.quant_method) for layer in found.values()]
    return {name: layer for name, layer in found.items() if methods.count(id(layer.quant_method)) == 1}


def packs_away(dtype: torch.dtype) -> bool:
    """vLLM's CPU backend keeps unquantised linears in a form of its own here, which nobody else can read; asked of a
    small one.

    Without oneDNN's kernel for the dtype on this processor it multiplies with the weight as it is.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer.weight.numel() == 0


def pack(weight_OI: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """The product with a copy of a 16-bit weight, as this processor makes it fastest; rounded once to the weight's
    dtype."""
    dtype = weight_OI.dtype
    if processor().multiplies_in(dtype) == dtype:
        return pack_as_vllm(weight_OI)
    kernel = codes_kernel()
    if not isinstance(kernel, str) and dtype == torch.bfloat16 and kernel.takes_plain(weight_OI.shape[1]):
        return _by_kernel(kernel, weight_OI.contiguous())
    in_float32 = pack_as_vllm(weight_OI.float())

    def lifted(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return in_float32(x.float(), None if bias is None else bias.float()).to(dtype)

    return lifted


def _by_kernel(
    kernel: CodesKernel, weight_OI: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    def multiplied(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = kernel.multiply_plain(x.reshape(-1, x.shape[-1]).contiguous(), weight_OI).view(*x.shape[:-1], -1)
        return out if bias is None else out.add_(bias)

    return multiplied


def pack_as_vllm(weight_OI: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """The product with a weight as vLLM's CPU backend makes it for an unquantised linear; it keeps its own copy.

    Private functions that move between releases: without them, torch's own product. Remove when vLLM names them.
    """
    try:
        from vllm.model_executor.layers.utils import check_cpu_sgl_kernel, dispatch_cpu_unquantized_gemm
    except ImportError:

        def as_torch(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return torch.nn.functional.linear(x, weight_OI, bias)

        return as_torch
    holder: Any = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight_OI, requires_grad=False)
    lifts = check_cpu_sgl_kernel(*weight_OI.shape, weight_OI.dtype)  # that kernel takes a bias in float32
    dispatch_cpu_unquantized_gemm(holder, remove_weight=True)
    product, weight = holder.cpu_linear, holder.weight

    def packed(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return product(x, weight, bias.float() if lifts and bias is not None else bias)

    return packed


def _numbered(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Tensors whose writes torch counts; those that were made under inference mode are copied."""
    with torch.inference_mode(mode=False):
        return tuple(t.clone() if t.is_inference() else t for t in tensors)


def _follow(wrapper: Any, products: Any) -> Any:
    update = wrapper.update_metadata

    def update_and_note(*arguments: Any, **more: Any) -> None:
        update(*arguments, **more)
        products.note(wrapper.token_lora_indices)

    wrapper.update_metadata, wrapper.add_lora_linear = update_and_note, products
    return products
