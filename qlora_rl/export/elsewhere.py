"""What llama.cpp itself computes with an export, against what the policy has said."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qlora_rl.base.checkpoint import load_base
from qlora_rl.errors import ExportError
from qlora_rl.export import llama_cpp
from qlora_rl.export.check import Distance, Witness
from qlora_rl.inference.trained import TrainedRun


def on_base(base: str | os.PathLike[str]) -> str:
    """Name of such a distance."""
    return f"llama.cpp on {Path(base).name}"


def too_far(base: str | os.PathLike[str], found: Distance, limit: float, is_4bit: bool) -> str:
    """The warning that an adapter is another function on another base."""
    return (
        f"on {Path(base).name} this adapter is not the trained policy: mean KL {found.kl_mean:.2e} nats per token, "
        "above the limit of "
        f"{limit:g}. Export the merged model, which holds both: --to "
        f"gguf{'; or serve the adapter with vLLM: --to adapter' if is_4bit else ''}."
    )


def in_llama_cpp(
    trained: TrainedRun,
    tokenizer: Any,
    witness: Witness,
    staging: Path,
    to: str,
    on: str | os.PathLike[str] | None,
    say: Callable[[str], None],
) -> dict[str, Distance]:
    """Distances of what llama.cpp itself computes; an adapter on its own base, dequantised, and on another one."""
    if not llama_cpp.is_installed():
        say(f"llama.cpp itself was not asked: it is not installed ({llama_cpp.INSTALL})")
        return {}
    (file,) = staging.glob("*.gguf")
    if to == "gguf":
        return {"llama.cpp": _asked(witness, file)}
    from qlora_rl.export.gguf import write_gguf

    found = {} if on is None else {on_base(on): _asked(witness, Path(on), file)}
    with tempfile.TemporaryDirectory(prefix=".base-", dir=staging.parent) as directory:
        own = Path(directory) / "base.gguf"
        plain = load_base(trained.base)
        write_gguf(plain, trained.base, tokenizer, own, trained.base.spec.compute_dtype, name="base")
        del plain
        place = "the dequantised base" if trained.base.spec.is_4bit else "its own base"
        return {f"llama.cpp on {place}": _asked(witness, own, file), **found}


def _asked(witness: Witness, file: Path, adapter: Path | None = None) -> Distance:
    model = llama_cpp.LlamaCpp(file, adapter, longest=witness.longest)
    try:
        if model.vocabulary < witness.vocabulary:
            raise ExportError(
                f"comparing with {file.name} in llama.cpp: it has {model.vocabulary} tokens and the policy "
                f"{witness.vocabulary}, so it is "
                "another vocabulary. Name the GGUF file of a base with the policy's tokenizer."
            )
        return witness.distance_of(model.logprobs)
    finally:
        model.close()
