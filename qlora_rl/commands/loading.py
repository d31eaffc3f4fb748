"""`loading`: libraries are imported without the garbage collector, which finds nothing there and takes a fifth of the time."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def loading(*modules: str) -> Iterator[None]:
    """Import within it, without pauses for garbage collection; `modules` are imported at its end.

    What is imported stays for good: torch, transformers, TRL and vLLM make a million objects, which are walked through again and again. So a
    command also sets it aside: later collections, some of which the libraries ask for, do not walk through it. In a process that had torch
    before, which is somebody else's, nothing is set aside: what they have dropped must still be found.
    """
    is_own = "torch" not in sys.modules or gc.get_freeze_count() > 0
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        for name in modules:
            importlib.import_module(name)
    finally:
        if is_own:
            gc.freeze()
        if was_on:
            gc.enable()
