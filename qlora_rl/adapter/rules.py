"""The rules of `judge_adapter`, one function each: what in an adapter is not plain LoRA, and what to do instead.

They read the *live* PEFT model: its config alone does not tell what `set_scale` or a variant did to it. `RULES` is
their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from qlora_rl.adapter import methods
from qlora_rl.adapter.inspected import (
    InspectedAdapter,
    is_lora_layer,
    is_shortened,
    method_of,
    not_finite,
    own_name,
    ranks_of,
)
from qlora_rl.base.experts import ATTENTION, linear_experts_in, mixtures_in
from qlora_rl.base.model_classes import LANGUAGE_LINEARS, vision_parts
from qlora_rl.contracts import LORA_RANK_CLASSES
from qlora_rl.sharded_tensors import shape_of

Kind = Literal["adapter", "full_weights", "reject"]
Finding = tuple[Kind, str]
Rule = Callable[[InspectedAdapter], Iterator[Finding]]


_OR_FULL = ", or use sync='weights' on a dense engine"


def judge_method(name: str, or_full: str = _OR_FULL) -> Iterator[Finding]:
    """The verdict that follows from PEFT's name of a method alone.

    Args:
        name: as PEFT spells it, such as "LOHA".
        or_full: the advice to send full weights; empty where no engine takes those of the model.
    """
    if name == "LORA":
        return
    if name in methods.CHANGES_SOMETHING_ELSE:
        yield (
            "reject",
            f"{name} {methods.CHANGES_SOMETHING_ELSE[name]}: it changes no weights, so no sampler can load it. Use "
            "LoraConfig(target_modules='all-linear').",
        )
    elif name in methods.CHANGES_WEIGHTS:
        yield (
            "full_weights",
            f"The adapter is {name}, not LoRA: it {methods.CHANGES_WEIGHTS[name]}; only full weights can carry it. Use "
            f"LoraConfig{or_full}.",
        )
    else:
        yield "reject", f"{name} is an unknown method. Use LoraConfig(target_modules='all-linear')."


def _or_full(inspected: InspectedAdapter) -> str:
    """The advice to send full weights, where vLLM can be given those of the model."""
    return "" if mixtures_in(inspected.base) else _OR_FULL


def _is_known(inspected: InspectedAdapter) -> Iterator[Finding]:
    # Of all adapters: X-LoRA's own is one of several.
    for config in inspected.model.peft_config.values():
        yield from judge_method(method_of(config), _or_full(inspected))


def _is_single(inspected: InspectedAdapter) -> Iterator[Finding]:
    active = inspected.model.active_adapters
    if len(active) > 1:
        yield (
            "full_weights",
            f"Several adapters are active ({', '.join(active)}). Activate one: "
            f"model.set_adapter({inspected.adapter!r}).",
        )


def _is_alone(inspected: InspectedAdapter) -> Iterator[Finding]:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    for name, module in inspected.base.named_modules():
        if isinstance(module, PeftModel | BaseTuner):
            yield (
                "reject",
                f"The base contains a PeftModel (at {name or 'its root'}). Call get_peft_model once, on the bare base.",
            )
            return
    for name, layer in inspected.tuned.items():
        kind = type(layer)
        if kind.__name__ == "TrainableTokensLayer" or inspected.method != "LORA" or is_lora_layer(layer):
            continue
        yield (
            "reject",
            f"{name} carries a {kind.__name__} of another method as well. Merge or unload that one, then prepare the "
            "base.",
        )
        return


def _is_on(inspected: InspectedAdapter) -> Iterator[Finding]:
    wanted = set(inspected.model.active_adapters)
    if not wanted and inspected.tuned:
        yield "reject", f"No adapter is active. Call model.set_adapter({inspected.adapter!r})."
        return
    for name, layer in inspected.tuned.items():
        if layer.merged:
            way = "Load the base and the adapter again: unmerge_adapter() does not restore the same bits"
            yield "reject", f"The adapter is merged into the base at {name}; the base is changed. {way}."
            return
        if layer.disable_adapters:
            yield "reject", f"The adapter is disabled at {name}. Leave model.disable_adapter() first."
            return
        here = set(layer._get_available_adapters())
        if set(layer.active_adapters) & here != wanted & here:
            yield (
                "reject",
                f"The active adapters at {name} differ from those of the rest of the model ({layer.active_adapters}). "
                f"Call model.set_adapter({inspected.adapter!r}).",
            )
            return


def _is_hooked(module: Any) -> bool:
    """More than its own forward runs in it; hooks by which ZeRO-3 gathers its weights, and frees them, compute
    nothing."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    is_replaced = "forward" in vars(module) and not is_shortened(module)
    return is_replaced or any(not str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in hooks)


