"""One adapter multiplied without detours, where vLLM's CPU backend gathers A and B again for every token.

Which adapter each token of a step has is looked up once per step. An adapter is multiplied out of vLLM's own buffers:
by `cpu_kernel`'s, all parts of a fused linear together, and where that cannot (another dtype, an odd shape, no
compiler) by torch, part by part. Tokens without an adapter are left as they are.

Letters: T tokens of a step, I and O in- and out-features, R rank of the slots, S slots, N parts of a fused linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qlora_rl.engine.compat import adapter_manager
from qlora_rl.engine.linears.cpu_kernel import CodesKernel, codes_kernel

Groups = list[tuple[int, torch.Tensor | None]]
# One sum of R products may be off by this share of its summands (16-bit rounding, twice), and all sums of a matrix by
# this share of them, as root mean squares (measured: 0.0018): a factor of 1.02 is within the rounding of each. Where
# summands cancel, float32 leaves this share of them.
ROUNDING, ROUNDING_OF_ALL, ROUNDING_FLOAT32 = 0.02, 0.01, 1e-6
# Columns of A of which a product is asked after a push.
_ASKED = 32


class AdapterProducts:
    """Takes the place of one vLLM wrapper's `add_lora_linear`.

    Args:
        own: vLLM's, for whatever is not of the plain kind.
        kernel: adds adapters, where it takes them.
    """

    def __init__(self, own: Callable[..., Any], kernel: CodesKernel | None = None) -> None:
        self._own, self._kernel = own, kernel
        self._groups: Groups | None = None
        self._tokens = 0

    def note(self, slots_T: torch.Tensor) -> None:
        """What adapter the tokens of the next steps have: their slots, -1 for none."""
        self._groups, self._tokens = [each for each in group(slots_T) if each[0] >= 0], slots_T.numel()

    def __call__(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: Sequence[int],
        **more: Any,
    ) -> Any:
        """Add the adapter's part to y [T, O], for x [T, I]; A is [S, 1, R, I] and B [S, 1, O, R] of each part, and O
        of y are the parts' together."""
        groups = self._groups
        is_plain = x.dtype == y.dtype == lora_a_stacked[0].dtype == lora_b_stacked[0].dtype and len(x) == self._tokens
        if groups is None or more or not is_plain:
            return self._own(y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **more)
        for slot, rows in groups:
            parts = [a[slot, 0] for a in lora_a_stacked], [b[slot, 0] for b in lora_b_stacked]
            if rows is None and y.is_contiguous():  # nearly always
                self._add(y, x.contiguous(), *parts, scale)
            else:
                chosen = slice(None) if rows is None else rows
                part = y[chosen].contiguous()
                self._add(part, x[chosen].contiguous(), *parts, scale)
                y[chosen] = part
        return None

    def _add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a_parts: Sequence[torch.Tensor],
        b_parts: Sequence[torch.Tensor],
        scale: float,
    ) -> None:
        if self._kernel is not None and self._kernel.takes_adapter(a_parts, b_parts):
            self._kernel.add_adapter(y, x, a_parts, b_parts, scale)
            return
        for out, a, b in zip(y.split([len(b) for b in b_parts], dim=1), a_parts, b_parts, strict=True):
            out.add_(x @ a.T @ b.T, alpha=scale)

    def is_applied(
        self, a_stacked: tuple[torch.Tensor, ...], b_stacked: tuple[torch.Tensor, ...], slot: int, columns: Any
    ) -> bool:
        """Tokens of this slot get B A x, up to rounding; asked of an x for each of `columns`, 1 there and else zero."""
        sizes = [b.shape[2] for b in b_stacked]
        x = a_stacked[0].new_zeros(len(columns), a_stacked[0].shape[3])
        x[range(len(columns)), columns] = 1
        y = x.new_zeros(len(columns), sum(sizes))
        groups, tokens = self._groups, self._tokens
        self._groups, self._tokens = [(slot, None)], len(columns)
        try:
            self(y, x, a_stacked, b_stacked, 1.0, sizes)
        finally:
            self._groups, self._tokens = groups, tokens
        for part, a, b in zip(y.split(sizes, 1), a_stacked, b_stacked, strict=True):
            columns_RC, b_OR = a[slot, 0][:, columns].float(), b[slot, 0].float()
            sums_OC = b_OR @ columns_RC
            off_OC = part.T.float() - sums_OC
            kind = torch.finfo(b.dtype)
            least = kind.tiny * kind.eps  # what is no normal number is rounded to multiples of this
            summands_OC = b_OR.abs() @ columns_RC.abs()
            room = ROUNDING * summands_OC + torch.finfo(torch.float32).tiny
            room_of_all = ROUNDING_OF_ALL * sums_OC.norm() + ROUNDING_FLOAT32 * summands_OC.norm()
            room_of_all += least * off_OC.numel() ** 0.5
            if not bool((off_OC.abs() <= room + b_OR.shape[1] * least).all() & (off_OC.norm() <= room_of_all)):
                return False
        return True


def multiply_adapters_directly(runner: Any) -> str:
    """Have `AdapterProducts` multiply the adapters of a model runner; empty, or why it stays with vLLM's own way.

    vLLM's CPU wrapper gathers A and B for every token, and takes the last slot's adapter for tokens that have none when
    others of the step have one. Remove when `PunicaWrapperCPU` does neither.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    manager = adapter_manager(runner)
    if manager is None:
        return "the engine takes no adapters"
    if not runner.vllm_config.model_config.enforce_eager:
        return "enforce_eager is off: the compiled graph holds vLLM's own way"
    kernel = codes_kernel()
    wrappers = {id(wrapper): wrapper for layer in manager.modules.values() if (wrapper := _wrapper_of(layer))}
    ours = [wrapper for wrapper in wrappers.values() if type(wrapper) is PunicaWrapperCPU]
    for wrapper in ours:
        if not isinstance(wrapper.add_lora_linear, AdapterProducts):
            products = AdapterProducts(wrapper.add_lora_linear, None if isinstance(kernel, str) else kernel)
            _follow(wrapper, products)
    return "" if ours else "vLLM's kernels for this device need no help"


def is_left_out(layer: Any, slot: int, turn: int) -> bool:
    """One of vLLM's linears with LoRA gives tokens of this slot something else than its buffers say; asked of some
    columns of A, in turns. False where vLLM multiplies in its own way."""
    products = getattr(_wrapper_of(layer), "add_lora_linear", None)
    if not isinstance(products, AdapterProducts):
        return False
    width = layer.lora_a_stacked[0].shape[3]
    columns = [(turn * _ASKED + i) % width for i in range(min(_ASKED, width))]
    return not products.is_applied(layer.lora_a_stacked, layer.lora_b_stacked, slot, columns)


def _wrapper_of(layer: Any) -> Any:
    return getattr(layer, "punica_wrapper", None)


def _follow(wrapper: Any, products: AdapterProducts) -> None:
    update = wrapper.update_metadata

    def update_and_note(*arguments: Any, **more: Any) -> None:
        update(*arguments, **more)
        products.note(wrapper.token_lora_indices)

    wrapper.update_metadata, wrapper.add_lora_linear = update_and_note, products


def group(slots_T: torch.Tensor) -> Groups:
    """The slots that occur, -1 for none, each with the numbers of its tokens; `None` for all of them."""
    found = torch.unique(slots_T).tolist()
    return [(slot, None if len(found) == 1 else (slots_T == slot).nonzero().flatten()) for slot in found]
