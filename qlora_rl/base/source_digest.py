"""Digests of what a base is made from: they name directories in the cache. What a base is says its identity, see
base/fingerprint."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from qlora_rl.base.writer import base_tensors
from qlora_rl.documents import printable


def digest_parts(parts: Sequence[str]) -> str:
    """SHA-256 over several texts (hex); where one ends and the next begins counts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def digest_file(file: Path) -> str:
    """SHA-256 over a file's bytes (hex)."""
    with open(file, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def misfits(directory: Path, files: Mapping[str, Any], *, verify: bool) -> Iterator[str]:
    """What differs from what a manifest says of its files; with `verify` also their digests."""
    for given, entry in files.items():
        file, name = directory / given, printable(given)
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size != entry["bytes"]:
            yield f"{name}: bytes={file.stat().st_size} != {entry['bytes']} when it was prepared"
        elif verify and digest_file(file) != entry["sha256"]:
            yield f"{name}: its bytes differ from what was prepared"


def digest_directory(source: Path) -> str:
    """Of all that decides what a checkpoint is: weights, configs, tokenizer; whatever the directory is called."""
    files = [f for f in sorted(source.rglob("*")) if f.is_file() and f.suffix != ".md"]
    names = {f: f.relative_to(source) for f in files}
    shown = [f for f in files if not any(part.startswith(".") for part in names[f].parts)]
    return digest_parts([f"{names[f]}:{digest_file(f)}" for f in shown])


def digest_tokenizer(tokenizer: Any) -> str:
    """Of a tokenizer that is stored in the place of the model's own; empty where there is none."""
    if tokenizer is None:
        return ""
    with tempfile.TemporaryDirectory() as directory:
        is_processor = hasattr(tokenizer, "image_processor")
        (tokenizer if is_processor else getattr(tokenizer, "tokenizer", tokenizer)).save_pretrained(directory)
        return digest_directory(Path(directory))


def digest_model(model: torch.nn.Module) -> str:
    """Of the tensors of a model object, and of its config."""
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    digest = hashlib.sha256(f"{type(model).__name__}{json.dumps(config, sort_keys=True, default=str)}".encode())
    for name, tensor in base_tensors(model):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
