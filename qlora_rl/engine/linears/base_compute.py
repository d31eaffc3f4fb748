"""With what the engine multiplies: the 4-bit codes, decoded copies next to them, or whatever vLLM has.

`install` runs inside vLLM's worker. What it decides is a function of values, `choose`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from qlora_rl.cpu_features import processor
from qlora_rl.engine.linears import kernels
from qlora_rl.engine.linears.cpu_kernel import CodesKernel, codes_kernel
from qlora_rl.engine.linears.decoded import LIFTED_SLICE, SLICE, DecodedLinear
from qlora_rl.errors import ConfigConflictError
from qlora_rl.memory.host import memory_gib

MODES = ("nf4", "baked", "auto", "vllm")
# Of all memory, what must stay free for baked copies to be chosen.
HEADROOM = 0.2
# Rows that `auto` measures with at most: what is sampled at once is seldom more for long.
MEASURED_ROWS = 64
GIB = 2**30


@dataclass(frozen=True)
class BaseCompute:
    """What was installed.

    Attributes:
        base: "nf4", "baked" or "vllm"; on a GPU "measured" or "vllm".
        adapter: "direct", or "vllm".
        reason: why, where that was not asked for.
        baked_bytes: held next to the codes.
        left: why a layer, or the adapter, stays with vLLM's own way.
        seconds: what one pass over all 4-bit linears was measured to take, where it was, by way.
        ways: on a GPU, the rules of each shape of a linear; see `ways.choose_rules`.
        kernel: on a CPU, instructions of `native`'s kernel, which multiplies the codes, or why there is none.
        packs_plain: on a CPU, vLLM keeps unquantised linears in a form of its own; see `kernels.packs_away`.
    """

    base: str = "vllm"
    adapter: str = "vllm"
    reason: str = ""
    baked_bytes: int = 0
    left: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    ways: Mapping[str, str] = field(default_factory=dict)
    kernel: str = ""
    packs_plain: bool = False

    def __str__(self) -> str:
        left = "".join(f"; {what} is left to vLLM: {why}" for what, why in self.left.items())
        copies = f", {self.baked_bytes / GIB:.2f} GiB of copies" if self.baked_bytes else ""
        ways = "".join(f"; {shape}: {rules}" for shape, rules in self.ways.items())
        kernel = f"; kernel for codes: {self.kernel}" if self.kernel else ""
        return (
            f"linears multiply with: {self.base}{copies} ({self.reason}){kernel}{ways}; adapters: {self.adapter}{left}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values that are also sent between processes."""
        return asdict(self)


def check_wish(wish: str) -> None:
    """Reject what is none of `MODES`.

    Raises:
        ConfigConflictError: names them.
    """
    if wish not in MODES:
        raise ConfigConflictError(f"starting vLLM: base_compute={wish!r} is not one of {MODES}. Use 'nf4'.")


def install(
    runner: Any, wish: str, *, rows: int, planned_gib: float | None = None, limit_gib: float | None = None
) -> tuple[BaseCompute, list[DecodedLinear]]:
    """Change the linears of a model runner, and on a CPU its sampler; what was done, and the layers whose copies must
    follow repaired scales.

    Args:
        runner: vLLM's.
        wish: one of `MODES`.
        rows: sequences that are sampled at once.
        planned_gib: what the whole run will hold at its peak, without copies; by default what this process holds now.
        limit_gib: what it may hold; by default what others leave of the machine's memory.
    """
    if wish == "vllm":
        return BaseCompute(reason="asked for"), []
    if runner.device.type == "cpu":
        kernels.count_ranks_directly()
    left: dict[str, str] = {}
    why = kernels.multiply_adapters_directly(runner)
    if why:
        left["(adapter)"] = why
    adapter = "vllm" if why else "direct"
    if not runner.vllm_config.model_config.enforce_eager:
        return BaseCompute(
            adapter=adapter, reason="enforce_eager is off: the graph holds vLLM's own way", left=left
        ), []
    kernel = codes_kernel()
    linears, layers = _decoded(runner.get_model(), left, None if isinstance(kernel, str) else kernel)
    if not linears:
        return BaseCompute(adapter=adapter, reason="no 4-bit layer on the CPU can be decoded here", left=left), []
    base, reason, seconds = wish, "asked for", {}
    if wish == "auto":
        seconds = _measure(linears, layers, min(rows, MEASURED_ROWS))
        held, limit = _held_and_limit(planned_gib, limit_gib)
        base, reason = choose(
            seconds,
            baked_gib=sum(linear.baked_bytes for linear in linears) / GIB,
            planned_gib=held,
            limit_gib=limit,
        )
    nbytes = 0
    if base != "vllm":
        for linear, layer in zip(linears, layers, strict=True):
            if base == "baked":
                nbytes += linear.bake(kernels.pack)
            layer.quant_method.apply = linear
        if not isinstance(kernel, str):
            kernels.norm_directly(runner.get_model(), kernel)
    said = kernel if isinstance(kernel, str) else _shown(kernel, linears)
    return BaseCompute(base, adapter, reason, nbytes, left, seconds, kernel=said), linears


