"""A PEFT directory, opened as a live model without the weights of its base: the rules and the export read it like any
other.

The base stands on the meta device: built from a config where there is one, otherwise only the layers that the file
names. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qlora_rl.adapter.inspected import active_adapter, method_of
from qlora_rl.adapter.rules import Finding, judge_method
from qlora_rl.adapter.store import CONFIG, ORIGIN, STATE, WEIGHTS, read_tensors
from qlora_rl.base.checkpoint import models_are_whole
from qlora_rl.base.experts import ATTENTION, NAMINGS, experts_as_linears, is_expert_matrix
from qlora_rl.base.model_classes import auto_class
from qlora_rl.documents import read_object
from qlora_rl.errors import AdapterRejectedError

_PREFIX = "base_model.model."
_OTHER_BASE = "This adapter was made for another base, or for another part of it."


@dataclass(frozen=True)
class OpenedAdapter:
    """What a directory holds.

    Attributes:
        model: a PeftModel whose LoRA tensors are those of the file (CPU) and whose base has none (meta); `None` where
            the findings alone decide.
        findings: what was seen on the way.
        method: PEFT's name of it.
        misfits: tensors without a place, or places without a tensor; they count where no rule has anything to say,
            because what is not plain LoRA may bring tensors of its own.
    """

    model: Any
    findings: tuple[Finding, ...]
    method: str
    misfits: tuple[Finding, ...] = ()


def load_adapters(model: Any, directory: Path) -> bool:
    """Give the adapters of a PeftModel the values of a directory that its own `save_pretrained` has written, bit for
    bit.

    PEFT's `load_adapter` casts them, and a directory of several adapters has one too many places for `transformers`.

    Args:
        model: the PeftModel; adapters that the directory does not hold are left as they are.
        directory: one adapter in it, or one in a directory with its name, as PEFT lays them down.

    Returns:
        The active one was there.
    """
    from peft import set_peft_model_state_dict

    places = {name: place for name in model.peft_config if (place := place_of(model, directory, name))}
    for name, place in places.items():
        set_peft_model_state_dict(model, read_tensors(place), adapter_name=name)
    return active_adapter(model) in places


def place_of(model: Any, directory: Path, name: str | None = None) -> Path | None:
    """Where in a directory that `save_pretrained` has written an adapter of a PeftModel is, by default the active one;
    `None` where it is not in it. One that is not called "default" is in a directory with its name."""
    name = active_adapter(model) if name is None else name
    for place in (directory / name, directory):
        if (place / WEIGHTS).exists() and (place != directory or name == "default" or len(model.peft_config) == 1):
            return place
    return None


def is_checkpoint(directory: Path) -> bool:
    """A run of ours has written it while it trained."""
    return os.path.isfile(directory / STATE)


def trained_in(directory: Path) -> Path:
    """The directory itself; of a checkpoint, that of the adapter that was trained, which may be in it."""
    if not is_checkpoint(directory):
        return directory
    held = [file.parent for pattern in (CONFIG, f"*/{CONFIG}") for file in sorted(directory.glob(pattern))]
    # The trained one alone has it; earlier versions wrote it only where that is called "default".
    noted = [place for place in held if (place / ORIGIN).is_file()]
    return noted[0] if noted else held[0] if len(held) == 1 else directory


def saved_names(model: Any) -> dict[str, str]:
    """By which names `save_pretrained` writes what is trained, by the names that it has in the live model.

    PEFT is asked, with numbers for values: it renames what DoRA, `modules_to_save` and others train, each in a way of
    its own.
    """
    from peft import get_peft_model_state_dict

    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    numbers = {name: torch.tensor([i]) for i, name in enumerate(trained)}
    adapter = active_adapter(model)
    saved = get_peft_model_state_dict(model, numbers, adapter_name=adapter, save_embedding_layers=False)
    return {trained[int(number)]: name for name, number in saved.items()}


def without_place(model: Any, directory: Path) -> list[str]:
    """The LoRA matrices of a directory, by PEFT's names, that a PeftModel with its one adapter has no parameter for."""
    from peft import get_peft_model_state_dict

    if method_of(model.peft_config["default"]) != "LORA":  # others hold buffers, and parameters of several layers
        return []
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied head has the embedding's
    held = get_peft_model_state_dict(model, parameters, save_embedding_layers=False)
    return [name for name in read_tensors(directory) if ".lora_" in name and name not in held]


