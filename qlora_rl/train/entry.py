"""Whatever a TRL user passes as `model=` becomes a model for training and the base directory for the engine."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.base.checkpoint import MANIFEST, PreparedBase, adopt, load_base, open_base, prepare_base
from qlora_rl.base.quant import QuantSpec
from qlora_rl.errors import AdapterRefusedError, ConfigConflictError, UnsupportedQuantError, collected

if TYPE_CHECKING:
    from trl import GRPOConfig

logger = logging.getLogger(__name__)


def resolve_model(
    model: Any, args: GRPOConfig, *, quantization_config: Any, peft_config: Any, processing_class: Any
) -> tuple[Any, PreparedBase]:
    """The model to train (bare, or the PeftModel that was passed) and its prepared base.

    Args:
        model: hub name, checkpoint directory, prepared base, model object, or PeftModel.
        args: for `model_init_kwargs`, `trust_remote_code`.
        quantization_config: BitsAndBytesConfig for a name or a plain checkpoint; NF4 with double quantisation when absent.
        peft_config: the adapter to make; required unless `model` is a PeftModel.
        processing_class: stored with a base that is made from a model object.

    Raises:
        ConfigConflictError: nothing to train, or two adapters.
        UnsupportedQuantError: 8 bits, or another method.
    """
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    if is_peft and peft_config is not None:
        raise ConfigConflictError(
            "reading the model: it is a PeftModel and peft_config was passed too. Leave peft_config out to train its adapter on, "
            "or pass the bare base with peft_config."
        )
    if not is_peft and peft_config is None:
        raise ConfigConflictError(
            "reading the model: peft_config=None and the model carries no adapter; a 4-bit base itself cannot be trained. Pass "
            "peft_config=LoraConfig(r=16, target_modules='all-linear')."
        )
    if isinstance(model, str | os.PathLike):
        return _from_path(os.fspath(model), args, quantization_config)
    if quantization_config is not None:
        raise ConfigConflictError(
            "reading the model: quantization_config beside a model object, which is quantised already or not at all. Pass it "
            "where the model is loaded, or pass the model's name."
        )
    if is_peft:
        verdict = judge_adapter(model)
        if verdict.kind == "refuse":
            raise collected("reading the PeftModel", verdict.reasons, AdapterRefusedError)
    bare = model.get_base_model() if is_peft else model
    if processing_class is None and not getattr(bare, "qlora_base", None):
        from transformers import AutoTokenizer

        processing_class = AutoTokenizer.from_pretrained(bare.config._name_or_path)
    base = prepare_base(model, "none", compute_dtype=_dtype_name(bare), tokenizer=processing_class)
    adopt(bare, base)
    if is_peft:
        logger.info("training goes on with the adapter of the PeftModel")
    return model, base


def _from_path(path: str, args: GRPOConfig, quantization_config: Any) -> tuple[Any, PreparedBase]:
    init = dict(args.model_init_kwargs or {})
    if quantization_config is not None and init.get("quantization_config") is not None:
        raise ConfigConflictError(
            "reading the model: quantization_config is given twice, as an argument and in args.model_init_kwargs. Give it once."
        )
    config = quantization_config or init.pop("quantization_config", None)
    init.pop("quantization_config", None)
    revision = init.pop("revision", None)
    trust = bool(init.pop("trust_remote_code", args.trust_remote_code))
    dtype = init.pop("dtype", None) or init.pop("torch_dtype", None)
    if os.path.isfile(os.path.join(path, MANIFEST)):
        if config is not None:
            raise ConfigConflictError(
                f"reading the model: quantization_config beside the prepared base {path}, which is quantised already. Leave it "
                "out, or pass the original model."
            )
        base = open_base(path)
    else:
        spec = spec_from_config(config, dtype)
        base = prepare_base(
            path,
            spec.quant_type,
            double_quant=spec.double_quant,
            blocksize=spec.blocksize,
            compute_dtype=spec.compute_dtype,
            skip_modules=spec.skip_modules,
            revision=revision,
            trust_remote_code=trust,
        )
        logger.info("%s is held as %s in %s", path, spec.label, base)
    return load_base(base, trust_remote_code=trust, **init), base


def spec_from_config(config: Any, dtype: Any = None) -> QuantSpec:
    """The QuantSpec that a transformers BitsAndBytesConfig (or its dict) asks for.

    Raises:
        UnsupportedQuantError: 8 bits or another quantiser.
    """
    name = None if dtype in (None, "auto") else str(dtype).removeprefix("torch.")
    if config is None:
        return QuantSpec(compute_dtype=name or "bfloat16")
    values = config if isinstance(config, dict) else config.to_dict()
    method = values.get("quant_method", "bitsandbytes")
    if str(getattr(method, "value", method)) != "bitsandbytes":
        raise UnsupportedQuantError(
            f"reading quantization_config: {type(config).__name__} is not bitsandbytes. Use BitsAndBytesConfig(load_in_4bit=True)."
        )
    if values.get("load_in_8bit"):
        return QuantSpec("8bit")  # raises, with the way out
    if not values.get("load_in_4bit"):
        return QuantSpec("none", False, 64, name or "bfloat16")
    return QuantSpec(
        values.get("bnb_4bit_quant_type", "fp4"),
        bool(values.get("bnb_4bit_use_double_quant", False)),
        64,
        name or str(values.get("bnb_4bit_compute_dtype") or "bfloat16").removeprefix("torch."),
        tuple(sorted(values.get("llm_int8_skip_modules") or ())),
    )


def _dtype_name(model: Any) -> str:
    dtype = getattr(model, "dtype", torch.bfloat16)
    return str(dtype).removeprefix("torch.") if dtype.is_floating_point else "bfloat16"
