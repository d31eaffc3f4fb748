"""llama.cpp, where `llama-cpp-python` is installed: what it computes of a GGUF file, and its own quantisation."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qlora_rl.errors import ExportError, MissingDependencyError

_DOING = "exporting to GGUF"
# llama.cpp's numbers of the file types that it makes here.
QUANTISED = {"q8_0": 7, "q4_k_m": 15}
INSTALL = "pip install llama-cpp-python"


def is_installed() -> bool:
    """The package can be imported; building it takes a compiler."""
    try:
        import llama_cpp  # noqa: F401
    except Exception:
        return False
    return True


class LlamaCpp:
    """A GGUF model in llama.cpp, asked for distributions.

    Args:
        file: GGUF file of a model.
        adapter: GGUF file of a LoRA adapter, to be applied to it.
        longest: tokens of the longest sequence.

    Raises:
        ExportError: llama.cpp does not load it.
    """

    def __init__(self, file: Path, adapter: Path | None = None, *, longest: int = 512):
        import llama_cpp

        options: dict[str, Any] = {} if adapter is None else {"lora_path": str(adapter)}
        try:
            self._model = llama_cpp.Llama(
                str(file), n_ctx=longest, n_batch=longest, n_gpu_layers=0, logits_all=True, verbose=False, **options
            )
        except Exception as error:
            what = file.name if adapter is None else f"{adapter.name} on {file.name}"
            raise ExportError(f"{_DOING}: llama.cpp does not load {what}: {error}") from error

    @property
    def vocabulary(self) -> int:
        """V of the file."""
        return int(self._model.n_vocab())

    def logprobs(self, ids: Sequence[int], start: int) -> torch.Tensor:
        """[N, V] natural logs, float64: of every token from `start` on."""
        self._model.reset()
        self._model.eval(list(ids))
        logits_TV = torch.from_numpy(self._model.scores[: len(ids)].copy())
        return logits_TV[start - 1 : -1].double().log_softmax(-1)

    def close(self) -> None:
        """Give its memory back."""
        self._model.close()


def quantise(source: Path, target: Path, kind: str) -> None:
    """Have llama.cpp quantise a GGUF file.

    Args:
        source: 16 or 32 bits.
        target: to write.
        kind: one of `QUANTISED`.

    Raises:
        MissingDependencyError: neither `llama-quantize` nor llama-cpp-python is there.
        ExportError: llama.cpp fails.
    """
    program = shutil.which("llama-quantize")
    if program is not None:
        done = subprocess.run([program, str(source), str(target), kind.upper()], capture_output=True, text=True)
        if done.returncode or not target.is_file():
            said = (done.stderr or done.stdout).strip().splitlines()
            raise ExportError(f"{_DOING}: llama-quantize failed: {said[-1] if said else done.returncode}")
        return
    if not is_installed():
        raise MissingDependencyError(
            f"{_DOING}: dtype={kind!r} is llama.cpp's own quantisation, and neither llama-quantize is on PATH nor "
            f"llama-cpp-python installed. Install one ({INSTALL}), or export q8_0."
        )
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = QUANTISED[kind], torch.get_num_threads()
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options))
    if failed or not target.is_file():
        raise ExportError(f"{_DOING}: llama.cpp could not quantise to {kind} (code {failed}).")