def _is_untouched(inspected: InspectedAdapter) -> Iterator[Finding]:
    """Nothing that changes what a layer computes, beyond what PEFT has put there."""
    for name, layer in inspected.layers.items():
        if inspected.adapter not in layer.lora_A:
            continue
        a, b = layer.lora_A[inspected.adapter], layer.lora_B[inspected.adapter]
        dropout = (
            layer.lora_dropout[inspected.adapter] if inspected.adapter in layer.lora_dropout else torch.nn.Identity()
        )
        what = ""
        if any(_is_hooked(module) for module in (layer, a, b)):
            what = "has a hook or another forward"
        elif not isinstance(dropout, torch.nn.Identity | torch.nn.Dropout):
            what = f"has a {type(dropout).__name__} where dropout should be"
        elif layer.lora_variant.get(inspected.adapter) is None and not (
            isinstance(a, torch.nn.Linear) and isinstance(b, torch.nn.Linear)
        ):
            what = f"has a {type(a).__name__} and a {type(b).__name__} for A and B"
        elif any(not t.is_floating_point() or t.element_size() < 2 for t in (*a.parameters(), *b.parameters())):
            what = f"has matrices of {a.weight.dtype} and {b.weight.dtype}"
        if what:
            yield "reject", f"{name} {what}, which may be more than B @ A. Remove it."
            return


def _has_modules(inspected: InspectedAdapter) -> Iterator[Finding]:
    if inspected.method == "LORA" and not inspected.layers:
        yield "reject", "The adapter reaches no linear module. Set target_modules='all-linear'."


def _is_on_the_language_model(inspected: InspectedAdapter) -> Iterator[Finding]:
    """vLLM serves an adapter of a vision tower as the bare tower: the same tokens and logprobs, no error."""
    parts = tuple(f"{part}." for part in vision_parts(inspected.base))
    there = [name for name in inspected.reached if parts and name.startswith(parts)]
    if there:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        yield (
            "full_weights",
            f"{there[0]}{more} belong to the vision tower, on which the engine would leave the adapter out without an "
            f"error. Adapt the language model alone: target_modules=r'{LANGUAGE_LINEARS}'.",
        )


def _is_off_the_experts(inspected: InspectedAdapter) -> Iterator[Finding]:
    """Fused experts and the router of a mixture: no linears in transformers, and in the engine on a kernel that takes
    no adapter.

    Experts that are linears, those of a base with 4-bit experts, are adapted one by one like any other.
    """
    mixtures = tuple(f"{name}." for name in mixtures_in(inspected.base))
    linears = tuple(f"{own_name(name)}." for name in linear_experts_in(inspected.base))
    reached = [name for name in inspected.reached if not (linears and name.startswith(linears))]
    reached = [name.removesuffix(".base_layer") for name in (*reached, *inspected.replaced)]
    there = list(dict.fromkeys(name for name in reached if name.startswith(mixtures)))
    if mixtures and not there and (asked := getattr(inspected.config, "target_parameters", None)):
        # PEFT 0.21 rewrites gate_proj and its like so where experts are fused, and does not reach the MLP of a layer
        # without experts.
        there = [f"target_parameters={sorted(asked)}"]
    if not there:
        return
    more = f" and {len(there) - 1} more" if len(there) > 1 else ""
    on_experts = ", or its linears in a base with 4-bit experts (prepare_base(..., quantize_experts=True))"
    yield (
        "full_weights",
        f"{there[0]}{more}: fused experts or router of a mixture, whose adapters the engine does not apply. Adapt the "
        f"attention alone: target_modules={list(ATTENTION)}{'' if linears else on_experts}.",
    )


def _rank_fits(inspected: InspectedAdapter) -> Iterator[Finding]:
    asked = inspected.capabilities
    limit = asked.max_lora_rank if asked and asked.takes_adapters else LORA_RANK_CLASSES[-1]
    ranks = {name: ranks_of(layer, inspected.adapter) for name, layer in inspected.layers.items()}
    name = max(ranks, key=ranks.__getitem__, default="")
    if ranks.get(name, 0) > limit:
        yield (
            "full_weights",
            f"rank={ranks[name]} > {limit} at {name}. Lower r; for reinforcement learning 8 to 32 is usually enough.",
        )


