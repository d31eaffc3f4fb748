"""Whatever a TRL user passes as `model=` becomes a model for training and the base directory for the engine."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.adapter.inspected import active_adapter
from qlora_rl.adapter.shape import finds_nothing, warn_of_unmatched
from qlora_rl.adapter.verdict import judge_adapter
from qlora_rl.base.attention.choice import apply_attention, attention_for
from qlora_rl.base.checkpoint import MANIFEST, PreparedBase, adopt, load_base, open_base, prepare_base
from qlora_rl.base.fingerprint import base_parameters
from qlora_rl.base.quant import QuantSpec, spec_of, store_as
from qlora_rl.base.unsupported_configs import check_positions
from qlora_rl.base.writer import valid_generation
from qlora_rl.errors import AdapterRejectedError, ConfigConflictError, UnsupportedQuantError, collected
from qlora_rl.memory.shape import model_and_adapter, read_config

if TYPE_CHECKING:
    from trl import GRPOConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """Where the trainer's model comes from.

    Attributes:
        base: the prepared base.
        model: the object that was passed; `None` where there is only the base directory yet.
        options: for `load_base`.
        float_storage: dtype as which 4-bit codes are seen, the same bytes: FSDP2 shards floats only.
    """

    base: PreparedBase
    model: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    float_storage: torch.dtype | None = None

    def load(self) -> Any:
        """The model to train: bare, or the PeftModel that was passed."""
        model = load_base(self.base, **self.options) if self.model is None else self.model
        if self.float_storage is not None:
            store_as(model, self.float_storage)
        return model


def resolve_model(
    model: Any,
    args: GRPOConfig,
    *,
    quantization_config: Any,
    peft_config: Any,
    processing_class: Any,
    is_whole: bool = False,
    refers: bool | None = None,
    takes_sync: bool = True,
) -> Source:
    """Check what was passed, and find or make its prepared base; nothing is loaded for training yet.

    Args:
        model: hub name, checkpoint directory, prepared base, model object, or PeftModel.
        args: for `model_init_kwargs`, `trust_remote_code`.
        quantization_config: BitsAndBytesConfig for a name or a plain checkpoint; NF4 with double quantisation when
            absent.
        peft_config: the adapter to make; required unless `model` is a PeftModel.
        processing_class: stored with a base that is made from a model object.
        is_whole: the base itself is trained.
        takes_sync: the trainer has that argument, and so a way to train all weights.
        refers: TRL makes a frozen copy of a PeftModel's adapter, to refer to; by default where `args.beta` is not 0.

    Raises:
        ConfigConflictError: nothing to train, two adapters, or one that finds no module in the model of a name or path.
        UnsupportedQuantError: 8 bits, or another method.
    """
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    if is_peft and peft_config is not None:
        raise ConfigConflictError(
            "reading the model: it is a PeftModel and peft_config was passed too. Leave peft_config out to train its "
            "adapter on, or pass the bare base with peft_config."
        )
    if not is_peft and peft_config is None and not is_whole:
        raise ConfigConflictError(
            "reading the model: peft_config=None and the model carries no adapter; a 4-bit base itself cannot be "
            "trained. Pass peft_config=LoraConfig(r=16, target_modules='all-linear')"
            + ("; or, to train all weights of a base that is not 4-bit, sync='weights'." if takes_sync else ".")
        )
    _check_budget(model.peft_config[active_adapter(model)] if is_peft else peft_config)
    if isinstance(model, str | os.PathLike):
        return _from_path(os.fspath(model), args, quantization_config, peft_config)
    if quantization_config is not None:
        raise ConfigConflictError(
            "reading the model: quantization_config with a model object, which is quantised already or not at all. "
            "Pass it where the model is loaded, or pass the model's name."
        )
    if args.model_init_kwargs:
        raise ConfigConflictError(
            f"reading the model: args.model_init_kwargs={args.model_init_kwargs!r} with a model object, which is "
            "loaded already. Give them where the model is loaded, or pass the model's name."
        )
    if is_peft:
        _check_trainable(model, args, refers_to_copy(refers, args))
    bare = model.get_base_model() if is_peft else model
    _check_tokens(bare.config, model.peft_config[active_adapter(model)] if is_peft else peft_config)
    check_autocast(replace(spec_of(bare), compute_dtype=_dtype_name(bare)), args)
    check_positions(bare.config, getattr(args, "vllm_max_model_length", None))
    base = base_of(model, args, processing_class)
    if is_peft:
        logger.info("training goes on with the adapter of the PeftModel")
    return Source(base, model)


def base_of(model: Any, args: Any, processing_class: Any = None) -> PreparedBase:
    """The prepared base of a model that is loaded already, written down with its own bytes; the model is frozen but for
    its adapter.

    Args:
        model: of transformers, or a PeftModel.
        args: of TRL, for `trust_remote_code`.
        processing_class: stored with the base; by default the tokenizer of the model's name.

    Raises:
        ConfigConflictError: no tokenizer is found, its weights were lifted to float32, or its attention leaves
            something out.
    """
    is_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    bare = model.get_base_model() if is_peft else model
    if processing_class is None and not getattr(bare, "qlora_base", None):
        from transformers import AutoTokenizer

        name = bare.config._name_or_path
        try:
            processing_class = AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)
        except Exception as error:
            raise ConfigConflictError(
                f"reading the model: it is an object whose config names {name!r}, where no tokenizer was found "
                f"({type(error).__name__}). The engine needs one: pass processing_class=."
            ) from error
    _reject_lifted(bare)
    apply_attention(bare)
    if bare.generation_config is not None:  # what is not valid transformers would not save after the training
        bare.generation_config = valid_generation(bare.generation_config)
    base = prepare_base(model, "none", compute_dtype=_dtype_name(bare), tokenizer=processing_class)
    biases = [p for n, p in bare.named_parameters() if p.requires_grad and n.endswith("bias")]
    adopt(bare, base)
    if is_peft and getattr(model.peft_config[active_adapter(model)], "bias", "none") != "none":
        for bias in biases:  # of the base, and trained with the adapter
            bias.requires_grad_(True)
    return base


def check_cloned(args: Any, processing_class: Any, base: Path) -> None:
    """Reject a `chat_template_path` of SFT with which TRL would resize the model: to the tokens of that tokenizer and
    its own.

    Raises:
        ConfigConflictError: says how to take the template alone.
    """
    path = getattr(args, "chat_template_path", None)
    if path is None or (path.endswith((".jinja", ".j2")) and Path(path).is_file()):
        return
    from transformers import AutoTokenizer

    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    known, rows = tokenizer.get_vocab(), _rows(base, args)
    added = {each.content for each in AutoTokenizer.from_pretrained(path).added_tokens_decoder.values()} - set(known)
    if len(known) + len(added) != rows:
        raise ConfigConflictError(
            f"reading the config: chat_template_path={path!r}: TRL would resize the model's embedding from {rows} to "
            f"{len(known) + len(added)} rows, one for each token of both tokenizers: another base, on which nothing "
            "could open the adapter. Take the template alone: write AutoTokenizer.from_pretrained(...).chat_template "
            "into a file chat.jinja, and pass that."
        )


def _rows(base: Path, args: Any) -> int:
    """Of the base's embedding."""
    from transformers import AutoConfig

    trust = getattr(args, "trust_remote_code", False)
    return int(AutoConfig.from_pretrained(base, trust_remote_code=trust).get_text_config().vocab_size)


