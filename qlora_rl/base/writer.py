"""Writes a model as the files of a base directory: tensors, config, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.base.experts import Names, is_expert_matrix, naming_of, routers_of
from qlora_rl.base.kinds import directory_takes_images, vision_parts
from qlora_rl.base.quant import QuantSpec, plain_name, quantize_linear
from qlora_rl.errors import BaseIncompleteError, ConfigConflictError, UnsupportedQuantError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Linears of one input that vLLM holds as one.
_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)


def write_checkpoint(model: PreTrainedModel, spec: QuantSpec, directory: Path, *, is_quantized: bool) -> None:
    """Write config and tensors; quantises module by module unless `is_quantized`."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    if spec.quantize_experts and naming_of(model) is None:
        raise ConfigConflictError(
            f"preparing a base: quantize_experts=True, but {model.config.model_type} is no mixture of experts. Leave it out."
        )
    if spec.quantize_tower and not vision_parts(model):
        raise ConfigConflictError(
            f"preparing a base: quantize_tower=True, but {model.config.model_type} takes no images. Leave it out."
        )
    stored, tensors = Names(model).stored, dict(base_tensors(model))
    routers = set(routers_of(model))  # linears of vLLM's, which would quantise them
    if spec.is_4bit and not is_quantized:
        head = model.get_output_embeddings()
        skip = routers | set(spec.skip_modules)
        vision = [] if spec.quantize_tower else vision_parts(model)
        tower = tuple(f"{part}." for part in vision_parts(model))
        # transformers matches the beginning of a name, vLLM, which calls these parts otherwise, one component of it.
        skip |= {*vision, *(part.rpartition(".")[2] for part in vision)}
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear) or name.startswith(tuple(f"{part}." for part in vision)):
                continue
            if module is head or any(name == ending or name.endswith(f".{ending}") for ending in spec.skip_modules):
                skip.add(name)
                continue
            if name.startswith(tower) and module.in_features % spec.blocksize:
                skip |= {name, *_names_in_vllm(stored(f"{name}.").removesuffix("."))}
                continue
            _quantise(tensors, stored(f"{name}.weight"), spec)
        for name in [name for name in tensors if spec.quantize_experts and is_expert_matrix(name)]:
            _quantise(tensors, name, spec)
        if not any(".quant_state." in name for name in tensors):
            raise UnsupportedQuantError(
                f"preparing a base: {spec.label} quantises none of the weights of {type(model).__name__}: it has no torch.nn.Linear, or "
                "skip_modules names them all. Pass quant='none', or a model whose layers are linears."
            )
        config_spec = replace(spec, skip_modules=tuple(sorted(skip)))
    else:
        config_spec = replace(spec, skip_modules=tuple(sorted(routers | set(spec.skip_modules))))
    for name, tensor in tensors.items():
        is_state = ".weight." in name
        if tensor.is_floating_point() and not is_state and tensor.dtype != spec.dtype:
            tensors[name] = tensor.to(spec.dtype)
    shards = split_torch_state_dict_into_shards(tensors, max_shard_size="4GB")
    for file, names in shards.filename_to_tensors.items():
        save_file({n: tensors[n] for n in names}, directory / file, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))

    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    config.pop("quantization_config", None)
    config["dtype"] = spec.compute_dtype
    if spec.is_4bit:
        config["quantization_config"] = config_spec.transformers_config()
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True, default=str))
    if model.generation_config is not None:
        model.generation_config.save_pretrained(directory)


def _names_in_vllm(name: str) -> set[str]:
    """What vLLM may call a linear of a vision tower, by its name in checkpoints: alone, or fused with others of the same width."""
    path, _, own = name.removeprefix("model.").rpartition(".")
    return {f"{path}.{own}", f"{path}.{_FUSED.get(own, own)}"}


