"""What the 4-bit linears of an engine on a GPU multiply with, for each of their shapes and numbers of tokens: what was
fastest.

Measured when an engine with `base_compute="auto"` starts, before vLLM compiles or captures anything, and kept in a
table for this GPU and these versions, so that the next start measures nothing. Without "auto" vLLM's own way stays.

Written on machines without a GPU. The tests run all of it but the kernels and the clock.
"""

from __future__ import annotations

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
from qlora_rl.base.decode import decode_plainly
from qlora_rl.engine.linears.base_compute import BaseCompute
from qlora_rl.engine.linears.fused_weight import Joined
from qlora_rl.engine.linears.kernel_choice import (
    PARTS,
    TOKENS,
    TRITON,
    RuledLinear,
    choose_rules,
    multiply_by,
    ways_for,
)
from qlora_rl.engine.linears.kernels import bitsandbytes_linears

# Seconds of one call, of calls that are made one after another.
Stopwatch = Callable[[Sequence[Callable[[], Any]]], float]
# Weights that take turns, so that none is in the cache when its turn comes.
TURNS = 8
# Rows of the identity that a weight is read out with at a time.
ROWS = 1024


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
) -> tuple[BaseCompute, list[RuledLinear]]:
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
        return BaseCompute(adapter="vllm", reason="there is no 4-bit layer whose parts are one weight", left=left), []
    rules: dict[str, str] = {}
    changed: list[RuledLinear] = []
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
                linear = RuledLinear(joined, rules[key])
                layer.quant_method.apply = linear
                changed.append(linear)
    table.save()
    reason = f"measured on {table.gpu}" if changed else f"nothing is faster than vLLM's own way on {table.gpu}"
    base = "measured" if changed else "vllm"
    ways = {key: said or PARTS for key, said in rules.items()}
    return BaseCompute(base, "vllm", reason, left=left, ways=ways), changed


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
