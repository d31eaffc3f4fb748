"""How an adapter starts, where PEFT or TRL would change the base for it.

PiSSA, OLoRA and CorDA take B0 @ A0 out of the weight W and train (W - B0 @ A0) + B @ A. Here W stays as it is, bit for
bit, and B @ A - B0 @ A0 is plain LoRA of twice the rank. With a = A - A0 and b = B - B0 it is

    [B0 + b, b] @ [a; A0]

a and b are trained, from zero: the gradients, the norm that is clipped and the steps are those of PEFT's way, the start
is exactly the bare base, and what is rounded to 16 bits is small as long as the change is. Papers: PiSSA 2404.02948,
OLoRA 2406.01775, CorDA 2406.05223, LoftQ 2310.08659, EVA 2410.07170.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from qlora_rl.adapter.inspected import InspectedAdapter, active_adapter, copy_factors, stop_dropout
from qlora_rl.base.quant import dequantised_weight
from qlora_rl.base.reader import StoredTensors
from qlora_rl.errors import AdapterRejectedError

logger = logging.getLogger(__name__)

REFERENCE = "ref"  # TRL's name of it
_FROM_WEIGHTS = ("pissa", "olora")
_TWICE_THE_RANK = (*_FROM_WEIGHTS, "corda")
_WAY_OUT = {
    "corda": "It needs batches of your data: model = start_adapter(load_base(base), config, batches=...), and pass the "
    "model.",
    "eva": "It needs batches of your data: model = start_adapter(load_base(base), config, batches=...), and pass the "
    "model.",
    "loftq": "It needs the weights before they were quantised: model = start_adapter(load_base(base), config, "
    "original=DIRECTORY), and pass the model.",
    "lora_ga": "It needs the gradients of the base's own weights, which a 4-bit base does not have. Use 'pissa' or "
    "'eva'; or make the PeftModel from a transformers model object (not load_base's) and pass that: its base is "
    "written as the start has left it.",
}

_NO_DORA = "DoRA scales the weight as it is before this start. Leave one of them out."


def start_adapter(
    model: Any,
    peft_config: Any,
    *,
    batches: Iterable[Mapping[str, torch.Tensor]] | None = None,
    original: str | os.PathLike[str] | None = None,
) -> Any:
    """A PeftModel with a new adapter, started as `init_lora_weights` says; the base is left as it is.

    PEFT's `get_peft_model` rewrites the base for PiSSA, OLoRA, CorDA and LoftQ, TRL's `prepare_peft_model` lifts parts
    of it.

    Args:
        model: the base, of `load_base`, or any transformers model.
        peft_config: a LoraConfig; other configs start as PEFT starts them.
        batches: for "eva" and "corda": `input_ids` [B, T] and `attention_mask` [B, T], as a tokenizer pads them.
        original: for "loftq": directory of the model before it was quantised.

    Raises:
        AdapterRejectedError: the start is impossible here; says what to do.
    """
    kind = start_of(peft_config)
    if kind in _FROM_WEIGHTS or kind is None:
        plain, wanted = apply_start(peft_config)
        model = get_peft_model(model, plain)
        return model if wanted is None else begin_twice(model, wanted)
    doing = f"starting the adapter: init_lora_weights={peft_config.init_lora_weights!r}"
    if peft_config.use_dora and kind != "eva":  # whose start adds nothing to the weight
        raise AdapterRejectedError(f"{doing} with use_dora=True. {_NO_DORA}")
    if kind == "loftq" and original is not None:
        return _fit_residual(get_peft_model(model, _as_plain(peft_config)), Path(original), doing)
    if kind in ("eva", "corda") and batches is not None:
        if not (held := list(batches)):
            raise AdapterRejectedError(f"{doing}: batches is empty. Pass some of your data.")
        return _start_eva(model, peft_config, held) if kind == "eva" else _start_corda(model, peft_config, held)
    raise AdapterRejectedError(f"{doing}. {_WAY_OUT[kind]}")


def start_of(peft_config: Any) -> str | None:
    """Which start a config asks for that PEFT's plain one is not: "pissa", "olora", "corda", "loftq", "lora_ga",
    "eva"."""
    word = getattr(peft_config, "init_lora_weights", True)
    known = (*_FROM_WEIGHTS, *_WAY_OUT)
    return next((each for each in known if isinstance(word, str) and word.lower().startswith(each)), None)


def apply_start(peft_config: Any) -> tuple[Any, Any]:
    """What a trainer makes the adapter with, and the config that `begin_twice` is given afterwards (`None` for a start
    without it).

    Raises:
        AdapterRejectedError: the start needs what a trainer does not have; says what to do.
    """
    kind = start_of(peft_config)
    if kind is None:
        return peft_config, None
    doing = f"reading peft_config: init_lora_weights={peft_config.init_lora_weights!r}"
    if kind not in _FROM_WEIGHTS:
        raise AdapterRejectedError(f"{doing}. {_WAY_OUT[kind]}")
    if peft_config.use_dora:
        raise AdapterRejectedError(f"{doing} with use_dora=True. {_NO_DORA}")
    return _as_plain(peft_config, times=2), peft_config


def _as_plain(peft_config: Any, times: int = 1) -> Any:
    """The same LoRA with PEFT's ordinary start and `times` the rank; the factor of each module stays."""
    plain, factor = copy.deepcopy(peft_config), times / math.sqrt(times) if peft_config.use_rslora else times
    plain.init_lora_weights = True
    plain.r, plain.lora_alpha = times * plain.r, factor * plain.lora_alpha
    plain.rank_pattern = {name: times * rank for name, rank in (plain.rank_pattern or {}).items()}
    plain.alpha_pattern = {name: factor * alpha for name, alpha in (plain.alpha_pattern or {}).items()}
    plain.loftq_config, plain.corda_config = {}, None
    return plain


