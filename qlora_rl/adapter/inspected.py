"""`InspectedAdapter`: a PeftModel and its active adapter, walked once; what verdict, export and push look at."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from qlora_rl.contracts import EngineCapabilities
from qlora_rl.sharded_tensors import shape_of

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

# What torch puts around a module, and into its name.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
# PEFT's layers whose forward `forward` is, where they are plain.
_ADD_A_PRODUCT = ("Linear", "Linear4bit")


@dataclass(frozen=True)
class InspectedAdapter:
    """What the rules look at: a PeftModel and its active adapter, walked once.

    Attributes:
        model: the PeftModel.
        adapter: name of the adapter.
        capabilities: of the engine that is to serve it.
    """

    model: Any
    adapter: str
    capabilities: EngineCapabilities | None = None

    @cached_property
    def base(self) -> Any:
        """The model inside."""
        return self.model.get_base_model()

    @cached_property
    def config(self) -> Any:
        """The adapter's PeftConfig."""
        known = self.model.peft_config
        return (
            known[self.adapter] if self.adapter in known else next(iter(known.values()))
        )  # X-LoRA's experts have none

    @cached_property
    def method(self) -> str:
        """PEFT's name of the method."""
        return method_of(self.config)

    @cached_property
    def tuned(self) -> dict[str, Any]:
        """Every layer that PEFT has wrapped, by the base's own name; one that stands in two places has two names."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        modules = self.base.named_modules(remove_duplicate=False)
        return {own_name(name): module for name, module in modules if isinstance(module, BaseTunerLayer)}

    @cached_property
    def reached(self) -> dict[str, Any]:
        """Those of them that hold something of this adapter: a frozen one next to it may stand on others."""
        held = {name: _parts(layer).values() for name, layer in self.tuned.items()}
        own = {name for name, parts in held.items() if not parts or any(self.adapter in part for part in parts)}
        return {name: layer for name, layer in self.tuned.items() if name in own}

    @cached_property
    def layers(self) -> dict[str, LoraLayer]:
        """Those that carry the adapter as LoRA (AdaLoRA's are a kind of them, but another method)."""
        if self.method != "LORA":
            return {}
        return {
            name: layer
            for name, layer in self.tuned.items()
            if is_lora_layer(layer) and (self.adapter in layer.lora_A or self.adapter in layer.lora_embedding_A)
        }

    @cached_property
    def replaced(self) -> dict[str, Any]:
        """Modules of which PEFT trains a copy, or rows (`modules_to_save`, `trainable_token_indices`), where that is
        active."""
        from peft.utils.other import AuxiliaryTrainingWrapper

        modules = self.base.named_modules()
        found = {own_name(n): module for n, module in modules if isinstance(module, AuxiliaryTrainingWrapper)}
        return {name: module for name, module in found.items() if module.active_adapters}

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the adapter, whatever its method, by name; without those on the meta device."""
        found: dict[str, torch.Tensor] = {}
        for name, layer in (*self.tuned.items(), *self.replaced.items()):
            for part, held in _parts(layer).items():
                if self.adapter in held:
                    found |= {f"{name}.{part}{own}": tensor for own, tensor in _tensors(held[self.adapter])}
        return {name: tensor for name, tensor in found.items() if not tensor.is_meta}

    @cached_property
    def added(self) -> set[int]:
        """Identities of all parameters that PEFT has added, of every adapter."""
        held = (held for layer in (*self.tuned.values(), *self.replaced.values()) for held in _parts(layer).values())
        return {id(tensor) for each in held for key in each for _, tensor in _tensors(each[key])}


def own_name(name: str) -> str:
    """As the base calls it, without what wraps it (torch.compile, activation checkpointing, FSDP)."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _parts(layer: Any) -> dict[str, Any]:
    """The containers of a wrapped layer that hold something for each adapter."""
    names = (*getattr(layer, "adapter_layer_names", ()), *getattr(layer, "other_param_names", ()), "modules_to_save")
    held = {name: getattr(layer, name, None) for name in names}
    return {n: value for n, value in held.items() if isinstance(value, torch.nn.Module) and hasattr(value, "keys")}


def _tensors(held: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(held, torch.Tensor):
        yield "", held
    elif isinstance(held, torch.nn.Module):
        yield from ((f".{name}", tensor) for name, tensor in held.named_parameters())


def is_lora_layer(layer: Any) -> bool:
    """A layer of PEFT's LoRA (AdaLoRA's are such, too)."""
    from peft.tuners.lora import LoraLayer

    return isinstance(layer, LoraLayer)


def stop_dropout(model: Any, name: str) -> None:
    """The adapter `name` of a PeftModel, if it has one of that name, drops nothing in train mode either."""
    for module in model.modules():
        for kind, held in {**vars(module), **module._modules}.items():
            if kind.endswith("dropout") and isinstance(held, dict | torch.nn.ModuleDict) and name in held:
                held[name] = 0.0 if isinstance(held, dict) else torch.nn.Identity()


def copy_factors(model: Any, name: str, copy: str) -> None:
    """The adapter `copy` of a PeftModel, if it has one of that name, is multiplied by the factors of `name`, which
    `set_scale` may have changed: its config does not say so."""
    for module in model.modules():
        factors = getattr(module, "scaling", None)
        if isinstance(factors, dict) and name in factors and copy in factors:
            factors[copy] = factors[name]


def active_adapter(model: Any) -> str:
    """Name of the adapter that is trained (TRL adds a frozen copy named "ref", which is not)."""
    active = model.active_adapters
    return active[0] if active else "default"


def method_of(config: Any) -> str:
    """PEFT's name of the method of a config."""
    return str(getattr(config.peft_type, "value", config.peft_type))


class Factors(NamedTuple):
    """What an adapter adds to a layer: `scale` times B @ A.

    Attributes:
        a_RI, b_OR: as the layer holds them.
        rest: what would make it more than that: PEFT's variant of LoRA, a bias of B; each `None` where there is none.
    """

    a_RI: torch.Tensor
    b_OR: torch.Tensor
    scale: float
    rest: tuple[Any, ...]


def factors_of(layer: LoraLayer, adapter: str) -> Factors:
    """The one place where A and B of a layer come from, for export, pushes and full weights."""
    a, b = layer.lora_A[adapter], layer.lora_B[adapter]
    return Factors(a.weight, b.weight, float(layer.scaling[adapter]), (layer.lora_variant.get(adapter), b.bias))


def ranks_of(layer: LoraLayer, adapter: str) -> int:
    """R of one live layer: of its matrices, which may have been padded since they were made."""
    weight = getattr(layer.lora_A[adapter], "weight", None) if adapter in layer.lora_A else None
    return int(layer.r[adapter] if weight is None else shape_of(weight)[0])


@torch.no_grad()
def not_finite(inspected: InspectedAdapter) -> str | None:
    """Name of a tensor of the adapter that holds NaN or infinity, or of a layer with such a scale."""
    for name, layer in inspected.layers.items():
        if not abs(float(layer.scaling.get(inspected.adapter, 1.0))) < float("inf"):
            return name
    tensors = {
        n: t for n, t in inspected.tensors.items() if t.is_floating_point() and t.element_size() > 1 and t.numel()
    }
    if not tensors:
        return None
    # Smallest and largest carry NaN and infinity along, in a fraction of isfinite's time; one answer for all of them,
    # since on a GPU each question by itself would wait for the device.
    device = next(iter(tensors.values())).device
    flags = torch.stack([torch.isfinite(torch.stack(t.aminmax())).all().to(device) for t in tensors.values()])
    return None if bool(flags.all()) else list(tensors)[int(flags.logical_not().nonzero()[0])]


def is_bare(model: Any) -> bool:
    """No PeftModel: a name, a path, a base, or a transformers model."""
    return not (hasattr(model, "peft_config") and hasattr(model, "get_base_model"))


def bare_model(model: Any) -> Any:
    """The transformers model inside."""
    return model if is_bare(model) else model.get_base_model()


def shorten_lora(model: Any) -> None:
    """Under autocast plain LoRA on a linear makes fewer passes over its output, and keeps its input as it is; the bits
    are PEFT's.

    PEFT 0.21 copies what a 4-bit base gives, and scales the adapter's output, and in the backward pass its gradient,
    [N, O] each time; a power of two may scale the [N, R] between A and B instead. PEFT also lifts the input of 4-bit
    linears to the adapter's dtype, unless CUDA's autocast is on; autocast makes 16 bits of it again, and the backward
    pass would keep that copy. Dropout, which scales the lifted input, what is not plain LoRA, and a layer that somebody
    has given a forward stay as they are.
    """
    for module in model.modules():
        kind = type(module)
        if (
            kind.__module__.startswith("peft.tuners.lora.")
            and kind.__name__ in _ADD_A_PRODUCT
            and not vars(module).get("forward")
        ):
            module.forward = types.MethodType(forward, module)


def is_shortened(layer: Any) -> bool:
    """Its forward is what `shorten_lora` has put there, with nothing around it."""
    own = vars(layer).get("forward")
    return getattr(own, "__func__", None) is forward and own.__self__ is layer


def forward(self: Any, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """That of a shortened layer: x [..., I] gives [..., O]. It has this name because a method is pickled by name, and
    is PEFT's when it is loaded."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and x.dtype == torch.get_autocast_dtype(device)
    names = [name for name in self.active_adapters if name in self.lora_A]
    is_plain = len(names) == 1 and all(isinstance(each, torch.nn.Identity) for each in self.lora_dropout.values())
    if not (is_cast and is_plain) or args or named or self.disable_adapters or self.merged or self.lora_variant:
        return type(self).forward(self, x, *args, **named)
    result = self.base_layer(x)
    low, b, scale = self.lora_A[names[0]](x), self.lora_B[names[0]], self.scaling[names[0]]
    is_exact = x.dtype == torch.bfloat16 and b.bias is None and math.frexp(abs(scale))[0] == 0.5
    return result + (b(low * scale) if is_exact else b(low) * scale)