def refers_to_copy(refers: bool | None, args: Any) -> bool:
    """TRL makes a frozen copy of a PeftModel's adapter; `refers` is that of `resolve_model`."""
    return bool(getattr(args, "beta", 0.0)) if refers is None else refers


def _check_trainable(model: Any, args: Any, refers: bool) -> None:
    """Reject a PeftModel whose adapter cannot be trained on."""
    verdict = judge_adapter(model)
    if verdict.kind == "reject":
        raise collected("reading the PeftModel", verdict.reasons, AdapterRejectedError)
    name = active_adapter(model)
    if verdict and not any(p.requires_grad for n, p in model.named_parameters() if f".{name}." in n):
        raise AdapterRejectedError(
            f"reading the PeftModel: its adapter {name!r} is frozen, so nothing would be trained. Load it with "
            "PeftModel.from_pretrained(base, path, is_trainable=True)."
        )
    if refers and name != "default":
        raise ConfigConflictError(
            f"reading the PeftModel: beta={args.beta} and its adapter is called {name!r}; TRL makes the frozen "
            "reference of an adapter called 'default' only. Load it under that name, or train by GRPO with beta=0."
        )
    if refers and "ref" in model.peft_config:
        raise ConfigConflictError(
            f"reading the PeftModel: beta={args.beta} and it holds an adapter 'ref' already (another trainer's frozen "
            "reference?). Remove it: model.delete_adapter('ref')."
        )


