"""What a base *is*, module by module, wherever it is held; and how two of them differ.

Two digests. *file*: the stored bytes, written by `prepare_base` into the manifest and checked whenever a base is
opened. *function*: what the module computes with, however it is stored: packed codes, the exact scales (absmax,
un-nested, float32 bits), code table, block size, shape and type of a 4-bit linear; bytes and dtype of everything else.
The trainer's model and the engine's must have the same *function*; their ways of holding it differ.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from qlora_rl.base.experts import Names
from qlora_rl.base.model_classes import directory_takes_images
from qlora_rl.base.quant import dequantised_weight, exact_absmax, plain_name
from qlora_rl.base.reader import StoredTensors
from qlora_rl.contracts import BaseFingerprint, Leaf

_PART = 2**22  # elements that are digested at once

State = Literal["equal", "repairable", "different"]


@dataclass(frozen=True)
class LeafDiff:
    """One difference at one weight.

    Attributes:
        how: "codes", "scales", "table", "blocksize", "type", "shape", "values", "missing" (theirs has none),
            "unexpected"; or the name of another fact, such as "tokenizer".
        where: which rank of a sharded engine differs, in words.
    """

    name: str
    how: str
    ours: str
    theirs: str
    where: str = ""

    def __str__(self) -> str:
        where = f": {self.where}" if self.where else ""
        return f"{self.name}: {self.how} differ (ours {self.ours}, theirs {self.theirs}{where})"


@dataclass(frozen=True)
class Diff:
    """How two bases differ.

    Attributes:
        entries: every difference, in the order of the names.
        state: "equal"; "repairable": only scales differ, which can be written back exactly; "different".
    """

    entries: tuple[LeafDiff, ...] = field(default=())

    @property
    def state(self) -> State:
        """What can be done about it."""
        if not self.entries:
            return "equal"
        return "repairable" if all(entry.how == "scales" for entry in self.entries) else "different"

    @property
    def modules(self) -> list[str]:
        """Names of the weights that differ, each once."""
        return list(dict.fromkeys(entry.name for entry in self.entries))


def fingerprint_base(model: torch.nn.Module, *, baked: torch.dtype | None = None) -> BaseFingerprint:
    """The *function* of a transformers model's base; adapters are left out.

    Every byte is read once; the extra memory is one module's scales (one module's weights with `baked`).

    Args:
        model: bare or a PeftModel; nothing in it is changed.
        baked: as if the base were baked to this dtype: 4-bit weights count as the weights that they stand for.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    home = getattr(base, "qlora_base", None)
    return BaseFingerprint(dict(sorted(_leaves(base, baked))), {} if home is None else facts_of(home))


def fingerprint_stored(directory: str | os.PathLike[str]) -> BaseFingerprint:
    """The *function* of a base directory, read from its tensors without building a model."""
    stored = StoredTensors(directory)
    leaves: dict[str, Leaf] = {}
    for name in sorted(filter(stored.is_weight, stored)):
        quantised = stored.read_4bit(name)
        if quantised is None:
            leaves[name] = digest_plain(stored[name])
            continue
        leaves[name] = Leaf(
            kind=quantised.kind,
            shape=quantised.shape,
            values=digest_bytes(quantised.codes),
            scales=digest_bytes(quantised.absmax),
            table=digest_bytes(quantised.table),
            blocksize=quantised.blocksize,
        )
    return BaseFingerprint(leaves, facts_of(directory))


def recorded_fingerprint(directory: str | os.PathLike[str]) -> BaseFingerprint:
    """What `fingerprint_stored` found when the directory was prepared; the manifest vouches for it."""
    return BaseFingerprint.from_dict(json.loads((Path(directory) / "fingerprint.json").read_text()))


