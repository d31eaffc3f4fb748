"""On PYTHONPATH of every process that a test starts (conftest.py): while such a process imports, it does not search for garbage.

Importing TRL and vLLM makes a million objects that stay, and searching among them is a quarter of the time. What is imported, and whatever comes later, is as ever.
"""

import builtins
import gc

# Objects that one import made: more than a program of ours holds before.
_MANY = 100_000
_import = builtins.__import__


def _import_without_searching(*args, **kwargs):
    if not gc.isenabled():  # by an import around this one, or by the program
        return _import(*args, **kwargs)
    gc.disable()
    try:
        return _import(*args, **kwargs)
    finally:
        if gc.get_count()[0] > _MANY:
            gc.freeze()
        gc.enable()


builtins.__import__ = _import_without_searching
