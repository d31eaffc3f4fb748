"""Adapters on a mixture's 4-bit experts in vLLM, which has kernels for 16-bit experts alone: slots as of any linear,
multiplied here.

To vLLM's manager each matrix of each expert is one more layer that takes LoRA: it is loaded, lent, read back and taken
away like the others. Memory for them is taken with the first adapter that reaches them. Private names of vLLM's
manager, as in `compat`. Runs inside vLLM's worker.

Shape letters: S slots, E experts, R rank of the slots, I and O in- and out-features of a matrix, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from qlora_rl.engine.compat import adapter_manager
from qlora_rl.engine.linears.linear import Groups, group
from qlora_rl.errors import EngineUnsupportedError


class ExpertAdapters:
    """The adapters on one kind of matrix, such as `down_proj`, of all experts of a layer.

    Args:
        sizes: I and O.
        count: E.
        slots: S.
        rank: R, the largest that is served.
        dtype: in which they are multiplied.
        device: where they are held.
    """

    def __init__(
        self, sizes: tuple[int, int], count: int, slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.sizes, self._count, self._slots, self._rank = sizes, count, slots, rank
        self._kind = {"dtype": dtype, "device": device}
        self.held: tuple[torch.Tensor, torch.Tensor] | None = None

    def hold(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A [S, E, R, I] and B [S, E, O, R] of all slots; made, with zeros, when they are first asked for."""
        if self.held is None:
            columns, rows = self.sizes
            with torch.inference_mode(mode=False):  # they are written from outside of vLLM's steps
                self.held = (
                    torch.zeros(self._slots, self._count, self._rank, columns, **self._kind),
                    torch.zeros(self._slots, self._count, rows, self._rank, **self._kind),
                )
        return self.held

    def add(self, y: torch.Tensor, x: torch.Tensor, expert: int, slot: int) -> torch.Tensor:
        """y [T, O] plus B A x of one expert for x [T, I]; y itself where the slot is none (-1) or no adapter came here.

        Three roundings, as in the trainer: of A x, of B A x, of the sum.
        """
        if slot < 0 or self.held is None:
            return y
        a_SERI, b_SEOR = self.held
        low_TR = torch.nn.functional.linear(x, a_SERI[slot, expert])
        return y + torch.nn.functional.linear(low_TR, b_SEOR[slot, expert])


class ExpertMatrix:
    """The adapters of one matrix of one expert, with the methods and names of vLLM's layers that take LoRA.

    Args:
        adapters: of all experts of its layer.
        expert: its number.
    """

    def __init__(self, adapters: ExpertAdapters, expert: int) -> None:
        self._adapters, self._expert = adapters, expert

    @property
    def lora_a_stacked(self) -> tuple[torch.Tensor, ...] | None:
        """A [S, 1, R, I], a view; `None` until an adapter came."""
        held = self._adapters.held
        return None if held is None else (held[0][:, self._expert].unsqueeze(1),)

    @property
    def lora_b_stacked(self) -> tuple[torch.Tensor, ...] | None:
        """B [S, 1, O, R], a view; `None` until an adapter came."""
        held = self._adapters.held
        return None if held is None else (held[1][:, self._expert].unsqueeze(1),)

    @property
    def expert_sizes(self) -> tuple[int, int]:
        """I and O; the extension knows these matrices by it."""
        return self._adapters.sizes

    def set_lora(self, index: int, lora_a: torch.Tensor, lora_b: torch.Tensor) -> None:
        """Have a slot hold A [R, I] and B [O, R], whose R may be smaller."""
        a_SERI, b_SEOR = self._adapters.hold()
        self.reset_lora(index)
        a_SERI[index, self._expert, : lora_a.shape[0]].copy_(lora_a)
        b_SEOR[index, self._expert, :, : lora_b.shape[1]].copy_(lora_b)

    def reset_lora(self, index: int) -> None:
        """Have a slot hold nothing."""
        if self._adapters.held is not None:
            for part in self._adapters.held:
                part[index, self._expert].zero_()


class AdaptedTokens:
    """Which slot the tokens of vLLM's step have.

    Args:
        wrapper: vLLM's, which is told before each step.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def groups(self, count: int) -> Groups:
        """Each slot that occurs, -1 for none, with the numbers of its tokens; `None` for all of the T that are
        computed.

        Raises:
            EngineUnsupportedError: vLLM computes other tokens than it has told.
        """
        slots_T = self._wrapper.token_lora_indices
        if len(slots_T) != count:
            raise EngineUnsupportedError(
                f"multiplying adapters on experts: vLLM computes tokens={count}, and has named the adapters of "
                f"tokens={len(slots_T)}. Adapt the attention alone, and report this with what `qlora-rl doctor` prints."
            )
        return group(slots_T)


def take_adapters(runner: Any) -> None:
    """Have a model runner's 4-bit experts take adapters, where it takes any; for the CPU alone.

    Args:
        runner: vLLM's, with its model loaded.
    """
    manager = adapter_manager(runner)
    if manager is None:
        return
    tokens = AdaptedTokens(manager._get_punica_wrapper("model"))
    for module in runner.get_model().modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "take_adapters"):  # `experts_4bit.CodedExperts`
            manager.modules.update(method.take_adapters(tokens, manager.lora_slots, manager.lora_config.max_lora_rank))


def matrices_of(
    path: str, names: Sequence[str], kinds: Sequence[ExpertAdapters], count: int
) -> Iterator[tuple[str, ExpertMatrix]]:
    """Every matrix of a layer's experts, by transformers' name of the linear that the trainer has for it.

    Args:
        path: of the experts in transformers' model.
        names: of an expert's matrices.
        kinds: the adapters on each of these.
        count: E.
    """
    for number in range(count):
        for name, kind in zip(names, kinds, strict=True):
            yield f"{path}.{number}.{name}", ExpertMatrix(kind, number)