def facts_of(directory: str | os.PathLike[str]) -> dict[str, str]:
    """Digests of everything but the weights of a base directory; of the config only what decides the function."""
    config = json.loads((Path(directory) / "config.json").read_text())
    quantization = config.get("quantization_config") or {}
    # How the weights are held is the leaves' business; a baked base differs in it from its parent.
    held = (
        "quantization_config",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "use_cache",
        "pad_token_id",
    )
    parts = {"config": json.dumps({k: v for k, v in config.items() if k not in held}, sort_keys=True).encode()}
    if quantization:
        parts["skip_modules"] = json.dumps(sorted(quantization.get("llm_int8_skip_modules") or ())).encode()
    for fact, names in {
        "tokenizer": (
            "tokenizer.json",
            "tokenizer.model",
            "vocab.json",
            "merges.txt",
            "*.tiktoken",
            "spiece.model",
            "tekken.json",
        ),
        "chat_template": ("chat_template.jinja", "additional_chat_templates/*.jinja"),
    }.items():
        found = [file for name in names for file in sorted(Path(directory).glob(name))]
        if found:
            parts[fact] = b"".join(file.read_bytes() for file in found)
    if directory_takes_images(directory):
        parts["processor"] = _processor(Path(directory))
    parts["special_tokens"] = _special_tokens(Path(directory))
    parts["code"] = b"".join(file.read_bytes() for file in sorted(Path(directory).glob("*.py")))
    parts = {fact: content for fact, content in parts.items() if content}
    return {fact: hashlib.sha256(content).hexdigest()[:32] for fact, content in parts.items()}


def _processor(directory: Path) -> bytes:
    """How many tokens an image becomes, and with what numbers: of the files that a processor is loaded from."""
    names = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    found = [json.loads((directory / name).read_text()) for name in names if (directory / name).is_file()]
    return json.dumps(found, sort_keys=True).encode()


def _special_tokens(directory: Path) -> bytes:
    """Which tokens begin and end a text; of files that say more, and not the same with every version of transformers.

    What fills a batch up decides nothing that is computed, and scripts set it as they like.
    """
    found: dict[str, Any] = {}
    for name, ending in (("tokenizer_config.json", "_token"), ("generation_config.json", "_token_id")):
        content = json.loads((directory / name).read_text()) if (directory / name).is_file() else {}
        free = ("pad_token", "pad_token_id", "unk_token")
        found |= {
            key: value
            for key, value in content.items()
            if key.endswith(ending) and key not in free and value is not None
        }
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in found.items()}
    return json.dumps(texts, sort_keys=True).encode() if texts else b""


