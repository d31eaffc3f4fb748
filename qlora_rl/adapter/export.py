"""`export_adapter`: the live adapter in canonical form, without touching the model.

vLLM reads a config, which says nothing of `set_scale`, and before 0.32 it ignores `rank_pattern` and `alpha_pattern`
and applies one factor `lora_alpha / r` to all modules. So the live factor of each layer is folded into its B (with one
rounding in all), smaller ranks are padded with zeros, and the config says `lora_alpha == r`: the delta of a module is
B @ A and nothing else.

Source of the trap: vllm/lora/peft_helper.py drops the config keys that it does not know, and from 0.32 on rejects
starts that change the base (PiSSA, OLoRA, CorDA, LoftQ), whose names are not written here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from qlora_rl.adapter.directory import open_adapter
from qlora_rl.adapter.inspected import InspectedAdapter, active_adapter, factors_of, ranks_of
from qlora_rl.adapter.verdict import Verdict, judge_adapter, judge_opened
from qlora_rl.contracts import AdapterBundle, lora_name
from qlora_rl.errors import AdapterRejectedError, collected


def export_adapter(model: Any, *, dtype: torch.dtype | None = None, verdict: Verdict | None = None) -> AdapterBundle:
    """Export the active LoRA of a PeftModel.

    Args:
        model: the live PeftModel; only read.
        dtype: of the exported tensors, usually the one in which the engine multiplies; by default that of the weights.
        verdict: of this model, if it was judged already.

    Returns:
        CPU tensors A [R, I] and B [O, R] for each module, R the largest rank.

    Raises:
        AdapterRejectedError: it is not plain LoRA; names every reason.
    """
    verdict = verdict or judge_adapter(model)
    if verdict.kind != "adapter":
        raise collected("exporting the adapter", verdict.reasons, AdapterRejectedError)
    return export_subject(InspectedAdapter(model, active_adapter(model)), dtype)


@torch.no_grad()
def export_subject(
    inspected: InspectedAdapter,
    dtype: torch.dtype | None = None,
    weights: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> AdapterBundle:
    """`export_adapter` for a model that was judged already; `weights`: A and B of each layer, where they were
    gathered."""
    adapter = inspected.adapter
    layers = list(inspected.layers.items())
    rank = max(ranks_of(layer, adapter) for _, layer in layers)
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in layers:
        a_RI, b_OR, scale, _ = factors_of(layer, adapter)
        if weights is not None:
            a_RI, b_OR = weights[name]
        wanted = dtype or b_OR.dtype
        scaled_OR = b_OR.to(wanted) * scale if is_folded_after(scale, wanted) else (b_OR.float() * scale).to(wanted)
        if wanted == torch.float16 and not bool(
            torch.isfinite(scaled_OR).all() & torch.isfinite(a_RI.to(wanted)).all()
        ):
            raise AdapterRejectedError(
                f"exporting the adapter: A, or B times its scale={scale:g}, is too large for float16 at {name}. Use "
                "bfloat16, or a smaller lora_alpha.",
                module=name,
            )
        tensors[lora_name(name, "A")] = (
            _padded(a_RI, rank, dim=0).to("cpu", dtype or a_RI.dtype, copy=True).contiguous()
        )
        tensors[lora_name(name, "B")] = _padded(scaled_OR, rank, dim=1).to("cpu", copy=True).contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(
            getattr(getattr(inspected.base, "config", None), "_name_or_path", "")
            or inspected.config.base_model_name_or_path
            or ""
        ),
        "r": rank,
        "lora_alpha": rank,
        # In full: an ending would reach layers that this adapter leaves out.
        "target_modules": sorted(name for name, _ in layers),
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


def is_folded_after(scale: float, dtype: torch.dtype) -> bool:
    """The scale is folded into B after its cast to `dtype`, where that rounds nothing: a power of two, in a wide
    exponent.

    Equal to folding before for every number above 1e-37, and several times faster where B is copied in place. Any other
    scale is folded in float32, before the one rounding.
    """
    return dtype in (torch.bfloat16, torch.float32) and abs(math.frexp(scale)[0]) == 0.5


def settle_patterns(model: Any, directory: Path) -> None:
    """Make the config of a directory that `save_pretrained` has written say what the live layers multiply with.

    PEFT writes what the adapter was made with: `set_scale` is lost, and of patterns that overlap, which it sorts,
    another one may win when they are read. Written are full names, where anything differs from layer to layer or from
    the config.
    """
    adapter = active_adapter(model)
    layers, config = InspectedAdapter(model, adapter).layers, model.peft_config[adapter]
    if not layers:
        return
    root = math.sqrt if config.use_rslora else float
    ranks = {name: ranks_of(layer, adapter) for name, layer in layers.items()}
    alphas = {name: float(layer.scaling[adapter]) * root(ranks[name]) for name, layer in layers.items()}
    is_plain = not (config.rank_pattern or config.alpha_pattern)
    if (
        is_plain
        and set(ranks.values()) == {config.r}
        and all(math.isclose(a, config.lora_alpha) for a in alphas.values())
    ):
        return
    file = directory / "adapter_config.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"rank_pattern": ranks, "alpha_pattern": alphas}, indent=2, sort_keys=True))


def read_adapter(
    directory: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> AdapterBundle:
    """A PEFT directory in canonical form: what vLLM must be given instead of it to serve the same function.

    Args:
        directory: that `save_pretrained` has written.
        base: see `judge_adapter`.
        dtype: of the tensors; by default that of the file.

    Raises:
        AdapterRejectedError: it is not plain LoRA; names every reason.
    """
    opened = open_adapter(directory, base)
    verdict = judge_opened(opened)
    if verdict.kind != "adapter":
        raise collected(f"reading the adapter {directory}", verdict.reasons, AdapterRejectedError)
    return export_adapter(opened.model, dtype=dtype, verdict=verdict)


def _padded(tensor: torch.Tensor, rank: int, *, dim: int) -> torch.Tensor:
    """`tensor` with zeros appended along `dim` up to `rank`."""
    missing = rank - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)
