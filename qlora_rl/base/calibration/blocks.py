"""`quantise_by_blocks`: a model quantised block after block, each by what it is given behind those before it; and what
that costs, measured on the way.

Only one block is held in float32, and of the others what they have made of the text.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.attention.choice import attention_for
from qlora_rl.base.calibration.codes import choose_codes
from qlora_rl.base.calibration.float16_range import largest_of
from qlora_rl.base.experts import LinearExperts, Names, naming_of
from qlora_rl.base.quant import Measured, QuantSpec
from qlora_rl.base.reader import read_4bit
from qlora_rl.cpu_matmul import Float32Products
from qlora_rl.errors import UnsupportedQuantError
from qlora_rl.locks import replace_file
from qlora_rl.stages import count

logger = logging.getLogger(__name__)

# (names of weights with one input x; the sum of x x^T, or `None` where none was seen) to the float32 weights that are
# computed with from then on.
Quantise = Callable[[Sequence[str], torch.Tensor | None], Mapping[str, torch.Tensor]]
# Of the texts that are measured on, those of which rounding to 16 bits is measured.
_ROUNDED = 2


@torch.no_grad()
def quantise_by_blocks(
    model: Any,
    spec: QuantSpec,
    coded: Collection[str],
    quantise: Quantise,
    text: Sequence[Sequence[int]] = (),
    held_out: Sequence[Sequence[int]] = (),
) -> Measured | None:
    """Call `quantise` for all weights of the model's blocks, in the order in which they are computed with.

    Args:
        model: of transformers, not quantised; as it was when this returns.
        spec: what it is quantised to.
        coded: names in checkpoints of the weights that are to be quantised; those outside of blocks are left out.
        quantise: see above.
        text: token ids; without any, each weight is handed on alone and without sums.
        held_out: token ids that are measured on; without any the result is `None`.

    Raises:
        UnsupportedQuantError: the weights are in no list of blocks.
    """
    with _Replay(model, spec, coded) as replay:
        source: list[Any] = [None] * len(held_out)
        base: list[Any] = [None] * (len(text) + len(held_out))
        rounded = [_Rounded(dtype, replay, held_out[:_ROUNDED]) for dtype in (torch.bfloat16, torch.float16)]
        left_out = 0
        for number in range(len(replay)):
            count("block", number + 1, len(replay))
            block, linears = replay.block(number)
            for place, ids in enumerate(held_out):
                arguments, named = replay.given(number, ids, source[place])
                source[place] = block(*arguments, **named)
            given = [replay.given(number, *each) for each in zip([*text, *held_out], base, strict=True)]
            with _Seen(linears) as seen:
                for arguments, named in given[: len(text)]:
                    block(*arguments, **named)
                    seen.forget()
            for group in seen.groups():
                for name, weight in quantise(*group).items():
                    linears[name].weight.data.copy_(weight)  # one layout, whether chosen now or read
            base = [block(*arguments, **named) for arguments, named in given]
            for each in rounded:
                each.compute(number, block)
            left_out += seen.left_out
        count()
        if left_out:
            logger.warning("calibrating a base: %d inputs of layers were NaN or infinite and are left out", left_out)
        return _measured(replay, held_out, source, base[len(text) :], *rounded)


def chooser(
    spec: QuantSpec,
    weights: Mapping[str, torch.Tensor],
    found: dict[str, dict[str, torch.Tensor]],
    keep: Path | None = None,
) -> Quantise:
    """A `Quantise` that chooses codes, and puts what is to be stored into `found`, by the names of weights.

    Args:
        spec: of the base.
        weights: all that are to be quantised.
        found: is filled.
        keep: a directory for what was chosen, and where an earlier call has left it: for the same weights, spec and
            text.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save

    def quantise(names: Sequence[str], moments_II: torch.Tensor | None) -> dict[str, torch.Tensor]:
        nonlocal keep
        if keep is not None:
            with contextlib.suppress(OSError, SafetensorError):
                kept = load_file(keep / f"{names[0]}.safetensors")
                for name in names:
                    start = name.removesuffix("weight")
                    found[name] = {k.removeprefix(start): value for k, value in kept.items() if k.startswith(name)}
                return decoded(names, found)
        device = "cpu" if moments_II is None else moments_II.device
        held = [weights[name].to(device) for name in names]
        chosen = dict(zip(names, choose_codes(held, spec, moments_II), strict=True))
        found.update({name: each.tensors for name, each in chosen.items()})
        if keep is not None:
            parts = [(name.removesuffix("weight"), found[name]) for name in names]
            stored = {f"{start}{key}": value for start, part in parts for key, value in part.items()}
            try:
                keep.mkdir(exist_ok=True)
                replace_file(keep / f"{names[0]}.safetensors", save(stored))
            except OSError as error:  # a full disk needs the room for the base itself
                logger.warning("calibrating a base: what is chosen by now is not kept (%s)", error)
                shutil.rmtree(keep, ignore_errors=True)
                keep = None
        return {name: each.weight for name, each in chosen.items()}

    return quantise


