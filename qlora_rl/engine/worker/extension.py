"""What runs inside vLLM: a worker extension that says what base the engine really multiplies with, and repairs its
scales.

Loaded by vLLM through `worker_extension_cls`, called through `collective_rpc`; its methods become the worker's own, so
they carry a prefix. Results are plain values that are also sent between processes.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.fingerprint import digest_4bit, digest_bytes, digest_plain, facts_of
from qlora_rl.base.reader import StoredTensors
from qlora_rl.contracts import BaseFingerprint, Leaf, lora_name
from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.engine.compat import adapter_manager
from qlora_rl.engine.linears.base_compute import install, packs_away
from qlora_rl.engine.linears.linear import is_left_out
from qlora_rl.engine.worker.parallel import adapted_layers, held_pieces, held_shards
from qlora_rl.engine.worker.reload import reload_dense
from qlora_rl.engine.worker.weight_names import parts, quantised, shard_names, unquantised


@dataclass(frozen=True)
class Lent:
    """One weight of vLLM's as it is there.

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
        process: in which the tensors are.
        weights: by transformers' name.
        withheld: why a weight cannot be lent, by transformers' name.
    """

    process: int
    weights: dict[str, Lent]
    withheld: dict[str, str]


class BaseExtension:
    """Mixed into vLLM's worker."""

    model_runner: Any
    parallel_config: Any
    _qlora_reads = 0

    def qlora_describe_base(self) -> dict[str, Any]:
        """The *function* of the base as this worker holds it (`BaseFingerprint.as_dict`); of one among several ranks
        its parts.

        `parallel.described` reads the answers of all of them.
        """
        model = self.model_runner.get_model()
        config = self.model_runner.model_config
        if self.parallel_config.tensor_parallel_size > 1:
            return held_shards(model, config.dtype)
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
        for name, _, state in quantised(self.model_runner.get_model()):
            if name not in stored:
                continue
            wanted = stored.read_4bit(name)
            if wanted is None:
                continue
            exact = wanted.absmax.to(state.absmax.device)
            held = state.absmax.flatten()
            if held.shape != exact.shape or torch.equal(held, exact):
                continue
            repaired[name] = float(((held - exact).abs() / exact.abs().clamp_min(1e-30)).max())
            state.absmax.copy_(exact.reshape(state.absmax.shape))
        return repaired

    def qlora_multiply_directly(self, wish: str) -> dict[str, Any]:
        """Replace what is slow in vLLM's linears on this device; see `base_compute.install`."""
        done = install(self.model_runner, wish)
        if self.model_runner.device.type == "cpu":
            done = replace(done, packs_plain=packs_away(self.model_runner.model_config.dtype))
        return done.as_dict()

    def qlora_lend_base(self) -> Lending:
        """The base as vLLM's own tensors, fused ones as views of their shards; nothing is copied. A rank among several
        lends none."""
        if self.parallel_config.tensor_parallel_size > 1:
            return Lending(os.getpid(), {}, {})
        model = self.model_runner.get_model()
        dtype = self.model_runner.model_config.dtype
        modules = dict(model.named_modules())
        weights = {name: Lent(codes, state) for name, codes, state in quantised(model)}
        withheld: dict[str, str] = {}
        mixtures = tuple(
            f"{name.removesuffix('experts.routed_experts')}"
            for name in modules
            if name.endswith(".experts.routed_experts")
        )
        for name, parameter in model.named_parameters():
            if getattr(parameter, "bnb_quant_state", None) is not None:
                continue
            owner, weight, why = modules[name.rpartition(".")[0]], parameter.data, None
            if name.startswith(mixtures):
                why = "of a mixture only 4-bit weights are shared"
            elif weight.numel() == 0:
                why = "vLLM's CPU backend has packed it away for its own kernels"
            elif weight.dtype != dtype:
                why = f"vLLM holds it as {str(weight.dtype).removeprefix('torch.')}"
            if why is not None:
                withheld |= dict.fromkeys(shard_names(model, name), why)
                continue
            weights |= {shard: Lent(part) for shard, part in parts(model, name, weight, owner)}
        return Lending(os.getpid(), weights, withheld)

    def qlora_load_dense(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Write all weights of the model, by transformers' names.

        Returns:
            Names for which no value came; then, as after an exception, what is there is a mixture.
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
            shards = set(shard_names(model, name))
            if name.replace(".base_layer.", ".") not in written:
                missing |= shards
            missing |= shards - came
        return sorted(name for name in missing if not (tied and name.startswith("lm_head.")))

    def qlora_load_parts(self, files: list[str]) -> list[str]:
        """`qlora_load_dense` with what is in safetensors files of a `Stage`."""
        from qlora_rl.engine.staging import read_parts

        return self.qlora_load_dense(read_parts(files))

    def qlora_load_base(self) -> list[str]:
        """`qlora_load_dense` with the weights of the directory that was loaded."""
        return self.qlora_load_dense(StoredTensors(self.model_runner.model_config.model).items())

    def qlora_clear_cache(self) -> None:
        """Write zeros over the KV cache. vLLM's attention on the CPU reads blocks to their end, and NaN times 0 is
        NaN."""
        for tensor in torch.utils._pytree.tree_leaves(self.model_runner.kv_caches):
            tensor.zero_()

    def qlora_held_adapter(self, adapter_id: int, rank: int) -> dict[str, Any]:
        """Digests of the A [rank, I] and B [O, rank] that the slot of an adapter holds now, by canonical name.

        Read from the buffers that the layers multiply with, not from the file. Parts that are all zero are left out,
        and B of a layer whose product is not that of its buffers, where products are ours (`linear.AdapterProducts`).
        One among several ranks gives its pieces of them; `parallel.held_digests` reads the answers of all.
        """
        places = self.qlora_lend_adapter(adapter_id, rank)
        for name in self._qlora_left_out(adapter_id) if places else ():
            del places[lora_name(name, "B")]
        size = self.parallel_config.tensor_parallel_size
        if size == 1:
            return {name: digest_bytes(place) for name, place in places.items() if bool(place.any())}
        owners = {
            lora_name(name, part): (layer.base_layer, count, number)
            for name, layer, count, number in self._qlora_adapted()
            for part in "AB"
        }
        return held_pieces(places, owners, self.parallel_config.rank % size)

    def _qlora_left_out(self, adapter_id: int) -> list[str]:
        """Names of the linears whose product is not that of their buffers."""
        self._qlora_reads += 1
        slot = adapter_manager(self.model_runner).lora_index_to_id.index(adapter_id)
        named = [(name, layer) for name, layer, _, _ in self._qlora_adapted()]
        layers = {id(layer): layer for _, layer in named}
        wrong = {key for key, layer in layers.items() if is_left_out(layer, slot, self._qlora_reads)}
        return [name for name, layer in named if id(layer) in wrong]

    def qlora_lend_adapter(self, adapter_id: int, rank: int) -> dict[str, torch.Tensor]:
        """The buffers A [rank, I] and B [O, rank] of an adapter's slot, by canonical name; views, of all layers there
        are."""
        manager = adapter_manager(self.model_runner)
        places: dict[str, torch.Tensor] = {}
        if adapter_id not in manager.lora_index_to_id:
            return places
        slot = manager.lora_index_to_id.index(adapter_id)
        for name, layer, _, i in self._qlora_adapted():
            places[lora_name(name, "A")] = layer.lora_a_stacked[i][slot, 0, :rank]
            places[lora_name(name, "B")] = layer.lora_b_stacked[i][slot, 0, :, :rank]
        return places

    def qlora_adapter_sizes(self) -> dict[str, list[int]]:
        """[I, O] of every linear that can be adapted, as far as it is here, by the base model's name."""
        modules = adapter_manager(self.model_runner).modules
        return {
            name: [layer.lora_a_stacked[i].shape[-1], layer.lora_b_stacked[i].shape[-2]]
            for name, layer, _, i in self._qlora_adapted()
        } | {name: list(layer.expert_sizes) for name, layer in modules.items() if hasattr(layer, "expert_sizes")}

    def qlora_unreached_modules(self, adapter_id: int) -> list[str]:
        """Modules of a loaded adapter that no layer multiplies with.

        vLLM serves an adapter whose names match nothing as the bare base, with one DEBUG line (vllm#55193).
        """
        manager = adapter_manager(self.model_runner)
        adapter = manager.get_adapter(adapter_id)
        if adapter is None:
            return ["(all)"]
        lost = sorted(name for name in adapter.loras if name not in manager.modules)
        return lost or ([] if adapter.loras else ["(all)"])

    def qlora_holds_adapters(self, ids: list[int]) -> bool:
        """All of these adapters are in slots."""
        return set(ids) <= set(adapter_manager(self.model_runner).lora_index_to_id)

    def _qlora_adapted(self) -> Iterator[tuple[str, Any, int, int]]:
        modules = adapter_manager(self.model_runner).modules
        return adapted_layers(self.model_runner.get_model(), modules)

    def qlora_multiply_in_float32(self, dtypes: Sequence[str]) -> bool:
        """In a process of its own: products of `dtypes` (torch's names) are made as this processor makes them fast, for
        its life.

        Returns:
            Whether they are made in float32.
        """
        return bool(Float32Products(*(getattr(torch, name) for name in dtypes)).dtypes)

    def qlora_begin_as_rank(self) -> None:
        """What a rank among several does first.

        Ctrl-C is left to the process that drives the ranks: vLLM's own end at it, in the middle of a step. And its CPU
        backend leaves the shared memory through which they add up behind, 4 MiB a rank: all have opened it by now, and
        it needs no name any more.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if (run := os.environ.get("VLLM_DIST_IDENT", "")).startswith("vllm_dist_"):
            for file in Path("/dev/shm").glob(f"{run}-*-cpushm_*"):
                file.unlink(missing_ok=True)

    def qlora_end_with_server(self, server: int) -> None:
        """Have this process, and vLLM's engine process above it, end when the server's process has ended, however it
        did.

        A server that is killed tells nobody: vLLM's processes would stay, with the base in memory.
        """
        handle, parent = os.pidfd_open(server), os.getppid()

        def watch() -> None:
            watched = select.poll()  # select itself takes no descriptor above 1,023
            watched.register(handle, select.POLLIN)
            watched.poll()
            if parent != server and os.getppid() == parent:  # it is still the engine's process
                os.kill(parent, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="qlora-rl-server-watch", daemon=True).start()


def _leaves(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Leaf]]:
    for name, codes, state in quantised(model):
        yield name, digest_4bit(codes, state)
    for name, weight in unquantised(model, dtype):
        yield name, digest_plain(weight)