def identify(found: BaseFingerprint, compute_dtype: str) -> str:
    """The identity of a base (hex): one digest over all that `compare` compares, and the dtype that is computed in.

    Args:
        found: `fingerprint_stored` of its directory.
        compute_dtype: torch name.
    """
    lines = [compute_dtype, found.digest, *(f"{fact}:{digest}" for fact, digest in sorted(found.facts.items()))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def linear_names(directory: str | os.PathLike[str]) -> list[str]:
    """Last names of the linears of a base directory's language model (`q_proj`, ...) and of their fused forms; not of
    embeddings, head, experts and their routers."""
    described = json.loads((Path(directory) / "fingerprint.json").read_text())["leaves"]
    owners = {name.removesuffix(".weight") for name, leaf in described.items() if len(leaf["shape"]) == 2}
    mixtures = tuple({name.partition("experts.")[0] for name in owners if ".experts." in name})
    owners = {name for name in owners if not name.startswith(mixtures)}
    if directory_takes_images(directory):
        owners = {name for name in owners if name.startswith("model.language_model.")}
    names = {owner.split(".")[-1] for owner in owners} - {
        "q_norm",  # of Cohere, [heads, head size]
        "k_norm",
        "embed_tokens",
        "lm_head",
        "wte",
        "wpe",
        "embed_in",
        "embed_out",
    }
    return sorted(names | {"qkv_proj", "gate_up_proj"})


def compare(ours: BaseFingerprint, theirs: BaseFingerprint) -> Diff:
    """Every difference between two bases; a function of values."""
    entries: list[LeafDiff] = []
    for name in sorted({*ours.leaves, *theirs.leaves}):
        mine, other = ours.leaves.get(name), theirs.leaves.get(name)
        if mine is None or other is None:
            how = "missing" if other is None else "unexpected"
            entries.append(LeafDiff(name, how, _kind(mine), _kind(other)))
            continue
        if mine.kind != other.kind:
            entries.append(LeafDiff(name, "type", mine.kind, other.kind))
        if mine.shape != other.shape:
            entries.append(LeafDiff(name, "shape", str(mine.shape), str(other.shape)))
        if entries and entries[-1].name == name:
            continue  # digests of other types or shapes say nothing more
        if mine.blocksize != other.blocksize:
            entries.append(LeafDiff(name, "blocksize", str(mine.blocksize), str(other.blocksize)))
        if mine.table != other.table:
            entries.append(LeafDiff(name, "table", _short(mine.table), _short(other.table)))
        if mine.values != other.values:
            how = "values" if mine.scales is None else "codes"
            entries.append(LeafDiff(name, how, _short(mine.values), _short(other.values)))
        if mine.scales != other.scales:
            entries.append(LeafDiff(name, "scales", _short(mine.scales), _short(other.scales)))
    for fact in sorted({*ours.facts} & {*theirs.facts}):
        if ours.facts[fact] != theirs.facts[fact]:
            entries.append(LeafDiff(f"({fact})", fact, _short(ours.facts[fact]), _short(theirs.facts[fact])))
    faults = {**ours.faults, **theirs.faults}
    return Diff(tuple(replace(entry, where=faults.get(entry.name, "")) for entry in entries))


def digest_plain(weight: torch.Tensor) -> Leaf:
    """Leaf of an unquantised weight. Minus zero counts as zero: no product can tell them apart."""
    return Leaf(str(weight.dtype).removeprefix("torch."), tuple(weight.shape), digest_bytes(weight, zeros_alike=True))


def digest_4bit(codes: torch.Tensor, state: Any) -> Leaf:
    """Leaf of a 4-bit weight.

    Args:
        codes: packed, in any storage dtype.
        state: bitsandbytes' QuantState, nested or not.
    """
    return Leaf(
        kind=str(state.quant_type),
        shape=tuple(state.shape),
        values=digest_bytes(codes),
        scales=digest_bytes(exact_absmax(state)),
        table=digest_bytes(state.code.float()),
        blocksize=int(state.blocksize),
    )


def digest_bytes(tensor: torch.Tensor, *, zeros_alike: bool = False) -> str:
    """SHA-256 over a tensor's bytes in row-major order, cut to 32 hex digits.

    Args:
        tensor: on any device; read in parts, so that no copy of the whole is made.
        zeros_alike: minus zero counts as zero.
    """
    digest = hashlib.sha256()
    for part in tensor.detach().contiguous().flatten().split(_PART):
        digest.update((part + 0.0 if zeros_alike else part).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()[:32]


def _leaves(base: torch.nn.Module, baked: torch.dtype | None) -> Iterator[tuple[str, Leaf]]:
    names = Names(base)
    for name, parameter in base_parameters(base):
        state = getattr(parameter, "quant_state", None)
        if state is None:
            for stored, part in names.parts(plain_name(name), parameter.data):
                yield stored, digest_plain(part if baked is None else part.to(baked))
            continue
        whole = (
            digest_4bit(parameter.data, state)
            if baked is None
            else digest_plain(dequantised_weight(parameter).to(baked))
        )
        yield names.stored(plain_name(name)), whole


def base_parameters(base: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that a base had before PEFT wrapped any of it, by their present names; tied ones once."""
    seen: set[int] = set()

    def walk(module: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        if hasattr(module, "adapter_layer_names"):  # a wrapper of PEFT's: only what it wraps is the base's
            inner = "base_layer" if hasattr(module, "get_base_layer") else "original_module"
            yield from walk(getattr(module, inner), f"{path}.{inner}")
            return
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}"[1:], parameter
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(child, f"{path}.{name}")

    yield from walk(base, "")


def _kind(leaf: Leaf | None) -> str:
    return "nothing" if leaf is None else f"{leaf.kind} {leaf.shape}"


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:8]
