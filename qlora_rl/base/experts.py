"""Mixtures of experts: which are supported, and what checkpoints call the matrices of their experts; `Names`: and all
other weights.

transformers holds the experts of a layer in two tensors, `experts.gate_up_proj` [E, 2I, H] and `experts.down_proj` [E,
H, I]. Published checkpoints, vLLM and a base directory have three matrices for each expert. A base is written, compared
and exported by the latter names. Experts that are 4-bit are linears in the trainer too (`experts_as_linears`), each
with the codes and scales of one matrix.

Shape letters: E experts, I inner width of one, H hidden size, T tokens, K chosen experts of a token.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Naming:
    """What the checkpoints of one type of model call a mixture.

    Attributes:
        layer: class of transformers that holds the experts of a layer and their router.
        width: field of the config with the inner width of an expert.
        block: the module that transformers calls `mlp`.
        gate, up, down: the matrices of one expert.
        rounds_weights: transformers rounds the weights of the chosen experts to the compute dtype.
    """

    layer: str
    width: str = "intermediate_size"
    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    rounds_weights: bool = True


# Whose values and names in vLLM were compared with transformers'.
NAMINGS = {
    "mixtral": Naming(
        "MixtralSparseMoeBlock", block="block_sparse_moe", gate="w1", up="w3", down="w2", rounds_weights=False
    ),
    "olmoe": Naming("OlmoeSparseMoeBlock"),
    "qwen3_moe": Naming("Qwen3MoeSparseMoeBlock", "moe_intermediate_size"),
}
# The linears of their attention: what an adapter on one of them can reach.
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")
# Of published checkpoints, from which vLLM loads. transformers reads both forms, and has dropped the inner name.
_TOWERS = {"gemma3": ("model.vision_tower.", "model.vision_tower.vision_model.")}
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def is_mixture(config: Any) -> bool:
    """A transformers config is that of a mixture of experts."""
    text = config.get_text_config()
    return any((getattr(text, name, None) or 0) > 1 for name in _COUNTS)


def directory_is_mixture(directory: str | os.PathLike[str]) -> bool:
    """The checkpoint in a directory is a mixture of experts."""
    config = json.loads((Path(directory) / "config.json").read_text())
    return any((config.get(name) or 0) > 1 for name in _COUNTS)


def naming_of(model: Any) -> Naming | None:
    """How the checkpoints of a model name its experts; `None` where transformers' own names are theirs."""
    return NAMINGS.get(getattr(getattr(model, "config", None), "model_type", ""))


class Names:
    """What checkpoints call the weights of one model, from names in transformers' model.

    Args:
        model: of transformers, bare.
    """

    def __init__(self, model: Any):
        self._mixture = naming_of(model)
        self._tower = _TOWERS.get(getattr(getattr(model, "config", None), "model_type", ""))

    def stored(self, name: str) -> str:
        """Of a weight that checkpoints store as it is."""
        return self._lengthened(name if self._mixture is None else name.replace(".mlp.", f".{self._mixture.block}.", 1))

    def parts(self, name: str, weight: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Of a weight, and of the parts in which checkpoints store it: one by one the matrices of all experts, else
        itself; views.

        Args:
            name: in the bare model.
            weight: of any shape; that of experts is [E, 2I, H] or [E, H, I].
        """
        naming, (path, _, own) = self._mixture, self.stored(name).rpartition(".experts.")
        if naming is None or own not in ("gate_up_proj", "down_proj"):
            yield self.stored(name), weight
            return
        for number, matrices in enumerate(weight):
            if own == "down_proj":
                named = {naming.down: matrices}
            else:
                named = dict(zip((naming.gate, naming.up), matrices.chunk(2), strict=True))
            for part, matrix in named.items():
                yield f"{path}.experts.{number}.{part}.weight", matrix

    def _lengthened(self, name: str) -> str:
        if self._tower is None or not name.startswith(self._tower[0]) or name.startswith(self._tower[1]):
            return name
        return self._tower[1] + name.removeprefix(self._tower[0])


def routers_of(model: torch.nn.Module) -> list[str]:
    """Names in checkpoints of the linears that choose the experts; they are never quantised."""
    naming = naming_of(model)
    if naming is None:
        return []
    return [f"{name.removesuffix('mlp')}{naming.block}.gate" for name in mixtures_in(model)]


def of_expert(name: str) -> bool:
    """A module, or a tensor of it, belongs to one expert that is made of linears."""
    return _ONE_EXPERT.search(name) is not None


def mixtures_in(model: torch.nn.Module) -> list[str]:
    """Names in transformers' model of the modules that hold experts and their router, one in each layer that is a
    mixture."""
    if naming_of(model) is None:
        return []
    return [name.removesuffix(".experts") for name, _ in model.named_modules() if name.endswith(".mlp.experts")]


def mix(
    x_TH: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    expert: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What the chosen experts make of each token, weighted and added up in the order of the experts; [T, H].

    Trainer and engine both call this, so that they round alike. Each expert is called once at most, with all tokens
    that chose it.

    Args:
        x_TH: hidden states.
        chosen_TK: numbers of the experts of each token.
        weights_TK: of the same.
        expert: (number, some rows of x_TH) to as many rows.
    """
    out_TH = torch.zeros_like(x_TH)
    for number in chosen_TK.unique().tolist():
        token, place = torch.where(chosen_TK == number)
        weighted = expert(number, x_TH[token]) * weights_TK[token, place, None]
        out_TH = _Added.apply(out_TH, token, weighted.to(out_TH.dtype))
    return out_TH


class _Added(torch.autograd.Function):
    """`index_add_` that keeps only the places for its backward pass; torch's keeps what it adds as well."""

    @staticmethod
    def forward(ctx: Any, out_TH: torch.Tensor, token_S: torch.Tensor, added_SH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_S)
        ctx.mark_dirty(out_TH)
        return out_TH.index_add_(0, token_S, added_SH)

    @staticmethod
    def backward(ctx: Any, gradient_TH: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        (token_S,) = ctx.saved_tensors
        return gradient_TH, None, gradient_TH[token_S]


class LinearExperts(torch.nn.Module):
    """The experts of a layer, each matrix a linear of its own; in the place of transformers' class, with its `forward`.

    Args:
        config: of the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        naming, hidden = NAMINGS[config.model_type], config.hidden_size
        width = getattr(config, naming.width)
        self._names = (naming.gate, naming.up, naming.down)
        self.act_fn = ACT2FN[config.hidden_act]
        for number in range(config.num_experts if hasattr(config, "num_experts") else config.num_local_experts):
            expert = torch.nn.Module()
            for name, (rows, columns) in zip(
                self._names, ((width, hidden), (width, hidden), (hidden, width)), strict=True
            ):
                expert.add_module(name, torch.nn.Linear(columns, rows, bias=False))
            self.add_module(str(number), expert)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`mix` of hidden_states [T, H] for the choice [T, K]."""
        return mix(hidden_states, top_k_index, top_k_weights, self._expert)

    def _expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self._modules[str(number)], name) for name in self._names)
        return down(self.act_fn(gate(x)) * up(x))