def _is_plain(inspected: InspectedAdapter) -> Iterator[Finding]:
    spoken = set()
    for name, layer in inspected.layers.items():
        variant = layer.lora_variant.get(inspected.adapter)
        title = type(variant).__name__ if variant is not None else ""
        is_peft = type(variant).__module__ == "peft.tuners.lora.variants"
        if title in spoken or (variant is None and not layer.use_dora.get(inspected.adapter)):
            continue
        spoken.add(title)
        if is_peft and title in methods.PLAIN_VARIANTS:
            continue
        if is_peft and title in methods.INPUT_VARIANTS:
            yield (
                "reject",
                f"{methods.INPUT_VARIANTS[title]} (first at {name}): it is no fixed change of weights, so no sampler "
                "can load it. Leave it out of LoraConfig.",
            )
        elif variant is None or (is_peft and title in methods.WEIGHT_VARIANTS):
            what = methods.WEIGHT_VARIANTS[title or "DoraLinearVariant"]
            yield (
                "full_weights",
                f"{what}: more than B @ A (first at {name}); vLLM cannot serve it as LoRA. Switch the variant off "
                f"(such as use_dora=False){_or_full(inspected)}.",
            )
        else:
            yield (
                "reject",
                f"{title} at {name} is an unknown variant of LoRA; it may be more than B @ A. Leave it out of "
                "LoraConfig.",
            )


def _is_linear(inspected: InspectedAdapter) -> Iterator[Finding]:
    head = inspected.base.get_output_embeddings() if hasattr(inspected.base, "get_output_embeddings") else None
    for name, layer in inspected.layers.items():
        base = layer.get_base_layer()
        kind = type(layer)
        if inspected.adapter in layer.lora_embedding_A or isinstance(base, torch.nn.Embedding):
            yield (
                "full_weights",
                f"{name} is an embedding; adapters on embeddings are not synced. Leave it out of target_modules.",
            )
        elif kind.__name__ == "ParamWrapper":
            continue  # target_parameters, which has a rule of its own
        elif not isinstance(base, torch.nn.Linear):
            yield "full_weights", f"{name} is a {type(base).__name__}, not a linear. Leave it out of target_modules."
        elif head in (layer, base) or name.split(".")[-1] == "lm_head":
            yield (
                "full_weights",
                f"{name} is the output head, whose adapter vLLM leaves out of prompt logprobs (vllm#51594). Leave it "
                "out of target_modules.",
            )
        elif not kind.__module__.startswith("peft.tuners.lora."):
            yield (
                "reject",
                f"{name} is a {kind.__module__}.{kind.__name__}, an unknown LoRA layer; it may be more than "
                "B @ A. Use PEFT's own.",
            )


def _has_no_bias(inspected: InspectedAdapter) -> Iterator[Finding]:
    bias = getattr(inspected.config, "bias", "none")
    if bias != "none":
        yield "full_weights", f"bias={bias!r} trains biases of the base; vLLM serves none. Set bias='none'."
    biased = {
        name: layer
        for name, layer in inspected.layers.items()
        if inspected.adapter in layer.lora_B and getattr(layer.lora_B[inspected.adapter], "bias", None) is not None
    }
    homeless = [name for name, layer in biased.items() if layer.get_base_layer().bias is None]
    if inspected.method == "BEFT":
        homeless = [n for n, layer in inspected.tuned.items() if getattr(layer.get_base_layer(), "bias", None) is None]
    if homeless:
        what = "BEFT" if inspected.method == "BEFT" else "lora_bias=True"
        yield (
            "reject",
            f"{what} trains a bias at {homeless[0]}, whose layer has no bias ({len(homeless)} such layers). "
            f"{'Leave them out of target_modules' if inspected.method == 'BEFT' else 'Set lora_bias=False'}.",
        )
    elif biased:
        yield "full_weights", "lora_bias=True adds a bias to B, which vLLM drops silently. Set lora_bias=False."


def _trains_nothing_else(inspected: InspectedAdapter) -> Iterator[Finding]:
    for field, way_out in {
        "modules_to_save": f"Leave modules_to_save out{_or_full(inspected)}.",
        "target_parameters": "Use target_modules instead.",
        "trainable_token_indices": "Leave trainable_token_indices out.",
        "layer_replication": "Leave layer_replication out.",
    }.items():
        value = getattr(inspected.config, field, None)
        if value:
            kind: Kind = "reject" if field == "layer_replication" else "full_weights"
            yield kind, f"{field}={value!r} trains more than LoRA matrices, which an adapter cannot carry. {way_out}"


