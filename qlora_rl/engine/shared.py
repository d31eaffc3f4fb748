"""`borrow_base`: a transformers model whose base is the engine's own tensors, so that the base lies in memory once.

The model is built from the config with hollow tensors (one element, stretched), by transformers' own loader, so that all
that PEFT and TRL read of it is as for a loaded base. Then every tensor is pointed at vLLM's: codes and scales of each
4-bit weight (views of the shards that vLLM has fused), norms, biases, embeddings without the padding of the vocabulary,
the head. Nothing is read from disk but what the engine cannot lend.
"""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.base.checkpoint import PreparedBase, adopt, open_base, outline
from qlora_rl.base.quant import plain_name
from qlora_rl.base.stored import StoredTensors
from qlora_rl.engine.worker import Lending, Lent
from qlora_rl.errors import CannotShareError, EngineBusyError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qlora_rl.engine.local import LocalEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loan:
    """What a borrowed model holds, in its attribute `qlora_loan`.

    Attributes:
        shared_bytes: that lie in the engine's storages.
        copied: why a weight is a copy from disk after all, by name.
        repaired: largest relative error of the scales of each weight that was repaired before it was lent.
    """

    shared_bytes: int
    copied: Mapping[str, str]
    repaired: Mapping[str, float]


class Borrowers:
    """The living models that borrow an engine's base. They are not kept alive."""

    def __init__(self) -> None:
        self._held: list[tuple[weakref.ref[torch.nn.Module], dict[str, int]]] = []

    def add(self, model: torch.nn.Module, weights: Mapping[str, Lent]) -> None:
        """Note a model that holds `weights`."""
        self._held.append((weakref.ref(model), _places(weights)))

    def alive(self) -> list[torch.nn.Module]:
        """Those that have not been collected."""
        self._held = [(ref, places) for ref, places in self._held if ref() is not None]
        return [model for ref, _ in self._held if (model := ref()) is not None]

    def refuse(self, doing: str) -> None:
        """Raise while one is alive.

        Raises:
            EngineBusyError: names the ways out.
        """
        if self.alive():
            gc.collect()  # PEFT and TRL tie their objects into cycles: dropped, they may still be there
        if count := len(self.alive()):
            raise EngineBusyError(
                f"{doing}: {count} model{'s' if count > 1 else ''} made by borrow_base still use{'' if count > 1 else 's'} its "
                "weights. Drop it first (del model, or the trainer that holds it), or call close(force=True): the tensors "
                "stay with the model then."
            )

    def point_to(self, lending: Lending) -> None:
        """Point all of them at the tensors of a rebuilt engine; what a model has cast or moved meanwhile stays its own."""
        for index, model in enumerate(self.alive()):
            ref, places = self._held[index]
            _point(model, lending.weights, places)
            self._held[index] = (ref, _places(lending.weights))


