"""What runs inside vLLM: a worker extension that says what base the engine really multiplies with, and repairs its scales.

Loaded by vLLM through `worker_extension_cls`, called through `collective_rpc`; its methods become the worker's own, so they
carry a prefix. Results are plain values that also travel between processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.fingerprint import digest_4bit, digest_bytes, digest_plain, facts_of
from qlora_rl.base.stored import StoredTensors
from qlora_rl.contracts import BaseFingerprint, Leaf


class BaseExtension:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def qlora_describe_base(self) -> dict[str, Any]:
        """The *function* of the base as this worker holds it (`BaseFingerprint.as_dict`)."""
        model = self.model_runner.get_model()
        config = self.model_runner.model_config
        leaves: dict[str, Leaf] = dict(_leaves(model, config.dtype))
        facts = facts_of(config.model) if Path(config.model).is_dir() else {}
        return BaseFingerprint(dict(sorted(leaves.items())), facts).as_dict()

    def qlora_repair_scales(self) -> dict[str, float]:
        """Write the exact scales of the directory that was loaded into the 4-bit weights, where they differ.

        Returns:
            Largest relative error of each weight that was repaired, by transformers' name.
        """
        stored = StoredTensors(self.model_runner.model_config.model)
        repaired: dict[str, float] = {}
        for name, _, state in _quantised(self.model_runner.get_model()):
            if name not in stored:
                continue
            quantised = stored.read_4bit(name)
            if quantised is None:
                continue
            exact = quantised.absmax.to(state.absmax.device)
            held = state.absmax.flatten()
            if held.shape != exact.shape or torch.equal(held, exact):
                continue
            repaired[name] = float(((held - exact).abs() / exact.abs().clamp_min(1e-30)).max())
            state.absmax.copy_(exact.reshape(state.absmax.shape))
        return repaired

    def qlora_held_adapter(self, adapter_id: int, rank: int) -> dict[str, str]:
        """Digests of the A [rank, I] and B [O, rank] that the slot of an adapter holds now, by canonical name.

        Read from the buffers that the layers multiply with, not from the file. Parts that are all zero are left out.
        """
        model = self.model_runner.get_model()
        manager = self.model_runner.lora_manager._adapter_manager
        held: dict[str, str] = {}
        if adapter_id not in manager.lora_index_to_id:
            return held
        slot = manager.lora_index_to_id.index(adapter_id)
        for path, layer in manager.modules.items():
            if not isinstance(layer.lora_a_stacked, tuple):
                continue  # an embedding or a head, which we never fill
            shards = _shard_names(model, f"{path}.weight")
            for i, shard in enumerate(shards):
                name = f"base_model.model.{shard.removesuffix('.weight')}"
                a_RI = layer.lora_a_stacked[i][slot, 0, :rank]
                b_OR = layer.lora_b_stacked[i][slot, 0, :, :rank]
                for part, tensor in (("lora_A", a_RI), ("lora_B", b_OR)):
                    if bool(tensor.any()):
                        held[f"{name}.{part}.weight"] = digest_bytes(tensor)
        return held


def _leaves(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Leaf]]:
    for name, codes, state in _quantised(model):
        yield name, digest_4bit(codes, state)
    for name, weight in _unquantised(model, dtype):
        yield name, digest_plain(weight)


def _quantised(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Name, packed codes and QuantState of every 4-bit weight; fused ones split back into their shards."""
    for name, parameter in model.named_parameters():
        states = getattr(parameter, "bnb_quant_state", None)
        if states is None:
            continue
        offsets = parameter.bnb_shard_offsets.tolist()
        for i, shard in enumerate(_shard_names(model, name)):
            yield shard, parameter.data[offsets[i] : offsets[i + 1]], states[i]


def _unquantised(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of every other weight; fused ones split, the padding of the vocabulary cut off."""
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if getattr(parameter, "bnb_quant_state", None) is not None:
            continue
        owner = modules[name.rpartition(".")[0]]
        weight = _as_loaded(parameter.data, owner, dtype)
        shards = _shard_names(model, name)
        if len(shards) > 1:
            yield from zip(shards, weight.split(list(owner.output_sizes), dim=0), strict=True)
            continue
        rows = getattr(owner, "org_vocab_size", None)
        yield shards[0], weight if rows is None else weight[:rows]


def _as_loaded(weight: torch.Tensor, owner: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """Undo what vLLM's CPU backend does to unquantised linears after loading.

    It packs the weight away and leaves an empty parameter: the weight is read back through the layer, as its product with
    the identity, which is exact. It may lift a bias to float32: taken back where that loses nothing.
    """
    if weight.numel() == 0 and hasattr(owner, "cpu_linear"):
        size, device = owner.input_size_per_partition, weight.device
        columns = [
            owner.cpu_linear(eye, owner.weight, None) for eye in torch.eye(size, dtype=dtype, device=device).split(1024)
        ]
        return torch.cat(columns).T.contiguous()
    if weight.dtype == torch.float32 != dtype and torch.equal(weight.to(dtype).float(), weight):
        return weight.to(dtype)
    return weight


def _shard_names(model: torch.nn.Module, name: str) -> list[str]:
    """What transformers calls the parts of a vLLM parameter: q, k and v of `qkv_proj`, and so on."""
    path, _, what = name.replace(".base_layer.", ".").rpartition(".")
    parent, _, own = path.rpartition(".")
    packed = getattr(model, "packed_modules_mapping", {}).get(own)
    return [f"{parent}.{part}.{what}" for part in packed] if packed else [f"{path}.{what}" if path else what]
