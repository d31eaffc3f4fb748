"""Products of 16-bit matrices on a processor without instructions for them: in float32, the result rounded once.

With the first `Float32Products` torch's CPU kernels of `mm`, `addmm`, `addmv`, `bmm`, `baddbmm` and of the backward
pass of its attention are replaced, for the life of the process: a kernel that is taken away while another thread
computes with it is a crash. While no claim is open the replacements call torch's own. Nothing is replaced at import,
nor where the processor is fast. Autograd and autocast work at a higher level and notice nothing.

Letters: B batch, M and N rows and columns of a result, K what is summed over.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from qlora_rl.cpu_features import processor

# Entries of a right factor that are lifted at a time: 2 MiB in float32, which the product reads out of the cache.
SLICE = 2**19
# Entries of a left factor that are lifted at a time (4 MiB), and the fewest rows, so that lifting the right factor
# again costs little.
LEFT_SLICE = 2**20
FEWEST_ROWS = 512
# Of a row-major right factor fewer columns than this are not lifted at a time: reading them takes longer than
# multiplying.
FEWEST_COLUMNS = 256
# Rows for each thread that MKL adds up alike, whatever their number; one to three rows alone it adds up in another
# order.
ROWS_ALIKE = 4
# With more threads than this, rows are not padded further: a single row would cost as much as hundreds.
THREADS_ALIKE = 8

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Open claims on each dtype, and reasons to let torch compute all the same. Sets, because a claim may be closed by the
# garbage collector in the middle of anything: adding and discarding need no lock.
_claims: dict[torch.dtype, set[object]] = {torch.bfloat16: set(), torch.float16: set()}
_suspended: set[object] = set()
_NONE: frozenset[object] = frozenset()
_registration = threading.Lock()
_library: torch.library.Library | None = None
# torch's own, by name; looked up before they are replaced.
_own: dict[str, Any] = {}


class Float32Products:
    """A claim on products in float32; when the last one is closed torch computes with its own kernels again.

    Args:
        dtypes: of the matrices. For those that the processor multiplies natively nothing is done.
        owner: with this object the claim ends at the latest.

    Attributes:
        dtypes: that are multiplied in float32 for this claim; empty when it is closed.

    Raises:
        ConfigConflictError: the setting in the environment is unknown; see `qlora_rl.cpu_features`.
    """

    def __init__(self, *dtypes: torch.dtype, owner: object = None) -> None:
        here = processor()
        self.dtypes = tuple(dtype for dtype in set(dtypes) if here.multiplies_in(dtype) != dtype)
        if self.dtypes:
            _replace()
        for dtype in self.dtypes:
            _claims[dtype].add(self)
        if self.dtypes and owner is not None:
            weakref.finalize(owner, self.close)

    def close(self) -> None:
        """Give the claim up; harmless when repeated."""
        dtypes, self.dtypes = self.dtypes, ()
        for dtype in dtypes:
            _claims[dtype].discard(self)

    def __enter__(self) -> Float32Products:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def lifted_rows(x_MK: torch.Tensor) -> torch.Tensor:
    """The rows of a left factor in float32, and so many zeros below them that the result of each row does not depend on
    how many there are."""
    step = ROWS_ALIKE * min(torch.get_num_threads(), THREADS_ALIKE)
    lifted = x_MK.new_empty(-(-len(x_MK) // step) * step, x_MK.shape[1], dtype=torch.float32)
    lifted[: len(x_MK)] = x_MK
    lifted[len(x_MK) :] = 0
    return lifted


def are_replaced() -> bool:
    """Some dtype is multiplied in float32 at the moment."""
    return not _suspended and any(_claims.values())


@contextlib.contextmanager
def torchs_own() -> Iterator[None]:
    """torch's own kernels whatever is claimed, for measuring what others do; for all threads of the process."""
    reason = object()
    _suspended.add(reason)
    try:
        yield
    finally:
        _suspended.discard(reason)


