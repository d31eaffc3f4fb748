"""`borrow_base`: a transformers model whose base is the engine's own tensors, so that the base is in memory once.

The model is built from the config with hollow tensors (one element, stretched), by transformers' own loader, so that
all that PEFT and TRL read of it is as for a loaded base. Then every tensor is pointed at vLLM's: codes and scales of
each 4-bit weight (views of the shards that vLLM has fused), norms, biases, embeddings without the padding of the
vocabulary, the head. Nothing is read from disk but what the engine cannot lend.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.base.attention.choice import attention_for
from qlora_rl.base.checkpoint import PreparedBase, adopt, building, open_base, outline
from qlora_rl.base.reader import StoredTensors
from qlora_rl.engine.local.borrowing_models import point
from qlora_rl.engine.worker.extension import Lending
from qlora_rl.errors import CannotShareError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qlora_rl.engine.local.engine import LocalEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loan:
    """What a borrowed model holds, in its attribute `qlora_loan`.

    Attributes:
        shared_bytes: that are in the engine's storages.
        copied: why a weight is a copy from disk after all, by name.
        repaired: largest relative error of the scales of each weight that was repaired before it was lent.
    """

    shared_bytes: int
    copied: Mapping[str, str]
    repaired: Mapping[str, float]


def borrow_base(
    engine: LocalEngine, *, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A model for PEFT training, like `load_base`, whose base is the engine's own tensors.

    The engine's scales are repaired first. Neither side may write to the base. The engine raises on closing while the
    model lives, and points it at the new tensors when it is rebuilt. `model.qlora_loan` says what is shared and what is
    not.

    Args:
        engine: a LocalEngine in this process.
        attn_implementation: as `load_base` takes it.
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
    copied |= point(model, lending.weights)
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
    """Raise where there is little or nothing to share."""
    if lending.process != os.getpid():
        raise CannotShareError(
            f"{doing}: vLLM's worker runs in process {lending.process}, not in this one. Use load_base; or one GPU and "
            "an engine in this process (tensor_parallel_size=1)."
        )
    for name, lent in lending.weights.items():
        if name in stored and (f"{name}.absmax" in stored) != (lent.state is not None):
            raise CannotShareError(
                f"{doing}: {name} is {'not ' if lent.state is None else ''}4-bit in vLLM and "
                f"{'' if lent.state is None else 'not '}in {base}. Start the engine on the base as it is, or use "
                "load_base.",
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
            f"{doing}: the base is {base.spec.label} and {why} ({name} and {len(linears) - 1} more). Use load_base; a "
            "4-bit base can be shared.",
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
    attention = attention_for(config, attn_implementation, "borrowing the base")
    options = {} if attention is None else {"attn_implementation": attention}
    # On the CPU whatever the engine runs on: for a GPU, transformers would first allocate room for a second copy.
    with building(base):
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


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape and dtype that takes no memory."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _nbytes(parameter: torch.nn.Parameter) -> int:
    """Of a weight, with its scales."""
    state = getattr(parameter, "quant_state", None)
    scales = 0 if state is None else state.absmax.numel() * state.absmax.element_size()
    return parameter.numel() * parameter.element_size() + scales
