"""The trainer's model as its class has it: as it trains (`plain_forward`), and in float32 (`in_float32`).

What two computations of one function differ by is rounding. The trainer's forward pass in float32 tells how large
that is, whatever the model, its depth and its dtype: the float32 pass multiplies with the very weights of the 16-bit
one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from qlora_rl.adapter.inspected import bare_model, is_bare
from qlora_rl.base.attention.choice import attention_for
from qlora_rl.base.quant import dequantised_weight, require_bitsandbytes
from qlora_rl.sharded_tensors import is_sharded, shape_of

_HALF = (torch.bfloat16, torch.float16)
# Elements of a 16-bit matrix that are in float32 at once: 256 MiB.
_AT_ONCE = 1 << 26
# Logits of one forward: 128 MiB in 16 bit.
_LOGITS = 1 << 26
# Up to so many tokens attention is eager, which applies whatever a config asks for; its scores take too much memory
# beyond.
_EAGER = 1024


class NotComparedError(Exception):
    """What two sides compute cannot be compared: a model has no float32 pass, or a side does not score."""


def plain_forward(model: Any, **inputs: Any) -> Any:
    """The output of the transformers model inside, adapter applied; of a sharded one all ranks call it.

    TRL puts a forward of its own on the model, which returns no logits; this is the one of the model's class.

    Args:
        model: the PeftModel, or the bare one.
        inputs: of the model's own `forward`.
    """
    base = bare_model(model)
    if not is_sharded(model):
        return type(base).forward(base, **inputs)
    # What gathers the layers one by one hangs on the outer module; TRL's forward hangs on the inner one.
    of_trl = vars(base).pop("forward", None)
    try:
        return model(**inputs)
    finally:
        if of_trl is not None:
            base.forward = of_trl


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Within it the model is its bare base."""
    # PEFT switches gradients on for the whole adapter when it comes back, also where the caller had switched them off.
    trained = {p: p.requires_grad for p in model.parameters()}
    try:
        with model.disable_adapter() if hasattr(model, "disable_adapter") else nullcontext():
            yield
    finally:
        for parameter, wanted in trained.items():
            parameter.requires_grad_(wanted)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Within it a model has no dropout; then each module is in the mode that it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def as_trained(model: Any, autocast: torch.dtype | None) -> AbstractContextManager[Any]:
    """Within it a model computes as while training; `autocast` is `None` where it computes as its weights are."""
    device = next(model.parameters()).device.type
    return torch.autocast(device, autocast) if autocast is not None else nullcontext()


def as_engine(model: Any, autocast: torch.dtype | None, name: str) -> AbstractContextManager[Any] | None:
    """Within it a model rounds as an engine does; `None` where both round alike.

    By autocast to another 16-bit dtype; as the weights are to float32. Weights that are trained in float32 are rounded,
    those of norms and embeddings too, which autocast leaves alone. 4-bit linears of a base in float16 multiply in
    bfloat16, as vLLM's bitsandbytes layers do.

    Args:
        model: of the trainer.
        autocast: dtype in which the trainer's forward runs while training (`None`: as the weights are).
        name: of the engine's dtype.
    """
    dtype, own = getattr(torch, name), bare_model(model).dtype
    if is_bare(model) and own == torch.float32 and dtype in _HALF:
        return _with_rounded_weights(model, dtype)
    if (autocast or own) != dtype:
        return as_trained(model, None if own == dtype or dtype not in _HALF else dtype)
    bnb = require_bitsandbytes()
    linears = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    return _in_bfloat16(linears) if linears and dtype == torch.float16 else None


