"""Writes a model as the files of a base directory: tensors, config, tokenizer."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qlora_rl.base.experts import Names, is_expert_matrix, naming_of, routers_of
from qlora_rl.base.model_classes import directory_takes_images, vision_parts
from qlora_rl.base.quant import QuantSpec, plain_name, quantize_linear
from qlora_rl.documents import printable, read_object
from qlora_rl.errors import BaseIncompleteError, ConfigConflictError, UnsupportedQuantError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

logger = logging.getLogger(__name__)

# Fields of a generation config without which others have no effect.
_DECIDES = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")
# Linears of one input that vLLM holds as one.
_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
# Where transformers keeps the chat template of a tokenizer, and further ones.
_TEMPLATE, _OTHER_TEMPLATES = "chat_template.jinja", "additional_chat_templates"

# (model, weights that are to be quantised by their names in checkpoints) to codes and scales of some of them.
Choose = Callable[["PreTrainedModel", Mapping[str, torch.Tensor]], Mapping[str, dict[str, torch.Tensor]]]


def write_checkpoint(
    model: PreTrainedModel, spec: QuantSpec, directory: Path, *, is_quantized: bool, choose: Choose | None = None
) -> None:
    """Write config and tensors; quantises module by module unless `is_quantized`.

    Args:
        choose: quantises some of the weights in another way, in the same form as `quantize_linear`.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    if spec.quantize_experts and naming_of(model) is None:
        raise ConfigConflictError(
            f"preparing a base: quantize_experts=True, but {model.config.model_type} is no mixture of experts. Leave "
            "it out."
        )
    if spec.quantize_tower and not vision_parts(model):
        raise ConfigConflictError(
            f"preparing a base: quantize_tower=True, but {model.config.model_type} takes no images. Leave it out."
        )
    stored, tensors = Names(model).stored, dict(base_tensors(model))
    if spec.is_4bit and not is_quantized:
        head = model.get_output_embeddings()
        vision = [] if spec.quantize_tower else vision_parts(model)
        tower = tuple(f"{part}." for part in vision_parts(model))
        plain: list[str] = []
        coded: list[str] = []
        for name, module in model.named_modules():
            if not isinstance(module, torch.nn.Linear) or name.startswith(tuple(f"{part}." for part in vision)):
                continue
            is_ragged = name.startswith(tower) and module.in_features % spec.blocksize
            if module is head or is_ragged or spec.skips(name):
                plain.append(name)
                continue
            coded.append(stored(f"{name}.weight"))
        coded += [name for name in tensors if spec.quantize_experts and is_expert_matrix(name)]
        for name in coded:
            _check_quantisable(tensors[name], name, spec)
        chosen = choose(model, {name: tensors[name] for name in coded}) if choose and coded else {}
        for name in coded:
            weight = tensors.pop(name)
            made = chosen.get(name) or quantize_linear(weight, spec)
            tensors |= {f"{name.removesuffix('.weight')}.{key}": value for key, value in made.items()}
        if not coded:
            raise UnsupportedQuantError(
                f"preparing a base: {spec.label} quantises none of the weights of {type(model).__name__}: it has no "
                "torch.nn.Linear, or skip_modules names them all. Pass quant='none', or a model whose layers are "
                "linears."
            )
    else:
        plain = list(spec.skip_modules)
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
    # By them vLLM finds its class. A checkpoint's may name another one: a model without its head, a classifier.
    config["architectures"] = [architecture(model)]
    if spec.is_4bit:
        skipped = _skipped(model, plain, tensors, spec.skip_modules if not is_quantized else None)
        config["quantization_config"] = replace(spec, skip_modules=skipped).transformers_config()
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True, default=str))
    if model.generation_config is not None:
        valid_generation(model.generation_config).save_pretrained(directory)


def valid_generation(given: GenerationConfig) -> GenerationConfig:
    """A generation config without what transformers reads, and then does not write: sampling flags with
    do_sample=False, a padding id of -1."""
    from transformers import GenerationConfig

    try:
        given.validate(strict=True)
        return given
    except ValueError:
        valid, dropped = GenerationConfig(), {}
    fields = {name: value for name, value in given.to_diff_dict().items() if name != "transformers_version"}
    for name in sorted(fields, key=lambda name: name not in _DECIDES):
        before = getattr(valid, name, None)
        setattr(valid, name, fields[name])
        try:
            valid.validate(strict=True)
        except ValueError:
            setattr(valid, name, before)
            dropped[name] = fields[name]
    logger.warning(
        "generation config without %s: transformers writes no such file, as they have no effect in it", dropped
    )
    return valid


def write_ends(base: Path, ends: Sequence[int], directory: Path) -> bool:
    """Write a base's generation_config.json with further tokens that end a completion; `False` where it has them all,
    and nothing is written."""
    file = base / "generation_config.json"
    config = read_object(file) if file.is_file() else {}
    held = config.get("eos_token_id")
    known = [] if held is None else held if isinstance(held, list) else [held]
    if not (more := sorted({*ends} - {*known})):
        return False
    config["eos_token_id"] = [*known, *more]
    (directory / file.name).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return True


