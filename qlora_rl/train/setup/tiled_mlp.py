"""`tile_layers`: MLPs and norms of the layers work on a tile of tokens at a time, forward and backward.

An MLP keeps several tensors of its inner width for every token, and a norm two of the hidden size in float32: most of
what a layer computes under gradient checkpointing. Tokens do not depend on each other there, so a few thousand at a
time do. In the backward pass each tile is computed again before its gradients are, which for a norm is little against
the products of a layer. The layer is computed again by checkpointing as far as the input of its MLP, where that is the
last thing that it saves. Nobody reads what an MLP gives when it is computed again, so the product of its last linear is
left out then: a third of its weights, and one product fewer than without tiles. Where a norm follows the MLP (Gemma),
its forward is computed once more. Weights are decoded once for each tile.

N tokens, H hidden size.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from qlora_rl.base.model_classes import drops
from qlora_rl.base.quant import require_bitsandbytes
from qlora_rl.memory.lines import MLP_LINEARS, TILE
from qlora_rl.train.setup.linears import Coded, coded_weight, decoded, has_kernel

logger = logging.getLogger(__name__)


def tile_layers(model: Any, tokens: int | None = None) -> str:
    """Have MLPs and norms of a model work in tiles where they get more tokens than that.

    With gradients it is done while checkpointing is on. The gradients of an MLP's adapter are sums over tokens, which
    are now added up tile by tile in float32; nothing else is split.

    Args:
        model: with plain LoRA on its MLPs, or none.
        tokens: of a tile; by default `estimate.lines.TILE` of its device.

    Returns:
        Why the MLPs work on all tokens at once; empty where they do not.
    """
    size = tokens or TILE["cpu" if next(model.parameters()).device.type == "cpu" else "cuda"]
    hidden = model.config.get_text_config().hidden_size
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    mlps = {
        mlp: layer
        for layer in layers
        for mlp in layer.children()
        if dict(mlp.named_children()).keys() >= set(MLP_LINEARS)
    }
    # The whole model comes first, whose own is the norm behind the last layer.
    norms = {norm: layer for layer in layers for norm in layer.modules() if _is_norm(norm)}
    # An earlier trainer of this model may have left its own, with which nothing below may be true.
    for module in model.modules():  # also of norms that are trained now
        if isinstance(tiled := vars(module).get("forward"), _Tiled):
            tiled.take_off()
    reason = why_whole(list(mlps))
    if reason:
        logger.info("the MLPs work on all tokens at once: %s", reason)
    else:
        for mlp, layer in mlps.items():
            mlp.forward = _Tiled(layer, mlp, size * hidden)
    for norm, layer in norms.items():
        norm.forward = _Tiled(layer, norm, size * hidden)
    return reason


def _is_norm(module: torch.nn.Module) -> bool:
    """Over the last dimension, with at most one weight for each of its numbers, and not trained."""
    name = type(module).__name__.lower()
    return (
        ("rmsnorm" in name or "layernorm" in name)
        and getattr(module, "data_format", "channels_last") == "channels_last"
        and all(p.dim() == 1 and not p.requires_grad for p in module.parameters())
    )


def why_whole(mlps: Sequence[torch.nn.Module]) -> str:
    """Why these modules cannot work in tiles; empty where they can."""
    if not mlps:
        return "there is no module of gate_proj, up_proj and down_proj in a layer"
    parts = [part for mlp in mlps for part in mlp.modules()]
    if any(drops(part) for part in parts):
        return "dropout would be sampled again for each tile"
    if any(p.requires_grad and ".lora_" not in f".{name}" for mlp in mlps for name, p in mlp.named_parameters()):
        return "more than an adapter is trained there"
    if any(getattr(part, "lora_variant", None) for part in parts):
        return "their adapter is not plain LoRA"
    if any(hasattr(part, "active_adapters") and not hasattr(part, "lora_A") for part in parts):
        return "their adapter is not LoRA"
    return ""


class _Tiled:
    """The forward of one module.

    Args:
        layer: in which it is; says whether it is computed again in the backward pass.
        module: whose trained parameters get gradients.
        numbers: of a tile of its input. A norm over the heads has many rows for a token.
    """

    def __init__(self, layer: Any, module: Any, numbers: int) -> None:
        self._layer, self._module, self._whole, self._numbers = layer, module, module.forward, numbers
        self._last = getattr(module, MLP_LINEARS[-1], None)
        self._is_told = False

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tiled:
        """With a copy of the module alone, as PEFT makes it of what it trains, the layer stays the one that it is
        in."""
        new = object.__new__(type(self))
        memo[id(self)] = new
        new._layer, new._numbers, new._is_told = memo.get(id(self._layer), self._layer), self._numbers, self._is_told
        new._module, new._whole = copy.deepcopy(self._module, memo), copy.deepcopy(self._whole, memo)
        new._last = copy.deepcopy(self._last, memo)
        return new

    def __call__(self, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        """x [..., H]; the same shape comes back. With anything else given, which may be of all tokens, the module stays
        whole."""
        if more or named or x.shape[:-1].numel() <= self.rows(x) or self._is_watched():
            return self._whole(x, *more, **named)
        trained = [p for p in self._module.parameters() if p.requires_grad]
        if not (torch.is_grad_enabled() and (x.requires_grad or trained)):
            return self.run(x, _autocast(x.device.type))
        if not (self._layer.gradient_checkpointing and self._layer.training):
            return self._whole(x)
        saved = _Save.apply(torch.empty(0, requires_grad=True), x)
        return _Tiles.apply(self, [saved], x, *trained)  # in a list: kept as it is, and no input of the function

    def _is_watched(self) -> bool:
        """A module within has hooks, which would be called for each tile, and with what nobody is to read."""
        watched = [name for name, part in self._module.named_modules() if name and _has_hooks(part)]
        if watched and not self._is_told:
            self._is_told = True
            logger.info("%s works on all tokens at once: %s has hooks", type(self._module).__name__, watched[0])
        return bool(watched)

    def take_off(self) -> None:
        """Give the module back the forward that it had."""
        if getattr(self._whole, "__func__", None) is type(self._module).forward:
            del self._module.forward
        else:
            self._module.forward = self._whole

    def rows(self, x: torch.Tensor) -> int:
        """Of a tile of x [..., H]."""
        return max(1, self._numbers // x.shape[-1])

    def split(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """x [..., H] as [1, n, H] each."""
        return x.reshape(1, -1, x.shape[-1]).split(self.rows(x), dim=1)

    def run(self, x: torch.Tensor, autocast: Callable[[], AbstractContextManager[Any]]) -> torch.Tensor:
        """All tiles, forward only."""
        out: torch.Tensor | None = None
        start = 0
        for tile in self.split(x):
            part = self.whole(tile, autocast)
            if out is None:
                out = part.new_empty(1, x.shape[:-1].numel(), part.shape[-1])
            out[:, start : start + tile.shape[1]] = part
            start += tile.shape[1]
        assert out is not None
        return out.view(*x.shape[:-1], -1)

    def whole(self, tile: torch.Tensor, autocast: Callable[[], AbstractContextManager[Any]]) -> torch.Tensor:
        """The module's own forward."""
        with autocast():
            return self._whole(tile)

    def again(self, tile: torch.Tensor, autocast: Callable[[], AbstractContextManager[Any]]) -> torch.Tensor:
        """As `whole`, with the same gradients; the numbers are not to be read, where the last linear could be left
        out."""
        linear = getattr(self._last, "base_layer", self._last)
        if linear is None or not _can_be_unread(linear):
            return self.whole(tile, autocast)
        given: list[torch.Tensor] = []
        handle = self._last.register_forward_hook(lambda module, args, out: given.append(out))
        own = vars(linear).get("forward")
        linear.forward = functools.partial(_unread, linear, coded_weight(linear))
        try:
            out = self.whole(tile, autocast)
        finally:
            handle.remove()
            if own is None:
                del linear.forward
            else:
                linear.forward = own
        # An MLP that does more with what its last linear gives may save it.
        return out if given and out is given[-1] else self.whole(tile, autocast)


