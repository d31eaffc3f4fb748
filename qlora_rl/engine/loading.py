"""`loading`: the libraries of a command are imported, and it is said."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import logging
import os
import warnings
from collections.abc import Iterator

from qlora_rl.stages import begin


@contextlib.contextmanager
def loading(
    *modules: str, stage: str = "loading the libraries", quietly: bool = False, has_bars: bool = True
) -> Iterator[None]:
    """Import within it, without pauses for garbage collection; `modules` are imported at its end.

    torch, transformers, TRL and vLLM make a million objects, which are walked through again and again. And transformers
    and TRL each ask which distribution every installed module came from, half a second each; they are told once.

    Args:
        modules: to be imported at the end.
        stage: what is said of it.
        quietly: without the libraries' chatter, here and later.
        has_bars: of datasets, here and later.
    """
    was_on, ask = gc.isenabled(), importlib.metadata.packages_distributions
    begin(stage)
    gc.disable()
    importlib.metadata.packages_distributions = functools.cache(ask)
    try:
        if quietly:
            quieten()
        if not has_bars:
            import datasets

            datasets.disable_progress_bars()
        yield
        for name in modules:
            importlib.import_module(name)
    finally:
        importlib.metadata.packages_distributions = ask
        begin("")
        if was_on:
            gc.enable()


def quieten() -> None:
    """Keep the libraries' chatter off the screen; warnings that matter are raised as errors by our own code."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # which torch reads when it is imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    # Ray, where it is installed, asks for ipywidgets in a notebook.
    for name in ("vllm", "transformers", "bitsandbytes", "trl", "accelerate", "ray.widgets.util"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_an_error)  # its import sets its level
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _is_an_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
