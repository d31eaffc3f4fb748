"""The life of a command's process: `loading` imports the libraries, `leaving` ends it, both without searching a million objects for garbage."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Iterator

_OPTIONAL, _hides = ("scipy", "sklearn"), False
_FREEZE, _UNFREEZE = gc.freeze, gc.unfreeze


@contextlib.contextmanager
def loading(*modules: str) -> Iterator[None]:
    """Import within it, without pauses for garbage collection; `modules` are imported at its end.

    What is imported stays for good: torch, transformers, TRL and vLLM make a million objects, which are walked through again and again. So a
    command also sets it aside: later collections, some of which the libraries ask for, do not walk through it. That lasts until `released`:
    `gc.freeze` and `gc.unfreeze` do nothing meanwhile, as vLLM's engines set themselves aside when they start, and everything back when they
    end. In a process that had torch before, which is somebody else's, nothing is set aside: what they have dropped must still be found.

    transformers and TRL each ask which distribution every installed module came from, half a second each; they are told once.
    A command's transformers and vLLM find no SciPy and no scikit-learn, which take them a tenth of the start: optional packages, for detecting
    objects, resampling sound and assisted generation. Whoever imports them afterwards gets them.
    """
    global _hides
    is_own = "torch" not in sys.modules or gc.get_freeze_count() > 0
    _hides = _hides or (is_own and "transformers" not in sys.modules)  # which remembers what there is
    was_on, ask = gc.isenabled(), importlib.metadata.packages_distributions
    gc.disable()
    importlib.metadata.packages_distributions = functools.cache(ask)
    try:
        with _hidden(*_OPTIONAL) if _hides else contextlib.nullcontext():
            yield
            for name in modules:
                importlib.import_module(name)
    finally:
        importlib.metadata.packages_distributions = ask
        if is_own:
            _FREEZE()
            _set_collector(_nothing, _nothing)
        if was_on:
            gc.enable()


def released() -> None:
    """Undo what `loading` did to the garbage collector."""
    _set_collector(_FREEZE, _UNFREEZE)
    gc.unfreeze()


def leaving(run: Callable[[], int]) -> int:
    """Run a program whose process then ends at once: taking torch and vLLM apart, object by object, takes 3 s.

    Exit handlers run, logs and output are flushed. What `run` raises ends the process the usual way.

    Returns:
        What `run` returned: the exit status.
    """
    status: list[int] = []
    atexit.register(_leave, status)  # the first to be registered is called last
    status.append(run())
    return status[0]


def _leave(status: list[int]) -> None:
    if not status:
        return
    logging.shutdown()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # a full disk, a closed pipe: the interpreter's own end says so
        return
    os._exit(status[0])


@contextlib.contextmanager
def _hidden(*packages: str) -> Iterator[None]:
    absent = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # None: Python's own way to say that there is none
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def _set_collector(freeze: Callable[[], None], unfreeze: Callable[[], None]) -> None:
    setattr(gc, "freeze", freeze)  # noqa: B010
    setattr(gc, "unfreeze", unfreeze)  # noqa: B010


def _nothing() -> None:
    pass