def _from_path(path: str, args: GRPOConfig, quantization_config: Any, peft_config: Any) -> Source:
    init = dict(args.model_init_kwargs or {})
    if quantization_config is not None and init.get("quantization_config") is not None:
        raise ConfigConflictError(
            "reading the model: quantization_config is given twice, as an argument and in args.model_init_kwargs. Give "
            "it once."
        )
    config = quantization_config or init.pop("quantization_config", None)
    init.pop("quantization_config", None)
    revision = init.pop("revision", None)
    trust = bool(init.pop("trust_remote_code", args.trust_remote_code))
    dtype = _named(init.pop("dtype", None) or init.pop("torch_dtype", None))
    options = {
        "attn_implementation": init.pop("attn_implementation", None),
        "device": _device(init.pop("device_map", None), args.device),
    }
    if init:
        raise ConfigConflictError(
            f"reading the model: args.model_init_kwargs holds {', '.join(sorted(init))}, which loading a base does not "
            "take. Leave it out (attn_implementation, device_map, dtype, quantization_config, revision and "
            "trust_remote_code are taken), or load the model yourself and pass it."
        )
    known = _config_of(path, trust)
    if known is not None:
        attention_for(known, options["attn_implementation"], "reading the model")
        _check_tokens(known, peft_config)
        check_positions(known, getattr(args, "vllm_max_model_length", None))
    if os.path.isfile(os.path.join(path, MANIFEST)):
        if config is not None:
            raise ConfigConflictError(
                f"reading the model: quantization_config with the prepared base {path}, which is quantised already. "
                "Leave it out, or pass the original model."
            )
        base = open_base(path)
        check_autocast(base.spec, args)
        if revision is not None or dtype not in (None, base.spec.compute_dtype):
            raise ConfigConflictError(
                f"reading the model: revision={revision!r}, dtype={dtype!r} in args.model_init_kwargs with the "
                f"prepared base {path}, which is one revision in {base.spec.compute_dtype}. Leave them out, or pass "
                "the original model."
            )
        _check_modules(known, base.spec, peft_config)
    else:
        spec = spec_from_config(config, dtype)
        if spec.is_4bit and spec.compute_dtype == "float32":
            raise ConfigConflictError(
                "reading the model: 4 bits with compute dtype float32 (the default of BitsAndBytesConfig), which "
                "vLLM's kernels do not take. Set bnb_4bit_compute_dtype=torch.bfloat16."
                if dtype is None
                else f"reading the model: 4 bits with dtype={dtype!r} in args.model_init_kwargs, which vLLM's kernels "
                "do not take. Set dtype='bfloat16'."
            )
        if getattr(known, "quantization_config", None) is None:  # else the checkpoint says in what it is held
            check_autocast(spec, args)
        _check_modules(known, spec, peft_config)
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
        check_autocast(base.spec, args)
        if config is not None and base.spec.label != spec.label:
            raise ConfigConflictError(
                f"reading the model: quantization_config asks for {spec.label} and {path} is {base.spec.label} "
                "already. Leave quantization_config out, or pass the original model."
            )
        logger.info("%s is held as %s in %s", path, base.spec.label, base)
    return Source(base, options={"trust_remote_code": trust, **options})


