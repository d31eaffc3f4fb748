"""`loading`: the libraries of a command are imported, and it is said."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
from collections.abc import Iterator

from qlora_rl.stages import begin


@contextlib.contextmanager
def loading(*modules: str, stage: str = "loading the libraries") -> Iterator[None]:
    """Import within it, without pauses for garbage collection; `modules` are imported at its end.

    torch, transformers, TRL and vLLM make a million objects, which are walked through again and again. And transformers
    and TRL each ask which distribution every installed module came from, half a second each; they are told once.

    Args:
        modules: to be imported at the end.
        stage: what is said of it.
    """
    was_on, ask = gc.isenabled(), importlib.metadata.packages_distributions
    begin(stage)
    gc.disable()
    importlib.metadata.packages_distributions = functools.cache(ask)
    try:
        yield
        for name in modules:
            importlib.import_module(name)
    finally:
        importlib.metadata.packages_distributions = ask
        begin("")
        if was_on:
            gc.enable()
