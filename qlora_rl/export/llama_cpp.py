"""llama.cpp's own quantisation of a GGUF file, by its `llama-quantize`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from qlora_rl.errors import ExportError, MissingDependencyError


def quantise(source: Path, target: Path, kind: str) -> None:
    """Have llama.cpp quantise a GGUF file.

    Args:
        source: 16 or 32 bits.
        target: to write.
        kind: such as "q4_k_m".

    Raises:
        MissingDependencyError: `llama-quantize` is not there.
        ExportError: llama.cpp fails.
    """
    program = shutil.which("llama-quantize")
    if program is None:
        raise MissingDependencyError(
            f"exporting to GGUF: dtype={kind!r} is llama.cpp's own quantisation, and llama-quantize is not on PATH. "
            "Install llama.cpp, or export q8_0."
        )
    done = subprocess.run([program, str(source), str(target), kind.upper()], capture_output=True, text=True)
    if done.returncode or not target.is_file():
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ExportError(f"exporting to GGUF: llama-quantize failed: {said[-1] if said else done.returncode}")