def _config_of(path: str, trust_remote_code: bool) -> Any:
    """The model's config, looked at before a base is prepared; `None` where it cannot be read, which is said there."""
    try:
        return read_config(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        logger.debug("the config of the model is not known yet: %s", error)
        return None


def _check_modules(config: Any, spec: QuantSpec, peft_config: Any) -> None:
    """Reject an adapter that no module of the model is for, and name targets without one, on a model without values.

    Raises:
        ConfigConflictError: with PEFT's words.
    """
    if config is None or peft_config is None:
        return
    try:
        _, shapes = model_and_adapter(config, spec, peft_config)
        warn_of_unmatched(peft_config, shapes)
    except Exception as error:  # whatever else is wrong is said better where it is loaded
        if finds_nothing(error):
            raise
        logger.debug("the modules of the adapter are not known yet: %s", error)


def _check_budget(peft_config: Any) -> None:
    """Reject AdaLoRA that is to give ranks up: what decides which is in no checkpoint, and the trainers do not ask it.

    Raises:
        ConfigConflictError: says what to set.
    """
    start, target = (getattr(peft_config, name, None) for name in ("init_r", "target_r"))
    if start is not None and target is not None and target < start:
        raise ConfigConflictError(
            f"reading the adapter: AdaLoRA from init_r={start} to target_r={target}: the trainers call no "
            f"update_and_allocate, so all ranks would be kept. Set target_r={start}, which keeps them, or train "
            f"LoraConfig(r={target})."
        )


def _check_tokens(config: Any, peft_config: Any) -> None:
    """Reject trained rows of an embedding that is the output head, too: TRL's head computes with the head's own weight
    and bias, and PEFT's wrapper has none of its own.

    Raises:
        ConfigConflictError: says what to train instead.
    """
    names = ("trainable_token_indices", "token_indices")  # of LoRA, and of the method of its own
    name = next((each for each in names if getattr(peft_config, each, None)), None)
    is_tied = getattr(config, "tie_word_embeddings", None)
    if is_tied is None:
        is_tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
    if name is None or not is_tied:
        return
    raise ConfigConflictError(
        f"reading the adapter: it trains rows of the embedding ({name}), which is the output head, too "
        "(tie_word_embeddings); TRL's trainers do not compute with a head of which rows are trained. Train all of it: "
        "LoraConfig(modules_to_save=['embed_tokens'], ensure_weight_tying=True); or prepare the base from a model that "
        "does not tie them."
    )


def check_autocast(spec: QuantSpec, args: Any) -> None:
    """Reject a 4-bit base in float16 under bf16 autocast on a CPU, where joining tensors of both is an error of torch.

    On a GPU autocast lowers what is joined, and float32 is joined everywhere.

    Raises:
        ConfigConflictError: says what to set.
    """
    if not spec.is_4bit or spec.compute_dtype != "float16" or args.device.type != "cpu" or not args.bf16:
        return
    raise ConfigConflictError(
        "reading the config: bf16=True multiplies in bfloat16 under autocast with a 4-bit base whose linears compute "
        "in float16, which torch's autocast does not join on a CPU. Set bf16=False in the config; or take a base with "
        "compute dtype bfloat16 "
        "(model_init_kwargs={'dtype': 'bfloat16'}, or prepare_base(..., compute_dtype='bfloat16'))."
    )


def _device(device_map: Any, default: Any) -> Any:
    """The one device that a `device_map` names, or the one that the trainer puts its batches on."""
    if device_map in (None, "auto"):
        return default
    if isinstance(device_map, dict) and list(device_map) == [""]:
        return device_map[""]
    raise ConfigConflictError(
        f"reading the model: device_map={device_map!r} in args.model_init_kwargs; the base is on one device. Use "
        "device_map={'': 0}, or leave it out."
    )


def _named(dtype: Any) -> str | None:
    """Name of a dtype given as torch dtype or string; `None` where it is left to the checkpoint."""
    return None if dtype in (None, "auto") else str(dtype).removeprefix("torch.")


def spec_from_config(config: Any, dtype: Any = None) -> QuantSpec:
    """The QuantSpec that a transformers BitsAndBytesConfig (or its dict) asks for.

    Raises:
        UnsupportedQuantError: 8 bits or another quantiser.
    """
    name = _named(dtype)
    if config is None:
        return QuantSpec(compute_dtype=name or "bfloat16")
    values = config if isinstance(config, dict) else config.to_dict()
    method = values.get("quant_method", "bitsandbytes")
    if str(getattr(method, "value", method)) != "bitsandbytes":
        raise UnsupportedQuantError(
            f"reading quantization_config: {type(config).__name__} is not bitsandbytes. Use "
            "BitsAndBytesConfig(load_in_4bit=True)."
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
        bool(values.get("quantize_experts")),
        bool(values.get("quantize_tower")),
    )


def _reject_lifted(model: Any) -> None:
    """Reject a 4-bit model whose other weights were lifted to float32.

    Raises:
        ConfigConflictError: names the first one, and PEFT's function that does it.
    """
    states = [p.quant_state for p in model.parameters() if getattr(p, "quant_state", None) is not None]
    if not states or states[0].dtype == torch.float32:
        return
    for name, parameter in base_parameters(model):
        if parameter.dtype == torch.float32 and not parameter.requires_grad:
            raise ConfigConflictError(
                f"reading the model: {name} is float32, its linears were quantised from {states[0].dtype}. "
                "prepare_model_for_kbit_training lifts it; vLLM multiplies with the original. Leave that call out: "
                "what it is needed for is done here.",
                module=name,
            )


def _dtype_name(model: Any) -> str:
    dtype = getattr(model, "dtype", torch.bfloat16)
    return str(dtype).removeprefix("torch.") if dtype.is_floating_point else "bfloat16"
