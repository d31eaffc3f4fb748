"""The life of a command's process: `loading` imports the libraries, `as_command` ends it, neither searching a million
objects for garbage."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Iterator

from qlora_rl.stages import begin

# What transformers and vLLM import where it is installed: to detect objects, to resample sound, to assist generation.
_OPTIONAL = ("scipy", "sklearn")
_FREEZE, _UNFREEZE = gc.freeze, gc.unfreeze
_is_command = _ends_at_once = False


@contextlib.contextmanager
def loading(*modules: str, runs_files: bool = True, stage: str = "loading the libraries") -> Iterator[None]:
    """Import within it, without pauses for garbage collection; `modules` are imported at its end.

    What is imported stays for good: torch, transformers, TRL and vLLM make a million objects, which are walked through
    again and again. So a command (`as_command`) also sets it aside: later collections, some of which the libraries ask
    for, do not walk through it. That lasts until `released`: `gc.freeze` and `gc.unfreeze` do nothing meanwhile, as
    vLLM's engines set themselves aside when they start, and everything back when they end. In another process, which is
    somebody else's, nothing is set aside: what they have dropped must still be found.

    transformers and TRL each ask which distribution every installed module came from, half a second each; they are told
    once.

    Args:
        modules: to be imported at the end.
        runs_files: the process may run a file of the user's (rewards, tools, a model's own code). Without one, a
            command's libraries find no SciPy and no scikit-learn, which they need for nothing here and which are a
            tenth of a start.
        stage: what is said of it.
    """
    was_on, ask = gc.isenabled(), importlib.metadata.packages_distributions
    # transformers remembers what there is
    hides = _is_command and not runs_files and "transformers" not in sys.modules
    if _is_command:
        begin(stage)
    gc.disable()
    importlib.metadata.packages_distributions = functools.cache(ask)
    try:
        with _hidden(*_OPTIONAL if hides else ()):
            yield
            for name in modules:
                importlib.import_module(name)
    finally:
        importlib.metadata.packages_distributions = ask
        if _is_command:
            begin("")
            _FREEZE()
            _set_collector(_nothing, _nothing)
        if was_on:
            gc.enable()


def released() -> None:
    """Undo what `loading` did to the garbage collector."""
    if gc.unfreeze is _nothing:
        _set_collector(_FREEZE, _UNFREEZE)
        gc.unfreeze()


def leave_at_once() -> None:
    """Have a command that succeeds end without taking torch and vLLM apart, object by object, which takes 3 s.

    Threads are waited for, exit handlers run, output is flushed. A file that nobody has closed may lose its last lines:
    not for a process that runs a file of the user's.
    """
    global _ends_at_once
    _ends_at_once = True


def as_command(run: Callable[[], int]) -> int:
    """Run it as the only thing that this process does. What it raises ends the process the usual way.

    Returns:
        What `run` returned: the exit status.
    """
    global _is_command
    _is_command = True
    status = run()
    if _ends_at_once and status == 0:  # what has failed may have left files that go with their objects
        _leave(status)
    return status


def _leave(status: int) -> None:
    """The interpreter's own end (Py_FinalizeEx), up to where it takes things apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError) as error:  # a full disk, a closed pipe: as the interpreter has it
            status = 120
            with contextlib.suppress(OSError):
                os.write(2, f"qlora-rl: output was lost: {error}\n".encode())
    os._exit(status)


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
