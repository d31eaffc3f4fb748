"""What the 4-bit linears of an engine on a GPU multiply with, for each of their shapes and numbers of tokens: what was
fastest.

Measured when an engine with `base_compute="auto"` starts, before vLLM compiles or captures anything, and kept in a
table for this GPU and these versions, so that the next start measures nothing. Without "auto" vLLM's own way stays.

A rule is measured, never assumed: for a number of tokens that was not measured the way is vLLM's own, one product of
bitsandbytes' for each part. The rules of a linear are one line of text, because they are passed through an operator of
torch's: inside a compiled graph only the operator knows how many tokens there are.

Written on machines without a GPU. The tests run all of it but the kernels and the clock.

Letters: T tokens, O and I out- and in-features.
"""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.checkpoint import cache_root
from qlora_rl.base.decode import decode_plainly, decoded_weight, fused_product
from qlora_rl.engine.linears.base_compute import BaseCompute, bitsandbytes_linears
from qlora_rl.engine.linears.fused_weight import Joined
from qlora_rl.errors import ConfigConflictError

PARTS = "parts"
JOINED = "joined"
DECODED = "decoded"
TRITON = "triton "
# Tokens that are measured: a step with fewer goes by the next of them.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# A way that is no vLLM's own must be so much faster.
MARGIN = 0.03
# Seconds of one call, of calls that are made one after another.
Stopwatch = Callable[[Sequence[Callable[[], Any]]], float]
# Weights that take turns, so that none is in the cache when its turn comes.
TURNS = 8
# Rows of the identity that a weight is read out with at a time.
ROWS = 1024


def ways_for(tokens: int, *, with_triton: bool) -> list[str]:
    """What there is to be measured with so many tokens.

    "parts": bitsandbytes' product for each part, as vLLM's plugin makes it; "joined": one of them for all parts;
    "decoded": the whole weight decoded, then a 16-bit product; "triton …": our kernel, with the sizes of its tiles.
    """
    ways = [PARTS, JOINED, DECODED]
    if with_triton:
        from qlora_rl.engine.linears.triton_nf4 import tiles_for

        ways += [f"{TRITON}{tile}" for tile in tiles_for(tokens)]
    return ways


