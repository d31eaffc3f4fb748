"""`iter_weights`: the policy as dense weights, module by module, without touching the model.

A layer that PEFT has wrapped is affine in its input (`methods.CHANGES_WEIGHTS`): one weight and one bias give the same
function. They are found on a float32 stand-in of that one layer, which is thrown away: its base is the exactly
dequantised weight, and its own forward pass, whatever the method, is asked for the identity. Plain LoRA, whose answer
is known, is added up instead. Nothing is merged; every number of the model is only read. Rounded once, to the dtype
that was asked for.

Where the model is sharded over several ranks, its layers are gathered one at a time while their weights are computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from qlora_rl.adapter.inspected import bare_model, factors_of, is_lora_layer, own_name
from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.base.experts import Names
from qlora_rl.base.quant import dequantised_rows, dequantised_weight
from qlora_rl.distributed import ranks
from qlora_rl.errors import AdapterRejectedError, collected
from qlora_rl.sharded_tensors import gathered, is_sharded

# Makes a weight, given the dtype that is wanted; module and name of each parameter that it reads.
Maker = Callable[[torch.dtype], torch.Tensor]
Parts = list[tuple[Any, str]]
# Rows of the identity, or of an embedding, that a stand-in answers at once.
_BLOCK = 1024
# Share of the largest output by which a layer may differ from the weight that was found for it, in float32.
_AFFINE = 1e-3


def iter_weights(model: Any, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the policy, by the name that checkpoints of the base have for it.

    Args:
        model: a PeftModel; only read. A bare model gives its own weights.
        dtype: of the result; by default float32. A weight that is neither adapted nor of another dtype is the model's
            own tensor: copy it before the model trains on.

    Yields:
        Name and weight. At most one module's weights exist in addition to the model's, if they are not kept.

    Raises:
        AdapterRejectedError: no weights give this function; names every reason, or the layer.
    """
    dtype = dtype or torch.float32
    names = Names(bare_model(model))
    for name, weight, parts in _walk(model):
        # Not a decorator around the generator: torch's would hold each weight while the next one is made.
        with torch.no_grad(), gathered(parts, f"gathering {name}"):
            made = weight(dtype).to(dtype)
        yield from names.parts(name, made)
        del made


def follow_weights(model: Any) -> None:
    """Take part in the gathering of `iter_weights` on another rank; computes nothing itself."""
    if is_sharded(model):
        for name, _, parts in _walk(model):
            with gathered(parts, f"gathering {name}"):
                pass


def _walk(model: Any) -> Iterator[tuple[str, Maker, Parts]]:
    """Name, maker and what it is made of, of every weight; on every rank of a sharded model the same."""
    if is_sharded(model):
        ranks().barrier("judging the adapter")  # whether a tensor in parts is finite is asked of all ranks
    if hasattr(model, "peft_config"):
        verdict = judge_adapter(model)
        if verdict.kind == "reject":
            raise collected("making full weights", verdict.reasons, AdapterRejectedError)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.no_grad():
        left_out = _tied_head(base)
    seen: set[int] = set()
    for name, source, weight, parts in _weights(base, ""):
        if name == left_out or id(source) in seen:
            continue
        if source is not None:
            seen.add(id(source))
        yield own_name(name), weight, parts


def _weights(module: Any, path: str) -> Iterator[tuple[str, Any, Maker, Parts]]:
    """Name, parameter of the base (`None` if adapted), maker (of a dtype) of the effective weight, and what that reads,
    of every parameter below `module`."""
    if _is_wrapped(module):
        yield from _wrapped(module, path)
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield _join(path, name), parameter, partial(_own, module, name), [(module, name)]
    for name, child in module._modules.items():
        if child is not None:
            yield from _weights(child, _join(path, name))


