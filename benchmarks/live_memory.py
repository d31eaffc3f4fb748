"""Memory of one training step, compared with the memory estimate line by line.

    python benchmarks/live_memory.py --size 0.1b --layers 2 --max-length 512 2048 8192 [--json memory.json]

A random Qwen2 as an NF4 base, LoRA of rank 16 on all linears in float32, bf16 autocast, gradient checkpointing,
sequences without padding, and the loss of GRPO without a reference. Live tensors are counted (`Live`); on a
GPU also the peak of torch's allocator. What is held before the step (base, adapter, optimizer) is counted exactly, in
tests.

B sequences, T tokens each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rounds import add_to, described
from shapes import RANK, SIZES, make_model
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from qlora_rl.base.checkpoint import PreparedBase, load_base, prepare_base
from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.errors import ConfigConflictError
from qlora_rl.memory.plan import plan_memory
from qlora_rl.memory.shape import read_config, read_shape

# Padding at the start of each sequence, in tokens in addition to T, which is taken out. Where it stays it is part of T:
# of each sequence but the first, and of a single one, or there would be no mask.
PADDING = 8
# What a tensor is, by its shape.
_MASK, _WEIGHT, _COPY, _GRADIENT, _REST = "mask", "weight", "copy", "gradient", "rest"
# Parts of a step: the layers forward and backward, and the output head between them.
_LAYERS, _HEAD = "layers", "head"


class Step:
    """A model with an adapter, and a training step of it.

    Args:
        base: of a model with `base_model.norm`.
        batch: B.
        length: T.
        device: "cpu" or "cuda".
        padded: the micro-batch keeps its padding, and has attention masks.
        tiles: MLPs and norms work in tiles.
        offload: layer inputs wait in host memory; with the CPU as the device, in memory that is not counted.
    """

    def __init__(
        self,
        base: PreparedBase,
        batch: int,
        length: int,
        device: str = "cpu",
        *,
        padded: bool = False,
        tiles: bool = True,
        offload: bool = False,
    ) -> None:
        from peft import LoraConfig, get_peft_model

        from qlora_rl.adapter.inspected import shorten_lora
        from qlora_rl.train.scoring.logprobs import use_fused_head
        from qlora_rl.train.scoring.padding import remove_padding
        from qlora_rl.train.setup.layer_inputs import keep_on_host
        from qlora_rl.train.setup.tiled_mlp import tile_layers

        torch.manual_seed(0)
        self.spec, self.batch, self.length, self.device = base.spec, batch, length, device
        Float32Products(torch.bfloat16, owner=self)  # as the trainer does; for the memory it is the same
        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        self.model = get_peft_model(load_base(base, device=device), lora)
        self.bare = self.model.get_base_model()
        self.shape = read_shape(read_config(base.path))
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.data = parameter.data.float()
                if ".lora_B." in name:
                    parameter.normal_(0, 0.01)
        shorten_lora(self.model)
        use_fused_head(self.bare)
        self.padded, self.tiles, self.offload = padded, tiles, offload
        if not padded and (why := remove_padding(self.bare)):
            raise ConfigConflictError(f"measuring a step without padding: {why}.")
        if tiles:
            tile_layers(self.bare)
        keep_on_host(self.bare, None if device == "cuda" else uncounted)
        self.model.train()
        self.model.gradient_checkpointing_enable(offload=offload)
        width = length if padded else length + PADDING
        ids = torch.randint(3, self.shape.vocabulary, (batch, width))
        mask = torch.ones(batch, width, dtype=torch.long)
        mask[min(1, batch - 1) if padded else 0 :, :PADDING] = 0
        self.ids, self.mask = ids.to(device), mask.to(device)
        self.advantages = torch.linspace(0.5, 1.5, batch, device=device)[:, None]
        self._weights = set(self.shape.linears.values())
        self._matrices = {tuple(p.shape) for p in self.trained.values()}

    def run(self, live: Live | None = None) -> float:
        """Forward, loss, backward. Gradients are made new. Returns the loss."""
        for parameter in self.trained.values():
            parameter.grad = None
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device, torch.bfloat16))
            if live is not None:
                stack.enter_context(_parts(self.bare, live))
            labels = self.ids.masked_fill(self.mask.cumsum(1) < 2, -100)  # what is scored follows a token
            found = self.bare(input_ids=self.ids, attention_mask=self.mask, labels=labels, fused_lm_head=True)
            ratio = torch.exp(found.log_probs - found.log_probs.detach())
            loss = -(ratio * self.advantages).sum() / self.mask.sum()
        loss.backward()
        return loss.item()

    def seconds(self) -> float:
        """Of one step."""
        self._wait()
        started = time.perf_counter()
        self.run()
        self._wait()
        return time.perf_counter() - started

    def measure(self) -> dict[str, int]:
        """Bytes of one step by the names of the estimate's lines; "peak" of all of them at once."""
        for parameter in self.trained.values():
            parameter.grad = None
        before = 0
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with Live(lambda tensor: self._kind(tensor, live.phase)) as live:
            self.run(live)
        kept, layers, head = live.peaks["kept"], live.peaks[_LAYERS], live.peaks[_HEAD]
        found = {
            "gradients": sum(p.grad.untyped_storage().nbytes() for p in self.trained.values() if p.grad is not None),
            "adapter, autocast": kept[_COPY],
            "activations": kept[_REST],
            "attention masks": kept[_MASK],
            "one layer's work": layers[_REST] - kept[_REST],
            "attention mask of a layer": layers[_MASK] - kept[_MASK],
            "one dequantised weight": live.most[_WEIGHT],
            "logits": head.total() - head[_COPY] - (kept.total() - kept[_COPY]),
            "peak": live.peak,
        }
        if self.device == "cuda":
            self._wait()
            found["peak of the allocator"] = torch.cuda.max_memory_allocated() - before
        return found

    def planned(self, **request: Any) -> dict[str, int]:
        """The estimate of the same; `request` are further fields of `MemoryRequest`."""
        estimate = plan_memory(
            self.bare.config,
            adapter={name: tuple(p.shape) for name, p in self.trained.items()},
            spec=self.spec,
            batch_size=self.batch,
            max_length=self.length,
            device=self.device,
            has_engine=False,
            tiles=self.tiles,
            offload=self.offload,
            padded=self.padded,
            **request,
        )
        return {line.name: line.nbytes for line in estimate.lines if line.when != "always"} | {
            "peak": estimate.step_bytes
        }

    def _kind(self, tensor: torch.Tensor, phase: str) -> str:
        shape = tuple(tensor.shape)
        if len(shape) == 4 and shape[-2:] == (self.length, self.length):
            return _MASK
        if phase == _LAYERS and (shape in self._weights or shape[::-1] in self._weights):
            return _WEIGHT
        if shape in self._matrices or shape[::-1] in self._matrices:
            return _COPY if tensor.dtype == torch.bfloat16 else _GRADIENT
        return _REST

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def uncounted() -> saved_tensors_hooks:
    """The CPU as a device, whose host memory is that of the same machine: what waits there is not counted, what comes
    back is."""

    def send(tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            return tensor.clone()

    return saved_tensors_hooks(send, torch.Tensor.clone)


@contextmanager
def _parts(bare: Any, live: Live) -> Iterator[None]:
    """`live.phase` follows the step; what is live between layers and head is written down as the phase "kept"."""
    live.phase = _LAYERS

    def end_of_layers(module: Any, inputs: Any, hidden_BTH: torch.Tensor) -> None:
        live.peaks["kept"], live.phase = live.now.copy(), _HEAD
        hidden_BTH.register_hook(begin_of_layers)

    def begin_of_layers(gradient: torch.Tensor) -> None:
        live.phase = _LAYERS

    handle = bare.base_model.norm.register_forward_hook(end_of_layers)
    try:
        yield
    finally:
        handle.remove()


def bench_memory(
    size: str,
    lengths: Sequence[int],
    *,
    batch: int = 1,
    layers: int | None = None,
    rounds: int = 3,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measured and estimated bytes of a step at several lengths.

    Args:
        size: of `SIZES`.
        lengths: T.
        batch: B.
        layers: fewer than `size` has; by default as many.
        rounds: steps that are timed.

    Returns:
        Under a name of size and batch: for each length "measured", "planned", "seconds"; commit, versions, machine.
    """
    shape = replace(SIZES[size], **({} if layers is None else {"layers": layers}))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {}
    say(
        f"{size}, {shape.layers} layers, {batch} sequences without padding on the {device}: live tensors of a step, "
        f"and the memory estimate. Each length takes {rounds + 1} steps."
    )
    with tempfile.TemporaryDirectory() as work:
        model = make_model(Path(work) / "model", shape, positions=max(lengths))
        base = prepare_base(model, out=Path(work) / "base")
        for length in lengths:
            step = Step(base, batch, length, device)
            seconds = [step.seconds() for _ in range(rounds)]
            found[str(length)] = {
                "measured": step.measure(),
                "planned": step.planned(),
                "seconds": statistics.median(seconds),
            }
            say(line_of(length, found[str(length)]))
    name = f"memory, {size}, {shape.layers} layers, {batch} sequences"
    return {name: described({"size": size, "layers": shape.layers, "batch": batch, "device": device, "lengths": found})}


def line_of(length: int, row: dict[str, Any]) -> str:
    """For the terminal: the estimate's lines in MiB, measured and planned; how far they are apart where a line is a
    hundredth of the peak."""
    measured, planned = row["measured"], row["planned"]
    lines = [f"{length} tokens, {row['seconds']:.2f} s a step"]
    for name, nbytes in measured.items():
        if name in planned or nbytes:
            off = (
                f"{planned[name] / nbytes - 1:+7.1%}" if planned.get(name) and nbytes >= measured["peak"] / 100 else ""
            )
            lines.append(
                f"  {name:<26} {nbytes / 2**20:10.2f} MiB  planned {planned.get(name, 0) / 2**20:10.2f}  {off}"
            )
    return "\n".join(lines)


class Live(TorchDispatchMode):
    """A dispatch mode that counts storages from the operator that makes them until they are freed.

    What existed before is not counted. Memory that one operator uses and frees is not seen, nor is what an allocator
    keeps.

    Args:
        kind: the kind of a new tensor, from its shape and dtype.

    Attributes:
        phase: may be set at any time; peaks are kept for each phase by itself.
        now: bytes that are live, by kind.
        peaks: by phase, the bytes by kind at the moment at which their sum was largest.
        most: the most bytes of each kind by itself.
    """

    def __init__(self, kind: Callable[[torch.Tensor], str] = lambda _: "all"):
        super().__init__()
        self._kind = kind
        self._sizes: dict[int, tuple[str, int]] = {}
        self._total = 0
        self.phase = ""
        self.now: Counter[str] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        self.most: Counter[str] = Counter()

    @property
    def peak(self) -> int:
        """The most bytes that were live at once."""
        return max((peak.total() for peak in self.peaks.values()), default=0)

    def _gone(self, key: int) -> None:
        kind, size = self._sizes.pop(key)
        self.now[kind] -= size
        self._total -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is_real(tensor)}
        for tensor in filter(_is_real, tree_leaves(out)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if not size or key in given or key in self._sizes:
                continue
            kind = self._kind(tensor)
            self._sizes[key] = (kind, size)
            self.now[kind] += size
            self._total += size
            self.most[kind] = max(self.most[kind], self.now[kind])
            weakref.finalize(storage, self._gone, key)
            if self.phase not in self.peaks or self._total > self.peaks[self.phase].total():
                self.peaks[self.phase] = Counter(self.now)
        return out


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "meta"


def main() -> None:
    """Measure and print; with --json add to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="demo")
    parser.add_argument("--layers", type=int, help="another number of layers than the size has")
    parser.add_argument("--max-length", type=int, nargs="+", default=[512, 2048], metavar="T")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    found = bench_memory(arguments.size, arguments.max_length, batch=arguments.batch, layers=arguments.layers)
    if arguments.json is not None:
        add_to(arguments.json, found)


if __name__ == "__main__":
    main()