def _quantise(tensors: dict[str, torch.Tensor], name: str, spec: QuantSpec) -> None:
    """Put codes and scales in the place of one weight [O, I]."""
    module, weight = name.removesuffix(".weight"), tensors.pop(name)
    if weight.shape[1] % spec.blocksize:
        # Blocks would go on in the next row, which bitsandbytes 0.50's CPU kernel does not follow: it takes the
        # wrong scales (mean error of random weights 0.119 in the place of 0.080, see docs/development-log.md).
        raise UnsupportedQuantError(
            f"preparing a base: in_features={weight.shape[1]} is no multiple of blocksize={spec.blocksize} at "
            f"{module}. Use a smaller blocksize, or leave it unquantised: "
            + ("quantize_experts=False." if is_expert_matrix(name) else f"skip_modules=[{module.split('.')[-1]!r}]."),
            module=module,
        )
    if not bool(torch.isfinite(torch.stack(weight.aminmax())).all()):
        raise BaseIncompleteError(
            f"preparing a base: {name} holds NaN or infinity, which 4 bits would spread over a whole block. Pass a sound checkpoint.",
            module=module,
        )
    tensors |= {f"{module}.{key}": value for key, value in quantize_linear(weight, spec).items()}


def write_weights(
    weights: Iterable[tuple[str, torch.Tensor]], directory: Path, *, shard_bytes: int = 4 * 10**9
) -> None:
    """Write named weights as the safetensors files of a checkpoint, one shard in memory at a time.

    Args:
        weights: each name once; read once.
        directory: that holds no weights yet.
        shard_bytes: largest file; a single weight may be larger.

    Raises:
        ConfigConflictError: a weight is not finite in its dtype.
    """
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}

    def part(number: int) -> Path:
        return directory / f"part-{number}.safetensors"

    def write() -> None:
        save_file(held, part(len(shards)), metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    total = nbytes = 0
    for name, weight in weights:
        if not bool(torch.isfinite(weight).all()):
            raise ConfigConflictError(
                f"writing weights: {name} is not finite in {str(weight.dtype).removeprefix('torch.')}. Write bfloat16 or float32."
            )
        size = weight.numel() * weight.element_size()
        if held and nbytes + size > shard_bytes:
            write()
            nbytes = 0
        held[name] = weight.detach().to("cpu", copy=True).contiguous()
        nbytes, total = nbytes + size, total + size
    write()
    if len(shards) == 1:
        part(0).rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        part(number).rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))


def base_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names in checkpoints and CPU tensors of the bare base; adapters left out, tied tensors once, float storage of codes undone."""
    names = Names(model)
    seen: set[tuple[int, tuple[int, ...]]] = set()
    state = model.state_dict()
    wrappers = [name for name, module in model.named_modules() if hasattr(module, "adapter_layer_names")]
    for name, tensor in state.items():
        # Of modules that PEFT has wrapped, only the inner one belongs to the base.
        here = [name[len(w) + 1 :] for w in wrappers if name.startswith(f"{w}.")]
        if not all(rest.startswith(("base_layer.", "original_module.", "token_adapter.")) for rest in here):
            continue
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.data_ptr() and place in seen:
            continue
        seen.add(place)
        if f"{name}.absmax" in state:  # codes; FSDP-QLoRA keeps them in a float dtype: the same bits
            tensor = tensor.contiguous().view(torch.uint8).reshape(-1, 1)
        for stored, part in names.parts(plain_name(name), tensor.detach()):
            yield stored, part.cpu().contiguous()


def write_tokenizer(tokenizer: Any, source: Path, directory: Path, trust_remote_code: bool) -> None:
    """Store the tokenizer (with its chat template) next to the weights."""
    if tokenizer is None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise ConfigConflictError(
                f"preparing a base: {source} has no tokenizer ({type(error).__name__}). The engine needs one next to the "
                "weights; pass tokenizer= (processing_class= of the trainer)."
            ) from error
    if directory_takes_images(directory):
        from transformers import AutoProcessor

        tokenizer = tokenizer if hasattr(tokenizer, "image_processor") else AutoProcessor.from_pretrained(source)
        tokenizer.save_pretrained(directory)
        return
    getattr(tokenizer, "tokenizer", tokenizer).save_pretrained(directory)