def put_exactly(model: Any, tensors: Mapping[str, torch.Tensor], adapter: str = "default") -> bool:
    """Give what PEFT trains a copy of (`modules_to_save`, LN tuning, trained tokens) the values of a file in its dtype:
    PEFT, which has read it, has rounded them to the base's.

    Args:
        model: the PeftModel.
        tensors: of the file, by PEFT's names.
        adapter: that the file is of.

    Returns:
        Whether one of them is float32, next to which 16-bit weights may stand.
    """
    from peft.utils.other import AuxiliaryTrainingWrapper

    is_wider = False
    for name, module in model.named_modules():
        places: Mapping[str, str] = {}
        copies: Any = getattr(module, "ln_tuning_layers", {})
        if isinstance(module, AuxiliaryTrainingWrapper):
            places = module.adapter_state_dict_load_map(adapter)
        elif adapter in copies:
            where = "ln_tuning_layers"
            places = {f"{where}.{own}": f"{where}.{adapter}.{own}" for own, _ in copies[adapter].named_parameters()}
        for of_file, own in places.items():
            tensor, parameter = tensors.get(f"{name}.{of_file}"), module.get_parameter(own)
            if tensor is not None and tensor.is_floating_point():
                dtype = torch.promote_types(parameter.dtype, tensor.dtype)
                parameter.data = tensor.to(parameter.device, dtype)
                is_wider |= dtype == torch.float32
    return is_wider


def adapter_in(directory: str | os.PathLike[str]) -> Path:
    """The directory itself; of a run directory, the adapter in it; of a checkpoint, the one that was trained."""
    path = Path(directory)
    inside = path / "adapter"
    is_inside = os.path.isfile(inside / CONFIG) and not os.path.isfile(path / CONFIG)
    return inside if is_inside else trained_in(path)


def why_no_weights(path: Path) -> str:
    """Why a PEFT directory holds no weights that are read here; empty where it does."""
    if (path / WEIGHTS).is_file():
        return ""
    is_pickled = (path / "adapter_model.bin").is_file()
    why = "its weights are pickled, which may run code" if is_pickled else f"there is no {WEIGHTS}"
    return f"{path}: {why}. Save it with safetensors (PEFT's default)."


def open_adapter(directory: str | os.PathLike[str], base: str | os.PathLike[str] | None = None) -> OpenedAdapter:
    """Open a PEFT directory, or that of a run; see `judge_adapter`.

    Raises:
        AdapterRejectedError: there is no such directory, it holds no adapter, or `base` holds no config.
    """
    path = adapter_in(directory)
    if not _exists((path / CONFIG).is_file):
        reason = "no such directory"
        if _exists(path.exists):
            reason = f"it holds no adapter ({CONFIG})" if path.is_dir() else "it is a file"
        raise AdapterRejectedError(
            f"opening the adapter {path}: {reason}. Pass a directory that `save_pretrained` has written, or that of a "
            "run."
        )
    if base is not None and not _exists((Path(base) / "config.json").is_file):
        raise AdapterRejectedError(
            f"opening the adapter {path}: base={base} holds no config.json. Pass a model's directory."
        )
    try:
        config = _read_config(path)
    except Exception as error:
        return _rejected(f"{CONFIG} cannot be read by PEFT: {type(error).__name__}: {error}. Save the adapter again.")
    method = method_of(config)
    findings = [*judge_method(method), *_unknown_settings(path, config)]
    if why := why_no_weights(path):
        return _rejected(why, method)
    try:
        tensors = read_tensors(path)
    except Exception as error:
        return _rejected(f"{WEIGHTS} is damaged: {error}. Save the adapter again.", method)
    origin = _read_object(path / ORIGIN)
    where = _base_directory(config, base)
    findings += _of_origin(origin, where)
    findings += _off_fused_experts(tensors, where)
    if findings or method != "LORA":
        findings += _not_finite(tensors)
        return OpenedAdapter(None, tuple(findings), method)
    if where is None and (config.use_qalora or config.fan_in_fan_out):
        what = "use_qalora" if config.use_qalora else "fan_in_fan_out"
        return _rejected(
            f"{what}=True: what that means depends on the layers of the base. Name it: base=, or --base.", method
        )
    # Neither may look at the base's weights or at its forward pass: there are none.
    init, config.init_lora_weights = config.init_lora_weights, True
    config.task_type = None
    config.inference_mode = False
    tokens = config.trainable_token_indices
    if not isinstance(tokens, list | dict | None):
        return _rejected(
            f"{CONFIG} has trainable_token_indices={tokens!r}, which is no list. Save the adapter again.", method
        )
    if where is None:
        config.trainable_token_indices = None  # there is no embedding to wrap
    try:
        model = _build(config, tensors, where)
    except Exception as error:
        return _rejected(f"It does not fit {where or 'the layers that it names'}: {error} {_OTHER_BASE}", method)
    config.init_lora_weights, config.trainable_token_indices = init, tokens
    wrong, misfits = _fill(model, tensors)
    # Where no base is named the shapes are the file's own, and mean nothing where a variant has others; those of
    # BD-LoRA are dense on 4-bit linears.
    if where is None or config.use_bdlora:
        wrong, misfits = (), wrong + misfits
    return OpenedAdapter(model, wrong, method, misfits)