def read_template(directory: Path) -> str | dict[str, str] | None:
    """The chat template that is stored next to a tokenizer, as the tokenizer has it; `None` where there is none."""
    file, others = directory / _TEMPLATE, sorted((directory / _OTHER_TEMPLATES).glob("*.jinja"))
    default = file.read_text(encoding="utf-8") if file.is_file() else None
    named = {each.stem: each.read_text(encoding="utf-8") for each in others}
    return named | ({} if default is None else {"default": default}) if named else default


def write_template(template: str | Mapping[str, str], directory: Path) -> Path:
    """Write a chat template next to a tokenizer, in place of its own, as transformers reads it.

    Args:
        template: one, or several by name, of which "default" is the one that is taken without tools.
        directory: with the files of the tokenizer, or without.

    Returns:
        The file of the default.
    """
    file, others = directory / _TEMPLATE, directory / _OTHER_TEMPLATES
    shutil.rmtree(others, ignore_errors=True)
    for name, text in ({"default": template} if isinstance(template, str) else template).items():
        if name != "default":
            others.mkdir(exist_ok=True)
        place = file if name == "default" else others / f"{Path(name).name}.jinja"
        place.write_text(text, encoding="utf-8")
    return file


def _skipped(
    model: PreTrainedModel, plain: list[str], tensors: Mapping[str, Any], asked: Sequence[str] | None
) -> tuple[str, ...]:
    """What the config lists as unquantised, so that transformers and vLLM read the same in it.

    transformers takes an entry for the beginning or the end of a name, vLLM for one component or the beginning of a
    name of its own, in which some linears are fused. So each is named whole, as either calls it.

    Args:
        plain: the linears of transformers' model that are not 4-bit, but for those of vision parts that are so as a
            whole.
        tensors: of the base.
        asked: `skip_modules`; `None` where the model was 4-bit already.

    Raises:
        UnsupportedQuantError: vLLM fuses some of them with linears that are 4-bit.
    """
    stored, vision = Names(model).stored, vision_parts(model)
    coded = {name.removesuffix(".weight.absmax") for name in tensors if name.endswith(".weight.absmax")}
    whole = [part for part in vision if not any(name.startswith(stored(f"{part}.")) for name in coded)]
    skip = {*routers_of(model), *whole, *(part.rpartition(".")[2] for part in whole)}
    for name in plain:
        if name.startswith(tuple(f"{part}." for part in whole)):
            continue
        path, _, own = stored(f"{name}.").removesuffix(".").rpartition(".")
        together = _fused_with(own)
        if split := [part for part in together if f"{path}.{part}" in coded]:
            wanted = {entry.removesuffix(own) + part for entry in asked or () for part in split if entry.endswith(own)}
            raise UnsupportedQuantError(
                f"preparing a base: {name} is not 4-bit and {', '.join(split)} next to it "
                f"{'is' if len(split) == 1 else 'are'}, but vLLM holds {', '.join(together)} as one linear, which is "
                "4-bit as a whole or not at all. "
                + (
                    "Start from the 16-bit original, and skip all of them or none."
                    if asked is None
                    else f"Pass skip_modules={sorted({*asked, *wanted})}, or leave them out."
                ),
                module=name,
            )
        if vision:  # vLLM calls the parts of these models otherwise
            path = path.removeprefix("model.").replace("language_model", "language_model.model", 1)
        skip |= {name, f"{path}.{_FUSED.get(own, own)}"} if path else {name}
    return tuple(sorted(skip))


def _fused_with(own: str) -> list[str]:
    """A linear's last name, with those of the others of which vLLM makes one linear with it."""
    return [part for part, fused in _FUSED.items() if fused == _FUSED.get(own)] or [own]


def _check_quantisable(weight: torch.Tensor, name: str, spec: QuantSpec) -> None:
    """Reject a weight [O, I] that has no form in 4 bits."""
    module = name.removesuffix(".weight")
    if weight.shape[1] % spec.blocksize:
        # Blocks would go on in the next row, which bitsandbytes 0.50's CPU kernel does not follow: it takes the
        # wrong scales (mean error of random weights 0.119 in the place of 0.080, see docs/development-log.md).
        raise UnsupportedQuantError(
            f"preparing a base: in_features={weight.shape[1]} is no multiple of blocksize={spec.blocksize} at "
            f"{module}. Use a smaller blocksize, or leave it unquantised: "
            + (
                "quantize_experts=False."
                if is_expert_matrix(name)
                else f"skip_modules={_fused_with(module.split('.')[-1])}."
            ),
            module=module,
        )
    if not bool(torch.isfinite(torch.stack(weight.aminmax())).all()):
        raise BaseIncompleteError(
            f"preparing a base: {name} holds NaN or infinity, which 4 bits would spread over a whole block. Pass a "
            "sound checkpoint.",
            module=module,
        )


