"""A mixture's experts in 4 bits in vLLM, which has no kernel for them: `cpu_kernel`'s multiplies all that are chosen at
once; without it they are decoded and multiplied one after another.

Imports vLLM; named by `experts` when a base has such experts. Runs inside vLLM's worker.

Shape letters: I inner width of an expert, H hidden size, T tokens of a step, K chosen experts of a token.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from qlora_rl.base.experts import NAMINGS, mix
from qlora_rl.base.quant import dequantize_exactly, require_bitsandbytes
from qlora_rl.base.reader import Stored4bit, StoredTensors
from qlora_rl.engine.linears.cpu_kernel import CodesKernel, codes_kernel
from qlora_rl.engine.linears.fused_weight import CodedLinear
from qlora_rl.engine.worker.expert_adapters import AdaptedTokens, ExpertAdapters, ExpertMatrix, matrices_of
from qlora_rl.errors import EngineUnsupportedError

logger = logging.getLogger(__name__)


class CodedExperts(FusedMoEMethodBase):
    """The method of a layer of experts whose matrices are 4-bit. Its weights are read from the base directory, not by
    vLLM's loader.

    Args:
        config: vLLM's, of the layer.
        prefix: the layer's name in vLLM.
    """

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__(config)
        whole = get_current_vllm_config()
        self._model, self._naming = whole.model_config, NAMINGS[whole.model_config.hf_config.model_type]
        self._device, self._layer = torch.device(whole.device_config.device), prefix.removesuffix(".routed_experts")
        self._experts: list[tuple[Weights, Weights]] = []
        self._together: TogetherExperts | None = None
        self._adapters: list[ExpertAdapters] = []  # on gate, up and down; none where adapters cannot come
        self._tokens: AdaptedTokens | None = None

    def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
        """None that vLLM would load."""
        if layer.apply_router_weight_on_input or layer.expert_map is not None:
            raise EngineUnsupportedError(
                f"loading {self._layer}: 4-bit experts are multiplied by one process, with weights on what comes out. "
                "Start vLLM without expert parallelism, or prepare the base with its experts in 16 bits."
            )
        if layer.activation.value not in _ACTIVATIONS:
            raise EngineUnsupportedError(
                f"loading {self._layer}: experts in 4 bits with the activation {layer.activation.value}, which is none "
                f"of {', '.join(_ACTIVATIONS)}. Prepare the base with its experts in 16 bits."
            )

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """What vLLM's kernels would be told; there is none here."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read the experts."""
        stored, naming = StoredTensors(self._model.model), self._naming
        self._experts = []
        for number in range(layer.moe_config.num_experts):
            path = f"{self._layer}.{number}"
            gate_up, down = [
                [f"{path}.{name}.weight" for name in names] for names in ((naming.gate, naming.up), (naming.down,))
            ]
            self._experts.append(
                (
                    Weights(_read(stored, gate_up), self._device, self._model.dtype),
                    Weights(_read(stored, down), self._device, self._model.dtype),
                )
            )

        kernel = codes_kernel()
        both = [self._with_kernel(which) for which in (0, 1)]
        if not isinstance(kernel, str) and {len(products) for products in both} == {len(self._experts)}:
            self._together = TogetherExperts(kernel, *both)

    def _with_kernel(self, which: int) -> list[CodedLinear]:
        products = [both[which].product for both in self._experts]
        return [product for product in products if product is not None]

    def parts(self) -> Iterator[tuple[str, torch.Tensor, Any]]:
        """Name, packed codes and QuantState of every matrix."""
        for both in self._experts:
            for weights in both:
                yield from weights.parts()

    def apply(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """The experts [T, K] of x [T, H], as the trainer computes them."""
        weights = topk_weights.to(x.dtype) if self._naming.rounds_weights else topk_weights
        activation = _ACTIVATIONS[layer.activation.value]
        if self._tokens is not None and any(kind.held is not None for kind in self._adapters):
            return self._apply_adapted(activation, x, weights, topk_ids)
        if self._together is not None and x.dtype == torch.bfloat16:
            return self._together(x, topk_ids, weights, activation)
        return mix(x, topk_ids, weights, functools.partial(self._expert, activation))

    def _expert(self, activation: Any, number: int, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = self._experts[number]
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(activation(gate) * up)

    def take_adapters(self, tokens: AdaptedTokens, slots: int, rank: int) -> dict[str, ExpertMatrix]:
        """Take adapters from now on: the places for them, by transformers' names of the matrices.

        Args:
            tokens: which slot each token of a step has.
            slots: S.
            rank: R of a slot.
        """
        naming, count = self._naming, len(self._experts)
        states = [state for weights in self._experts[0] for _, _, state in weights.parts()]
        self._tokens, self._adapters = (
            tokens,
            [
                ExpertAdapters((state.shape[1], state.shape[0]), count, slots, rank, self._model.dtype, self._device)
                for state in states
            ],
        )
        path = self._layer.replace(f".{naming.block}.", ".mlp.", 1)
        return dict(matrices_of(path, (naming.gate, naming.up, naming.down), self._adapters, count))

    def _apply_adapted(
        self, activation: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """`mix`, for the tokens of each adapter by itself."""
        out = torch.empty_like(x)
        for slot, rows in self._tokens.groups(len(x)):
            expert = functools.partial(self._adapted_expert, activation, slot)
            if rows is None:
                return mix(x, chosen, weights, expert)
            out[rows] = mix(x[rows], chosen[rows], weights[rows], expert)
        return out

    def _adapted_expert(self, activation: Any, slot: int, number: int, x: torch.Tensor) -> torch.Tensor:
        gate_up, down = self._experts[number]
        on_gate, on_up, on_down = self._adapters
        gate, up = gate_up(x).chunk(2, dim=-1)
        inner = activation(on_gate.add(gate, x, number, slot)) * on_up.add(up, x, number, slot)
        return on_down.add(down(inner), inner, number, slot)


_ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}


class Weights:
    """The codes of one or two matrices, one behind the other, and the product with them.

    Has the attributes of a 4-bit parameter of vLLM's plugin, which `CodedLinear` reads.

    Args:
        matrices: by name, in the order of their rows.
        device: where they are held.
        dtype: in which they are multiplied.
    """

    def __init__(self, matrices: dict[str, Stored4bit], device: torch.device, dtype: torch.dtype) -> None:
        self._names, sizes = list(matrices), [part.codes.numel() for part in matrices.values()]
        self.data = torch.cat([part.codes.flatten() for part in matrices.values()]).view(-1, 1).to(device)
        self.bnb_shard_offsets = torch.tensor([0, *sizes]).cumsum(0)
        self.bnb_quant_state = {i: _state(part, device, dtype) for i, part in enumerate(matrices.values())}
        self.product: CodedLinear | None = None
        if device.type == "cpu" and dtype == torch.bfloat16:
            kernel = codes_kernel()
            try:
                if isinstance(kernel, str):
                    raise ValueError(kernel)
                self.product = CodedLinear(cast(torch.nn.Parameter, self), kernel)
            except ValueError as why:
                _say_slow(str(why))

    def data_ptr(self) -> int:
        """As of a parameter."""
        return self.data.data_ptr()

    def parts(self) -> Iterator[tuple[str, torch.Tensor, Any]]:
        """Name, packed codes and QuantState of each matrix."""
        for i, name in enumerate(self._names):
            start, end = self.bnb_shard_offsets[i : i + 2].tolist()
            yield name, self.data[start:end], self.bnb_quant_state[i]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, I] times the matrices, [T, O]."""
        if self.product is not None:
            return self.product.multiply(x)
        weights = [
            dequantize_exactly(codes, state.absmax, state.code, state.blocksize, state.shape).to(x.dtype)
            for _, codes, state in self.parts()
        ]
        return torch.cat([torch.nn.functional.linear(x, weight) for weight in weights], dim=-1)


class TogetherExperts:
    """All chosen experts of a layer in two calls of the kernel; what `mix` gives, bit for bit where that multiplies
    with the same kernel.

    Args:
        kernel: that multiplies codes.
        gate_up, down: of each expert.
    """

    def __init__(self, kernel: CodesKernel, gate_up: Sequence[CodedLinear], down: Sequence[CodedLinear]) -> None:
        self._kernel, self._both = kernel, (gate_up, down)

    def __call__(
        self, x_TH: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor, activation: Any
    ) -> torch.Tensor:
        """As `mix`."""
        choices = chosen_TK.flatten()
        counts = choices.bincount(minlength=len(self._both[0])).tolist()
        hit = [number for number, count in enumerate(counts) if count]
        order = choices.argsort(stable=True)
        token = order // chosen_TK.shape[1]
        starts = list(itertools.accumulate((counts[number] for number in hit), initial=0))
        gate, up = self._multiply(0, x_TH[token], hit, starts).chunk(2, dim=-1)
        found = self._multiply(1, activation(gate) * up, hit, starts)
        weighted = found * weights_TK.flatten()[order, None]
        return _added_up(weighted.to(x_TH.dtype), order.argsort().view_as(chosen_TK))

    def _multiply(self, which: int, x: torch.Tensor, hit: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
        linears = self._both[which]
        codes, absmax = zip(*(linears[number].addresses for number in hit), strict=True)
        first = linears[0]
        return self._kernel.multiply(x, codes, absmax, starts, first.values, first.shape[0], first.blocksize)


def _added_up(found: torch.Tensor, places_TK: torch.Tensor) -> torch.Tensor:
    """The sum of K rows for each token, in the order of their places: each addition rounds."""
    first, *others = places_TK.sort(dim=1).values.unbind(1)
    out_TH = found[first]
    for place in others:
        out_TH += found[place]
    return out_TH


def _read(stored: StoredTensors, names: list[str]) -> dict[str, Stored4bit]:
    found = {name: stored.read_4bit(name) if name in stored else None for name in names}
    if missing := [name for name, part in found.items() if part is None]:
        raise EngineUnsupportedError(f"loading the experts: the base has no 4-bit {missing[0]}. Prepare it again.")
    return {name: part for name, part in found.items() if part is not None}


def _state(part: Stored4bit, device: torch.device, dtype: torch.dtype) -> Any:
    """bitsandbytes' own description of a matrix, with exact scales."""
    return require_bitsandbytes().functional.QuantState(
        absmax=part.absmax.to(device),
        shape=torch.Size(part.shape),
        code=part.table.to(device),
        blocksize=part.blocksize,
        quant_type=part.kind,
        dtype=dtype,
    )


@functools.cache  # once for each reason
def _say_slow(why: str) -> None:
    logger.warning("experts are decoded in plain torch for each product: %s", why)
