"""`loading`: libraries are imported without the garbage collector, which finds nothing there and takes a fifth of the time."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def loading(*modules: str) -> Iterator[None]:
    """Import within it, without pauses for garbage collection; `modules` are imported at its end.

    What is imported stays for good: torch, transformers, TRL and vLLM make a million objects, which are walked through again and again. So a
    command also sets it aside: later collections, some of which the libraries ask for, do not walk through it. In a process that had torch
    before, which is somebody else's, nothing is set aside: what they have dropped must still be found.

    transformers and TRL each ask which distribution every installed module came from, half a second each; they are told once.
    """
    is_own = "torch" not in sys.modules or gc.get_freeze_count() > 0
    was_on, ask = gc.isenabled(), importlib.metadata.packages_distributions
    gc.disable()
    importlib.metadata.packages_distributions = functools.cache(ask)
    try:
        yield
        for name in modules:
            importlib.import_module(name)
    finally:
        importlib.metadata.packages_distributions = ask
        if is_own:
            gc.freeze()
        if was_on:
            gc.enable()
