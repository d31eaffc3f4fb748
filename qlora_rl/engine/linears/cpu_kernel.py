"""`codes.cpp`, built for this processor when it is first needed, and called without torch's dispatcher.

The library is kept in the cache directory under a digest of its source and of the command that builds it. It shares
torch's OpenMP, so that there is one set of threads. Without a compiler callers fall back to decoding and then
multiplying, and say why.

Letters: T tokens, I and O in- and out-features, R rank of an adapter, N parts of a fused linear.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from qlora_rl.base.checkpoint import cache_root
from qlora_rl.cpu_features import processor
from qlora_rl.errors import ConfigConflictError

SOURCE = Path(__file__).with_name("codes.cpp")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-mavx2", "-mfma")
AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16")
BUILD_TIMEOUT_S = 120.0
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class CodesKernel:
    """The built library.

    Args:
        path: of the library.
        instructions: for which it was built; see `Processor.codes_kernel`.
    """

    def __init__(self, path: Path, instructions: str) -> None:
        library = ctypes.CDLL(str(path))
        self._multiply, self._decode = library.qlora_rl_multiply, library.qlora_rl_decode
        self._multiply.argtypes = [_NUMBER, *[_POINTER] * 6, *[_NUMBER] * 3, ctypes.c_int]
        self._decode.argtypes = [*[_POINTER] * 4, *[_NUMBER] * 3, ctypes.c_int]
        self._multiply_back = library.qlora_rl_multiply_back
        self._multiply_back.argtypes = [*[_POINTER] * 5, *[_NUMBER] * 4, ctypes.c_int]
        self._low, self._add = library.qlora_rl_adapter_low, library.qlora_rl_adapter_add
        self._low.argtypes = [_NUMBER, _POINTER, _NUMBER, *[_POINTER] * 2, *[_NUMBER] * 2, ctypes.c_int]
        self._add.argtypes = [_NUMBER, *[_POINTER] * 2, _NUMBER, *[_POINTER] * 2, _NUMBER, ctypes.c_float, ctypes.c_int]
        self._norm = library.qlora_rl_norm
        self._norm.argtypes = [*[_POINTER] * 4, *[_NUMBER] * 2, ctypes.c_float, ctypes.c_int]
        for function in (self._multiply, self._multiply_back, self._decode, self._low, self._add, self._norm):
            function.restype = None
        self.instructions = instructions

    def takes(self, columns: int, blocksize: int) -> bool:
        """It multiplies weights with rows of so many columns in blocks of this size."""
        return blocksize % 32 == 0 and columns % blocksize == 0

    def decode(
        self, codes: torch.Tensor, absmax: torch.Tensor, values: torch.Tensor, out_OI: torch.Tensor, blocksize: int
    ) -> None:
        """Write the weight into `out_OI`, bf16 and contiguous; `values` is what the 16 codes mean, float32."""
        self._decode(
            codes.data_ptr(), absmax.data_ptr(), values.data_ptr(), out_OI.data_ptr(), *out_OI.shape, blocksize,
            torch.get_num_threads()
        )  # fmt: skip

    def multiply(
        self,
        x_TI: torch.Tensor,
        codes: Sequence[int],
        absmax: Sequence[int],
        starts: Sequence[int],
        values: torch.Tensor,
        rows: int,
        blocksize: int,
    ) -> torch.Tensor:
        """Several weights [O, I] of one shape, each times some of the tokens; bf16 [T, O].

        Args:
            x_TI: bf16, contiguous; those of the first weight first.
            codes, absmax: addresses, of each weight.
            starts: number of the first token of each weight, and T.
            values: what the 16 codes mean, float32 [16].
            rows: O.
            blocksize: weights per scale.
        """
        out_TO = torch.empty(len(x_TI), rows, dtype=torch.bfloat16)
        count = len(codes)
        self._multiply(
            count,
            (_POINTER * count)(*codes),
            (_POINTER * count)(*absmax),
            (_NUMBER * (count + 1))(*starts),
            values.data_ptr(),
            x_TI.data_ptr(),
            out_TO.data_ptr(),
            rows,
            x_TI.shape[1],
            blocksize,
            torch.get_num_threads(),
        )
        return out_TO

    def takes_back(self, rows: int, columns: int, blocksize: int) -> bool:
        """It multiplies gradients with weights [rows, columns] in blocks of this size."""
        return self.takes(columns, blocksize) and rows % 16 == 0 and columns % 64 == 0

    def multiply_back(
        self, gradient_TO: torch.Tensor, codes: int, absmax: int, values: torch.Tensor, columns: int, blocksize: int
    ) -> torch.Tensor:
        """A gradient, bf16 and contiguous, times the weight [O, I]; bf16 [T, I]. The other arguments are those of
        `multiply`, of one weight."""
        out_TI = torch.empty(len(gradient_TO), columns, dtype=torch.bfloat16)
        self._multiply_back(
            codes, absmax, values.data_ptr(), gradient_TO.data_ptr(), out_TI.data_ptr(), *gradient_TO.shape, columns,
            blocksize, torch.get_num_threads()
        )  # fmt: skip
        return out_TI

    def norm(
        self, x: torch.Tensor, weight_I: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The norm of x [..., I] by its root mean square, times the weight; all of it bf16.

        Args:
            residual: like x, and contiguous; x + residual is what has the norm, and is written there.
        """
        x, out = x.contiguous(), torch.empty(x.shape, dtype=torch.bfloat16)
        columns = len(weight_I)
        self._norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight_I.data_ptr(),
            out.data_ptr(),
            x.numel() // columns,
            columns,
            epsilon,
            torch.get_num_threads(),
        )
        return out

    def takes_adapter(self, a_parts: Sequence[torch.Tensor], b_parts: Sequence[torch.Tensor]) -> bool:
        """It adds adapters with such A [R, I] and B [O, R] of each part, without a copy."""
        rank, columns = a_parts[0].shape
        return (
            columns % 32 == 0
            and rank % 4 == 0
            and all(part.shape == (rank, columns) for part in a_parts)
            and all(part.shape[1] == rank and len(part) % 16 == 0 for part in b_parts)
            and all(part.dtype == torch.bfloat16 and part.is_contiguous() for part in (*a_parts, *b_parts))
        )

    def add_adapter(
        self,
        y_TO: torch.Tensor,
        x_TI: torch.Tensor,
        a_parts: Sequence[torch.Tensor],
        b_parts: Sequence[torch.Tensor],
        scale: float,
    ) -> None:
        """Add scale * B (A x) to y, part by part; A x is rounded to bf16, and so is B (A x). x and y are contiguous,
        the adapter of a kind that `takes_adapter` takes.

        Raises:
            ValueError: x has another width than A, or y than B.
        """
        count, (rank, columns), sizes = len(a_parts), a_parts[0].shape, [len(part) for part in b_parts]
        if (x_TI.shape[1], y_TO.shape[1]) != (columns, sum(sizes)):
            raise ValueError(
                f"multiplying an adapter: x and y have {x_TI.shape[1]} and {y_TO.shape[1]} columns, the adapter "
                f"{columns} and {sum(sizes)}."
            )
        places = _POINTER * count
        low_TR = torch.empty(len(x_TI), count * rank, dtype=torch.bfloat16)
        a, b = ([part.data_ptr() for part in parts] for parts in (a_parts, b_parts))
        self._low(count, places(*a), rank, x_TI.data_ptr(), low_TR.data_ptr(), *x_TI.shape, torch.get_num_threads())
        outputs = (_NUMBER * count)(*sizes)
        self._add(
            count, places(*b), outputs, rank, low_TR.data_ptr(), y_TO.data_ptr(), len(y_TO), scale,
            torch.get_num_threads()
        )  # fmt: skip


