"""A processor with AVX2 only, on one that has more: `make test PROCESSOR=avx2`.

On PYTHONPATH, so that every process of a test starts with it. Nothing of ours is told. The libraries are, before they
choose their kernels: torch's own and its bf16 products without oneDNN, vLLM's AVX2 build, MKL, and bitsandbytes'
compiled kernels.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def _tell_torch(torch: Any) -> None:
    """oneDNN looks at the processor itself, so bf16 goes by its other branch; vLLM asks these functions which build to
    load."""
    torch._C._set_mkldnn_enabled(False)
    for name in dir(torch.cpu):
        if name.startswith(("_is_avx512", "_is_amx", "_is_vnni")):
            setattr(torch.cpu, name, lambda: False)


def _tell_bitsandbytes(module: Any) -> None:
    """Its library keeps what the processor has in static variables with a guard each: written before it has looked."""
    path = Path(module.lib._lib._name)
    symbols = _symbols(path.read_bytes())
    known = "has_avx512f_cpu"
    start = ctypes.cast(getattr(module.lib._lib, known), ctypes.c_void_p).value - symbols[known]
    found = 0
    for name, place in symbols.items():
        if "supported_avx512" in name:
            guard = name.replace("_ZZ", "_ZGVZ", 1) if name.startswith("_ZZ") else None
            if guard is not None:
                ctypes.c_uint8.from_address(start + symbols[guard]).value = 1
                ctypes.c_uint8.from_address(start + place).value = 0
                found += 1
    if not found or module.lib._lib.has_avx512f_cpu() & 1:
        raise RuntimeError(f"AVX-512 of {path} cannot be switched off: it has other symbols than bitsandbytes 0.50's")


def _symbols(elf: bytes) -> dict[str, int]:
    """Names and addresses in the symbol table of a 64-bit ELF file."""
    offset, size, count = struct.unpack_from("<Q", elf, 40)[0], *struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    found = {}
    for _, kind, _, _, start, length, link, _, _, step in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = sections[link][4]
        for place in range(start, start + length, step):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", elf, place)
            text = elf[names + name : elf.index(b"\0", names + name)].decode()
            if value:
                found[text] = value
    return found


_TOLD: dict[str, Callable[[Any], None]] = {"torch": _tell_torch, "bitsandbytes.cextension": _tell_bitsandbytes}


class _Loader(importlib.abc.Loader):
    def __init__(self, own: Any, tell: Callable[[Any], None]) -> None:
        self._own, self._tell = own, tell

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._tell(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds as others do, as often as it is asked: who looks whether there is a torch does not load it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in _TOLD:
            return None
        tell = _TOLD.pop(name)  # while the others are asked
        try:
            spec = importlib.util.find_spec(name)
        finally:
            _TOLD[name] = tell
        if spec is not None:
            spec.loader = _Loader(spec.loader, tell)
        return spec


sys.meta_path.insert(0, _Finder())