def _replace() -> None:
    global _library
    with _registration:
        if _library is not None:
            return
        for name in _REPLACEMENTS:
            _own[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the first kernel that is replaced
            for name, (fits, replacement) in _REPLACEMENTS.items():
                library.impl(name, _chosen(_own[name].call_boxed, fits, replacement), "CPU", with_keyset=True)
        _library = library


def _chosen(own: Callable[..., Any], fits: Callable[..., bool], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator: ours for what fits and has one dtype that is claimed; torch's own, and its errors,
    elsewhere."""

    def kernel(keys: Any, *given: Any, **named: Any) -> Any:
        is_claimed = _claims.get(given[0].dtype, _NONE) and not _suspended
        if is_claimed and fits(*given, **named):
            return replacement(*given, **named)
        return own(keys, *given, **named)

    return kernel


def _call(name: str, *arguments: Any, **named: Any) -> Any:
    return _own[name].call_boxed(_CPU, *arguments, **named)


def _product(
    a_MK: torch.Tensor, b_KN: torch.Tensor, added_MN: torch.Tensor | None, beta: float, alpha: float
) -> torch.Tensor:
    """The product, plus something, rounded; no sum is split."""
    (rows, inner), columns = a_MK.shape, b_KN.shape[1]
    height = max(FEWEST_ROWS, LEFT_SLICE // max(1, inner))
    width = max(1, columns if b_KN.numel() <= 2 * SLICE else SLICE // inner)
    if b_KN.stride(0) > b_KN.stride(1):
        width = max(width, FEWEST_COLUMNS)
    out_MN = a_MK.new_empty(rows, columns)
    for top in range(0, rows, height):
        lines = slice(top, top + height)
        lifted = lifted_rows(a_MK[lines])
        for left in range(0, columns, width):
            part = (lines, slice(left, left + width))
            product = _call("mm", lifted, b_KN[:, part[1]].float())[: rows - top][:height]
            out_MN[part] = _plus(product, None if added_MN is None else added_MN[part], beta, alpha)
    return out_MN


def _products(
    a_BMK: torch.Tensor, b_BKN: torch.Tensor, added_BMN: torch.Tensor | None, beta: float, alpha: float
) -> torch.Tensor:
    """As `_product`, for each matrix of a batch."""
    (batch, rows, inner), columns = a_BMK.shape, b_BKN.shape[2]
    count = max(1, LEFT_SLICE // max(1, rows * inner, inner * columns, rows * columns))
    out_BMN = a_BMK.new_empty(batch, rows, columns)
    for first in range(0, batch, count):
        part = slice(first, first + count)
        product = _call("bmm", a_BMK[part].float(), b_BKN[part].float())
        out_BMN[part] = _plus(product, None if added_BMN is None else added_BMN[part], beta, alpha)
    return out_BMN


def _plus(product: torch.Tensor, added: torch.Tensor | None, beta: float, alpha: float) -> torch.Tensor:
    if alpha != 1:
        product *= alpha
    return product if added is None else product.add_(added, alpha=beta)


def _shape(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    return (*a.shape[:-1], *b.shape[a.dim() - 1 :])


def _sum(
    c: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """beta * c + alpha * a @ b, in the dtype of a; a [M, K] with b [K, N] or [K], or a [B, M, K] with b [B, K, N]."""
    c = None if c is None or beta == 0 else c.expand(_shape(a, b))
    if a.dim() == 3:
        return _products(a, b, c, beta, alpha)
    if b.dim() == 2:
        return _product(a, b, c, beta, alpha)
    return _product(a, b[:, None], None if c is None else c[:, None], beta, alpha)[:, 0]


def _write(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def _forms(name: str, dims: tuple[int, int], *, adds: bool) -> dict[str, Any]:
    """The forms of an operator: that makes its result, that is given the place for it, and, where it adds, that changes
    what is added to."""

    summed = dims[0] - 2  # the dimension of the right factor, after those of the batch

    def fits(*given: torch.Tensor, out: torch.Tensor | None = None, beta: float = 1, alpha: float = 1) -> bool:
        a, b = given[-2:]
        if any(x.dtype is not a.dtype for x in (*given, a if out is None else out)) or (a.dim(), b.dim()) != dims:
            return False
        if a.shape[-1] != b.shape[summed] or a.shape[:summed] != b.shape[:summed]:
            return False
        if type(beta) not in (int, float) or type(alpha) not in (int, float):
            return False
        return not adds or _can_expand(given[0], _shape(a, b))

    def fits_in_place(*given: torch.Tensor, **scales: float) -> bool:
        return fits(*given, **scales) and given[0].shape == _shape(*given[1:])

    def made(*given: torch.Tensor, **scales: float) -> torch.Tensor:
        return _sum(*given, **scales) if adds else _sum(None, *given)

    def written(*given: torch.Tensor, out: torch.Tensor, **scales: float) -> torch.Tensor:
        return _write(out, made(*given, **scales))

    def in_place(*given: torch.Tensor, **scales: float) -> torch.Tensor:
        return given[0].copy_(made(*given, **scales))

    forms = {name: (fits, made), f"{name}.out": (fits, written)}
    return forms | {f"{name}_": (fits_in_place, in_place)} if adds else forms


def _can_expand(x: torch.Tensor, shape: tuple[int, ...]) -> bool:
    sizes = zip(reversed(x.shape), reversed(shape), strict=False)
    return x.dim() <= len(shape) and all(size in (1, wanted) for size, wanted in sizes)


def _attention_backward(*given: Any, attn_mask: torch.Tensor | None = None, scale: float | None = None) -> Any:
    """Gradients of query, key and value; torch's own kernel in float32."""
    dtype = given[0].dtype
    lifted = [value.float() if isinstance(value, torch.Tensor) else value for value in given]
    if attn_mask is not None and attn_mask.dtype == dtype:
        attn_mask = attn_mask.float()
    found = _call(_ATTENTION_BACKWARD, *lifted, attn_mask=attn_mask, scale=scale)
    return tuple(gradient.to(dtype) for gradient in found)


def _attends(*given: Any, **named: Any) -> bool:
    gradient, query, key, value, out = given[:5]
    return len({x.dtype for x in (gradient, query, key, value, out)}) == 1


_ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
# By operator: whether what it is given is ours to compute, and how.
_REPLACEMENTS: dict[str, tuple[Callable[..., bool], Callable[..., Any]]] = {
    **_forms("mm", (2, 2), adds=False),
    **_forms("addmm", (2, 2), adds=True),
    **_forms("addmv", (2, 1), adds=True),
    **_forms("bmm", (3, 3), adds=False),
    **_forms("baddbmm", (3, 3), adds=True),
    _ATTENTION_BACKWARD: (_attends, _attention_backward),
}
