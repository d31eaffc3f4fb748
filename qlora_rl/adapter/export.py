"""`export_adapter`: the live adapter in canonical form, without touching the model.

vLLM applies one factor `lora_alpha / r` to all modules and ignores `rank_pattern`, `alpha_pattern` and `set_scale`.
So the live factor of each layer is folded into its B (in float32, before the one cast), smaller ranks are padded with
zeros, and the config says `lora_alpha == r`: the delta of a module is B @ A and nothing else.

Source of the trap: vllm/lora/peft_helper.py drops the config keys that it does not know.
"""

from __future__ import annotations

from typing import Any

import torch

from qlora_rl.adapter.verdict import Verdict, active_adapter, judge_adapter, lora_layers, ranks_of
from qlora_rl.contracts import AdapterBundle
from qlora_rl.errors import AdapterRefusedError, collected


@torch.no_grad()
def export_adapter(model: Any, *, dtype: torch.dtype | None = None, verdict: Verdict | None = None) -> AdapterBundle:
    """Export the active LoRA of a PeftModel.

    Args:
        model: the live PeftModel; only read.
        dtype: of the exported tensors, usually the one in which the engine multiplies; by default that of the weights.
        verdict: of this model, if it was judged already.

    Returns:
        CPU tensors A [R, I] and B [O, R] for each module, R the largest rank.

    Raises:
        AdapterRefusedError: it is not plain LoRA; names every reason.
    """
    verdict = verdict or judge_adapter(model)
    if verdict.kind != "adapter":
        raise collected("exporting the adapter", verdict.reasons, AdapterRefusedError)
    adapter = active_adapter(model)
    layers = list(lora_layers(model, adapter))
    rank = max(ranks_of(layer, adapter) for _, layer in layers)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in layers:
        a_RI, b_OR = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        scaled_OR = b_OR.float() * float(layer.scaling[adapter])
        key = f"base_model.model.{name}"
        tensors[f"{key}.lora_A.weight"] = (
            _padded(a_RI, rank, dim=0).to("cpu", dtype or a_RI.dtype, copy=True).contiguous()
        )
        tensors[f"{key}.lora_B.weight"] = (
            _padded(scaled_OR, rank, dim=1).to("cpu", dtype or b_OR.dtype, copy=True).contiguous()
        )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(getattr(model.get_base_model().config, "_name_or_path", "")),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.split(".")[-1] for name, _ in layers}),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }
    return AdapterBundle(tensors, config)


def _padded(tensor: torch.Tensor, rank: int, *, dim: int) -> torch.Tensor:
    """`tensor` with zeros appended along `dim` up to `rank`."""
    missing = rank - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)
