"""A 4-bit base multiplied with less work than vLLM's bitsandbytes layers do on the CPU.

"nf4": the parts of a fused linear are one weight. `native`'s kernel multiplies its codes; where that cannot be built,
it is decoded slice by slice into one buffer that stays in the processor's cache. "baked": the decoded weight is kept
next to the codes, packed as vLLM packs a 16-bit one. Both multiply with the numbers that bitsandbytes decodes, bit for
bit but for the sign of a zero, which is checked for every weight before its layer is changed.

Letters: T tokens of a step, I and O in- and out-features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from qlora_rl.base.decode import Decode, TableDecoder, decode_plainly, decoder, uses_avx512
from qlora_rl.cpu_matmul import COLUMNS_ALIKE, lifted_rows
from qlora_rl.engine.linears.cpu_kernel import CodesKernel
from qlora_rl.engine.linears.fused_weight import Joined
from qlora_rl.engine.linears.linear import Pack, Product

# Weights that are decoded at a time: 4 MiB in bf16, so that the product reads them out of the cache.
SLICE = 2**21
# The same where they are lifted to float32 as well.
LIFTED_SLICE = 2**20
# Of a decoded copy, read back at a time: as many as tokens are sampled at once, in one product.
CHECKED_COLUMNS = 32


@dataclass
class Slice:
    """Some rows of a weight: their codes and scales, views of vLLM's own."""

    codes: torch.Tensor
    absmax: torch.Tensor
    first: int
    rows: int


