"""`judge_adapter`: is this adapter plain LoRA, something that only full weights can carry, or neither?

A table of small rules, one function each, read in order over the *live* PEFT model (its config alone does not tell
what `set_scale` or a variant did to it). Every rule that speaks adds a reason; the gravest kind wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from qlora_rl.contracts import LORA_RANK_CLASSES, EngineCapabilities

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Kind = Literal["adapter", "full_weights", "refuse"]
_GRAVITY: dict[Kind, int] = {"adapter": 0, "full_weights": 1, "refuse": 2}

# Methods of PEFT that change activations or prompts, not weights: no engine can hold them as a delta.
_NO_WEIGHT_CHANGE = {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT"}
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")


@dataclass(frozen=True)
class Verdict:
    """What an adapter is fit for.

    Attributes:
        kind: "adapter" (plain LoRA: it can travel alone), "full_weights" (only dequantised full weights can carry it)
            or "refuse".
        reasons: one sentence per rule that spoke, each with the way out; empty for plain LoRA.
        rank: largest R of its modules (0 where there is none).
    """

    kind: Kind
    reasons: tuple[str, ...]
    rank: int = 0

    def __bool__(self) -> bool:
        return self.kind == "adapter"


Finding = tuple[Kind, str]
Rule = Callable[[Any, str, EngineCapabilities | None], Iterator[Finding]]


def lora_layers(model: Any, adapter: str) -> Iterator[tuple[str, LoraLayer]]:
    """Name (as the bare base calls it) and live layer of every module that carries `adapter` as LoRA."""
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer) and (adapter in module.lora_A or adapter in module.lora_embedding_A):
            yield name, module


def active_adapter(model: Any) -> str:
    """Name of the adapter that is trained (TRL adds a frozen copy named "ref", which is not)."""
    active = model.active_adapters
    return active[0] if active else "default"


def judge_adapter(model: Any, capabilities: EngineCapabilities | None = None) -> Verdict:
    """Judge the active adapter of a live PeftModel.

    Args:
        model: a PeftModel.
        capabilities: of the engine that is to serve it; by default the limits of vLLM.

    Returns:
        The verdict; pure, nothing is changed or moved.
    """
    if not hasattr(model, "peft_config"):
        return Verdict("refuse", ("The model carries no adapter. Pass peft_config=LoraConfig(...), or a PeftModel.",))
    adapter = active_adapter(model)
    findings = [finding for rule in RULES for finding in rule(model, adapter, capabilities)]
    kind: Kind = max((k for k, _ in findings), key=_GRAVITY.__getitem__, default="adapter")
    rank = max((ranks_of(layer, adapter) for _, layer in lora_layers(model, adapter)), default=0)
    return Verdict(kind, tuple(dict.fromkeys(reason for _, reason in findings)), rank)


def ranks_of(layer: LoraLayer, adapter: str) -> int:
    """R of one live layer."""
    return int(layer.r[adapter])


def _is_lora(model: Any, adapter: str, _: EngineCapabilities | None) -> Iterator[Finding]:
    kind = str(getattr(model.peft_config[adapter].peft_type, "value", model.peft_config[adapter].peft_type))
    if kind == "LORA":
        return
    if kind in _NO_WEIGHT_CHANGE:
        yield (
            "refuse",
            f"{kind} is no change of weights; no sampler can load it. Use LoraConfig(target_modules='all-linear').",
        )
    else:
        yield (
            "full_weights",
            f"The adapter is {kind}, not LoRA; only full weights can carry it. Use LoraConfig, or sync='weights' on a dense "
            "engine.",
        )


def _is_single(model: Any, adapter: str, _: EngineCapabilities | None) -> Iterator[Finding]:
    active = [name for name in model.active_adapters if name != "ref"]
    if len(active) > 1:
        yield (
            "full_weights",
            f"Several adapters are active ({', '.join(active)}). Activate one: model.set_adapter({adapter!r}).",
        )


def _is_on(model: Any, adapter: str, _: EngineCapabilities | None) -> Iterator[Finding]:
    for name, layer in lora_layers(model, adapter):
        if layer.merged:
            yield (
                "refuse",
                f"The adapter is merged into the base at {name}; the base is changed. Call model.unmerge_adapter().",
            )
            return
        if layer.disable_adapters:
            yield "refuse", f"The adapter is disabled at {name}. Leave model.disable_adapter() first."
            return


def _has_modules(model: Any, adapter: str, _: EngineCapabilities | None) -> Iterator[Finding]:
    if str(model.peft_config[adapter].peft_type).endswith("LORA") and not any(lora_layers(model, adapter)):
        yield "refuse", "The adapter reaches no linear module. Set target_modules='all-linear'."


def _rank_fits(model: Any, adapter: str, capabilities: EngineCapabilities | None) -> Iterator[Finding]:
    limit = capabilities.max_lora_rank if capabilities and capabilities.takes_adapters else LORA_RANK_CLASSES[-1]
    name, rank = max(
        ((name, ranks_of(layer, adapter)) for name, layer in lora_layers(model, adapter)),
        key=lambda pair: pair[1],
        default=("", 0),
    )
    if rank > limit:
        yield (
            "full_weights",
            f"rank={rank} > {limit} at {name}. Lower r; for reinforcement learning 8 to 32 is usually enough.",
        )


def _is_plain(model: Any, adapter: str, _: EngineCapabilities | None) -> Iterator[Finding]:
    config = model.peft_config[adapter]
    if getattr(config, "alora_invocation_tokens", None):
        yield (
            "refuse",
            "aLoRA depends on the input; no sampler can load it as a weight delta. Leave alora_invocation_tokens out.",
        )
    for name, layer in lora_layers(model, adapter):
        variant = layer.lora_variant.get(adapter)
        if variant is not None or layer.use_dora.get(adapter):
            title = type(variant).__name__ if variant is not None else "DoRA"
            title = "DoRA" if title.startswith(("Dora", "DoRA")) else title
            yield (
                "full_weights",
                f"{title} is more than B @ A (first at {name}); vLLM cannot serve it as LoRA. Switch the variant off (such as "
                "use_dora=False), or use sync='weights' on a dense engine.",
            )
            return


def _is_linear(model: Any, adapter: str, _: EngineCapabilities | None) -> Iterator[Finding]:
    for name, layer in lora_layers(model, adapter):
        base = layer.get_base_layer()
        if adapter in layer.lora_embedding_A or isinstance(base, torch.nn.Embedding):
            yield (
                "full_weights",
                f"{name} is an embedding; adapters on embeddings do not travel. Leave it out of target_modules.",
            )
        elif not isinstance(base, torch.nn.Linear):
            yield "full_weights", f"{name} is a {type(base).__name__}, not a linear. Leave it out of target_modules."
        elif base is model.get_output_embeddings() or name.split(".")[-1] == "lm_head":
            yield (
                "full_weights",
                f"{name} is the output head, whose adapter vLLM leaves out of prompt logprobs (vllm#51594). Leave it out of "
                "target_modules.",
            )


def _has_no_bias(model: Any, adapter: str, _: EngineCapabilities | None) -> Iterator[Finding]:
    config = model.peft_config[adapter]
    if getattr(config, "bias", "none") != "none":
        yield "full_weights", f"bias={config.bias!r} trains biases of the base; vLLM serves none. Set bias='none'."
    if getattr(config, "lora_bias", False):
        yield "full_weights", "lora_bias=True adds a bias to B, which vLLM drops without a word. Set lora_bias=False."


def _trains_nothing_else(model: Any, adapter: str, _: EngineCapabilities | None) -> Iterator[Finding]:
    config = model.peft_config[adapter]
    for field, way_out in {
        "modules_to_save": "Leave modules_to_save out, or use sync='weights' on a dense engine.",
        "target_parameters": "Use target_modules instead.",
        "trainable_token_indices": "Leave trainable_token_indices out.",
        "layer_replication": "Leave layer_replication out.",
    }.items():
        value = getattr(config, field, None)
        if value:
            kind: Kind = "refuse" if field == "layer_replication" else "full_weights"
            yield kind, f"{field}={value!r} trains more than LoRA matrices, which an adapter cannot carry. {way_out}"


def _keeps_the_base(model: Any, adapter: str, _: EngineCapabilities | None) -> Iterator[Finding]:
    init = getattr(model.peft_config[adapter], "init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        yield (
            "full_weights",
            f"init_lora_weights={init!r} changes the base when it starts, so the engine's base is another. Use "
            "init_lora_weights=True, or convert the adapter (PEFT: path_initial_model_for_weight_conversion).",
        )


def _is_finite(model: Any, adapter: str, _: EngineCapabilities | None) -> Iterator[Finding]:
    for name, layer in lora_layers(model, adapter):
        if adapter not in layer.lora_A:
            continue
        for part in (layer.lora_A[adapter], layer.lora_B[adapter]):
            if isinstance(part, torch.nn.Module) and not bool(torch.isfinite(part.weight).all()):
                yield (
                    "refuse",
                    f"The adapter holds NaN or infinite values at {name}. Go back to the last checkpoint with a lower learning "
                    "rate.",
                )
                return


RULES: tuple[Rule, ...] = (
    _is_lora,
    _is_single,
    _is_on,
    _has_modules,
    _rank_fits,
    _is_plain,
    _is_linear,
    _has_no_bias,
    _trains_nothing_else,
    _keeps_the_base,
    _is_finite,
)
