"""On PYTHONPATH of every process that a test starts (conftest.py): it does not search for garbage among what libraries
hold for good.

Importing TRL and vLLM makes a million objects. Searching among them is a quarter of the time of the imports, and of
every engine most of its start and of its end: `libraries_are_not_searched_for_garbage` in conftest.py. What is
imported, and what is collected of whatever comes later, is as ever.
"""

import builtins
import gc

# Objects that one import made: more than a program of ours holds before.
_MANY = 100_000
_import, _freeze = builtins.__import__, gc.freeze


def _import_without_searching(*args, **kwargs):
    if not gc.isenabled():  # by an import around this one, or by the program
        return _import(*args, **kwargs)
    gc.disable()
    try:
        return _import(*args, **kwargs)
    finally:
        if gc.get_count()[0] > _MANY:
            _freeze()
        gc.enable()


def _nothing(wrapped):
    """For vLLM, which would unfreeze the libraries with its own; `inspect.unwrap` finds the true one."""

    def call():
        pass

    call.__wrapped__ = wrapped
    return call


builtins.__import__ = _import_without_searching
gc.freeze, gc.unfreeze = _nothing(gc.freeze), _nothing(gc.unfreeze)
