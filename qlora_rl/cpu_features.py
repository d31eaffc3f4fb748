"""What this machine's processor multiplies fast, and what follows from it. Whoever depends on it asks `processor()`.

torch hands bf16 products on a CPU to oneDNN where the processor has AVX-512 (or Arm's bf16 instructions). Elsewhere it
takes a loop of its own, at a hundredth of the speed of float32. There both sides of a training multiply in float32 and
round once (`qlora_rl.cpu_matmul`), which is also what the bf16 instructions do.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlora_rl.errors import ConfigConflictError

if TYPE_CHECKING:
    import torch

SETTING = "QLORA_RL_CPU_PRODUCTS"
CHOICES = ("auto", "native", "float32")
# Read by torch when it is imported.
_COMPILED_FOR = "TORCH_COMPILE_CACHE_KEY_TAG"
# Fields of /proc/cpuinfo: what an Arm processor has in place of a name, and what distinguishes processors of one name
# on x86 and on Arm.
_ARM_NAME = ("CPU implementer", "CPU part", "CPU variant")
_IDENTITY = ("cpu family", "model", "stepping", *_ARM_NAME, "CPU revision")

# Read by oneDNN, and by torch's layer above it, with the first product of a process.
_CAPACITIES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "64"}


@dataclass(frozen=True)
class Processor:
    """The processor as torch sees it.

    Attributes:
        name: of the model.
        architecture: "x86_64", "aarch64", ...
        torch_kernels: the instructions that torch's own kernels were chosen for: "AVX512", "AVX2", "DEFAULT", ...
        native: 16-bit dtypes that torch multiplies with the processor's instructions.
        setting: what `QLORA_RL_CPU_PRODUCTS` says: "auto"; "native" leaves all products to torch; "float32" takes the
            way of a processor that has no instructions for 16 bits.
        identity: numbers by which the manufacturer distinguishes processors of one name, such as "family 25, model 17,
            stepping 1"; empty where /proc/cpuinfo has none.
    """

    name: str
    architecture: str
    torch_kernels: str
    native: tuple[str, ...]
    setting: str = "auto"
    identity: str = ""

    def multiplies_in(self, dtype: torch.dtype) -> torch.dtype:
        """In which dtype matrices of `dtype` are multiplied fast: their own, or float32, the result rounded once."""
        import torch  # late: what keeps its warnings quiet has to come before

        if dtype not in (torch.bfloat16, torch.float16) or self.setting == "native":
            return dtype
        return dtype if self.setting == "auto" and _name(dtype) in self.native else torch.float32

    @property
    def codes_kernel(self) -> str:
        """Instructions for which `engine/linears/codes.cpp` is built: "avx512_bf16", "avx2", or "" where torch
        multiplies alone."""
        import torch

        if self.setting == "native" or self.architecture not in ("x86_64", "AMD64"):
            return ""
        if self.torch_kernels == "AVX512" and self._bf16_in == "bfloat16" and torch.cpu._is_avx512_bf16_supported():
            return "avx512_bf16"
        return "avx2" if self.torch_kernels in ("AVX2", "AVX512") else ""

    def __str__(self) -> str:
        is_native = self._bf16_in == "bfloat16"
        how = "natively" if is_native else "in float32 and rounded once"
        why = "" if self.setting == "auto" else f" ({SETTING}={self.setting})"
        return (
            f"{self.name}, {self.architecture}, torch's {self.torch_kernels} kernels; bf16 products are computed "
            f"{how}{why}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a run's directory."""
        return {
            **asdict(self),
            "native": list(self.native),
            "multiplies_bf16_in": self._bf16_in,
        }

    @property
    def _bf16_in(self) -> str:
        import torch

        return _name(self.multiplies_in(torch.bfloat16))


def processor() -> Processor:
    """The processor of this machine, under the setting of the environment.

    Raises:
        ConfigConflictError: `QLORA_RL_CPU_PRODUCTS` is none of "auto", "native" and "float32".
    """
    setting = os.environ.get(SETTING) or "auto"
    if setting not in CHOICES:
        raise ConfigConflictError(
            f"reading the environment: {SETTING}={setting!r} is not one of {CHOICES}. Use 'auto'."
        )
    import torch

    name, identity = _name_and_identity()
    kernels = torch.backends.cpu.get_cpu_capability()
    return Processor(name, platform.machine(), kernels, _native_dtypes(), setting, identity)


def tell_compiled_code_apart() -> str:
    """Have torch's cache of compiled code distinguish processors, for this process and those that it starts.

    The cache's key lacks the vector instructions (torch 2.13): a kernel that one process has written for AVX-512 is
    compiled for AVX2 by another one, and reads and writes past its vectors. vLLM's ranks then get token ids that are
    none. A cache that two machines share is enough, or `ATEN_CPU_CAPABILITY`. Remove when the key has them.

    Returns:
        The tag that is part of the key from now on; one that was there stays in it.
    """
    from torch.compiler import config

    found = processor()
    ours = ", ".join(filter(None, (found.name, found.identity, found.torch_kernels)))
    theirs = config.cache_key_tag
    if ours not in theirs:
        config.cache_key_tag = os.environ[_COMPILED_FOR] = f"{theirs}; {ours}" if theirs else ours
    return config.cache_key_tag


def keep_few_kernels() -> None:
    """Have oneDNN keep 256 of its kernels, and torch's layer above it 64, in this process and in those that it starts;
    by default both keep 1,024.

    There is a kernel for each shape of a product, each takes half a megabyte, and the row of a micro-batch without
    padding has another length in almost every step. A dense model needs some thirty of them in a step, more with
    sequences of many lengths: with 64 in oneDNN such steps took two fifths longer, with 256 no longer than with 1,024.
    What is set in the environment counts, and after the first product of a process nothing changes.
    """
    import torch

    if processor().multiplies_in(torch.bfloat16) == torch.bfloat16:
        for name, capacity in _CAPACITIES.items():
            os.environ.setdefault(name, capacity)


def _native_dtypes() -> tuple[str, ...]:
    """What torch's own choice of a kernel asks, for each product: is oneDNN on, and does it take the dtype on this
    processor?"""
    import torch

    if not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return ()
    asked = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return tuple(_name(dtype) for dtype, is_supported in asked.items() if is_supported())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache  # each push asks, for each layer of the engine
def _name_and_identity() -> tuple[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())

    def listed(fields: Sequence[str]) -> str:
        return ", ".join(f"{field.split()[-1]} {found[field]}" for field in fields if field in found)

    # Arm's have no name there, but numbers.
    name = found.get("model name") or listed(_ARM_NAME) or platform.processor() or "unknown processor"
    return name, listed(_IDENTITY)
