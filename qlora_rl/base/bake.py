"""`bake_base`: the 4-bit base dequantised once, into a plain checkpoint with exactly the weights that the trainer
multiplies with.

For engines that cannot load bitsandbytes (tensor parallelism, other servers); no plugin is needed to serve it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from qlora_rl.base.checkpoint import BASE_FILES, PreparedBase, derive, open_base
from qlora_rl.base.quant import QuantSpec
from qlora_rl.base.reader import StoredTensors
from qlora_rl.base.writer import write_weights
from qlora_rl.errors import ConfigConflictError


def bake_base(
    base: str | os.PathLike[str], dtype: str | None = None, *, out: str | os.PathLike[str] | None = None
) -> PreparedBase:
    """Dequantise a prepared 4-bit base.

    Args:
        base: directory made by `prepare_base`.
        dtype: of the result; by default the compute dtype of the base. "float32" keeps the products of codes and scales
            as they are; the 16-bit dtypes round each once, as bitsandbytes' kernels do.
        out: directory to write; by default one in the cache.

    Returns:
        A prepared base with quant "none"; its `parent` is the digest of the 4-bit base.

    Raises:
        ConfigConflictError: the base is not 4-bit.
    """
    source = open_base(base)
    if not source.spec.is_4bit:
        raise ConfigConflictError(
            f"baking a base: {source} is not 4-bit ({source.spec.label}); it can be served as it is."
        )
    spec = QuantSpec("none", compute_dtype=dtype or source.spec.compute_dtype)

    def write(directory: Path) -> QuantSpec:
        stored = StoredTensors(source.path)

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name in filter(stored.is_weight, stored):
                quantised = stored.read_4bit(name)
                yield name, (stored[name] if quantised is None else quantised.dequantised()).to(spec.dtype)

        write_weights(weights(), directory)
        copy_plain(source, directory, spec.compute_dtype)
        return spec

    return derive(source, spec, write, out)


def copy_plain(base: PreparedBase, directory: Path, dtype: str) -> None:
    """Copy all of a base but its weights (config, tokenizer, chat templates, code), for weights that are not quantised.

    Args:
        base: of which.
        directory: an existing one.
        dtype: torch name of the weights' dtype, which the config will say.
    """
    for file in base.path.iterdir():
        if file.is_dir():  # further chat templates of a tokenizer
            shutil.copytree(file, directory / file.name)
        elif file.name not in BASE_FILES and ".safetensors" not in file.name:
            shutil.copy(file, directory / file.name)
    config = json.loads((base.path / "config.json").read_text())
    config.pop("quantization_config", None)
    config["dtype"] = dtype
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