def codes_kernel() -> CodesKernel | str:
    """The kernel for this processor, built at the first call; or why there is none."""
    instructions = processor().codes_kernel
    if not instructions:
        return "it is not written for this processor, or its setting says that torch multiplies"
    return _built(instructions)


@functools.cache
def _built(instructions: str) -> CodesKernel | str:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        return "there is no C++ compiler; install g++, or set CXX"
    command = [compiler, *FLAGS, *(AVX512_FLAGS if instructions == "avx512_bf16" else ())]
    digest = hashlib.sha256("\n".join([*command, SOURCE.read_text()]).encode()).hexdigest()[:16]
    try:
        folder = cache_root() / "kernels"
        path = folder / f"codes-{digest}.so"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
            return f"others may write into {folder}, from where it would be loaded; chmod 700 it"
        if not path.is_file():
            _build(command, path)
        if path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o022:
            return f"others may write into {path}, which would be loaded; delete it"
        return CodesKernel(path, instructions)
    except subprocess.CalledProcessError as failed:
        said = failed.stderr.decode(errors="replace").strip().splitlines()
        return f"{compiler} could not build it: {said[0] if said else f'exit status {failed.returncode}'}"
    except (OSError, subprocess.TimeoutExpired, ConfigConflictError) as error:  # the last: there is no cache
        return f"{compiler} could not build it: {error}"


def _build(command: Sequence[str], path: Path) -> None:
    """Whole or not at all: others may be building the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as room:
        made = Path(room) / path.name
        subprocess.run(
            [*command, str(SOURCE), "-o", str(made)], check=True, capture_output=True, timeout=BUILD_TIMEOUT_S
        )
        made.chmod(0o700)
        made.replace(path)