class Twice:
    """The trained and the fixed halves of an adapter of twice the rank, kept what they are.

    In each layer A is [a; A0] and B is [B0 + b, b]. A hook adds the gradients of b's two places up in the second and
    empties those of the fixed ones, so that the gradient's norm is that of a and b; `restore` follows each optimizer
    step.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._held: list[tuple[torch.nn.Linear, torch.nn.Linear, torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def add(self, a: torch.nn.Linear, b: torch.nn.Linear, a_RI: torch.Tensor, b_OR: torch.Tensor) -> None:
        """Start a layer: its matrices of twice the rank, and A0 [R, I] and B0 [O, R] of the start."""
        dtype, device = a.weight.dtype, a.weight.device
        a_RI, b_OR = (x.to(device, dtype) for x in (a_RI, b_OR))
        a.weight.copy_(torch.cat([torch.zeros_like(a_RI), a_RI]))
        b.weight.copy_(torch.cat([b_OR, torch.zeros_like(b_OR)], dim=1))
        self._hold(a, b, a_RI.clone(), b_OR.clone())

    def _hold(self, a: torch.nn.Linear, b: torch.nn.Linear, a_RI: torch.Tensor, b_OR: torch.Tensor) -> None:
        rank = len(a_RI)
        a.weight.register_hook(lambda gradient: torch.cat([gradient[:rank], torch.zeros_like(gradient[rank:])]))
        b.weight.register_hook(
            lambda gradient: torch.cat(
                [torch.zeros_like(gradient[:, :rank]), gradient[:, :rank] + gradient[:, rank:]], dim=1
            )
        )
        self._held.append((a, b, a_RI, b_OR))

    def __deepcopy__(self, memo: dict[int, Any]) -> Twice:
        """Of a copied model: torch copies parameters without their hooks."""
        twin = memo[id(self)] = Twice(self.kind)
        for each in self._held:
            twin._hold(*copy.deepcopy(each, memo))
        return twin

    @torch.no_grad()
    def restore(self) -> None:
        """After an optimizer step: the fixed parts are what they were, and b stands in both places."""
        for a, b, a_RI, b_OR in self._held:
            rank = len(a_RI)
            a.weight[rank:] = a_RI
            b.weight[:, :rank] = b_OR.to(b.weight.dtype) + b.weight[:, rank:]

    @torch.no_grad()
    def take_over(self) -> None:
        """After a checkpoint was loaded: where another machine has started it with other vectors, its own are the fixed
        ones."""
        for i, (a, b, a_RI, _) in enumerate(self._held):
            rank = len(a_RI)
            if not torch.equal(a.weight[rank:], a_RI.to(a.weight.dtype)):
                self._held[i] = (a, b, a.weight[rank:].clone(), b.weight[:, :rank] - b.weight[:, rank:])


@torch.no_grad()
def begin_twice(model: Any, peft_config: Any, toy_config: Mapping[str, Any] | None = None) -> Any:
    """Start the plain adapter of twice the rank, which `apply_start` has asked for, as `peft_config` says.

    PEFT itself decides on A0 and B0, layer by layer, on a float32 copy of one weight that is thrown away.

    Args:
        model: the PeftModel; `qlora_start` of it is the `Twice` that its trainer keeps up.
        peft_config: as the user wrote it.
        toy_config: further fields of the LoraConfig for one layer, by its name.
    """
    twice = Twice(str(peft_config.init_lora_weights).lower())
    for name, layer, scale in _linears(model):
        adapter = active_adapter(model)
        weight_OI = dequantised_weight(layer.get_base_layer().weight)
        rank = len(layer.lora_A[adapter].weight) // 2
        _check_rank(f"starting the adapter: init_lora_weights={twice.kind!r}", rank, weight_OI, name)
        more = {"init_lora_weights": peft_config.init_lora_weights, **(toy_config or {}).get(name, {})}
        a_RI, b_OR = _of_one(weight_OI, rank, scale, more)
        twice.add(layer.lora_A[adapter], layer.lora_B[adapter], a_RI, b_OR)
    model.qlora_start = twice
    return model


def _linears(model: Any) -> Iterator[tuple[str, Any, float]]:
    """Name, LoRA layer and factor of every adapted module."""
    adapter = active_adapter(model)
    for name, layer in InspectedAdapter(model, adapter).layers.items():
        if adapter not in layer.lora_A or not isinstance(layer.get_base_layer(), torch.nn.Linear):
            raise AdapterRejectedError(
                f"starting the adapter: {name} is no linear, and this start is known for linears only. Leave it out of "
                "target_modules.",
                module=name,
            )
        yield name, layer, float(layer.scaling[adapter])


def _check_rank(doing: str, rank: int, weight_OI: torch.Tensor, name: str) -> None:
    """A weight has as many directions as the start takes of it."""
    if rank > (most := min(weight_OI.shape)):
        raise AdapterRejectedError(
            f"{doing} with r={rank} > {most}, the most that a weight of shape {tuple(weight_OI.shape)} has, at {name}. "
            "Lower r.",
            module=name,
        )


def _of_one(weight_OI: torch.Tensor, rank: int, scale: float, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """What PEFT starts A [R, I] and B [O, R] of one weight with."""
    from peft.tuners.lora.corda import preprocess_corda

    linear = torch.nn.Linear(1, 1, bias=False, device="meta")
    linear.weight = torch.nn.Parameter(
        weight_OI.clone(), requires_grad=False
    )  # a float32 base gives its own out; PEFT changes it
    linear.out_features, linear.in_features = weight_OI.shape
    config = LoraConfig(r=rank, lora_alpha=scale * rank, target_modules=["one"], **fields)
    toy = torch.nn.ModuleDict({"one": linear})
    if config.corda_config is not None:
        preprocess_corda(toy, config)
    layer = get_peft_model(toy, config).base_model.model["one"]
    return layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach()


def _start_corda(model: Any, peft_config: Any, batches: list[Mapping[str, torch.Tensor]]) -> Any:
    """The covariance of each layer's inputs, of PEFT's own hooks on the 4-bit model; the rest is done weight by
    weight."""
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import calib_cov_distribution, target_modules

    config = copy.deepcopy(peft_config)
    config.corda_config = config.corda_config or CordaConfig(corda_method="ipm")
    adapted = get_peft_model(model, _as_plain(config, times=2))
    bare = adapted.get_base_model()
    config.target_modules = {f"{name}.base_layer" for name, _, _ in _linears(adapted)}

    def run() -> None:
        with torch.no_grad(), adapted.disable_adapter():
            for batch in batches:
                for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
                    bare(input_ids=row[mask.bool()][None].to(bare.device))

    was_training = bare.training
    calib_cov_distribution(bare, config, run, None, None)
    found = {
        name.removesuffix(".base_layer"): module.covariance_matrix for name, module in target_modules(bare, config)
    }
    for _, module in target_modules(bare, config):
        del module.covariance_matrix, module.sample_count
    bare.train(was_training)
    with tempfile.TemporaryDirectory() as directory:
        toys = {}
        for i, (name, covariance) in enumerate(found.items()):
            own = copy.deepcopy(config.corda_config)
            own.cache_file, own.covariance_file = None, f"{directory}/{i}.pt"
            torch.save({"one": covariance}, own.covariance_file)
            toys[name] = {"corda_config": own}
        return begin_twice(adapted, config, toys)


def _start_eva(model: Any, peft_config: Any, batches: list[Mapping[str, torch.Tensor]]) -> Any:
    """PEFT's own: A holds the main directions of each layer's inputs, B is zero; the base is not touched."""
    from peft import initialize_lora_eva_weights
    from peft.tuners.lora.eva import prepare_model_inputs_fn_language_modeling as rows_of

    adapted = get_peft_model(model, peft_config)
    # PEFT leaves out batches that have fewer tokens than the directions it looks for, and goes through them for ever
    # where none has enough.
    ranks = [len(layer.lora_A[active_adapter(adapted)].weight) for _, layer, _ in _linears(adapted)]
    wanted = round(max(ranks) * peft_config.eva_config.rho)
    most = max(len(rows_of(dict(each), peft_config)) for each in batches)
    if most < wanted:
        raise AdapterRejectedError(
            f"starting the adapter: init_lora_weights='eva' looks for {wanted} directions (r x rho), and the largest "
            f"of the batches has {most} tokens. Put more rows into a batch, or lower r or rho "
            "(eva_config=EvaConfig(rho=1.0))."
        )
    was_training = adapted.training
    device = adapted.get_base_model().device
    moved = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
    initialize_lora_eva_weights(adapted, moved, show_progress_bar=False)
    adapted.train(was_training)
    return adapted


@torch.no_grad()
def _fit_residual(model: Any, original: Path, doing: str) -> Any:
    """LoftQ with the quantised weight as it is: B @ A is what R directions can hold of what the quantisation has lost.

    LoftQ's further rounds quantise again, which would be another base.
    """
    stored, adapter = StoredTensors(original), active_adapter(model)
    for name, layer, scale in _linears(model):
        key = f"{name}.weight"
        weight_OI = dequantised_weight(layer.get_base_layer().weight)
        if key not in stored or tuple(stored[key].shape) != tuple(weight_OI.shape):
            raise AdapterRejectedError(
                f"{doing}: {original} holds no {key} of shape {tuple(weight_OI.shape)}. Pass the model that the base "
                "was prepared from.",
                module=name,
            )
        rank = len(layer.lora_A[adapter].weight)
        _check_rank(doing, rank, weight_OI, name)
        u, s, vh = torch.linalg.svd(stored[key].to(weight_OI) - weight_OI, full_matrices=False)
        root = s[:rank].sqrt()
        layer.lora_A[adapter].weight.copy_(root[:, None] * vh[:rank])
        layer.lora_B[adapter].weight.copy_(u[:, :rank] * root / scale)
    return model


@torch.no_grad()
def copy_adapter(model: Any, name: str, copy: str = REFERENCE) -> None:
    """Give a PeftModel a frozen copy of its adapter `name`, without dropout; which one is active does not change."""
    model.add_adapter(copy, model.peft_config[name])
    stop_dropout(model, copy)
    copy_factors(model, name, copy)
    own = dict(model.named_parameters())
    for at, twin in own.items():
        # The last part of that name is the adapter's: modules of the base may bear it too.
        before, _, after = f"{at}.".rpartition(f".{copy}.")
        of = f"{before}.{name}.{after}".removesuffix(".")
        if before and of in own:
            twin.copy_(own[of])
            twin.requires_grad_(False)