def multiply_by(
    way: str,
    x_TI: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    values: torch.Tensor,
    sizes: Sequence[int],
    blocksize: int,
    quant_type: str,
) -> torch.Tensor:
    """x [T, I] times the weight [O, I]; arguments as the attributes of `Joined`.

    Raises:
        ConfigConflictError: there is no such way.
    """
    inputs, outputs = x_TI.shape[1], sum(sizes)
    if way == JOINED or (way == PARTS and len(sizes) == 1):
        return fused_product(x_TI, codes, absmax, (outputs, inputs), blocksize, quant_type)
    if way == PARTS:
        out = torch.empty((len(x_TI), outputs), dtype=x_TI.dtype, device=x_TI.device)
        row = 0
        for size in sizes:
            low, high = row * inputs, (row + size) * inputs
            part = codes[low // 2 : high // 2], absmax[low // blocksize : high // blocksize]
            out[:, row : row + size] = fused_product(x_TI, *part, (size, inputs), blocksize, quant_type)
            row += size
        return out
    if way == DECODED:
        weight = decoded_weight(codes, absmax, (outputs, inputs), blocksize, quant_type, x_TI.dtype)
        return torch.nn.functional.linear(x_TI, weight)
    if way.startswith(TRITON):
        from qlora_rl.engine.linears import triton_nf4

        tile = triton_nf4.Tile.read(way.removeprefix(TRITON))
        return triton_nf4.multiply(x_TI, codes, absmax, values, outputs, blocksize, tile=tile)
    raise ConfigConflictError(f"multiplying: there is no way {way!r}. Use one of {ways_for(1, with_triton=False)}.")


def choose_rules(seconds: Mapping[int, Mapping[str, float]]) -> str:
    """Rules out of what was measured: "8=joined,64=parts" is joined up to 8 tokens, then parts.

    Args:
        seconds: of one product, by tokens and way; `PARTS` is among the ways.
    """
    rules: list[tuple[int, str]] = []
    for tokens in sorted(seconds):
        times = seconds[tokens]
        fastest = min(times, key=lambda way: times[way])
        way = fastest if times[fastest] < (1 - MARGIN) * times[PARTS] else PARTS
        if rules and rules[-1][1] == way:
            rules[-1] = (tokens, way)
        else:
            rules.append((tokens, way))
    while rules and rules[-1][1] == PARTS:
        rules.pop()
    return ",".join(f"{tokens}={way}" for tokens, way in rules)


@functools.lru_cache(maxsize=1024)
def way_for(rules: str, tokens: int) -> str:
    """What the rules say for so many tokens; `PARTS` where they say nothing."""
    for rule in filter(None, rules.split(",")):
        most, _, way = rule.partition("=")
        if tokens <= int(most):
            return way
    return PARTS


@torch.library.custom_op("qlora_rl::product_4bit", mutates_args=())
def product_4bit(
    x_TI: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    values: torch.Tensor,
    sizes: list[int],
    blocksize: int,
    quant_type: str,
    rules: str,
) -> torch.Tensor:
    """`multiply_by` the way that the rules say for this number of tokens; one opaque operator for torch's compiler."""
    return multiply_by(
        way_for(rules, x_TI.shape[0]), x_TI.contiguous(), codes, absmax, values, sizes, blocksize, quant_type
    )


@product_4bit.register_fake
def _(
    x_TI: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    values: torch.Tensor,
    sizes: list[int],
    blocksize: int,
    quant_type: str,
    rules: str,
) -> torch.Tensor:
    return x_TI.new_empty((x_TI.shape[0], sum(sizes)))


class RuledLinear:
    """Takes the place of `apply` of one linear's quantisation method.

    Args:
        joined: its weight.
        rules: see `choose_rules`.
    """

    def __init__(self, joined: Joined, rules: str) -> None:
        self._joined, self._rules = joined, rules
        self._sizes, self._outputs = list(joined.sizes), joined.shape[0]

    def __call__(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., I] times the weight, plus the bias; multiplied in bf16, as vLLM's layer does."""
        joined = self._joined
        if (
            not torch.compiler.is_compiling()
        ):  # a captured graph holds the tensors that it was captured with, like vLLM's own
            joined.renew()
        flat = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        out = product_4bit(
            flat,
            joined.codes,
            joined.absmax,
            joined.values,
            self._sizes,
            joined.blocksize,
            joined.quant_type,
            self._rules,
        )
        out = out.to(x.dtype).view(*x.shape[:-1], self._outputs)
        return out if bias is None else out + bias


@dataclass
class Table:
    """Seconds of one product on one GPU.

    Attributes:
        gpu: its name.
        versions: of torch, triton and bitsandbytes.
        seconds: by `key_of` a weight, tokens (as text, because JSON has no other keys) and way.
        file: where it is kept.
    """

    gpu: str
    versions: dict[str, str]
    seconds: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    file: Path | None = None

    @classmethod
    def open(cls, gpu: str, versions: dict[str, str], file: Path | None) -> Table:
        """What is kept there; an empty table where nothing is, or where it is of another GPU or other versions."""
        if file is not None and file.is_file():
            held = json.loads(file.read_text())
            if held["gpu"] == gpu and held["versions"] == versions:
                return cls(gpu, versions, held["seconds"], file)
        return cls(gpu, versions, {}, file)

    def save(self) -> None:
        """Write it to its file, whole or not at all."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        beside = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        beside.write_text(json.dumps({**asdict(self), "file": None}, indent=1) + "\n")
        beside.replace(self.file)

    def rules(self, key: str, most: int) -> str:
        """The rules for a weight, up to the first measured number of tokens that `most` fits in."""
        times = {int(tokens): ways for tokens, ways in self.seconds.get(key, {}).items()}
        return choose_rules({tokens: times[tokens] for tokens in tokens_up_to(most) if tokens in times})


def tokens_up_to(most: int) -> tuple[int, ...]:
    """The numbers of tokens to be measured for an engine that samples `most` sequences at once."""
    return tuple(tokens for i, tokens in enumerate(TOKENS) if i == 0 or TOKENS[i - 1] < most)


def key_of(joined: Joined) -> str:
    """Weights with the same key take the same time: "6144x4096 nf4/64 4096+1024+1024"."""
    sizes = "+".join(map(str, joined.sizes))
    return f"{joined.shape[0]}x{joined.shape[1]} {joined.quant_type}/{joined.blocksize} {sizes}"


def table_of_this_gpu() -> Table:
    """The table in the cache of qlora_rl."""
    import importlib.metadata

    gpu = torch.cuda.get_device_name()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "bitsandbytes")}
    if has_triton():
        versions["triton"] = importlib.metadata.version("triton")
    name = re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-").lower()
    return Table.open(gpu, versions, cache_root() / "products" / f"{name}.json")


def has_triton() -> bool:
    """Triton can be imported."""
    import importlib.util

    return importlib.util.find_spec("triton") is not None


def gpu_seconds(calls: Sequence[Callable[[], Any]], rounds: int = 15) -> float:
    """A `Stopwatch`: all calls in one CUDA graph, as vLLM decodes; the median of the rounds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(found[rounds // 3 :])


def measure(weights: Sequence[Joined], tokens: int, stopwatch: Stopwatch, *, with_triton: bool) -> dict[str, float]:
    """Seconds of one product with `tokens` tokens, by way; the weights, of one shape, take turns.

    A tile that the GPU has no room for is left out.
    """
    found: dict[str, float] = {}
    device = weights[0].codes.device
    own = torch.Generator(device).manual_seed(0)  # vLLM's samples must not depend on what was measured
    x = torch.randn(tokens, weights[0].shape[1], generator=own, device=device).to(torch.bfloat16)

    def call(way: str, w: Joined) -> Callable[[], torch.Tensor]:
        return lambda: multiply_by(way, x, w.codes, w.absmax, w.values, w.sizes, w.blocksize, w.quant_type)

    with torch.inference_mode():
        for way in ways_for(tokens, with_triton=with_triton):
            calls = [call(way, weight) for weight in weights]
            if not way.startswith(TRITON):
                found[way] = stopwatch(calls)
                continue
            from triton.runtime.errors import TritonError

            try:
                found[way] = stopwatch(calls)
            except TritonError:
                continue
    return found


def install_on_gpu(
    model: torch.nn.Module,
    most: int,
    *,
    table: Table,
    stopwatch: Stopwatch = gpu_seconds,
    with_triton: bool | None = None,
    device: str = "cuda",
) -> BaseCompute:
    """Measure what is not in the table yet, and give every 4-bit linear the rules that come of it.

    Args:
        model: vLLM's.
        most: sequences that are sampled at once.
        table: of this GPU; what is measured goes into it.
        stopwatch: for tests.
        with_triton: by default where Triton can be imported.
        device: for tests.
    """
    with_triton = has_triton() if with_triton is None else with_triton
    left: dict[str, str] = {}
    groups: dict[str, list[tuple[str, torch.nn.Module, Joined]]] = {}
    for name, layer in bitsandbytes_linears(model, device).items():
        try:
            joined = Joined(layer.weight)
        except ValueError as why:
            left[name] = str(why)
            continue
        groups.setdefault(key_of(joined), []).append((name, layer, joined))
    if not groups:
        return BaseCompute(reason="there is no 4-bit layer whose parts are one weight", left=left)
    rules: dict[str, str] = {}
    is_changed = False
    for key, members in groups.items():
        times = table.seconds.setdefault(key, {})
        for tokens in tokens_up_to(most):
            if str(tokens) not in times:
                few = [joined for _, _, joined in members[:TURNS]]
                times[str(tokens)] = measure(few, tokens, stopwatch, with_triton=with_triton)
        rules[key] = table.rules(key, most)
        for name, layer, joined in members:
            wrong = read_out(joined, rules[key])
            if wrong:
                left[name] = wrong
            elif rules[key]:
                layer.quant_method.apply = RuledLinear(joined, rules[key])
                is_changed = True
    table.save()
    reason = f"measured on {table.gpu}" if is_changed else f"nothing is faster than vLLM's own way on {table.gpu}"
    base = "measured" if is_changed else "vllm"
    ways = {key: said or PARTS for key, said in rules.items()}
    return BaseCompute(base, "vllm", reason, left, ways)


def read_out(joined: Joined, rules: str) -> str:
    """Empty, or why a weight must not be multiplied by these rules: a kernel of ours decodes it otherwise than
    bitsandbytes.

    Multiplied with the identity, a product is the weight itself.
    """
    kernels = {way for rule in filter(None, rules.split(",")) if (way := rule.partition("=")[2]).startswith(TRITON)}
    if not kernels:
        return ""
    plain = torch.cat([decode_plainly(*joined.part(i)) for i in range(len(joined.sizes))])
    columns = joined.shape[1]
    for way in sorted(kernels):
        for first in range(0, columns, ROWS):
            eye = torch.zeros(min(ROWS, columns - first), columns, dtype=torch.bfloat16, device=plain.device)
            eye[:, first:].fill_diagonal_(1)
            out = multiply_by(
                way, eye, joined.codes, joined.absmax, joined.values, joined.sizes, joined.blocksize, joined.quant_type
            )
            if not torch.equal(out.t(), plain[:, first : first + len(eye)]):
                return f"{way} does not decode it as bitsandbytes does"
    return ""


def summary(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """For the terminal: microseconds of each way, by tokens; of Triton's tiles the fastest."""
    lines = []
    for tokens, times in seconds.items():
        tiles = {way: value for way, value in times.items() if way.startswith(TRITON)}
        shown = {way: value for way, value in times.items() if way not in tiles}
        if tiles:
            best = min(tiles, key=lambda way: tiles[way])
            shown[best] = tiles[best]
        own = times[PARTS]
        cells = ", ".join(f"{way} {1e6 * value:.1f} us ({own / value:.2f}x)" for way, value in shown.items())
        lines.append(f"{int(tokens):5d} | {cells}")
    return "\n".join(lines)