def decoded(names: Sequence[str], found: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What quantised weights stand for, float32 [O, I]."""
    stored = {name: read_4bit(found[name], "weight") for name in names}
    return {name: each.dequantised() for name, each in stored.items() if each is not None}


def _measured(
    replay: _Replay, held_out: Sequence[Sequence[int]], source: Any, base: Any, bfloat16: _Rounded, float16: _Rounded
) -> Measured | None:
    if not held_out:
        return None
    sums = torch.zeros(3, dtype=torch.float64)
    for ids, theirs, ours in zip(held_out, source, base, strict=True):
        target = torch.tensor(ids)[1:, None]
        source_TV, base_TV = (replay.logprobs(ids, last)[:-1] for last in (theirs, ours))
        kl_T = (source_TV.exp() * (source_TV - base_TV)).sum(1)
        parts = (kl_T, -source_TV.gather(1, target), -base_TV.gather(1, target))
        sums += torch.stack([part.sum(dtype=torch.float64) for part in parts])
    tokens = sum(len(ids) - 1 for ids in held_out)
    kl, in_source, in_base = (sums / tokens).tolist()
    before, after = (float(torch.tensor(each).exp()) for each in (in_source, in_base))
    return Measured(kl, before, after, tokens, bfloat16.kl(base), float16.kl(base), _finite(float16.largest))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class _ReachedError(Exception):
    """A block has been given its arguments."""


class _Replay:
    """The blocks of a model, each to be called by itself with what the model hands it.

    In the model they stand still: each returns what it is told. All else is float32 meanwhile.
    """

    def __init__(self, model: Any, spec: QuantSpec, coded: Collection[str]) -> None:
        self._model, self._coded, self._stored = model, coded, Names(model).stored
        self._with_experts = spec.quantize_experts
        self._place, self._blocks = self._found()
        own = next(self._blocks.parameters()).device
        self._device = torch.device("cuda") if own.type == "cpu" and torch.cuda.is_available() else own
        self._wanted: int | None = None
        self._before: Any = None
        self._exit = contextlib.ExitStack()

    def __len__(self) -> int:
        return len(self._blocks)

    def __enter__(self) -> _Replay:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_computing(self._model))
            within = {id(parameter) for parameter in (*self._blocks.parameters(), *self._blocks.buffers())}
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                if id(tensor) not in within and tensor.is_floating_point() and tensor.dtype != torch.float32:
                    stack.callback(setattr, tensor, "data", tensor.data)
                    tensor.data = tensor.data.float()
            for number, block in enumerate(self._blocks):
                if "forward" in vars(block):
                    stack.callback(setattr, block, "forward", block.forward)
                else:
                    stack.callback(delattr, block, "forward")
                block.forward = functools.partial(self._stand_in, number)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.close()

    def block(self, number: int) -> tuple[Any, dict[str, torch.nn.Linear]]:
        """A copy of a block in float32, and its linears that are to be quantised, by the names of their weights."""
        block = self._blocks[number]
        stand_in = vars(block).pop("forward")
        try:
            copied = copy.deepcopy(block).to(self._device, torch.float32)
        finally:
            block.forward = stand_in
        if self._with_experts:
            _part_experts(copied, self._model)
        names = {
            self._stored(f"{self._place}.{number}.{name}.weight"): module
            for name, module in copied.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        return copied, {name: module for name, module in names.items() if name in self._coded}

    def given(self, number: int, ids: Sequence[int], before: Any) -> tuple[Any, Any]:
        """What the model calls a block with, where the block before has returned `before`."""
        self._wanted, self._before = number, before
        try:
            self._call(ids)
        except _ReachedError as reached:
            return _moved(reached.args, self._device)
        raise UnsupportedQuantError(
            f"calibrating a base: {type(self._model).__name__} does not call block {number} of {self._place}. Leave "
            "calibrate out."
        )

    def logprobs(self, ids: Sequence[int], last: Any) -> torch.Tensor:
        """Of all tokens [T, V], where the last block has returned `last`."""
        self._wanted, self._before = None, last
        return torch.log_softmax(self._call(ids).logits[0].float().cpu(), -1)

    def _call(self, ids: Sequence[int]) -> Any:
        return self._model(input_ids=torch.tensor([list(ids)], device=self._model.device), use_cache=False)

    def _stand_in(self, number: int, *arguments: Any, **named: Any) -> Any:
        if number == self._wanted:
            raise _ReachedError(arguments, named)
        return _moved(self._before, self._model.device)

    def _found(self) -> tuple[str, torch.nn.ModuleList]:
        """Name and value of the list that holds most of the weights that are to be quantised."""
        sizes: dict[str, int] = {}
        lists = {name: each for name, each in self._model.named_modules() if isinstance(each, torch.nn.ModuleList)}
        for name, module in self._model.named_modules():
            if isinstance(module, torch.nn.Linear) and self._stored(f"{name}.weight") in self._coded:
                for place in lists:
                    if name.startswith(f"{place}."):
                        sizes[place] = sizes.get(place, 0) + module.weight.numel()
        if not sizes:
            raise UnsupportedQuantError(
                f"calibrating a base: none of the linears of {type(self._model).__name__} are in a list of blocks "
                "(torch.nn.ModuleList). Leave calibrate out."
            )
        place = max(sizes, key=lambda name: (sizes[name], -len(name)))
        return place, lists[place]


class _Rounded:
    """What the blocks of the base make of some texts in 16 bits."""

    def __init__(self, dtype: torch.dtype, replay: _Replay, texts: Sequence[Sequence[int]]) -> None:
        self._dtype, self._replay, self._texts = dtype, replay, texts
        self._states: list[Any] = [None] * len(texts)
        self.largest = 0.0

    def compute(self, number: int, block: Any) -> None:
        """The next block, given in float32."""
        if not self._texts:
            return
        rounded = copy.deepcopy(block).to(self._dtype)
        hooks = [module.register_forward_hook(self._look) for module in rounded.modules()]
        try:
            with Float32Products(self._dtype):
                for place, ids in enumerate(self._texts):
                    given = self._replay.given(number, ids, _cast(self._states[place], torch.float32))
                    arguments, named = _cast(given, self._dtype)
                    self._states[place] = rounded(*arguments, **named)
        except Exception as error:  # whatever a model computes in float32 alone
            logger.info("rounding to %s is not measured (%s)", self._dtype, error)
            self._texts, self.largest = [], math.inf
        finally:
            for hook in hooks:
                hook.remove()

    def kl(self, base: Sequence[Any]) -> float | None:
        """Of the base's next token in float32 to that of these, in nats; `None` where that is no number.

        Args:
            base: what the last block returns in float32 for each of the texts, and others.
        """
        sums, tokens = 0.0, 0
        for ids, exact, ours in zip(self._texts, base, self._states, strict=False):
            exact_TV, ours_TV = (self._replay.logprobs(ids, _cast(last, torch.float32)) for last in (exact, ours))
            sums += float((exact_TV.exp() * (exact_TV - ours_TV)).sum(dtype=torch.float64))
            tokens += len(ids)
        return _finite(sums / tokens) if tokens else None

    def _look(self, _: Any, inputs: Any, output: Any) -> None:
        for value in (*inputs, *(output if isinstance(output, tuple) else (output,))):
            self.largest = max(self.largest, largest_of(value))


class _Seen:
    """Within it the inputs of a block's linears are summed up, once for all linears that have the same."""

    def __init__(self, linears: Mapping[str, torch.nn.Linear]) -> None:
        self._linears = linears
        self._first: dict[str, str] = {}  # the linear that is called first with the same input
        self._moments: dict[str, torch.Tensor] = {}
        self._now: list[tuple[torch.Tensor, str]] = []
        self._hooks: list[Any] = []
        self.left_out = 0

    def __enter__(self) -> _Seen:
        self._hooks = [
            module.register_forward_pre_hook(functools.partial(self._see, name))
            for name, module in self._linears.items()
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for each in self._hooks:
            each.remove()

    def forget(self) -> None:
        """A text has ended: the next tensors are others."""
        self._now = []

    def groups(self) -> Iterator[tuple[list[str], torch.Tensor | None]]:
        """Names of the weights with one input x, and the sum of x x^T; in the order of their calls."""
        for first in list(self._moments):
            names = [name for name, other in self._first.items() if other == first]
            yield names, self._moments.pop(first)  # each is as large as a matrix of the block, or larger
        for name in self._linears:
            if name not in self._first:
                yield [name], None

    def _see(self, name: str, _: Any, given: Any) -> None:
        x = given[0]
        first = self._first.setdefault(name, next((first for other, first in self._now if other is x), name))
        if first != name:
            return
        self._now.append((x, name))
        x_TI = x.flatten(0, -2)
        is_finite = x_TI.isfinite().all(1)
        if not bool(is_finite.all()):
            self.left_out += int((~is_finite).sum())
            x_TI = x_TI[is_finite]
        if name not in self._moments:
            self._moments[name] = x_TI.new_zeros(x_TI.shape[1], x_TI.shape[1])
        self._moments[name].addmm_(x_TI.T, x_TI)


def _part_experts(block: torch.nn.Module, model: Any) -> None:
    """Put experts that are linears in the place of transformers' tensors of all experts."""
    naming = naming_of(model)
    for module in list(block.modules()):
        experts = getattr(module, "experts", None)
        if naming is None or not isinstance(getattr(experts, "gate_up_proj", None), torch.nn.Parameter):
            continue
        with torch.device("meta"):
            linears = LinearExperts(model.config)
        for number, (both, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            gate, up = both.chunk(2)
            for name, weight in ((naming.gate, gate), (naming.up, up), (naming.down, down)):
                linear = linears.get_submodule(f"{number}.{name}")
                linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        module.experts = linears


@contextlib.contextmanager
def _computing(model: Any) -> Iterator[None]:
    """Within it the model computes without dropout, and all that its config says."""
    was_training, attention = model.training, model.config._attn_implementation
    model.eval()
    try:
        if attention_for(model.config) is not None:
            model.set_attn_implementation(attention_for(model.config))
        yield
    finally:
        model.train(was_training)
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)


def _moved(value: Any, device: torch.device) -> Any:
    return _changed(value, lambda tensor: tensor.to(device))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return _changed(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_changed(each, change) for each in value)
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    return value
