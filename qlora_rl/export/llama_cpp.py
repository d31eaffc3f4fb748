"""`in_llama_cpp`: what llama.cpp computes of a GGUF file, where `llama-cpp-python` is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from qlora_rl.errors import ExportError
from qlora_rl.export.check import Distance, Witness
from qlora_rl.stages import remark


def in_llama_cpp(witness: Witness, directory: Path) -> Distance | None:
    """How far the one GGUF file of a directory is from the policy, by llama.cpp itself; `None` where it is not
    installed.

    Raises:
        ExportError: llama.cpp does not load it.
    """
    try:
        import llama_cpp
    except ImportError:
        remark("llama.cpp itself was not asked: it is not installed (pip install llama-cpp-python)")
        return None
    except Exception as error:  # a library that was compiled for another machine
        remark(f"llama.cpp itself was not asked: llama-cpp-python cannot be imported ({error}). Install it again")
        return None
    (file,) = directory.glob("*.gguf")
    size = witness.longest
    try:
        model = llama_cpp.Llama(str(file), n_ctx=size, n_batch=size, n_gpu_layers=0, logits_all=True, verbose=False)
    except Exception as error:
        raise ExportError(f"exporting to GGUF: llama.cpp does not load {file.name}: {error}") from error

    def logprobs(ids: Sequence[int], start: int) -> torch.Tensor:
        """[N, V] natural logs, float64: of every token from `start` on."""
        model.reset()
        model.eval(list(ids))
        logits_TV = torch.from_numpy(model.scores[: len(ids)].copy())
        return logits_TV[start - 1 : -1].double().log_softmax(-1)

    try:
        return witness.distance_of(logprobs)
    finally:
        model.close()
