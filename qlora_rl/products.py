"""Products of 16-bit matrices on a processor without instructions for them: in float32, the result rounded once.

While a `Float32Products` is open, torch's CPU kernels of `mm`, `addmm`, `bmm`, `baddbmm` and of the backward pass of its attention are
replaced for its dtypes. Nothing is replaced at import, nor where the processor is fast. Autograd and autocast lie above and notice nothing.

Letters: M and N rows and columns of a result, K what is summed over.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from qlora_rl.processor import processor

# Entries of a weight that are lifted at a time: 2 MiB in float32, which the product reads out of the cache.
SLICE = 2**19
# Rows for each thread that MKL adds up alike, whatever their number; one to three rows alone it adds up in another order.
ROWS_ALIKE = 4

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_lock = threading.Lock()
# How many claims there are on a dtype.
_claims: Counter[torch.dtype] = Counter()
_library: torch.library.Library | None = None
# torch's own, by name; looked up before they are replaced.
_own: dict[str, Any] = {}


class Float32Products:
    """A claim on products in float32; when the last one is closed torch has its own kernels back.

    Args:
        dtypes: of the matrices. For those that the processor multiplies natively nothing is done.

    Attributes:
        dtypes: that are multiplied in float32 for this claim; empty when it is closed.

    Raises:
        ConfigConflictError: the setting in the environment is unknown; see `qlora_rl.processor`.
    """

    def __init__(self, *dtypes: torch.dtype) -> None:
        here = processor()
        self.dtypes = tuple(dtype for dtype in set(dtypes) if here.multiplies_in(dtype) != dtype)
        with _lock:
            _claims.update(self.dtypes)
            _settle()

    def close(self) -> None:
        """Give the claim up; harmless when repeated."""
        with _lock:
            _claims.subtract(self.dtypes)
            self.dtypes = ()
            _settle()

    def __enter__(self) -> Float32Products:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lifted_rows(x_TI: torch.Tensor) -> torch.Tensor:
    """The rows in float32, and zeros below them, so that the result of each row does not depend on how many there are."""
    step = ROWS_ALIKE * torch.get_num_threads()
    lifted = torch.zeros(-(-len(x_TI) // step) * step, x_TI.shape[1])
    lifted[: len(x_TI)] = x_TI
    return lifted


def are_replaced() -> bool:
    """torch's kernels are replaced at the moment."""
    return _library is not None


@contextlib.contextmanager
def torchs_own() -> Iterator[None]:
    """torch's own kernels whatever is claimed, for measuring what others do; for all threads of the process."""
    with _lock:
        _restore()
    try:
        yield
    finally:
        with _lock:
            _settle()


def _settle() -> None:
    if not any(_claims.values()):
        _restore()
    elif _library is None:
        _replace()


def _replace() -> None:
    global _library
    for name in _REPLACEMENTS:
        _own[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the first kernel that is replaced
        for name, replacement in _REPLACEMENTS.items():
            library.impl(name, _chosen(name, replacement), "CPU", with_keyset=True)
    _library = library


def _restore() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _chosen(name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator: ours where all matrices have one dtype that is claimed, torch's own (and its errors) elsewhere."""
    own = _own[name].call_boxed
    matrices = slice(3 if "add" in name else 2)

    def kernel(keys: Any, *given: Any, **named: Any) -> Any:
        dtype = given[0].dtype
        if _claims[dtype] and all(x.dtype is dtype for x in (*given[matrices], named.get("out", given[0]))):
            return replacement(*given, **named)
        return own(keys, *given, **named)

    return kernel


def _call(name: str, *arguments: Any, **named: Any) -> Any:
    return _own[name].call_boxed(_CPU, *arguments, **named)


def _product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """The product in float32; no sum is split."""
    rows, columns = a_MK.shape[0], b_KN.shape[1]
    a_MK = lifted_rows(a_MK)
    if b_KN.numel() <= 2 * SLICE:
        return _call("mm", a_MK, b_KN.float())[:rows]
    product_MN = torch.empty(len(a_MK), columns)
    step = max(1, SLICE // b_KN.shape[0])
    for first in range(0, columns, step):
        part = slice(first, first + step)
        _call("mm.out", a_MK, b_KN[:, part].float(), out=product_MN[:, part])
    return product_MN[:rows]


def _products(a_BMK: torch.Tensor, b_BKN: torch.Tensor) -> torch.Tensor:
    return _call("bmm", a_BMK.float(), b_BKN.float())


def _plus(added: torch.Tensor, product: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    product = product.float()
    if alpha != 1:
        product *= alpha
    return product if beta == 0 else product.add_(added, alpha=beta)


def _write(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def _of_two(product: Callable[..., torch.Tensor]) -> tuple[Callable[..., Any], ...]:
    """Forms of an operator with two factors: that makes its result, and that is given the place for it."""

    def made(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b).to(a.dtype)

    def written(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return _write(out, product(a, b))

    return made, written


def _of_three(product: Callable[..., torch.Tensor]) -> tuple[Callable[..., Any], ...]:
    """Forms of an operator that adds a product to something: a new result, a given place, and in place."""

    def made(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        return _plus(c, product(a, b), beta, alpha).to(a.dtype)

    def written(
        c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor
    ) -> torch.Tensor:
        return _write(out, _plus(c, product(a, b), beta, alpha))

    def in_place(
        c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        return c.copy_(_plus(c, product(a, b), beta, alpha))

    return made, written, in_place


def _attention_backward(*arguments: Any, attn_mask: torch.Tensor | None = None, scale: float | None = None) -> Any:
    """Gradients of query, key and value; torch's own kernel in float32."""
    dtype = arguments[0].dtype
    lifted = [value.float() if isinstance(value, torch.Tensor) else value for value in arguments]
    if attn_mask is not None and attn_mask.dtype == dtype:
        attn_mask = attn_mask.float()
    found = _call(_ATTENTION_BACKWARD, *lifted, attn_mask=attn_mask, scale=scale)
    return tuple(gradient.to(dtype) for gradient in found)


_ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    **dict(zip(("mm", "mm.out"), _of_two(_product), strict=True)),
    **dict(zip(("bmm", "bmm.out"), _of_two(_products), strict=True)),
    **dict(zip(("addmm", "addmm.out", "addmm_"), _of_three(_product), strict=True)),
    **dict(zip(("baddbmm", "baddbmm.out", "baddbmm_"), _of_three(_products), strict=True)),
    _ATTENTION_BACKWARD: _attention_backward,
}
