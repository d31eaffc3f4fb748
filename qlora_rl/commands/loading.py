"""`loading`: libraries are imported without the garbage collector, which finds nothing there and takes a fifth of the time."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator


@contextlib.contextmanager
def loading(*modules: str) -> Iterator[None]:
    """Import within it, without pauses for garbage collection; `modules` are imported at its end.

    What is imported stays for good: torch, transformers, TRL and vLLM make a million objects, which are walked through again and again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        for name in modules:
            importlib.import_module(name)
    finally:
        if was_on:
            gc.enable()