def _rejected(reason: str, method: str = "") -> OpenedAdapter:
    return OpenedAdapter(None, (("reject", reason),), method)


def _exists(question: Any) -> bool:
    """Names that are too long for the file system are names of nothing."""
    try:
        return bool(question())
    except OSError:
        return False


def _unknown_settings(path: Path, config: Any) -> list[Finding]:
    """What the file asks for and this PEFT does not know: it would leave it out with a warning."""
    from dataclasses import fields

    known = {field.name for field in fields(config)} | {"auto_mapping", "peft_version"}
    asked = read_object(path / CONFIG)
    unknown = sorted(key for key, value in asked.items() if value and key not in known)
    if not unknown:
        return []
    return [
        (
            "reject",
            f"{CONFIG} asks for {', '.join(f'{key}={asked[key]!r}' for key in unknown[:3])}, which this PEFT does not "
            "know. Use the PEFT that has written it.",
        )
    ]


def _read_config(path: Path) -> Any:
    from peft import PeftConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftConfig.from_pretrained(path)


def _read_object(file: Path) -> Mapping[str, Any] | None:
    """A JSON object; `None` where there is no file, an empty one where it holds something else."""
    try:
        return read_object(file)
    except OSError:
        return None
    except ValueError:
        return {}


def _base_directory(config: Any, base: str | os.PathLike[str] | None) -> Path | None:
    named = base if base is not None else config.base_model_name_or_path
    if not isinstance(named, str | os.PathLike) or not named:
        return None
    return Path(named) if _exists((Path(named) / "config.json").is_file) else None


def _of_origin(origin: Mapping[str, Any] | None, base: Path | None) -> list[Finding]:
    """Compare the base that the adapter was trained on with the one that it is asked for."""
    held = None if base is None else _read_object(base / "qlora_base.json")
    if origin is None or held is None:
        return []
    trained, identity = origin.get("base_identity"), held.get("identity")
    if trained is None and isinstance(origin.get("base_digest"), str):
        reason = (
            "An earlier version has saved it, and noted what its base was made from, not what it is. If it was "
            f"trained on {base}, remove {ORIGIN} from its directory."
        )
        return [("reject", reason)]
    if not isinstance(trained, str) or not isinstance(identity, str):
        return [
            (
                "reject",
                f"{ORIGIN} or the base's manifest is damaged. Save the adapter again, or prepare the base again.",
            )
        ]
    if trained in (identity, held.get("parent")):  # a baked base is its parent's function
        return []
    reason = (
        f"It was trained on the base with identity {trained[:16]}, and {base} has {identity[:16]}: other weights, "
        "tokenizer or config. Serve it on the directory that it was trained on, or on a copy of that."
    )
    return [("reject", reason)]


