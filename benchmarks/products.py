"""Products with 4-bit weights on a GPU, for the linears of known models: all implementations, and a 16-bit product.

Letters: T tokens, O and I out- and in-features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qlora_rl.base.decode import decode_plainly
from qlora_rl.base.quant import require_bitsandbytes
from qlora_rl.engine.linears.fused_weight import Joined
from qlora_rl.engine.linears.gpu_compute import (
    PARTS,
    TOKENS,
    Stopwatch,
    gpu_seconds,
    has_triton,
    key_of,
    measure,
    multiply_by,
)
from qlora_rl.errors import EngineUnsupportedError

# Together larger than the cache of any card (an H200 has 50 MiB), so that no weight is found there when its turn comes.
ROTATED_BYTES = 240 * 10**6
MOST_COPIES = 24
SIXTEEN = "bf16"


@dataclass(frozen=True)
class Linear:
    """One linear of a model: what it is called, its parts' out-features, its in-features."""

    name: str
    sizes: tuple[int, ...]
    inputs: int


def linears_of(hidden: int, queries: int, keys: int, width: int) -> tuple[Linear, ...]:
    """The four of a layer, as vLLM fuses them."""
    return (
        Linear("qkv", (queries, keys, keys), hidden),
        Linear("o", (hidden,), queries),
        Linear("gate_up", (width, width), hidden),
        Linear("down", (hidden,), width),
    )


MODELS = {
    "qwen2.5-0.5b": linears_of(896, 896, 128, 4864),
    "qwen3-0.6b": linears_of(1024, 2048, 1024, 3072),
    "qwen2.5-1.5b": linears_of(1536, 1536, 256, 8960),
    "qwen3-4b": linears_of(2560, 4096, 1024, 9728),
    "qwen2.5-7b": linears_of(3584, 3584, 512, 18944),
    "llama-3.1-8b": linears_of(4096, 4096, 1024, 14336),
}


def require_gpu() -> None:
    """Check that this machine can measure it.

    Raises:
        EngineUnsupportedError: there is no NVIDIA GPU, or torch is not built for one.
    """
    if not torch.cuda.is_available():
        raise EngineUnsupportedError(
            f"measuring products with 4-bit weights: torch {torch.__version__} sees no NVIDIA GPU, which these kernels "
            "need. Run it on a machine with one; on the CPU use `python benchmarks/bench.py rollout`."
        )


def make_weight(linear: Linear, device: str, *, quant_type: str = "nf4", blocksize: int = 64, seed: int = 0) -> Joined:
    """A random weight as vLLM's plugin holds it."""
    functional = require_bitsandbytes().functional
    generator = torch.Generator(device).manual_seed(seed)
    made = []
    for size in linear.sizes:
        weight = torch.randn(size, linear.inputs, generator=generator, device=device) * linear.inputs**-0.5
        made.append(functional.quantize_4bit(weight.to(torch.bfloat16), blocksize=blocksize, quant_type=quant_type))
    parameter: Any = torch.nn.Parameter(torch.cat([codes for codes, _ in made]), requires_grad=False)
    parameter.bnb_quant_state = {i: state for i, (_, state) in enumerate(made)}
    ends = [0]
    for codes, _ in made:
        ends.append(ends[-1] + len(codes))
    parameter.bnb_shard_offsets = torch.tensor(ends)
    return Joined(parameter)


def bench_products(
    models: Iterable[str],
    *,
    tokens: Sequence[int] = TOKENS,
    device: str = "cuda",
    stopwatch: Stopwatch = gpu_seconds,
    with_triton: bool | None = None,
    linears: Callable[[str], Sequence[Linear]] = MODELS.__getitem__,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Seconds of one product and its error, by `key_of` a weight, tokens and way.

    The error is that of the whole result against the float32 product with the decoded weight, relative to its norm.

    Returns:
        For each key: `used_by`, and by tokens `seconds` and `errors` of each way ("bf16" is a 16-bit product), and
            `ratio`: the
        time of vLLM's own way through that of this way, so that more than 1 is faster.
    """
    with_triton = has_triton() if with_triton is None else with_triton
    found: dict[str, Any] = {}
    for model in models:
        for linear in linears(model):
            weights = [make_weight(linear, device)]
            key = key_of(weights[0])
            if key in found:
                found[key]["used_by"].append(f"{model} {linear.name}")
                continue
            nbytes = weights[0].codes.numel() + 4 * weights[0].absmax.numel()
            copies = max(2, min(MOST_COPIES, ROTATED_BYTES // nbytes + 1))
            weights += [make_weight(linear, device, seed=i) for i in range(1, copies)]
            rows = {str(t): _row(weights, t, stopwatch, with_triton=with_triton) for t in tokens}
            found[key] = {"used_by": [f"{model} {linear.name}"], "copies": copies, "tokens": rows}
            say(f"\n{model} {linear.name}: {key}\n" + "\n".join(_line(t, row) for t, row in rows.items()))
            del weights
    return found


def _row(weights: list[Joined], tokens: int, stopwatch: Stopwatch, *, with_triton: bool) -> dict[str, Any]:
    first = weights[0]
    seconds = measure(weights, tokens, stopwatch, with_triton=with_triton)
    x = torch.randn(tokens, first.shape[1], device=first.codes.device).to(torch.bfloat16)
    plain = torch.cat([decode_plainly(*first.part(i)) for i in range(len(first.sizes))])
    right = x.float() @ plain.float().t()
    errors = {}
    for way in seconds:
        out = multiply_by(
            way, x, first.codes, first.absmax, first.values, first.sizes, first.blocksize, first.quant_type
        )
        errors[way] = float((out.float() - right).norm() / right.norm())
    copies = [plain.clone() for _ in range(max(2, min(len(weights), ROTATED_BYTES // (2 * plain.numel()) + 1)))]
    seconds[SIXTEEN] = stopwatch([functools.partial(torch.nn.functional.linear, x, copy) for copy in copies])
    ratio = {way: seconds[PARTS] / value for way, value in seconds.items()}
    return {"seconds": seconds, "errors": errors, "ratio": ratio}


def _line(tokens: str, row: dict[str, Any]) -> str:
    best = sorted(row["seconds"], key=lambda way: row["seconds"][way])
    cells = [f"{way} {1e6 * row['seconds'][way]:.1f} us ({row['ratio'][way]:.2f}x)" for way in best[:6]]
    return f"{int(tokens):5d} | " + ", ".join(cells) + f"; largest error {max(row['errors'].values()):.1e}"
