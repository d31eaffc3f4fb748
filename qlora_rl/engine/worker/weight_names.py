"""vLLM's weights by the names that transformers gives them: fused ones split, what its CPU backend has packed away read
back.

Runs inside vLLM's worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from qlora_rl.engine.options import ONE_GATE_UP
from qlora_rl.engine.worker.experts import expert_matrices, expert_names, is_of_experts, unpacked
from qlora_rl.errors import EngineUnsupportedError


def quantised(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Name, packed codes and QuantState of every 4-bit weight; fused ones split back into their shards.

    Raises:
        EngineUnsupportedError: vLLM names other shards than the checkpoint has.
    """
    for name, parameter in model.named_parameters():
        states = getattr(parameter, "bnb_quant_state", None)
        if states is None:
            continue
        offsets, shards = parameter.bnb_shard_offsets.tolist(), shard_names(model, name)
        if len(shards) != len(states):
            raise EngineUnsupportedError(
                f"reading vLLM's base: the checkpoint has {len(states)} weight(s) for {name}, and vLLM takes it for "
                f"{', '.join(shards)}. LocalEngine and `qlora-rl serve` correct that for the models in which it is "
                "known: start the engine with them, or use a model of another type.",
                module=name,
            )
        for i, shard in enumerate(shards):
            yield shard, parameter.data[offsets[i] : offsets[i + 1]], states[i]
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "parts"):  # `experts_4bit.CodedExperts`
            yield from method.parts()


def unquantised(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of every other weight; fused ones split, the padding of the vocabulary cut off."""
    for name, weight, owner in unquantised_parameters(model, dtype):
        yield from parts(model, name, weight, owner)


def unquantised_parameters(
    model: torch.nn.Module, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor, torch.nn.Module]]:
    """vLLM's own name, values and layer of every parameter that is not 4-bit."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if getattr(parameter, "bnb_quant_state", None) is not None:
            continue
        owner = modules[name.rpartition(".")[0]]
        weight = unpacked(parameter.data, owner) if is_of_experts(name) else _as_loaded(parameter.data, owner, dtype)
        yield name, weight, owner


def parts(model: torch.nn.Module, name: str, weight: torch.Tensor, owner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """An unquantised weight of vLLM's, in the parts that transformers knows; views."""
    shards = shard_names(model, name)
    if is_of_experts(name):
        yield from zip(shards, expert_matrices(name, weight, owner), strict=True)
        return
    if len(shards) > 1:
        yield from zip(shards, weight.split(list(owner.output_sizes), dim=0), strict=True)
        return
    rows = getattr(owner, "org_vocab_size", None)
    yield shards[0], weight if rows is None else weight[:rows]


def shard_names(model: torch.nn.Module, name: str) -> list[str]:
    """What transformers calls the parts of a vLLM parameter: q, k and v of `qkv_proj`, and so on."""
    if is_of_experts(name):
        return expert_names(name, model.get_submodule(name.rpartition(".")[0]))
    path, _, what = _transformers_name(model, name.replace(".base_layer.", ".")).rpartition(".")
    parent, _, own = path.rpartition(".")
    packed = _packed(model).get(own)
    return [f"{parent}.{part}.{what}" for part in packed] if packed else [f"{path}.{what}" if path else what]


def name_as_stored(config: Any) -> None:
    """Before vLLM loads a model: have its class name a fused linear as checkpoints do (`ONE_GATE_UP`), and so take
    adapters for it.

    Args:
        config: transformers', of the model.
    """
    if config.model_type in ONE_GATE_UP:
        home = importlib.import_module(f"vllm.model_executor.models.{config.model_type}")
        kind = getattr(home, ONE_GATE_UP[config.model_type])
        kind.packed_modules_mapping = {**kind.packed_modules_mapping, "gate_up_proj": ["gate_up_proj"]}


def _packed(model: torch.nn.Module) -> Mapping[str, Sequence[str]]:
    """Fused linears and their parts; of a vision-language model that says nothing (Qwen2-VL) those of its language
    model."""
    found = getattr(model, "packed_modules_mapping", {})
    if not found and getattr(model, "supports_multimodal", False):
        found = getattr(model.get_language_model(), "packed_modules_mapping", {})
    return dict(found)


def _transformers_name(model: torch.nn.Module, name: str) -> str:
    """vLLM calls the parts of vision-language models otherwise, and maps the beginnings of names when it loads them:
    the inverse."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None or not getattr(model, "supports_multimodal", False):
        return name
    for theirs, own in mapper.orig_to_new_prefix.items():
        if own and name.startswith(own):
            return str(theirs) + name.removeprefix(own)  # the first is the name of today's transformers
    return name


def _as_loaded(weight: torch.Tensor, owner: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Undo what vLLM's CPU backend does to unquantised linears after loading.

    It packs the weight away and leaves an empty parameter: the weight is read back through the layer, as its product
    with the identity, which is exact. It may lift a bias to float32: taken back where that loses nothing.
    """
    if weight.numel() == 0 and hasattr(owner, "cpu_linear"):
        size, device = getattr(owner, "input_size_per_partition", owner.input_size), weight.device
        columns = [
            owner.cpu_linear(eye, owner.weight, None) for eye in torch.eye(size, dtype=dtype, device=device).split(1024)
        ]
        return torch.cat(columns).T.contiguous()
    if weight.dtype == torch.float32 != dtype and torch.equal(weight.to(dtype).float(), weight):
        return weight.to(dtype)
    return weight