def borrow_base(
    engine: LocalEngine, *, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A model for PEFT training, like `load_base`, whose base is the engine's own tensors.

    The engine's scales are repaired first. Neither side may write to the base. The engine refuses to close while the model
    lives, and points it at the new tensors when it is rebuilt. `model.qlora_loan` says what is shared and what is not.

    Args:
        engine: a LocalEngine in this process.
        attn_implementation: handed to transformers.
        trust_remote_code: handed to transformers.

    Raises:
        CannotShareError: says why. `load_base` gives a copy of one's own.
    """
    doing = "borrowing the base"
    if not hasattr(engine, "lend_base"):
        raise CannotShareError(
            f"{doing}: {type(engine).__name__} has no tensors to lend. Pass a LocalEngine, or use load_base."
        )
    base = open_base(engine.base, verify=False)
    repaired = engine.repair_base() if base.spec.is_4bit else {}
    lending = engine.lend_base()
    stored = StoredTensors(base.path)
    _check(doing, base, stored, lending)
    names = [name for name in stored if stored.is_weight(name)]
    copied = {
        name: lending.withheld.get(name, "vLLM has no weight of this name")
        for name in names
        if name not in lending.weights
    }
    state: dict[str, torch.Tensor] = {}
    for name in names:
        lent = lending.weights.get(name)
        if lent is None:
            state |= {part: stored[part] for part in stored if part == name or part.startswith(f"{name}.")}
            continue
        state[name] = _hollow(lent.values)
        if lent.state is not None:
            for key, value in lent.state.as_dict(packed=True).items():
                state[f"{name}.{key}"] = value if "quant_state" in key else _hollow(value)
    model = _build(base, state, attn_implementation, trust_remote_code)
    device = next(iter(lending.weights.values())).values.device
    copied |= _point(model, lending.weights)
    for name, parameter in model.named_parameters():
        if parameter.untyped_storage().nbytes() < parameter.numel() * parameter.element_size():
            raise CannotShareError(f"{doing}: {name} was left without values. Use load_base.", module=name)
        parameter.data = parameter.data.to(device)
        if getattr(parameter, "quant_state", None) is not None:
            parameter.quant_state.to(device)
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))
    adopt(model, base)
    shared = [p for n, p in model.named_parameters() if n not in copied]
    model.qlora_loan = Loan(sum(_nbytes(p) for p in shared), copied, repaired)
    engine.borrowers.add(model, lending.weights)
    logger.info(
        "the base is held once: %.1f MiB are the engine's own%s",
        model.qlora_loan.shared_bytes / 2**20,
        f"; copied: {'; '.join(f'{name} ({why})' for name, why in copied.items())}" if copied else "",
    )
    return model


def _check(doing: str, base: PreparedBase, stored: StoredTensors, lending: Lending) -> None:
    """Refuse where there is little or nothing to share."""
    if lending.process != os.getpid():
        raise CannotShareError(
            f"{doing}: vLLM's worker runs in process {lending.process}, not in this one. Use load_base; or one GPU and an "
            "engine in this process (tensor_parallel_size=1)."
        )
    for name, lent in lending.weights.items():
        if name in stored and (f"{name}.absmax" in stored) != (lent.state is not None):
            raise CannotShareError(
                f"{doing}: {name} is {'not ' if lent.state is None else ''}4-bit in vLLM and {'' if lent.state is None else 'not '}"
                f"in {base}. Start the engine on the base as it is, or use load_base.",
                module=name,
            )
    if base.spec.is_4bit:
        if not any(lent.state is not None for lent in lending.weights.values()):
            raise CannotShareError(f"{doing}: vLLM holds no 4-bit weight of {base}. Use load_base.")
        return
    linears = {name: why for name, why in lending.withheld.items() if name.endswith(".weight")}
    if linears:
        name, why = next(iter(linears.items()))
        raise CannotShareError(
            f"{doing}: the base is {base.spec.label} and {why} ({name} and {len(linears) - 1} more). Use load_base; a 4-bit "
            "base can be shared.",
            reasons=[f"{n}: {w}" for n, w in linears.items()],
            module=name,
        )


def _build(
    base: PreparedBase, state: dict[str, torch.Tensor], attn_implementation: str | None, trust_remote_code: bool
) -> Any:
    """The model on the CPU, as transformers loads it out of `state`."""
    from transformers import AutoConfig, GenerationConfig

    kind = type(outline(base, trust_remote_code=trust_remote_code))
    config = AutoConfig.from_pretrained(base.path, trust_remote_code=trust_remote_code)
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    # On the CPU whatever the engine runs on: for a GPU, transformers would first allocate room for a second copy.
    model = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=base.spec.dtype, device_map={"": "cpu"}, **options
    )
    for module in model.modules():  # each part that is a model of its own remembers where it came from
        if hasattr(module, "name_or_path"):
            module.name_or_path = module.config.name_or_path = str(base.path)
    try:
        model.generation_config = GenerationConfig.from_pretrained(base.path)
    except OSError:
        logger.debug("%s has no generation config; transformers' own is used", base)
    return model


def _point(
    model: torch.nn.Module, weights: Mapping[str, Lent], only: Mapping[str, int] | None = None
) -> dict[str, str]:
    """Point a model's parameters at `weights`, in place; with `only`, those that still lie there.

    Returns:
        Why a parameter was filled with a copy, by name.
    """
    copied: dict[str, str] = {}
    for full_name, parameter in model.named_parameters():
        name = plain_name(full_name)
        lent = weights.get(name)
        if lent is None or ".lora_" in full_name:
            continue
        if only is not None and parameter.data_ptr() != only.get(name):
            continue
        if lent.state is None and parameter.dtype != lent.values.dtype:
            parameter.data = lent.values.to(parameter.dtype)
            copied[name] = f"transformers holds it as {str(parameter.dtype).removeprefix('torch.')}"
            continue
        parameter.data = lent.values
        if lent.state is not None:
            parameter.quant_state.absmax, parameter.quant_state.code = lent.state.absmax, lent.state.code
    return copied


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape and dtype that takes no memory."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _places(weights: Mapping[str, Lent]) -> dict[str, int]:
    return {name: lent.values.data_ptr() for name, lent in weights.items()}


def _nbytes(parameter: torch.nn.Parameter) -> int:
    """Of a weight, with its scales."""
    state = getattr(parameter, "quant_state", None)
    scales = 0 if state is None else state.absmax.numel() * state.absmax.element_size()
    return parameter.numel() * parameter.element_size() + scales
