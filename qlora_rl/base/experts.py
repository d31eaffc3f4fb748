"""Mixtures of experts: which are supported, and what checkpoints call the matrices of their experts.

transformers holds the experts of a layer in two tensors, `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E, H, I]. Published
checkpoints, vLLM and a base directory have three matrices for each expert. A base is written, compared and exported by the latter names.

Shape letters: E experts, I inner width of one, H hidden size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qlora_rl.errors import NotYetSupportedError


@dataclass(frozen=True)
class Naming:
    """What the checkpoints of one type of model call a mixture.

    Attributes:
        block: the module that transformers calls `mlp`.
        gate, up, down: the matrices of one expert.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


# Whose values and names in vLLM were compared with transformers'.
NAMINGS = {"mixtral": Naming("block_sparse_moe", "w1", "w3", "w2"), "olmoe": Naming(), "qwen3_moe": Naming()}
# The linears of their attention: what an adapter on one of them can reach.
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def is_mixture(config: Any) -> bool:
    """A transformers config is that of a mixture of experts."""
    text = config.get_text_config()
    return any((getattr(text, name, None) or 0) > 1 for name in _COUNTS)


def adaptable(config: Any, target_modules: str | Sequence[str]) -> str | Sequence[str]:
    """What of `target_modules` an adapter on a model of this config may be on: "all-linear" is the attention alone in a mixture of experts."""
    return list(ATTENTION) if target_modules == "all-linear" and is_mixture(config) else target_modules


def directory_is_mixture(directory: str | os.PathLike[str]) -> bool:
    """The checkpoint in a directory is a mixture of experts."""
    config = json.loads((Path(directory) / "config.json").read_text())
    return any((config.get(name) or 0) > 1 for name in _COUNTS)


def check_mixture_type(config: Any) -> None:
    """Reject a mixture of a type that was not compared, and one that vLLM cannot serve in 4 bits.

    Raises:
        NotYetSupportedError: names the types that were compared, or the field.
    """
    if is_mixture(config) and config.model_type not in NAMINGS:
        raise NotYetSupportedError(
            f"preparing a base: {config.model_type} is a mixture of experts, and what vLLM makes of it has not been compared with transformers. "
            f"Use one of {', '.join(NAMINGS)}, or a dense model."
        )

    # vLLM 0.31 fuses gate and up of dense layers, and knows their parts only where `mlp_only_layers` lists such layers.
    if getattr(config, "decoder_sparse_step", 1) > 1 and not config.mlp_only_layers:
        raise NotYetSupportedError(
            f"preparing a base: decoder_sparse_step={config.decoder_sparse_step}, and vLLM takes no adapters on such a model. Name its dense layers in "
            "mlp_only_layers of its config instead, with decoder_sparse_step=1."
        )


def naming_of(model: Any) -> Naming | None:
    """How the checkpoints of a model name its experts; `None` where transformers' own names are theirs."""
    return NAMINGS.get(getattr(getattr(model, "config", None), "model_type", ""))


def stored_parts(naming: Naming | None, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight of transformers' model by the names of checkpoints: one by one the matrices of all experts, else itself; views.

    Args:
        naming: `naming_of` its model.
        name: in the bare model.
        weight: of any shape; that of experts is [E, 2I, H] or [E, H, I].
    """
    if naming is None or ".mlp." not in name:
        yield name, weight
        return
    layer, _, own = name.rpartition(".mlp.")
    path = f"{layer}.{naming.block}"
    if own == "experts.gate_up_proj":
        for number, both in enumerate(weight):
            gate, up = both.chunk(2)
            yield f"{path}.experts.{number}.{naming.gate}.weight", gate
            yield f"{path}.experts.{number}.{naming.up}.weight", up
    elif own == "experts.down_proj":
        for number, down in enumerate(weight):
            yield f"{path}.experts.{number}.{naming.down}.weight", down
    else:
        yield f"{path}.{own}", weight


def routers_of(model: torch.nn.Module) -> list[str]:
    """Names in checkpoints of the linears that choose the experts; they are never quantised."""
    naming = naming_of(model)
    if naming is None:
        return []
    return [f"{name.removesuffix('mlp')}{naming.block}.gate" for name in mixtures_in(model)]


def mixtures_in(model: torch.nn.Module) -> list[str]:
    """Names in transformers' model of the modules that hold experts and their router, one in each layer that is a mixture."""
    if naming_of(model) is None:
        return []
    return [name.removesuffix(".experts") for name, _ in model.named_modules() if name.endswith(".mlp.experts")]