def _own(module: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """What a parameter stands for; itself where it has that dtype already."""
    parameter = module._parameters[name]
    is_plain = parameter.dtype == dtype and getattr(parameter, "quant_state", None) is None
    return parameter.detach() if is_plain else dequantised_weight(parameter)


def _all_of(layer: Any) -> Parts:
    return [(module, name) for module in layer.modules() for name in module._parameters]


def _wrapped(layer: Any, path: str) -> Iterator[tuple[str, Any, Maker, Parts]]:
    """The same of a module that PEFT has wrapped."""
    copied = _active_copy(layer)
    if copied is not None:
        yield from ((name, None, weight, parts) for name, _, weight, parts in _weights(copied, path))
        return
    tokens = getattr(layer, "token_adapter", layer)
    if hasattr(tokens, "trainable_tokens_delta"):
        yield _join(path, "weight"), None, lambda _: _with_tokens(tokens), _all_of(tokens)
        return
    base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module
    if not hasattr(layer, "get_base_layer") or not layer.active_adapters:
        yield from _weights(base, path)
        return
    chain = list(_parameter_wrappers(layer))
    if chain:
        for name, parameter in base._parameters.items():
            if parameter is not None:
                own = [wrapper for wrapper in chain if wrapper.parameter_name == name]
                source, parts = None if own else parameter, [(base, name), *_added_by(own)]
                yield _join(path, name), source, partial(_with_parameter_deltas, base, name, own), parts
        for name, child in base._modules.items():
            yield from _weights(child, _join(path, name))
        return
    if _is_plain_lora(layer, base):
        parts = _all_of(layer)
        yield _join(path, "weight"), None, partial(_with_lora, layer, base), parts
        if base.bias is not None:
            small = [(module, name) for module, name in parts if name == "bias"]
            yield _join(path, "bias"), None, lambda _: _with_lora_bias(layer, base), small
        return
    # Found together, since both come out of one stand-in; the bias is small.
    found = _Found(layer, base, path)
    for name in ("weight", "bias"):
        if getattr(base, name, None) is not None:
            yield _join(path, name), None, partial(found, name), _all_of(layer)


def _is_wrapped(module: Any) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _active_copy(layer: Any) -> Any:
    """The copy of a module that serves in its place (`modules_to_save`, LN tuning)."""
    for where in ("modules_to_save", "ln_tuning_layers"):
        copies = getattr(layer, where, None)
        active = [] if copies is None or layer.disable_adapters else [a for a in layer.active_adapters if a in copies]
        if active:
            return copies[active[0]]
    return None


def _parameter_wrappers(layer: Any) -> Iterator[Any]:
    """`target_parameters`: wrappers around wrappers, one for each parameter of a module."""
    while type(layer).__name__ == "ParamWrapper":
        yield layer
        layer = layer.base_layer


def _added_by(wrappers: list[Any]) -> Parts:
    """Of wrappers around wrappers what each of them has added itself."""
    added = (m for w in wrappers for name, child in w._modules.items() if name != "base_layer" for m in child.modules())
    return [(module, name) for module in added for name in module._parameters]


def _with_parameter_deltas(base: Any, name: str, wrappers: list[Any], _: torch.dtype) -> torch.Tensor:
    weight = dequantised_weight(base._parameters[name])
    for wrapper in wrappers:
        for adapter in wrapper.active_adapters:
            if adapter in wrapper.lora_A:
                weight = weight + wrapper.get_delta_weight(adapter).float()
    return weight


def _with_tokens(layer: Any) -> torch.Tensor:
    weight = layer.base_layer.weight.float()
    for adapter in layer.active_adapters:
        rows = torch.tensor(layer.token_indices[adapter], device=weight.device)
        weight = weight.index_copy(0, rows, layer.trainable_tokens_delta[adapter].to(weight))
    return weight


def _is_plain_lora(layer: Any, base: Any) -> bool:
    """LoRA on a linear, as it is or as one DoRA: those two are added up, which is a tenth of the work."""
    if not is_lora_layer(layer) or not isinstance(base, torch.nn.Linear):
        return False
    if type(layer).__name__ not in ("Linear", "Linear4bit") or not type(layer).__module__.startswith(
        "peft.tuners.lora."
    ):
        return False
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    variants = {type(layer.lora_variant[a]).__name__ for a in active if layer.lora_variant.get(a) is not None}
    is_one_dora = variants == {"DoraLinearVariant"} and len(active) == 1 and layer.lora_B[active[0]].bias is None
    is_known = not variants or is_one_dora
    return is_known and all(
        isinstance(part[a], torch.nn.Linear) for part in (layer.lora_A, layer.lora_B) for a in active
    )


def _with_lora(layer: Any, base: Any, dtype: torch.dtype) -> torch.Tensor:
    """W + scale · B @ A, some rows at a time; DoRA gives each row its trained length."""
    weight_OI = torch.empty(base.out_features, base.in_features, dtype=dtype, device=base.weight.device)
    for start, rows_OI in dequantised_rows(base.weight):
        here = slice(start, start + rows_OI.shape[0])
        for adapter in layer.active_adapters:
            if adapter not in layer.lora_A:
                continue
            a_RI, b_OR, scale, _ = factors_of(layer, adapter)
            rows_OI.addmm_(b_OR[here].float(), a_RI.float(), alpha=scale)
            if layer.lora_variant.get(adapter) is not None:
                lengths_O = layer.lora_magnitude_vector[adapter].weight[here].float()
                rows_OI.mul_((lengths_O / torch.linalg.vector_norm(rows_OI, dim=1))[:, None])
        weight_OI[here] = rows_OI
    return weight_OI


def _with_lora_bias(layer: Any, base: Any) -> torch.Tensor:
    bias_O = base.bias.float().clone()
    for adapter in layer.active_adapters:
        extra = layer.lora_B[adapter].bias if adapter in layer.lora_B else None
        if extra is not None:
            bias_O += float(layer.scaling[adapter]) * extra.float()
    return bias_O


class _Found:
    """Weight and bias of one wrapped layer, looked for when the first of them is asked for; the weight is given out
    once."""

    def __init__(self, layer: Any, base: Any, path: str):
        self._layer, self._base, self._path = layer, base, path
        self._bias: torch.Tensor | None = None

    def __call__(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A `Maker`, whose dtype is not needed."""
        if name == "bias":
            if self._bias is None:
                self("weight", dtype)
            return self._bias
        weight, self._bias = _probe(self._layer, self._base, self._path)
        return weight


def _probe(layer: Any, base: Any, path: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a float32 stand-in of the layer makes of the identity (of every token, where it is an embedding).

    Raises:
        AdapterRejectedError: it is no linear and no embedding, or not affine, or has a bias that the base has no place
            for.
    """
    weight = dequantised_weight(base.weight)
    device = weight.device
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    is_embedding = isinstance(base, torch.nn.Embedding)
    is_transposed = type(base).__name__ == "Conv1D"
    bias = getattr(base, "bias", None)
    with torch.device("meta"):
        if is_embedding:
            plain: Any = torch.nn.Embedding(*weight.shape)
        elif is_transposed:
            plain = type(base)(weight.shape[1], weight.shape[0])
        elif isinstance(base, torch.nn.Linear):
            plain = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        else:
            raise AdapterRejectedError(
                f"making full weights: {path} is a {type(base).__name__}, neither a linear nor an embedding. Leave it "
                "out of target_modules.",
                module=path,
            )
    plain.weight = parameter
    if bias is not None:
        plain.bias = torch.nn.Parameter(bias.detach().float().clone(), requires_grad=False)
    stand_in = _of_float32(copy.deepcopy(layer, {id(base): plain}).float().eval())
    with torch.autocast(device.type, enabled=False):
        if is_embedding:
            rows = [stand_in(ids[None])[0] for ids in torch.arange(weight.shape[0], device=device).split(_BLOCK)]
            return torch.cat(rows), None
        size = weight.shape[0] if is_transposed else weight.shape[1]
        zero_O = stand_in(torch.zeros(1, 1, size, device=device))[0, 0]
        weight_OI = torch.empty(zero_O.shape[0], size, device=device)
        for start in range(0, size, _BLOCK):
            eye = torch.zeros(1, min(_BLOCK, size - start), size, device=device)
            eye[0].diagonal(start).fill_(1.0)
            weight_OI[:, start : start + eye.shape[1]] = (stand_in(eye)[0] - zero_O).T
        x_TI = torch.randn(3, size, generator=torch.Generator().manual_seed(0)).to(device)
        there_TO, here_TO = stand_in(x_TI[None])[0], x_TI @ weight_OI.T + zero_O
    if not float((there_TO - here_TO).abs().max()) <= _AFFINE * max(1.0, float(there_TO.abs().max())):
        raise AdapterRejectedError(
            f"making full weights: {path} is not affine in its input under this adapter, so no weight computes the "
            "same. Use LoraConfig(target_modules='all-linear').",
            module=path,
        )
    if bias is None and bool(zero_O.any()):
        raise AdapterRejectedError(
            f"making full weights: the adapter adds a bias at {path}, whose layer has no bias. Leave it out of "
            "target_modules.",
            module=path,
        )
    return weight_OI.T.contiguous() if is_transposed else weight_OI, None if bias is None else zero_O


def _of_float32(layer: Any) -> Any:
    """Have a copy of a wrapped layer forget what it has noted of a base that was 4-bit, or of another dtype."""
    if getattr(layer, "quantization_backend", None) is not None:
        layer.quantization_backend = None
    if type(layer).__module__ == "peft.tuners.hira.bnb":  # reads packed codes in its own forward pass
        from peft.tuners.hira.layer import Linear

        layer.__class__, layer.is_target_conv_1d_layer = Linear, False
    for part in layer.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            hooks.clear()  # by which ZeRO-3 would gather what is whole here
        if isinstance(vars(part).get("dtype"), torch.dtype):  # AdaMSS casts to it
            part.dtype = torch.float32
    return layer


def _tied_head(base: Any) -> str | None:
    """Name of the output head's weight where the config ties it to the embedding: it is not sent.

    Raises:
        AdapterRejectedError: the adapter has made the two different, which an engine that ties them cannot hold.
    """
    config = getattr(base, "config", None)
    if config is None or not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return None
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if head is None or embedding is None:
        return None
    names = {id(module): name for name, module in base.named_modules(remove_duplicate=False)}
    where = names[id(head)]
    if _is_wrapped(head) or _is_wrapped(embedding) or head.weight is not embedding.weight:
        (ours, of_ours), (theirs, of_theirs) = (
            next(found[2:] for found in _weights(m, names[id(m)]) if found[0].endswith("weight"))
            for m in (head, embedding)
        )
        with gathered([*of_ours, *of_theirs], "gathering head and embedding"):
            is_equal = torch.equal(ours(torch.float32).float(), theirs(torch.float32).float())
        if not is_equal:
            raise AdapterRejectedError(
                f"making full weights: the model ties {where} to {names[id(embedding)]} (tie_word_embeddings), and the "
                "adapter has made them different; an engine that ties them too cannot hold both. Adapt both in the "
                "same way (PEFT: ensure_weight_tying), or leave them out.",
                module=where,
            )
    return _join(where, "weight")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