def architecture(model: Any) -> str:
    """The class by which vLLM finds the model: of transformers or of the checkpoint's own code, no subclass."""
    for kind in type(model).__mro__:
        if kind.__module__.startswith(("transformers.", "transformers_modules.")):
            return str(kind.__name__)
    return type(model).__name__


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
            way_out = "Write bfloat16 or float32." if weight.dtype == torch.float16 else "Its source has such values."
            raise ConfigConflictError(
                f"writing weights: {name} is not finite in {str(weight.dtype).removeprefix('torch.')}. {way_out}"
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
    """Names in checkpoints and CPU tensors of the bare base; adapters left out, tied tensors once, float storage of
    codes undone."""
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


def embedding_rows(model: PreTrainedModel) -> int:
    """Of the model's input embedding: how many ids it takes."""
    return int(model.get_input_embeddings().weight.shape[0])


def check_vocabulary(tokenizer: Any, rows: int, doing: str, own: Callable[[], Any]) -> None:
    """Reject a tokenizer (or a processor with one) that has tokens for which the embedding has no row.

    A text model may have those that stand for images and the like (Gemma 3 1B): it is never given them. Marks that came
    with the model and have no use (not for padding or ends, not in the chat template) are named in a warning: nothing
    takes them out of a tokenizer.

    Args:
        rows: of the embedding.
        doing: for the message; says whose tokenizer it is.
        own: loads the tokenizer that came with the model, or `None`; called where there are such tokens.

    Raises:
        ConfigConflictError: names them.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    media = {getattr(tokenizer, f"{kind}_token", None) for kind in ("image", "video", "audio")}
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    beyond = {token: number for token, number in vocabulary if number >= rows and token not in media}
    if not beyond:
        return
    came = own()
    known = getattr(came, "tokenizer", came).get_vocab() if came is not None else {}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    marks = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    used = {
        token: number
        for token, number in beyond.items()
        if number not in marks or token not in known or token in tokenizer.all_special_tokens or token in template
    }
    shown = ", ".join(f"{token!r} ({number})" for token, number in list((used or beyond).items())[:4])
    rest = (
        f"the embedding has {rows} rows, for ids 0 to {rows - 1}, and the tokenizer has {len(used or beyond)} "
        f"token(s) beyond them: {shown}"
    )
    if not used:
        logger.warning("%s: %s. A text that contains them ends in an IndexError.", doing, rest)
        return
    raise ConfigConflictError(
        f"{doing}: {rest}. Use tokens that have rows (tokenizer.pad_token = tokenizer.eos_token; a chat template may "
        "write its marks as text), and pass that tokenizer (processing_class= of a trainer, tokenizer= of "
        "prepare_base); or resize the model (model.resize_token_embeddings(len(tokenizer))), save it, and prepare that "
        "as the base."
    )


def read_tokenizer(tokenizer: Any, source: Path, trust_remote_code: bool) -> Any:
    """The tokenizer that was given, or that of the source.

    Raises:
        ConfigConflictError: there is none that can be read.
    """
    if tokenizer is not None:
        return tokenizer
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        found("a")  # some of what is damaged shows only here
    except Exception as error:
        raise ConfigConflictError(
            f"preparing a base: {source} has no tokenizer that can be read ({_said(error)}). The engine needs one next "
            "to the weights; pass tokenizer= (processing_class= of the trainer)."
        ) from error
    return found


def write_tokenizer(tokenizer: Any, source: Path, directory: Path, trust_remote_code: bool, *, rows: int) -> None:
    """Store the tokenizer (with its chat template) next to the weights, whose embedding has `rows`."""

    def own_if_any() -> Any:
        with contextlib.suppress(Exception):
            return read_tokenizer(None, source, trust_remote_code)

    tokenizer = read_tokenizer(tokenizer, source, trust_remote_code)
    check_vocabulary(tokenizer, rows, f"preparing a base of {source}", own_if_any)
    if directory_takes_images(directory):
        from transformers import AutoProcessor

        tokenizer = tokenizer if hasattr(tokenizer, "image_processor") else AutoProcessor.from_pretrained(source)
    else:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    try:
        tokenizer.save_pretrained(directory)
    except UnicodeError as error:  # half characters, which JSON may hold
        raise ConfigConflictError(
            f"preparing a base of {source}: its tokenizer cannot be written ({_said(error)}). Correct its chat "
            "template and tokens, or pass another tokenizer= (processing_class= of the trainer)."
        ) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {printable(str(error).partition(chr(10))[0][:200])}"


def require_writable(place: Path) -> None:
    """Make the directory in which bases are prepared, where there is none.

    Raises:
        ConfigConflictError: it cannot be made, or not be written.
    """
    why = os.strerror(errno.EACCES)
    try:
        place.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(place, os.W_OK)
    except OSError as error:
        why, is_writable = str(error.strerror), False
    if not is_writable:
        raise ConfigConflictError(
            f"preparing a base: {place}: {why}. Pass another directory (out=, "
            "`qlora-rl prepare MODEL DIRECTORY`), or set QLORA_RL_CACHE."
        )
