"""With what the engine multiplies: the 4-bit codes by our kernels, or whatever vLLM has.

`install` runs inside vLLM's worker. vLLM's layers and functions are here by their private names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import torch

from qlora_rl.contracts import ComputeWish
from qlora_rl.engine.linears.cpu_kernel import CodesKernel, codes_kernel
from qlora_rl.engine.linears.fused_weight import CodedLinear
from qlora_rl.engine.linears.linear import multiply_adapters_directly
from qlora_rl.errors import ConfigConflictError

MODES = get_args(ComputeWish)


@dataclass(frozen=True)
class BaseCompute:
    """What was installed.

    Attributes:
        base: "nf4" or "vllm".
        adapter: "direct", or "vllm".
        reason: why, where that was not asked for.
        left: why a layer, or the adapter, stays with vLLM's own way.
        kernel: on a CPU, instructions of the kernel that multiplies the codes, or why there is none.
        packs_plain: on a CPU, vLLM keeps unquantised linears in a form of its own; see `packs_away`.
    """

    base: str = "vllm"
    adapter: str = "vllm"
    reason: str = ""
    left: Mapping[str, str] = field(default_factory=dict)
    kernel: str = ""
    packs_plain: bool = False

    def __str__(self) -> str:
        left = "".join(f"; {what} is left to vLLM: {why}" for what, why in self.left.items())
        kernel = f"; kernel for codes: {self.kernel}" if self.kernel else ""
        return f"linears multiply with: {self.base} ({self.reason}){kernel}; adapters: {self.adapter}{left}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values that are also sent between processes."""
        return asdict(self)


def check_wish(wish: str) -> None:
    """Reject what is none of `MODES`.

    Raises:
        ConfigConflictError: names them.
    """
    if wish not in MODES:
        raise ConfigConflictError(f"starting vLLM: base_compute={wish!r} is not one of {MODES}. Use 'nf4'.")


def install(runner: Any, wish: str) -> BaseCompute:
    """Change the linears of a model runner, and on a CPU its sampler.

    Args:
        runner: vLLM's.
        wish: one of `MODES`.
    """
    if wish == "vllm":
        return BaseCompute(reason="asked for")
    if runner.device.type == "cpu":
        count_ranks_directly()
    left: dict[str, str] = {}
    why = multiply_adapters_directly(runner)
    if why:
        left["(adapter)"] = why
    adapter = "vllm" if why else "direct"
    if not runner.vllm_config.model_config.enforce_eager:
        return BaseCompute(adapter=adapter, reason="enforce_eager is off: the graph holds vLLM's own way", left=left)
    layers, kernel = bitsandbytes_linears(runner.get_model()), codes_kernel()
    if not layers:
        return BaseCompute(adapter=adapter, reason="the base has no 4-bit layer on the CPU", left=left)
    if isinstance(kernel, str):
        return BaseCompute(adapter=adapter, reason="there is no kernel for codes", left=left, kernel=kernel)
    count = 0
    for name, layer in layers.items():
        try:
            layer.quant_method.apply = CodedLinear(layer.weight, kernel)
            count += 1
        except ValueError as error:
            left[name] = str(error)
    if not count:
        return BaseCompute(adapter=adapter, reason="no 4-bit layer can be decoded here", left=left)
    norm_directly(runner.get_model(), kernel)
    return BaseCompute("nf4", adapter, "asked for", left, kernel=kernel.instructions)


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


def bitsandbytes_linears(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers on the CPU whose `quant_method` is one of their own and multiplies with 4-bit codes, by name."""
    found = {
        name: layer
        for name, layer in model.named_modules()
        if getattr(layer, "quant_method", None) is not None
        and "weight" in layer._parameters
        and hasattr(layer.weight, "bnb_quant_state")
        and layer.weight.is_cpu
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