class _Save(torch.autograd.Function):
    """Saves a tensor ahead of the function that needs it: checkpointing stops where the last tensor is saved, before
    that function runs.

    What it returns has to be kept as long: torch 2.11 frees what a node has saved with the last tensor that the node
    belongs to.
    """

    @staticmethod
    def forward(ctx: Any, connected: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return connected.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiled: _Tiled, saved: Any, x: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        ctx.tiled, ctx.saved, ctx.trained, ctx.autocast = tiled, saved, trained, _autocast(x.device.type)
        return tiled.run(x, ctx.autocast)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved[0].grad_fn.saved_tensors
        needs_x = ctx.needs_input_grad[2]
        gradient_x = (
            torch.empty(1, x.shape[:-1].numel(), x.shape[-1], dtype=x.dtype, device=x.device) if needs_x else None
        )
        sums: list[torch.Tensor | None] = [None] * len(ctx.trained)
        start = 0
        for tile, gradient in zip(ctx.tiled.split(x), ctx.tiled.split(gradients[0]), strict=True):
            tile = tile.detach().requires_grad_(needs_x)
            with torch.enable_grad():
                out = ctx.tiled.again(tile, ctx.autocast)
            wanted = [*([tile] if needs_x else []), *ctx.trained]
            with _without_hooks(ctx.trained):  # they are called with the sum of all tiles
                found = list(torch.autograd.grad(out, wanted, gradient, allow_unused=True))
            del out
            if gradient_x is not None:
                gradient_x[:, start : start + tile.shape[1]] = found.pop(0)
            start += tile.shape[1]
            for i, part in enumerate(found):
                if part is not None:
                    sums[i] = part.float() if (before := sums[i]) is None else before.add_(part)
            del found
        given = [each if each is None else each.to(p.dtype) for each, p in zip(sums, ctx.trained, strict=True)]
        return None, None, None if gradient_x is None else gradient_x.view_as(x), *given


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


@contextmanager
def _without_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """While it lasts gradients of these are computed without calling their hooks (`register_hook`)."""
    held = [(parameter, parameter._backward_hooks) for parameter in parameters if parameter._backward_hooks]
    for parameter, _ in held:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in held:
            parameter._backward_hooks = hooks


def _can_be_unread(linear: Any) -> bool:
    """A frozen linear whose backward pass is a product with its weight, and whose forward nobody else has replaced."""
    return (
        type(linear) in (torch.nn.Linear, require_bitsandbytes().nn.Linear4bit)
        and ("forward" not in vars(linear) or has_kernel(linear))
        and not any(p.requires_grad for p in linear.parameters())
    )


def _unread(linear: Any, coded: Coded | None, x: torch.Tensor) -> torch.Tensor:
    """A frozen linear's place in the graph without its product: x [..., I] gives zeros [..., O], in the dtype of its
    output."""
    dtype, state = x.dtype, None
    if type(linear) is not torch.nn.Linear:
        # Of parameters that FSDP makes bitsandbytes keeps it in the module.
        state = getattr(linear.weight, "quant_state", None) or linear.quant_state
    elif torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    return _Unread.apply(x, linear.weight, state, coded, linear.out_features, dtype)


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, state: Any, coded: Coded | None, features: int, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.weight, ctx.state, ctx.coded = weight, state, coded
        return x.new_zeros(*x.shape[:-1], features, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        (gradient,) = gradients
        if ctx.coded is not None:
            return ctx.coded.multiply_back(gradient), None, None, None, None, None
        weight = ctx.weight if ctx.state is None else decoded(ctx.weight, ctx.state)
        return gradient @ weight.to(gradient.dtype), None, None, None, None, None


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Autocast as it is now, for later. Without its cache: what is cast without gradients would be used with them."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    return lambda: torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