class DecodedLinear:
    """Takes the place of `apply` of one linear's quantisation method.

    Args:
        weight: vLLM's parameter: codes [bytes, 1], a QuantState per part.
        buffer: bf16, as many elements as are decoded at a time; every layer of the engine may have the same.
        lifted: float32, as large: products are made in float32 and rounded once. Without it in bf16.
        kernel: multiplies codes; it is left out for a weight that it would change.

    Raises:
        ValueError: says why this weight is left to vLLM.
    """

    def __init__(
        self,
        weight: torch.nn.Parameter,
        buffer: torch.Tensor,
        lifted: torch.Tensor | None = None,
        kernel: CodesKernel | None = None,
    ) -> None:
        self._joined, self._buffer, self._lifted = Joined(weight), buffer, lifted
        self.shape, self.parts = self._joined.shape, len(self._joined.sizes)
        self._columns = self.shape[1]
        self._packed: Product | None = None
        self._kernel: CodesKernel | None = None
        if kernel is not None and kernel.takes(self._columns, self._joined.blocksize):
            self._cut()
            self._decode: Decode = self._by_kernel(kernel)
            if self._is_exact() and self._multiplies_exactly(kernel):
                self._kernel = kernel
                return
        decode = decoder(self._joined.quant_type, self._joined.blocksize)
        if decode is None:
            raise ValueError("bitsandbytes has no kernel for it")
        self._decode = decode
        self._cut()
        if lifted is not None and not uses_avx512():
            self._decode = TableDecoder(self._joined.values, self._joined.blocksize, lifted)
            if self._is_exact():
                return
            self._decode = decode
        if not self._is_exact():
            raise ValueError("its weights do not come out as bitsandbytes' own")

    def _cut(self) -> None:
        blocksize = self._joined.blocksize
        rows = max(1, self._buffer.numel() // self._columns)
        if rows * self._columns > self._buffer.numel():
            raise ValueError("one row of it is larger than the buffer")
        absmax, codes = self._joined.absmax, self._joined.codes
        count = math.ceil(self.shape[0] / rows)
        rows = math.ceil(self.shape[0] / count)  # of one size, as far as it goes
        found: list[Slice] = []
        for start in range(0, self.shape[0], rows):
            size = min(rows, self.shape[0] - start)
            low, high = start * self._columns, (start + size) * self._columns
            found.append(Slice(codes[low // 2 : high // 2], absmax[low // blocksize : high // blocksize], start, size))
        self._slices = found
        self._addresses = [codes.data_ptr()], [absmax.data_ptr()]

    def _by_kernel(self, kernel: CodesKernel) -> Decode:
        values, blocksize = self._joined.values, self._joined.blocksize
        return lambda codes, absmax, out: kernel.decode(codes, absmax, values, out, blocksize)

    def _multiply_codes(self, kernel: CodesKernel, x_TI: torch.Tensor) -> torch.Tensor:
        return kernel.multiply(
            x_TI.contiguous(),
            *self._addresses,
            (0, len(x_TI)),
            self._joined.values,
            self.shape[0],
            self._joined.blocksize,
        )

    def _multiplies_exactly(self, kernel: CodesKernel) -> bool:
        """The first columns come out of its product as they are decoded: with one 1 and else zeros it is exact."""
        columns = torch.arange(min(CHECKED_COLUMNS, self._columns))
        found = self._multiply_codes(kernel, _one_hot(columns, self._columns)).t()
        return all(
            torch.equal(found[part.first : part.first + part.rows], self._decoded(part)[:, columns])
            for part in self._slices
        )

    def _decoded(self, part: Slice) -> torch.Tensor:
        out = self._buffer[: part.rows * self._columns].view(part.rows, self._columns)
        self._decode(part.codes, part.absmax, out)
        return out

    def _is_exact(self) -> bool:
        """Every weight comes out as bitsandbytes' own function gives it."""
        for i in range(self.parts):
            first = sum(self._joined.sizes[:i])
            plain = decode_plainly(*self._joined.part(i))
            for part in self._slices:
                low, high = max(part.first, first), min(part.first + part.rows, first + plain.shape[0])
                if low < high:
                    here = self._decoded(part)[low - part.first : high - part.first]
                    if not torch.equal(here, plain[low - first : high - first]):  # a zero may have either sign
                        return False
        return True

    def bake(self, pack: Pack) -> int:
        """Keep the decoded weight, and multiply with that from now on.

        Args:
            pack: makes of a weight [O, I] the product with it, and with a bias.

        Returns:
            Bytes that are kept.
        """
        if self._joined.renew():
            self._cut()
        weight = torch.empty(self.shape, dtype=torch.bfloat16)
        for part in self._slices:
            weight[part.first : part.first + part.rows] = self._decoded(part)
        self._packed, self._pack = pack(weight), pack
        return self.baked_bytes

    @property
    def baked_bytes(self) -> int:
        """What the decoded weight takes."""
        is_wide = self._lifted is not None and not (self._kernel and self._kernel.takes_plain(self._columns))
        return math.prod(self.shape) * (4 if is_wide else 2)

    def refresh(self) -> None:
        """Make the copy again, where there is one: the codes or scales under it have changed."""
        if self._packed is not None:
            self.bake(self._pack)

    @property
    def has_kernel(self) -> bool:
        """`native`'s kernel multiplies its codes."""
        return self._kernel is not None

    @property
    def addresses(self) -> tuple[int, int]:
        """Where its codes and scales are, for `native`'s kernel; until other ones are put in their place."""
        return self._addresses[0][0], self._addresses[1][0]

    @property
    def values(self) -> torch.Tensor:
        """What the 16 codes mean, float32 [16]."""
        return self._joined.values

    @property
    def blocksize(self) -> int:
        """Weights per scale."""
        return self._joined.blocksize

    @property
    def is_baked(self) -> bool:
        """A decoded copy is multiplied, in the place of the codes."""
        return self._packed is not None

    def wrong_column(self, start: int = 0) -> int | None:
        """The first column in which the copy does not hold what the codes and scales say; `None` where all agree, or
        there is no copy.

        Read through the product that samples: with one 1 and else zeros it is exact, up to the sign of a zero.

        Args:
            start: the first of `CHECKED_COLUMNS` columns that are read, modulo I.
        """
        if self._packed is None:
            return None
        if self._joined.renew():
            self._cut()
        columns = torch.arange(start, start + min(CHECKED_COLUMNS, self._columns)) % self._columns
        held = self._packed(_one_hot(columns, self._columns), None)
        wanted = torch.cat([self._decoded(part)[:, columns] for part in self._slices]).t()
        differs = (held != wanted).any(dim=1)
        return int(columns[differs][0]) if bool(differs.any()) else None

    def unbake(self) -> None:
        """Decode again in every product."""
        self._packed = None

    def __call__(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., I] times the weight, plus the bias; the product is rounded to bf16, as that of vLLM's layer is."""
        if self._packed is not None:
            if x.dtype == torch.bfloat16 and (bias is None or bias.dtype == x.dtype):
                return self._packed(x, bias)
            out = self._packed(x.to(torch.bfloat16), None).to(x.dtype)
            return out if bias is None else out + bias
        out = self.multiply(x)
        if bias is not None:
            out += bias
        return out

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., I] times the weight, decoded."""
        if self._joined.renew():
            self._cut()
        flat = x.reshape(-1, self._columns).to(torch.bfloat16)
        if self._kernel is not None:
            out = self._multiply_codes(self._kernel, flat)
        else:
            out = self._product(flat) if self._lifted is None else self._lifted_product(flat, self._lifted)
        return out.to(x.dtype).view(*x.shape[:-1], self.shape[0])

    def _product(self, x_TI: torch.Tensor) -> torch.Tensor:
        out_TO = torch.empty(len(x_TI), self.shape[0], dtype=x_TI.dtype)
        for part in self._slices:
            torch.mm(x_TI, self._decoded(part).t(), out=out_TO[:, part.first : part.first + part.rows])
        return out_TO

    def _lifted_product(self, x_TI: torch.Tensor, lifted: torch.Tensor) -> torch.Tensor:
        """The weight is the left factor: with few tokens MKL takes up to a third less time than with the tokens
        there."""
        x_IT = lifted_rows(x_TI, COLUMNS_ALIKE).t()
        out_OT = x_IT.new_empty(self.shape[0], x_IT.shape[1])
        for part in self._slices:
            weight = self._decoded(part)
            weight = lifted[: weight.numel()].view_as(weight).copy_(weight)
            torch.mm(weight, x_IT, out=out_OT[part.first : part.first + part.rows])
        return out_OT[:, : len(x_TI)].t().to(torch.bfloat16, memory_format=torch.contiguous_format)


def _one_hot(columns: torch.Tensor, width: int) -> torch.Tensor:
    """bf16 [T, I], in row t a 1 in the t-th of the columns."""
    rows = torch.zeros(len(columns), width, dtype=torch.bfloat16)
    rows[torch.arange(len(columns)), columns] = 1
    return rows