@contextmanager
def _with_rounded_weights(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Each module rounds its float32 weights to `dtype` while it computes, so that only its own are there twice."""
    own: dict[Any, dict[str, Any]] = {}

    def round_weights(module: Any, *_: Any) -> None:
        own[module] = dict(module._parameters)
        for name, weight in own[module].items():
            if weight is not None and weight.dtype == torch.float32:
                module._parameters[name] = torch.nn.Parameter(weight.detach().to(dtype), requires_grad=False)

    def restore(module: Any, *_: Any) -> None:
        module._parameters.update(own.pop(module, {}))

    hooks = []
    for module in model.modules():
        if module._parameters and module is not model:
            hooks.append(module.register_forward_pre_hook(round_weights))
            hooks.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in list(own):
            restore(module)


@contextmanager
def _in_bfloat16(linears: Sequence[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for linear in linears:
            product = _rounded_product_of(linear, require_bitsandbytes().functional.dequantize_4bit)
            stack.enter_context(_exchanged(linear, "forward", product))
        yield


@contextmanager
def in_float32(model: Any, tokens: int) -> Iterator[None]:
    """Within it `plain_forward` of a model computes in float32, whatever autocast is around it; one weight is copied at
    a time.

    4-bit weights are dequantised and rounded to the base's compute dtype, as both sides multiply with them.

    Args:
        model: with whole weights.
        tokens: of the longest sequence: attention is eager where that takes little memory, else SDPA.

    Raises:
        NotComparedError: the model fails within it.
    """
    bnb = require_bitsandbytes()
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, bnb.nn.Linear4bit):
                stack.enter_context(_exchanged(module, "forward", _product_of(module, bnb.functional.dequantize_4bit)))
            elif isinstance(module, torch.nn.modules.conv._ConvNd):  # compares dtypes before the mode sees it
                stack.enter_context(_exchanged(module, "forward", _convolution_of(module)))
        stack.enter_context(_attention(bare_model(model), is_short=tokens <= _EAGER))
        stack.enter_context(torch.autocast(next(model.parameters()).device.type, enabled=False))
        stack.enter_context(_Float32())
        try:
            yield
        except (RuntimeError, ValueError, TypeError) as error:
            raise NotComparedError(f"the trainer's float32 forward pass fails: {error}") from error


@contextmanager
def _exchanged(module: Any, name: str, value: Any) -> Iterator[None]:
    held = vars(module)
    before = held.get(name)
    held[name] = value
    try:
        yield
    finally:
        if before is None:
            del held[name]
        else:
            held[name] = before


@contextmanager
def _attention(base: Any, *, is_short: bool) -> Iterator[None]:
    """One that takes float32 and applies whatever the config asks for; where a model can be given another."""
    changes = getattr(type(base), "_can_set_attn_implementation", lambda: False)
    configs = {id(c): c for m in base.modules() if (c := getattr(m, "config", None)) is not None} if changes() else {}
    known = [(c, c._attn_implementation) for c in configs.values() if getattr(c, "_attn_implementation", None)]
    takes_sdpa = getattr(type(base), "_supports_sdpa", False)
    name = "eager" if is_short or not takes_sdpa else attention_for(base.config) or "sdpa"
    try:
        for config, _ in known:
            config._attn_implementation = name
        yield
    finally:
        for config, before in known:
            config._attn_implementation = before


def _codes(linear: Any) -> torch.Tensor:
    return linear.weight.t() if linear.weight.shape[0] == 1 else linear.weight


def _rounded_product_of(linear: Any, dequantize: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        weight_OI = dequantize(_codes(linear), linear.weight.quant_state).bfloat16()
        bias = None if linear.bias is None else linear.bias.bfloat16()
        return torch.nn.functional.linear(x.bfloat16(), weight_OI, bias).to(x.dtype)

    return forward


def _product_of(linear: Any, dequantize: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():  # here a cast is a cast
            if linear.compute_dtype in (torch.float32, torch.float16):  # in which bitsandbytes multiplies
                weight_OI = dequantised_weight(linear.weight).to(linear.compute_dtype)
            else:
                weight_OI = dequantize(_codes(linear), linear.weight.quant_state)
            bias = None if linear.bias is None else linear.bias.float()
            return torch.nn.functional.linear(x, weight_OI.float(), bias)

    return forward


def _convolution_of(module: Any) -> Any:
    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = None if module.bias is None else module.bias.float()
        return module._conv_forward(x.float(), module.weight.float(), bias)

    return forward


class _Float32(TorchDispatchMode):
    """Every operation on 16-bit values is one on float32 values, and no cast to 16 bits takes place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = [value.alias_info for value in func._schema.returns]
        if any(info is not None and not info.is_write for info in returned):  # a view: of a weight still of 16 bits
            return func(*args, **kwargs)
        if any(info is not None for info in returned) and isinstance(args[0], torch.Tensor) and _is_half(args[0]):
            return func(*args, **kwargs)
        if func is torch.ops.aten.embedding.default:
            return _lifted(func(*args, **kwargs))
        if func is torch.ops.aten.mm.default and args[1].numel() > _AT_ONCE and _is_half(args[1]):
            columns = max(1, _AT_ONCE // args[1].shape[0])
            return torch.cat([_lifted(args[0]) @ part.float() for part in args[1].split(columns, dim=1)], dim=1)
        args, kwargs = tree_map(_lifted, (args, kwargs))
        return tree_map(_lifted, func(*args, **kwargs))


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _lifted(value: Any) -> Any:
    if _is_half(value):
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALF else value


def tail_logprobs(model: Any, texts: Sequence[Sequence[int]], count: int) -> torch.Tensor:
    """Natural logs of the model's probabilities of the last tokens of each text, float32; without gradients.

    Args:
        model: the PeftModel, or the bare one.
        texts: B sequences of one length.
        count: tokens of each, C.

    Returns:
        [B * C], on the CPU.
    """
    base = bare_model(model)
    ids_BT = torch.tensor(texts, device=next(base.parameters()).device)
    fields = {"input_ids": ids_BT, "use_cache": False}
    if "logits_to_keep" in inspect.signature(type(base).forward).parameters:
        fields["logits_to_keep"] = count + 1
    with torch.no_grad():
        logits_BCV = plain_forward(model, **fields).logits[:, -count - 1 : -1]
        return logits_BCV.float().log_softmax(-1).gather(2, ids_BT[:, -count:, None]).flatten().cpu()


def completion_logits(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    images: Sequence[Mapping[str, torch.Tensor]] = (),
) -> Iterator[torch.Tensor]:
    """The model's logits [T, V] of the T tokens of each completion; several completions in a forward, if short.

    Args:
        model: the PeftModel, or the bare one.
        prompts: token ids.
        completions: token ids, one completion for each prompt.
        images: for each prompt, what the model is given for its images besides the ids; empty for prompts of text.
    """
    base = bare_model(model)
    takes = inspect.signature(type(base).forward).parameters
    device = next(base.parameters()).device
    rows = list(zip(prompts, completions, images or ({},) * len(prompts), strict=True))
    longest = max(map(len, completions), default=0) + 1
    vocabulary = shape_of(base.get_output_embeddings().weight)[0]
    # What takes images counts positions by them, and is given one sequence at a time.
    size = max(1, _LOGITS // (longest * vocabulary)) if "position_ids" in takes and not any(images) else 1
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        # Completions end together, so that the last positions are those whose logits are wanted.
        length = max(len(prompt) + len(ids) for prompt, ids, _ in part)
        ids_BT = torch.zeros(len(part), length, dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        for i, (prompt, ids, _) in enumerate(part):
            row = torch.tensor([*prompt, *ids])
            ids_BT[i, length - len(row) :], mask_BT[i, length - len(row) :] = row, 1
        fields: dict[str, Any] = {"input_ids": ids_BT.to(device), "use_cache": False}
        if len(part) > 1:
            positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
            fields |= {"attention_mask": mask_BT.to(device), "position_ids": positions_BT.to(device)}
        for name, value in part[0][2].items():
            is_per_token = tuple(value.shape) == (1, len(part[0][0]))
            padded = torch.nn.functional.pad(value, (0, length - value.shape[-1])) if is_per_token else value
            fields[name] = padded.to(device)
        if "logits_to_keep" in takes:
            fields["logits_to_keep"] = max(len(ids) for _, ids, _ in part) + 1
        for logits_TV, (_, ids, _) in zip(plain_forward(model, **fields).logits, part, strict=True):
            yield logits_TV[-len(ids) - 1 : -1]