def choose(seconds: Mapping[str, float], *, baked_gib: float, planned_gib: float, limit_gib: float) -> tuple[str, str]:
    """The fastest way that the memory allows, and the reason in words.

    Args:
        seconds: of one pass, by "vllm", "nf4" and "baked".
        baked_gib: what the copies take.
        planned_gib: what is held without them.
        limit_gib: what may be held.
    """
    shown = ", ".join(f"{way} {1e3 * value:.1f} ms" for way, value in seconds.items())
    order = sorted(seconds, key=lambda way: seconds[way])
    if order[0] != "baked":
        return order[0], f"it is the fastest here ({shown})"
    rest_gib = limit_gib - planned_gib - baked_gib
    room = (
        f"{baked_gib:.2f} GiB of copies next to {planned_gib:.2f} GiB leave {max(rest_gib / limit_gib, 0):.0%} of "
        f"{limit_gib:.2f} GiB free"
    )
    if rest_gib >= HEADROOM * limit_gib:
        return "baked", f"it is the fastest here ({shown}), and {room}"
    return order[1], f"baked would be faster ({shown}), but {room}, less than {HEADROOM:.0%}"


def _decoded(
    model: torch.nn.Module, left: dict[str, str], kernel: CodesKernel | None
) -> tuple[list[DecodedLinear], list[torch.nn.Module]]:
    buffer: torch.Tensor | None = None
    lifted: torch.Tensor | None = None
    linears: list[DecodedLinear] = []
    layers: list[torch.nn.Module] = []
    for name, layer in kernels.bitsandbytes_linears(model).items():
        if buffer is None:
            is_native = processor().multiplies_in(torch.bfloat16) is torch.bfloat16
            buffer = torch.empty(SLICE if is_native else LIFTED_SLICE, dtype=torch.bfloat16)
            lifted = None if is_native else torch.empty(LIFTED_SLICE, dtype=torch.float32)
        try:
            linears.append(DecodedLinear(layer.weight, buffer, lifted, kernel))
        except ValueError as why:
            left[name] = str(why)
            continue
        layers.append(layer)
    return linears, layers


def _shown(kernel: CodesKernel, linears: Sequence[DecodedLinear]) -> str:
    without = sum(not linear.has_kernel for linear in linears)
    return f"{kernel.instructions}, not for {without} of {len(linears)} layers" if without else kernel.instructions


def _measure(linears: list[DecodedLinear], layers: list[torch.nn.Module], rows: int) -> dict[str, float]:
    """Seconds of one pass over all linears with `rows` tokens, by way; one layer of each shape is timed."""
    times = {"vllm": 0.0, "nf4": 0.0, "baked": 0.0}
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, linear in enumerate(linears):
        groups.setdefault((*linear.shape, linear.parts), []).append(i)
    with torch.inference_mode():
        for (_, columns, _), members in groups.items():
            x = torch.randn(rows, columns).to(torch.bfloat16)
            # Several layers in turn, so that no weight is in the cache when its turn comes.
            few = [(linears[i], layers[i]) for i in members[:8]]
            times["vllm"] += len(members) * _seconds([layer.quant_method.apply for _, layer in few], few, x)
            times["nf4"] += len(members) * _seconds([linear for linear, _ in few], few, x)
            for linear, _ in few:
                linear.bake(kernels.pack)
            times["baked"] += len(members) * _seconds([linear for linear, _ in few], few, x)
            for linear, _ in few:
                linear.unbake()
    return times


def _seconds(
    products: Sequence[Callable[..., torch.Tensor]],
    few: Sequence[tuple[DecodedLinear, torch.nn.Module]],
    x: torch.Tensor,
    rounds: int = 5,
) -> float:
    """Median of one product."""
    found = []
    for _ in range(rounds):
        for product, (_, layer) in zip(products, few, strict=True):
            started = time.perf_counter()
            product(layer, x)
            found.append(time.perf_counter() - started)
    return statistics.median(found[len(few) :])  # the first round warms up


def _held_and_limit(planned_gib: float | None, limit_gib: float | None) -> tuple[float, float]:
    """GiB that will be held without copies, and that may be; without a limit the machine's, and what others hold on
    it."""
    total, available = memory_gib()
    own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    held = own if planned_gib is None else max(planned_gib, own)
    return (max(total - available - own, 0.0) + held, total) if limit_gib is None else (held, limit_gib)
