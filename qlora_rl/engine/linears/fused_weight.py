"""The parts of a fused linear (q, k and v; gate and up) as one 4-bit weight, without a copy of the codes.

vLLM's plugin holds the codes of all parts one after another, and a QuantState for each part; it makes one product per
part. Here the scales are contiguous too, and the states have views of them: whoever repairs the scales of a part
repairs these. The same on every device.

Letters: O and I out- and in-features.
"""

from __future__ import annotations

from typing import Any

import torch


class Joined:
    """The codes and scales of one of vLLM's 4-bit parameters, as one weight [O, I].

    Args:
        weight: vLLM's parameter: codes [bytes, 1], a QuantState per part, offsets of the parts.

    Attributes:
        shape: (O, I).
        sizes: out-features of each part.
        quant_type: "nf4" or "fp4".
        blocksize: weights per scale.
        codes: all codes, uint8 [O * I / 2]; a view of vLLM's.
        absmax: all scales, float32 [O * I / blocksize]; the states' are views of them.
        values: what the 16 codes mean, float32 [16].

    Raises:
        ValueError: says why its parts are not one weight.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        states = [weight.bnb_quant_state[i] for i in range(len(weight.bnb_quant_state))]
        self._weight, self.states = weight, states
        self.offsets: list[int] = weight.bnb_shard_offsets.tolist()
        first = states[0]
        self.sizes = tuple(int(state.shape[0]) for state in states)
        self.shape = (sum(self.sizes), int(first.shape[1]))
        self.quant_type, self.blocksize = str(first.quant_type), int(first.blocksize)
        if any(state.nested for state in states):
            raise ValueError("its scales are quantised")
        if any(
            (s.quant_type, s.blocksize, s.shape[1]) != (first.quant_type, first.blocksize, first.shape[1])
            for s in states
        ):
            raise ValueError("its parts are quantised differently")
        if self.shape[1] % self.blocksize:
            raise ValueError("its blocks of scales span rows")
        ends = [sum(self.sizes[:i]) * self.shape[1] // 2 for i in range(len(states) + 1)]
        if self.offsets != ends or weight.data.numel() != ends[-1] or weight.data.dtype != torch.uint8:
            raise ValueError("its codes are not contiguous")
        self.values = first.code.to(weight.data.device, torch.float32)
        self._join()

    def _join(self) -> None:
        self.codes = self._weight.data.view(-1)
        self.absmax = _join_scales(self.states)
        self._held = [self.codes.data_ptr(), *(state.absmax for state in self.states)]

    def is_current(self) -> bool:
        """Nobody has put other codes or scales in the place of these; what is written into them counts anyway."""
        place, *scales = self._held
        return self._weight.data_ptr() == place and all(s.absmax is a for s, a in zip(self.states, scales, strict=True))

    def renew(self) -> bool:
        """Join what is there now, if it is something else; true if it was."""
        if self.is_current():
            return False
        self._join()
        return True

    def part(self, i: int) -> tuple[torch.Tensor, Any]:
        """Codes and state of one part, as vLLM has them."""
        return self._weight.data[self.offsets[i] : self.offsets[i + 1]], self.states[i]


def _join_scales(states: list[Any]) -> torch.Tensor:
    """One tensor of the scales of all parts, float32 [blocks]; views of it take their place."""
    joined = torch.cat([state.absmax.flatten().float() for state in states])
    start = 0
    for state in states:
        size = state.absmax.numel()
        state.absmax = joined[start : start + size]
        start += size
    return joined
