"""What runs inside vLLM: a worker extension that says what base the engine really multiplies with, and repairs its scales.

Loaded by vLLM through `worker_extension_cls`, called through `collective_rpc`; its methods become the worker's own, so they
carry a prefix. Results are plain values that also travel between processes.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.fingerprint import digest_4bit, digest_bytes, digest_plain, facts_of
from qlora_rl.base.stored import StoredTensors
from qlora_rl.contracts import BaseFingerprint, Leaf
from qlora_rl.engine.base_compute import install
from qlora_rl.engine.reload import reload_dense
from qlora_rl.engine.stage import read_parts


@dataclass(frozen=True)
class Lent:
    """One weight of vLLM's as it lies there.

    Attributes:
        values: packed codes [bytes, 1], or the weight; a view of vLLM's own storage.
        state: bitsandbytes' QuantState of a 4-bit weight.
    """

    values: torch.Tensor
    state: Any = None


@dataclass(frozen=True)
class Lending:
    """What a worker has to lend.

    Attributes:
        process: in which the tensors lie.
        weights: by transformers' name.
        withheld: why a weight cannot be lent, by transformers' name.
    """

    process: int
    weights: dict[str, Lent]
    withheld: dict[str, str]


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
        if repaired:
            for linear in getattr(self, "qlora_decoded", ()):
                linear.refresh()
        return repaired

    def qlora_multiply_directly(self, wish: str, **facts: Any) -> dict[str, Any]:
        """Replace what is slow in vLLM's linears on this device; see `base_compute.install`.

        On a GPU that was done before vLLM compiled anything, or is not done; see `gpu_worker`.
        """
        installed = getattr(self, "qlora_installed", None)
        if installed is not None:
            return installed[0].as_dict()
        done, self.qlora_decoded = install(self.model_runner, wish, **facts)
        return done.as_dict()

    def qlora_lend_base(self) -> Lending:
        """The base as vLLM's own tensors, fused ones as views of their shards; nothing is copied."""
        model = self.model_runner.get_model()
        dtype = self.model_runner.model_config.dtype
        modules = dict(model.named_modules())
        weights = {name: Lent(codes, state) for name, codes, state in _quantised(model)}
        withheld: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            if getattr(parameter, "bnb_quant_state", None) is not None:
                continue
            owner, weight, why = modules[name.rpartition(".")[0]], parameter.data, None
            if weight.numel() == 0:
                why = "vLLM's CPU backend has packed it away for its own kernels"
            elif weight.dtype != dtype:
                why = f"vLLM holds it as {str(weight.dtype).removeprefix('torch.')}"
            if why is not None:
                withheld |= dict.fromkeys(_shard_names(model, name), why)
                continue
            weights |= {shard: Lent(part) for shard, part in _parts(model, name, weight, owner)}
        return Lending(os.getpid(), weights, withheld)

    def qlora_load_dense(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Write all weights of the model, by transformers' names.

        Returns:
            Names for which no value came; then, as after an exception, what lies there is a mixture.
        """
        model, came = self.model_runner.get_model(), set()

        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                came.add(name)
                yield name, weight
                del weight  # or two would be held while the next one is made

        written = reload_dense(self.model_runner, noted())
        tied = getattr(self.model_runner.model_config.hf_text_config, "tie_word_embeddings", False)
        missing: set[str] = set()
        for name, _ in model.named_parameters():
            # vLLM calls a fused weight written when one of its shards was.
            shards = set(_shard_names(model, name))
            if name.replace(".base_layer.", ".") not in written:
                missing |= shards
            missing |= shards - came
        return sorted(name for name in missing if not (tied and name.startswith("lm_head.")))

    def qlora_load_parts(self, files: list[str]) -> list[str]:
        """`qlora_load_dense` with what lies in safetensors files of a `Stage`."""
        return self.qlora_load_dense(read_parts(files))

    def qlora_load_base(self) -> list[str]:
        """`qlora_load_dense` with the weights of the directory that was loaded."""
        return self.qlora_load_dense(StoredTensors(self.model_runner.model_config.model).items())

    def qlora_clear_cache(self) -> None:
        """Write zeros over the KV cache. vLLM's attention on the CPU reads blocks to their end, and NaN times 0 is NaN."""
        for tensor in torch.utils._pytree.tree_leaves(self.model_runner.kv_caches):
            tensor.zero_()

    def qlora_held_adapter(self, adapter_id: int, rank: int) -> dict[str, str]:
        """Digests of the A [rank, I] and B [O, rank] that the slot of an adapter holds now, by canonical name.

        Read from the buffers that the layers multiply with, not from the file. Parts that are all zero are left out.
        """
        places = self.qlora_lend_adapter(adapter_id, rank)
        return {name: digest_bytes(place) for name, place in places.items() if bool(place.any())}

    def qlora_lend_adapter(self, adapter_id: int, rank: int) -> dict[str, torch.Tensor]:
        """The buffers A [rank, I] and B [O, rank] of an adapter's slot, by canonical name; views, of all layers there are."""
        model = self.model_runner.get_model()
        manager = self.model_runner.lora_manager._adapter_manager
        places: dict[str, torch.Tensor] = {}
        if adapter_id not in manager.lora_index_to_id:
            return places
        slot = manager.lora_index_to_id.index(adapter_id)
        for path, layer in manager.modules.items():
            if not isinstance(layer.lora_a_stacked, tuple):
                continue  # an embedding or a head, which we never fill
            for i, shard in enumerate(_shard_names(model, f"{path}.weight")):
                name = f"base_model.model.{shard.removesuffix('.weight')}"
                places[f"{name}.lora_A.weight"] = layer.lora_a_stacked[i][slot, 0, :rank]
                places[f"{name}.lora_B.weight"] = layer.lora_b_stacked[i][slot, 0, :, :rank]
        return places

    def qlora_adapter_sizes(self) -> dict[str, list[int]]:
        """[I, O] of every linear that can be adapted, by the base model's name."""
        model = self.model_runner.get_model()
        sizes: dict[str, list[int]] = {}
        for path, layer in self.model_runner.lora_manager._adapter_manager.modules.items():
            if not isinstance(layer.lora_a_stacked, tuple):
                continue  # an embedding or a head, which we never fill
            for i, shard in enumerate(_shard_names(model, f"{path}.weight")):
                a, b = layer.lora_a_stacked[i], layer.lora_b_stacked[i]
                sizes[shard.removesuffix(".weight")] = [a.shape[-1], b.shape[-2]]
        return sizes

    def qlora_end_with_server(self, server: int) -> None:
        """Have this process, and vLLM's engine process above it, end when the server's process has ended, however it did.

        A server that is killed tells nobody: vLLM's processes would stay, with the base in memory.
        """
        handle, parent = os.pidfd_open(server), os.getppid()

        def watch() -> None:
            select.select([handle], [], [])
            if parent != server and os.getppid() == parent:  # it is still the engine's process
                os.kill(parent, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="qlora-rl-server-watch", daemon=True).start()


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
        yield from _parts(model, name, _as_loaded(parameter.data, owner, dtype), owner)


def _parts(model: torch.nn.Module, name: str, weight: torch.Tensor, owner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """An unquantised weight of vLLM's, in the parts that transformers knows; views."""
    shards = _shard_names(model, name)
    if len(shards) > 1:
        yield from zip(shards, weight.split(list(owner.output_sizes), dim=0), strict=True)
        return
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