def _replaces_nothing(inspected: InspectedAdapter) -> Iterator[Finding]:
    """The rule before, for the live model: its config may have been edited."""
    if inspected.replaced and not any(
        getattr(inspected.config, field, None) for field in ("modules_to_save", "trainable_token_indices")
    ):
        yield (
            "full_weights",
            f"PEFT trains a copy of {next(iter(inspected.replaced))}, which an adapter cannot carry. Make the adapter "
            "without "
            "modules_to_save and trainable_token_indices.",
        )


def _trains_no_base(inspected: InspectedAdapter) -> Iterator[Finding]:
    """Weights of the base that were unfrozen by hand; `bias` and `modules_to_save` have rules of their own."""
    if getattr(inspected.config, "bias", "none") != "none" or inspected.method != "LORA":
        return
    free = [n for n, p in inspected.base.named_parameters() if p.requires_grad and id(p) not in inspected.added]
    if free:
        yield (
            "full_weights",
            f"{free[0]} of the base is trained as well ({len(free)} such weights), which an adapter cannot carry. Call "
            "requires_grad_(False) on them.",
        )


def _keeps_the_tie(inspected: InspectedAdapter) -> Iterator[Finding]:
    """An engine that ties head and embedding holds one weight: what trains one of them must be what trains the
    other."""
    base = inspected.base
    config = getattr(base, "config", None)
    if config is None or not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return
    sides = [base.get_output_embeddings(), base.get_input_embeddings()]
    if None in sides:
        return
    # By storage: PEFT's tied LoRA has the transposed view of one parameter on the other side.
    trained = [{p.untyped_storage()._cdata for p in m.parameters() if p.requires_grad} for m in sides]
    if trained[0] != trained[1]:
        yield (
            "reject",
            "The model ties its output head to the embedding (tie_word_embeddings), and the adapter trains them apart; "
            "an engine that ties them too cannot hold both. Adapt both in the same way (PEFT: "
            "ensure_weight_tying=True), or leave them out.",
        )


def _keeps_the_vocabulary(inspected: InspectedAdapter) -> Iterator[Finding]:
    embedding = inspected.base.get_input_embeddings() if hasattr(inspected.base, "get_input_embeddings") else None
    before, now = getattr(inspected.base, "qlora_vocabulary", None), getattr(embedding, "weight", None)
    if before is not None and now is not None and shape_of(now)[0] != before:
        yield (
            "reject",
            f"The embedding has {shape_of(now)[0]} rows and the base {before}: tokens were added after it was "
            "prepared, and the engine has no rows for them. Resize the embedding of the original model, then prepare "
            "it.",
        )


def _keeps_the_base(inspected: InspectedAdapter) -> Iterator[Finding]:
    # Of all adapters: the base stays changed when another one is made active.
    for name, config in inspected.model.peft_config.items():
        init = getattr(config, "init_lora_weights", True)
        if not isinstance(init, str) or init.lower() in methods.HARMLESS_INITS:
            continue
        if init.lower().startswith(methods.BASE_CHANGING_INITS):
            yield (
                "full_weights",
                f"init_lora_weights={init!r} (of adapter {name!r}) changes the base, so the adapter fits no other "
                "base. Start it with start_adapter, which leaves the base as it is, or convert it (PEFT: "
                "path_initial_model_for_weight_conversion).",
            )
        else:
            yield "reject", f"init_lora_weights={init!r} is an unknown initialisation. Use init_lora_weights=True."


def _is_finite(inspected: InspectedAdapter) -> Iterator[Finding]:
    where = not_finite(inspected)
    if where is not None:
        yield (
            "reject",
            f"The adapter holds NaN or infinite values at {where}. Go back to the last checkpoint with a lower "
            "learning rate.",
        )


RULES: tuple[Rule, ...] = (
    _is_known,
    _is_single,
    _is_alone,
    _is_on,
    _is_untouched,
    _has_modules,
    _is_on_the_language_model,
    _is_off_the_experts,
    _rank_fits,
    _is_plain,
    _is_linear,
    _has_no_bias,
    _trains_nothing_else,
    _replaces_nothing,
    _trains_no_base,
    _keeps_the_tie,
    _keeps_the_vocabulary,
    _keeps_the_base,
    _is_finite,
)
