"""The parts of a fused linear (q, k and v; gate and up) as one 4-bit weight, without a copy of the codes; on a CPU
multiplied by `cpu_kernel`'s.

vLLM's plugin holds the codes of all parts one after another, and a QuantState for each part; it makes one product per
part. Here the scales are contiguous too, and the states have views of them: whoever repairs the scales of a part
repairs these.

Letters: T tokens of a step, O and I out- and in-features.
"""

from __future__ import annotations

import torch

from qlora_rl.base.decode import decode_plainly
from qlora_rl.engine.linears.cpu_kernel import CodesKernel

# Columns of a weight that must come out of a product as they are decoded.
CHECKED_COLUMNS = 32


class CodedLinear:
    """Takes the place of `apply` of one linear's quantisation method: the kernel multiplies the codes of all parts,
    by the numbers that bitsandbytes decodes, bit for bit but for the sign of a zero.

    Args:
        weight: vLLM's parameter: codes [bytes, 1], a QuantState per part, offsets of the parts.
        kernel: multiplies codes.

    Attributes:
        shape: (O, I).
        blocksize: weights per scale.
        values: what the 16 codes mean, float32 [16].

    Raises:
        ValueError: says why this weight is left to vLLM.
    """

    def __init__(self, weight: torch.nn.Parameter, kernel: CodesKernel) -> None:
        states = [weight.bnb_quant_state[i] for i in range(len(weight.bnb_quant_state))]
        self._weight, self._states, self._kernel = weight, states, kernel
        first, sizes = states[0], [int(state.shape[0]) for state in states]
        self.shape, self.blocksize = (sum(sizes), int(first.shape[1])), int(first.blocksize)
        if any(state.nested for state in states):
            raise ValueError("its scales are quantised")
        if any(
            (s.quant_type, s.blocksize, s.shape[1]) != (first.quant_type, first.blocksize, first.shape[1])
            for s in states
        ):
            raise ValueError("its parts are quantised differently")
        if self.shape[1] % self.blocksize:
            raise ValueError("its blocks of scales span rows")
        offsets = weight.bnb_shard_offsets.tolist()
        ends = [sum(sizes[:i]) * self.shape[1] // 2 for i in range(len(states) + 1)]
        if offsets != ends or weight.data.numel() != ends[-1] or weight.data.dtype != torch.uint8:
            raise ValueError("its codes are not contiguous")
        self.values = first.code.to(weight.data.device, torch.float32)
        self._join()
        if not kernel.takes(self.shape[1], self.blocksize):
            raise ValueError("the kernel for codes does not take its shape")
        if not self._is_exact(sizes, offsets):
            raise ValueError("its weights do not come out as bitsandbytes' own")

    def _join(self) -> None:
        """Have one tensor of the scales of all parts, float32 [O * I / blocksize]; views of it take their place."""
        self._absmax = torch.cat([state.absmax.flatten().float() for state in self._states])
        parts = self._absmax.split([state.absmax.numel() for state in self._states])
        for state, part in zip(self._states, parts, strict=True):
            state.absmax = part
        self._held = [self._weight.data_ptr(), *parts]

    def _is_current(self) -> bool:
        """Nobody has put other codes or scales in the place of these; what is written into them counts anyway."""
        place, *scales = self._held
        pairs = zip(self._states, scales, strict=True)
        return self._weight.data_ptr() == place and all(state.absmax is held for state, held in pairs)

    @property
    def addresses(self) -> tuple[int, int]:
        """Where its codes and scales are; until other ones are put in their place."""
        return self._held[0], self._absmax.data_ptr()

    def __call__(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., I] times the weight, plus the bias; the product is rounded to bf16, as that of vLLM's layer is."""
        out = self.multiply(x)
        if bias is not None:
            out += bias
        return out

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., I] times the weight."""
        if not self._is_current():
            self._join()
        rows, columns = self.shape
        x_TI = x.reshape(-1, columns).to(torch.bfloat16).contiguous()
        codes, absmax = self.addresses
        out_TO = self._kernel.multiply(x_TI, [codes], [absmax], (0, len(x_TI)), self.values, rows, self.blocksize)
        return out_TO.to(x.dtype).view(*x.shape[:-1], rows)

    def _is_exact(self, sizes: list[int], offsets: list[int]) -> bool:
        """Every weight is decoded as by bitsandbytes' own function, and the first columns come out of a product like
        that: with one 1 and else zeros it is exact.

        Args:
            sizes: out-features of each part.
            offsets: of the parts' codes.
        """
        columns = self.shape[1]
        found = self.multiply(torch.eye(min(CHECKED_COLUMNS, columns), columns, dtype=torch.bfloat16)).t()
        row = 0
        for i, (size, state) in enumerate(zip(sizes, self._states, strict=True)):
            codes = self._weight.data[offsets[i] : offsets[i + 1]]
            plain = decode_plainly(codes, state)
            ours = torch.empty_like(plain)
            self._kernel.decode(codes, state.absmax, self.values, ours, self.blocksize)
            if not torch.equal(ours, plain):  # a zero may have either sign
                return False
            if not torch.equal(found[row : row + size], plain[:, : found.shape[1]]):
                return False
            row += size
        return True