def _on_single_experts(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the matrices of experts that it adapts."""
    names = dict.fromkeys(name.removeprefix(_PREFIX).partition(".lora_")[0] for name in tensors)
    return [name for name in names if is_expert_matrix(f"{name}.weight")]


def _off_fused_experts(tensors: Mapping[str, torch.Tensor], base: Path | None) -> list[Finding]:
    """Single experts are linears in a prepared base with 4-bit experts; in others they are parts of fused tensors."""
    adapted = _on_single_experts(tensors)
    held = _read_object(base / "qlora_base.json") if base is not None and adapted else None
    if held is None or (held.get("spec") or {}).get("quantize_experts"):
        return []
    way_out = (
        f"Adapt the attention alone: target_modules={list(ATTENTION)}, or prepare the base with quantize_experts=True."
    )
    if held.get("parent"):
        way_out = "Serve it on the 4-bit base that this one was dequantised from."
    more = f" and {len(adapted) - 1} more" if len(adapted) > 1 else ""
    reason = f"{adapted[0]}{more}: adapters on single experts, and {base} has fused ones. {way_out}"
    return [("full_weights", reason)]


def _build(config: Any, tensors: Mapping[str, torch.Tensor], where: Path | None) -> Any:
    from peft import get_peft_model

    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        skeleton = _named_layers(tensors) if where is None else _model_of(where, tensors)
        model = get_peft_model(skeleton, config, low_cpu_mem_usage=True)
    model.requires_grad_(False)
    return model


def _model_of(directory: Path, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Of the base in a directory; with experts as linears where the adapter is on such."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    of_experts = bool(_on_single_experts(tensors))
    as_linears = of_experts and config.model_type in NAMINGS
    with models_are_whole(), experts_as_linears(config) if as_linears else contextlib.nullcontext():
        return auto_class(config).from_config(config, trust_remote_code=False)


class _Skeleton(torch.nn.Module):
    """Layers by name; enough of a model for PEFT to wrap."""


def _named_layers(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    root = _Skeleton()
    for name, a_RI in tensors.items():
        path, what, _ = name.removeprefix(_PREFIX).partition(".lora_A.weight")
        b_OR = tensors.get(f"{_PREFIX}{path}.lora_B.weight")
        if what and b_OR is not None and a_RI.ndim == b_OR.ndim == 2:
            has_bias = f"{_PREFIX}{path}.lora_B.bias" in tensors
            _place(root, path, torch.nn.Linear(a_RI.shape[1], b_OR.shape[0], bias=has_bias))
        path, what, _ = name.removeprefix(_PREFIX).partition(".lora_embedding_A")
        if what:
            b_ER = tensors[f"{_PREFIX}{path}.lora_embedding_B"]
            _place(root, path, torch.nn.Embedding(a_RI.shape[1], b_ER.shape[0]))
    return root


def _place(root: torch.nn.Module, path: str, layer: torch.nn.Module) -> None:
    *parents, own = path.split(".")
    for part in parents:
        if part not in root._modules:
            root.add_module(part, _Skeleton())
        root = root._modules[part]
    root.add_module(own, layer)


def _fill(model: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Put the tensors of the file into the model; what has another shape, and what has no place or is missing."""
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    slots = {
        ".".join(part for part in n.split(".") if part != "default"): n for n in places if "default" in n.split(".")
    }
    wrong: list[Finding] = []
    misfits: list[Finding] = []
    for name, tensor in tensors.items():
        own = name.removeprefix(_PREFIX)
        if name not in slots:
            if name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
                reason = (
                    f"The file holds all of {own}, which an adapter cannot carry. Save it with "
                    "save_embedding_layers=False, if it was not trained."
                )
                misfits.append(("full_weights", reason))
            else:
                misfits.append(("reject", f"{own} has no place in the base. {_OTHER_BASE}"))
        elif tensor.shape != places[slots[name]].shape:
            shape = list(places[slots[name]].shape)
            wrong.append(("reject", f"{own} has the shape {list(tensor.shape)} instead of {shape}. {_OTHER_BASE}"))
    misfits += [
        ("reject", f"{name.removeprefix(_PREFIX)} is missing in {WEIGHTS}. Save the adapter again.")
        for name in slots
        if name not in tensors
    ]
    if not wrong:
        for name in tensors.keys() & slots.keys():
            path, _, own = slots[name].rpartition(".")
            owner = model.get_submodule(path)
            if own in owner._parameters:
                owner._parameters[own] = torch.nn.Parameter(tensors[name], requires_grad=False)
            else:
                owner._buffers[own] = tensors[name]
    return tuple(wrong[:1]), tuple(misfits[:1])


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> list[Finding]:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            return [("reject", f"The file holds NaN or infinite values at {name}. Go back to an earlier checkpoint.")]
    return []