@contextlib.contextmanager
def experts_as_linears(config: Any) -> Iterator[None]:
    """While it lasts transformers makes the experts of a mixture with this config as `LinearExperts`, and takes their
    names in checkpoints as they are.

    bitsandbytes' integration quantises linears alone. Remove when transformers loads 4-bit experts.
    """
    leave_names_of_linears()
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    kind = config.model_type
    layer = getattr(importlib.import_module(f"transformers.models.{kind}.modeling_{kind}"), NAMINGS[kind].layer)
    make, mapping_of = layer.__init__, conversion_mapping.get_checkpoint_conversion_mapping

    def make_with_linears(self: Any, config: Any) -> None:
        make(self, config)  # on the meta device, as transformers makes models that it loads
        self.experts = LinearExperts(config)

    def renamings(name: str) -> Any:
        found = mapping_of(name)
        return [each for each in found if isinstance(each, WeightRenaming)] if name == kind and found else found

    layer.__init__, conversion_mapping.get_checkpoint_conversion_mapping = make_with_linears, renamings
    try:
        yield
    finally:
        layer.__init__, conversion_mapping.get_checkpoint_conversion_mapping = make, mapping_of


def leave_names_of_linears() -> None:
    """From now on PEFT takes the names of experts that are linears as they are, in configs and in directories.

    PEFT 0.21 takes `gate_proj` and its like in these models for parts of transformers' fused tensors, whatever the
    model holds, and then reaches nothing. Of all other models it goes on as before. Remove when it looks at the model.
    """
    from peft.utils import transformers_weight_conversion as conversion

    if getattr(conversion, "_qlora_leaves_linears", False):
        return
    of_config = conversion.convert_peft_config_for_transformers
    of_tensors = conversion.convert_peft_adapter_state_dict_for_transformers

    @functools.wraps(of_config)
    def convert_config(peft_config: Any, model: torch.nn.Module, *arguments: Any, **more: Any) -> None:
        if not has_linear_experts(model):
            of_config(peft_config, model, *arguments, **more)

    @functools.wraps(of_tensors)
    def convert_tensors(
        model: torch.nn.Module, peft_config: Any, adapter_state_dict: Any, *rest: Any, **more: Any
    ) -> Any:
        if has_linear_experts(model):
            return adapter_state_dict
        return of_tensors(model, peft_config, adapter_state_dict, *rest, **more)

    conversion.convert_peft_config_for_transformers = convert_config
    conversion.convert_peft_adapter_state_dict_for_transformers = convert_tensors
    conversion._qlora_leaves_linears = True


def has_linear_experts(model: torch.nn.Module) -> bool:
    """The experts of a model are linears, to which an adapter can be attached one by one."""
    return any(isinstance(module, LinearExperts) for module in model.modules())


def linear_experts_in(model: torch.nn.Module) -> list[str]:
    """Names in transformers' model of the modules that hold experts as linears."""
    return [name for name, module in model.named_modules() if isinstance(module, LinearExperts)]


def is_expert_matrix(name: str) -> bool:
    """A name in checkpoints is that of one matrix of an expert."""
    path, _, rest = name.partition(".experts.")
    return bool(path) and rest.partition(".")[0].isdigit() and rest.endswith(".weight")
